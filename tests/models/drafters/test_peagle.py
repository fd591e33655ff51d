"""P-EAGLE heads: a pass over masks is EAGLE-3's layer over true and masked entries, in training and decoding."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.errors import Refused, UserError
from draftsmith.models.drafters.dflash_training import draw_blocks
from draftsmith.models.drafters.peagle import PeagleConfig
from draftsmith.models.losses import divergence
from heads_tiny import case_for, config_of, decoding_after, tables
from tensors import check_gradients, check_travels, gradients_of, loud
from tiny import llava
from tiny import request as ask
from tiny import target as language
from torch.nn import functional as F

SMALL = {"kind": "peagle", "taps": [1, 2, 4], "parallel_tokens": 4}
KINDS = {
    "text alone": {},
    "pictures": {"visual_slots": "read", "image": "projected"},
    "an id of the target for a mask": {"visual_slots": "read", "mask_token_id": 40},
    "compact places": {"positions": "compact"},
    "a table of its own": {"own_embedding": True, "visual_slots": "read", "mask_token_id": 40},
    "a window": {"sliding_window": 5, "visual_slots": "read"},
    "speculators' layer": {"norm_before_residual": True, "norm_before_fc": True, "qk_norm": True, "sliding_window": 5},
    "some of the vocabulary": {"visual_slots": "read", "draft_vocab_size": 20},
}
ROWS = ("ttvvvttaaaaaa", "tvvtvvvtaaaa", "ttttaaa", "tta")


def built(target, **settings):
    config = PeagleConfig.model_validate(SMALL | settings)
    torch.manual_seed(0)
    head = config.build(target, count_tokens=lambda: torch.arange(target.shape.vocab_size))
    assert head.embed_tokens is None or torch.equal(head.embed_tokens.weight, target.embedding)
    loud(head)
    return config, head


def table(head, target):
    return target.embedding if head.embed_tokens is None else head.embed_tokens.weight


def alone(config, head, embedding, embeds, states, positions):
    """[K,D] of a row of true entries [N,D] and the masks after it, as one plainly causal row."""
    count = config.parallel_tokens - 1
    mask = embedding[config.mask_token_id] if config.mask_token_id is not None else head.mask_embedding
    masks = head.fuse(head.mask_hidden)[0].expand(count, -1)
    places = torch.cat([positions, positions[-1] + 1 + torch.arange(count)])
    rows = torch.cat([embeds, mask.expand(count, -1)])[None], torch.cat([states, masks])[None]
    seen = torch.ones(len(places), len(places), dtype=torch.bool).tril().triu(1 - (config.sliding_window or 99))
    return head(*rows, places[None], seen)[0, -count - 1 :]


@pytest.mark.parametrize("kind", ["soft_ce", "ce"])
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_by_hand(name, kind):
    """Each block as a row of its own, of the entries up to its anchor and the masks after."""
    target = tables()
    config, head = built(target, **KINDS[name], loss={"token_divergence": kind, "decay": 0.5, "chunk": 3})
    batch, states = case_for(config, target, ROWS)
    training = config.training_objective(head, target).eval()
    actual = training(batch, states)
    found = gradients_of(actual.loss_sum, head)
    filled, positions = training.fill(batch, states)
    fused, ids = filled.fused(head), head.draft_ids
    weights = torch.tensor([0.5**k for k in range(4)])
    weights, total, accepted = weights / weights.sum(), 0.0, 0.0
    for row, marks in enumerate(ROWS):
        anchors = [i for i in range(1, len(marks) - 1) if marks[i : i + 2] == "aa"]
        for anchor in anchors:
            n = (filled.layout.index[row] == anchor - 1).nonzero()[-1, 0] + 1
            true = filled.embeds[row, :n], fused[row, :n], positions[row, :n]
            outputs = alone(config, head, table(head, target), *true)
            scores = head.draft_scores(outputs, target.scores, torch.float32)
            share, run = marks.count("a") / len(anchors), 0
            for k in range(min(4, len(marks) - anchor - 1)):
                there = target.scores(states.feature[row, anchor + k])
                right = int(batch.ids[row, anchor + 1 + k]) if kind == "ce" else int(there.argmax())
                if right in ids.tolist():
                    far = F.cross_entropy(scores[k], torch.tensor(right))
                    if kind != "ce":
                        far = divergence(kind, there[None, ids], scores[None, k, ids])[0]
                    total = total + share * weights[k] * far
                run += run == k and int(scores[k].argmax()) == right
            accepted += share * run
    torch.testing.assert_close(actual.loss_sum, total.detach(), rtol=1e-4, atol=1e-4)
    assert float(actual.metrics["accepted"]) == pytest.approx(accepted, rel=1e-4)
    assert int(actual.num_tokens) == batch.num_supervised
    check_gradients(found, total, head)


def test_states_behind_an_anchor_change_nothing():
    target = tables()
    config, head = built(target, visual_slots="read")
    batch, states = case_for(config, target, ("tttaaaaaa",))
    training = config.training_objective(head, target).eval()
    anchors = draw_blocks(batch.loss_mask, (), 99, 4).anchors
    assert anchors.tolist() == [[3, 4, 5, 6, 7]]
    with torch.no_grad():
        outputs = training.outputs(batch, states, anchors)
        layers = {k: torch.cat([v[:, :5], v[:, 5:] + 9], 1) for k, v in states.layers.items()}
        ids = torch.cat([batch.ids[:, :6], batch.ids[:, 6:] * 0 + 9], 1)
        changed = training.outputs(replace(batch, ids=ids), replace(states, layers=layers), anchors)
    same = [bool(torch.equal(a, b)) for a, b in zip(outputs[0], changed[0], strict=True)]
    assert same == [True, True, True, False, False], "an anchor reads its token and the states before it"


@torch.no_grad()
@pytest.mark.parametrize("name", [*KINDS][:7])
def test_blocks_of_a_decoding_are_rows_of_their_own(name):
    """Every block of a decoding after two pictures, after longer and shorter accepted runs."""
    big, asked = language(llava(0, layers=5)), ask(3, 2)
    config, head = built(big, **KINDS[name])
    drafter, ids, modality, step = decoding_after(big, head, config, asked)
    count = len(asked.ids)
    for accepted in (0, 3, 1, 4, 0):
        q = torch.stack([drafter.root(), *(drafter.expand((level - 1,), ids[:1])[0] for level in range(3))])
        kept = [i for i in range(count) if config.visual_slots == "read" or int(modality[i + 1]) == 0]
        embeds = F.embedding(ids[[i + 1 for i in kept]], table(head, big))
        if config.image == "projected":
            seen = [n for n, i in enumerate(kept) if int(modality[i + 1])]
            embeds[seen] = step.layers[0][0, [kept[n] + 1 for n in seen]]
        states = head.fuse(torch.cat([step.layers[tap][0, kept] for tap in (1, 2, 4)], -1))
        places = torch.tensor(kept if config.positions == "flat" else [*range(len(kept))])
        outputs = alone(config, head, table(head, big), embeds, states, places)
        expected = head.draft_scores(outputs, big.scores, torch.float32).softmax(-1)
        torch.testing.assert_close(q, expected, atol=2e-5, rtol=1e-4)
        assert drafter.num_held == len(kept)
        layers = {tap: step.layers[tap][:, count : count + accepted + 1] for tap in drafter.taps.layers}
        tokens = ids[count + 1 : count + 1 + accepted].tolist()
        count += accepted + 1
        passed = SimpleNamespace(layers=layers, feature=None)
        drafter.accept(SimpleNamespace(step=passed, tokens=tuple(tokens), bonus=int(ids[count])))


@pytest.mark.parametrize("name", KINDS)
def test_heads_travel(tmp_path, name):
    target = tables()
    config, head = built(target, **KINDS[name])
    check_travels(config, head, target, tmp_path, "qwen2_5_vl")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "peagle"
    for changes, says in (({"parallel_tokens": 5}, "parallel_tokens is 4, expected 5"), ({"taps": [1, 2, 3]}, "state")):
        with pytest.raises(UserError, match=says):
            PeagleConfig.model_validate(SMALL | KINDS[name] | changes).load(tmp_path, target)


def test_settings_of_passes_are_refused():
    for name, value in (("mtp_steps", 2), ("objective", {"token": 1.0})):
        with pytest.raises(Refused, match=f"{name}: it is of heads that read their own outputs"):
            config_of(kind="peagle", **{name: value}).check_settings(False)
    config_of(kind="peagle", loss={"decay": 0.5}).check_settings(False)
    with pytest.raises(UserError, match="the mask's id is 44, and the target has 44"):
        config_of(kind="peagle", mask_token_id=44).check(tables().shape)
