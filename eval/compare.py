"""Two ways of training, measured on the same requests over several seeds: is the first one's tau above the second's?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from ..core.section import Section
from .measure import Row, by_depth, difference_by_drafter, student_half_width


class Comparison(Section):
    """Stages that trained drafters, pair by pair: of one seed, and the same up to where the two ways part."""

    first: list[str] = Field(min_length=2)
    second: list[str] = Field(min_length=2)

    @model_validator(mode="after")
    def _pairs(self) -> Comparison:
        if len(self.first) != len(self.second) or set(self.first) & set(self.second):
            raise ValueError("first and second are lists of the same length, without a common stage")
        return self


def compare_trainings(rows: Sequence[Row], settings: Comparison, *, gamma: int) -> dict[str, Any]:
    """tau of the first stages less tau of the second on one benchmark in one mode, with Student's 95% interval."""
    first, second = ([_renamed(r, stages) for r in rows if r["drafter"] in stages]
                     for stages in (settings.first, settings.second))  # fmt: skip
    found = difference_by_drafter(first, second)
    assert found is not None, "two pairs at least"
    names = [f"{a} - {b}" for a, b in zip(settings.first, settings.second, strict=True)]
    found["each"] = dict(zip(names, found["each"].values(), strict=True))
    ways = {"first": first, "second": second}
    found["by_depth"] = {
        way: [d["share_of_reached"] for d in by_depth(mine, gamma) if d["drafted"]] for way, mine in ways.items()
    }
    found["target_says_the_data"] = statistics.fmean(float(r["plain_is_data"]) for r in first)
    found["why"] = [] if found["interval"][0] > 0 else _why(found)
    return found


def sentence(benchmark: str, mode: str, found: dict[str, Any]) -> str:
    """What a comparison says, and where it is not above 0, why."""
    each = ", ".join(f"{name} {value:+.3f}" for name, value in found["each"].items())
    low, high = found["interval"]
    line = f"- {benchmark}, mode {mode}, first trainings less second: tau {found['mean']:+.3f}, 95% interval "
    line += f"[{low:+.3f}, {high:+.3f}] ({found['verdict']}; {each})."
    if found["why"]:
        line += " **Not shown to be above 0**: " + "; ".join(found["why"]) + "."
    return line


def _renamed(row: Row, stages: Sequence[str]) -> Row:
    """Pairs are drafters of one name."""
    return row | {"drafter": f"pair {stages.index(row['drafter']):02d}"}


def _why(found: dict[str, Any]) -> list[str]:
    """What of the measurements speaks against a difference, in sentences."""
    values = list(found["each"].values())
    mean, spread, n = found["mean"], statistics.stdev(values), len(values)
    reasons = []
    if mean > 0:
        wanted = next((k for k in range(n + 1, 31) if student_half_width(spread, k) < mean), None)
        more = f"{wanted} would do if they spread alike" if wanted else "even 30 would not do if they spread alike"
        reasons.append(
            f"{n} seeds that differ by {spread:.3f} (standard deviation) cannot tell {mean:+.3f} from 0; {more}"
        )
    else:
        reasons.append(f"on average the first accept no more ({sum(v > 0 for v in values)} of {n} seeds do)")
    a, b = (found["by_depth"][way] for way in ("first", "second"))
    shares = ", ".join(f"{d}: {x:.1%} against {y:.1%}" for d, (x, y) in enumerate(zip(a, b, strict=False), 1))
    reasons.append(f"accepted of the drafts reached, by depth: {shares}")
    reasons.append(
        f"the target's own answer is the data's, word for word, in {found['target_says_the_data']:.1%} of the requests"
        + (": the two learned nearly the same text" if found["target_says_the_data"] > 0.5 else "")
    )
    return reasons
