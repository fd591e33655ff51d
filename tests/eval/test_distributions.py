"""What rules read of the target's distributions: the rows they visit alone, with the outcome of all rows at once."""

import pytest
import torch
from draftsmith.eval.policies import Draw
from draftsmith.eval.policies.dynamic import candidates
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.rows import guide
from draftsmith.models.decoding.warp import Distributions, Warp
from test_lantern import random_tree, rule

WARPS = [Warp(1.0), Warp(0.7, 5), Warp(1.3, 0, 0.8), Warp(1.0, 9, 0.7)]


class AtOnce(Distributions):
    """As on a GPU: every row before the first read."""

    one_by_one = False


@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("form", ["deterministic", "drawn", "filled"])
@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_rows_one_by_one_and_all_at_once(warp, form, relaxed):
    accept = rule("paper", 4, 0.3) if relaxed else Sampling()
    generator = torch.Generator().manual_seed(0)
    depths = set()
    for _ in range(60):
        tree, p = random_tree(generator, form)
        scores, uniforms = 3 * torch.randn(p.shape, generator=generator), torch.rand(9, generator=generator).tolist()
        one, other = (accept(tree, kind(scores, warp), uniforms) for kind in (Distributions, AtOnce))
        assert (one.path, one.tokens, one.bonus) == (other.path, other.tokens, other.bonus)
        depths.add(len(one.path))
    assert len(depths) > 1


def test_only_visited_rows_are_warped(monkeypatch):
    seen = []
    before = Warp.apply_temperature
    monkeypatch.setattr(
        Warp, "apply_temperature", lambda warp, logits: seen.append(logits.shape) or before(warp, logits)
    )
    generator = torch.Generator().manual_seed(1)
    tree, p = random_tree(generator, "deterministic")
    verified = Sampling()(tree, Distributions(p.log(), Warp(1.0, 4)), [0.5] * 9)
    assert seen == [p.shape[-1:]] * (verified.num_accepted + 1)


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_what_the_beam_takes_is_cut_as_the_whole_would_be(warp):
    q = (3 * torch.randn(200, 40, generator=torch.Generator().manual_seed(0))).softmax(-1)
    values, ids = Draw("top-k", warp=warp).ranked(q, 12)
    whole = warp.truncate(q).gather(-1, ids)
    assert torch.equal(ids, q.topk(12).indices)
    within = (warp.truncate(q) > 0).sum(-1) <= 12  # nothing is left beyond what is taken
    torch.testing.assert_close(values[within], whole[within])
    assert torch.equal(values > 0, whole > 0), "the same tokens are possible"
    assert within.any() or warp == Warp(1.0), "what nothing cuts reaches beyond 12"


def test_a_wide_beam_is_ranked_as_a_narrow_one():
    """40 wide: 6,440 candidates. Ties keep the order of creation, parents first."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 4, (200, 64), generator=generator).double()
    rows = rows / rows.sum(-1, keepdim=True)

    def expand(parents, tokens):
        return rows[tokens % 200]

    beam = candidates(rows[0], expand, width=40, levels=5)
    ranked = sorted(range(len(beam.scores)), key=beam.scores.tolist().__getitem__, reverse=True)[:960]
    tree = beam.best(960)
    assert len(beam.scores) == 40 + 4 * 1600 and tree.num_nodes == 960
    assert tree.tokens.tolist() == beam.tokens[sorted(ranked)].tolist()
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_guidance_where_nothing_is_banned():
    scores = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(guide(scores, 3.0, banned=False), guide(scores, 3.0))
    scores[:, :, 4] = float("-inf")
    assert guide(scores, 3.0)[:, 4].isneginf().all() and guide(scores, 3.0, banned=False)[:, 4].isnan().all()
