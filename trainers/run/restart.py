"""`restart=STAGE` happens once for a command line: what the command has begun is gone on with.

Schedulers and shell loops start the same command again and again, and each start would set aside what the one before
has trained. A record in the run's folder says which commands have restarted what. It is written after the last folder
was moved: a start that is killed in between is not in it, and the next one moves what is left.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ...core import ranks
from ...core.files import read_json, write_whole
from .stage import Planned

RECORD = ".restarts.json"
_DAMAGED = (
    "an earlier version may have written it; delete it: nothing is lost, but a command with restart= that was stopped "
    "halfway then begins once more"
)


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


def recorded(output: Path) -> dict[str, tuple[str, str]]:
    """Command -> the stage that it restarted when it was first started, and when that was."""
    path = output / RECORD
    return read_json(path, dict[str, tuple[str, str]], hint=_DAMAGED) if path.exists() else {}


def free_name(folder: Path) -> str:
    """The name that a stage's folder is kept under, beside it: STAGE.before-N."""
    number = 1
    while folder.with_name(f"{folder.name}.before-{number}").exists():
        number += 1
    return f"{folder.name}.before-{number}"


def set_aside(output: Path, command: str, stage: str, stale: Collection[str], say: Callable[[str], None]) -> None:
    """Rename the folders of a stage and of all stages that build on it; nothing is deleted. Rank 0 calls."""
    for name in sorted(stale, key=lambda name: (name == stage, name)):  # what builds on it first: its inputs are there
        if (folder := output / name).exists():
            aside = free_name(folder)
            os.replace(folder, output / aside)
            say(f"stage {name}: old results kept in {output / aside}")
    output.mkdir(parents=True, exist_ok=True)
    # What another command restarted of these stages goes now: the same words then have nothing left to go on with.
    others = {name: other for name, other in recorded(output).items() if other[0] not in stale}
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    write_whole(output / RECORD, json.dumps(others | {command: (stage, when)}, indent=1).encode())


def pending_restart(
    plan: Sequence[Planned],
    output: Path,
    restart: str | None,
    words: Sequence[str],
    say: Callable[[str], None],
) -> str | None:
    """The stage to restart; None: nothing is to be, or this very command did it before and goes on (all ranks call)."""
    if restart is None:
        return None
    before = ranks.on_main(recorded, output).get(command_identity(plan, restart, words))
    if before is None:
        return restart
    say(
        f"restart={restart}: this command restarted {restart} on {before[1]} and goes on with what it has begun; to "
        f"begin anew delete {output / RECORD}"
    )
    return None
