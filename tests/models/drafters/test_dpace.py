"""D-PACE's weights by plain loops; the loss of block drafts with them, and its gradients."""

import math

import pytest
import torch
from dflash_tiny import ROWS, draft, rows_of
from draftsmith.models.drafters.dflash_training import Pace, draw_blocks
from draftsmith.models.losses import pieces
from fails import fails_with
from heads_tiny import config_of
from pydantic import ValidationError
from tensors import check_gradients, gradients_of

OF_DSPARK = {"token_divergence": "ce", "weight": 1.0, "ce_weight": 0.5}
KINDS = {
    "dflash": {},
    "some of the vocabulary": {"draft_vocab_size": 30},
    "dspark": {"kind": "dspark", "markov_rank": 6, "draft_vocab_size": 30, "loss": OF_DSPARK},
}


def weights_of(chances, smoothing):
    """Of one block's places: w_j = sum over m >= j of the product over i <= m of (1 - a) q_i + a."""
    smooth = [(1 - smoothing) * q + smoothing for q in chances]
    return [sum(math.prod(smooth[: m + 1]) for m in range(j, len(smooth))) for j in range(len(smooth))]


def test_weights_by_loops():
    """In float64, of blocks that end early, from the second block on."""
    lengths = [4, 1, 3, 4]
    chances, share = torch.rand(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blocks = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(lengths))
    pace = Pace(0.4, blocks, torch.cat([torch.arange(n) for n in lengths]), share, 4)
    expected = [w for part in chances.split(lengths) for w in weights_of(part.tolist(), 0.4)]
    expected = torch.tensor(expected, dtype=torch.float64) * share
    torch.testing.assert_close(pace.weights(slice(0, 12), chances), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(pace.weights(slice(4, 8), chances[4:8]), expected[4:8], rtol=1e-12, atol=0)
    assert pace.weights(slice(0, 0), chances[:0]).shape == (0,)


@pytest.mark.parametrize(("chunk", "fast"), [(1, "1"), (7, "1"), (512, "1"), (7, "0")])
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_by_hand(big, name, chunk, fast, monkeypatch):
    """The mean over a row's places; answers end inside a block, a row has none, and the draft lacks some tokens."""
    monkeypatch.setenv("DRAFTSMITH_FAST", fast)
    loss = KINDS[name].get("loss", {}) | {"dpace": 0.4, "chunk": chunk}
    config, head = draft(big, **KINDS[name] | {"loss": loss})
    batch, states = rows_of(big, *ROWS, "ttttaaaaaa")  # in whose answer tokens that the draft lacks stand behind others
    training = config.training_objective(head, big)
    actual = training(batch, states)
    found, ids = gradients_of(actual.loss_sum, head), head.draft_ids
    blocks = draw_blocks(batch.loss_mask, batch.seeds, 512, head.shape.num_drafts)
    outputs = training.outputs(training.sequences(batch, states), states, blocks)
    outputs = outputs.unflatten(1, (-1, config.block_size))[:, :, head.shape.first :]
    entries = [*range(big.vocab_size)] if ids is None else ids.tolist()
    total, outside = 0.0, 0
    for row, block in (blocks.lengths > 0).nonzero().tolist():
        anchor, length, chances = int(blocks.anchors[row, block]), int(blocks.lengths[row, block]), []
        for k in range(length):
            scores = (big.scores if ids is None else head.lm_head)(outputs[row, block, k])
            if name == "dspark":
                before = batch.ids[row, anchor + k]
                scores = scores + head.markov_head.markov_w2.weight @ head.markov_head.markov_w1.weight[before]
            label = int(batch.ids[row, anchor + k + 1])
            chances.append(scores.softmax(-1)[entries.index(label)] if label in entries else None)
        outside += None in chances[1:] and chances[0] is not None
        weights = weights_of([0.0 if q is None else q.item() for q in chances], 0.4)
        share = int(batch.loss_mask[row, 1:].sum()) / int(blocks.lengths[row].sum())
        total = total - sum(share * w * q.log() for w, q in zip(weights, chances, strict=True) if q is not None)
    assert (outside > 0) == (ids is not None) and 0 < blocks.lengths[0, -1] < head.shape.num_drafts, "guards this test"
    total = total * sum(config.loss.shares())
    torch.testing.assert_close(actual.loss_sum, total.detach(), rtol=1e-5, atol=1e-5)
    check_gradients(found, total, head)


def test_a_selector_keeps_its_weights(big):
    found = {}
    for dpace in (None, 0.5):
        config, head = draft(big, kind="dflash2", conv_group_size=8, selector_rank=4, loss={"dpace": dpace})
        found[dpace] = config.training_objective(head, big)(*rows_of(big, *ROWS))
    assert found[None].metrics["selected"] == found[0.5].metrics["selected"]
    assert found[None].loss_sum != found[0.5].loss_sum


def test_pieces_stop_where_blocks_end():
    for asked, stops in (
        ((0, 3), [0]), ((0, 3, [0]), [0]), ((7, 3), [3, 6, 7]), ((9, 4, [2, 2, 5, 9]), [2, 5, 9]),
        ((9, 5, [2, 2, 5, 9]), [5, 9]), ((9, 1, [4, 9]), [4, 9]),
    ):  # fmt: skip
        assert [one.stop for one in pieces(*asked)] == stops


def test_settings_that_make_no_sense_are_refused():
    for kind, loss, said in (
        ("dflash", {"gamma": 4.0}, "takes the place of gamma"), ("dflash", {"dpace": 0.0}, "greater than 0"),
        ("dflash", {"token_divergence": "kl"}, "divergence is kl: set it to ce"), ("dspark", {}, "divergence is tvd"),
    ):  # fmt: skip
        fails_with(said, config_of, kind=kind, loss={"dpace": 0.5} | loss, error=ValidationError)
    assert "dpace" not in config_of(kind="dflash").model_dump()["loss"], "fingerprints of before hold"
