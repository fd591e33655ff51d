"""What a report says in sentences: what holds, and what does not."""

import dataclasses

from draftsmith.eval.report import build

from .rows import METHODS, a_row, measured_rows


def test_findings_say_what_does_not_hold():
    bad = [dataclasses.replace(r, identical=r.request != "r2", details={"beyond_positions": r.request == "r1"})
           for r in measured_rows(total_s=9.0)]  # fmt: skip
    bad += [a_row(method="dead", accepted=(0, 0), benchmark="pictures", total_s=9.0)]
    told = " ".join(build(bad, about={}, methods=METHODS).findings)
    assert "first at r2" in told
    assert "**Outputs differ** from plain decoding in 6 of 7 greedy cells: M, pictures" in told
    assert "**2 of 12 requests of pictures, clips exceed the draft's positions** in M" in told
    assert "No drafted token was accepted, or none was rejected, in: dead, pictures." in told
    seven = [a_row(method="dead", accepted=(0, 0), benchmark=f"b{n}") for n in range(7)]
    told = " ".join(build(seven, about={}, methods=METHODS).findings)
    assert f"in: {'; '.join(f'dead, b{n}' for n in range(6))} and 1 more." in told


def test_times_of_a_busy_machine_are_said():
    """`expected` was 2.25x beside a DSR of 1.89x, and nothing told that half the verifications took twice as long."""

    def told(**times):
        rows = [a_row(request=f"r{n}", method=method, **{name: of[n] for name, of in times.items()})
                for method in ("M", "T") for n in range(4)]  # fmt: skip
        return [line for line in build(rows, about={}, methods=METHODS).findings if line.startswith("**Warning**")]

    quiet, busy = (0.0020, 0.0021, 0.0026, 0.0028), (0.0018, 0.0019, 0.0052, 0.0053)
    assert told(verify_s=quiet, plain_cycle_s=quiet) == []
    (line,) = told(verify_s=busy, plain_cycle_s=quiet)
    assert "quartiles of the target's verification lie 2.8x apart (" in line and "1.5x in 2 of 2 lines" in line
    (line,) = told(verify_s=quiet, plain_cycle_s=busy)
    assert "quartiles of plain decoding's steps lie 2.8x apart (" in line
    trees = [a_row(request=f"r{n}", verify_s=seconds, plain_cycle_s=0.002, nodes=(size,) * 3)
             for n, (seconds, size) in enumerate(zip(busy * 2, (1, 1, 24, 24) * 2, strict=True))]  # fmt: skip
    assert not [line for line in build(trees, about={}, methods=METHODS).findings if "steady" in line], "of two sizes"
    fast = [a_row(request=f"r{n}", engine="vllm", verify_s=seconds) for n, seconds in enumerate(busy)]
    assert not [line for line in build(fast, about={}, methods=METHODS).findings if "steady" in line], "not its times"
