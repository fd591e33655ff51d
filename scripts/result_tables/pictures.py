"""Tables of the demos that draw pictures: demo/visual-ar, demo/visual-ar-textures, demo/visual-ar-blocks."""

from __future__ import annotations

import statistics

from draftsmith.eval.measured_rows import PLAIN

from .recorded import (
    Rows,
    all_same,
    cells_of,
    cells_of_run,
    contrasts_of,
    each,
    each_and_mean,
    evaluations,
    methods_of,
    named,
    span,
    speeds,
    table,
    tau,
    with_interval,
)

TEMPERATURES = (0.0, 1.0)


def _scores(recipe: str, method: str, temperature: float, metric: str) -> list[float]:
    """A score of a method's pictures in each run: `as_captioned` is the share that a reader network reads as such."""
    return [run["quality"][f"{temperature:g}"][method][metric] for run in evaluations(recipe).values()]


def _captioned(recipe: str, method: str, temperature: float) -> str:
    return f"{statistics.fmean(_scores(recipe, method, temperature, 'as_captioned')):.0%}"


# demo/visual-ar: one run


@table
def visual_ar_sampled() -> Rows:
    """Its cells at temperature 1, under those of plain decoding."""
    columns = ("method", "n", "speedup [IQR]", "tau [95%]", "kept depth", "nodes", "drawn as captioned")
    heading, *rows = cells_of_run("visual-ar", columns, 1.0)
    plain = ["plain decoding", rows[0][1], "1.00x", "1.00", "1.00", "0", _captioned("visual-ar", PLAIN, 1.0)]
    return [heading, plain, *rows]


# demo/visual-ar-textures: means of the runs

_TEXTURES = "visual-ar-textures"


@table
def textures() -> Rows:
    """Every method at both temperatures; a score of pictures is the mean of the runs."""
    rows = [
        ["method", *(text for t in ("T = 0", "T = 1") for text in (f"tau [95%], {t}", "DSR", "as captioned", "FID"))]
    ]
    for method in [PLAIN, *dict.fromkeys(m for t in TEMPERATURES for m in methods_of(_TEXTURES, t))]:
        row = [method]
        for t in TEMPERATURES:
            if method != PLAIN and method not in methods_of(_TEXTURES, t):
                row += ["-"] * 4
                continue
            cells = [] if method == PLAIN else cells_of(_TEXTURES, method, temperature=t)
            row[0] = named(cells[0]) if cells else "plain decoding"
            row += [tau(cells), speeds(cells)] if cells else ["1", "1.00x"]
            row += [
                _captioned(_TEXTURES, method, t),
                f"{statistics.fmean(_scores(_TEXTURES, method, t, 'fid_of_reader')):.0f}",
            ]
        rows.append(row)
    return rows


@table
def textures_differences() -> Rows:
    """Differences of tau on the same requests, each run and their mean."""
    contrasts = {
        "temperature of the drafts": "sampled tree minus EAGLE-2",
        "adaptive tree": "ADT-Tree minus EAGLE-2",
        "relaxed rule": "LANTERN minus EAGLE-2",
        "relaxed rule, sampled chain": "LANTERN minus the exact rule, sampled chain",
        "block rule": "block rule minus token rule, sampled chain",
        "condition dropout": "EAGLE-2, head with condition dropout minus head without",
    }
    rows = [["difference of tau: each seed, mean [Student's 95%]", "T = 0", "T = 1"]]
    measured = {(one["name"], one["place"]) for run in evaluations(_TEXTURES).values() for one in run["contrasts"]}
    for name, label in contrasts.items():
        row = [label]
        for place in ("captions, T = 0", "captions, T = 1"):
            found = contrasts_of(_TEXTURES, name, place=place) if (name, place) in measured else []
            row.append(each_and_mean([one["difference"] for one in found], "+") if found else "-")
        rows.append(row)
    return rows


@table
def textures_sure() -> Rows:
    """How sure the target is, by the kind of the cells of its own pictures: means of the runs."""
    shown = ("target_top1", "target_top10", "first_draft_exact", "first_draft_lantern")
    rows = [["T", "place", "of the cells", "target top-1", "target top-10", "first draft's chance, exact",
             "the same, LANTERN k = 48, delta = 0.4"]]  # fmt: skip
    for t in ("0", "1"):
        read = [run["analysis"][t] for run in evaluations(_TEXTURES).values()]
        for place in ("flat", "texture", "edge"):
            of = [one["places"][place] for one in read]
            rows.append([t, place, *(f"{statistics.fmean(one[key] for one in of):.0%}" for key in ("share", *shown))])
        rows.append([t, "all", "100%", *(f"{statistics.fmean(one[key] for one in read):.0%}" for key in shown)])
    return rows


# demo/visual-ar-blocks: three drafts and three heads a run

_BLOCKS = "visual-ar-blocks"


@table
def blocks_bounds() -> Rows:
    rows = [["what", "bound", "measured"], ["outputs identical to plain decoding (greedy)", "all", all_same(_BLOCKS)]]

    def less(name: str, t: int) -> str:
        found = contrasts_of(_BLOCKS, name, place=f"captions, T = {t}")
        return ", ".join(with_interval(one["difference"], one["interval"], "+") for one in found)

    above = f"T = 0: {less('chains of seven', 0)}; T = 1: {less('chains of seven', 1)}"
    rows.append(["tau of a DFlash chain of 7 minus that of EAGLE's chain of 7", "at or above 0", above])
    rows.append(["the same for sampled chains, T = 1", "at or above 0", less("sampled chains of seven", 1)])
    for name, what in {
        "sampled DSpark less DFlash": "tau of a sampled DSpark chain of 7, T = 1, minus DFlash's",
        "sampled DSpark less EAGLE": "the same, minus EAGLE's",
        "the code above": "DSpark that also reads the code above, minus DSpark",
    }.items():
        rows.append([what, "-" if name == "the code above" else "above 0", less(name, 1)])
    ms = [[cell["drafter_ms"] for cell in cells_of(_BLOCKS, f"{name}, chain of 7", temperature=0.0)]
          for name in ("DFlash", "EAGLE")]  # fmt: skip
    shares = each([ours / theirs for ours, theirs in zip(*ms, strict=True)])
    rows.append(["time of a cycle's drafting, DFlash over EAGLE's seven passes", "at most 1/3",
                 f"{shares} ({span(ms[0])} and {span(ms[1])} ms)"])  # fmt: skip
    return rows
