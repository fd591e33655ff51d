"""Which records take part: plain files, brace patterns, and LLaVA-OneVision's YAML mixtures.

A mixture names data files (or tables, or tars) and how much of each is used. Records are chosen by their numbers, so
that nothing is loaded for it; format and arithmetic are those of LLaVA-NeXT's training code, with two differences that
`pick` names.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Discriminator, Field, Tag, TypeAdapter

from ...core.errors import NotFound, UserError, counted
from ...core.fields import Place
from ...core.files import checked, fetch_command, read_yaml
from ...core.json_types import JsonObject, text_at
from ...core.section import Section
from .patterns import MOST_NAMES, PUBLISHED, braces, fetch_commands, matched, shipped
from .patterns import identity as shipped_identity
from .records import RecordFile, file_identity, open_records
from .table_records import TableRecords
from .tar_records import TarRecords

_STRATEGY = re.compile(r"(?P<how>first|end|random):(?P<amount>\d+)(?P<percent>%?)")
STRATEGIES = "write all, or first:, end: or random: with a count or a percentage of 0 to 100 (first:500, random:10%)"
_SHOWN = 12  # missing files that a message names

_SOURCES: TypeAdapter[TableRecords | TarRecords] = TypeAdapter(
    Annotated[TableRecords | TarRecords, Field(discriminator="kind")]
)


def kind(value: object) -> str | None:
    """How a source of records is written: str, list, or the kind of its section; None: a section without one."""
    match value:
        case TableRecords() | TarRecords():
            return value.kind
        case dict():
            return value.get("kind")
        case list():
            return "list"
    return "str"


# Chosen by a function, so that a mistake is told about what was written, and not about each thing that might have been.
_Of = Annotated[Place, Tag("str")] | Annotated[TableRecords, Tag("datasets")] | Annotated[TarRecords, Tag("webdataset")]
RecordSource = Annotated[_Of, Discriminator(kind)]
RecordSources = Annotated[_Of | Annotated[list[RecordSource], Tag("list")], Discriminator(kind)]


@dataclass(frozen=True)
class JsonFile:
    """A JSON or JSONL file, as a source of records like the others."""

    path: Path

    @property
    def source_name(self) -> str:
        """The file's name."""
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    @property
    def place(self) -> Path:
        """The file that is read: this one, or the package's of that name."""
        return shipped(self.path) or self.path

    def is_present(self) -> bool:
        """Whether the file is there."""
        return self.place.is_file()

    opens_fast = True  # opening reads no more than an index needs
    is_remote = False

    def identity(self) -> str:
        """Hash of the file, or "absent"."""
        if (shipped_file := shipped(self.path)) is not None:
            return shipped_identity(shipped_file)
        return file_identity(self.path) if self.path.is_file() else "absent"

    def open(self, cache: Path) -> RecordFile:
        """Index it."""
        return open_records(self.path, cache)


Source = JsonFile | TableRecords | TarRecords
Name = str | Path | TableRecords | TarRecords  # of files, of mixtures, or what says where records lie


