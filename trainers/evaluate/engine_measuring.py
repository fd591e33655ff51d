"""Measures one engine: plain decoding, or a method, on every set at each number of requests at once.

What is kept is a cell: all requests of a set at one temperature, length and number at once. A cell that a killed run
had not finished is measured anew, as its requests take the time of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...core.json_types import JsonObject
from ...data.families.processor import Processor
from ...eval.measured_rows import PLAIN, Row
from ..serve.engine_answers import Answer, Asked, Job, Timing
from ..serve.engine_process import EngineProcess
from ..serve.engine_section import VllmEvaluation
from ..serve.served import engine_job
from .drafters import Drafting
from .measuring import Measured, Measuring
from .requests import Opened, RequestSet
from .resume_log import ResumeLog

NONE = float("nan")  # what the engine does not tell


# In the place of a target: the engine reads requests as they are.
_WHOLE = SimpleNamespace(view=lambda request: request)


@dataclass(frozen=True, kw_only=True)
class ServedMeasuring(Measuring):
    """One engine's requests. `by`: a method with one of its drafters; None: plain decoding."""

    section: VllmEvaluation
    process: EngineProcess
    processor: Processor
    by: Drafting | None = None

    def check_positions(self, requests: RequestSet) -> None:
        """Nothing: the engine refuses what is longer than its positions."""

    def at(self, sets: Sequence[RequestSet], temperature: float, max_new_tokens: int) -> list[Measured]:
        """Each of `sets`, at every number of requests at once."""
        return [self._at(requests, temperature, max_new_tokens) for requests in sets]

    def _at(self, requests: RequestSet, temperature: float, max_new_tokens: int) -> Measured:
        stem = self.stem(requests, temperature, max_new_tokens)
        log = ResumeLog(stem)
        first, rows = f"{PLAIN}, {self.section.concurrency[0]}", list[Row]()
        for together in self.section.concurrency:
            if self.by is not None and not self.by.method.allowed(temperature):
                continue
            key = f"{PLAIN if self.by is None else self.by.title}, {together}"
            if key not in log.values:
                self.context.stop.check(f"before {requests.name} was measured with {together} at once")
                plain = None if self.by is None else log.values[f"{PLAIN}, {together}"]
                cell = self._measure(requests, temperature, max_new_tokens, together, plain, where=str(stem))
                log.add(key, cell)
            rows.extend(Row.from_json(value, where=stem) for value in log.values[key] if value is not None)
        answered = [None if value is None else Row.from_json(value, where=stem) for value in log.values[first]]
        return Measured(rows, answered)

    def _measure(
        self,
        requests: RequestSet,
        temperature: float,
        max_new_tokens: int,
        together: int,
        plain: Sequence[JsonObject | None] | None,
        *,
        where: str,
    ) -> list[JsonObject | None]:
        """A cell: the row of every request, None of those that cannot be read. `plain`: plain decoding's; None: this is
        plain decoding.
        """
        opened = {n: one for n in range(len(requests)) if (one := requests.open(n, _WHOLE)) is not None}
        cell: list[JsonObject | None] = [None] * len(requests)
        if not opened:
            return cell
        if self.stage.warmup and not self._warm[together]:
            self._warm[together] += 1
            warm_up = dict(list(opened.items())[: self.stage.warmup * together])
            self._ask(warm_up, temperature, max_new_tokens, together)
        answers = self._ask(opened, temperature, max_new_tokens, together)
        for (number, one), answer in zip(opened.items(), answers, strict=True):
            common = requests.of_row(one, temperature, max_new_tokens)
            common |= {"engine": self.section.name, "concurrency": together}
            without = None if plain is None else plain[number]
            beside = None if without is None else Row.from_json(without, where=where)
            about = self._about_plain(list(beside.tokens if beside else answer.tokens), one) | requests.labels(number)
            cell[number] = row_of(answer, beside, by=self.by, details=about, **common).to_json()
        return cell

    def _ask(self, opened: dict[int, Opened], temperature: float, most: int, together: int) -> list[Answer]:
        """The engine's answers to these requests, of which so many run at once."""
        requests: list[Any] = [one.request for one in opened.values()]
        lines, pictures = engine_job(requests, self.processor)
        for number, line in zip(opened, lines, strict=True):
            # An engine that drafts takes no list of ids that never come: one that comes all the same is refused.
            sampling = self.section.sampling(
                self.warp(temperature), seed=self.seed(number), limit=most, ends=self.eos_ids, never={}
            )
            line |= {"sampling": sampling, "together": together}
        of = [Asked(request.name, request.ids, most) for request in requests]
        job = Job(of, self.processor.num_token_ids, ends=set(self.eos_ids), timed=True)
        return self.process.wait(self.process.submit(lines, pictures), job)


def row_of(answer: Answer, plain: Row | None, *, by: Drafting | None, details: JsonObject, **common: Any) -> Row:
    """An engine's answer as a measured row.

    Args:
        plain: its answer without drafts, with as many requests at once; None: this is it.
        by: as of `ServedMeasuring`.
        common: the row's other fields.
    """
    timing = answer.timing
    assert timing is not None, "asked for"
    passes, tokens = cycles(timing, answer.stop), tuple(answer.tokens)
    total_s, cycle_s = timing.first_s + timing.decode_s, timing.decode_s / max(1, len(timing.passes) - 1)
    whose: JsonObject = {} if by is None else {"drafter": by.drafter_name, "mode": by.mode}
    details = details | {"began_s": timing.began_s, "ended_s": timing.ended_s}
    return Row(
        method=PLAIN if by is None else by.name, **whose, **common,
        tokens=tokens, plain_tokens=len(tokens if plain is None else plain.tokens), stop=answer.stop,
        identical=plain is None or list(tokens) == list(plain.tokens),
        planned=tuple(planned for planned, *_ in passes), drafted=tuple(drafted for _, drafted, *_ in passes),
        nodes=tuple(drafted for _, drafted, *_ in passes), accepted=tuple(emitted - 1 for *_, emitted in passes),
        emitted=tuple(emitted for *_, emitted in passes),
        plain_prefill_s=timing.first_s if plain is None else plain.prefill_s,
        plain_total_s=total_s if plain is None else plain.total_s,
        plain_cycle_s=cycle_s if plain is None else plain.cycle_s,
        prefill_s=timing.first_s, total_s=total_s, cycle_s=cycle_s,
        draft_s=NONE, draft_cycle_s=NONE, verify_s=NONE, rule_s=NONE, details=details,
    )  # fmt: skip


def cycles(timing: Timing, stop: str) -> list[tuple[int, int, int]]:
    """(drafted, drafted within the answer, emitted) of each pass after the prompt's, as our own loop counts them: no
    level behind the answer's last place, or behind its end token.
    """
    matched, result = timing.by_pass(), []
    assert matched is not None, "answers are checked as they are read"
    room = sum(emitted for *_, emitted in matched)
    for drafted, accepted, emitted in matched:
        verified = min(drafted, room - 1) if stop == "length" else drafted
        result.append((drafted, min(verified, emitted) if accepted >= emitted else verified, emitted))
        room -= emitted
    return result
