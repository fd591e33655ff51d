"""Heads that read states: what stands in which slot, training passes, brute-force checks of both attentions, files."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.nouns import IMAGE, TEXT
from draftsmith.core.states import StatesWanted
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.drafters.reading import (
    TEXT_STAGE,
    ReadingObjective,
    build_reading_head,
    likeliest_ids,
    load_reading_head,
    reading_head_like,
    reading_manifest,
    reading_shape,
    reading_training,
    save_reading_head,
    taps_of,
    wanted,
)
from draftsmith.models.drafters.reading.slots import base_positions, lay_out, with_gaps
from draftsmith.models.layer import HeadAttention, LayerShape, Rotary
from draftsmith.models.losses import list_mle
from pydantic import ValidationError
from reading_tiny import SETTINGS, config_of, states_batch, tables, text_config
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

# A picture between texts, two pictures, text alone; the trained answer at the end. Of unequal lengths.
ROWS = ("ttvvvttaaa", "tvvtvvvtaaaa", "ttttaaa")


def built(name: str, seed: int = 0, **changes):
    """(config, target, training in evaluation mode) with loud random weights."""
    config, target = config_of(**SETTINGS[name] | changes), tables(banned=(0, 1))
    torch.manual_seed(seed)
    ids = None
    if getattr(config, "draft_vocab_size", None):
        ids = likeliest_ids(torch.arange(44).float(), config.draft_vocab_size)
    head = build_reading_head(config, target.config, draft_ids=ids)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return config, target, reading_training(head, target, config).eval()


def batch_for(config, target, rows=ROWS, **more):
    return states_batch(rows, wanted(config, target.config), **more)


@torch.no_grad()
def outputs(training, batch):
    """Passes of a batch as {(row, slot): [W,D]} over text slots."""
    filled, positions = training.fill(batch)
    passes = torch.stack(training.passes(filled, positions, batch), 2)
    layout = filled.layout
    places = (layout.real & ~layout.visual).nonzero().tolist()
    return {(row, int(layout.index[row, n])): passes[row, n] for row, n in places}


# ---- training


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_do_not_see_each_other(name):
    """A batch is its rows one by one: padding, other rows' pictures and their numbers change nothing."""
    config, target, training = built(name)
    batch = batch_for(config, target)
    together, whole = outputs(training, batch), training(batch)
    total = 0.0
    for row in range(len(ROWS)):
        length = len(ROWS[row])
        pick = slice(row, row + 1)
        alone = replace(
            batch, ids=batch.ids[pick, :length], mask=batch.mask[pick, :length], modality=batch.modality[pick, :length],
            loss_mask=batch.loss_mask[pick, :length], positions=batch.positions[:, pick, :length],
            feature=batch.feature[pick, :length], seeds=batch.seeds[pick], sample_ids=batch.sample_ids[pick],
            layers={layer: states[pick, :length] for layer, states in batch.layers.items()},
        )  # fmt: skip
        found = outputs(training, alone)
        assert {slot for _, slot in found} == {slot for other, slot in together if other == row}
        for (_, slot), value in found.items():
            torch.testing.assert_close(value, together[row, slot], atol=2e-5, rtol=1e-5)
        total += training(alone).loss_sum.item()
    assert whole.loss_sum.item() == pytest.approx(total, rel=1e-4)
    assert int(whole.num_tokens) == batch.num_supervised == 10


@pytest.mark.parametrize("name", SETTINGS)
def test_states_that_are_not_kept_are_not_read(name):
    """A target keeps what `wanted` says: full states at all other places change nothing."""
    config, target, training = built(name)
    kept, everything = (batch_for(config, target, everything=value) for value in (False, True))
    assert not all(torch.equal(a, everything.layers[n]) for n, a in kept.layers.items()) or not kept.layers
    same = outputs(training, everything)
    for place, value in outputs(training, kept).items():
        torch.testing.assert_close(value, same[place])
    assert training(kept).loss_sum.item() == pytest.approx(training(everything).loss_sum.item())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rows", [ROWS, ("tttaaa",), ("ttvvvttttt",)], ids=["pictures", "text", "filler"])
def test_every_batch_touches_every_weight(name, rows):
    """Ranks whose batches differ must make the same calls, and a filler's gradient is zero, not missing."""
    config, target, training = built(name)
    training.train()
    called = []
    for module in training.head.modules():
        module.register_forward_hook(lambda module, *_: called.append(id(module)))
    loss = training(batch_for(config, target, rows, seed=3))
    loss.loss_sum.backward()
    gradients = {n: p.grad for n, p in training.head.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())
    if rows == ("ttvvvttttt",):
        assert loss.loss_sum.item() == 0 and int(loss.num_tokens) == 0
        assert all(float(g.abs().max()) == 0 for g in gradients.values())
    else:
        assert float(gradients["fc.weight"].abs().max()) > 0
    expected = len(called)
    training(batch_for(config, target, ("tttaaa", "tvttaa"), seed=3))
    assert len(called) == 2 * expected
    assert not target.embedding.requires_grad and {n for n, _ in training.parts()["head"]} == set(gradients)


