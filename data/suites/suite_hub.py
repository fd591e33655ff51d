"""The published sets of the suite, fetched from the Hub into a suite directory. The only door to `datasets`.

Hub ids, splits and numbers of rows are those of TABED's released code (its paper names LMMs-Eval-Lite for POPE, too).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UserError, did_you_mean, first_line
from ...core.files import new_folder
from ...core.json_types import JsonObject, listed, text_at
from ..pictures.media_files import BadMedia, Embedded
from ..pictures.picture_files import load_image
from ..records.table_records import is_encoded, media_of
from .suite import INDEX, QUESTIONS, Task

NO_REFERENCE = "(no reference)"  # records have an answer, and some sets have none
CHANGED = "the set has changed since this was written: give a directory with suite.json"


@dataclass(frozen=True)
class Published:
    """Rows of a data set of the Hub. `repository` may be a directory in the Hub's layout."""

    repository: str
    split: str
    config: str | None = None
    rows: int | None = 100  # the first so many count; None: all
    sub_task: str | None = None  # only rows that have this under `sub_task`
    question: str = "question"
    # Columns that hold what a good answer says (a text or a list); the first one there counts.
    references: tuple[str, ...] = ("answer",)


def _interleave(sub_task: str) -> Published:
    return Published("lmms-lab/LLaVA-NeXT-Interleave-Bench", "test", "in_domain", sub_task=sub_task)


PUBLISHED: dict[str, Published] = {
    "LLaVA-W": Published("lmms-lab/llava-bench-in-the-wild", "train", rows=60, references=("gpt_answer",)),
    "DocVQA": Published("lmms-lab/LMMs-Eval-Lite", "lite", "docvqa_val", references=("answers", "answer")),
    "POPE": Published("lmms-lab/POPE", "test"),
    "MMVet": Published("lmms-lab/MMVet", "test"),
    "IEdit": _interleave("IEdit"),
    "MB": _interleave("MagicBrush"),
    "Spot": _interleave("Spot-the-Diff"),
    "PSV": _interleave("PororoSV"),
    "VIST": _interleave("VIST"),
    # For the quality of answers; TABED names neither rows nor prompts of these two.
    "OCRBench": Published("echo840/OCRBench", "test", rows=None),
    "TextCaps": Published("lmms-lab/TextCaps", "val", rows=None, references=("caption_str", "reference_strs")),
}
PUBLISHED_QUESTIONS: dict[Task, Published] = {
    "NQ": Published("google-research-datasets/nq_open", "validation", rows=500),
    "GSM8K": Published("openai/gsm8k", "test", "main", rows=500),
}


def fetch(
    folder: Path,
    sets: Mapping[str, int | None],
    tasks: Sequence[Task],
    *,
    published: Mapping[str, Published] = PUBLISHED,
    questions: Mapping[Task, Published] = PUBLISHED_QUESTIONS,
) -> Path:
    """A suite directory, new or as it is there, with at most so many rows of each set and questions for those of
    `tasks` that have some. Raises `UserError`: a set is unknown, out of reach, or has other columns than expected.
    """
    if folder.is_dir():
        return folder
    index: JsonObject = {"sets": {}, "questions": {}}
    with new_folder(folder) as aside:
        for name, limit in sets.items():
            if name not in published:
                hint = did_you_mean(name, published)
                raise UserError(f"{name!r} is no published set", key="suite.sets", hint=hint)
            index["sets"][name] = {"file": write_set(aside, name, _records(name, published[name], limit, aside))}
        for task in (t for t in tasks if t in QUESTIONS):
            index["questions"][task] = write_set(aside, task, _records(task, questions[task], None, aside))
        (aside / INDEX).write_text(json.dumps(index, indent=1))
    return folder


def load_rows(name: str, repository: str, config: str | None, split: str, *, revision: str | None = None) -> Any:
    """A table of the Hub, or of a directory in the Hub's layout. Raises `UserError` where it is out of reach."""
    import datasets  # takes seconds

    try:
        return datasets.load_dataset(repository, config, split=split, revision=revision)
    except (OSError, ValueError) as error:
        problem = f"cannot load set {name} ({repository}): {first_line(error)}"
        hint = "without a network, download the sets once (HF_HOME keeps them), or give a directory with suite.json"
        raise UserError(problem, key="suite.data.path", hint=hint) from error


