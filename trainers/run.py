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
from ..core.files import full_disk_is_told, sweep
from ..core.results import DONE, Mark, read_mark, write_mark
from ..core.secrets import shortened
from . import mending
from .context import Context
from .restart import RECORD, command_identity, complete, free_name, is_to_come, set_aside
from .results import BEGUN, InputCheck, unreadable, write_done
from .stages.base import Planned
from .stopping import Stop
from .tracked import tracked

# Counts up when fingerprints begin to cover other things, so that no folder of before is taken for a changed one.
FINGERPRINTS = 3
# Identity of data that is not on this machine.
ABSENT = "absent"
# Folders beside the stages' that stages write to: kept pictures, published sets.
SHARED = (".pictures", ".*suite-*")
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
        UserError: a finished stage whose inputs changed, one whose inputs were never made, or a file of a finished
            stage that is not as it was written and that a stage would read now.
        Stopped: SIGTERM or SIGINT, at any moment before the last stage has finished; what is done is saved.
    """
    inputs = InputCheck(output, say)
    # Before anything moves or is written: good results must not go for a run that cannot begin.
    if restart is not None:
        check_stages(plan, output, chosen, restart)
    broken = _on_main(look_at_results, plan, chosen, restart, inputs)
    if restart is not None:
        stale = built_on(plan, restart)
        _on_main(set_aside, output, _identity(plan, restart, words), restart, stale, say)
    with Stop(say) as stop:
        for planned in plan:
            if chosen is None or planned.name in chosen:
                _run_stage(planned, make_context, stop, inputs, broken.get(planned.name), say)
        # A rank that exits while another still reads its message looks like a crash.
        ranks.barrier()


def _sweep(output: Path, folder: Path) -> None:
    """Remove what killed writers have left. Who holds the run's lock is the only one to write here."""
    for place in (folder, *(place for pattern in SHARED for place in output.glob(pattern))):
        sweep(place)


def _run_stage(
    planned: Planned,
    make_context: MakeContext,
    stop: Stop,
    inputs: InputCheck,
    broken: mending.Broken | None,
    say: Callable[[str], None],
) -> None:
    """Pass over a finished stage, write the broken shards of one again, or run it."""
    folder = inputs.output / planned.name
    # Rank 0 reads the state and broadcasts it, since another rank might read a half-written file.
    state = ranks.broadcast(stage_state(planned, inputs.output) if ranks.is_main() else None)
    if isinstance(state, UserError):
        raise state
    if state == "finished" and broken is None:
        say(f"stage {planned.name}: finished before, same inputs")
        _on_main(_write_begun, planned, folder, say)
        return
    stop.agree(f"before stage {planned.name}")
    # Again, since hours may have passed; what has not changed since is not read again.
    _on_main(_check_inputs, planned, inputs)
    say(f"stage {planned.name}")
    _on_main(_sweep, inputs.output, folder)
    if broken is not None:
        _on_main(mending.drop, planned, folder, broken, say)
    else:
        _on_main(_begin, planned, folder, say)
    start = time.monotonic()
    makers = {thing: inputs.output / maker for thing, maker in planned.inputs.items()}
    with tracked(make_context(planned, folder, makers, stop)) as context, full_disk_is_told(folder):
        planned.stage.run(context)
    ranks.barrier()
    if broken is not None:
        _on_main(mending.compare, planned, folder, broken, say)
    else:
        _on_main(write_done, planned, folder, FINGERPRINTS, time.monotonic() - start)


def _on_main(work: Callable[..., Any], *arguments: Any) -> Any:
    """Rank 0 works while the others wait; all of them return its value, or raise its `UserError`."""
    value: Any = None
    if ranks.is_main():
        try:
            value = work(*arguments)
        except UserError as error:
            value = error
    value = ranks.broadcast(value)
    if isinstance(value, UserError):
        raise value
    return value


def look_at_results(
    plan: Sequence[Planned], chosen: Sequence[str] | None, restart: str | None, inputs: InputCheck
) -> dict[str, mending.Broken]:
    """Look at what the stages that will run read of finished ones. Rank 0's.

    Returns the finished stages whose shards are to be written again.

    Raises:
        UserError: a file is not as its stage wrote it, and no stage that runs writes it again.
    """
    stale, broken, output = built_on(plan, restart), {}, inputs.output
    running = {p.name for p in plan if chosen is None or p.name in chosen}
    # From the last stage to the first: a stage that writes shards again reads what others made, too.
    for planned in reversed([p for p in plan if p.name in running]):
        if planned.name not in stale and planned.name not in broken and _is_done(planned, output):
            lost = mending.find_broken(planned, output / planned.name, is_read=False)
            if lost is None:
                continue
            broken[planned.name] = lost
        makers = [maker for maker in sorted({*planned.inputs.values()} - stale) if _done(output / maker) is not None]
        for maker in makers:
            shards = mending.find_broken(planned.earlier[maker], output / maker, is_read=True)
            if shards is not None and maker not in running:
                raise shards.refusal(planned, maker, output)
            if shards is not None:
                broken[maker] = shards
        inputs.check(planned, makers)
    return broken