@pytest.mark.parametrize("name", ["sparrow", "vispec", "eagle3-read"])
def test_it_learns(name):
    config, target, training = built(name)
    training.train()
    batch = batch_for(config, target)
    optimizer = torch.optim.Adam([p for _, p in training.parts()["head"]], lr=5e-3)
    losses = []
    for _ in range(20):
        step = training(batch)
        optimizer.zero_grad()
        step.loss_sum.backward()
        optimizer.step()
        losses.append(step.loss_sum.item())
    assert losses[-1] < 0.75 * losses[0]


def test_chunks_change_nothing():
    losses, gradients = [], []
    for name in ("sparrow", "eagle3-read"):
        for chunk in (1, 3, 100):
            config, target, training = built(name)
            objective = config.loss.model_copy(update={"chunk": chunk, "listmle": 0.1, "l1": 1.0})
            training = reading_training(training.head, target, config, objective).eval()
            step = training(batch_for(config, target))
            step.loss_sum.backward()
            losses.append(step.loss_sum.item())
            gradients.append(training.head.fc.weight.grad)
    for first in (0, 3):
        for other in (first + 1, first + 2):
            assert losses[other] == pytest.approx(losses[first], rel=1e-5)
            torch.testing.assert_close(gradients[other], gradients[first], atol=1e-4, rtol=1e-3)


def test_states_of_inference_mode_can_be_trained_on():
    config, target, training = built("sparrow")
    with torch.inference_mode():
        batch = batch_for(config, target)
    training.train()
    training(batch).loss_sum.backward()


# ---- passes, by brute force


@pytest.mark.parametrize("rule", ["after_text", "all"])
def test_a_further_pass_slot_by_slot(rule):
    """Each slot's input is built alone, from the last pass's output at the slot before it."""
    config, target, training = built("sparrow", mtp_steps=2, replace=rule)
    batch = batch_for(config, target, ROWS[:1])
    head, (row,) = training.head, ROWS[:1]
    slots = range(len(row) - 1)
    embeds, feature, middle = target.embedding[batch.ids[0]], batch.feature[0], batch.layers[4][0]
    visual = [row[j + 1] == "v" for j in slots]
    states = [feature[j] for j in slots]
    for number in range(3):
        inputs = [
            middle[j + 1] if visual[j] else head.fc(torch.cat([embeds[j + 1], states[j]])) for j in slots
        ]  # fmt: skip
        count = len(inputs)
        mask, rope = torch.ones(count, count).bool().tril(), head.rotary(torch.arange(count))
        out = head.layers[0](torch.stack(inputs)[None], rope, mask, None)[0]
        for j in slots:
            if not visual[j]:
                torch.testing.assert_close(outputs(training, batch)[0, j][number], out[j], atol=1e-5, rtol=1e-5)
        replaced = [j > 0 and (rule == "all" or not visual[j - 1]) for j in slots]
        states = [out[j - 1] if replaced[j] else feature[j] for j in slots]
    assert any(visual[j - 1] and not visual[j] for j in slots if j), "the two rules differ here"


@pytest.mark.parametrize("name", ["sparrow-ttt", "eagle3", "eagle3-middle"])
def test_ttt_passes_are_what_decoding_does(name):
    """Pass s at slot i: the cache holds true slots up to i - s, and a chain of s drafts reads its own outputs."""
    config, target, training = built(name, mtp_steps=3)
    batch, head = batch_for(config, target, ("ttvvttaaaa",)), training.head
    with torch.no_grad():
        filled, positions = training.fill(batch)
        true, layout = filled.fused(head), filled.layout
        found, count = outputs(training, batch), true.shape[1]
        for last, steps in itertools.product(range(count), (1, 2, 3)):
            chain = range(last - steps + 1, last + 1)
            if last - steps < 0 or bool(layout.visual[0, last - steps : last + 1].any()):
                continue
            if int(layout.index[0, last] - layout.index[0, last - steps]) != steps:
                continue  # a dropped picture stands between
            start = last - steps + 1
            cache = Cache(1, count)
            one = lambda part, places: part[:, places] if part is not None else None  # noqa: E731
            direct = None if filled.direct is None else tuple(part[:, :start] for part in filled.direct)
            out = head(
                filled.embeds[:, :start], true[:, :start], positions[:, :start],
                torch.ones(start, start).bool().tril(), cache, direct=direct,
            )  # fmt: skip
            cache.advance(start)
            state = out[:, -1:]
            for n in chain:
                seen = torch.ones(1, cache.length + 1).bool()
                state = head(one(filled.embeds, [n]), state, positions[:, n : n + 1], seen, cache)
                cache.advance(1)
            torch.testing.assert_close(state[0, 0], found[0, int(layout.index[0, last])][steps], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["sparrow", "eagle3-read"])
