"""DFlash 2 drafts: convolutions and selector by hand, the start is DFlash to the last bit, q of the walk, files."""

import pytest
import torch
from dflash_tiny import ROWS, SMALL, decoded, draft, rows_of
from draftsmith.core.errors import Refused, UserError
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Product
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.dflash2 import Dflash2Config, GroupedConvolution
from draftsmith.models.drafters.dflash_proposal import Walk
from draftsmith.models.drafters.dflash_training import draw_blocks
from tensors import check_travels
from torch.nn import functional as F
from visual_tiny import code_batch, greedy, llamagen, plain, request, step_of, target

SECOND = {"kind": "dflash2", "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


def test_a_convolution_by_hand():
    """Two blocks of three places: no tap reaches from one into the other."""
    torch.manual_seed(0)
    conv = GroupedConvolution(8, 4, 3)
    torch.nn.init.normal_(conv.kernel_projection.weight)
    torch.nn.init.normal_(conv.base_kernel)
    x, y = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    mixed, corrections = conv(x)
    after, _ = conv(y, corrections)
    for row in range(2):
        for place in range(6):
            # [sides, taps, groups], as the published projection lays them out
            delta = (conv.kernel_projection.weight @ x[row, place]).view(2, 2, 2)
            for channel in range(8):
                for side, (given, made) in enumerate(((x, mixed), (y, after))):
                    k0, k1 = (
                        float(conv.base_kernel[side, tap, channel] + delta[side, tap, channel // 4]) for tap in (0, 1)
                    )
                    before = 0.0 if place % 3 == 0 else float(given[row, place - 1, channel])
                    wanted = k0 * float(given[row, place, channel]) + k1 * before
                    assert float(made[row, place, channel]) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["whole", "some of the vocabulary"])
def test_the_selectors_loss_by_hand(big, name):
    """Beside DFlash's own loss over the same outputs; a true token that is no candidate counts nothing."""
    settings = {} if name == "whole" else {"draft_vocab_size": 30}
    config, head = draft(
        big, **SECOND | {"selector_top_k": 16}, **settings, loss={"gamma": 2.0, "chunk": 3}, selector_weight=0.5
    )
    batch, states = rows_of(big, *ROWS)
    training = config.training_objective(head, big)
    actual, w = training(batch, states), dict(head.candidate_selector.named_parameters())
    actual.loss_sum.backward()
    assert all(p.grad.any() for p in head.parameters())
    rows = training.sequences(batch, states)
    blocks = draw_blocks(batch.loss_mask, batch.seeds, 512, 4)
    outputs = training.outputs(rows, states, blocks).unflatten(1, (-1, 5))[:, :, 1:]
    decay, total, chosen, left_out = [0.6065**k for k in range(4)], 0.0, 0.0, 0
    for row, anchors in enumerate(blocks.anchors.tolist()):
        for block, anchor in enumerate(anchors):
            for k in range(int(blocks.lengths[row, block])):
                output, weight = outputs[row, block, k], float(blocks.share[row]) * decay[k] / sum(decay)
                scores = head.draft_scores(output[None], big.scores, torch.float32)[0]
                before, true = batch.ids[row, anchor + k : anchor + k + 2].tolist()
                ranked = scores.topk(16).indices.tolist()
                if scores[true].isfinite():
                    total += weight * F.cross_entropy(scores[None], torch.tensor([true]))
                gated = w["predecessor_codebook"][before] * (w["hidden_projection.weight"] @ output)
                pairs = torch.stack([scores[b] + gated @ w["successor_codebook"][b] for b in ranked])
                if true in ranked:
                    total += 0.5 * weight * F.cross_entropy(pairs[None], torch.tensor([ranked.index(true)]))
                    chosen += weight * (ranked[int(pairs.argmax())] == true)
                else:
                    left_out += 1
    assert left_out
    torch.testing.assert_close(actual.loss_sum, total, rtol=1e-3, atol=1e-4)
    assert float(actual.metrics["selected"]) == pytest.approx(chosen, rel=1e-3)


def started(big, **settings):
    """A DFlash draft, and a DFlash 2 with its weights and untrained parts of its own."""
    plain_config, dflash = draft(big)
    config = Dflash2Config.model_validate(SMALL | SECOND | settings)
    torch.manual_seed(0)
    head = config.build(big)
    missing = head.load_state_dict(dflash.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("conv" in n or "selector" in n for n in missing.missing_keys)
    return plain_config, dflash, config, head


def test_an_untrained_one_is_dflash_to_the_last_bit(big):
    plain_config, dflash, config, head = started(big, selector_top_k=16)
    batch, states = rows_of(big, *ROWS)
    one, two = plain_config.training_objective(dflash, big), config.training_objective(head, big)
    rows, blocks = one.sequences(batch, states), draw_blocks(batch.loss_mask, batch.seeds, 512, 4)
    assert torch.equal(one.outputs(rows, states, blocks), two.outputs(rows, states, blocks))
    loss = two(batch, states).loss_sum
    loss.backward()
    for name, parameter in head.named_parameters():
        # The other factor of a product that is 0 learns from the second step on.
        waits = "hidden_projection" in name or "predecessor" in name
        assert bool(parameter.grad.any()) != waits, name
    two.further = lambda *_: (0.0, (torch.zeros(()),))
    assert torch.equal(two(batch, states).loss_sum, one(batch, states).loss_sum)
    assert decoded(config, head, big, Chain(4)) == decoded(plain_config, dflash, big, Chain(4))


def test_sampled_and_in_trees_it_is_dflash_where_all_tokens_are_candidates(big):
    plain_config, dflash, config, head = started(big, selector_top_k=64)
    for seed in range(3):
        ours = decoded(config, head, big, Chain(4), Warp(0.9), seed)
        assert ours == decoded(plain_config, dflash, big, Chain(4), Warp(0.9), seed)
    assert decoded(config, head, big, Product(9, 4, 3)) == decoded(plain_config, dflash, big, Product(9, 4, 3))


@torch.no_grad()
def test_the_walk_draws_from_the_softmax_over_its_candidates(big):
    """Four tokens have a chance, that of their own score and the pair's at this temperature; the others have none."""
    _, head = draft(big, **SECOND)
    torch.manual_seed(1)
    scores, outputs, w = 3 * torch.randn(4, 64), torch.randn(1, 4, 32), dict(head.candidate_selector.named_parameters())
    walk = Walk(head, scores, outputs, Warp(0.7), torch.tensor([9]), Guidance())
    path = [9, 11, 12, 13]
    q = [walk.root(), *(walk.expand([place - 2], torch.tensor([path[place]]))[0] for place in (1, 2, 3))]
    for place, before in enumerate(path):
        ranked = scores[place].topk(4).indices
        gated = w["predecessor_codebook"][before] * (w["hidden_projection.weight"] @ outputs[0, place])
        wanted = torch.zeros(64)
        wanted[ranked] = ((scores[place, ranked] + w["successor_codebook"][ranked] @ gated) / 0.7).softmax(0)
        torch.testing.assert_close(q[place], wanted)
        assert int((q[place] > 0).sum()) == 4
    siblings = walk.expand([-1, -1], torch.tensor([20, 21]))
    assert not torch.equal(*siblings), "the second token follows from the first"


def test_pictures_are_the_targets():
    big = target(llamagen("text", loud=1.5), 3.0)
    config = Dflash2Config.model_validate(SECOND | {"block_size": 4, "num_layers": 1, "taps": [1]})
    torch.manual_seed(0)
    head = config.build(big)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    batch = code_batch(big.model, torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0)))
    assert "selected" in step_of(config.training_objective(head, big), big, batch).metrics
    for seed in range(2):
        asked = request(big.model, seed)
        for policy in (Chain(3), Product(9, 3, 3)):
            result = generate(big, config.drafter(head, big), asked, greedy(policy, big.num_codes))
            assert result.tokens == plain(big, asked)


def test_drafts_travel(big, tmp_path):
    config, head = draft(big, **SECOND)
    check_travels(config, head, big, tmp_path / "draft")
    for name in ("conv_group_size", "selector_rank", "selector_top_k"):
        other = Dflash2Config.model_validate(config.model_dump() | {name: 2})
        with pytest.raises(UserError, match=f"{name} is .*, expected 2"):
            other.load(tmp_path / "draft", big)


def test_settings_that_do_not_fit(big):
    with pytest.raises(UserError, match="groups of 7 channels do not divide the target's width of 32"):
        Dflash2Config.model_validate(SMALL | {"kind": "dflash2", "conv_group_size": 7}).check(big.shape)
    with pytest.raises(Refused, match="confidence"):
        Dflash2Config.model_validate({"kind": "dflash2", "confidence": {}}).check_settings(draws_images=False)
