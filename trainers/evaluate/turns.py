"""Sets in several turns: each question is asked after the target's own answers to those before it.

TABED's benchmark sets have two, sets of conversations any number. The answers in between are plain decoding's, so that
all methods see the same history and every row of a turn is of the same request. MMSpec's code has each method's own
answers there, which at temperature 0 are the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.json_types import JsonObject
from ...data.conversations import PromptFormat
from ...data.suites.suite import BENCHMARK, DEPENDENT, OOD, QUESTIONS, Suite
from ...data.suites.suite_hub import fetch
from ...eval.measured_rows import Row
from ...eval.tabed_tables import FIRST, Plan, SetInfo, tabed_section
from ...eval.tables import ReportSection
from ..run.context import Context
from .benchmarks import SetsBenchmark, TabedBenchmark
from .measuring import Measuring
from .requests import ConversationSet, Opening, digest, open_suite, written


def open_tabed(section: TabedBenchmark, context: Context) -> Suite:
    """The suite's directory; published sets are fetched once for all stages of a run."""
    sets: dict[str, int | None] = dict.fromkeys(section.sets or [*BENCHMARK, *OOD], section.data.max_samples)
    for name in section.quality.sets if section.quality is not None else ():
        assert section.quality is not None
        most = section.quality.max_samples
        here = sets.get(name, most)
        sets[name] = None if most is None or here is None else max(most, here)  # None: all rows
    tasks = [task for task in section.tasks if task in QUESTIONS] if section.turns == 2 else []
    key = digest(sorted(sets.items()), sorted(tasks))
    return open_suite(section, context, f"suite-{key}", [*sets], lambda folder: fetch(folder, sets, tasks))


def suite_names(section: TabedBenchmark, suite: Suite) -> list[str]:
    """Names of the sets that are measured, in the order of tables."""
    if section.sets is not None:
        return section.sets
    held = [name for name in suite.about.sets if suite.group(name) != "quality"]
    return [*(n for n in (*BENCHMARK, *OOD) if n in held), *(n for n in held if n not in (*BENCHMARK, *OOD))]


class TabedRun:
    """Measures one suite at every temperature and length of the evaluation."""

    def __init__(self, section: TabedBenchmark, suite: Suite, opening: Opening, measuring: Measuring):
        self.section, self.suite, self.opening, self.measuring = section, suite, opening, measuring
        self.context, self.form = measuring.context, opening.form
        self.folder = self.context.folder / "suite"
        self.sets = {name: SetInfo(suite.group(name), suite.label(name)) for name in suite_names(section, suite)}
        self.tasks = list(section.tasks) if section.turns == 2 else []
        self.first_turns: list[ConversationSet] = []

    def measure(self) -> tuple[list[Row], list[str]]:
        """Rows of every request and method, and what is to be said of them."""
        rows: list[Row] = []
        notes: dict[str, None] = {}
        measuring, section, suite = self.measuring, self.section, self.suite
        limit, convention = section.data.max_samples, section.convention
        end = "blank" if section.transcript == "released" else "end"
        second_form = self.form.model_copy(update={"answer_end": end})
        for temperature, length in itertools.product(measuring.stage.temperatures, measuring.lengths):
            # Second turns follow the answers, which differ with temperature and length.
            place = self.folder / f"T{temperature:g}-{length}"
            self.first_turns = []
            for name, info in self.sets.items():
                records = suite.first_turns(name, convention, limit)
                first = self.requests(name, records, self.folder / name / f"{FIRST}.json", turn=FIRST)
                self.first_turns.append(first)
                measured = measuring.one(first, temperature, length)
                rows += measured.rows
                answers = ["" if row is None else measuring.text(row.tokens, special=True) for row in measured.plain]
                silent = 0
                for task in self.tasks if info.group == "benchmark" else ():
                    records = suite.second_turns(name, task, convention, limit, answers)
                    silent = (len(answers) - len(records)) or silent
                    if records:
                        second = self.requests(name, records, place / name / f"{task}.json", second_form, turn=task)
                        rows += measuring.one(second, temperature, length).rows
                if silent:
                    note = "Rows without a second turn, because the target's first answer is empty or its record cannot"
                    notes[f"{note} be read: {name} {silent}."] = None
        return rows, [*notes]

    def requests(
        self, name: str, records: Sequence[JsonObject], file: Path, form: PromptFormat | None = None, *, turn: str = ""
    ) -> ConversationSet:
        """Records as requests, in `form` (None: the stage's)."""
        data = written(self.section.data, records, self.suite, file)
        return self.opening.requests(name, data, [file], form, turn=turn)

    def about(self) -> JsonObject:
        """How the suite was asked."""
        section = self.section
        rows = section.data.max_samples or "all (of published sets those of the released code)"
        about = {"suite": f"{section.data.path}, prompts {section.convention}, rows of a set: {rows}"}
        if self.tasks:
            about["second turns"] = f"{', '.join(self.tasks)}; {section.transcript} transcripts"
        return about

    def report(self, rows: Sequence[Row], notes: Sequence[str]) -> ReportSection:
        """The suite's tables, for the report."""
        drafting = self.measuring.drafting
        dependent, free = ([t for t in self.tasks if t in group] for group in (DEPENDENT, QUESTIONS))
        drafters, methods = [one.drafter_name for one in drafting], [one.name for one in drafting]
        plan = Plan(self.sets, dependent, free, [*dict.fromkeys(drafters)], [*dict.fromkeys(methods)])
        return tabed_section(self.context.folder, rows, plan, notes=notes)


@dataclass
class TurnsRun:
    """Measures one set at every temperature and length of the evaluation."""

    section: SetsBenchmark
    suite: Suite
    name: str  # of a set of `suite` whose records have `turns`
    opening: Opening
    first_turns: list[ConversationSet] = field(default_factory=list)

    def measure(self, measuring: Measuring) -> tuple[list[Row], list[str]]:
        """Rows of every turn and method, and what is to be said of them."""
        rows: list[Row] = []
        notes: list[str] = []
        for temperature, length in itertools.product(measuring.stage.temperatures, measuring.lengths):
            records = self.suite.first_turns(self.name, self.section.convention, self.section.data.max_samples)
            # Further turns follow the answers, which differ with temperature and length.
            place = measuring.context.folder / "suite" / self.name / f"T{temperature:g}-{length}"
            turn, silent = 1, 0
            while records:
                file = place / f"turn-{turn}.json"
                data = written(self.section.data, records, self.suite, file)
                part = "" if turn == 1 else f"turn-{turn}"
                requests = self.opening.requests(self.name, data, [file], part=part, records=records)
                self.first_turns = self.first_turns if turn > 1 else [requests]
                measured = measuring.one(requests, temperature, length)
                rows += measured.rows
                answers = ["" if row is None else measuring.text(row.tokens) for row in measured.plain]
                turn += 1
                following = self.suite.next_turns(records, turn, answers)
                silent += sum(len(record.get("turns", ())) >= turn - 1 for record in records) - len(following)
                records = following
            if silent:
                notes.append(f"{self.name}: {silent} conversations end early, because the target's answer is empty "
                             f"or a record cannot be read (T = {temperature:g}, {length} tokens).")  # fmt: skip
        return rows, notes


def turn_runs(sections: list[SetsBenchmark], opening: Opening) -> list[TurnsRun]:
    """One for each set of conversations of the benchmarks. Raises `UserError` where a suite cannot be opened."""
    runs = []
    for section in sections:
        suite = opening.suite(section)
        names = section.names or list(suite.about.sets)
        runs += [TurnsRun(section, suite, name, opening) for name in names if suite.has_turns(name)]
    return runs
