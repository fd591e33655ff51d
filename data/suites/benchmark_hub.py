"""Rows of the published sets of `benchmark_sets.py`, fetched from the Hub into a suite directory.

Pictures come with the rows. Clips are archives of up to hundreds of gigabytes, some behind a login: they are unpacked
by hand, one folder for each set below a folder of media, and found there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import UserError
from ...core.files import new_folder
from ...core.json_types import JsonMapping, JsonObject, listed
from ...core.pictures import IMAGE_MARK, VIDEO_MARK
from ..pictures.media_files import is_there
from .benchmark_sets import BENCHMARK_SETS, LETTERS, SAMPLES, SEED, BenchmarkSet, set_name, turn_set
from .suite import INDEX
from .suite_hub import CHANGED, NO_REFERENCE, load_rows, row_of, save_pictures, write_set
from .turn_files import PUBLISHED, hub_records, published_files, published_records

MEDIA = "media"  # in the suite's folder, a link to the folder of media
_ENDINGS = (".mp4", ".MP4", ".mkv", ".webm", ".avi")  # which most names leave out
_NOTHING = ("", "None", "N/A")


def fetch_benchmarks(
    folder: Path,
    names: Sequence[str],
    *,
    media: Path | None = None,
    samples: int | None = SAMPLES,
    seed: int = SEED,
    published: Mapping[str, BenchmarkSet] = BENCHMARK_SETS,
) -> Path:
    """Writes a suite directory with some rows of each set (to a temporary folder, then renamed). An existing directory
    is used as it is.

    A row whose clip is missing is kept; reading it fails like any other missing file. Raises `UserError`: a set is
    unknown, out of reach, or none of its clips is there.

    Args:
        names: of sets, by any of their names or ids.
        media: holds <set>/... as the archives unpack; needed by sets of clips.
        samples: rows of each set, those that `datasets` puts first when it shuffles with `seed`; None: all, in order.
    """
    if folder.is_dir():
        return folder
    with new_folder(folder) as aside:
        if media is not None:
            (aside / MEDIA).symlink_to(media.resolve(), target_is_directory=True)
        sets = {}
        for called in dict.fromkeys(names):
            name = turn_set(called) or (called if called in published else set_name(called))
            if name in published:
                records = _records(name, published[name], aside, samples=samples, seed=seed)
            else:
                records = _drawn(hub_records(name), samples, seed)
            sets[name] = {"file": write_set(aside, name, records)}
        (aside / INDEX).write_text(json.dumps({"sets": sets}, indent=1))
    return folder


def read_published(folder: Path, name: str, path: Path, *, samples: int | None = None, seed: int = SEED) -> Path:
    """Writes a suite directory with a set of conversations that lies at `path` as its authors publish it; pictures stay
    where they are. An existing directory is used as it is. Raises `UserError` as `published_records`.
    """
    if folder.is_dir():
        return folder
    with new_folder(folder) as aside:
        file = write_set(aside, name, _drawn(published_records(name, path), samples, seed))
        beside = published_files(name, path)[0].parent
        (aside / PUBLISHED).symlink_to(beside.resolve(), target_is_directory=True)
        (aside / INDEX).write_text(json.dumps({"sets": {name: {"file": file}}}, indent=1))
    return folder


def _drawn(records: Sequence[JsonObject], samples: int | None, seed: int) -> list[JsonObject]:
    """Those that count, in the set's own order."""
    return [records[place] for place in sorted(chosen(len(records), samples, seed))]


def chosen(total: int, samples: int | None, seed: int) -> list[int]:
    """The rows of `total` that count: as `Dataset.shuffle(seed=seed)` orders them, the first ones."""
    if samples is None:
        return list(range(total))
    return np.random.default_rng(seed).permutation(total)[:samples].tolist()


def _records(name: str, about: BenchmarkSet, folder: Path, *, samples: int | None, seed: int) -> list[JsonObject]:
    if about.clip is not None and not (folder / MEDIA / name).is_dir():
        raise UserError(
            f"no clips of {name}",
            where=str((folder / MEDIA / name).resolve()),
            hint=f"hf download {about.ids[0]} --repo-type dataset, unpack its archives into a folder {name}, and give "
            "the folder around it as media",
        )
    tables = [(config, _table(name, about, config)) for config in about.configs]
    places = [(config, table, row) for config, table in tables for row in range(len(table))]
    picked = [places[place] for place in chosen(len(places), samples, seed)]
    rows = [(config, row_of(name, table, row)) for config, table, row in picked]
    if about.join is not None:
        rows = _joined(name, about, rows)
    records = [record(name, about, config, row, number, folder) for number, (config, row) in enumerate(rows)]
    if about.clip is not None and not any(is_there(folder / entry["video"]) for entry in records):
        first = folder / records[0]["video"]
        raise UserError(f"none of the clips of {name} is there, the first one included", where=str(first.resolve()),
                        hint=f"unpack the set's archives so that {name} has one of the folders: "
                        f"{', '.join(_folders(about, rows[0][0]))}")  # fmt: skip
    return records


