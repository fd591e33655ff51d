"""Training steps beside speculators' and SpecForge's: what needs neither runs here, and differences end a run."""

import argparse
import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from draftsmith.scripts import bench
from fails import fails_with
from peers import specforge_steps, steps

ARGUMENTS = argparse.Namespace(pairs=1, lengths=(32, 40))


@pytest.fixture
def target():
    torch.manual_seed(0)
    return bench.target_of("tiny", torch.device("cpu"))


def twin(kind):
    """In the place of a peer, which these tests lack: ours again, with the same weights."""

    class Twin(kind):
        def __init__(self, arguments, mine, *losses):
            super().__init__(*((mine.target,) if kind is steps.OurHead else (mine.target, mine.settings)))
            self.head.load_state_dict(mine.head.state_dict())

    return Twin


def test_steps_have_a_row_for_each_length(target, capsys):
    steps.over_heads(ARGUMENTS, {"tiny": target}, twin(steps.OurHead))
    steps.over_blocks(ARGUMENTS, {"tiny": target}, steps.KINDS, twin(steps.OurBlocks))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [f"{kind}, {n}, tiny" for kind in ("EAGLE-3", *steps.KINDS) for n in (32, 40)]
    assert {row[2] for row in rows} == {"0e+00, 0e+00"}


def test_steps_that_differ_end_the_run(target):
    mine = steps.OurHead(target)
    other, sample = twin(steps.OurHead)(ARGUMENTS, mine), steps.HeadSamples(mine, 16)(0)
    assert steps.check_equal("x", mine, other, sample, 2e-5) == (0.0, 0.0)
    with torch.no_grad():
        next(iter(other.trained.values())).mul_(1.01)
    with pytest.raises(SystemExit, match="x: losses"):
        steps.check_equal("x", mine, other, sample, 2e-5)


def test_a_head_is_supervised_where_the_draft_can_say_the_likeliest_token(target):
    target.decoder.model.lm_head.weight.data[::4] *= 4
    mine = steps.OurHead(target)
    batch, states, entropy = steps.HeadSamples(mine, 40)(0)
    best = target.scores(states.feature[0]).argmax(-1)
    inside = torch.isin(best, mine.head.draft_ids) & (torch.arange(40) >= 10)
    assert torch.equal(batch.loss_mask[0], inside) and inside.any()
    assert entropy < float(mine.loss(batch, states, entropy).detach()), "a cross-entropy is at least the entropy"


@pytest.mark.parametrize("kind", steps.KINDS)
def test_a_step_of_blocks_trains_all_weights_at_the_anchors_that_it_is_given(target, kind):
    mine = steps.OurBlocks(target, steps.KINDS[kind][0])
    batch, states, anchors = steps.BlockSamples(target, mine.head.shape.block_size, 32)(3)
    scores = target.scores(states.feature[0, 7:-1])
    assert torch.equal(scores.argmax(-1), batch.ids[0, 8:]), "the answer is the target's likeliest"
    assert len(anchors) == 4 and min(anchors) >= 8 and max(anchors) + mine.head.shape.block_size < 32
    loss = mine.loss(batch, states, anchors)
    loss.backward()
    assert [n for n, p in mine.trained.items() if p.grad is None or not p.grad.any()] == []
    alone = [mine.loss(batch, states, one[None]).detach() for one in anchors]
    assert torch.allclose(sum(alone) / 4, loss.detach(), rtol=1e-5), "a mean over the blocks"


def test_specforges_decay_is_ours():
    weights = steps.KINDS["DFlash"][0].loss.weights(16)
    gammas = [1 / math.log(one / two) for one, two in itertools.pairwise(weights)]
    assert gammas == pytest.approx([specforge_steps.GAMMA] * 14)


def test_specforges_algorithms_are_read_one_by_one(tmp_path, monkeypatch):
    for name in ("", "common/", "other/"):
        file = tmp_path / "SpecForge" / "specforge" / "algorithms" / name / "__init__.py"
        file.parent.mkdir(parents=True)
        file.write_text("raise AssertionError('it registers every method')")
    (file.parents[2] / "__init__.py").touch()
    (file.parents[1] / "common" / "model.py").write_text("METHOD = 'DFlash'")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    steps.specforge(tmp_path, "common")
    assert importlib.import_module("specforge.algorithms.common.model").METHOD == "DFlash"
    fails_with("registers every method", importlib.import_module, "specforge.algorithms.other", error=AssertionError)


def test_a_missing_clone_is_named(tmp_path):
    fails_with("SpecForge is no folder", steps.specforge, tmp_path, "common")
