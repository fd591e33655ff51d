"""Atomic checkpoints: written to a temporary folder, hashed and renamed. A resumed run uses the newest one that
verifies.

DeepSpeed writes in place and saves neither random states nor the place in the data; here its files go
into a folder that gets its name only when a manifest of sizes and checksums stands in it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from ...core import ranks
from ...core.errors import UserError
from ...core.files import flush, is_full, read_json, write_whole
from ...core.results import FileSum, faults, sums_of
from ...core.section import Section
from .engine import Engine, load_data

FOLDER, MANIFEST = "checkpoints", "manifest.json"  # of a stage; of a checkpoint
UNUSABLE = "remove the folder or start the stage again with restart=STAGE"


class CheckpointConfig(Section):
    """When to save. The last step of a stage is always saved as weights."""

    # Optimizer steps between checkpoints; null: only when the run is asked to stop.
    every: int | None = Field(500, ge=1)
    # How many to keep.
    keep: int = Field(2, ge=1)


@dataclass(frozen=True)
class State:
    """Which run a checkpoint belongs to, and where that run was."""

    step: int
    fingerprint: str
    world_size: int
    validated: bool = True  # False: the run was asked to stop before a validation that was due after this step


@dataclass(frozen=True)
class _Manifest:
    state: State
    files: dict[str, FileSum]


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified, and notes on newer ones that did not."""

    path: Path
    step: int
    notes: tuple[str, ...]
    validated: bool = True  # False: the run was asked to stop before the validation that this step was due


def save(engine: Engine, folder: Path, *, step: int, fingerprint: str, keep: int, validated: bool = True) -> Path:
    """Save after `step` optimizer steps (all ranks call). Returns the checkpoint's folder."""
    final = folder / _name(step)
    aside = folder / f".{final.name}.partial"
    if ranks.is_main():
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    ranks.barrier()
    state = State(step, fingerprint, ranks.world_size(), validated)
    try:
        engine.save(aside, asdict(state))
        # DeepSpeed keeps one client state for all ranks, so each rank's random state is a file of its own.
        torch.save(random_state(), aside / _random(ranks.rank()))
    except Exception as error:
        if is_full(error) and ranks.world_size() == 1:  # the next start needs room for what it writes first
            shutil.rmtree(aside, ignore_errors=True)
        raise
    ranks.barrier()
    if ranks.is_main():
        files = sums_of(aside, [str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()])
        write_whole(aside / MANIFEST, json.dumps(asdict(_Manifest(state, files)), indent=1).encode())
        # An earlier save of the same step is removed only after the new one is complete.
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        flush(folder)
        # Those after it were refused when this try began: counting them would delete good ones in their favour.
        older = sorted(path for path in folder.glob("step-*") if path.name <= final.name)
        for path in older[:-keep]:
            shutil.rmtree(path)
    ranks.barrier()
    return final


def find(folder: Path, fingerprint: str) -> Found | None:
    """The newest checkpoint whose files match their manifest; rank 0 looks. Raises `UserError` where it belongs to
    another recipe or another number of ranks.
    """
    notes: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        state = verified(path)
        if isinstance(state, str):
            notes.append(state)
            continue
        if state.fingerprint != fingerprint:
            raise UserError(
                "the checkpoint was made by another recipe or from other data",
                where=str(path / MANIFEST),
                hint="restore the recipe, or start the stage again with restart=STAGE",
            )
        if state.world_size != ranks.world_size():
            raise UserError(
                f"the checkpoint was made by {state.world_size} ranks, and this run has {ranks.world_size()}: "
                "optimizer states are shared out by rank, and the sums would round differently",
                where=str(path),
                hint=f"resume with {state.world_size} ranks, or start again with restart=STAGE",
            )
        return Found(path, state.step, tuple(notes), state.validated)
    if notes:
        raise UserError("no usable checkpoint: " + "; ".join(notes), where=str(folder), hint=UNUSABLE)
    return None


def newest(folder: Path) -> State | None:
    """What the newest checkpoint says of itself; its files are not looked at, as `find` does. None: there is none."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        with suppress(UserError):
            return read_json(path / MANIFEST, _Manifest, hint="").state
    return None


def load(engine: Engine, checkpoint: Found) -> None:
    """Restore weights, optimizer, schedule and this rank's random states."""
    engine.load(checkpoint.path)
    restore_random_state(load_data(checkpoint.path / _random(ranks.rank())))


def verified(path: Path) -> State | str:
    """The state that a checkpoint's manifest names, or what is wrong with its files."""
    try:
        manifest = read_json(path / MANIFEST, _Manifest, hint="")
    except UserError as error:
        return f"{path.name}: {MANIFEST}: {error.problem}"
    state = manifest.state
    if path.name != _name(state.step):
        return f"{path.name}: {MANIFEST} says step {state.step}"
    read = {str(file.relative_to(path)) for file in path.rglob("*.pt")}
    read |= {_random(rank) for rank in range(min(state.world_size, ranks.world_size()))}
    if unlisted := sorted(read - manifest.files.keys()):
        return f"{path.name}: {MANIFEST} does not list {unlisted[0]}"
    problems = faults(path, manifest.files)
    return f"{path.name}: {problems[0].name} {problems[0].problem}" if problems else state


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _random(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def random_state() -> dict[str, object]:
    """The state of all generators of this process, in plain tensors and numbers, so that weights_only loads it."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all generators of this process to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
