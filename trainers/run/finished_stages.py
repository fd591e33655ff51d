"""The results of finished stages: their list in `done.json`, and the check of a stage's inputs before it runs.

The list leaves out checkpoints, indices and logs that may change or go. Shards are not in it either: their manifest is,
which holds the checksum of each of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import translate
from functools import lru_cache
from pathlib import Path

from ...core import ranks
from ...core.errors import UserError
from ...core.files import share_as_usual
from ...core.json_types import JsonMapping, object_at, text_at, walk
from ...core.results import BEGUN, DONE, Fault, Mark, faults, loadable, read_mark, sums_of, write_mark
from ...data.shards.shards import ShardReader, is_of_shard
from .stage import Planned, Stage

# Listed for people, and read by no later stage: one that was changed or deleted stops nothing.
_BESIDE = ("best-*/*", "samples/*", "metrics.jsonl", "skipped.jsonl", "refused-*.jsonl", "sample.txt")
# Keys of sections whose value may be the path of weights or a tokenizer, or the folder of a stage of another run.
NAMES_WEIGHTS = {"path", "language_model", "vision_tower", "text_encoder", "tokenizer", "vq", "vq_path"}
# Values of these keys that are no paths: a draft with the target's own vision tower.
_WORDS = {"vision_tower": ("target",)}
_UNLISTED = ("*.lock", "*.partial", ".*")


def write_done(planned: Planned, folder: Path, version: int, seconds: float, *, gpus: int = 0) -> None:
    """Write `done.json`: the stage's fingerprint, what it took, and size and XXH3 of each file that it wrote.

    Args:
        gpus: that all ranks held together; 0: on CPUs.
    """
    names = list(_names(planned.stage, folder))
    for name in names:
        share_as_usual(folder / name)
    files, begun = sums_of(folder, names), read_mark(folder / BEGUN)
    mark = Mark(
        planned.fingerprint, version, seconds=round(seconds, 1), ranks=ranks.world_size(), gpus=gpus, files=files
    )
    # What `auto` became is lost with `fingerprint.json` otherwise, and no finished stage resolves it anew.
    write_mark(folder / DONE, replace(mark, resolved=None if begun is None else begun.resolved))


def unreadable(folder: Path) -> list[str]:
    """Which of the two marks of a stage's folder are there and cannot be read."""
    return [name for name in (DONE, BEGUN) if (folder / name).is_file() and read_mark(folder / name) is None]


def named_weights(section: JsonMapping) -> Iterator[tuple[str, str]]:
    """Key and path of the weights that a section itself names; words that stand in place of a path are left out."""
    for key in sorted(NAMES_WEIGHTS & section.keys()):
        if (value := text_at(section, key)) is not None and value not in _WORDS.get(key, ()):
            yield key, value


def check_inputs(planned: Planned, makers: Iterable[str], output: Path) -> None:
    """Compare what a stage reads with the lists of the stages that wrote it, in this run and in others that the recipe
    names; rank 0's.

    Args:
        makers: those of the stage's inputs that have finished.
        output: the run's folder.

    Raises:
        UserError: a file is missing, was changed or was added; `where` names it.
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
        raise UserError(f"{taken}, and {DONE} there is damaged", where=str(folder / DONE), hint=cure)
    added = [
        name for name in loadable(folder)
        if name not in mark.files and name not in (DONE, BEGUN) and not _matches(name, _BESIDE)
    ]  # fmt: skip
    problems = faults(folder, {name: entry for name, entry in mark.files.items() if not _matches(name, _BESIDE)})
    problems += [Fault(name, "is not one of its files") for name in added]
    if problems:
        first, more = problems[0], len(problems) - 1
        problem = f"{taken}, and {first.name} {first.problem}" + (f" (and {more} more)" if more else "")
        if added and len(added) < len(problems):  # files under other names, or a list that was damaged
            problem += f"; the folder's files are not those that {DONE} lists"
        raise UserError(problem, where=str(folder / first.name), hint=cure)


def _names(stage: Stage, folder: Path) -> Iterator[str]:
    """The files of a stage's folder that its list covers."""
    for place, folders, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        folders[:] = [name for name in folders if not _matches(str(here / name), (*stage.working, ".*"))]
        for name in files:
            path = str(here / name)
            if path in (DONE, BEGUN) or _matches(path, stage.working) or _matches(name, _UNLISTED):
                continue
            if str(here) != stage.shards or not is_of_shard(name):
                yield path


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return _pattern(patterns).match(name) is not None


@lru_cache(maxsize=64)
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One for all, since there may be ten thousands of names."""
    return re.compile("|".join(map(translate, patterns)))
