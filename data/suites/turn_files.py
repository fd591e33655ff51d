"""Reads sets of conversations as their authors publish them, from files or the Hub, into records of a suite."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...core.errors import UserError, first_line
from ...core.files import read_json_lines
from ...core.json_types import JsonMapping, JsonObject, all_are
from ...core.pictures import IMAGE_MARK, MARKS
from .benchmark_sets import TURN_SETS
from .suite_hub import NO_REFERENCE, load_rows

PUBLISHED = "published"  # in the suite's folder, a link to the folder of the set's file


def published_files(name: str, path: Path) -> list[Path]:
    """The files of set `name` at `path`: a file, or a folder that holds them. Raises `UserError` where none is."""
    files = [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob(TURN_SETS[name].files)))
    if not files:
        raise UserError(f"no {TURN_SETS[name].files} of {name} here", where=str(path), hint=TURN_SETS[name].cure)
    return files


def set_at(path: Path) -> str | None:
    """The set whose files, as its authors publish them, lie at `path`; None: those of none. A file of JSON lines may
    have any name: its first row says by its keys which set's it is.
    """
    row: JsonMapping = next(iter(_lines(path)), {}) if path.suffix == ".jsonl" and path.is_file() else {}
    for name, about in TURN_SETS.items():
        called = path.match(about.files) if path.is_file() else any(map(Path.is_file, path.rglob(about.files)))
        if called or {about.id, "turns", *about.labels.values()} <= row.keys():
            return name
    return None


def published_records(name: str, path: Path) -> list[JsonObject]:
    """The records of a set's published files; pictures lie below `PUBLISHED`, the first file's folder. Raises
    `UserError` that names file, row and key: a file is missing or damaged, or a row has no such turns or labels.
    """
    records: list[JsonObject] = []
    for file in published_files(name, path):
        if file.suffix == ".parquet":
            from pyarrow import parquet  # takes half a second

            try:
                rows: Iterable[JsonMapping] = parquet.read_table(file).to_pylist()
            except (OSError, ValueError) as error:
                hint = f"fetch the set again: {TURN_SETS[name].cure}"
                raise UserError(f"no parquet file: {first_line(error)}", where=str(file), hint=hint) from error
        else:
            rows = _lines(file)
        records += [record(name, row, where=f"{file}, row {number}") for number, row in enumerate(rows, 1)]
    return records


def hub_records(name: str) -> list[JsonObject]:
    """The records of set `name` on the Hub. Raises `UserError` as `published_records`, and where it is out of reach."""
    about = TURN_SETS[name]
    if about.repository is None:
        raise UserError(f"{name} is not on the Hub", key="data.path", hint=about.cure)
    rows = load_rows(name, about.repository, about.config, about.split)
    return [record(name, row, where=f"{about.repository}, row {number}") for number, row in enumerate(rows, 1)]


def record(name: str, row: JsonMapping, *, where: str) -> JsonObject:
    """A row as LLaVA JSON: its first question, the further ones under `turns`, its labels."""
    about = TURN_SETS[name]
    if missing := [key for key in (about.id, "turns", *about.labels.values()) if key not in row]:
        raise UserError(f"no key {missing[0]!r}; the row has {', '.join(map(str, row))}", where=where, hint=about.cure)
    turns = row["turns"]
    if not turns or not all_are(turns, str) or not all(turn.strip() for turn in turns):
        raise UserError("key 'turns' is no list of questions", where=where, hint="fix or remove the row")
    if about.placeholder is not None and any(turn.startswith(about.placeholder) for turn in turns):
        raise UserError("key 'turns' has a placeholder: the text is another data set's", where=where, hint=about.cure)
    fields: JsonObject = {"id": str(row[about.id])}
    marks = ""
    if about.images is not None:
        fields["image"], marks = [_picture(about.images, row.get("image"), where)], f"{IMAGE_MARK}\n"
    first, *further = [MARKS[True].sub("", turn).strip() for turn in turns]  # what reads like a mark is a word here
    conversation = [{"from": "human", "value": marks + first}, {"from": "gpt", "value": NO_REFERENCE}]
    labels = {label: str(row[key]) for label, key in about.labels.items() if row[key] not in (None, "")}
    return fields | {"conversations": conversation, "references": [NO_REFERENCE], "turns": further} | labels


def _picture(folder: str, called: object, where: str) -> str:
    if not isinstance(called, str) or not called or called.startswith("/") or ".." in Path(called).parts:
        raise UserError(f"key 'image' names no picture of the set: {called!r}", where=where,
                        hint=f"give the name of a file in {folder}/ beside the set's file")  # fmt: skip
    return f"{PUBLISHED}/{folder}/{called}"


def _lines(file: Path) -> Iterable[JsonMapping]:
    return read_json_lines(file, JsonObject, hint="one JSON object in each line, as the set's authors publish it")
