"""One request decoded by one method: the measurement that every table, interval and figure is computed from.

`measure` makes them of what the decoding loop returned. Rows merge over ranks and interrupted runs in any order, and
have a JSON form for the resume log and `rows.jsonl`. Reports compute from one pandas table of them, `frame`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from ..core.errors import UserError
from ..core.files import read_json_lines
from ..core.json_types import Json, JsonMapping, JsonObject, nulls, value_at
from .loop import Generation

if TYPE_CHECKING:
    from pandas import DataFrame

VERSION = 2  # of the JSON form
PLAIN = "plain decoding"  # the method that drafts nothing
# What identifies a row within an evaluation, by request first: a bootstrap resamples the same requests for every
# method.
KEY = ("request", "benchmark", "turn", "budget", "temperature", "max_new_tokens", "method", "drafter", "mode", "engine",
       "concurrency")  # fmt: skip
PER_CYCLE = ("planned", "drafted", "nodes", "accepted", "emitted")
Grouped = TypeVar("Grouped")
Medium = Literal["text", "image", "video", "drawn"]
Frame: TypeAlias = "DataFrame"  # of `frame`, or a part of its lines


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request decoded by one method. Times are in seconds, medians over the repeats; tokens are of the first one.

    The first token comes from the prefill, so a request emits `num_emitted + 1` tokens in `num_cycles` cycles.
    """

    benchmark: str
    method: str
    request: str
    drafter: str = ""  # whose weights drafted: a stage, a published name; "" for none
    mode: str = ""  # drafting mode of a draft LVLM (M, T, MT*, ...)
    temperature: float
    max_new_tokens: int
    medium: Medium
    budget: str = ""  # visual tokens asked for, as tables have it
    turn: str = ""  # of suites: "first", or the task of the second turn
    prompt_tokens: int = 0
    visual_tokens: int = 0  # of the prompt
    engine: str = ""  # the serving engine that decoded it (vllm); "": our own loop
    concurrency: int = 1  # requests that the engine had at once

    tokens: Sequence[int]
    plain_tokens: int  # how many plain decoding emitted
    stop: Literal["eos", "length"]
    identical: bool  # every repeat gave plain decoding's tokens

    # One value for each cycle.
    planned: Sequence[int]  # levels that the tree was to have; 0: nothing was drafted
    drafted: Sequence[int]  # levels that it had when it was verified
    nodes: Sequence[int]
    accepted: Sequence[int]  # without the bonus token, or the end token in its place
    emitted: Sequence[int]  # with it: accepted + 1

    # NaN: an engine does not tell it. An engine's prefill_s is from the request's arrival to its first token.
    plain_prefill_s: float
    plain_total_s: float
    plain_cycle_s: float
    prefill_s: float  # of target and drafter
    total_s: float
    draft_s: float  # drafting, for each level
    draft_cycle_s: float  # drafting, for each cycle
    verify_s: float  # the target's pass and the rule
    rule_s: float  # the rule alone
    cycle_s: float
    parts_s: Mapping[str, float] = field(default_factory=dict)  # of the whole request, see `time_parts`

    # What only some methods have: SAGE's log ("sage"), visual tokens held or kept by the drafter ("num_held",
    # "num_kept"), "plain_is_data", "beyond_positions", ADT-Tree's log ("adaptation"), "rule". JSON values.
    # "replayed": passes of {target, drafter} that CUDA graphs ran, over all repeats; left out where all were eager.
    details: JsonMapping = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Holds numbers as arrays and each name once: an evaluation has 100,000 rows, and tuples take twice as much."""
        values = vars(self)
        for name in ("tokens", *PER_CYCLE):
            values[name] = array("i", values[name])
        values |= {name: sys.intern(value) for name, value in values.items() if type(value) is str}
        values["parts_s"] = {sys.intern(name): seconds for name, seconds in self.parts_s.items()}

    @property
    def num_cycles(self) -> int:
        """Cycles after the prefill, each with one verification pass."""
        return len(self.emitted)

    @property
    def num_emitted(self) -> int:
        """Tokens of all cycles; the prefill's token is not among them."""
        return sum(self.emitted)

    def to_json(self) -> JsonObject:
        """JSON values, with the version of this form. An engine's fields stand there for an engine's rows alone."""
        values: JsonObject = {n: list(v) if isinstance(v, array) else v for n, v in vars(self).items()}
        if not self.engine:
            return {"version": VERSION} | {n: v for n, v in values.items() if n not in _OF_ENGINES}
        return {"version": VERSION} | {n: None if n in _TIMES and math.isnan(v) else v for n, v in values.items()}

    @classmethod
    def from_json(cls, value: JsonMapping, *, where: str | Path | None = None) -> Row:
        """The row that `to_json` wrote.

        Args:
            where: the file that it comes from, for the error.

        Raises:
            UserError: another version of draftsmith wrote it.
        """
        version = value_at(value, "version")
        if version != VERSION or {*value, *_OF_ENGINES} - {"version"} != _NAMES:
            raise UserError(
                f"a measured request of version {version or 'none'}, and this draftsmith reads version {VERSION}",
                where=None if where is None else str(where),
                hint="measure anew: restart=STAGE removes what the stage has kept",
            )
        values: JsonObject = {name: value[name] for name in _NAMES if name in value}
        return cls(**values | {name: math.nan for name in _TIMES if value[name] is None})


