"""The benchmark suite as a directory: LLaVA JSON records with pictures, and a `suite.json` that names the sets.

Published sets are fetched into this layout (`suite_hub.py`, `benchmark_hub.py`), so that a directory of one's own can
stand in for each. Records become first turns by a convention of prompts, and second turns by what the target answered
to the first. Sources: TABED, section 4.1, appendices I and J, and its released code; `benchmark_sets.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, model_validator

from ...core.errors import UserError, did_you_mean, page
from ...core.fields import Place
from ...core.files import read_json, write_whole
from ...core.json_types import JsonObject
from ...core.pictures import IMAGE_MARK, MARKS, VIDEO_MARK
from ...core.section import Section
from ..records.record import paths
from ..records.records import file_identity, open_records
from .benchmark_sets import BENCHMARK_SETS, DESCRIBE, EXPLAIN, LABELS, TURN_SETS, Ask, Medium, wording

BENCHMARK = ("LLaVA-W", "DocVQA", "POPE", "MMVet", "IEdit", "MB", "Spot")
OOD = ("PSV", "VIST")  # five pictures: beyond what the drafts of LLaVA-1.5 were trained on
QUALITY = ("OCRBench", "TextCaps", "Spot", "MB")
INDEX = "suite.json"

# paper: appendix I; released: TABED's code, which asks most sets in the data's own words; verbatim: every set so.
# describe, stock: of the sets of `benchmark_sets.py`, a long answer to measure speed on, or the short one to be scored.
Convention = Literal["paper", "released", "verbatim", "describe", "stock"]
Group = Literal["benchmark", "ood", "quality", "video", "image", "text"]
# next: the question and pictures of the row after, of the last row the first one's; caption, summary and story speak
# of the first turn; NQ and GSM8K are questions of their own, without a picture.
Task = Literal["next", "caption", "summary", "story", "NQ", "GSM8K"]
TASKS: tuple[Task, ...] = get_args(Task)
DEPENDENT: tuple[Task, ...] = ("next", "caption", "summary", "story")
QUESTIONS: tuple[Task, ...] = ("NQ", "GSM8K")

_REASON = "For the following question, provide a detailed explanation of your reasoning leading to the answer."
_EDIT = "Please provide instructions for editing the source image to match the target image."
_PROMPTS = {  # what stands before a set's own words or in their place
    "IEdit": f"{_EDIT} Source Image: <image> Target Image: <image> Instruction:",
    "MB": f"{_EDIT} Source Image: <image> Target Image: <image> Instruction:",
    "Spot": "Explain the disparities between the first and second image. <image> <image> Difference:",
    "PSV": "Given the progression of the story with the first few images, can you write a fitting end considering the "
    "last image?",
    "VIST": "With the narratives paired with the initial images, how would you conclude the story using the last "
    "picture?",
    "TextCaps": "Provide a one-sentence caption for the provided image.",
}
_TURNS: dict[Task, str] = {
    "caption": "Provide a detailed caption for the provided image.",
    "summary": "Summarize the previous answer.",
    "story": "Can you use the previous responses to write a long story for children?",
}
_TAILS: dict[Task, str] = {
    "NQ": ". Provide a comprehensive and detailed explanation, including the reasoning and background information.",
    "GSM8K": ". Provide a detailed explanation.\nLet's think step by step.",
}


class SetFile(Section):
    """One set of a directory."""

    # LLaVA JSON or JSONL beside suite.json. Of a record the first question counts, and as references `references`
    # (a list of texts) or the answer to that question. `turns` (a list of texts) are asked after it, `category`,
    # `sub_category` and `difficulty` are what results are grouped by.
    file: Place
    # Which average it belongs to; null: that of the published set of this name.
    group: Group | None = None
    # What the rows are, where they stand in for a published set.
    label: str = ""
    # How it is asked with convention describe, and stock; null: as the published set of this name.
    describe: Ask | None = None
    stock: Ask | None = None


class SuiteFile(Section):
    """`suite.json`."""

    sets: dict[str, SetFile]
    # Files of text-only records whose questions are second turns: of NQ and GSM8K.
    questions: dict[Task, str] = Field(default_factory=dict)
    # Second turns in the directory's own words (convention: verbatim): of caption, summary and story.
    turns: dict[Task, str] = Field(default_factory=dict)
    # The directory's own words with convention describe: for a clip, for a picture, and after what is to be explained.
    prompts: dict[Literal["video", "image", "explain"], str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> SuiteFile:
        if odd := [name for name in self.sets if re.fullmatch(r"[\w.+-]+", name) is None]:
            raise ValueError(f"names of sets become names of files: letters, digits and . + - _ only, found {odd}")
        if self.questions.keys() - QUESTIONS:
            raise ValueError(f"questions are of {' and '.join(QUESTIONS)}, found {', '.join(self.questions)}")
        if self.turns.keys() - _TURNS.keys():
            raise ValueError(f"turns are of {', '.join(_TURNS)}, found {', '.join(self.turns)}")
        return self


class Suite:
    """A directory, opened; indices of its files are kept in `cache`."""

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.cache, self.about = folder, cache, read_index(folder)

    def group(self, name: str) -> str:
        """A `Group`. Raises `UserError` where neither the directory nor the name says it."""
        published = (("benchmark", BENCHMARK), ("ood", OOD), ("quality", QUALITY))
        about = BENCHMARK_SETS.get(name) or TURN_SETS.get(name)
        group: str | None = self._set(name).group or next((g for g, names in published if name in names), None)
        group = group or (None if about is None else about.medium)
        if group is None:
            raise UserError(f"set {name!r} is in no group", where=str(self.folder / INDEX),
                            hint=f"give it a group: {', '.join(get_args(Group))}")  # fmt: skip
        return group

    def label(self, name: str) -> str:
        """The set's name in tables."""
        return self._set(name).label

    def rows(self, name: str, limit: int | None = None) -> list[JsonObject]:
        """The first `limit` records of a set. Raises `UserError` where the directory has none of that name."""
        return self._read(self._set(name).file, limit)

    def first_turns(self, name: str, convention: Convention, limit: int | None) -> list[JsonObject]:
        """Records to be answered, one for each row of a set; their pictures are relative to the directory."""
        return [self._first(name, row, convention, number) for number, row in enumerate(self.rows(name, limit))]

    def second_turns(
        self, name: str, task: Task, convention: Convention, limit: int | None, answers: Sequence[str]
    ) -> list[JsonObject]:
        """Records that go on from the target's decoded answers; a row without an answer has no second turn."""
        firsts = self.first_turns(name, convention, limit)
        assert len(firsts) == len(answers), (name, len(firsts), len(answers))
        questions = self._questions(task, convention) if task in QUESTIONS else []
        records = []
        for number, (first, answer) in enumerate(zip(firsts, answers, strict=True)):
            answer_text = clean(answer)
            if not answer_text:
                continue
            pictures = paths(first, "image")
            if task == "next":
                following = firsts[(number + 1) % len(firsts)]
                question = following["conversations"][0]["value"]
                pictures = pictures + paths(following, "image")
            elif task in QUESTIONS:
                question = questions[number % len(questions)]
            else:
                questions_here = self.about.turns if convention == "verbatim" else {}
                question = questions_here.get(task, _TURNS[task])
            turns = [first["conversations"][0], *_next_turns(answer_text, question)]
            record = {"id": f"{name}/{task}/{number:04d}", "row": number, "conversations": turns}
            records.append(record | ({"image": pictures} if pictures else {}))
        return records

    def has_turns(self, name: str) -> bool:
        """Whether it is a set of conversations: further questions may follow the first ones."""
        return any("turns" in row for row in self.rows(name))

    def next_turns(self, before: Sequence[JsonObject], turn: int, answers: Sequence[str]) -> list[JsonObject]:
        """Records that ask question number `turn` (2 is the first further one) of the conversations `before` that have
        it, after the target's answers, as decoded. Without an answer a conversation ends.
        """
        records = []
        for record, answer in zip(before, answers, strict=True):
            questions, answer_text = record.get("turns", ()), clean(answer)
            if len(questions) < turn - 1 or not answer_text:
                continue
            conversation = [*record["conversations"][:-1], *_next_turns(answer_text, questions[turn - 2])]
            first = record["id"].partition("/turn-")[0]
            records.append(record | {"id": f"{first}/turn-{turn}", "conversations": conversation})
        return records

    def _first(self, name: str, row: JsonObject, convention: Convention, number: int) -> JsonObject:
        question = next(turn["value"] for turn in row["conversations"] if turn["from"] == "human")
        references = row.get("references") or [turn["value"] for turn in row["conversations"] if turn["from"] == "gpt"]
        pictures, clips = paths(row, "image"), paths(row, "video")
        if convention in ("describe", "stock"):
            text = f"{IMAGE_MARK}\n" * len(pictures) + f"{VIDEO_MARK}\n" * len(clips)
            text += self._question_for(name, row, MARKS[bool(clips)].sub("", question).strip(), convention)
        else:
            text = prompt(name, question, convention, num_images=len(pictures), num_clips=len(clips))
        record = {
            "id": f"{name}/{number:04d}",
            "row": number,
            "conversations": [_turn("human", text), _turn("gpt", references[0])],
            "references": references,
        }
        # `letter`: the right one of a row's options, for scoring.
        record |= {key: row[key] for key in ("letter", "turns", *LABELS) if key in row}
        record |= {"row_id": str(row.get("id", number))} if "turns" in row else {}
        return record | ({"image": pictures} if pictures else {}) | ({"video": clips} if clips else {})

    def _question_for(self, name: str, row: JsonObject, question: str, convention: Convention) -> str:
        """The question for a row, without image marks, with convention describe or stock."""
        ways: list[Ask | None] = []
        for about in (self._set(name), BENCHMARK_SETS.get(name)):
            ways += [] if about is None else [about.describe if convention == "describe" else about.stock]
        way: Ask | None = next(filter(None, ways), "own" if name in TURN_SETS else None)
        if way is None:
            raise UserError(f"convention {convention!r} has no prompt for set {name!r}",
                            where=str(self.folder / INDEX),
                            hint=f"give the set a {convention}: own, describe, explain, letter or word")  # fmt: skip
        medium: Medium = "video" if row.get("video") else "image" if row.get("image") else "text"
        prompts: dict[str, str] = dict(self.about.prompts.items())
        describe, explain = prompts.get(medium, DESCRIBE[medium]), prompts.get("explain", EXPLAIN)
        options, hint = tuple(row.get("options", ())), row.get("hint", "")
        return wording(way, question, options, describe=describe, explain=explain, hint=hint)

    def _questions(self, task: Task, convention: Convention) -> list[str]:
        file = self.about.questions.get(task)
        if file is None:
            raise UserError(f"no questions for second turns of {task}", where=str(self.folder / INDEX),
                            hint=f"name a file under questions.{task}, or leave {task} out of `tasks`")  # fmt: skip
        questions = [row["conversations"][0]["value"] for row in self._read(file, None)]
        if convention == "verbatim":
            return questions
        # NQ's questions begin in lower case and have no question mark; released: capitalize(), which lowers the rest.
        return [(text.capitalize() if task == "NQ" else text) + _TAILS[task] for text in questions]

    def _set(self, name: str) -> SetFile:
        if name not in self.about.sets:
            raise UserError(f"no set {name!r}", where=str(self.folder / INDEX),
                            hint=did_you_mean(name, self.about.sets))  # fmt: skip
        return self.about.sets[name]

    def _read(self, file: str, limit: int | None) -> list[JsonObject]:
        records = open_records(self.folder / file, self.cache)
        count = min(len(records), limit or len(records))
        for index, problem in records.problems.items():
            if index < count:
                raise UserError(problem, where=f"{records}, record {index}", hint="fix or remove the record")
        return [records.read(index) for index in range(count)]


