"""DFlash drafts: the published semantics written out place by place, training against decoding, an oracle, files."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from decodings import greedy
from dflash_tiny import ROWS, SMALL, draft, rows_of
from draftsmith.core.batch import Request
from draftsmith.core.errors import Refused
from draftsmith.core.states import Taps
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Product, Static
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dflash_module import even_taps
from draftsmith.models.drafters.dflash_settings import DflashLoss
from draftsmith.models.drafters.dflash_training import draw_blocks
from draftsmith.models.drafters.head_draws import is_blind
from draftsmith.models.fast import causal_blocks
from draftsmith.models.losses import divergence
from fails import fails_with
from family_checks import longer
from heads_tiny import config_of, tables, text_config
from tensors import check_gradients, check_travels, gradients_of, learn, unchanged
from tiny import IMAGE_ID, llava
from tiny import request as ask
from tiny import target as language
from tiny_qwen import batch_of
from torch.nn import functional as F

KINDS = {
    "a trained mask": {},
    "an id of the target for a mask": {"mask_token_id": 61},
    "a window": {"sliding_window": 6},
    "a window of a block": {"sliding_window": 5},
    "causal blocks": {"causal": True},
    "causal blocks within a window": {"causal": True, "sliding_window": 6},
    "some of the vocabulary": {"draft_vocab_size": 30},
    "text alone": {"visual_slots": "none", "positions": "compact"},
    "text alone, places of the prompt": {"visual_slots": "none"},
    "one layer, one tap": {"num_layers": 1, "taps": None},
}


def norm(x, gain, eps=1e-6):
    return x / (sum(v * v for v in x) / len(x) + eps).sqrt() * gain


def turned(x, position, theta=10000.0):
    """One head [E], turned as a Llama turns it."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position / theta ** (i / half))
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def reference(config, head, big, states, places, first, start):
    """[K,V] scores of a block: published semantics, one place and one attention head at a time.

    Args:
        states: [C,J*D] of the tokens before, at positions `places`.
        first: the token that the block begins with, at position `start`.
    """
    w, shape = dict(head.named_parameters()), head.shape
    layer, width = shape.layer, shape.layer.hidden_size
    mask = big.embedding[config.mask_token_id] if config.mask_token_id is not None else w["mask_embedding"]
    context = [norm(w["fc.weight"] @ state, w["hidden_norm.weight"]) for state in states]
    block = [big.embedding[first], *[mask] * (config.block_size - 1)]
    queries = [start + i for i in range(config.block_size)]
    for number in range(shape.num_layers):
        p = {name.removeprefix(f"layers.{number}."): value for name, value in w.items()}
        normed = [norm(x, p["input_layernorm.weight"]) for x in block]
        keys, values = [], []
        for x, position in zip([*context, *normed], [*places, *queries], strict=True):
            k = (p["self_attn.k_proj.weight"] @ x).view(layer.num_kv_heads, -1)
            keys.append([turned(norm(one, p["self_attn.k_norm.weight"]), position) for one in k])
            values.append((p["self_attn.v_proj.weight"] @ x).view(layer.num_kv_heads, -1))
        after = []
        for i, (x, n) in enumerate(zip(block, normed, strict=True)):
            q, mixed = (p["self_attn.q_proj.weight"] @ n).view(layer.num_heads, -1), []
            seen = range(len(keys))
            if config.sliding_window is not None:
                seen = [j for j in seen if j >= len(context) or len(context) + i - j < config.sliding_window]
            if config.causal:
                seen = [j for j in seen if j <= len(context) + i]
            for h in range(layer.num_heads):
                shared = h * layer.num_kv_heads // layer.num_heads
                one = turned(norm(q[h], p["self_attn.q_norm.weight"]), queries[i])
                weights = torch.stack([one @ keys[j][shared] for j in seen]) / layer.head_dim**0.5
                weights = weights.softmax(0)
                mixed.append(sum(a * values[j][shared] for a, j in zip(weights, seen, strict=True)))
            y = x + p["self_attn.o_proj.weight"] @ torch.cat(mixed)
            inner = norm(y, p["post_attention_layernorm.weight"])
            gate = F.silu(p["mlp.gate_proj.weight"] @ inner) * (p["mlp.up_proj.weight"] @ inner)
            after.append(y + p["mlp.down_proj.weight"] @ gate)
        block = after
    out = torch.stack([norm(x, w["norm.weight"]) for x in block[1:]])
    assert out.shape == (config.block_size - 1, width)
    if config.draft_vocab_size is None:
        return big.scores(out)
    whole = torch.full((len(out), big.vocab_size), -math.inf)
    whole[:, head.draft_ids] = out @ w["lm_head.weight"].T
    return whole


