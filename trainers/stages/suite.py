"""The section `suite` of an evaluate stage: the benchmark sets of TABED, first and second turns, in one table.

The target's answers to first turns are kept, and second turns go on from them. Every request's measurements are kept
as soon as it is decoded: a killed run goes on behind them, with any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ...core import ranks
from ...core.errors import UserError
from ...core.section import Section
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.suite import BENCHMARK, DEPENDENT, OOD, QUALITY, QUESTIONS, TASKS, Convention, Suite, Task, write_records
from ...data.suite_hub import fetch
from ...eval import suite_table
from ...eval.measure import Row
from ...eval.suite_table import FIRST, SetInfo
from ..context import Context
from .kept import Kept
from .measuring import Measuring

HUB = "hub"


class QualitySection(Section):
    """Answers of target and drafts, each with the pictures and without (TABED, tables 5 and 9, figure 7)."""

    # OCRBench (accuracy), TextCaps (METEOR, ROUGE-L), Spot and MB (ROUGE-L); all but accuracy need the extra [metrics].
    sets: list[str] = Field(list(QUALITY), min_length=1)
    max_new_tokens: int = Field(128, ge=1)
    # Rows of each set; null: as many as it has (OCRBench 1000, TextCaps 3166).
    max_samples: int | None = Field(None, ge=1)
    # Records of each set whose answers the report shows.
    samples: int = Field(3, ge=0)


class SuiteSection(Section):
    # How pictures are cut; max_samples limits the rows of each set. `path` is `hub` (the published sets), a directory
    # with suite.json, or with `from` the folder of one in a generated world (suite).
    data: ConversationData
    # null: the nine of the article, or those that the directory has.
    sets: list[str] | None = Field(None, min_length=1)
    # 1: first turns alone.
    turns: Literal[1, 2] = 2
    # Second turns of benchmark sets. Those on the first turn count as one number, NQ and GSM8K have their own columns.
    tasks: list[Task] = Field(list(TASKS), min_length=1)
    # Prompts: paper (appendix I), released (TABED's code), or verbatim (the data's own words).
    convention: Convention = "released"
    # How a second turn's prompt holds the first: released, without the end token behind the answer; training, with it.
    transcript: Literal["released", "training"] = "released"
    quality: QualitySection | None = None

    @model_validator(mode="after")
    def _whole_path(self) -> SuiteSection:
        if not isinstance(self.data.path, str):
            raise ValueError(f"data.path names one directory (or {HUB}), found a list")
        if self.data.kinds is not None:
            raise ValueError("data.kinds: sets are chosen by `sets`")
        return self


def open_suite(section: SuiteSection, context: Context) -> Suite:
    """The suite's directory; published sets are fetched once for all stages of a run."""
    name = str(section.data.path)
    if section.data.from_stage is not None:
        folder = context.inputs["data"] / "world" / name
    elif name != HUB:
        folder = Path(name)
    else:
        folder = _fetched(section, context)
    return Suite(folder, context.folder / "cache")


def _fetched(section: SuiteSection, context: Context) -> Path:
    sets: dict[str, int | None] = dict.fromkeys(section.sets or [*BENCHMARK, *OOD], section.data.max_samples)
    for name in section.quality.sets if section.quality is not None else ():
        assert section.quality is not None
        most = section.quality.max_samples
        sets[name] = most if name not in sets else _larger(sets[name], most)
    tasks = [task for task in section.tasks if task in QUESTIONS] if section.turns == 2 else []
    key = hashlib.sha256(repr((sorted(sets.items()), sorted(tasks))).encode()).hexdigest()[:12]
    folder = context.folder.parent / f".suite-{key}"
    failed = None
    if ranks.is_main():
        context.say(f"suite: published sets {', '.join(sets)} in {folder}")
        try:
            fetch(folder, sets, tasks)
        except UserError as error:
            failed = error
    if (failed := ranks.agree(failed)) is not None:
        raise failed
    return folder


def _larger(a: int | None, b: int | None) -> int | None:
    """Of two numbers of rows, None being all."""
    return None if a is None or b is None else max(a, b)


