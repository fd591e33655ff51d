"""Effects on tau: drafters compared, two drafters on the same requests, two ways of training over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import Field, model_validator

from ..core.json_types import JsonObject
from ..core.section import Section
from .intervals import student_half_width
from .measured_rows import Row
from .row_columns import Rows
from .summary import (
    Difference,
    SeedDifference,
    paired_difference,
    seed_difference,
    summarize,
)
from .tables import Column, Table, interval, text

# name -> (first, second): drafters, or methods, whose difference says what the first one's change does
Contrasts = Mapping[str, tuple[str, str]]
Label = Callable[[Row], str]


class Comparison(Section):
    """Stages that trained drafters, pair by pair: of one seed, and the same up to where the two ways part."""

    # Stages of the one way, one for each seed.
    first: list[str] = Field(min_length=2)
    # Stages of the other way, in the same order.
    second: list[str] = Field(min_length=2)

    @model_validator(mode="after")
    def _pairs(self) -> Comparison:
        if len(self.first) != len(self.second) or set(self.first) & set(self.second):
            raise ValueError("first and second are lists of the same length, without a common stage")
        return self


def of(rows: Rows, name: str) -> Rows:
    """The rows of one drafter, or of one method."""
    return rows.where(rows.has("drafter", name) | rows.has("method", name))


def drafters_table(rows: Rows, label: Label) -> Table | None:
    """tau of each drafter in each method by place; None where every method is of one drafter.

    Args:
        label: what a row was measured on.
    """
    drafters = {method: sorted(some.distinct("drafter")) for (method,), some in rows.grouped("method").items()}
    if all(len(names) < 2 for names in drafters.values()):
        return None
    places = list(rows.by(label))
    lines = []
    for method, names in drafters.items():
        for name in names:
            mine = rows.where(rows.has("method", method) & rows.has("drafter", name)).by(label)
            summaries = {place: summarize(some) for place, some in mine.items()}
            taus = [(s.tau, *s.tau_interval) if (s := summaries.get(place)) else None for place in places]
            beyond = sum(s.beyond_positions for s in summaries.values())
            lines.append((name, method, *taus, (beyond, sum(s.requests for s in summaries.values()))))
    columns = (text("drafter"), text("method"), *(Column(place, kind="interval") for place in places))
    beyond_column = Column("beyond positions", kind="count")
    note = "tau [95%]. Beyond positions: the number of requests that exceed the draft's positions."
    return Table("By drafter", (*columns, beyond_column), tuple(lines), note=note)


@dataclass(frozen=True)
class Contrast:
    """tau of the first drafter minus that of the second in one place and mode."""

    name: str
    mode: str
    place: str
    result: Difference


def contrasts_of(rows: Rows, contrasts: Contrasts, label: Label) -> list[Contrast]:
    """Every contrast in every place and mode (of draft LVLMs) that both sides were measured in."""
    results = []
    for name, (first, second) in contrasts.items():
        sides = of(rows, first), of(rows, second)
        key = _mode_of(sides)
        for mode in sides[0].distinct(key):
            one, other = (side.where(side.has(key, mode)).by(label) for side in sides)
            results += [Contrast(name, mode, p, paired_difference(one[p], other[p])) for p in one if p in other]
    return results


def _mode_of(sides: Iterable[Rows]) -> str:
    """The field that tells modes apart: `mode`, or `method` where a drafter is in several methods of one mode."""
    for side in sides:
        if len(side.grouped("mode", "method")) > len(side.distinct("mode")):
            return "method"
    return "mode"


def contrasts_table(contrasts: Sequence[Contrast], order: Sequence[str] = ()) -> Table:
    """A line for each contrast and mode: the difference of tau with its interval in each place.

    Args:
        order: of the places; without it they are in the order of the contrasts.
    """
    measured = list(dict.fromkeys(one.place for one in contrasts))
    places = [place for place in dict.fromkeys((*order, *measured)) if place in measured]
    modes, lines = any(one.mode for one in contrasts), []
    for name, mode in dict.fromkeys((one.name, one.mode) for one in contrasts):
        mine = {one.place: one.result for one in contrasts if (one.name, one.mode) == (name, mode)}
        values = ((d.difference, *d.interval) if (d := mine.get(p)) else None for p in places)
        lines.append((name, *([mode] if modes else []), *values))
    columns = (
        text("change"), *([text("mode")] if modes else []), *(Column(p, "+.2f", kind="interval") for p in places)
    )  # fmt: skip
    note = "Difference of tau on the same requests, with the 95% interval of a paired bootstrap."
    return Table("Effect of each change on tau", columns, tuple(lines), note=note)


@dataclass(frozen=True)
class TrainingComparison:
    """Two ways of training over several seeds: is the first one's tau above the second's?"""

    difference: SeedDifference
    by_depth: Mapping[str, tuple[float | None, ...]]  # "first", "second" -> share accepted of the drafts reached
    target_says_the_data: float  # share of requests whose plain answer is the data's, word for word
    why: tuple[str, ...]  # what speaks against a difference, where the interval is not above 0

    def to_json(self) -> JsonObject:
        """The fields of `difference` and all other fields, in one mapping."""
        return asdict(self.difference) | {k: v for k, v in asdict(self).items() if k != "difference"}


def compare_trainings(rows: Rows, settings: Comparison) -> TrainingComparison:
    """tau of the first stages minus tau of the second in one place and mode, with Student's 95% interval over pairs."""
    pairs = {f"{a} - {b}": (of(rows, a), of(rows, b)) for a, b in zip(settings.first, settings.second, strict=True)}
    difference = seed_difference(pairs)
    assert difference is not None, "two pairs at least"
    first, second = (mine[0].joined(*mine[1:]) for mine in zip(*pairs.values(), strict=True))
    depths = {
        name: tuple(depth.share_of_reached for depth in summarize(some).accepted_by_depth)
        for name, some in (("first", first), ("second", second))
    }
    same = statistics.fmean(float(details.get("plain_is_data", False)) for details in first.details())
    is_shown = difference.interval[0] > 0 or math.isnan(difference.mean)
    why = () if is_shown else tuple(_why(difference, depths, same))
    return TrainingComparison(difference, depths, same, why)


