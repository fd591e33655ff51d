"""Whether a stage folder holds what a plan asks for (settings, data, weights, earlier results); if not, what changed.

`fingerprint.json` says what a stage was begun with, and which results it read. That is compared key by key, so that an
error names what changed, and so that data which is not on this machine may count as unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...core.errors import UserError
from ...core.json_types import JsonMapping, flat
from ...core.results import BEGUN, DONE, Mark, read_mark, write_mark
from ...core.secrets import shortened
from ...data.shards.shards import IDENTITY
from .finished_stages import unreadable
from .stage import Planned

# Counts up when fingerprints begin to cover other things, so that no folder of before is taken for a changed one.
FINGERPRINTS = 6
# Identity of data and weights that are not on this machine.
ABSENT = "absent"
# Key of stored settings: hash of the settings as they were written, since secrets are hidden in what is stored.
HIDDEN = "as_written"
# Keys of stored settings that are compared by rules of their own; all others must be equal.
RULED = ("inputs", "data", "outside")
_SAMPLE = "sample.txt"  # rendered for people before step 0, and written anew


def stage_state(planned: Planned, output: Path) -> str | UserError:
    """Whether a stage has finished or is to be run, or why it cannot be."""
    if is_done(planned, output):
        return "finished"
    try:
        refuse_other(output / planned.name, planned)
    except UserError as error:
        return error
    problems = (input_problem(planned, thing, maker, output) for thing, maker in planned.inputs.items())
    return next((problem for problem in problems if problem is not None), "to run")


def is_done(planned: Planned, output: Path, *, any_data: bool = False) -> bool:
    """Whether a stage has finished with these settings; `any_data` as in `_changes`."""
    return done(output / planned.name) is not None and not _changes(planned, output, any_data=any_data)


def done(folder: Path) -> Mark | None:
    """What a stage's folder says that has finished."""
    return read_mark(folder / DONE)


def begun(folder: Path) -> Mark | None:
    """What the stage was begun with; of a finished one, `done.json` tells its fingerprint as well."""
    return read_mark(folder / BEGUN) or done(folder)


def made_nothing(folder: Path) -> bool:
    """Whether a stage has begun, and has left no file that it or another stage would go on from."""
    return begun(folder) is not None and all(
        path.name.startswith(".") or path.parts[0].startswith("wandb") or str(path) == BEGUN or _is_made_again(path)
        for path in _files(folder)
    )


def _files(folder: Path) -> Iterator[Path]:
    return (Path(place, name).relative_to(folder) for place, _, names in os.walk(folder) for name in names)


def _is_made_again(path: Path) -> bool:
    """Whether each start writes a file anew: a sample for people, an index of the data, whose shards would lie here."""
    return (
        str(path) == _SAMPLE or path.parts[0] == "cache" or path.suffix in (".lock", ".partial")
        or path.name == IDENTITY or (path.name.startswith("skipped") and path.suffix == ".jsonl")
    )  # fmt: skip


def begin_anew(planned: Planned, folder: Path) -> None:
    """Begin a stage that made nothing as it is now: what was fixed since is what it reads."""
    mark = begun(folder)
    if mark is not None and mark.fingerprint != planned.fingerprint:
        for path in [*_files(folder)]:
            if _is_made_again(path):
                (folder / path).unlink()
    write_begun(planned, folder)


def write_begun(planned: Planned, folder: Path) -> None:
    """Write `fingerprint.json`. Of each input it holds the fingerprint that the input's folder has on disk now.

    The plan's own may be another one: of data that is not on this machine it knows nothing.
    """
    settings = dict(planned.settings)
    if planned.inputs and settings:
        there = {thing: begun(folder.parent / maker) for thing, maker in planned.inputs.items()}
        settings["inputs"] = settings["inputs"] | {t: mark.fingerprint for t, mark in there.items() if mark is not None}
    # A finished stage whose file was lost: what `auto` became there, which this machine cannot tell.
    finished = done(folder)
    resolved = None if finished is None else finished.resolved
    write_mark(folder / BEGUN, Mark(planned.fingerprint, FINGERPRINTS, settings=settings, resolved=resolved))


def _changes(planned: Planned, output: Path, *, any_data: bool = False) -> list[str]:
    """What a stage that was begun read and is otherwise now, as "KEY was OLD, is now NEW"; none: its folder holds what
    is planned. Its inputs are compared with the results that their folders hold now.

    Data and weights that are not on this machine match: a run may be evaluated and published where its data is not.

    Args:
        any_data: data that has changed since matches, too.
    """
    mark = begun(output / planned.name)
    assert mark is not None, planned.name
    old, new, changes = mark.settings or {}, planned.settings, []
    recorded, is_equal = old.get("inputs", {}), mark.fingerprint == planned.fingerprint
    if not is_equal and not (old and new):
        changes.append("its settings, which are not known")
    elif not is_equal:
        changes += _changed_values(old, new)
        changes += [
            f"the weights or files at {key} ({shortened(str(flat(new).get(key, key)), 200)}) have changed"
            for key in _changed_outside(old, new)
        ]
        if not any_data and not _is_same_data(old["data"], new["data"]):
            changes.append(f"the files of stage {planned.name} changed")
        changes += [f"the {thing} was taken from another stage" for thing in recorded.keys() ^ new["inputs"].keys()]
    for thing, maker in planned.inputs.items():
        now = begun(output / maker)
        if now is None:  # removed to save room: nothing says that it was made anew
            if not is_equal and not _may_be_as_read(planned, thing, recorded):
                changes.append(f"stage {maker}, which it builds on")
            continue
        if maker in planned.earlier:
            changes += _changes(planned.earlier[maker], output, any_data=any_data)
        # A stage that ran again with equal settings on equal data has an equal fingerprint, and by promise its results.
        if now.fingerprint != recorded.get(thing, now.fingerprint):
            changes.append(f"stage {maker}, which it builds on, has run anew since")
    return list(dict.fromkeys(changes))


