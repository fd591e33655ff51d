"""Hidden-state heads under the engine: ranks whose batches differ in kind make the same calls."""

import itertools
from pathlib import Path

import pytest
import torch
from draftsmith.trainers.train.engine import init_distributed
from draftsmith.trainers.train.fit import OptimConfig
from heads_tiny import SETTINGS, config_of, states_batch, tables
from ranks_run import run_ranks
from training import engine, weights

KINDS = ("sparrow", "sparrow-half-blind", "vispec", "hivis", "eagle3-middle")
# Of two ranks: pictures beside text, text beside a filler, a picture beside a filler.
STEPS = ((("ttvvvttaaa",), ("ttttaa",)), (("tttaaa",), ("ttvvtttt",)), (("ttttttt",), ("tvvtvvvtaaaa",)))
# So large an eps moves weights by their gradients.
OPTIM = OptimConfig(lr=0.1, eps=1.0, schedule="constant")


def trained(kind: str, zero: int, rank: int, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after a step for each of STEPS; one rank alone takes both parts of it one after the other."""
    config, target = config_of(**SETTINGS[kind]), tables(banned=(0, 1))
    torch.manual_seed(0)
    training = config.training_objective(config.build(target), target)
    built = engine(training, OPTIM, steps=3, zero=zero, micro=1, accumulation=2 // world_size)
    losses = []
    for number, parts in enumerate(STEPS):
        taps = config.taps_for(target.shape, training=True)
        batches = [states_batch(rows, taps, seed=10 * number + i) for i, rows in enumerate(parts)]
        tokens = sum(batch.num_supervised for batch, _ in batches)
        total = torch.zeros(())
        for batch, states in batches if world_size == 1 else batches[rank : rank + 1]:
            loss = built(batch, states)
            built.backward(loss.loss_sum, tokens)
            built.step()
            total = total + loss.loss_sum.detach()
        built.end_step()
        if world_size > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / tokens)
    return losses, weights(built)


# Cases of KIND:STAGE as arguments.
SCRIPT = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "eval")]!r}
import torch
from draftsmith.core import ranks
from draftsmith.trainers.train.engine import init_distributed
from test_heads_engine import trained

init_distributed()
found = {{}}
for case in sys.argv[1:]:
    kind, zero = case.split(":")
    found[case] = trained(kind, int(zero), ranks.rank(), ranks.world_size())
if ranks.is_main():
    torch.save(found, "found.pt")
"""


def check_two_ranks(folder: Path, *cases: tuple[str, int]) -> None:
    """Losses and weights of two ranks are those of one, and of one without ZeRO."""
    for code, text in run_ranks(2, SCRIPT, *(f"{kind}:{zero}" for kind, zero in cases), cwd=folder):
        assert code == 0, text[-3000:]
    found = torch.load(folder / "found.pt", weights_only=True)
    init_distributed()
    for kind, zero in cases:
        losses, state = trained(kind, zero, 0, 1)
        alone = state if zero == 0 else trained(kind, 0, 0, 1)[1]
        others, moved = found[f"{kind}:{zero}"]
        assert others == pytest.approx(losses, rel=1e-4), (kind, zero)
        for name, value in state.items():
            torch.testing.assert_close(moved[name], value, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(value, alone[name], atol=2e-5, rtol=1e-4)


def test_two_ranks_under_zero_compute_what_one_does(tmp_path):
    """Of the kind whose two ranks differ most: one has pictures, blind and seen, the other text; and of EAGLE-3, whose
    passes read the weights of modules that they do not call.
    """
    check_two_ranks(tmp_path, ("sparrow-half-blind", 2), ("eagle3-middle", 3))


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path):
    check_two_ranks(tmp_path, *itertools.product(KINDS, (0, 2, 3)))