def _check_inputs(planned: Planned, inputs: InputCheck) -> None:
    makers = sorted({*planned.inputs.values()})
    for maker in makers:
        shards = mending.find_broken(planned.earlier[maker], inputs.output / maker, is_read=True)
        if shards is not None:
            raise shards.refusal(planned, maker, inputs.output)
    inputs.check(planned, makers)


def _begin(planned: Planned, folder: Path, say: Callable[[str], None]) -> None:
    """The stage's folder with its fingerprint. What nobody can tell the settings of is kept aside."""
    if DONE in unreadable(folder):
        say(f"stage {planned.name}: {DONE} cannot be read (empty, cut or damaged), so the stage counts as not finished")
    if folder.is_dir() and _begun(folder) is None and any(folder.iterdir()):
        kept = folder.with_name(free_name(folder))
        os.replace(folder, kept)
        say(f"stage {planned.name}: {BEGUN} is missing or cannot be read, so the settings of what is there are not "
            f"known: it is kept in {kept}, and the stage begins anew")  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    _write_begun(planned, folder, say)


def _write_begun(planned: Planned, folder: Path, say: Callable[[str], None]) -> None:
    if read_mark(folder / BEGUN) is None:
        if (folder / BEGUN).is_file():
            say(f"stage {planned.name}: {BEGUN} could not be read, and is written again")
        write_mark(folder / BEGUN, Mark(planned.fingerprint, FINGERPRINTS, settings=dict(planned.settings)))


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
    if begun is None or begun.fingerprint == planned.fingerprint:
        return begun is not None
    old, new = begun.settings or {}, planned.settings
    if not new or any(old.get(key) != new[key] for key in new if key not in ("inputs", "data")):
        return False
    if not any_data and not _is_same_data(old["data"], new["data"]):
        return False
    makers = [planned.earlier[maker] for maker in planned.inputs.values()]
    return old["inputs"].keys() == new["inputs"].keys() and all(
        _matches(maker, output, any_data=any_data) for maker in makers
    )


def _is_same_data(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether files are as they were. Of data that is not here it is not known how many there are."""
    if now and all(identity == ABSENT for identity in now):
        return True
    return len(before) == len(now) and all(new in (old, ABSENT) for old, new in zip(before, now, strict=True))


def _input_problem(planned: Planned, thing: str, maker: str, output: Path) -> UserError | None:
    """Why the stage that makes an input has not made it with these settings."""
    if _done(output / maker) is None:
        return UserError(
            f"stage {planned.name} needs the {thing} of stage {maker}, which has not finished"
            + "".join(f" ({name} cannot be read)" for name in unreadable(output / maker)),
            where=str(output / maker), hint=f"run it first: stages=[{maker},{planned.name}]",
        )  # fmt: skip
    if _is_done(planned.earlier[maker], output, any_data=planned.stage.takes_any_data):
        return None
    problem = f"stage {planned.name} takes the {thing} of stage {maker}, which was run"
    return _other(
        output / maker, planned.earlier[maker], problem,
        f"restart={maker} runs it and what builds on it again (old folders are kept aside), or take the change back",
    )  # fmt: skip


def _done(folder: Path) -> Mark | None:
    return read_mark(folder / DONE)


def _begun(folder: Path) -> Mark | None:
    """What the stage was begun with; of a finished one, `done.json` tells its fingerprint as well."""
    return read_mark(folder / BEGUN) or _done(folder)


def _refuse_other(folder: Path, planned: Planned) -> None:
    if _begun(folder) is not None and not _matches(planned, folder.parent):
        hint = f"restart={planned.name} runs it again (the old folder is kept aside), or choose another output"
        raise _other(folder, planned, f"stage {planned.name} was run (or begun)", hint)


def _other(folder: Path, planned: Planned, problem: str, hint: str) -> UserError:
    """The error for a folder of other settings; it names the keys with their old and new values."""
    begun = _begun(folder)
    assert begun is not None, folder
    if begun.version != FINGERPRINTS:
        return UserError(
            f"{problem} by another version of draftsmith (fingerprints {begun.version}, here {FINGERPRINTS}): whether "
            "its settings are the same cannot be told",
            where=str(folder), hint=f"go on with the version that began it; {hint}",
        )  # fmt: skip
    if begun.settings is None and unreadable(folder):
        return UserError(
            f"{problem} with other settings, and {BEGUN}, which would tell them, cannot be read",
            where=str(folder / BEGUN), hint=hint,
        )  # fmt: skip
    return UserError(
        f"{problem} with other settings, data or earlier stages: "
        + "; ".join(_changes(planned, folder.parent)),
        where=str(folder), hint=hint,
    )  # fmt: skip


def _changes(planned: Planned, output: Path) -> list[str]:
    """What a stage's folder was begun with and is now otherwise, the first four: "KEY was OLD, is now NEW"."""
    begun = _begun(output / planned.name)
    before, after = _flat((begun and begun.settings) or {}), _flat(planned.settings)
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
