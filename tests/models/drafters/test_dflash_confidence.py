"""The confidence head of DFlash drafts: its labels by hand, what it leaves alone, and blocks that it cuts."""

from dataclasses import replace

import pytest
import torch
from decodings import greedy
from dflash_tiny import ROWS, SMALL, draft, rows_of
from draftsmith.core.errors import Refused
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Product
from draftsmith.models.drafters import dflash_training
from draftsmith.models.drafters.base import TargetIdentity, for_decoding
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dflash_proposal import confident_levels
from draftsmith.models.drafters.dflash_settings import DflashConfidence
from draftsmith.models.drafters.dflash_training import draw_blocks
from fails import fails_with
from heads_tiny import config_of
from tensors import check_travels
from tiny import request as ask


def gradients(config, head, big, batch, states):
    head.zero_grad()
    loss = config.training_objective(head, big)(batch, states)
    loss.loss_sum.backward()
    return loss, {name: p.grad.clone() for name, p in head.named_parameters()}


@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 30}], ids=["all ids", "some ids"])
def test_its_loss_by_hand(big, settings, kind):
    """Binary cross-entropy against sum of min(p, q) at every trained place, beside the loss of a draft without it."""
    loss = {"token_divergence": kind, "gamma": 2.0, "chunk": 3}
    config, head = draft(big, **settings, loss=loss, confidence={"weight": 0.7})
    batch, states = rows_of(big, *ROWS)
    found, grads = gradients(config, head, big, batch, states)
    bare = config.model_copy(update={"confidence": None})
    alone = bare.build(big, count_tokens=lambda: torch.arange(big.vocab_size))
    alone.load_state_dict({n: v for n, v in head.state_dict().items() if not n.startswith("confidence_head")})
    plain, plain_grads = gradients(bare, alone, big, batch, states)
    training = config.training_objective(head, big)
    blocks = draw_blocks(batch.loss_mask, batch.seeds, 512, 4)
    outputs = training.outputs(training.sequences(batch, states), states, blocks).unflatten(1, (-1, 5))[:, :, 1:]
    total, error = 0.0, 0.0
    for row, block in (blocks.lengths > 0).nonzero().tolist():
        for mask in range(int(blocks.lengths[row, block])):
            out = outputs[row, block, mask].detach()
            q = head.draft_scores(out[None], big.scores, torch.float32)[0].softmax(-1)
            p = big.scores(states.feature[row, blocks.anchors[row, block] + mask]).softmax(-1)
            label = sum(min(float(a), float(b)) for a, b in zip(p, q, strict=True))
            c = (head.confidence_head.proj.weight[0] @ out + head.confidence_head.proj.bias[0]).sigmoid()
            weight = training.weights[mask] * blocks.share[row]
            total = total - weight * (label * c.log() + (1 - label) * (1 - c).log())
            error += float((weight * (c - label).abs()).detach())
    torch.testing.assert_close(found.loss_sum - plain.loss_sum, 0.7 * total.detach(), rtol=1e-3, atol=1e-3)
    assert float(found.metrics["confidence_error"]) == pytest.approx(error, rel=1e-4)
    wanted = torch.autograd.grad(0.7 * total, [*head.confidence_head.parameters()])
    for name, gradient in zip(("weight", "bias"), wanted, strict=True):
        torch.testing.assert_close(grads[f"confidence_head.proj.{name}"], gradient, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(grads[name], gradient) for name, gradient in plain_grads.items()), "the draft learns alike"
    assert {**plain.metrics, "confidence_error": 0}.keys() == found.metrics.keys()


def test_undetached_it_moves_the_draft(big):
    config, head = draft(big, confidence={"detached": False})
    batch, states = rows_of(big, *ROWS)
    _, grads = gradients(config, head, big, batch, states)
    _, apart = gradients(config.model_copy(update={"confidence": config.confidence.model_copy(
        update={"detached": True})}), head, big, batch, states)  # fmt: skip
    assert not torch.equal(grads["fc.weight"], apart["fc.weight"])
    name = "confidence_head.proj.weight"
    torch.testing.assert_close(grads[name], apart[name])


def test_batches_without_a_block_reach_it(big):
    config, head = draft(big, confidence={})
    batch, states = rows_of(big, "ttt")
    loss, grads = gradients(config, head, big, batch, states)
    assert float(loss.loss_sum) == 0 and all(not gradient.any() for gradient in grads.values())


def test_levels_that_are_kept():
    sure = torch.tensor([0.9, 0.9, 0.5, 0.99]).logit()
    assert [confident_levels(sure, below) for below in (0.95, 0.85, 0.75, 0.41, 0.40, 0.1)] == [1, 1, 2, 2, 4, 4]
    assert confident_levels(torch.tensor([-50.0, 50.0]), 0.5) == 1, "a cycle's token is verified with one more at least"


