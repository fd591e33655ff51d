"""Whether a stage folder holds what a plan asks for (settings, data, weights, earlier results); if not, what changed.

`fingerprint.json` says what a stage was begun with, and which results it read. That is compared key by key, so that an
error names what changed, and so that data which is not on this machine may count as unchanged. `done.json` lists the
files of a finished stage, which are compared before another stage reads them. The list leaves out checkpoints, indices
and logs that may change or go. Shards are not in it either: their manifest is, which holds the checksum of each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import lru_cache
from pathlib import Path

from ...core import ranks
from ...core.errors import UserError
from ...core.files import share_as_usual
from ...core.json_types import JsonMapping, flat, object_at, text_at, walk
from ...core.results import BEGUN, DONE, Mark, damage, read_mark, sums_of, write_mark
from ...core.secrets import redact, shortened
from ...data.shards.shards import IDENTITY, ShardReader, is_of_shard
from .stage import Planned

# Counts up when fingerprints begin to cover other things, so that no folder of before is taken for a changed one.
FINGERPRINTS = 6
# Identity of data and weights that are not on this machine.
ABSENT = "absent"
# Key of stored settings: hash of the settings as they were written, since secrets are hidden in what is stored.
HIDDEN = "as_written"
# Keys of stored settings that are compared by rules of their own; all others must be equal.
RULED = ("inputs", "data", "outside")
# Keys of sections whose value may be the path of weights or a tokenizer, or the folder of a stage of another run.
NAMES_WEIGHTS = {"path", "language_model", "vision_tower", "text_encoder", "tokenizer", "vq", "vq_path"}

# Files of a stage's folder, as patterns. Listed for people, and read by no later stage: one that was changed or deleted
# stops nothing.
_BESIDE = ("best-*/*", "samples/*", "metrics.jsonl", "skipped.jsonl", "refused-*.jsonl", "sample.txt")
_UNLISTED = ("*.lock", "*.partial", ".*", "*/.*")
# All that a stage leaves which has made nothing: it writes them anew, among them an index of the data, and what says of
# which states its shards would be.
_NOTHING = (*_UNLISTED, BEGUN, "sample.txt", "wandb*", "cache/*", "skipped*.jsonl", IDENTITY, f"*/{IDENTITY}")


def stage_state(planned: Planned, output: Path) -> str | UserError:
    """Whether a stage has finished or is to be run, or why it cannot be."""
    try:
        if is_done(planned, output):
            return "finished"
        refuse_other(output / planned.name, planned)
        problems = [input_problem(planned, thing, maker, output) for thing, maker in planned.inputs.items()]
    except UserError as error:
        return error
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
    return begun(folder) is not None and all(_matches(name, _NOTHING) for name in _files(folder))


def forget(folder: Path) -> None:
    """Remove what a stage that made nothing has left, but for what wandb has of it."""
    for name in _files(folder):
        if not name.startswith(("wandb", ".")):
            (folder / name).unlink()


def write_begun(planned: Planned, folder: Path) -> None:
    """Write `fingerprint.json` where there is none. Of each input it holds the fingerprint that the input's folder has
    on disk now. The plan's own may be another one: of data that is not on this machine it knows nothing.
    """
    if read_mark(folder / BEGUN) is not None:
        return
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
    With `any_data` data that has changed since matches, too.
    """
    mark = begun(output / planned.name)
    assert mark is not None, planned.name
    old, new, changes = mark.settings or {}, planned.settings, []
    recorded, is_equal = old.get("inputs", {}), mark.fingerprint == planned.fingerprint
    if not is_equal and not (old and new):
        changes.append("its settings, which are not known")
    elif not is_equal:
        # Compared by the hash of what was written: what is stored depends on the environment's secrets.
        if old.get(HIDDEN) != new.get(HIDDEN):
            before, after = (flat({k: v for k, v in s.items() if k not in (*RULED, HIDDEN)}) for s in (old, new))
            shown = [
                "{} was {}, is now {}".format(key, *_shown(before, after, key))
                for key in before | after
                if before.get(key) != after.get(key)
            ]
            changes += shown or ["a hidden value changed"]
        outside, now_outside = old.get("outside", {}), new.get("outside", {})
        changes += [
            f"the weights or files at {key} ({shortened(str(flat(new).get(key, key)), 200)}) have changed"
            for key in outside.keys() & now_outside.keys()
            if ABSENT not in (outside[key], now_outside[key]) and outside[key] != now_outside[key]
        ]
        if not any_data and not _is_same_data(old["data"], new["data"]):
            changes.append(f"the files of stage {planned.name} changed")
        changes += [f"the {thing} was taken from another stage" for thing in recorded.keys() ^ new["inputs"].keys()]
    for thing, maker in planned.inputs.items():
        now, earlier = begun(output / maker), planned.earlier.get(maker)
        if now is None:
            # Removed to save room: nothing says that it was made anew. It may be what was read where this plan's
            # fingerprint of it is that one, or cannot be told without data that is not on this machine.
            is_as_read = recorded.get(thing) == new.get("inputs", {}).get(thing)
            if not (is_equal or is_as_read or (earlier is not None and not _is_data_here(earlier))):
                changes.append(f"stage {maker}, which it builds on")
            continue
        if earlier is not None:
            changes += _changes(earlier, output, any_data=any_data)
        # A stage that ran again with equal settings on equal data has an equal fingerprint, and by promise its results.
        if now.fingerprint != recorded.get(thing, now.fingerprint):
            changes.append(f"stage {maker}, which it builds on, has run anew since")
    return list(dict.fromkeys(changes))