def read_index(folder: Path) -> SuiteFile:
    """`suite.json` of a directory. Raises `UserError` where it is missing or says something unknown."""
    path = folder / INDEX
    if not path.is_file():
        raise UserError("no suite here", where=str(path),
                        hint="give a directory with suite.json, `hub` for the published sets, or the published files "
                        f"of one set of conversations, with `sets` [{' or '.join(TURN_SETS)}]")  # fmt: skip
    return read_json(path, SuiteFile, hint=f"fix the file: {page('evaluation.md')} has the layout")


def suite_identity(folder: Path) -> str:
    """Hash of a directory's index and record files, for a stage's fingerprint. Pictures count by their names."""
    about = read_index(folder)
    files = [INDEX, *(set_info.file for set_info in about.sets.values()), *about.questions.values()]
    parts = [file_identity(folder / file) if (folder / file).is_file() else "absent" for file in files]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def prompt(name: str, question: str, convention: Convention, *, num_images: int, num_clips: int = 0) -> str:
    """The first turn of a row with its image marks; sets of several pictures have theirs in the question, others need
    not. Raises `UserError`: the convention has no prompt for a set of this name.
    """
    bare = question.replace(f"{IMAGE_MARK}\n", "").replace(IMAGE_MARK, "").strip()
    marks = f"{IMAGE_MARK}\n" * num_images + f"{VIDEO_MARK}\n" * num_clips
    marked = question if MARKS[num_clips > 0].search(question) else marks + question
    if convention == "verbatim" or name == "OCRBench":
        return marked
    if name == "TextCaps":
        return f"{IMAGE_MARK}\n{_PROMPTS[name]}"
    if name not in (*BENCHMARK, *OOD):
        raise UserError(f"convention {convention!r} has no prompt for set {name!r}",
                        hint="set convention: verbatim, and the set is asked in its own words")  # fmt: skip
    if convention == "released":
        return f"{IMAGE_MARK}\n{_REASON}\n{bare}" if name in ("DocVQA", "POPE", "MMVet") else marked
    if name in OOD:  # captions of all pictures but the last stand between the marks
        return f"{_PROMPTS[name]} {marked[marked.index(IMAGE_MARK) :]}"
    # A blank after the mark, as printed; the chat template of the released code breaks the line there.
    return _PROMPTS.get(name) or f"{IMAGE_MARK} {_REASON} {bare}"


def clean(answer: str) -> str:
    """An answer as it enters the next turn's prompt: without special tokens, as released, or what reads like a mark."""
    for text in ("<s>", "</s>", IMAGE_MARK):
        answer = answer.replace(text, "")
    return answer.strip()


def write_records(path: Path, records: Sequence[JsonObject]) -> Path:
    """Records as LLaVA JSON. Written only where it differs, so that a restart keeps the index of an unchanged file."""
    text = json.dumps(list(records), indent=0).encode()
    if not path.is_file() or path.read_bytes() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return path


def _turn(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


def _next_turns(answer: str, question: str) -> list[dict[str, str]]:
    return [_turn("gpt", answer), _turn("human", question), _turn("gpt", "(open)")]
