"""Sets of conversations: each question is asked after the target's own answers to those before it.

The answers in between are plain decoding's, so that all methods see the same history and every row of a turn is of the
same request. MMSpec's code has each method's own answers there, which at temperature 0 are the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...data.suites.suite import Suite
from ...eval.measured_rows import Medium, Row
from .benchmarks import SetsBenchmark
from .measuring import Measuring
from .requests import ConversationSet, Opening, written


@dataclass
class TurnsRun:
    """Measures one set at every temperature and length of the evaluation.

    Args:
        name: of a set of `suite` whose records have `turns`.
    """

    section: SetsBenchmark
    suite: Suite
    name: str
    opening: Opening
    first_turns: list[ConversationSet] = field(default_factory=list)

    def measure(self, measuring: Measuring) -> tuple[list[Row], list[str]]:
        """Rows of every turn and method, and what is to be said of them."""
        rows: list[Row] = []
        notes: list[str] = []
        for temperature in measuring.stage.temperatures:
            for length in measuring.lengths:
                some, silent = self._at(measuring, temperature, length)
                rows += some
                if silent:
                    notes.append(f"{self.name}: {silent} conversations end early, because the target's answer is empty "
                                 f"or a record cannot be read (T = {temperature:g}, {length} tokens).")  # fmt: skip
        return rows, notes

    def _at(self, measuring: Measuring, temperature: float, max_new_tokens: int) -> tuple[list[Row], int]:
        records = self.suite.first_turns(self.name, self.section.convention, self.section.data.max_samples)
        # Further turns follow the answers, which differ with temperature and length.
        place = measuring.context.folder / "suite" / self.name / f"T{temperature:g}-{max_new_tokens}"
        rows: list[Row] = []
        turn, silent = 1, 0
        while records:
            part = "" if turn == 1 else f"turn-{turn}"
            data = written(self.section.data, records, self.suite, place / f"turn-{turn}.json")
            dataset = self.opening.dataset(data, [place / f"turn-{turn}.json"])
            medium: Medium = "image" if dataset.column("images").any() else "text"
            requests = ConversationSet(
                self.name, medium, "", dataset, originals=self.opening.originals, part=part, records=records
            )
            self.first_turns = self.first_turns if turn > 1 else [requests]
            measuring.check_positions(requests)
            (measured,) = measuring.at([requests], temperature, max_new_tokens)
            measuring.tell(requests, measured)
            rows += measured.rows
            answers = ["" if row is None else measuring.text(row.tokens) for row in measured.plain]
            turn += 1
            following = self.suite.next_turns(records, turn, answers)
            silent += sum(len(record.get("turns", ())) >= turn - 1 for record in records) - len(following)
            records = following
        return rows, silent


def turn_runs(sections: list[SetsBenchmark], opening: Opening) -> list[TurnsRun]:
    """One for each set of conversations of the benchmarks. Raises `UserError` where a suite cannot be opened."""
    runs = []
    for section in sections:
        suite = opening.suite(section)
        names = section.names or list(suite.about.sets)
        runs += [TurnsRun(section, suite, name, opening) for name in names if suite.has_turns(name)]
    return runs
