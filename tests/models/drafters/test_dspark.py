"""DSpark drafts: heads written out, losses by hand, rank 0 and the start are DFlash, pictures, settings and files."""

import copy
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_gemma
import torch
from decodings import as_plain
from dflash_tiny import ROWS, SMALL, decoded, draft, rows_of
from draftsmith.core.errors import Refused, UserError
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Product
from draftsmith.models.decoding.head_layer import turning
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dflash_module import Before
from draftsmith.models.drafters.dflash_training import above_next, draw_blocks
from draftsmith.models.drafters.dspark import DsparkConfig
from draftsmith.models.drafters.outside import load_start
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.dflash import whole_blocks
from draftsmith.models.formats.export import files_of
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.heads import import_head, load_published
from draftsmith.models.formats.source import Target, read_source
from draftsmith.models.losses import divergence
from draftsmith.models.targets.base import language_shape
from fails import fails_with
from heads_tiny import config_of
from published_tiny import block_folder, target_config, target_folder
from tensors import check_gradients, check_travels, gradients_of, loud, same_weights
from tiny import request as ask
from torch.nn import functional as F
from visual_tiny import code_batch, greedy, llamagen, plain, request, step_of, target

DSPARK = {"kind": "dspark", "markov_rank": 6}
KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "masks alone": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "some of the vocabulary": {"draft_vocab_size": 30, "markov_head_type": "gated"},
    "a confidence head": {"confidence": {"weight": 0.7}},
    "a confidence head of outputs alone": {"confidence": {"with_markov": False, "detached": True}},
}
PLAIN_CE = {"token_divergence": "ce", "weight": 1.0, "ce_weight": 0.0}  # DFlash's own
LOSSES = {
    "published": {},
    "kl": {"token_divergence": "kl", "weight": 1.0, "ce_weight": 0.0},
    "ce": {"token_divergence": "ce", "weight": 1.0, "ce_weight": 0.5},
}


def block_of(config):
    return 0 if config.sample_from_anchor else 1