class SuiteRun:
    """Measures a suite."""

    def __init__(self, section: SuiteSection, suite: Suite, measuring: Measuring):
        self.section, self.suite, self.measuring, self.context = section, suite, measuring, measuring.context
        self.form: PromptFormat = measuring.stage.format
        self.folder = self.context.folder / "suite"
        self.sets = {name: SetInfo(self.suite.group(name), self.suite.label(name)) for name in self._names()}
        self.tasks = list(section.tasks) if section.turns == 2 else []
        self._left_to_warm_up = measuring.stage.warmup

    def _names(self) -> list[str]:
        if self.section.sets is not None:
            return self.section.sets
        held = [name for name in self.suite.about.sets if self.suite.group(name) != "quality"]
        return [*(n for n in (*BENCHMARK, *OOD) if n in held), *(n for n in held if n not in (*BENCHMARK, *OOD))]

    def measure(self) -> tuple[list[Row], list[str]]:
        """Rows of every request and mode, and what is to be said of them."""
        limit, convention = self.section.data.max_samples, self.section.convention
        rows: list[Row] = []
        silent = {}
        for name, info in self.sets.items():
            found, answers = self._turn(name, FIRST, self.suite.first_turns(name, convention, limit), self.form)
            rows += found
            for task in self.tasks if info.group == "benchmark" else ():
                records = self.suite.second_turns(name, task, convention, limit, answers)
                if len(records) < len(answers):
                    silent[name] = len(answers) - len(records)
                if records:
                    rows += self._turn(name, task, records, self._second_form())[0]
        notes = [f"Rows without a second turn, because the target's first answer is empty: {name} {count}."
                 for name, count in silent.items()]  # fmt: skip
        return rows, notes

    def _second_form(self) -> PromptFormat:
        end = "blank" if self.section.transcript == "released" else "end"
        return self.form.model_copy(update={"answer_end": end})

    def _turn(
        self, name: str, turn: str, records: Sequence[dict[str, Any]], form: PromptFormat
    ) -> tuple[list[Row], list[str]]:
        """This turn's rows of all ranks, and the target's answers in the order of `records`."""
        kept, measuring = Kept(self.folder / name / turn), self.measuring
        dataset = self.dataset(records, self.folder / name / f"{turn}.json", form)
        measuring.check(f"{name} ({turn})", dataset)
        mine = range(ranks.rank(), len(dataset), ranks.world_size())
        left = [index for index in mine if str(index) not in kept.values]
        for index in left[: self._left_to_warm_up]:
            measuring.warm_up(index, measuring.request(dataset, index)[0])
        self._left_to_warm_up = max(0, self._left_to_warm_up - len(left))
        for index in left:
            by_mode, tokens = measuring.one(index, *measuring.request(dataset, index))
            rows = [row | {"set": name, "turn": turn, "mode": mode} for mode, some in by_mode.items() for row in some]
            text = str(measuring.processor.tokenizer.decode(tokens, skip_special_tokens=False))
            kept.add(str(index), {"answer": text, "ids": tokens, "rows": rows})
        ranks.barrier()
        found = Kept(self.folder / name / turn).values
        values = [found[str(index)] for index in range(len(dataset))]
        self.context.say(f"{name} ({turn}): {len(values)} requests decoded")
        return [row for value in values for row in value["rows"]], [value["answer"] for value in values]

    def dataset(self, records: Sequence[dict[str, Any]], file: Path, form: PromptFormat) -> ConversationDataset:
        """Records with pictures of the suite's directory, written to `file`, as requests."""
        if ranks.is_main():
            write_records(file, records)
        ranks.barrier()
        data = self.section.data.model_copy(
            update={"path": str(file), "from_stage": None, "images": str(self.suite.folder), "max_samples": None}
        )
        return ConversationDataset(
            data,
            form,
            self.measuring.processor,
            files=[file],
            skipped_log=None,
            cache=self.context.folder / "cache",
            drafter_processor=self.context.own_eyes(),
        )

    def about(self) -> dict[str, Any]:
        """How the suite was asked."""
        section = self.section
        rows = section.data.max_samples or "all (of published sets those of the released code)"
        found = {"suite": f"{section.data.path}, prompts {section.convention}, rows of a set: {rows}"}
        if self.tasks:
            found["second turns"] = f"{', '.join(self.tasks)}; {section.transcript} transcripts"
        return found

    def plan(self, drafters: Sequence[str]) -> suite_table.Plan:
        """What the tables are of."""
        dependent, free = ([t for t in self.tasks if t in group] for group in (DEPENDENT, QUESTIONS))
        return suite_table.Plan(self.sets, dependent, free, drafters, self.measuring.stage.mode_names)
