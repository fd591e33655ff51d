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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...core.files import read_json, write_whole

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


def command_identity(words: Sequence[str], fingerprints: Mapping[str, str]) -> str:
    """What tells a command from another: its words, and the settings and data of the stages that it restarts.

    Args:
        words: `key=value` as they were typed.
        fingerprints: of the restarted stages.
    """
    return hashlib.sha256(json.dumps([list(words), dict(fingerprints)], sort_keys=True).encode()).hexdigest()[:32]


def restarted_before(output: Path, command: str) -> Restarted | None:
    """What a command restarted when it was first started; None: its restart is still to come.

    Args:
        command: of `command_identity`.
    """
    return _read(output).get(command)


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
    others = {name: other for name, other in _read(output).items() if other.stage not in stale}
    _write(output, others | {command: entry})
    complete(output)
    for name, folder in kept.items():
        say(f"stage {name}: old results kept in {output / folder}")


def complete(output: Path) -> None:
    """Move what a start that was killed while it moved has left. Rank 0 calls, before a stage's folder is read."""
    restarts = _read(output)
    if all(entry.moved for entry in restarts.values()):
        return
    for entry in restarts.values():
        for name, folder in entry.kept.items() if not entry.moved else ():
            if (output / name).exists() and not (output / folder).exists():
                os.replace(output / name, output / folder)
    _write(output, {command: replace(entry, moved=True) for command, entry in restarts.items()})


def _read(output: Path) -> dict[str, Restarted]:
    path = output / RECORD
    return read_json(path, _Record, hint=_DAMAGED).restarts if path.exists() else {}


def _write(output: Path, restarts: dict[str, Restarted]) -> None:
    write_whole(output / RECORD, json.dumps(asdict(_Record(restarts)), indent=1).encode())