def biases(head, tokens, outputs):
    """[K,V'] of one block, place by place: the heads as the paper's code computes them."""
    w, kind, state = dict(head.markov_head.named_parameters()), head.shape.markov_head_type, None
    found = []
    for token, output in zip(tokens, outputs, strict=True):
        e = w["markov_w1.weight"][token]
        factor = e
        if kind == "gated":
            x = torch.cat([output, e])
            factor = torch.sigmoid(w["gate_proj.weight"] @ x + w["gate_proj.bias"]) * e
        if kind == "rnn":
            state = torch.zeros_like(e) if state is None else state
            g, c, o = (w["joint_proj.weight"] @ torch.cat([state, e, output]) + w["joint_proj.bias"]).split(len(e))
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            factor = torch.tanh(o)
        found.append(w["markov_w2.weight"] @ factor)
    return torch.stack(found)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_by_hand(big, name, loss):
    """Over the backbone's outputs, which DFlash's tests compare with a reference."""
    config, head = draft(big, **DSPARK | KINDS[name], loss={"gamma": 2.0, "chunk": 3} | LOSSES[loss])
    batch, states = rows_of(big, *ROWS)
    training = config.training_objective(head, big)
    actual = training(batch, states)
    found = gradients_of(actual.loss_sum, head)
    count, first, ids = head.shape.num_drafts, block_of(config), head.draft_ids
    assert count == config.drafter(head, big).max_levels == (5 if config.sample_from_anchor else 4)
    rows = training.sequences(batch, states)
    blocks = draw_blocks(batch.loss_mask, batch.seeds, 512, count)
    outputs = training.outputs(rows, states, blocks).unflatten(1, (-1, config.block_size))[:, :, first:]
    decay = [math.exp(-k / 2) for k in range(count)]
    settings, total, accepted = config.loss, 0.0, 0.0
    for row, anchors in enumerate(blocks.anchors.tolist()):
        for block, anchor in enumerate(anchors):
            length = int(blocks.lengths[row, block])
            share, run = float(blocks.share[row]), 0
            tokens = batch.ids[row, anchor : anchor + length].tolist()
            bias = biases(head, tokens, outputs[row, block, :length]) if length else []
            for k in range(length):
                output, there = outputs[row, block, k], big.scores(states.feature[row, anchor + k])
                label = int(batch.ids[row, anchor + k + 1])
                ours = (big.scores(output) if ids is None else head.lm_head(output)) + bias[k]
                theirs = there if ids is None else there[ids]
                entries = range(big.vocab_size) if ids is None else ids.tolist()
                right = label if settings.token_divergence == "ce" else int(there.argmax())
                weight, one = share * decay[k] / sum(decay), 0.0
                if right in entries:
                    entry = torch.tensor([[*entries].index(right)])
                    far = F.cross_entropy(ours[None], entry)
                    if settings.token_divergence != "ce":
                        far = divergence(settings.token_divergence, theirs[None], ours[None])[0]
                    one = settings.weight * far
                if label in entries:
                    one = one + settings.ce_weight * F.cross_entropy(
                        ours[None], torch.tensor([[*entries].index(label)])
                    )  # fmt: skip
                if config.confidence is not None:
                    p, q = there.softmax(-1), ours.softmax(-1)
                    alpha = torch.minimum(p if ids is None else p[ids], q).sum().detach()
                    read = output.detach() if config.confidence.detached else output
                    if config.confidence.with_markov:
                        read = torch.cat([read, head.markov_head.markov_w1.weight[tokens[k]]])
                    logit = head.confidence_head.proj(read)[0]
                    one = one + config.confidence.weight * F.binary_cross_entropy_with_logits(logit, alpha)
                total = total + weight * one
                hit = right in entries and int(ours.argmax()) == [*entries].index(right)
                run = run + 1 if hit and run == k else run
            accepted += share * run
    torch.testing.assert_close(actual.loss_sum, total.detach(), rtol=1e-4, atol=1e-4)
    check_gradients(found, total, head)
    assert float(actual.metrics["accepted"]) == pytest.approx(accepted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["rank 0", "vanilla", "gated", "rnn"])