def test_training_asks_for_fast_attention(name, monkeypatch):
    """A plainly causal pass has no mask."""
    config, target, training = built(name)
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or attend(*a, **k))
    training(batch_for(config, target))
    masked = [call.get("attn_mask") is not None for call in calls]
    assert masked == ([False, False] if name == "sparrow" else [False, True])


@pytest.mark.parametrize(("device", "masked", "grouped"), [
    ("cpu", True, True), ("cpu", False, True), ("meta", True, False), ("meta", False, True),
])  # fmt: skip
def test_grouped_heads_beside_a_mask_are_repeated_off_the_cpu(device, masked, grouped, monkeypatch):
    """CUDA's fast kernels do not take both: it would keep [H,N,K] in float32."""
    with torch.device(device):
        attention = HeadAttention(LayerShape(8, 16, 16, num_heads=4, num_kv_heads=2, norm_eps=1e-5))
        states, rope = torch.zeros(1, 3, 16), torch.zeros(3, 2, 2)
        mask = torch.ones(3, 3, dtype=torch.bool) if masked else None
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append((a, k)) or attend(*a, **k))
    assert attention(states, rope, mask, None).shape == (1, 3, 16)
    (((_, key, _), asked),) = calls
    assert asked["enable_gqa"] == grouped and key.shape[1] == (2 if grouped else 4)


def test_full_and_ttt_differ_and_agree_on_the_first_pass():
    config, target, training = built("sparrow", mtp_steps=1)
    batch = batch_for(config, target)
    other = reading_training(training.head, target, config.model_copy(update={"mtp_attention": "ttt"})).eval()
    full, ttt = outputs(training, batch), outputs(other, batch)
    assert all(torch.allclose(full[k][0], ttt[k][0], atol=1e-5) for k in full)
    assert not all(torch.allclose(full[k][1], ttt[k][1], atol=1e-3) for k in full)