def held(config, modality, count):
    """Which of the first `count` tokens a block sees, and at which positions; the position after them."""
    kept = [i for i in range(count) if config.visual_slots == "read" or modality[i] == 0]
    places = kept if config.positions == "flat" else [*range(len(kept))]
    return kept, places, count if config.positions == "flat" else len(kept)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_a_decoding_are_those_of_the_reference(big, name):
    """Two pictures in the prompt; every block of a decoding, after longer and shorter accepted runs."""
    config, head = draft(big, **KINDS[name])
    asked, drafter = ask(3, 2), config.drafter(head, big)
    ids = torch.cat([asked.ids, torch.tensor(generate(big, None, asked, greedy(Chain(1), 20)).tokens)])
    modality = F.pad(asked.modality, (0, 20)).tolist()
    _, step = big.prefill(Request(ids, F.pad(asked.modality, (0, 20)), asked.pixels), drafter.taps, capacity=1)
    states = torch.cat([step.layers[tap] for tap in drafter.taps.text_layers], -1)[0]
    _, prefill = big.prefill(asked, drafter.taps, capacity=40)
    warp, count = Warp(1.0), len(asked.ids)
    drafter.start(asked, prefill, warp, capacity=40)
    drafter.begin(int(ids[count]))
    for accepted in (0, 3, 1, 4, 0):
        q = [drafter.root(), *(drafter.expand((level - 1,), ids[:1])[0] for level in range(3))]
        kept, places, start = held(config, modality, count)
        expected = reference(config, head, big, states[kept], places, int(ids[count]), start).softmax(-1)
        torch.testing.assert_close(torch.stack(q), expected, atol=2e-5, rtol=1e-4)
        assert drafter.num_held == len(kept)
        layers = {tap: step.layers[tap][:, count : count + accepted + 1] for tap in drafter.taps.text_layers}
        count += accepted + 1
        drafter.accept(SimpleNamespace(step=SimpleNamespace(layers=layers), tokens=[], bonus=int(ids[count])))


def test_a_long_prompt_is_read_in_pieces(big, monkeypatch):
    config, head = draft(big, vata=True)
    asked = ask(3, 2)
    whole = generate(big, config.drafter(head, big), asked, greedy(Chain(4), 20))
    monkeypatch.setattr("draftsmith.models.drafters.dflash_proposal.PIECE", 3)
    pieces = generate(big, config.drafter(head, big), asked, greedy(Chain(4), 20))
    assert [c.num_accepted for c in pieces.cycles] == [c.num_accepted for c in whole.cycles]
    assert pieces.tokens == whole.tokens