def sentence(where: str, comparison: TrainingComparison) -> str:
    """The result of a comparison as a sentence, with the reasons if the interval is not above 0."""
    seeds = comparison.difference
    each = ", ".join(f"{name} {value:+.3f}" for name, value in seeds.each.items())
    low, high = seeds.interval
    if math.isnan(seeds.mean):
        return f"{where}, first trainings minus second: tau was not measured with every seed."
    line = f"{where}, first trainings minus second: tau {seeds.mean:+.3f}, 95% interval "
    line += f"[{low:+.3f}, {high:+.3f}] ({seeds.verdict}; {each})."
    if comparison.why:
        line += " **Not shown to be above 0**: " + "; ".join(comparison.why) + "."
    return line


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _why(seeds: SeedDifference, depths: Mapping[str, Sequence[float | None]], same: float) -> list[str]:
    values, mean, reasons = list(seeds.each.values()), seeds.mean, []
    count, deviation = len(values), seeds.deviation
    if mean > 0:
        enough = next((k for k in range(count + 1, 31) if student_half_width(deviation, k) < mean), None)
        needed = f"{enough if enough else 'even 30'} seeds would {'' if enough else 'not '}suffice at the same spread"
        reasons.append(
            f"{count} seeds with a standard deviation of {deviation:.3f} cannot distinguish {mean:+.3f} from 0; "
            f"{needed}"
        )
    else:
        more = sum(v > 0 for v in values)
        reasons.append(f"on average the first trainings accept no more (they do with {more} of {count} seeds)")
    pairs = zip(depths["first"], depths["second"], strict=False)
    shares = ", ".join(f"{depth}: {_share(a)} against {_share(b)}" for depth, (a, b) in enumerate(pairs, 1))
    reasons.append(f"share accepted of the drafts that were reached, by depth: {shares}")
    reasons.append(
        f"the target's own answer equals the data's word for word in {same:.1%} of the requests"
        + (", so the two trainings saw nearly the same text" if same > 0.5 else "")
    )
    return reasons


@dataclass(frozen=True)
class Differences:
    modes: Mapping[str, tuple[Difference, SeedDifference | None]]  # place -> M minus T
    contrasts: tuple[Contrast, ...]
    trainings: Mapping[str, TrainingComparison]

    def to_json(self) -> JsonObject:
        """What report.json holds of modes, contrasts and comparisons of trainings."""
        return {
            "M_minus_T": {place: asdict(difference) for place, (difference, _) in self.modes.items()},
            "M_minus_T_by_drafter": {place: asdict(seeds) for place, (_, seeds) in self.modes.items() if seeds},
            "contrasts": [asdict(one) for one in self.contrasts],
            "comparison": {place: comparison.to_json() for place, comparison in self.trainings.items()},
        }

    def sentences(self) -> list[str]:
        """Sentences on M minus T in each place, also over several drafters, and on each comparison of trainings."""
        lines = []
        for place, (difference, seeds) in self.modes.items():
            if difference.verdict == "not measured":
                continue
            lines.append(
                f"{place}: tau with the picture minus without is {difference.difference:+.3f}, 95% interval "
                f"{interval(difference.interval)} ({difference.verdict}; {difference.requests} requests)."
            )
            if seeds is not None and seeds.verdict != "not measured":
                each = ", ".join(f"{name} {value:+.3f}" for name, value in seeds.each.items())
                lines.append(f"{place}, over {len(seeds.each)} drafters: {seeds.mean:+.3f}, 95% interval "
                             f"{interval(seeds.interval)} ({seeds.verdict}; {each}).")  # fmt: skip
        return lines + [sentence(place, comparison) for place, comparison in self.trainings.items()]


def mode_differences(rows: Rows, label: Label) -> dict[str, tuple[Difference, SeedDifference | None]]:
    """tau of a draft LVLM that sees the pictures minus that of the same draft without them."""
    differences = {}
    for place, some in rows.by(label).items():
        seeing, blind = (some.where(some.has("mode", mode)) for mode in ("M", "T"))
        if not seeing or not blind or not _unique(seeing) or not _unique(blind):
            continue
        names = sorted({*seeing.distinct("drafter")} & {*blind.distinct("drafter")})
        pairs = {n: (seeing.where(seeing.has("drafter", n)), blind.where(blind.has("drafter", n))) for n in names}
        differences[place] = paired_difference(seeing, blind), seed_difference(pairs)
    return differences


def _unique(rows: Rows) -> bool:
    """Whether each drafter decoded each request once, that is, no two methods share drafter and mode (with another
    tree, say).
    """
    return len(rows.grouped("drafter", "request")) == len(rows)


def trainings_of(rows: Rows, settings: Comparison | None, label: Label) -> dict[str, TrainingComparison]:
    """Place and mode (or method) -> comparison of the two trainings; empty without `settings`."""
    if settings is None:
        return {}
    named = [of(rows, name) for name in (*settings.first, *settings.second)]
    comparisons, key = {}, _mode_of(named)
    for place, some in named[0].joined(*named[1:]).by(label).items():
        for (mode,), mine in some.grouped(key).items():
            comparisons[f"{place}, mode {mode}" if mode else place] = compare_trainings(mine, settings)
    return comparisons