def test_rank_0_and_an_untrained_markov_head_are_dflash(big, kind):
    """Rank 0: losses, gradients and decoding to the last bit. Untrained: a warm start's first loss is DFlash's, and all
    that is new has a way to learn.
    """
    plain_config, dflash = draft(big)
    markov = {"markov_rank": 0} if kind == "rank 0" else {"markov_rank": 6, "markov_head_type": kind}
    config = DsparkConfig.model_validate(
        SMALL | {"kind": "dspark", "sample_from_anchor": False, "loss": PLAIN_CE} | markov
    )  # fmt: skip
    torch.manual_seed(0)
    head = config.build(big)
    head.load_state_dict(dflash.state_dict(), strict=kind == "rank 0")
    batch, states = rows_of(big, *ROWS)
    one, two = plain_config.training_objective(dflash, big), config.training_objective(head, big)
    losses = [training(batch, states).loss_sum for training in (one, two)]
    tolerance = 0 if kind == "rank 0" else 1e-6
    torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
    for loss in losses:
        loss.backward()
    if kind == "rank 0":
        for a, b in zip(dflash.parameters(), head.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    else:
        assert head.markov_head.markov_w2.weight.grad.any()
    sampled = [(Chain(4), Warp(1.0))] if kind == "rank 0" else []
    for policy, warp in ((Chain(4), None), (Product(9, 4, 3), None), *sampled):
        assert decoded(config, head, big, policy, warp) == decoded(plain_config, dflash, big, policy, warp)


def test_chances_are_read_along_the_likeliest_path(big):
    """What ends a block is known before any token is drawn."""
    config, head = draft(big, **DSPARK | {"confidence": {}, "cut_below": 0.3})
    seen, drafter = [], config.drafter(head, big)
    kept = head.confidence
    head.confidence = lambda outputs, before: seen.append(before.tokens.tolist()) or kept(outputs, before)
    result = generate(big, drafter, ask(3, 1), greedy(Chain(5), 16))
    assert len(seen) == len(result.cycles)
    whole = config.model_copy(update={"cut_below": None})
    drafts = []

    class Watched(Chain):
        def grow(self, root, expand, draw, *, max_levels):
            tree = super().grow(root, expand, draw, max_levels=max_levels)
            drafts.append(tree.tokens.tolist())
            return tree

    generate(big, whole.drafter(head, big), ask(3, 1), greedy(Watched(5), 16))
    assert seen[0][1:] == drafts[0][:4]


def test_a_short_training_learns_what_a_block_alone_cannot(big):
    """Pairs of tokens, of which the first is a coin and the second follows from it: a walk alone knows the second."""
    losses = {}
    batch, states = rows_of(big, *["ttaaaaaaaa"] * 8)
    for rank in (0, 16):
        config = DsparkConfig.model_validate(SMALL | {"kind": "dspark", "markov_rank": rank, "loss": PLAIN_CE})
        torch.manual_seed(0)
        head, losses[rank] = config.build(big), []
        training, optimizer = config.training_objective(head, big), torch.optim.AdamW(head.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(60):
            coins = torch.randint(6, 14, (8, 4, 1), generator=generator)
            ids = torch.cat([batch.ids[:, :2], torch.cat([coins, coins + 20], dim=2).flatten(1)], dim=1)
            found = training(replace(batch, ids=ids), states)
            optimizer.zero_grad()
            (found.loss_sum / found.num_tokens).backward()
            optimizer.step()
            losses[rank].append(float(found.loss_sum.detach() / found.num_tokens))
    assert sum(losses[16][-5:]) / 5 < sum(losses[0][-5:]) / 5 - 0.3, {n: x[-5:] for n, x in losses.items()}


# ---- image generators


def image_draft(big, **settings):
    config = DsparkConfig.model_validate(
        {"kind": "dspark", "block_size": 4, "num_layers": 1, "taps": [1], "markov_rank": 5} | settings
    )  # fmt: skip
    torch.manual_seed(0)
    head = config.build(big)
    loud(head)
    return config, head.requires_grad_(False)


IMAGES = {
    "left": {},
    "left and above": {"markov_above": True},
    "gated, above": {"markov_above": True, "markov_head_type": "gated", "sample_from_anchor": False},
    "rnn": {"markov_head_type": "rnn"},
}


@torch.no_grad()
@pytest.mark.parametrize("condition", ["class", "text"])
@pytest.mark.parametrize("name", IMAGES)
def test_a_pictures_walk_is_what_training_scores(name, condition):
    """Guided: the rows' own teacher-forced scores, joined as the generator joins its own."""
    big = target(llamagen(condition), 3.0 if condition == "text" else 1.0)
    config, head = image_draft(big, **IMAGES[name])
    asked = request(big.model, 3)
    codes = plain(big, asked)
    rows = big.guidance.num_rows
    made = code_batch(SimpleNamespace(config=SimpleNamespace(condition="class", num_classes=5)),
                      torch.tensor([codes] * rows))  # fmt: skip
    batch = replace(made, conditions=(asked.condition,) * rows, uncond=torch.tensor([False, True])[:rows])
    states = big.states(batch, config.taps_for(big.shape, training=True))
    training = config.training_objective(head, big).eval()
    sequences, count = training.sequences(batch, states), head.shape.num_drafts
    blocks = draw_blocks(sequences.loss_mask, batch.seeds, 512, count)
    outputs = training.outputs(sequences, states, blocks).unflatten(1, (-1, 4))[:, :, -count:]
    read, found = head.for_loss(outputs, sequences.before(blocks.anchors, count)), []
    training.lm(read.flatten(0, 2), lambda piece, ours: (found.append(ours), (ours.sum(), torch.zeros(())))[1])
    scores = torch.cat(found).unflatten(0, read.shape[:3])  # [R,A,K,V]

    drafter, warp = config.drafter(head, big), Warp(1.0)
    _, prefill = big.prefill(asked, drafter.taps, capacity=40)
    drafter.start(asked, prefill, warp, capacity=40)
    drafter.begin(codes[0])
    for done in range(len(codes) - 1):
        q, length = [drafter.root()], min(count, len(codes) - 1 - done)
        for place in range(1, length):
            q.append(drafter.expand([place - 2], torch.tensor([codes[done + place]]))[0])
        steps = range(done + 1, done + 1 + length)
        expected = warp.apply_temperature(big.guidance(scores[:, done, :length], steps))
        torch.testing.assert_close(torch.stack(q), expected, atol=2e-5, rtol=1e-4)
        layers = {1: states.layers[1][:, states.ids.shape[1] - len(codes) + done][:, None]}
        drafter.accept(SimpleNamespace(step=SimpleNamespace(layers=layers), tokens=[], bonus=codes[done + 1]))


def test_codes_above():
    """A condition of two places, then rows of three codes: what follows each place has this above it."""
    ids = torch.tensor([[90, 91, 10, 11, 12, 13, 14, 15, 16]])
    codes = torch.arange(9) >= 2
    assert above_next(ids, codes, 3).tolist() == [[-1, -1, -1, -1, 10, 11, 12, 13, 14]]


def test_the_code_above_is_read():
    """Another code above is another distribution; at the top row there is none."""
    big = target(llamagen("class"))
    head = image_draft(big, markov_above=True)[1]
    with torch.no_grad():
        one, two, none, also = (
            head.markov_head.embedded(Before(torch.tensor([3]), torch.tensor([above]))) for above in (4, 5, -1, -1)
        )
    assert not torch.equal(one, two) and not torch.equal(one, none) and torch.equal(none, also)
    assert torch.equal(none, head.markov_head.markov_w1.weight[3][None])


def test_pictures_are_the_targets_and_learnt():
    big = target(llamagen("text", loud=1.5), 3.0)
    config, head = image_draft(big, markov_above=True)
    batch = code_batch(big.model, torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0)))
    assert {*step_of(config.training_objective(head, big), big, batch).metrics} == {"top1", "top3", "accepted"}
    for seed in range(3):
        asked = request(big.model, seed)
        for policy in (Chain(4), Product(9, 4, 3)):
            assert generate(big, config.drafter(head, big), asked, greedy(policy, big.num_codes)).tokens == plain(
                big, asked
            )