# ---- training


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_by_hand(big, name, kind):
    """Each block by the reference, from the states before its anchor alone; gradients as well."""
    config, head = draft(big, **KINDS[name], loss={"token_divergence": kind, "gamma": 2.0, "chunk": 3})
    batch, states = rows_of(big, *ROWS)
    actual = config.training_objective(head, big)(batch, states)
    found = gradients_of(actual.loss_sum, head)
    weights = [math.exp(-k / 2) for k in range(4)]
    joined = torch.cat([states.layers[tap] for tap in head.shape.taps], -1)
    total, sums, ids = 0.0, {"top1": 0.0, "top3": 0.0, "accepted": 0.0}, head.draft_ids
    for row, marks in enumerate(batch.sample_ids):
        anchors = [i for i in range(1, len(marks) - 1) if marks[i : i + 2] == "aa"]
        for anchor in anchors:
            share, run = marks[1:].count("a") / len(anchors), 0
            kept, places, start = held(config, batch.modality[row].tolist(), anchor)
            scores = reference(config, head, big, joined[row, kept], places, int(batch.ids[row, anchor]), start)
            for k in range(4):
                goal = anchor + 1 + k
                if goal >= len(marks) or set(marks[anchor : goal + 1]) != {"a"}:
                    break
                there = big.scores(states.feature[row, goal - 1])
                right = int(batch.ids[row, goal]) if kind == "ce" else int(there.argmax())
                known = ids is None or right in ids.tolist()
                ours, theirs = (scores[k], there) if ids is None else (scores[k, ids], there[ids])
                if known:
                    far = F.cross_entropy(scores[k], torch.tensor(right))
                    far = far if kind == "ce" else divergence(kind, theirs[None], ours[None])[0]
                    total = total + share * weights[k] / sum(weights) * far
                rank = int((scores[k] > scores[k, right]).sum()) if known else 99
                if k == 0:
                    sums["top1"] += share * (rank == 0)
                    sums["top3"] += share * (rank < 3)
                run = run + 1 if rank == 0 and run == k else run
            sums["accepted"] += share * run
    torch.testing.assert_close(actual.loss_sum, total.detach(), rtol=1e-4, atol=1e-4)
    check_gradients(found, total, head)
    assert int(actual.num_tokens) == batch.num_supervised
    for n, value in sums.items():
        assert float(actual.metrics[n]) == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_blocks_do_not_see_each_other_nor_states_behind_their_anchor(big, monkeypatch):
    """With all anchors taken, blocks overlap: states of one block's answer stand in another's past (the leak that
    sgl-project/SpecForge#470 reports). Chunks of blocks change nothing.
    """
    config, head = draft(big)
    batch, states = rows_of(big, "tttaaaaaaaa")
    training = config.training_objective(head, big).eval()
    blocks = draw_blocks(batch.loss_mask, (), 512, 4)
    assert blocks.anchors.tolist() == [[*range(3, 10)]] and blocks.lengths.tolist() == [[4, 4, 4, 4, 3, 2, 1]]
    with torch.no_grad():
        outputs = training.outputs(training.sequences(batch, states), states, blocks).unflatten(1, (7, 5))
        for number, anchor in enumerate(range(3, 10)):
            layers = {k: v.clone() for k, v in states.layers.items()}
            for value in layers.values():
                value[:, anchor:] = 100.0
            ids = batch.ids.clone()
            ids[:, anchor + 1 :] = 9
            other = replace(states, layers=layers)
            changed = training.outputs(training.sequences(replace(batch, ids=ids), other), other, blocks)
            changed = changed.unflatten(1, (7, 5))
            torch.testing.assert_close(changed[:, : number + 1], outputs[:, : number + 1], atol=1e-5, rtol=1e-4)
            assert number == 6 or (changed[:, number + 1 :] - outputs[:, number + 1 :]).abs().amin((0, 2, 3)).max() > 0
        monkeypatch.setattr(causal_blocks, "BLOCKS_ON_CPU", 3)
        again = training.outputs(training.sequences(batch, states), states, blocks).unflatten(1, (7, 5))
    torch.testing.assert_close(again, outputs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"sliding_window": 5}, {"blind_share": 0.5}, {"sliding_window": 5, "visual_slots": "none"},
                 {"sliding_window": 5, "causal": True}],
)  # fmt: skip
def test_pieces_of_blocks_change_no_loss_and_no_gradient(big, monkeypatch, settings):
    """Of rows of two lengths, so that the last pieces of one are of padding alone; with windows and hidden pictures."""
    config, head = draft(big, **settings)
    batch, states = rows_of(big, "tvvvtaaaaaaaaaaa", "ttvvvtaaa", "taaaaaaa", seeds=(0, 1, 2))
    found = []
    for size in (1, 3, 64, 0):
        monkeypatch.setenv("DRAFTSMITH_FAST", "1" if size else "0")
        monkeypatch.setattr(causal_blocks, "BLOCKS_ON_CPU", size)
        loss = config.training_objective(head, big).eval()(batch, states).loss_sum
        found.append((loss, *torch.autograd.grad(loss, [*head.parameters()], allow_unused=True)))
    for others in zip(*found[1:], found[0], strict=True):
        for one in others[:-1]:
            torch.testing.assert_close(one, others[-1], atol=1e-5, rtol=1e-4)


