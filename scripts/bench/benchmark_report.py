#!/usr/bin/env python
"""CPU seconds and memory of a report of many measured rows, from `rows.jsonl` to `rows.jsonl` and the pages.

    scripts/bench/benchmark_report.py                100,000 rows of ten methods; bounds: 3 s to compute, 500 MiB

The rows are drawn with seed 0: 20 to 60 cycles each. Every round is a fresh process that reads them, computes the
report and writes it. Peak memory includes what the imports take, which the line without rows shows.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.eval import report
from draftsmith.eval.cells import MethodInfo
from draftsmith.eval.measured_rows import PLAIN, Row
from draftsmith.eval.row_columns import read_rows, write_rows
from draftsmith.scripts import timing

METHODS = (PLAIN, *(f"method {number}" for number in range(1, 10)))
TIMES = ("plain_prefill_s", "plain_total_s", "plain_cycle_s", "prefill_s", "total_s", "draft_s", "draft_cycle_s",
         "verify_s", "rule_s", "cycle_s")  # fmt: skip
PARTS = ("target_prefill", "draft_prefill", "token_pruning", "verification", "drafting", "tree_update", "others")


def drawn_rows(count: int) -> Iterator[Row]:
    """Rows of five sets, method after method for each request; plain decoding accepts nothing."""
    draw = random.Random(0)
    for number in range(count):
        method, cycles = METHODS[number % len(METHODS)], draw.randint(20, 60)
        levels = 0 if method == PLAIN else 5
        times: dict[str, Any] = {name: draw.random() for name in TIMES}
        accepted = tuple(min(levels, int(draw.expovariate(0.7))) for _ in range(cycles))
        yield Row(
            benchmark=f"set {number // len(METHODS) % 5}", method=method, request=f"{number // len(METHODS):08d}",
            drafter="" if method == PLAIN else "drafter", temperature=0.0, max_new_tokens=256, medium="image",
            prompt_tokens=600, visual_tokens=576, tokens=(), plain_tokens=cycles + 1, stop="length",
            identical=draw.random() < 0.99, planned=(levels,) * cycles, drafted=(levels,) * cycles,
            nodes=(5 * levels,) * cycles, accepted=accepted, emitted=tuple(one + 1 for one in accepted),
            **times, parts_s={name: draw.random() for name in PARTS},
            details={"plain_is_data": draw.random() < 0.5},
        )  # fmt: skip


def measure(path: Path) -> dict[str, float]:
    """CPU seconds of each step, and the peak of this process in MiB."""
    begun = [time.process_time()]
    rows = read_rows(path)
    begun.append(time.process_time())
    if rows:
        infos = {name: MethodInfo("drafter") for name in METHODS[1:]}
        built = report.build(rows, about={}, methods=infos)
        begun.append(time.process_time())
        report.write(path.parent / "report", built, rows)
        begun.append(time.process_time())
    names = ("read", "compute", "write")
    return {name: b - a for name, a, b in zip(names, begun, begun[1:], strict=False)} | {"peak": timing.peak_mib()}


def main() -> None:
    """Prints a line for each number of rows; `--measure` is one fresh process."""
    parser = timing.options(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    timing.header(f"seed 0, n {options.rounds}")
    timing.table("rows", "computing", "reading", "writing", "peak memory")
    with tempfile.TemporaryDirectory() as folder:
        for count in options.rows:
            path = Path(folder) / f"rows-{count}.jsonl"
            write_rows(path, drawn_rows(count))
            found = [
                json.loads(timing.answer_of(timing.fresh_process("--measure", path))) for _ in range(options.rounds)
            ]
            steps = (
                timing.spread([one[name] for one in found], 2, unit=" s") if count else "-"
                for name in ("compute", "read", "write")
            )
            timing.row(f"{count:,}", *steps, timing.spread([one["peak"] for one in found], 0, unit=" MiB"))


if __name__ == "__main__":
    main()
