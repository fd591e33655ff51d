"""Which records take part: plain files, brace patterns, and LLaVA-OneVision's YAML mixtures.

A mixture names data files and how much of each is used. Records are chosen by their numbers, so that nothing is
loaded for it; format and arithmetic are those of LLaVA-NeXT's training code, with two differences that `pick` names.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from braceexpand import braceexpand

from ..core.errors import UserError, did_you_mean
from .records import RecordFile, file_identity, open_records

_STRATEGY = re.compile(r"(?P<how>first|end|random):(?P<amount>\d+)(?P<percent>%?)")
_KEYS = ("json_path", "sampling_strategy")
STRATEGIES = "write all, or first:, end: or random: with a count or a percentage of 0 to 100 (first:500, random:10%)"
_SHOWN = 12  # missing files that a message names


@dataclass(frozen=True)
class Share:
    """A data file, and how much of it takes part.

    Args:
        strategy: all, or first, end or random with a count or a whole percentage.
        where: what named it, for messages.
        repeat: how often the same file stood before it; another draw of `random` each time.
    """

    path: Path
    strategy: str = "all"
    where: str = ""
    repeat: int = 0

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
            key = hashlib.sha256(f"{seed}/{self.path.name}/{self.repeat}".encode()).digest()
            rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
            return np.sort(rng.permutation(num_records)[:count]).astype(np.int64)
        return np.arange(count, dtype=np.int64)


def expand(names: Sequence[str | Path]) -> list[Share]:
    """The files behind `names`, in their order: each a file, a pattern ({a,b}.json, part-*.json) or a mixture (.yaml).

    Raises:
        UserError: a pattern without a match, a mixture that cannot be read, or that names missing files.
    """
    named = [path for name in names for path in _braces(str(name), "key path")]
    shares = [share for path in named for share in _shares(Path(matched(str(path), "key path")))]
    seen: Counter[Path] = Counter()
    numbered = []
    for share in shares:
        numbered.append(replace(share, repeat=seen[share.path]))
        seen[share.path] += 1
    return numbered


def identities(names: Iterable[str | Path]) -> list[str]:
    """Hashes of the mixtures and of the files behind them, for a fingerprint; "absent" where one is not there."""
    hashes = []
    for name in names:
        for path in _braces(str(name), "key path"):
            hashes.append(_identity(path))
            if is_mixture(path) and path.is_file():
                hashes += [_identity(share.path) for share in _entries(path)]
    return hashes


def are_present(names: Iterable[str | Path]) -> bool:
    """Whether all files are on disk, those that mixtures name included."""
    paths = [path for name in names for path in _braces(str(name), "key path")]
    if not all(path.is_file() for path in paths):
        return False
    return all(share.path.is_file() for path in paths if is_mixture(path) for share in _entries(path))


def is_mixture(path: Path) -> bool:
    """Whether the path names a mixture (a YAML file) instead of records."""
    return path.suffix in (".yaml", ".yml")


def is_strategy(text: Any) -> bool:
    """Whether `text` is a valid strategy (how much of a file is used)."""
    match = _STRATEGY.fullmatch(text) if isinstance(text, str) else None
    return text == "all" or (match is not None and not (match["percent"] and int(match["amount"]) > 100))


def _identity(path: Path) -> str:
    return file_identity(path) if path.is_file() else "absent"


def _shares(path: Path) -> list[Share]:
    if not is_mixture(path):
        return [Share(path)]
    if not path.is_file():
        raise UserError("mixture not found", where=str(path), hint="check `path` of the data section")
    entries = _entries(path)
    missing = [share for share in entries if not share.path.is_file()]
    if missing:
        named = [f"{share.where}: {share.path}" for share in missing[:_SHOWN]]
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise UserError(
            f"{len(missing)} of {len(entries)} data files of a mixture are missing",
            where="; ".join(named) + more,
            hint="correct the paths (relative ones start at the mixture's folder), or remove the entries: some files "
            "of the published mixtures were never released",
        )
    return entries


def _entries(path: Path) -> list[Share]:
    """The mixture's files, each strategy checked; relative paths start at the mixture's own folder."""
    where = str(path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"not a readable mixture: {error}", where=where, hint="mend the YAML") from error
    datasets = tree.get("datasets") if isinstance(tree, dict) and set(tree) == {"datasets"} else None
    if not isinstance(datasets, list) or not datasets:
        hint = "write `datasets:` and under it one `- json_path: ...` for each file, with its `sampling_strategy: ...`"
        raise UserError("a mixture is one list under the key datasets", where=where, hint=hint)
    shares = []
    for number, entry in enumerate(datasets, 1):
        place = f"{path}, entry {number}"
        _check_entry(entry, place)
        for file in _braces(entry["json_path"], place):
            shares.append(Share(path.parent / file, entry.get("sampling_strategy") or "all", place))
    return shares


def _check_entry(entry: Any, place: str) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("json_path"), str):
        raise UserError("an entry without json_path", where=place, hint="write json_path: FILE.json or FILE.jsonl")
    unknown = [str(key) for key in entry if key not in _KEYS]
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}", where=place, hint=did_you_mean(unknown[0], _KEYS))
    strategy = entry.get("sampling_strategy")
    if strategy is not None and not is_strategy(strategy):
        where = f"{place} ({entry['json_path']})"
        raise UserError(f"sampling_strategy {strategy!r} is none of this format", where=where, hint=STRATEGIES)


def _braces(name: str, where: str) -> list[Path]:
    """A name as it is where such a file exists, else with its braces expanded and its glob patterns matched, sorted.

    A pattern that matches nothing stands for itself: `matched` tells of it.
    """
    if Path(name).exists():
        return [Path(name)]
    try:
        names = list(braceexpand(name)) if "{" in name else [name]
    except ValueError as error:
        raise UserError(f"braces that do not expand: {name!r}", where=where, hint="write them as {a,b}.json") from error
    return [Path(match) for one in names for match in (sorted(glob(one)) if _is_pattern(one) else []) or [one]]


def _is_pattern(name: str) -> bool:
    return has_magic(name) and not Path(name).exists()


def matched(name: str, key: str) -> str:
    """`name`, a file or a pattern. Raises `UserError` with pattern and folder where it is one that matches nothing."""
    if _is_pattern(name) and not glob(name):
        folder = Path(name).parent
        missing = "" if folder.is_dir() or has_magic(str(folder)) else ", which is no folder"
        raise UserError(f"no file matches the pattern {Path(name).name!r} in {folder}{missing}", where=key,
                        hint="correct the pattern or the folder")  # fmt: skip
    return name


class Selection:
    """Indexed files and the records of each that take part; nothing of a record is held but numbers.

    Args:
        names: data files, brace patterns and mixtures.
        cache: folder for indices.
        seed: of the draws of `random:` in mixtures.

    Raises:
        UserError: a file that is missing or no list of records, or a mixture that cannot be read.
    """

    def __init__(self, names: Sequence[str | Path], *, cache: Path, seed: int):
        self.shares = expand(names)
        opened = {path: open_records(path, cache) for path in dict.fromkeys(share.path for share in self.shares)}
        self.files: list[RecordFile] = [opened[share.path] for share in self.shares]
        self._picked = [s.pick(len(f), seed=seed) for s, f in zip(self.shares, self.files, strict=True)]

    def problems(self) -> Iterator[tuple[RecordFile, int, str]]:
        """(file, record, what is wrong with it) of those that take part."""
        for file, picked in zip(self.files, self._picked, strict=True):
            bad = np.array(list(file.problems), dtype=np.int64)
            for index in bad[np.isin(bad, picked)].tolist():
                yield file, index, file.problems[index]

    def places(self) -> np.ndarray:
        """[n,2] int32 (file, record) of those that take part and can be used, file by file."""
        places = []
        for number, (file, picked) in enumerate(zip(self.files, self._picked, strict=True)):
            good = picked[~np.isin(picked, np.array(list(file.problems), dtype=np.int64))] if file.problems else picked
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

    def summary(self) -> str:
        """How much of which files, in a line for a mixture and in none for whole files."""
        partial = sum(share.strategy != "all" for share in self.shares)
        if len(self.shares) == 1 and not partial:
            return ""
        kept, there = sum(map(len, self._picked)), sum(len(file) for file in self.files)
        empty = [share.path.name for share, picked in zip(self.shares, self._picked, strict=True) if not len(picked)]
        line = f"{len(self.shares)} data files, of {partial} a part: {kept:,} of {there:,} records"
        return line + (f"; nothing of {', '.join(empty)}" if empty else "")


def fewest_ids(words: np.ndarray, images: np.ndarray, *, tokens_per_image: int) -> np.ndarray:
    """[n] int64 ids that samples have at least, whatever the tokenizer: no word has less than one; clips not counted.

    Args:
        words: of the text, without its marks.
    """
    return words.astype(np.int64) + images.astype(np.int64) * tokens_per_image