def row_of(name: str, table: Any, place: int) -> JsonObject:
    """Row `place` of a table, its pictures still encoded: `datasets` would decode them itself, in every format that
    Pillow knows (EPS runs a program) and at any size.
    """
    row = {}
    cells = table.with_format("arrow")[place]
    for column in cells.column_names:
        cell = cells[column][0]
        if not is_encoded(cell.type):
            row[column] = cell.as_py()
            continue
        files = list(media_of(cell, f"set {name}, row {place}, column {column}")) if cell.is_valid else []
        row[column] = files if "list<" in str(cell.type) else next(iter(files), None)
    return row


def _records(name: str, source: Published, limit: int | None, folder: Path) -> list[JsonObject]:
    """The first rows that count as records. Columns of pictures are left alone while rows are looked for."""
    table = load_rows(name, source.repository, source.config, source.split)
    needed = {source.question} | ({"sub_task"} if source.sub_task else set())
    if missing := needed - set(table.column_names):
        raise UserError(
            f"set {name} ({source.repository}) has no column {', '.join(sorted(missing))}; it has "
            f"{', '.join(table.column_names)}",
            key="suite.data.path",
            hint=CHANGED,
        )
    places = list(range(len(table)))
    if source.sub_task is not None:
        kinds = table.select_columns(["sub_task"])["sub_task"]
        places = [place for place, kind in enumerate(kinds) if kind == source.sub_task]
    most = min((count for count in (source.rows, limit) if count is not None), default=len(places))
    return [
        _record(name, row_of(name, table, place), number, source, folder) for number, place in enumerate(places[:most])
    ]


def _record(name: str, row: JsonObject, number: int, source: Published, folder: Path) -> JsonObject:
    # `image`, or image_0, image_1, ... in the order of their numbers.
    numbered = sorted((int(match[1]), key) for key in row if (match := re.fullmatch(r"image_(\d+)", key)))
    keys = ["image"] if row.get("image") is not None else [key for _, key in numbered]
    pictures = save_pictures(name, [row[key] for key in keys if row[key] is not None], number, folder)
    question = str(row[source.question])
    if pictures and "<image>" not in question:
        question = "<image>\n" * len(pictures) + question
    answers = ([str(t).strip() for t in listed(row.get(key)) if t is not None] for key in source.references)
    references = next(filter(None, ([text for text in texts if text] for texts in answers)), [NO_REFERENCE])
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": references[0]}]
    record = {"id": f"{name}-{number:05d}", "conversations": turns, "references": references}
    # How OCRBench compares depends on where a row is from.
    record |= {key: row[key] for key in ("dataset", "question_type") if text_at(row, key) is not None}
    return record | ({"image": pictures} if pictures else {})


def save_pictures(name: str, images: Sequence[object], number: int, folder: Path) -> list[str]:
    """Write the pictures of row `number` below `folder`, upright, as PNG; returns their paths from there. One that
    cannot be read is written as it is: it is a bad record for whoever reads the set, as `on_error` says.
    """
    files = []
    for place, image in enumerate(images):
        if not isinstance(image, Embedded):
            raise UserError(f"set {name}, row {number}: a picture is {type(image).__name__}", hint=CHANGED)
        files.append(f"images/{name}/{number:05d}-{place}.png")
        path = folder / files[-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            load_image(image).save(path)
        except BadMedia:
            with image.open() as data:
                path.write_bytes(data.read())
    return files


def write_set(folder: Path, name: str, records: list[JsonObject]) -> str:
    """Write the records of a set; returns the name of their file. Raises `UserError` where there are none."""
    if not records:
        raise UserError(f"set {name} has no rows", key="suite.sets", hint="leave it out, or report this")
    (folder / f"{name}.json").write_text(json.dumps(records, indent=0))
    return f"{name}.json"