# ---- settings and files


@pytest.mark.parametrize("name", KINDS)
def test_drafts_travel(big, tmp_path, name):
    config, head = draft(big, **DSPARK | KINDS[name])
    check_travels(config, head, big, tmp_path / "draft")
    for other in ({"markov_head_type": "vanilla" if "rnn" in str(KINDS[name]) else "rnn"}, {"markov_rank": 5},
                  {"sample_from_anchor": not config.sample_from_anchor}):  # fmt: skip
        changed = DsparkConfig.model_validate(config.model_dump() | other)
        fails_with(rf"{next(iter(other))} is .*, expected", changed.load, tmp_path / "draft", big)
    fails_with("method is dspark, expected dflash", DflashConfig.model_validate(SMALL).load, tmp_path / "draft", big)


def test_settings_that_contradict_each_other(big):
    fails_with("markov_rank is 0", DsparkConfig, kind="dspark", markov_rank=0, confidence={}, error=ValueError)
    fails_with("cut_below reads a confidence head", DsparkConfig, kind="dspark", cut_below=0.3, error=ValueError)
    above = DsparkConfig(kind="dspark", num_layers=1, taps=[1], markov_above=True)
    fails_with("markov_above", above.check_settings, draws_images=False, error=Refused)
    above.check_settings(draws_images=True)
    fails_with("a pass drafts 7 codes and a row has 4", above.check, target(llamagen("class")).shape)


