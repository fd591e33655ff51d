"""Run a recipe: its stages in order, each in a folder of its own, each once for the same inputs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import ranks
from ..core.errors import UserError
from .context import Context
from .stages.base import Planned
from .tracked import tracked

DONE, BEGUN = "done.json", "fingerprint.json"
# Counts up when fingerprints begin to cover other things, so that no folder of before is taken for a changed one.
FINGERPRINTS = 2


def run_stages(
    plan: Sequence[Planned],
    make_context: Callable[[Planned, Path, Mapping[str, Path]], Context],
    *,
    output: Path,
    chosen: Sequence[str] | None,
    restart: str | None,
    say: Callable[[str], None],
) -> None:
    """Run the planned stages; a finished one with the same inputs is passed over.

    Raises:
        UserError: a finished stage whose inputs changed, or one whose inputs were never made.
    """
    if restart is not None:
        stale = built_on(plan, restart)
        # All of it is looked at before anything moves: results that are good must not go for a run that cannot begin.
        refused = ranks.broadcast(_refused(plan, chosen, stale, output) if ranks.is_main() else None)
        if refused is not None:
            raise refused
        _set_aside(stale, output, say)
    for planned in plan:
        if chosen is not None and planned.name not in chosen:
            continue
        folder = output / planned.name
        # Rank 0 reads the state and broadcasts it, since another rank might read a half-written file.
        state = ranks.broadcast(stage_state(planned, output) if ranks.is_main() else None)
        if isinstance(state, UserError):
            raise state
        if state == "finished":
            say(f"stage {planned.name}: finished before, same inputs")
            continue
        say(f"stage {planned.name}")
        if ranks.is_main():
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / BEGUN, {"fingerprint": planned.fingerprint, "version": FINGERPRINTS})
        ranks.barrier()
        start = time.monotonic()
        inputs = {thing: output / maker for thing, maker in planned.inputs.items()}
        with tracked(make_context(planned, folder, inputs)) as context:
            planned.stage.run(context)
        ranks.barrier()
        if ranks.is_main():
            _finish(folder, planned.fingerprint, time.monotonic() - start)
        ranks.barrier()
    # A rank that exits while another still reads its message looks like a crash.
    ranks.barrier()


def stage_state(planned: Planned, output: Path) -> str | UserError:
    """Whether a stage has finished or is to be run, or why it cannot be."""
    folder = output / planned.name
    done = _done(folder)
    if done is not None and done["fingerprint"] == planned.fingerprint:
        return "finished"
    try:
        _refuse_other(folder, planned)
    except UserError as error:
        return error
    for thing, maker in planned.inputs.items():
        if _done(output / maker) is None:
            return _unmade(planned, thing, maker, output)
    return "to run"


def _unmade(planned: Planned, thing: str, maker: str, output: Path) -> UserError:
    return UserError(
        f"stage {planned.name} needs the {thing} of stage {maker}, which has not finished",
        where=str(output / maker),
        hint=f"run it first: stages=[{maker},{planned.name}]",
    )


def _refused(plan: Sequence[Planned], chosen: Sequence[str] | None, stale: set[str], output: Path) -> UserError | None:
    """Why the stages could not run one after another once those of `stale` were moved aside."""
    made: set[str] = set()
    for planned in plan:
        if chosen is not None and planned.name not in chosen:
            continue
        for thing, maker in planned.inputs.items():
            if maker not in made and (maker in stale or _done(output / maker) is None):
                return _unmade(planned, thing, maker, output)
        if planned.name not in stale:
            try:
                _refuse_other(output / planned.name, planned)
            except UserError as error:
                return error
        made.add(planned.name)
    return None


def _done(folder: Path) -> dict[str, Any] | None:
    path = folder / DONE
    return json.loads(path.read_text()) if path.is_file() else None


def _refuse_other(folder: Path, planned: Planned) -> None:
    path = folder / BEGUN
    begun = json.loads(path.read_text()) if path.is_file() else None
    if begun is None or begun["fingerprint"] == planned.fingerprint:
        return
    hint = f"restart={planned.name} runs it again (the old folder is kept aside), or choose another output"
    version = begun.get("version", 1)
    if version != FINGERPRINTS:
        raise UserError(
            f"stage {planned.name} was run (or begun) by another version of draftsmith (fingerprints {version}, here "
            f"{FINGERPRINTS}): whether its settings are the same cannot be told",
            where=str(folder), hint=f"go on with the version that began it; {hint}",
        )  # fmt: skip
    problem = f"stage {planned.name} was run (or begun) with other settings, data or earlier stages"
    raise UserError(problem, where=str(folder), hint=hint)


def built_on(plan: Sequence[Planned], restart: str) -> set[str]:
    """The stage, and all stages that build on it."""
    stale = {restart}
    for planned in plan:
        if stale & set(planned.inputs.values()):
            stale.add(planned.name)
    return stale


def _set_aside(stale: set[str], output: Path, say: Callable[[str], None]) -> None:
    """Rename the folders of these stages; nothing is deleted."""
    for name in sorted(stale):
        folder = output / name
        if ranks.is_main() and folder.exists():
            number = 1
            while (kept := output / f"{name}.before-{number}").exists():
                number += 1
            os.replace(folder, kept)
            say(f"stage {name}: old results kept in {kept}")
    ranks.barrier()


def _finish(folder: Path, fingerprint: str, seconds: float) -> None:
    _write(folder / DONE, {"fingerprint": fingerprint, "version": FINGERPRINTS, "seconds": round(seconds, 1)})


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write atomically, since a run may be killed here too."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(value))
    os.replace(aside, path)
