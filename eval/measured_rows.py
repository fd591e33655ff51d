"""One request decoded by one method: the measurement that every table, interval and figure is computed from.

`measure` makes a `Row` of what the decoding loop returned, for language, video and image targets alike. Rows merge over
ranks and interrupted runs in any order, and have a JSON form for the resume log and `rows.jsonl`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..core.errors import UserError
from ..core.files import read_json_lines
from .loop import Generation

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
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_cycles(self) -> int:
        """Cycles after the prefill, each with one verification pass."""
        return len(self.emitted)

    @property
    def num_emitted(self) -> int:
        """Tokens of all cycles; the prefill's token is not among them."""
        return sum(self.emitted)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that identifies this row within an evaluation. Rows are sorted by it before resampling."""
        return (self.benchmark, self.turn, self.budget, self.temperature, self.max_new_tokens, self.method,
                self.drafter, self.mode, self.request)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """JSON values, with the version of this form."""
        return {"version": VERSION} | vars(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str | Path | None = None) -> Row:
        """The row that `to_json` wrote.

        Args:
            where: the file that it comes from, for the error.

        Raises:
            UserError: another version of draftsmith wrote it.
        """
        version = value.get("version") if isinstance(value, Mapping) else None
        names = {f.name for f in fields(cls)}
        if version != VERSION or value.keys() - {"version"} != names:
            raise UserError(
                f"a measured request of version {version or 'none'}, and this draftsmith reads version {VERSION}",
                where=None if where is None else str(where),
                hint="measure anew: restart=STAGE removes what the stage has kept",
            )
        values: dict[str, Any] = {name: tuple(value[name]) if name in _TUPLES else value[name] for name in names}
        return cls(**values)


_TUPLES = {"tokens", "planned", "drafted", "nodes", "accepted", "emitted"}


def measure(
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
    *,
    benchmark: str,
    method: str,
    request: str,
    temperature: float,
    max_new_tokens: int,
    medium: Medium,
    drafter: str = "",
    mode: str = "",
    budget: str = "",
    turn: str = "",
    prompt_tokens: int = 0,
    visual_tokens: int = 0,
    details: Mapping[str, Any] | None = None,
) -> Row:
    """The row of a request that was decoded a few times plainly and by a method.

    Args:
        plain, drafted: one for each repeat. Plain decoding against itself is a row, too: its method is `PLAIN`.
        details: JSON values that only some methods have.
    """
    first, cycles = drafted[0], [cycle for generation in drafted for cycle in generation.cycles]
    parts = [time_parts(generation) for generation in drafted]
    return Row(
        benchmark=benchmark,
        method=method,
        request=request,
        drafter=drafter,
        mode=mode,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        medium=medium,
        budget=budget,
        turn=turn,
        prompt_tokens=prompt_tokens,
        visual_tokens=visual_tokens,
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
        details=dict(details or {}),
    )


def time_parts(generation: Generation) -> dict[str, float]:
    """Seconds of each operation of a request; `others` is what is left of the whole (committing, bookkeeping)."""
    cycles = generation.cycles
    parts = {
        "target_prefill": generation.prefill_s,
        "draft_prefill": generation.draft_prefill_s - generation.pruning_s,
        "token_pruning": generation.pruning_s,
        "verification": sum(cycle.verify_s for cycle in cycles),
        "drafting": sum(cycle.draft_s for cycle in cycles),
        "tree_update": sum(cycle.update_s for cycle in cycles),
    }
    return parts | {"others": max(0.0, generation.total_s - sum(parts.values()))}


def median(values: Iterable[float]) -> float:
    """0 where there is none: a request that ended with its first token has no cycle."""
    known = list(values)
    return statistics.median(known) if known else 0.0


def grouped(rows: Iterable[Grouped], *names: str) -> dict[tuple[Any, ...], list[Grouped]]:
    """Rows, or cells of them, by these fields, in the order in which each group first comes up."""
    groups: dict[tuple[Any, ...], list[Grouped]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return groups


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One line for each row."""
    with open(path, "w") as file:
        file.writelines(json.dumps(row.to_json()) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Read the rows that `write_rows` wrote. Raises `UserError` if another version wrote them."""
    hint = "evaluate again: it goes on with the requests that were decoded"
    return [Row.from_json(values, where=path) for values in read_json_lines(path, dict[str, Any], hint=hint)]
