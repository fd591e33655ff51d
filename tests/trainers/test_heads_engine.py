"""Hidden-state heads under the engine: ranks whose batches differ in kind make the same calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftsmith.trainers.optim import OptimConfig
from heads_tiny import SETTINGS, config_of, states_batch, tables
from training import engine, free_port, weights

KINDS = ("sparrow", "sparrow-half-blind", "vispec", "hivis", "eagle3-middle")
# Of two ranks: pictures beside text, text beside a filler, a picture beside a filler.
STEPS = ((("ttvvvttaaa",), ("ttttaa",)), (("tttaaa",), ("ttvvtttt",)), (("ttttttt",), ("tvvtvvvtaaaa",)))
# So large an eps moves weights by their gradients.
OPTIM = OptimConfig(lr=1.0, eps=10.0, schedule="constant")


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


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import torch
from draftsmith.core import ranks
from draftsmith.trainers.engine import init_distributed
from test_heads_engine import KINDS, trained

init_distributed()
found = {{(kind, zero): trained(kind, zero, ranks.rank(), ranks.world_size()) for kind in KINDS for zero in (0, 2, 3)}}
if ranks.is_main():
    torch.save(found, "found.pt")
"""


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path):
    script = SCRIPT.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1] / "eval")])
    shared = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    result = {}
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        shared |= {"WORLD_SIZE": str(world_size), "MASTER_PORT": free_port()}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for process in processes:
            text, _ = process.communicate(timeout=240)
            assert process.returncode == 0, text[-3000:]
        result[world_size] = torch.load(folder / "found.pt", weights_only=True)
    for key, (losses, state) in result[1].items():
        others, moved = result[2][key]
        assert others == pytest.approx(losses, rel=1e-4), key
        alone = result[1][key[0], 0][1]
        for name, value in state.items():
            torch.testing.assert_close(moved[name], value, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(value, alone[name], atol=2e-5, rtol=1e-4)
