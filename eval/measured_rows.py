"""One request decoded by one method: the measurement that every table, interval and figure is computed from.

`eval/generation_rows.py` makes them of what the decoding loop returned. Rows merge over ranks and interrupted runs in
any order, and have a JSON form for the resume log and `rows.jsonl`. `eval/row_columns.py` holds many of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Literal, TypeVar

from ..core.errors import UserError
from ..core.json_types import Json, JsonMapping, JsonObject, value_at

VERSION = 2  # of the JSON form
PLAIN = "plain decoding"  # the method that drafts nothing
Grouped = TypeVar("Grouped")
Medium = Literal["text", "image", "video", "drawn"]


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

    tokens: tuple[int, ...]
    plain_tokens: int  # how many plain decoding emitted
    stop: Literal["eos", "length"]
    identical: bool  # every repeat gave plain decoding's tokens

    # One value for each cycle.
    planned: tuple[int, ...]  # levels that the tree was to have; 0: nothing was drafted
    drafted: tuple[int, ...]  # levels that it had when it was verified
    nodes: tuple[int, ...]
    accepted: tuple[int, ...]  # without the bonus token, or the end token in its place
    emitted: tuple[int, ...]  # with it: accepted + 1

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
        if not self.engine:
            return {"version": VERSION} | {name: value for name, value in vars(self).items() if name not in _OF_ENGINES}
        known = {name: None if name in _TIMES and math.isnan(value) else value for name, value in vars(self).items()}
        return {"version": VERSION} | known

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
        values |= {name: tuple(value[name]) for name in _TUPLES}
        return cls(**values | {name: math.nan for name in _TIMES if value[name] is None})


_NAMES = {f.name for f in fields(Row)}
_TIMES = {f.name for f in fields(Row) if f.name.endswith("_s") and f.name != "parts_s"}
_OF_ENGINES = ("engine", "concurrency")
_TUPLES = {"tokens", "planned", "drafted", "nodes", "accepted", "emitted"}


def grouped(rows: Iterable[Grouped], *names: str) -> dict[tuple[Json, ...], list[Grouped]]:
    """Rows, or cells of them, by these fields, in the order in which each group first comes up."""
    groups: dict[tuple[object, ...], list[Grouped]] = {}
    parts = [attrgetter(name) for name in names]
    for row in rows:
        groups.setdefault(tuple(part(row) for part in parts), []).append(row)
    return groups
