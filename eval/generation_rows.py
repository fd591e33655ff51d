"""What the decoding loop returned, as a measured row: for language, video and image targets alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.json_types import JsonMapping
from .loop import Generation
from .measured_rows import Row


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