def drafted(cycles, levels, length):
    """Levels that each cycle verifies of those that its block has: the answer's last tokens need no draft."""
    room, found = length - 1, []
    for cycle, level in zip(cycles, levels, strict=True):
        found.append(max(0, min(level, room - 1)))
        room -= cycle.num_emitted
    return found


@torch.no_grad()
def test_blocks_are_cut_where_the_running_product_falls(big):
    """By hand from the outputs of each block; what comes out is plain decoding's, with chains and trees."""
    config, head = draft(big, confidence={}, cut_below=0.2)
    asked, outputs = ask(3, 1), []
    plain = generate(big, None, asked, greedy(Chain(1), 16)).tokens
    hook = head.norm.register_forward_hook(lambda _, __, result: outputs.append(result.detach()))
    for policy in (Chain(4), Product(9, 4, 3)):
        outputs.clear()
        cut, levels = generate(big, config.drafter(head, big), asked, greedy(policy, 16)), []
        for block in (one for one in outputs if one.shape[1]):
            chance, count = 1.0, 0
            for out in block[0, 1:]:
                w = head.confidence_head.proj
                chance *= float((w.weight[0] @ out + w.bias[0]).sigmoid().detach())
                count += chance >= 0.2
            levels.append(max(1, count))
        assert cut.tokens == plain and len({*levels}) > 1
        most = drafted(cut.cycles, levels, 16)
        if isinstance(policy, Chain):
            assert [c.num_drafted for c in cut.cycles] == most
        assert all(c.num_drafted <= level for c, level in zip(cut.cycles, most, strict=True))
    hook.remove()
    whole = generate(big, replace_cut(config, None).drafter(head, big), asked, greedy(Chain(4), 16))
    assert [c.num_drafted for c in whole.cycles] == drafted(whole.cycles, [4] * len(whole.cycles), 16)


def replace_cut(config, below):
    return config.model_copy(update={"cut_below": below})


def test_it_learns_where_the_draft_is_wrong(big):
    """On fixed states its error falls well below that of the best constant, which is the labels' median."""
    config, head = draft(big, confidence={})
    batch, states = rows_of(big, *["ttaaaaaaaa"] * 2)
    training, labels, features = config.training_objective(head, big), [], []
    head.confidence_head.register_forward_hook(lambda _, inputs, __: features.append(inputs[0]))
    kept = dflash_training.confidence_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash_training, "confidence_loss", lambda *a: (labels.append(a), kept(*a))[1])
        training(batch, states)
    _, alphas, weights = labels[0]
    constant = min(float((weights * (alphas - one).abs()).sum().detach()) for one in alphas)
    optimizer = torch.optim.Adam(head.confidence_head.parameters(), lr=0.05)
    outputs = features[0].detach()
    for _ in range(300):
        optimizer.zero_grad()
        kept(head.confidence_head(outputs), alphas, weights)[0].backward()
        optimizer.step()
    error = float(training(batch, states).metrics["confidence_error"])
    assert error < 0.75 * constant, (error, constant)


def test_settings():
    fails_with("this draft has none", config_of, kind="dflash", cut_below=0.5, error=ValueError)
    fails_with("less than 1", config_of, kind="dflash", confidence={}, cut_below=1.0, error=ValueError)
    decoded = for_decoding(config_of(kind="dflash", confidence={}), cut_below=0.5)
    assert decoded.cut_below == 0.5 and decoded.confidence == DflashConfidence()
    fails_with("this draft has none", for_decoding, config_of(kind="dflash"), cut_below=0.5, error=ValueError)
    for settings in ({"confidence": {}}, {"confidence": {}, "cut_below": 0.5}):
        fails_with("for language models", config_of(kind="dflash", **settings).check_settings, True, error=Refused)


def test_it_travels_and_a_draft_without_it_is_refused(big, tmp_path):
    config, head = draft(big, confidence={})
    check_travels(config, head, big, tmp_path)
    identity = TargetIdentity({"kind": "llava", "path": "some/model"}, "abc")
    replace_cut(config, 0.5).load(tmp_path, big, identity=identity)
    assert {*head.state_dict()} >= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    with pytest.raises(Exception, match=r"confidence_head\.proj"):
        DflashConfig.model_validate(SMALL).load(tmp_path, big)
    bare, other = draft(big)
    bare.save(other, tmp_path / "bare", bare.manifest(big, identity))
    with pytest.raises(Exception, match=r"confidence_head\.proj"):
        config.load(tmp_path / "bare", big, identity=identity)


def test_the_draft_begins_as_it_would_without(big):
    one, two = (DflashConfig.model_validate(SMALL | more) for more in ({}, {"confidence": {}}))
    heads = []
    for config in (one, two):
        torch.manual_seed(3)
        heads.append(config.build(big).state_dict())
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    assert replace(heads_shape(two, big), confidence=False) == heads_shape(one, big)


def heads_shape(config, big):
    return config.shape(big.shape)