def test_eagle3s_layer_written_out():
    config, target, training = built("eagle3", mtp_steps=0)
    batch, w = batch_for(config, target, ("ttttaaa",)), dict(training.head.named_parameters())

    def norm(x, name):
        return F.rms_norm(x, (32,), w[name], 1e-6)

    with torch.no_grad():
        taps = torch.cat([batch.layers[layer][0, :-1] for layer in (2, 4, 5)], -1)
        state, embed = taps @ w["fc.weight"].T, target.embedding[batch.ids[0, 1:]]
        joined = torch.cat(
            [norm(embed, "midlayer.input_layernorm.weight"), norm(state, "midlayer.hidden_norm.weight")], -1
        )
        q, k, v = ((joined @ w[f"midlayer.self_attn.{n}_proj.weight"].T).view(6, -1, 8).transpose(0, 1) for n in "qkv")
        angle = torch.arange(6)[:, None] / 10000 ** (torch.arange(4) / 4)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        turn = lambda x: x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin  # noqa: E731
        mixed = F.scaled_dot_product_attention(
            turn(q), turn(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
        )
        state = state + mixed.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        inner = norm(state, "midlayer.post_attention_layernorm.weight")
        gate, up = (inner @ w[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        state = state + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    for slot in range(6):
        torch.testing.assert_close(outputs(training, batch)[0, slot][0], state[slot], atol=2e-5, rtol=1e-4)


# ---- losses


def test_list_mle_is_plackett_luce():
    """Minus the logarithm of the chance to draw the target's best tokens in their order, one after the other."""
    generator = torch.Generator().manual_seed(0)
    target, ours = (torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    target[0, 2] = ours[0, 2] = float("-inf")
    for row in range(3):
        best = [i for i in target[row].argsort(descending=True).tolist() if target[row, i].isfinite()][:4]
        chance = 1.0
        for place in range(4):
            left = ours[row, best[place:]].exp()
            chance *= float(left[0] / left.sum())
        assert float(list_mle(target, ours, 4)[row]) == pytest.approx(-torch.tensor(chance).log().item(), abs=1e-6)
    assert list_mle(target, ours, 50).isfinite().all(), "fewer tokens than asked for"


def test_eagle3_leaves_out_slots_that_its_vocabulary_cannot_say():
    config, target, training = built("eagle3-read", mtp_steps=0)
    batch = batch_for(config, target)
    ids = training.head.draft_ids
    assert ids.tolist() == list(range(24, 44)) and training.head.t2d.nonzero()[:, 0].tolist() == ids.tolist()
    with torch.no_grad():
        scores = target.scores(batch.feature)
        step = training(batch)
        filled, positions = training.fill(batch)
        (hidden,) = training.passes(filled, positions, batch)
        expected, kept = 0.0, 0
        for row, place in batch.loss_mask.nonzero().tolist():
            if int(scores[row, place].argmax()) not in ids.tolist():
                continue
            kept += 1
            p = scores[row, place][ids].softmax(-1)
            ours = training.head.lm_head(training.head.norm(hidden[row, place - 1]))
            expected -= float((p * ours.log_softmax(-1)).sum())
    assert 0 < kept < int(step.num_tokens) == 10
    assert step.loss_sum.item() == pytest.approx(expected, rel=1e-4)
    whole = training.head.vocabulary(ours)
    assert whole.shape == (44,) and whole[:24].isneginf().all() and torch.equal(whole[24:], ours)


def test_likeliest_ids():
    counts, never = torch.tensor([5, 0, 7, 7, 1]), torch.tensor([True, False, False, False, False])
    assert likeliest_ids(counts, 2).tolist() == [2, 3]
    assert likeliest_ids(counts, 3, never).tolist() == [2, 3, 4]
    with pytest.raises(UserError, match="draft_vocab_size is 5, and 4 ids can come"):
        likeliest_ids(counts, 5, never)


def test_weights_of_passes():
    config, target, training = built("eagle3", mtp_steps=2)
    assert training.weights == pytest.approx([1, 0.8, 0.64])
    assert (
        reading_training(training.head, target, config, ReadingObjective(token=1.0, mtp_steps=3)).weights == [0.25] * 4
    )
    assert reading_training(training.head, target, config, ReadingObjective(token=1.0, mtp_steps=0)).weights == [1.0]


def test_noise_is_eagles_and_a_rows_own():
    config, target, training = built("hivis", num_steps=0)
    training.train()
    seen = []
    training.head.fc.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0][..., 32:]))
    batch = batch_for(config, target, ("ttaaaa", "ttttttaaaaaa"))
    training(batch)
    training(replace(batch, **{
        n: getattr(batch, n)[1:] for n in ("ids", "mask", "loss_mask", "modality", "feature", "seeds")
    }, positions=batch.positions[:, 1:]))  # fmt: skip
    noise = seen[0][1] - batch.feature[1, :-1]
    assert float(noise.abs().max()) == pytest.approx(0.1 * 512 / 12, rel=0.02)
    assert float((seen[0][0] - batch.feature[0, :-1])[:5].abs().max()) == pytest.approx(0.1 * 512 / 6, rel=0.02)
    assert torch.equal(seen[2][0], seen[0][1])
    training.eval()
    training(batch)
    assert torch.equal(seen[-2][1], batch.feature[1, :-1])


# ---- slots and positions


def laid_out(row: str, visual: str, **more):
    modality = torch.tensor([[IMAGE if c == "v" else TEXT for c in row]])
    return lay_out(visual, modality, torch.ones_like(modality).bool(), **more)


@pytest.mark.parametrize(
    ("visual", "more", "expected"),
    [
        ("none", {}, [3, 4, 8, 9]),
        ("direct", {}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("compressed", {"num_vectors": 1}, [2, 3, 4, 7, 8, 9]),
        ("compressed", {"num_vectors": 9}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("direct", {"keep": torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()}, [0, 3, 4, 6, 8, 9]),
    ],
)
def test_which_slots_are_kept(visual, more, expected):
    layout = laid_out("tvvvttvvvtt", visual, **more)
    assert layout.index[0].tolist() == expected and layout.runs == ((0, 1, 4), (0, 6, 9))


def test_each_picture_has_its_vectors():
    """Two pictures in a row, which the published module cannot take: as if each were alone with the adaptor."""
    config, target, training = built("vispec")
    batch = batch_for(config, target, ("tvvtvvvvtaa",))
    filled, head = training.fill(batch)[0], training.head
    first, second = (head.imadpt(batch.layers[0][:, a:b], torch.ones(1, b - a).bool())[0] for a, b in ((1, 3), (4, 8)))
    index, image = filled.layout.index[0].tolist(), filled.image[0]
    for slot, expected in ((2, first[-1]), (7, second[-1]), (9, second[-1])):
        torch.testing.assert_close(image[index.index(slot)], expected)
    held = {slot: filled.direct[1][0, n] for n, slot in enumerate(index) if filled.layout.visual[0, n]}
    assert list(held) == [0, 1, 5, 6]
    for slot, expected in zip(held, (*first[:-1], *second[:-1]), strict=True):
        torch.testing.assert_close(held[slot], expected)
    before = training.fill(batch_for(config, target, ("ttvvtaa",)))[0]
    assert before.image[0, 0].abs().max().item() == 0


def test_a_prompt_that_begins_with_a_picture():
    layout = laid_out("vvtt", "compressed", num_vectors=1)
    assert layout.index[0].tolist() == [0, 1, 2] and layout.visual[0].tolist() == [True, False, False]
    assert laid_out("vvv", "none").real.tolist() == [[False]]


@pytest.mark.parametrize("visual", ["none", "direct", "compressed"])
def test_gaps(visual):
    layout = laid_out("ttvvvtvvvvtt", visual, num_vectors=1)
    flat = layout.index
    for gap in (0, 4, 100):
        moved = with_gaps(flat, layout, [gap])[0]
        # The text token between the pictures is that of slot 4, the one behind the last picture that of slot 9.
        between, behind = (int(moved[layout.index[0] == slot]) for slot in (4, 9))
        assert behind - between == gap + 1
        assert torch.equal(moved[layout.index[0] < 9], flat[0][layout.index[0] < 9])
        assert moved[-1] - behind == 1
    assert torch.equal(with_gaps(flat, layout, [4]), flat), "its own gap"
    assert torch.equal(with_gaps(flat, layout, [None]), flat)
    text = laid_out("tttt", visual)
    assert torch.equal(with_gaps(text.index, text, [50]), text.index)


def test_gaps_are_drawn_in_training_alone():
    config, target, training = built("sparrow", gap=1000)
    rows = ("ttvvttaa",) * 200
    batch = states_batch(rows, wanted(config, target.config))
    still = training.fill(batch)[1]
    assert torch.equal(still, torch.arange(7).expand(200, -1))
    training.train()
    gaps = training.fill(batch)[1][:, 3] - 1
    drawn = gaps[gaps != 2]
    assert 70 < len(drawn) < 130 and 300 < drawn.float().mean() < 700 and int(drawn.max()) <= 1000
    assert torch.equal(training.fill(batch)[1][:, 3] - 1, gaps), "from the rows' seeds"


def test_positions_in_training():
    row, target = "ttvvttaa", tables()
    for kind, positions, expected in (
        ("sparrow", "compact", list(range(7))),
        ("hivis", "compact", [0, 1, 2, 3, 4]),
        ("hivis", "flat", [0, 3, 4, 5, 6]),
    ):
        config = config_of(kind=kind, positions=positions)
        training = reading_training(build_reading_head(config, target.config), target, config).eval()
        assert training.fill(batch_for(config, target, (row,)))[1][0].tolist() == expected
    config = config_of(kind="hivis", positions="mrope")
    training = reading_training(build_reading_head(config, target.config), target, config).eval()
    batch = batch_for(config, target, (row,))
    turned = torch.tensor([[0, 1, 2, 2, 3, 4, 5, 6], [0, 1, 2, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 4, 5, 6]])[:, None]
    found = training.fill(replace(batch, positions=turned))[1]
    assert found.shape == (3, 1, 5) and found[2, 0].tolist() == [0, 3, 3, 4, 5]


def test_a_share_of_visual_slots_in_training():
    config, target, training = built("sparrow", train_visual_share=0.5)
    layout = training.fill(batch_for(config, target, ("t" + 10 * "v" + "ttaa",)))[0].layout
    assert int(layout.visual.sum()) == 5 and int(layout.real.sum()) == 9
    config, target, training = built("sparrow", train_visual_share=0.0)
    assert wanted(config, target.config).visual_layers == ()
    assert not training.fill(batch_for(config, target))[0].layout.visual.any()


def test_rotations_of_three_rows():
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 50, (3, 2, 5), generator=generator)
    for interleaved, library in ((False, qwen2_5.Qwen2_5_VLRotaryEmbedding), (True, qwen3.Qwen3VLTextRotaryEmbedding)):
        shape = LayerShape(8, 32, 8, 2, 2, 1e-6, mrope_section=(4, 2, 2), mrope_interleaved=interleaved)
        text = text_config(hidden=32, heads=2)
        text.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        text.head_dim = 16
        expected = library(text)(torch.zeros(1), positions)
        found = Rotary(shape)(positions)
        for part in (0, 1):
            whole = expected[part]
            if whole.dim() == 4:  # Qwen2.5-VL takes its blocks of the three later
                blocks = whole.split([4, 2, 2] * 2, dim=-1)
                whole = torch.cat([block[n % 3] for n, block in enumerate(blocks)], -1)
            torch.testing.assert_close(found[..., part], whole[..., :8], atol=1e-6, rtol=1e-5)


STRETCHED = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def stretched_text(kind, qwen=False, **more):
    text = text_config(qwen=qwen, hidden=64, heads=2)
    numbers = {"rope_type": kind, "rope_theta": 10000.0, **STRETCHED.get(kind, {}), **more}
    return type(text)(**text.to_dict() | {"rope_parameters": numbers, "max_position_embeddings": 512})


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_stretched_rotation_is_the_targets(kind):
    text, positions = stretched_text(kind), torch.tensor([[0, 1, 40, 63, 64, 500, 25000]])
    cos, sin = LlamaRotaryEmbedding(text)(torch.zeros(1), positions)
    shape = reading_shape(config_of(kind="msd"), text)
    found = Rotary(shape)(positions)
    torch.testing.assert_close(found, torch.stack([cos, sin], -1)[:, :, :16], atol=1e-6, rtol=1e-5)
    plain = reading_shape(config_of(kind="msd", rope="plain"), text)
    assert plain.rope_scaling is None and not torch.allclose(Rotary(plain)(positions), found, atol=0.1)
    assert LayerShape(**json.loads(json.dumps(shape.to_dict()))).differs_from(shape.to_dict()) is None
    assert plain.differs_from(shape.to_dict())[0] == "rope_scaling"


def test_a_stretched_rotation_of_three_rows():
    text = stretched_text("yarn", qwen=True, mrope_section=[8, 4, 4])
    positions = torch.randint(0, 500, (3, 1, 5), generator=torch.Generator().manual_seed(0))
    cos, sin = qwen2_5.Qwen2_5_VLRotaryEmbedding(text)(torch.zeros(1), positions)
    found = Rotary(reading_shape(config_of(kind="msd", positions="mrope"), text))(positions)
    for part, whole in enumerate((cos, sin)):
        if whole.dim() == 4:
            whole = torch.cat([b[n % 3] for n, b in enumerate(whole.split([8, 4, 4] * 2, dim=-1))], -1)
        torch.testing.assert_close(found[..., part], whole[..., :16], atol=1e-5, rtol=1e-5)


def test_rotations_that_a_layer_does_not_know():
    dynamic = stretched_text("dynamic", factor=2.0)
    assert reading_shape(config_of(kind="msd"), dynamic).rope_scaling is None, "plain, up to what it was trained for"
    long = stretched_text("longrope", factor=2.0, short_factor=[1.0] * 16, long_factor=[2.0] * 16)
    with pytest.raises(UserError, match=r"by longrope.*\n.*drafter.rope: plain"):
        reading_shape(config_of(kind="msd"), long)
    assert reading_shape(config_of(kind="msd", rope="plain"), long).rope_scaling is None


# ---- what is read, sizes


def test_what_each_kind_wants():
    text = text_config()
    of = lambda **settings: wanted(config_of(**settings), text)  # noqa: E731
    assert of(kind="sparrow") == StatesWanted(visual_layers=(4,))
    assert of(kind="sparrow", middle_layer=6, state=-2) == StatesWanted(text_layers=(7,), visual_layers=(6,))
    assert of(kind="sparrow", ivsb=False) == of(kind="msd") == of(kind="vispec") == StatesWanted(visual_layers=(0,))
    assert of(kind="hivis") == StatesWanted()
    assert of(kind="eagle") == StatesWanted(visual_layers=(0,), everywhere=True)
    assert of(kind="eagle", vata=True) == StatesWanted()
    assert of(kind="eagle3") == StatesWanted(text_layers=(2, 4, 5))
    assert of(kind="eagle3", visual_slots="middle") == StatesWanted(text_layers=(2, 4, 5), visual_layers=(4,))
    assert of(kind="eagle3", visual_slots="read", image="projected").everywhere
    taps = lambda **settings: taps_of(config_of(**settings), text)  # noqa: E731
    assert taps(kind="sparrow").layers == () and taps(kind="sparrow").feature
    assert taps(kind="sparrow", vata=False).layers == (4,) and taps(kind="msd", vata=True).layers == ()
    assert taps(kind="eagle3").layers == (2, 4, 5) and not taps(kind="eagle3").feature
    shared = taps(kind="msd", visual_share=0.5)
    assert (shared.prefill_attention, shared.attention_queries) == ((4,), "last")
    assert taps(kind="msd", visual_share=0.5, share_by="text", share_layer=1).attention_queries == "text"


def test_sizes_at_full_scale():
    """Trainable parameters for Qwen2.5-VL-7B: the target's grouped heads, or a key for each of them (ViSpec's)."""
    text = text_config(hidden=3584, heads=28, kv_heads=4, intermediate=18944, vocab=152064, layers=28)
    for settings, millions in (
        ({"kind": "sparrow"}, 258.7),
        ({"kind": "sparrow", "kv_heads": "mha"}, 280.8),
        ({"kind": "vispec"}, 345.0),
    ):
        config = config_of(**settings)
        with torch.device("meta"):
            head = build_reading_head(config, text)
        assert sum(p.numel() for p in head.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
        assert not any("embed" in n or "lm_head" in n for n, _ in head.named_parameters())
    with torch.device("meta"):
        head = build_reading_head(config_of(kind="eagle3", draft_vocab_size=32000), text, draft_ids=torch.arange(32000))
    assert head.lm_head.weight.shape == (32000, 3584) and head.midlayer.self_attn.q_proj.weight.shape == (3584, 7168)


def test_the_layer_mirrors_the_target():
    shape = reading_shape(config_of(kind="sparrow"), text_config())
    assert shape.qkv_bias and shape.input_norm and shape.num_kv_heads == 2 and not shape.mrope_section
    llama = reading_shape(config_of(kind="msd"), text_config(qwen=False))
    assert not llama.qkv_bias and not llama.input_norm and llama.rope_theta == 10000
    assert reading_shape(config_of(kind="msd"), text_config()).input_norm
    assert reading_shape(config_of(kind="vispec"), text_config()).num_kv_heads == 4
    assert reading_shape(config_of(kind="sparrow", qkv_bias=False), text_config()).qkv_bias is False
    three = reading_shape(config_of(kind="sparrow"), qwen3.Qwen3VLTextConfig(
        hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16))  # fmt: skip
    assert three.head_dim == 16 and three.qk_rms_norm and not three.qkv_bias
    assert reading_shape(config_of(kind="eagle3"), text_config()).attention_input == 64


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"positions: mrope, and the target \(llama\) has no M-RoPE"):
        reading_shape(config_of(kind="sparrow", positions="mrope"), text_config(qwen=False))
    with pytest.raises(UserError, match=r"drafter\.taps"):
        wanted(config_of(kind="eagle3"), text_config(layers=4))
    with pytest.raises(UserError, match="middle_layer is 9, and the target has 8"):
        wanted(config_of(kind="sparrow", middle_layer=9), text_config())
    with pytest.raises(UserError, match="share_layer is 8"):
        taps_of(config_of(kind="msd", visual_share=0.5, share_layer=8), text_config())
    with pytest.raises(ValidationError, match="no term has a weight"):
        ReadingObjective()
    with pytest.raises(ValidationError, match="this head's are its own"):
        config_of(kind="eagle3", objective={"feature": 1.0})
    with pytest.raises(ValidationError, match="ascending"):
        config_of(kind="eagle3", taps=(4, 2, 5))
    with pytest.raises(ValidationError, match="vata"):
        config_of(kind="hivis", vata=False)


# ---- files


def saved(name, folder, **more):
    config, target, training = built(name)
    manifest = reading_manifest(
        config, target.config, target={"path": "org/model", "revision": "a"}, tokenizer_sha256="t", **more
    )  # fmt: skip
    save_reading_head(training.head, folder, manifest)
    return config, target, training


@pytest.mark.parametrize("name", SETTINGS)
def test_round_trip(name, tmp_path):
    config, target, training = saved(name, tmp_path, step=7)
    head = load_reading_head(config, tmp_path, target, torch.float32, named={"path": "org/model"}, tokenizer_sha256="t")
    state = training.head.state_dict()
    assert head.state_dict().keys() == state.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert all(torch.equal(value, state[n]) for n, value in head.state_dict().items())
    assert not any("embed" in n for n in state)
    batch = batch_for(config, target)
    assert float(reading_training(head, target, config).eval()(batch).loss_sum) == float(training(batch).loss_sum)
    copy = reading_head_like(head, state)
    assert all(torch.equal(value, state[n]) for n, value in copy.state_dict().items())
    assert json.loads((tmp_path / "draftsmith.json").read_text())["step"] == 7


def test_the_manifest_says_what_was_read(tmp_path):
    saved("sparrow", tmp_path)
    manifest = json.loads((tmp_path / "draftsmith.json").read_text())
    assert manifest["reads"]["state"] == "feature" and manifest["reads"]["visual_layer"] == 4
    assert manifest["reads"]["visual_slots"] == "direct" and "0 is the embedding" in manifest["reads"]["numbering"]
    assert manifest["positions"] == {"kind": "compact", "gap_share": 0.5, "gap": 32768}
    assert manifest["tokenizer_sha256"] == "t" and manifest["target"]["revision"] == "a"
    saved("eagle3-middle", tmp_path / "b")
    reads = json.loads((tmp_path / "b" / "draftsmith.json").read_text())["reads"]
    assert (reads["state"], reads["visual_embedding"]) == ([2, 4, 5], "projected")


@pytest.mark.parametrize(
    ("changes", "more", "says"),
    [
        ({"middle_layer": 5}, {}, "visual_layer is 4, expected 5"),
        ({"state": -2}, {}, r"state is feature, expected \[7\]"),
        ({"ivsb": False}, {}, "ivsb is True, expected False"),
        ({"input_norm": False}, {}, "input_norm is True, expected False"),
        ({}, {"tokenizer_sha256": "other"}, "tokenizer_sha256 is t, expected other"),
        ({}, {"named": {"path": "org/another"}}, "target.path is org/model, expected org/another"),
        ({}, {"named": {"path": "org/model", "revision": "b"}}, "target.revision is a, expected b"),
    ],
)
def test_a_head_of_another_making_is_refused(changes, more, says, tmp_path):
    _, target, _ = saved("sparrow", tmp_path)
    config = config_of(**SETTINGS["sparrow"] | changes)
    with pytest.raises(UserError, match=says):
        load_reading_head(config, tmp_path, target, torch.float32, **more)


def test_settings_of_decoding_may_differ(tmp_path):
    _, target, _ = saved("sparrow", tmp_path)
    for changes in (
        {"vata": False},
        {"positions": "flat"},
        {"positions": "mrope"},
        {"visual_share": 0.5, "vata": False},
    ):
        load_reading_head(config_of(**SETTINGS["sparrow"] | changes), tmp_path, target, torch.float32)


def test_published_files(tmp_path):
    """No manifest, the target's rows beside the head; other rows, another kind and a cut file are refused."""
    config, target, training = built("vispec", num_queries=2)
    state = training.head.state_dict()
    save_file(state | {"embed_tokens.weight": target.embedding.clone()}, tmp_path / "model.safetensors")
    head = load_reading_head(config, tmp_path, target, torch.float32)
    assert all(torch.equal(value, state[n]) for n, value in head.state_dict().items())
    with pytest.raises(UserError, match=r"img_fc|imadpt"):
        load_reading_head(config_of(kind="msd", kv_heads="mha", input_norm=False), tmp_path, target, torch.float32)
    save_file(state | {"embed_tokens.weight": target.embedding + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="embeddings that are not the target's"):
        load_reading_head(config, tmp_path, target, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="unreadable weights"):
        load_reading_head(config, tmp_path, target, torch.float32)


def test_a_reduced_vocabulary_that_the_file_has_not(tmp_path):
    config, target, training = built("eagle3-read")
    state = {name: value for name, value in training.head.state_dict().items() if name not in ("d2t", "t2d")}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"d2t is missing.*lm_head.weight is \[20, 32\], expected \[44, 32\]"):
        load_reading_head(config, tmp_path, target, torch.float32)


def test_a_published_head_turns_as_its_config_says(tmp_path):
    """Weights do not tell: a head that was trained plainly would be turned as its target, and draft badly."""
    target = tables(qwen=False, hidden=64, heads=2)
    target.config = stretched_text("llama3")
    config = config_of(kind="eagle")
    save_file(build_reading_head(config, target.config).state_dict(), tmp_path / "model.safetensors")
    for said, taken, refused in (
        ({"rope_scaling": None}, "plain", "target"),
        ({"rope_scaling": {"rope_type": "llama3", **STRETCHED["llama3"]}}, "target", "plain"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(said | {"max_position_embeddings": 512}))
        load_reading_head(config.model_copy(update={"rope": taken}), tmp_path, target, torch.float32)
        with pytest.raises(UserError, match=r"its rotation \(drafter.rope\) is"):
            load_reading_head(config.model_copy(update={"rope": refused}), tmp_path, target, torch.float32)


def test_the_second_stage_starts_where_the_first_ended(tmp_path):
    """On text, a head of stage 1 in stage 2's settings does what it did, to the last bit."""
    config, target, training = built("sparrow")
    first = reading_training(training.head, target, config, TEXT_STAGE).eval()
    save_reading_head(training.head, tmp_path, reading_manifest(config, target.config, target={}))
    head = load_reading_head(config, tmp_path, target, torch.float32)
    second = reading_training(head, target, config).eval()
    batch = batch_for(config, target, ("tttaaa", "ttaaaa"))
    assert (first.num_passes, second.num_passes) == (1, 2)
    before, after = outputs(first, batch), outputs(second, batch)
    assert all(torch.equal(before[k][0], after[k][0]) for k in before)


def test_positions_of_a_window_are_compact_for_any_picture():
    short, long = (laid_out("tt" + n * "v" + "ttt", "none") for n in (1, 50))
    for layout in (short, long):
        assert base_positions("compact", layout, None, visual_held=True)[0].tolist() == [0, 1, 2, 3]