def _is_data_here(planned: Planned) -> bool:
    makers = [planned.earlier[maker] for maker in planned.inputs.values() if maker in planned.earlier]
    return ABSENT not in planned.settings.get("data", ()) and all(map(_is_data_here, makers))


def _is_same_data(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether files are as they were. Of data that is not here it is not known how many there are."""
    if now and all(identity == ABSENT for identity in now):
        return True
    return len(before) == len(now) and all(new in (old, ABSENT) for old, new in zip(before, now, strict=True))


def input_problem(planned: Planned, thing: str, maker: str, output: Path) -> UserError | None:
    """Why the stage that makes an input has not made it with these settings."""
    thing = thing.partition("/")[0]  # "drafter/finetune": one of several drafters
    if done(output / maker) is None:
        earlier, hint = planned.earlier.get(maker), f'run it first: "stages=[{maker},{planned.name}]"'
        if earlier is not None and earlier.stage.command != planned.stage.command:
            hint = f"draftsmith {earlier.stage.command} NAME runs it: the same NAME and settings, without stages="
        return UserError(
            f"stage {planned.name} needs the {thing} of stage {maker}, which has not finished",
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
    changes = _changes(planned, folder.parent)
    more = [f"and {len(changes) - 4} more"] if len(changes) > 4 else []
    summary = "; ".join([*changes[:4], *more])
    return UserError(f"{problem} with other settings, data or earlier stages: {summary}", where=str(folder), hint=hint)


def _shown(before: JsonMapping, after: JsonMapping, key: str) -> Iterator[str]:
    """Both values, cut to where they begin to differ."""
    # Redacted before they are cut: half a key no longer looks like one.
    texts = [redact(json.dumps(values[key])) if key in values else "not set" for values in (before, after)]
    common = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    for text in texts:
        yield text[:80] if common < 60 else f"... {text[common - 20 :][:76]}"


def write_done(planned: Planned, folder: Path, version: int, seconds: float, *, gpus: int = 0) -> None:
    """Write `done.json`: the stage's fingerprint, what it took (all ranks held `gpus` together), and its files."""
    stage = planned.stage
    names = [
        name for name in _files(folder)
        if name not in (DONE, BEGUN)
        and not _matches(name.partition("/")[0], stage.working)
        and not _matches(name, _UNLISTED)
        and (os.path.dirname(name) != stage.shards or not is_of_shard(os.path.basename(name)))
    ]  # fmt: skip
    for name in names:
        share_as_usual(folder / name)
    files, begun = sums_of(folder, names), read_mark(folder / BEGUN)
    mark = Mark(
        planned.fingerprint, version, seconds=round(seconds, 1), ranks=ranks.world_size(), gpus=gpus, files=files
    )
    # What `auto` became is lost with `fingerprint.json` otherwise, and no finished stage resolves it anew.
    write_mark(folder / DONE, replace(mark, resolved=None if begun is None else begun.resolved))


def named_weights(section: JsonMapping) -> Iterator[tuple[str, str]]:
    """Key and path of the weights that a section itself names."""
    for key in sorted(NAMES_WEIGHTS & section.keys()):
        value = text_at(section, key)
        if value is not None and (key == "path" or value != "target"):  # the target's own half: no path
            yield key, value


def check_inputs(planned: Planned, makers: Iterable[str], output: Path) -> None:
    """Compare what a stage reads with the lists of the stages that wrote it: of `makers`, which have finished in this
    run, and of other runs that the recipe names. Rank 0 calls. Raises `UserError` where a file is missing, was changed
    or was added; `where` names it.
    """
    for maker in makers:
        things = ", ".join(sorted(thing for thing, name in planned.inputs.items() if name == maker))
        if (shards := planned.earlier[maker].stage.shards) is not None:
            ShardReader(output / maker / shards)  # names one that is missing or cut; samples are checked when read
        _check(
            output / maker, f"stage {planned.name} takes the {things} of stage {maker}",
            f"put the file back as it was, or restart={maker} runs that stage and what builds on it again (old "
            "folders are kept aside)",
        )  # fmt: skip
    for _, part in walk(planned.settings):
        for _, path in named_weights(object_at(part) or {}):
            if os.path.isfile(os.path.join(path, DONE)):
                _check(
                    Path(path), f"stage {planned.name} takes what another run left in {path}",
                    "put the file back as it was, or run the stage that wrote it again",
                )  # fmt: skip


def _check(folder: Path, taken: str, cure: str) -> None:
    mark = read_mark(folder / DONE)
    if mark is None or mark.files is None:
        raise UserError(f"{taken}, and {DONE} there lists no files", where=str(folder / DONE), hint=cure)
    problems = damage(folder, mark.files, lambda name: not _matches(name, _BESIDE))
    if problems:
        first, more = problems[0], len(problems) - 1
        problem = f"{taken}, and {first.name} {first.problem}" + (f" (and {more} more)" if more else "")
        if first.name in mark.files and problems[-1].name not in mark.files:  # under other names, or a damaged list
            problem += f"; the folder's files are not those that {DONE} lists"
        raise UserError(problem, where=str(folder / first.name), hint=cure)


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return _pattern(patterns).match(name) is not None


@lru_cache(maxsize=64)
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One for all, since there may be ten thousands of names."""
    return re.compile("|".join(map(translate, patterns)))