def _changed_values(old: JsonMapping, new: JsonMapping) -> list[str]:
    """Settings are compared by the hash of what was written: what is stored depends on the environment's secrets."""
    has_hash = HIDDEN in old and HIDDEN in new
    if has_hash and old[HIDDEN] == new[HIDDEN]:
        return []
    before, after = (flat({k: v for k, v in s.items() if k not in (*RULED, HIDDEN)}) for s in (old, new))
    shown = [
        f"{key} was {_shown(before, key)}, is now {_shown(after, key)}"
        for key in before | after
        if before.get(key) != after.get(key)
    ]
    return shown or ["a hidden value changed"] * has_hash


def _may_be_as_read(planned: Planned, thing: str, recorded: Mapping[str, str]) -> bool:
    """Whether an input that was removed may have been the one that this plan would make: its fingerprint is the one
    that was read, or cannot be told without data that is not on this machine.
    """
    maker = planned.earlier.get(planned.inputs[thing])
    is_equal = recorded.get(thing) == planned.settings.get("inputs", {}).get(thing)
    return is_equal or (maker is not None and not _is_data_here(maker))


def _is_data_here(planned: Planned) -> bool:
    """Whether the data of a stage, and of all that it builds on, is on this machine."""
    makers = [planned.earlier[maker] for maker in planned.inputs.values() if maker in planned.earlier]
    return ABSENT not in planned.settings.get("data", ()) and all(map(_is_data_here, makers))


def _is_same_data(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether files are as they were. Of data that is not here it is not known how many there are."""
    if now and all(identity == ABSENT for identity in now):
        return True
    return len(before) == len(now) and all(new in (old, ABSENT) for old, new in zip(before, now, strict=True))


def _changed_outside(old: JsonMapping, new: JsonMapping) -> Iterator[str]:
    """Keys of weights and files outside the run that are here, were here when the stage began, and are other ones."""
    before, now = old.get("outside", {}), new.get("outside", {})
    for key in before.keys() & now.keys():
        if ABSENT not in (before[key], now[key]) and before[key] != now[key]:
            yield key


def input_problem(planned: Planned, thing: str, maker: str, output: Path) -> UserError | None:
    """Why the stage that makes an input has not made it with these settings."""
    thing = thing.partition("/")[0]  # "drafter/finetune": one of several drafters
    if done(output / maker) is None:
        earlier, hint = planned.earlier.get(maker), f'run it first: "stages=[{maker},{planned.name}]"'
        if earlier is not None and earlier.stage.command != planned.stage.command:
            hint = f"draftsmith {earlier.stage.command} NAME runs it: the same NAME and settings, without stages="
        return UserError(
            f"stage {planned.name} needs the {thing} of stage {maker}, which has not finished"
            + "".join(f" ({name} cannot be read)" for name in unreadable(output / maker)),
            where=str(output / maker), hint=hint,
        )  # fmt: skip
    if is_done(planned.earlier[maker], output, any_data=planned.stage.takes_any_data):
        return None
    problem = f"stage {planned.name} takes the {thing} of stage {maker}, which was run"
    return _other(
        output / maker, planned.earlier[maker], problem,
        f"restart={_first_other(planned.earlier[maker], output)} runs it and what builds on it again (old folders are "
        "kept aside), or take the change back",
    )  # fmt: skip


def refuse_other(folder: Path, planned: Planned) -> None:
    """Raises `UserError` where a stage's folder was begun with other settings; it names the keys.

    A stage that made nothing yet may begin with others: the error that ended it asked for a change of data or weights.
    """
    if begun(folder) is not None and not made_nothing(folder) and _changes(planned, folder.parent):
        first = _first_other(planned, folder.parent)
        again = "it again (the old folder is" if first == planned.name else "it and what builds on it again (they are"
        hint = f"restart={first} runs {again} kept aside), or choose another output"
        raise _other(folder, planned, f"stage {planned.name} was run (or begun)", hint)


def _first_other(planned: Planned, output: Path) -> str:
    """The stage to restart so that this one can run: itself, or one that it builds on and that has changed, too."""
    for maker in dict.fromkeys(planned.inputs.values()):
        earlier = planned.earlier.get(maker)
        if earlier is not None and begun(output / maker) is not None and _changes(earlier, output):
            return _first_other(earlier, output)
    return planned.name


def _other(folder: Path, planned: Planned, problem: str, hint: str) -> UserError:
    """The error for a folder of other settings; it names the keys with their old and new values."""
    mark = begun(folder)
    assert mark is not None, folder
    if mark.version != FINGERPRINTS:
        return UserError(
            f"{problem} by another version of draftsmith (fingerprints {mark.version}, here {FINGERPRINTS}): whether "
            "its settings are the same cannot be told",
            where=str(folder), hint=f"go on with the version that began it; {hint}",
        )  # fmt: skip
    if mark.settings is None and unreadable(folder):
        return UserError(
            f"{problem} with other settings, and {BEGUN}, which would tell them, cannot be read",
            where=str(folder / BEGUN), hint=hint,
        )  # fmt: skip
    changes = _changes(planned, folder.parent)
    more = [f"and {len(changes) - 4} more"] if len(changes) > 4 else []
    told = "; ".join([*changes[:4], *more])
    return UserError(f"{problem} with other settings, data or earlier stages: {told}", where=str(folder), hint=hint)


def _shown(values: JsonMapping, key: str) -> str:
    return shortened(json.dumps(values[key]), 80) if key in values else "not set"