def _table(name: str, about: BenchmarkSet, config: str | None) -> Any:
    """One configuration, from the first repository that has it."""
    problems: list[UserError] = []
    for repository in about.ids:
        try:
            rows = load_rows(name, repository, config, about.split, revision=about.revision)
        except UserError as error:
            problems.append(error)
            continue
        wanted = {*about.options, about.clip, *about.answer} - {None}
        if missing := wanted - set(rows.column_names):
            raise UserError(
                f"set {name} ({repository}) has no column {', '.join(sorted(map(str, missing)))}; it has "
                f"{', '.join(rows.column_names)}",
                hint=CHANGED,
            )
        return rows
    problem = "; ".join(error.problem for error in problems)
    first = problems[0]
    hint = f"{first.hint}; a gated set needs `hf auth login`"
    raise UserError(problem, key=first.key, where=first.where, hint=hint)


def _joined(name: str, about: BenchmarkSet, rows: Sequence[tuple[str | None, JsonObject]]) -> list[Any]:
    """Rows with their pictures, of which no others are decoded."""
    join = about.join
    assert join is not None
    images = _table(name, BenchmarkSet(about.medium, about.ids, join.split, "own", "own", answer=()), join.config)
    places = {key: place for place, key in enumerate(images["id"])}
    if lost := [row[join.key] for _, row in rows if row[join.key] not in places]:
        raise UserError(f"set {name} has no picture {lost[0]!r}, nor {len(lost) - 1} others",
                        hint=CHANGED)  # fmt: skip
    return [(config, row | {"image": row_of(name, images, places[row[join.key]])["image"]}) for config, row in rows]


def record(
    name: str, about: BenchmarkSet, config: str | None, row: JsonMapping, number: int, folder: Path
) -> JsonObject:
    """A row as LLaVA JSON, its pictures written below `folder`; `options` and `letter` where it has options."""
    fields: JsonObject = {"id": f"{name}-{number:05d}"}
    marks = ""
    if about.medium == "image":
        # There is one picture, a list, or none.
        images = [image for image in listed(row.get("image")) if image is not None]
        if pictures := save_pictures(name, images, number, folder):
            fields["image"], marks = pictures, f"{IMAGE_MARK}\n" * len(pictures)
    if about.clip is not None:
        fields["video"] = _clip(name, about, config, str(row[about.clip]), folder)
        marks = f"{VIDEO_MARK}\n"
    question = next((text for key in about.question if (text := str(row.get(key)).strip()) not in _NOTHING), "")
    options = _options(about, row)
    answers = [str(value).strip() for key in about.answer for value in listed(row[key]) if value is not None]
    references = [text for text in answers if text] or [NO_REFERENCE]
    letter = _letter(about, references, options)
    if letter is not None and options:
        references = [options[LETTERS.index(letter)]]
    turns = [{"from": "human", "value": marks + question}, {"from": "gpt", "value": references[0]}]
    fields |= {"conversations": turns, "references": references}
    fields |= {"options": options} if options else {}
    fields |= {"letter": letter} if letter is not None else {}
    hint = str(row.get(about.hint) or "") if about.hint else ""
    return fields | ({"hint": hint} if hint else {})


def _folders(about: BenchmarkSet, config: str | None) -> list[str]:
    config_folder = dict(about.config_folders).get(config or "", "")
    return [folder.replace("{config}", config_folder) for folder in about.folders]


def _clip(name: str, about: BenchmarkSet, config: str | None, called: str, folder: Path) -> str:
    """A clip's path, or its first candidate, from the suite's folder. Raises `UserError`: outside the set's folder."""
    if called.startswith("/") or ".." in Path(called).parts:
        raise UserError(f"set {name} names a clip outside of its folder: {called!r}", hint="report this to its authors")
    inside: Iterable[Path] = (Path(MEDIA, name, place) for place in _folders(about, config))
    endings = ("",) if called.endswith(_ENDINGS) else _ENDINGS
    candidates = [place / f"{called}{ending}" for place in inside for ending in endings]
    return str(next((path for path in candidates if is_there(folder / path)), candidates[0]))


def _options(about: BenchmarkSet, row: JsonMapping) -> list[str]:
    """Texts of a row's options, without letters of their own."""
    values = row[about.options[0]] if len(about.options) == 1 else [row[key] for key in about.options]
    texts = [str(text).strip() for text in (values if about.options else [])]
    texts = [text for text in texts if text not in _NOTHING]
    if texts and all(text[:2] in (f"{letter}.", f"{letter})") for letter, text in zip(LETTERS, texts, strict=False)):
        return [text[2:].strip() for text in texts]
    return texts


def _letter(about: BenchmarkSet, answers: Sequence[str], options: Sequence[str]) -> str | None:
    """The right option's letter. None where nothing says it: no options, or a hidden answer. `answer_is` declares how
    to read an answer: MVBench asks for counts, so its "3" is the text of an option, not an index.
    """
    answer = answers[0]
    if about.answer_is == "letter":
        return answer if answer in LETTERS and len(answer) == 1 else None
    if about.answer_is == "index":
        return LETTERS[int(answer)] if answer.isdigit() and int(answer) < len(options) else None
    return LETTERS[list(options).index(answer)] if answer in options else None
