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
from ..core.secrets import shortened
from .context import Context
from .restart import RECORD, command_identity, complete, is_to_come, set_aside
from .stages.base import Planned
from .stopping import Stop
from .tracked import tracked

DONE, BEGUN = "done.json", "fingerprint.json"
# Counts up when fingerprints begin to cover other things, so that no folder of before is taken for a changed one.
FINGERPRINTS = 3
# Identity of data that is not on this machine.
ABSENT = "absent"
# A stage, its folder, the folders of its inputs, and the run's flag -> the stage's context.
MakeContext = Callable[[Planned, Path, Mapping[str, Path], Stop], Context]


def run_stages(
    plan: Sequence[Planned],
    make_context: MakeContext,
    *,
    output: Path,
    chosen: Sequence[str] | None,
    restart: str | None,
    say: Callable[[str], None],
    words: Sequence[str] = (),
) -> None:
    """Run the planned stages; a finished one with the same inputs is passed over.

    Args:
        restart: of `pending_restart`: this stage and all that build on it are set aside first.
        words: of the command, as of `pending_restart`.

    Raises:
        UserError: a finished stage whose inputs changed, or one whose inputs were never made.
        Stopped: SIGTERM or SIGINT, at any moment before the last stage has finished; what is done is saved.
    """
    if restart is not None:
        # Before anything moves: good results must not go for a run that cannot begin.
        check_stages(plan, output, chosen, restart)
        ranks.barrier()
        if ranks.is_main():
            stale = built_on(plan, restart)
            set_aside(output, _identity(plan, restart, words), restart, stale, say)
        ranks.barrier()
    with Stop(say) as stop:
        for planned in plan:
            if chosen is None or planned.name in chosen:
                _run_stage(planned, make_context, stop, output, say)
        # A rank that exits while another still reads its message looks like a crash.
        ranks.barrier()


def _run_stage(
    planned: Planned, make_context: MakeContext, stop: Stop, output: Path, say: Callable[[str], None]
) -> None:
    folder = output / planned.name
    # Rank 0 reads the state and broadcasts it, since another rank might read a half-written file.
    state = ranks.broadcast(stage_state(planned, output) if ranks.is_main() else None)
    if isinstance(state, UserError):
        raise state
    if state == "finished":
        say(f"stage {planned.name}: finished before, same inputs")
        return
    stop.agree(f"before stage {planned.name}")
    say(f"stage {planned.name}")
    if ranks.is_main():
        folder.mkdir(parents=True, exist_ok=True)
        if _begun(folder) is None:
            identity = {"fingerprint": planned.fingerprint, "version": FINGERPRINTS}
            _write(folder / BEGUN, identity | {"settings": dict(planned.settings)})
    ranks.barrier()
    start = time.monotonic()
    inputs = {thing: output / maker for thing, maker in planned.inputs.items()}
    with tracked(make_context(planned, folder, inputs, stop)) as context:
        planned.stage.run(context)
    ranks.barrier()
    if ranks.is_main():
        _finish(folder, planned.fingerprint, time.monotonic() - start)
    ranks.barrier()


def pending_restart(
    plan: Sequence[Planned],
    output: Path,
    chosen: Sequence[str] | None,
    restart: str | None,
    words: Sequence[str],
    say: Callable[[str], None],
) -> str | None:
    """The stage to restart; None: nothing is to be, or this very command did it before and goes on (all ranks call).

    Args:
        words: of the command, `key=value`: they tell a command that is started again from another one.
    """
    value: str | UserError | None = None
    if ranks.is_main():
        try:
            complete(output)
            value = restart if restart is None or _restarts(plan, output, chosen, restart, words) else None
        except UserError as error:
            value = error
    value = ranks.broadcast(value)
    if isinstance(value, UserError):
        raise value
    if value is None and restart is not None:
        say(
            f"restart={restart}: this command set the old results aside before and goes on with what it has begun "
            f"(delete {output / RECORD} to begin once more)"
        )
    return value


def _restarts(
    plan: Sequence[Planned], output: Path, chosen: Sequence[str] | None, restart: str, words: Sequence[str]
) -> bool:
    stale = [p for p in plan if p.name in built_on(plan, restart) and (chosen is None or p.name in chosen)]
    unfinished = [planned.name for planned in stale if not _is_done(planned, output)]
    return is_to_come(output, _identity(plan, restart, words), unfinished)


def _identity(plan: Sequence[Planned], restart: str, words: Sequence[str]) -> str:
    stale = built_on(plan, restart)
    return command_identity(words, {planned.name: planned.fingerprint for planned in plan if planned.name in stale})


def check_stages(plan: Sequence[Planned], output: Path, chosen: Sequence[str] | None, restart: str | None) -> None:
    """Refuse, before anything is written or moved, a run that one of its stages would refuse later.

    Raises:
        UserError: a chosen stage was run with other settings and is not restarted, or takes its inputs from a stage
            that is not chosen and has not finished with these settings.
    """
    stale = built_on(plan, restart)
    running = {p.name for p in plan if chosen is None or p.name in chosen}
    for planned in plan:
        if planned.name not in running:
            continue
        if planned.name not in stale:
            _refuse_other(output / planned.name, planned)
        for thing, maker in planned.inputs.items():
            done = planned.name not in stale and _is_done(planned, output)
            if maker in running or done:
                continue
            if maker in stale:
                raise UserError(
                    f"restart={restart} sets aside stage {maker}, whose {thing} stage {planned.name} takes",
                    where=str(output / maker), hint=f"add {maker} to stages=[...]",
                )  # fmt: skip
            if (problem := _input_problem(planned, thing, maker, output)) is not None:
                raise problem


