"""Packed stages: the training of padded batches, on any number of ranks, under every engine, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.errors import Refused
from draftsmith.data.collate import ConversationCollate
from draftsmith.data.loader import Loader
from draftsmith.models.drafters import DflashConfig, Eagle3Config, MedusaConfig, SparrowConfig
from draftsmith.trainers.train.checkpoint import CheckpointConfig
from draftsmith.trainers.train.fit import OptimConfig
from draftsmith.trainers.train.loop import train
from fails import fails_with
from pydantic import ValidationError
from ranks_run import run_ranks
from states_run import cached, context, losses, stage
from training import BATCH, Samples, engine, module, run, training_of, weights

OPTIM = OptimConfig(lr=0.1, eps=1.0)  # so large an eps moves weights by their gradients
LENGTHS = np.array([len(Samples()[n].ids) for n in range(10)])


def packed_loader(start: int, rank: int = 0, world_size: int = 1, steps: int = 6) -> Loader:
    """Rows of 30 tokens: two or three of them in a step of four samples."""
    return Loader(
        Samples(), seed=0, batch_size=BATCH, micro_batch_size=1, total_steps=steps, start_step=start,
        collate=ConversationCollate(3, 16), rank=rank, world_size=world_size, lengths=LENGTHS, max_tokens=26,
    )  # fmt: skip


def train_packed(folder: Path, zero: int, rank: int = 0, world_size: int = 1, steps: int = 6, every=None):
    """Losses and weights; steps differ in the number of their rows."""
    torch.manual_seed(0)
    built = engine(module(noisy=False), OPTIM, steps=6, zero=zero, micro=1, accumulation=1)
    losses: dict[int, float] = {}
    train(
        built, training_of(lambda start: packed_loader(start, rank, world_size, steps), steps),
        CheckpointConfig(every=every), log_every=1, folder=folder, fingerprint="f", rewind=lambda step: None, say=print,
        log=lambda values, step: losses.update({step: values["loss"]}),
    )  # fmt: skip
    return losses, weights(built)


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    return run(tmp_path_factory.mktemp("padded"), steps=6, model=module(noisy=False), optim=OPTIM)[:2]


def check(losses, found, padded) -> None:
    expected, values = padded
    assert losses == pytest.approx(expected, rel=2e-6)
    start = dict(module(noisy=False).named_parameters())
    assert max(float((value - start[name]).detach().abs().max()) for name, value in values.items()) > 1e-3
    for name, value in values.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_steps_of_several_numbers_of_rows_update_once(zero, padded, tmp_path):
    numbers = {len(step.micro) for step in packed_loader(0)}
    assert len(numbers) > 1 and min(numbers) > 1
    check(*train_packed(tmp_path, zero), padded)


def test_a_packed_training_goes_on_where_it_stopped(padded, tmp_path):
    train_packed(tmp_path, 0, steps=3, every=1)
    losses, found = train_packed(tmp_path, 0)
    assert min(losses) > 1
    check(losses, found, ({step: padded[0][step] for step in losses}, padded[1]))


TWO_RANKS = """
import torch
from pathlib import Path
from draftsmith.core import ranks
from draftsmith.trainers.train.engine import init_distributed
from test_packing import train_packed

init_distributed()
for zero in (0, 3):
    found = train_packed(Path(f"run{zero}"), zero, ranks.rank(), ranks.world_size())
    if ranks.is_main():
        torch.save(found, f"zero{zero}.pt")
"""


def test_two_packing_ranks_compute_what_one_padding_one_does(padded, tmp_path):
    for code, text in run_ranks(2, TWO_RANKS, cwd=tmp_path):
        assert code == 0, text[-3000:]
    for zero in (0, 3):
        check(*torch.load(tmp_path / f"zero{zero}.pt", weights_only=True), padded)


HEADS = {
    "sparrow": SparrowConfig(kind="sparrow", gap_share=0.5, blind_share=0.5),
    "eagle3": Eagle3Config(kind="eagle3", taps=(1, 2, 3), mtp_steps=2),
    "medusa": MedusaConfig(kind="medusa", num_heads=3),
    "dflash": DflashConfig(kind="dflash", block_size=4, num_layers=2, taps=(1, 2)),
}
PACKED = {"packing": {"max_tokens": 400}, "micro_batch_size": None}


@pytest.mark.parametrize("name", ["eagle3", "medusa", "dflash"])
def test_heads_learn_alike_from_packed_rows(name, made, tmp_path):
    """From states of a packed target, and from cached ones; the stage's losses are those of padded batches."""
    folder = cached(made, tmp_path / "cache", HEADS[name]).folder
    kinds = {"padded": {}, "packed": PACKED, "packed and cached": PACKED | {"source": {"kind": "cached"}}}
    results = {}
    for kind, settings in kinds.items():
        asked = context(made, tmp_path / kind, HEADS[name], {"states": folder})
        stage(made, steps=4, **settings).run(asked)
        results[kind] = losses(asked.folder)
    assert len(results["padded"]) == 4
    for kind in kinds:
        assert results[kind] == pytest.approx(results["padded"], rel=2e-3 if "cached" in kind else 1e-5), kind


@pytest.mark.parametrize(("settings", "key"), [
    ({"packing": {"max_tokens": 400}}, "micro_batch_size"),
    (PACKED | {"packing": {"max_tokens": 16}}, "packing.max_tokens"),
    (PACKED | {"source": {"kind": "cached_on_first_epoch"}}, "packing"),
])  # fmt: skip
def test_what_cannot_be_packed_is_refused_by_its_key(settings, key, made):
    caught = fails_with("", stage, made, **settings, error=ValidationError)
    (error,) = caught.errors()
    assert isinstance(error["ctx"]["error"], Refused) and error["ctx"]["error"].key == key


def test_a_cached_sample_that_fits_no_row_is_refused(made, tmp_path):
    folder = cached(made, tmp_path / "cache", HEADS["medusa"]).folder
    short = stage(made, **PACKED | {"packing": {"max_tokens": 20}, "source": {"kind": "cached"}})
    fails_with("and a row 20", short.run, context(made, tmp_path / "run", HEADS["medusa"], {"states": folder}))