_NAMES = {f.name for f in fields(Row)}
_TIMES = {f.name for f in fields(Row) if f.name.endswith("_s") and f.name != "parts_s"}
_OF_ENGINES = ("engine", "concurrency")


def measure(
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
    *,
    details: JsonMapping | None = None,
    **about: Any,
) -> Row:
    """The row of a request that was decoded a few times plainly and by a method.

    Args:
        plain, drafted: one for each repeat. Plain decoding against itself is a row, too: its method is `PLAIN`.
        details: JSON values that only some methods have.
        about: what was decoded and how, by the names of `Row`: benchmark, method, request, temperature, ...
    """
    first, cycles = drafted[0], [cycle for generation in drafted for cycle in generation.cycles]
    parts = [time_parts(generation) for generation in drafted]
    replayed = {part: sum(g.replayed[n] for g in drafted) for n, part in enumerate(("target", "drafter"))}
    return Row(
        **about,
        tokens=tuple(first.tokens),
        plain_tokens=len(plain[0].tokens),
        stop=first.stop,
        identical=all(generation.tokens == plain[0].tokens for generation in (*plain, *drafted)),
        planned=tuple(cycle.num_planned for cycle in first.cycles),
        drafted=tuple(cycle.num_drafted for cycle in first.cycles),
        nodes=tuple(cycle.num_nodes for cycle in first.cycles),
        accepted=tuple(cycle.num_accepted for cycle in first.cycles),
        emitted=tuple(cycle.num_emitted for cycle in first.cycles),
        plain_prefill_s=median(generation.prefill_s for generation in plain),
        plain_total_s=median(generation.total_s for generation in plain),
        plain_cycle_s=median(cycle.total_s for generation in plain for cycle in generation.cycles),
        prefill_s=median(generation.prefill_s + generation.draft_prefill_s for generation in drafted),
        total_s=median(generation.total_s for generation in drafted),
        draft_s=median(cycle.draft_s / cycle.num_drafted for cycle in cycles if cycle.num_drafted),
        draft_cycle_s=median(cycle.draft_s for cycle in cycles),
        verify_s=median(cycle.verify_s for cycle in cycles),
        rule_s=median(cycle.rule_s for cycle in cycles),
        cycle_s=median(cycle.total_s for cycle in cycles),
        parts_s={name: median(part[name] for part in parts) for name in parts[0]},
        details={**(details or {}), **({"replayed": replayed} if any(replayed.values()) else {})},
    )