def test_anchors_are_drawn_from_the_seed_of_a_row():
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[:, 10:] = True
    mask[2] = False
    drawn = draw_blocks(mask, (5, 6, 7), 4, 15)
    assert drawn.anchors.shape == (3, 4) and not drawn.lengths[2].any() and float(drawn.share[2]) == 0
    assert drawn.anchors[0].tolist() != drawn.anchors[1].tolist()
    assert drawn.share.tolist() == [30 / 4, 30 / 4, 0.0]
    for row in (0, 1):
        places = drawn.anchors[row].tolist()
        assert places == sorted(set(places)) and min(places) >= 10 and max(places) < 39
        assert drawn.lengths[row].tolist() == [min(15, 39 - place) for place in places]
    alone = draw_blocks(mask[1:2], (6,), 4, 15)
    assert torch.equal(alone.anchors[0], drawn.anchors[1]), "other rows change nothing"
    seen = {place for seed in range(60) for place in draw_blocks(mask[:1], (seed,), 4, 15).anchors[0].tolist()}
    assert seen == {*range(10, 39)}, "every token of the answer may be an anchor, but the last"
    assert draw_blocks(mask[:1, :10], (1,), 4, 15).lengths.tolist() == [[0]], "a batch without any has one empty block"


def test_a_state_that_scores_places_of_several_blocks_is_scored_once(big, monkeypatch):
    config, head = draft(big, loss={"token_divergence": "kl"})
    batch, states = rows_of(big, "ttaaaaaaaa")
    own, counted = big.scores, []

    def scores(features):
        if not torch.is_grad_enabled():
            counted.append(len(features))
        return own(features)

    monkeypatch.setattr(type(big), "scores", property(lambda _: scores))
    config.training_objective(head, big)(batch, states).loss_sum.backward()
    assert counted == [7], "of the states from the first anchor to the last but one token"


def test_fewer_anchors_are_the_same_in_the_mean(big):
    """Each drawn block counts for more: over many seeds the loss is that of all blocks."""
    config, head = draft(big, loss={"num_anchors": 2})
    batch, states = rows_of(big, "ttaaaaaa", "taaaaaaa")
    with torch.no_grad():
        some = config.training_objective(head, big).eval()
        losses = [float(some(replace(batch, seeds=(seed, -seed)), states).loss_sum) for seed in range(1, 301)]
        whole = DflashConfig.model_validate(SMALL).training_objective(head, big)(batch, states)
    mean = sum(losses) / len(losses)
    spread = (sum((x - mean) ** 2 for x in losses) / len(losses) ** 2) ** 0.5
    assert spread > 0 and abs(mean - float(whole.loss_sum)) < 4 * spread


def test_blind_samples_see_no_picture(big):
    seeds = tuple(range(6))
    blind = [is_blind(seed, 0.5) for seed in seeds]
    assert 0 < sum(blind) < 6
    config, head = draft(big, blind_share=0.5)
    batch, states = rows_of(big, *["ttvvvtaaaa"] * 6, seeds=seeds)
    training = config.training_objective(head, big)
    layers = {k: v.clone() for k, v in states.layers.items()}
    for value in layers.values():
        value[:, 2:5] += 1.0
    blocks = draw_blocks(batch.loss_mask, seeds, 512, 4)
    with torch.no_grad():
        one, two = (
            training.outputs(training.sequences(batch, states), replace(states, layers=x), blocks)
            for x in (states.layers, layers)
        )
    assert [bool(torch.equal(a, b)) for a, b in zip(one, two, strict=True)] == blind


def test_batches_without_a_block_make_the_same_calls(big):
    """Ranks whose answers have one token, or that supervise nothing, still touch every weight."""
    calls = []
    for rows in (("tta",), ("ttt",), ("ttaaaaa", "ta")):
        config, head = draft(big)
        calls.append(called := [])
        for name, module in head.named_modules():
            module.register_forward_hook(lambda *_, name=name, called=called: called.append(name))
        batch, states = rows_of(big, *rows)
        loss = config.training_objective(head, big)(batch, states)
        loss.loss_sum.backward()
        assert all(weight.grad is not None for weight in head.parameters())
        assert (float(loss.loss_sum.detach()) > 0) == (rows[0] == "ttaaaaa")
        assert loss.metrics.keys() == {"top1", "top3", "accepted"}
    assert calls[0] == calls[1] == calls[2]
    assert len({*calls[0]}) == len([*head.named_modules()]) - 1, "all but the list of layers"


