"""Tables of the demos that answer questions about pictures: demo/lvlm and its family, demo/lvlm-ov, demo/adapt."""

from __future__ import annotations

from draftsmith.recipes.load import load
from draftsmith.scripts.papers import adaptation_curve

from .recorded import (
    Rows,
    cells_of,
    contrasts_of,
    each,
    evaluations,
    mean_of,
    of_one,
    ratio_of_run,
    same,
    speed,
    table,
    tau,
    tau_of_run,
    taus_by_drafter,
    with_interval,
)


@table
def lvlm_readme() -> Rows:
    """The first demo's report, on pictures, of seed 0."""
    means = {"M": "M: the draft sees the picture", "T": "T: it sees the text alone"}
    rows = [["benchmark", "mode", "n", "tau [95%]", "expected speedup", "measured [IQR]", "identical"]]
    for mode, label in means.items():
        cell = of_one("lvlm", 0, mode, "pictures")
        expected = f"{cell['expected_speedup']:.2f}x"
        rows.append(["pictures", label, f"{cell['requests']}", tau_of_run(cell), expected, ratio_of_run(cell),
                     same(cell)])  # fmt: skip
    return rows


@table
def lvlm_seeds() -> Rows:
    """Each run of demo/lvlm-from-nothing, and the means."""
    sets = [("pictures", "M"), ("pictures", "T"), ("text", "M"), ("text", "T")]
    rows = [["seed", "right attribute named with the picture, without it",
             *(f"{name}: tau {mode}" if mode == "M" else f"tau {mode}" for name, mode in sets)]]  # fmt: skip
    for seed, run in evaluations("lvlm-from-nothing").items():
        seen = f"{run['binding']['accuracy']:.0%}, {run['binding']['blind_accuracy']:.0%}"
        cells = [of_one("lvlm-from-nothing", seed, mode, name) for name, mode in sets]
        rows.append([str(seed), seen, *(f"{cell['tau']:.2f}, {cell['DSR']:.2f}x" for cell in cells)])
    both = [cells_of("lvlm-from-nothing", mode, name) for name, mode in sets]
    rows.append(["mean", "", *(f"{tau(cells)}, {speed(cells)}" for cells in both)])
    return rows


# demo/lvlm-distilled


@table
def distilled() -> Rows:
    """Drafts that learned from the target against drafts that learned from the data, over the drafts of one run."""
    (run,) = evaluations("lvlm-distilled").values()
    rows = [["benchmark", "learned from the target", "learned from the data", "difference", "verdict"]]
    for where, compared in run["comparison"].items():
        place = where.removesuffix(", mode M")
        requests = cells_of("lvlm-distilled", "M", place)[0]["requests"] // 6  # of six drafts
        by_drafter = taus_by_drafter("lvlm-distilled", "M", place)
        ways = ("distill", "finetune")
        sides = [[value for name, (value, *_) in by_drafter.items() if name.startswith(way)] for way in ways]
        values = list(compared["each"].values())
        rows.append([f"{place} ({requests} requests for each draft)", *map(each, sides), mean_of(values, "+"),
                     compared["verdict"]])  # fmt: skip
    return rows


# demo/lvlm-ov

PICTURES = ("single", "pairs", "stories", "clips")
_DRAFTS = {
    "few_single_only": "64 positions, trained on single pictures",
    "few_onevision": "64 positions, trained on several",
    "single_only": "256 positions, trained on single pictures",
    "onevision": "256 positions, trained on several",
}


def _ov(mode: str, draft: str) -> list[str]:
    taus = (taus_by_drafter("lvlm-ov", mode, place)[draft] for place in PICTURES)
    return [with_interval(value, ends) for value, *ends in taus]


@table
def ov() -> Rows:
    """tau with the pictures of four drafts that differ in positions and in training."""
    rows = [[label, *_ov("M", draft)] for draft, label in _DRAFTS.items()]
    return [["draft", "single", "pairs", "stories (5 pictures)", "clips"], *rows]


@table
def ov_modes() -> Rows:
    """The same drafts with the pictures and without."""
    rows = [[label, mode, *_ov(mode, draft)] for mode in ("M", "T") for draft, label in _DRAFTS.items()]
    return [["draft", "mode", *PICTURES], *rows]


@table
def ov_changes() -> Rows:
    """What one change does to tau on the same requests."""
    (run,) = evaluations("lvlm-ov").values()
    rows = [["change of tau by", "mode", *PICTURES]]
    for name in dict.fromkeys(one["name"] for one in run["contrasts"]):
        for mode in ("M", "T"):
            found = [contrasts_of("lvlm-ov", name, mode=mode, place=place)[0] for place in PICTURES]
            rows.append([name, mode, *(with_interval(one["difference"], one["interval"], "+") for one in found)])
    return rows


@table
def suite() -> Rows:
    """tau of every mode and ensemble on each set's first turns, the mean of second turns, and the speedup."""
    (run,) = evaluations("suite").values()
    first, averages = run["suite"]["First turn"], run["suite"]["Averages"]
    sets = [name for name in next(iter(first.values())) if not name.endswith("Avg.")]
    rows = [["method", *sets, "second turns, mean", "DSR"]]
    for method, taus in first.items():
        mean = averages[method]
        rows.append([method, *(f"{taus[name]:.2f}" for name in sets), f"{mean['Second turn']:.2f}",
                     f"{mean['DSR']:.2f}x"])  # fmt: skip
    return rows


# demo/adapt


@table
def adapt() -> Rows:
    """tau of adapted heads and of heads from scratch, by steps; shares of the longest from scratch, seed by seed."""
    taus = {name: value for name, (value, *_) in taus_by_drafter("adapt", "chain", "new").items()}
    shown = adaptation_curve.table(adaptation_curve.heads_of(load(["recipe=demo/adapt"]).recipe, taus))
    return [[column.name for column in shown.columns], *([*map(str, row)] for row in shown.rows)]