def stage_state(planned: Planned, output: Path) -> str | UserError:
    """Whether a stage has finished or is to be run, or why it cannot be."""
    if _is_done(planned, output):
        return "finished"
    try:
        _refuse_other(output / planned.name, planned)
    except UserError as error:
        return error
    problems = (_input_problem(planned, thing, maker, output) for thing, maker in planned.inputs.items())
    return next((problem for problem in problems if problem is not None), "to run")


def _is_done(planned: Planned, output: Path, *, any_data: bool = False) -> bool:
    return _done(output / planned.name) is not None and _matches(planned, output, any_data=any_data)


def _matches(planned: Planned, output: Path, *, any_data: bool = False) -> bool:
    """Whether a stage's folder was begun with these settings.

    Data that is not on this machine matches: a run may be evaluated and published where its data is not.

    Args:
        any_data: data that has changed since matches, too.
    """
    begun = _begun(output / planned.name)
    if begun is None or begun["fingerprint"] == planned.fingerprint:
        return begun is not None
    old, new = begun.get("settings") or {}, planned.settings
    if not new or any(old.get(key) != new[key] for key in new if key not in ("inputs", "data")):
        return False
    data = zip(old["data"], new["data"], strict=len(old["data"]) == len(new["data"]))
    if not any_data and any(now not in (before, ABSENT) for before, now in data):
        return False
    makers = [planned.earlier[maker] for maker in planned.inputs.values()]
    return old["inputs"].keys() == new["inputs"].keys() and all(
        _matches(maker, output, any_data=any_data) for maker in makers
    )


def _input_problem(planned: Planned, thing: str, maker: str, output: Path) -> UserError | None:
    """Why the stage that makes an input has not made it with these settings."""
    if _done(output / maker) is None:
        return UserError(
            f"stage {planned.name} needs the {thing} of stage {maker}, which has not finished",
            where=str(output / maker), hint=f"run it first: stages=[{maker},{planned.name}]",
        )  # fmt: skip
    if _is_done(planned.earlier[maker], output, any_data=planned.stage.takes_any_data):
        return None
    problem = f"stage {planned.name} takes the {thing} of stage {maker}, which was run"
    return _other(
        output / maker, planned.earlier[maker], problem,
        f"restart={maker} runs it and what builds on it again (old folders are kept aside), or take the change back",
    )  # fmt: skip


def _done(folder: Path) -> dict[str, Any] | None:
    path = folder / DONE
    return json.loads(path.read_text()) if path.is_file() else None


def _begun(folder: Path) -> dict[str, Any] | None:
    path = folder / BEGUN
    return json.loads(path.read_text()) if path.is_file() else None


def _refuse_other(folder: Path, planned: Planned) -> None:
    if _begun(folder) is not None and not _matches(planned, folder.parent):
        hint = f"restart={planned.name} runs it again (the old folder is kept aside), or choose another output"
        raise _other(folder, planned, f"stage {planned.name} was run (or begun)", hint)


def _other(folder: Path, planned: Planned, problem: str, hint: str) -> UserError:
    """The error for a folder of other settings; it names the keys with their old and new values."""
    begun = _begun(folder) or {}
    version = begun.get("version", 1)
    if version != FINGERPRINTS:
        return UserError(
            f"{problem} by another version of draftsmith (fingerprints {version}, here {FINGERPRINTS}): whether its "
            "settings are the same cannot be told",
            where=str(folder), hint=f"go on with the version that began it; {hint}",
        )  # fmt: skip
    return UserError(
        f"{problem} with other settings, data or earlier stages: "
        + "; ".join(_changes(planned, folder.parent)),
        where=str(folder), hint=hint,
    )  # fmt: skip


def _changes(planned: Planned, output: Path) -> list[str]:
    """What a stage's folder was begun with and is now otherwise, the first four: "KEY was OLD, is now NEW"."""
    old = (_begun(output / planned.name) or {}).get("settings") or {}
    before, after = _flat(old), _flat(planned.settings)
    told: list[str] = []
    for key in (key for key in before | after if before.get(key) != after.get(key)):
        section, _, thing = key.partition(".")
        if section == "inputs":
            maker = planned.inputs.get(thing)
            inner = _changes(planned.earlier[maker], output) if maker is not None else []
            told += inner or [f"stage {maker or thing}, which it builds on"]
        elif section == "data":
            told.append(f"the files of stage {planned.name} changed")
        else:
            told.append(f"{key} was {_shown(before, key)}, is now {_shown(after, key)}")
    told = list(dict.fromkeys(told)) or ["a hidden value changed"]
    return told[:4] + ([f"and {len(told) - 4} more"] if len(told) > 4 else [])


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists and empty mappings are values."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    return {k: v for name, item in value.items() for k, v in _flat(item, f"{key}.{name}" if key else str(name)).items()}


def _shown(values: Mapping[str, Any], key: str) -> str:
    return shortened(json.dumps(values[key]), 80) if key in values else "not set"


def built_on(plan: Sequence[Planned], restart: str | None) -> set[str]:
    """The stage that is restarted, and all that build on it."""
    stale = set() if restart is None else {restart}
    for planned in plan:
        if stale & set(planned.inputs.values()):
            stale.add(planned.name)
    return stale


def _finish(folder: Path, fingerprint: str, seconds: float) -> None:
    _write(folder / DONE, {"fingerprint": fingerprint, "version": FINGERPRINTS, "seconds": round(seconds, 1)})


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write atomically, since a run may be killed here too."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(value))
    os.replace(aside, path)
