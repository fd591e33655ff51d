"""Effects on tau: drafters compared, two drafters on the same requests, two ways of training over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import Field, model_validator

from ..core.json_types import JsonObject
from ..core.section import Section
from .measured_rows import Frame
from .summary import REQUEST, Difference, SeedDifference, paired_difference, seed_difference, summarize
from .tables import Column, Table, Value, text

# name -> (first, second): drafters, or methods, whose difference says what the first one's change does
Contrasts = Mapping[str, tuple[str, str]]


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


# Frames below have a column `place`: what a row was measured on.


def drafters_table(rows: Frame) -> Table | None:
    """tau of each drafter in each method by place; None where every method is of one drafter."""
    if (rows.groupby("method").drafter.nunique() < 2).all():
        return None
    places, lines = list(rows.place.unique()), []
    for method, of_method in rows.groupby("method", sort=False):
        for name, some in of_method.groupby("drafter"):
            summaries = {place: summarize(of_place) for place, of_place in some.groupby("place")}
            taus = [(s.tau, *s.tau_interval) if (s := summaries.get(place)) else None for place in places]
            lines.append((name, method, *taus, (sum(s.beyond_positions for s in summaries.values()), len(some))))
    columns = (text("drafter"), text("method"), *(Column(place, kind="interval") for place in places),
               Column("beyond positions", kind="count"))  # fmt: skip
    note = "tau [95%]. Beyond positions: the number of requests that exceed the draft's positions."
    return Table("By drafter", columns, tuple(lines), note=note)


@dataclass(frozen=True)
class Contrast:
    """tau of the first drafter minus that of the second in one place and mode."""

    name: str
    mode: str
    place: str
    result: Difference


def contrasts_of(rows: Frame, contrasts: Contrasts) -> list[Contrast]:
    """Every contrast in every place and mode (of draft LVLMs) that both sides were measured in."""
    results = []
    for name, (first, second) in contrasts.items():
        for mode, sides in _by_mode(_of(rows, [first]), _of(rows, [second])):
            for place in sides[0].place.unique():
                one, other = (side[side.place == place] for side in sides)
                if len(other) and not _twice(one) and not _twice(other):
                    results.append(Contrast(name, mode, place, paired_difference(one, other)))
    return results


def _of(rows: Frame, names: Sequence[str]) -> Frame:
    """The rows of some drafters, or methods."""
    return rows[rows.drafter.isin(names) | rows.method.isin(names)]


def _by_mode(*sides: Frame) -> list[tuple[str, list[Frame]]]:
    """The sides in each mode that they have in common; as they are, with "", where they have none (M against T).

    Where a drafter is in several methods of one mode (trees), the methods are compared one by one in their place.
    """
    trees = any(len(side[["mode", "method"]].drop_duplicates()) > side["mode"].nunique() for side in sides)
    key = "method" if trees else "mode"
    common = [value for value in sides[0][key].unique() if all((side[key] == value).any() for side in sides)]
    return [(value, [side[side[key] == value] for side in sides]) for value in common] or [("", [*sides])]


def _twice(rows: Frame) -> bool:
    """Whether a drafter decoded a request twice: two methods share drafter and mode (with another tree, say)."""
    return bool(rows.duplicated([*REQUEST, "drafter"]).any())


def mode_differences(rows: Frame) -> dict[str, tuple[Difference, SeedDifference | None]]:
    """Place -> tau of a draft LVLM that sees the pictures minus that of the same draft without them, over requests and
    over drafters.
    """
    differences = {}
    for place, some in rows.groupby("place", sort=False):
        seeing, blind = (some[some["mode"] == mode] for mode in "MT")
        if len(seeing) and len(blind) and not _twice(seeing) and not _twice(blind):
            names = sorted({*seeing.drafter} & {*blind.drafter})
            pairs = {name: (seeing[seeing.drafter == name], blind[blind.drafter == name]) for name in names}
            differences[str(place)] = paired_difference(seeing, blind), seed_difference(pairs)
    return differences


def trainings_of(rows: Frame, settings: Comparison) -> dict[str, tuple[SeedDifference, float]]:
    """Place and mode (or method) -> tau of the first stages minus tau of the second, with Student's 95% interval over
    pairs, and the share of requests whose plain answer is the data's word for word.
    """
    comparisons: dict[str, tuple[SeedDifference, float]] = {}
    for place, some in _of(rows, [*settings.first, *settings.second]).groupby("place", sort=False):
        for mode, (first, second) in _by_mode(_of(some, settings.first), _of(some, settings.second)):
            names = zip(settings.first, settings.second, strict=True)
            difference = seed_difference({f"{a} - {b}": (_of(first, [a]), _of(second, [b])) for a, b in names})
            assert difference is not None, "two pairs at least"
            same = [float(details.get("plain_is_data", False)) for details in first.details]
            where = f"{place}, mode {mode}" if mode else str(place)
            comparisons[where] = difference, sum(same) / len(same) if same else math.nan
    return comparisons


def differences(rows: Frame, contrasts: Contrasts, compare: Comparison | None) -> tuple[JsonObject, Table | None]:
    """What is compared on the same requests: data of report.json, and a line for each difference, with its interval;
    None without one.
    """
    modes, trainings = mode_differences(rows), {} if compare is None else trainings_of(rows, compare)
    lines: list[tuple[Value, ...]] = []
    for one in (contrasted := contrasts_of(rows, contrasts)):
        place = f"{one.place}, mode {one.mode}" if one.mode else one.place
        result = one.result
        lines.append((one.name, place, (result.difference, *result.interval), f"{result.requests} requests"))
    for place, (result, seeds) in modes.items():
        name = "the picture is seen (M - T)"
        lines.append((name, place, (result.difference, *result.interval), f"{result.requests} requests"))
        lines += [(name, place, (seeds.mean, *seeds.interval), f"{len(seeds.each)} drafters")] if seeds else []
    for place, (seeds, _) in trainings.items():
        each = ", ".join(f"{name} {value:+.3f}" for name, value in seeds.each.items())
        over = f"{len(seeds.each)} pairs: {each}"
        lines.append(("first trainings - second", place, (seeds.mean, *seeds.interval), over))
    columns = (text("change"), text("measured on"), Column("tau [95%]", "+.3f", kind="interval"), text("over"))
    note = (
        "Difference of tau on the same requests: over requests with the interval of a paired bootstrap, over "
        "drafters or pairs of trainings with Student's."
    )
    data: JsonObject = {
        "M_minus_T": {place: asdict(difference) for place, (difference, _) in modes.items()},
        "M_minus_T_by_drafter": {place: asdict(seeds) for place, (_, seeds) in modes.items() if seeds},
        "contrasts": [asdict(one) for one in contrasted],
        "comparison": {p: asdict(seeds) | {"target_says_the_data": s} for p, (seeds, s) in trainings.items()},
    }
    return data, Table("Effect of each change on tau", columns, tuple(lines), note=note) if lines else None