def test_a_short_training_learns_to_repeat_the_target(big):
    """On the target's own answers, and the target's weights stay what they were."""
    config = DflashConfig.model_validate(SMALL)
    asked = [ask(seed, 1) for seed in range(4)]
    answers = [generate(big, None, one, greedy(Chain(1), 14)).tokens for one in asked]
    torch.manual_seed(0)
    head = config.build(big)
    batch = batch_of(*map(longer, asked, answers), image_size=16, last=14)
    with torch.no_grad():
        states = big.states(batch, config.taps_for(big.shape, training=True))
    with unchanged(big.decoder.model):
        training = config.training_objective(head, big)
        losses = learn(training, replace(batch, seeds=(0, 1, 2, 3)), states, steps=60, lr=3e-3, mean=True)
    assert losses[-1] < 0.2 * losses[0]
    accepted = 0
    for one, answer in zip(asked, answers, strict=True):
        result = generate(big, config.drafter(head, big), one, greedy(Chain(4), 14))
        assert result.tokens == answer
        accepted += sum(c.num_accepted for c in result.cycles) / sum(c.num_drafted for c in result.cycles)
    assert accepted / 4 > 0.7, "what training says of a block is what decoding does"


def test_weights_of_places():
    assert DflashLoss().weights(16) == pytest.approx(
        [math.exp(-k / 7) / sum(math.exp(-j / 7) for j in range(15)) for k in range(15)]
    )
    for size, gamma in ((5, 4.0), (8, 4.0), (10, 5.0), (16, 7.0)):
        one = DflashLoss().weights(size)
        assert one[0] / one[1] == pytest.approx(math.exp(1 / gamma)) and sum(one) == pytest.approx(1)
    assert DflashLoss(gamma=1.0).weights(3)[0] == pytest.approx(1 / (1 + math.exp(-1)))


# ---- an oracle, settings, files


class Foresees:
    """In a proposal's place of a head: level i answers with the target's own scores i tokens on."""

    def __init__(self, proposal, big, asked, answer, late=0):
        self.proposal, self.late, self.done, self.answer = proposal, late, 0, answer
        self.taps, self.max_levels = proposal.taps, proposal.max_levels
        _, step = big.prefill(longer(asked, answer), Taps(feature=True), capacity=1)
        self.scores = big.scores(step.feature[0, len(asked.ids) - 1 :])
        proposal.head.draft_scores = lambda outputs, scores, dtype: self.truth(len(outputs))

    def truth(self, count):
        # The proposal's own count of what is committed says where the block stands.
        first = int(self.proposal._next - self.begun) + 1 - self.late
        return self.scores[[min(first + level, len(self.scores) - 1) for level in range(count)]]

    def __getattr__(self, name):
        return getattr(self.proposal, name)

    def start(self, *given, **more):
        self.proposal.start(*given, **more)
        self.begun = self.proposal._next


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize(
    "policy", [Chain(4), Static([(0,), (0, 0), (1,), (0, 0, 0)]), Product(9, 4, 3)], ids=["chain", "static", "product"]
)
def test_a_draft_that_is_right_is_accepted_at_every_level(images, policy):
    """Anything misplaced by one would show in the first cycle; a draft that answers one token late is not accepted."""
    big, asked = language(llava(1, layers=5)), ask(5, images)
    answer = generate(big, None, asked, greedy(Chain(1), 24)).tokens
    for late in (0, 1):
        config, head = draft(big)
        oracle = Foresees(config.drafter(head, big), big, asked, answer, late)
        result = generate(big, oracle, asked, greedy(policy, 16))
        assert result.tokens == answer[:16]
        whole = [cycle.num_accepted == cycle.num_drafted for cycle in result.cycles]
        assert all(whole) if not late else not all(whole)


def test_layers_that_are_joined():
    assert even_taps(36, 5) == (2, 10, 18, 26, 34), "z-lab's drafts of Qwen3-8B, whose ids are one less"
    assert even_taps(36, 1) == (19,) and even_taps(28, 5) == (2, 8, 14, 20, 26)
    shape = tables(layers=36).shape
    config = config_of(kind="dflash")
    assert config.taps_for(shape, training=False) == Taps((2, 10, 18, 26, 34))
    assert config.taps_for(shape, training=True) == Taps((2, 10, 18, 26, 34), feature=True, everywhere=True)


def test_the_layer_is_qwen3s_whatever_the_target_is():
    for qwen in (False, True):
        layer = config_of(kind="dflash", taps=[1]).shape(tables(qwen=qwen).shape).layer
        assert layer.qk_rms_norm and not layer.qkv_bias and not layer.mrope_section and layer.num_kv_heads == 2
    assert config_of(kind="dflash", taps=[1], kv_heads="mha").shape(tables().shape).layer.num_kv_heads == 4