@pytest.mark.parametrize("layout", ["ours", "native", "speculators"])
@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_a_dflash_draft_is_a_start(big, tmp_path, kind, layout):
    """Its first loss is DFlash's, whoever wrote the folder; what is new is untrained."""
    mask = {"mask_token_id": 61, "confidence": {} if layout == "ours" else None}
    plain_config, dflash = draft(big, **mask)
    identity, folder = TargetIdentity({"kind": "llava"}), tmp_path / "dflash"
    if layout == "ours":
        plain_config.save(dflash, folder, plain_config.manifest(big, identity))
    else:
        layer = {"num_hidden_layers": 2, "intermediate_size": dflash.shape.layer.intermediate_size}
        values = {"architectures": ["DFlashDraftModel"], "block_size": 5, **layer,
                  "dflash_config": {"mask_token_id": 61, "target_layer_ids": [0, 1, 3]}}  # fmt: skip
        if layout == "speculators":
            values = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "block_size": 5,
                      "mask_token_id": 61, "aux_hidden_state_layer_ids": [1, 2, 4]}  # fmt: skip
        write_folder(folder, values, dflash.state_dict())
    own = {"dspark": DSPARK | {"sample_from_anchor": False, "markov_head_type": "rnn", "loss": PLAIN_CE},
           "dflash2": {"kind": "dflash2", "conv_group_size": 8}}[kind]  # fmt: skip
    config = config_of(**SMALL | {"mask_token_id": 61} | own)
    head = load_start(config, folder, big, identity, load_published)
    batch, states = rows_of(big, *ROWS)
    without = plain_config.model_copy(update={"confidence": None})
    wanted = without.training_objective(dflash, big)(batch, states).loss_sum
    training = config.training_objective(head, big)
    if kind == "dflash2":
        training.further = lambda *_: (0.0, (torch.zeros(()),))
    torch.testing.assert_close(training(batch, states).loss_sum, wanted, rtol=1e-6, atol=1e-6)
    other = config_of(**SMALL | {"mask_token_id": 60} | own)
    fails_with("mask_token_id is 61, expected 60", load_start, other, folder, big, identity, load_published)


@pytest.mark.parametrize(
    "settings", [{}, {"markov_head_type": "rnn", "draft_vocab_size": 20, "sample_from_anchor": False},
                 {"markov_head_type": "gated", "confidence": {}}, {"confidence": {"with_markov": False}},
                 {"sliding_window": 16, "causal": True}],
)  # fmt: skip
def test_speculators_layout_comes_back_bit_for_bit(tmp_path, settings):
    beside, target = target_config(), target_folder(tmp_path / "target")
    section = {"kind": "dspark", "block_size": 4, "num_layers": 2, "taps": (2, 5), "mask_token_id": 41}
    config, shape = config_of(**section | {"markov_rank": 6} | settings), language_shape(beside.get_text_config())
    head = block_folder(tmp_path / "head", target, **section | {"markov_rank": 6} | settings)
    source = read_source(tmp_path / "head", Target(beside, "org/name"))
    check_expressible("speculators", source, "all")
    with pytest.raises(UserError, match="no layout for DSpark drafts that was read here; --to speculators has one"):
        check_expressible("vllm", source, "all")
    write_folder(tmp_path / "there", *files_of("speculators", source))
    values = json.loads((tmp_path / "there" / "config.json").read_text())
    assert values["architectures"] == ["DSparkSpeculator"] and values["markov_rank"] == 6
    assert values["sample_from_anchor"] is config.sample_from_anchor
    assert values["sliding_window_non_causal"] is not config.causal
    assert values["enable_confidence_head"] is (config.confidence is not None)
    kind = settings.get("markov_head_type", "vanilla")
    assert (f"loads no {kind} Markov head" in " ".join(whole_blocks(source)[1])) is (kind != "vanilla")
    back = import_head("dspark", str(tmp_path / "there"), beside.get_text_config(), embedding=None)
    assert back.config.shape(shape) == config.shape(shape)
    assert same_weights(head, back.head)
    with pytest.raises(UserError, match="a draft of kind dspark, and dflash is asked for"):
        import_head("dflash", str(tmp_path / "there"), beside.get_text_config(), embedding=None)