@dataclass(frozen=True)
class Share:
    """A data file, table or set of tars, and how much of it takes part."""

    source: Source
    strategy: str = "all"  # all, or first, end or random with a count or a whole percentage
    where: str = ""  # what named it, for messages
    repeat: int = 0  # how often the same file stood before it; another draw of `random` each time

    def count(self, num_records: int) -> int:
        """Records kept: a percentage is rounded up, a count stops at what there is."""
        if self.strategy == "all":
            return num_records
        match = _STRATEGY.fullmatch(self.strategy)
        assert match is not None, f"unchecked strategy {self.strategy!r}"
        amount = int(match["amount"])
        return min(-(-amount * num_records // 100) if match["percent"] else amount, num_records)

    def pick(self, num_records: int, *, seed: int) -> np.ndarray:
        """[n] int64 numbers of the kept records, in file order.

        Departs from the published code twice. `end:0` keeps nothing, where theirs keeps everything (a slice from -0
        is the whole list). `random` is drawn from `seed` and the file's name, so that every rank and every start sees
        the same records, whatever else has drawn, and keeps file order; theirs shuffles with Python's own generator,
        which nothing seeds.
        """
        count = self.count(num_records)
        if self.strategy.startswith("end"):
            return np.arange(num_records - count, num_records, dtype=np.int64)
        if self.strategy.startswith("random"):
            key = hashlib.sha256(f"{seed}/{self.source.source_name}/{self.repeat}".encode()).digest()
            rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
            return np.sort(rng.permutation(num_records)[:count]).astype(np.int64)
        return np.arange(count, dtype=np.int64)


def expand(names: Sequence[Name]) -> list[Share]:
    """The sources behind `names`, in their order: files, patterns ({a,b}.json, part-*.json), mixtures (.yaml). Raises
    `UserError`: a pattern without a match, a mixture that cannot be read, or that names missing files.
    """
    sources = _sources(names)
    for source in sources:
        if isinstance(source, JsonFile):
            matched(str(source.path), "path")
    counts: Counter[Source] = Counter()
    shares = []
    for share in (share for source in sources for share in _shares(source)):
        shares.append(replace(share, repeat=counts[share.source]))
        counts[share.source] += 1
    return shares


def identities(names: Iterable[Name | JsonObject]) -> list[str]:
    """Hashes of mixtures and of the files behind them, for a fingerprint; "absent" where one is not there."""
    hashes = []
    for source in _sources(_SOURCES.validate_python(n) if isinstance(n, dict) else n for n in names):
        hashes.append(source.identity())
        if isinstance(source, JsonFile) and is_mixture(source.path) and source.is_present():
            hashes += [share.source.identity() for share in _shares(source, check=False)]
    return hashes


def are_present(names: Iterable[Name], *, opens_fast: bool = False) -> bool:
    """Whether all files are on disk, of mixtures too; with `opens_fast` none must be converted first."""
    return all(source.is_present() and (source.opens_fast or not opens_fast) for source in _behind(names))


def missing_files(names: Iterable[Name]) -> list[str]:
    """What is not on disk: sources, or of mixtures that are there the files that they name."""
    return [str(source) for source in _behind(names) if not source.is_present()]


def _behind(names: Iterable[Name]) -> list[Source]:
    """The sources, each once, and those that mixtures name which are there."""
    sources = _sources(names)
    named = [share.source for source in sources if source.is_present() for share in _shares(source, check=False)]
    return list(dict.fromkeys([*sources, *named]))


def _sources(names: Iterable[Name]) -> list[Source]:
    """What is named; mixtures are files here. Raises `UserError` where braces make too many."""
    sources: list[Source] = []
    for name in names:
        if isinstance(name, str | Path):
            sources += [JsonFile(path) for path in braces(str(name), key="path")]
        else:
            sources.append(name)
        if len(sources) > MOST_NAMES:
            raise UserError(f"more than {MOST_NAMES:,} files", key="path", hint="name fewer")
    return sources


def is_mixture(path: Path) -> bool:
    """Whether the path names a mixture (a YAML file) instead of records."""
    return path.suffix in (".yaml", ".yml")


def is_strategy(text: object) -> bool:
    """Whether `text` is a valid strategy (how much of a file is used)."""
    match = _STRATEGY.fullmatch(text_at(text) or "")
    return text == "all" or (match is not None and not (match["percent"] and int(match["amount"]) > 100))


def _shares(source: Source, *, check: bool = True) -> list[Share]:
    """The source itself, or what a mixture names; with `check` all files of that are there."""
    if not isinstance(source, JsonFile) or not is_mixture(source.path):
        return [Share(source)]
    path = source.path
    if not source.is_present():
        raise NotFound("mixture not found", where=str(path), hint="check `path` of the data section")
    entries = _entries(path, source.place)
    # Tables and tars say themselves what is missing of them; a set of the Hub may have to be fetched first.
    missing = [s for s in entries if check and isinstance(s.source, JsonFile) and not s.source.is_present()]
    if missing:
        named = [f"{share.where}: {share.source}" for share in missing[:_SHOWN]]
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise UserError(
            f"{len(missing)} of {len(entries)} data files of a mixture are missing",
            where="; ".join(named) + more,
            hint=missing_hint([path])
            or "correct the paths (relative ones start at the mixture's folder), or remove the entries: some files "
            "of the published mixtures were never released",
        )
    return entries


def missing_hint(names: Iterable[Name]) -> str | None:
    """How to fetch published files, and what mixtures that ship with the project name; None: nothing is known of it."""
    commands: list[str] = []
    for source in _sources(names):
        if isinstance(source, JsonFile) and (place := shipped(source.path)) is not None:
            commands += fetch_commands(place)
        elif isinstance(source, JsonFile):
            fetch = fetch_command(source.path)
            commands += PUBLISHED.get(source.path.as_posix(), ()) if fetch is None else (fetch,)
    return " && ".join(dict.fromkeys(commands)) or None


class _Entry(Section):
    """A file of a mixture, as the published ones have it."""

    json_path: str
    sampling_strategy: Any = None


class _Mixture(Section):
    datasets: list[JsonObject] = Field(min_length=1)


def _entries(path: Path, file: Path) -> list[Share]:
    """The shares of a mixture that `file` holds for `path`, in whose folder relative paths start."""
    hint = "write `datasets:` and under it one `- json_path: ...` for each file, with its `sampling_strategy: ...`"
    shares: list[Share] = []
    for number, entry in enumerate(read_yaml(file, _Mixture, hint=hint).datasets, 1):
        place = f"{path}, entry {number}"
        sources: list[Source]
        if "kind" in entry:
            section = {key: value for key, value in entry.items() if key != "sampling_strategy"}
            kinds = "kinds are datasets (tables, the Hub) and webdataset (tars)"
            sources = [checked(section, _SOURCES, where=place, hint=kinds).inside(path.parent)]
        else:
            name = checked(entry, _Entry, where=place, hint="write json_path: FILE.json or FILE.jsonl").json_path
            sources = [JsonFile(path.parent / one) for one in braces(name, where=place)]
        strategy = "all" if (given := entry.get("sampling_strategy")) is None else given
        if not is_strategy(strategy):
            problem = f"sampling_strategy {strategy!r} is none of this format"
            raise UserError(problem, where=f"{place} ({sources[0]})", hint=STRATEGIES)
        shares += [Share(source, strategy, place) for source in sources]
    return shares


# What is wrong with a question alone where answers are learned.
NO_ANSWER = "no answer to train on"
CURES = {
    NO_ANSWER: "give the record an answer, or let the target write it: a stage of kind regenerate before this one, and "
    "answers: {from: THAT_STAGE} here"
}


class Selection:
    """Indexed files and the records of each that take part; nothing of a record is held but numbers. Raises
    `UserError`: a file that is missing or no list of records, or a mixture that cannot be read.

    Args:
        names: data files, brace patterns and mixtures, or sections that name tables or tars.
        cache: folder for indices.
        seed: of the draws of `random:` in mixtures.
        learned: a record without an answer to learn is unusable; else it may be a question alone.
    """

    def __init__(self, names: Sequence[Name], *, cache: Path, seed: int, learned: bool = True):
        self.shares = expand(names)
        opened = {source: source.open(cache) for source in dict.fromkeys(share.source for share in self.shares)}
        self.files: list[RecordFile] = [opened[share.source] for share in self.shares]
        self._picked = [s.pick(len(f), seed=seed) for s, f in zip(self.shares, self.files, strict=True)]
        self._problems = [_problems(file, learned) for file in self.files]

    def problems(self) -> Iterator[tuple[RecordFile, int, str]]:
        """(file, record, what is wrong with it) of those that take part."""
        for file, picked, problems in zip(self.files, self._picked, self._problems, strict=True):
            bad = np.array(list(problems), dtype=np.int64)
            for index in bad[np.isin(bad, picked)].tolist():
                yield file, index, problems[index]

    def places(self) -> np.ndarray:
        """[n,2] int32 (file, record) of those that take part and can be used, file by file."""
        places = []
        for number, (picked, problems) in enumerate(zip(self._picked, self._problems, strict=True)):
            good = picked[~np.isin(picked, np.array(list(problems), dtype=np.int64))] if problems else picked
            places.append(np.stack([np.full_like(good, number), good], axis=1).astype(np.int32))
        return np.concatenate(places)

    def column(self, name: str, places: np.ndarray) -> np.ndarray:
        """[n] a column of the files' indices (lengths, sizes, images, clips) at `places` [n,2], which go by file."""
        starts = np.searchsorted(places[:, 0], np.arange(len(self.files) + 1))
        parts = [
            file.columns[name][places[start:stop, 1]]
            for file, start, stop in zip(self.files, starts[:-1], starts[1:], strict=True)
        ]
        return np.concatenate(parts)

    def digests(self) -> list[str]:
        """Hashes of the records behind sources that are not on disk, which `identities` can only name."""
        return [f.digest() for share, f in zip(self.shares, self.files, strict=True) if share.source.is_remote]

    def summary(self) -> str:
        """How much of which files, in a line for a mixture and in none for whole files."""
        partial = sum(share.strategy != "all" for share in self.shares)
        if len(self.shares) == 1 and not partial:
            return ""
        number, there = sum(map(len, self._picked)), sum(len(file) for file in self.files)
        empty = [
            share.source.source_name for share, picked in zip(self.shares, self._picked, strict=True) if not len(picked)
        ]
        files = counted(len(self.shares), "data file")
        in_part = "" if not partial else ", in part" if partial == len(self.shares) else f", {partial} of them in part"
        line = f"{files}{in_part}: {f'{number:,} of ' if partial else ''}{counted(there, 'record')}"
        return line + (f"; nothing of {', '.join(empty)}" if empty else "")


def _problems(file: RecordFile, learned: bool) -> dict[int, str]:
    """Record -> what is wrong with it, in the file's order."""
    if not learned:
        return file.problems
    unanswered = np.flatnonzero(file.columns["answers"] == 0).tolist()
    return dict(sorted((dict.fromkeys(unanswered, NO_ANSWER) | file.problems).items()))