@pytest.mark.parametrize(("settings", "says"), [
    ({"taps": [1, 9]}, "of a target of 8 are not"),
    ({"num_layers": 9}, "are not"),
    ({"mask_token_id": 44}, "the mask's id is 44, and the target has 44"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_target(settings, says):
    caught = fails_with(says, config_of(kind="dflash", **settings).check, tables().shape)
    assert "drafter." in str(caught)


def test_settings_that_nothing_reads():
    fails_with("ascending order", config_of, kind="dflash", taps=[2, 1], error=ValueError)
    with pytest.raises(ValueError, match="sliding_window is 15, shorter than a block of 16"):
        config_of(kind="dflash", sliding_window=15)
    with pytest.raises(Refused, match="every sample is blind"):
        config_of(kind="dflash", visual_slots="none", blind_share=0.5).check_settings(False)


def test_an_own_lm_head_begins_with_the_targets_rows(big):
    config = DflashConfig.model_validate(SMALL | {"draft_vocab_size": 30})
    head = config.build(big, count_tokens=lambda: torch.arange(big.vocab_size))
    assert head.draft_ids.tolist() == [i for i in range(60) if i != IMAGE_ID][-30:]
    hidden = torch.randn(3, 32)
    scores = head.draft_scores(hidden, big.scores, torch.float32)
    torch.testing.assert_close(scores[:, head.draft_ids], big.scores(hidden)[:, head.draft_ids], atol=1e-4, rtol=1e-4)
    assert int(scores.isfinite().sum()) == 90


@pytest.mark.parametrize("name", KINDS)
def test_drafts_travel(big, tmp_path, name):
    config, head = draft(big, **KINDS[name])
    check_travels(config, head, big, tmp_path, step=3)
    written = json.loads((tmp_path / "draftsmith.json").read_text())
    assert written["method"] == "dflash" and written["step"] == 3
    assert written["reads"]["state"] == list(head.shape.taps)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["dflash_config"]["target_layer_ids"] == [tap - 1 for tap in head.shape.taps]


@pytest.mark.parametrize(("changes", "says"), [
    ({"block_size": 6}, "block_size is 5, expected 6"),
    ({"taps": [1, 2, 3]}, r"taps is \[1, 2, 4\], expected \[1, 2, 3\]"),
    ({"num_layers": 1}, "num_layers is 2, expected 1"),
    ({"mask_token_id": 3}, "mask_token_id is None, expected 3"),
    ({"sliding_window": 9}, "sliding_window is None, expected 9"),
    ({"causal": True}, "causal is False, expected True"),
    ({"visual_slots": "none"}, "visual_slots is read, expected none"),
    ({"rope_theta": 5e5}, "rope_theta is 10000.0, expected 500000.0"),
    ({"kv_heads": "mha"}, "num_kv_heads"),
])  # fmt: skip
def test_drafts_of_other_settings_are_refused_by_name(big, tmp_path, changes, says):
    config, head = draft(big)
    config.save(head, tmp_path, config.manifest(big, TargetIdentity({"kind": "llava"})))
    caught = fails_with(says, DflashConfig.model_validate(SMALL | changes).load, tmp_path, big)
    assert str(tmp_path) in str(caught)


def test_a_published_folder_is_read(big, tmp_path):
    """Native layout: Qwen3's fields, ids one less than layers passed, no manifest, no LM head."""
    config, head = draft(big, mask_token_id=7)
    config.save(head, tmp_path, {})
    (tmp_path / "draftsmith.json").unlink()
    native = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 5,
        "intermediate_size": 64, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 3]},
        "sliding_window": None, "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(native))
    back = config.load(tmp_path, big)
    assert torch.equal(back.fc.weight, head.fc.weight)
    for changed, says in (
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2, 4]}}, r"taps is \[2, 3, 5\]"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, "causal within a sliding window"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}, "sliding_window is 9"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(native | changed))
        fails_with(says, config.load, tmp_path, big)


def test_the_rotation_of_the_target_is_copied_or_left():
    text = text_config(qwen=False)
    text.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    shape = replace(tables().shape, text=text)
    config = config_of(kind="dflash", taps=[1])
    assert config.shape(shape).layer.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    assert config.model_copy(update={"rope": "plain"}).shape(shape).layer.rope_scaling is None
