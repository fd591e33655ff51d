"""`restart=STAGE` happens once for a command line: what the command has begun is gone on with.

Schedulers and shell loops start the same command again and again, and each start would set aside what the one before
has trained. A record in the run's folder says which commands have restarted what. It is written before a folder is
moved, so that a start that is killed in between is completed by the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...core import ranks
from ...core.files import read_json, write_whole
from .stage import Planned

RECORD = ".restarts.json"
_DAMAGED = "delete it: nothing is lost, but a command with restart= that was stopped halfway then begins once more"


@dataclass(frozen=True)
class Restarted:
    """What a command has restarted."""

    stage: str
    kept: dict[str, str]  # stage -> the folder that its old results were moved to
    moved: bool  # False: moving was begun, and maybe not completed
    when: str = "an unknown date"  # date and time, UTC


@dataclass(frozen=True)
class _Record:
    restarts: dict[str, Restarted]  # by command


def built_on(plan: Sequence[Planned], restart: str | None) -> set[str]:
    """The stage that is restarted, and all that build on it."""
    stale = set() if restart is None else {restart}
    for planned in plan:
        if stale & set(planned.inputs.values()):
            stale.add(planned.name)
    return stale


def command_identity(plan: Sequence[Planned], restart: str, words: Sequence[str]) -> str:
    """What tells a command from another: its words, `key=value` as they were typed, and the settings and data of the
    stages that it restarts.
    """
    fingerprints = {p.name: p.fingerprint for p in plan if p.name in built_on(plan, restart)}
    return hashlib.sha256(json.dumps([list(words), fingerprints], sort_keys=True).encode()).hexdigest()[:32]


def recorded(output: Path) -> dict[str, Restarted]:
    """What each command restarted when it was first started."""
    path = output / RECORD
    return read_json(path, _Record, hint=_DAMAGED).restarts if path.exists() else {}


def free_name(folder: Path) -> str:
    """The name that a stage's folder is kept under, beside it: STAGE.before-N."""
    number = 1
    while folder.with_name(f"{folder.name}.before-{number}").exists():
        number += 1
    return f"{folder.name}.before-{number}"


def set_aside(output: Path, command: str, stage: str, stale: Collection[str], say: Callable[[str], None]) -> None:
    """Rename the folders of a stage and of all stages that build on it; nothing is deleted. Rank 0 calls."""
    kept = {name: free_name(output / name) for name in sorted(stale) if (output / name).exists()}
    output.mkdir(parents=True, exist_ok=True)
    entry = Restarted(stage, kept, moved=False, when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    # What another command restarted of these stages goes now: the same words then have nothing left to go on with.
    others = {name: other for name, other in recorded(output).items() if other.stage not in stale}
    _write(output, others | {command: entry})
    complete(output)
    for name, folder in kept.items():
        say(f"stage {name}: old results kept in {output / folder}")


def complete(output: Path) -> None:
    """Move what a start that was killed while it moved has left. Rank 0 calls, before a stage's folder is read."""
    restarts = recorded(output)
    if all(entry.moved for entry in restarts.values()):
        return
    for entry in restarts.values():
        for name, folder in entry.kept.items() if not entry.moved else ():
            if (output / name).exists() and not (output / folder).exists():
                os.replace(output / name, output / folder)
    _write(output, {command: replace(entry, moved=True) for command, entry in restarts.items()})


def _write(output: Path, restarts: dict[str, Restarted]) -> None:
    write_whole(output / RECORD, json.dumps(asdict(_Record(restarts)), indent=1).encode())


def pending_restart(
    plan: Sequence[Planned],
    output: Path,
    restart: str | None,
    words: Sequence[str],
    say: Callable[[str], None],
) -> str | None:
    """The stage to restart; None: nothing is to be, or this very command did it before and goes on (all ranks call)."""

    ranks.on_main(complete, output)
    if restart is None:
        return None
    before: Restarted | None = ranks.on_main(recorded, output).get(command_identity(plan, restart, words))
    if before is None:
        return restart
    say(
        f"restart={restart}: this command restarted {restart} on {before.when} and goes on with what it has begun; to "
        f"begin anew delete {output / RECORD}"
    )
    return None