def test_deepspecs_layout_is_read(big, tmp_path):
    """Its keys stand at the top of config.json; it repeats the target's tables, and always drafts at the anchor."""
    config, head = draft(big, **DSPARK, mask_token_id=61, confidence={})
    values = {"architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 2, "block_size": 5, "markov_rank": 6,
              "intermediate_size": head.shape.layer.intermediate_size, "markov_head_type": "vanilla",
              "mask_token_id": 61, "target_layer_ids": [0, 1, 3], "enable_confidence_head": True,
              "confidence_head_with_markov": True, "layer_types": ["full_attention"] * 2}  # fmt: skip
    tables = {"embed_tokens.weight": torch.zeros(64, 32), "lm_head.weight": torch.zeros(64, 32)}
    write_folder(tmp_path / "theirs", values, head.state_dict() | tables)
    again = config.load(tmp_path / "theirs", big)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in head.state_dict().items())
    masks = DsparkConfig.model_validate(config.model_dump() | {"sample_from_anchor": False})
    fails_with("sample_from_anchor is True, expected False", masks.load, tmp_path / "theirs", big)


def test_gemmas_layers_are_transformers_own_and_draft_for_it(tmp_path):
    """Without a context a block is a sequence whose places all see each other, bit for bit. Its table is multiplied."""
    beside = tiny_gemma.target(model := tiny_gemma.model("large"))
    config = config_of(**DSPARK, target_layers=True, block_size=4, num_layers=2, taps=(1, 3), mask_token_id=0)
    head = config.build(beside)
    loud(head)
    taken, states = copy.deepcopy(model.model.language_model.layers[1]), torch.randn(2, 5, 32)
    assert not taken.load_state_dict(head.layers[1].state_dict(), strict=False).unexpected_keys
    taken.layer_scalar.fill_(1.0)
    places = torch.arange(3, 8)[None]
    rope = model.model.language_model.rotary_emb(states, places, "full_attention")
    seen = {"attention_mask": torch.zeros(1, 1, 5, 5), "position_ids": places, "shared_kv_states": {}}
    turn = turning(head.shape.layer, head.rotary(places.expand(2, -1)))
    attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    ours = head.layers[1](states, states[:, :0], turn, attend)
    assert torch.equal(ours, taken(states, position_embeddings=rope, **seen))
    blocks = head.blocks(torch.tensor([[7]]), beside.embedding)
    assert torch.equal(blocks, model.get_input_embeddings()(torch.tensor([[7, 0, 0, 0]])))
    as_plain(beside, config.drafter(head, beside), tiny_gemma.request(), Chain(4))
    config.save(head, tmp_path / "head", config.manifest(beside, TargetIdentity({"kind": "gemma4"})))
    source = read_source(tmp_path / "head", Target(model.config, "org/name"))
    assert same_weights(head, source.head)
    check_expressible("vllm", source, "text")
    fails_with("no layout for DSpark.* here; --to vllm has one", check_expressible, "gguf", source, "text")
    plain = {**DSPARK, "target_layers": True, "rope": "plain"}
    fails_with("target_layers: the rotation is the target's", DsparkConfig.model_validate, plain, error=ValueError)
    rnn = replace(source, head=config.model_copy(update={"markov_head_type": "rnn"}).build(beside))
    fails_with("rnn of rank 6: not the class's", check_expressible, "vllm", rnn, "text")
    write_folder(tmp_path / "there", *files_of("vllm", source, beside.embedding))
    fails_with(
        "final_logit_softcapping", import_head, "dspark", str(tmp_path / "there"), source.target.text, embedding=None
    )
    fails_with("no server has a class of DSpark in", config.shape, language_shape(target_config().get_text_config()))