def time_parts(generation: Generation) -> dict[str, float]:
    """Seconds of each operation of a request; `others` is what is left of the whole (committing, bookkeeping)."""
    cycles = generation.cycles
    parts = {
        "target_prefill": generation.prefill_s,
        "draft_prefill": generation.draft_prefill_s - generation.pruning_s - generation.captioning_s,
        "token_pruning": generation.pruning_s,
        "captioning": generation.captioning_s,
        "verification": sum(cycle.verify_s for cycle in cycles),
        "drafting": sum(cycle.draft_s for cycle in cycles),
        "tree_update": sum(cycle.update_s for cycle in cycles),
    }
    return parts | {"others": max(0.0, generation.total_s - sum(parts.values()))}


def median(values: Iterable[float]) -> float:
    """0 where there is none: a request that ended with its first token has no cycle."""
    known = list(values)
    return statistics.median(known) if known else 0.0


def grouped(rows: Iterable[Grouped], *names: str) -> dict[tuple[Json, ...], list[Grouped]]:
    """Rows, or cells of them, by these fields, in the order in which each group first comes up."""
    groups: dict[tuple[object, ...], list[Grouped]] = {}
    parts = [attrgetter(name) for name in names]
    for row in rows:
        groups.setdefault(tuple(part(row) for part in parts), []).append(row)
    return groups


def drawn_tokens(rows: Sequence[Row]) -> dict[float, dict[str, list[tuple[int, ...]]]]:
    """temperature -> method (plain decoding first) -> the tokens of each picture, in the order of the prompts.

    Of a method with several drafters those of the first one by name: a picture for each prompt is judged.
    """
    tokens_by: dict[float, dict[str, list[tuple[int, ...]]]] = {}
    first = {method: min(row.drafter for row in its) for (method,), its in grouped(rows, "method").items()}
    for row in rows:
        if row.drafter == first[row.method]:
            tokens_by.setdefault(row.temperature, {}).setdefault(row.method, []).append(tuple(row.tokens))
    return tokens_by


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One line for each row."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(nulls(row.to_json())) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Read the rows that `write_rows` wrote. Raises `UserError` if another version wrote them."""
    hint = "evaluate again: it goes on with the requests that were decoded"
    return [Row.from_json(values, where=path) for values in read_json_lines(path, JsonObject, hint=hint)]


def frame(rows: Iterable[Row] | Frame) -> Frame:
    """A line for each row: its fields but for the tokens, sums over its cycles, and seconds without the prefill.

    A frame is returned as it is, so that a part of one can be summarized like a list of rows.
    """
    from pandas import DataFrame, Series  # takes a second, which nobody is to pay who makes no report

    if isinstance(rows, DataFrame):
        return rows
    rows = list(rows)
    names = [f.name for f in fields(Row) if f.name != "tokens"]
    objects = {*PER_CYCLE, "parts_s", "details"}
    table = DataFrame({n: Series([getattr(r, n) for r in rows], dtype=object if n in objects else None) for n in names})
    table["num_cycles"] = [row.num_cycles for row in rows]
    for name in ("emitted", "drafted", "accepted", "nodes"):
        table[f"num_{name}"] = [sum(getattr(row, name)) for row in rows]
    # The first token comes from the prefill: it is generated, and in no cycle.
    table["generated"] = table.num_emitted + 1
    table["plain_decoded"] = table.plain_tokens - 1
    table["decode_s"] = table.total_s - table.prefill_s
    table["plain_decode_s"] = table.plain_total_s - table.plain_prefill_s
    return table


def cycles_of(answers: Frame) -> Frame:
    """A line for each cycle after a prefill, of one line of a frame after the other."""
    from pandas import DataFrame

    none = np.zeros(0, np.int64)
    return DataFrame({name: np.concatenate([none, *answers[name]]) for name in PER_CYCLE})
