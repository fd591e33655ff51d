"""The report of an evaluation: what was measured, on what, and what did not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import by_drafter, plots
from .compare import sentence
from .measure import Row, difference_by_drafter, paired_difference, summarize
from .tables import interval, markdown_table

Results = dict[str, dict[str, list[Row]]]  # benchmark -> mode -> rows


def build(
    results: Results,
    *,
    gamma: int,
    about: dict[str, Any],
    binding: dict[str, Any] | None,
    contrasts: by_drafter.Contrasts | None = None,
) -> dict[str, Any]:
    """The report as data.

    Args:
        contrasts: pairs of drafts whose difference says what one change does.
        about: command, device, date, seed, settings: what a number is worth nothing without.
        binding: accuracy of the target's answers with and without the picture, where it was asked for.
    """
    tables = {b: {m: summarize(rows, gamma=gamma) for m, rows in modes.items()} for b, modes in results.items()}
    differences = {b: paired_difference(m["M"], m["T"]) for b, m in results.items() if "M" in m and "T" in m}
    seeds = {b: difference_by_drafter(m["M"], m["T"]) for b, m in results.items() if "M" in m and "T" in m}
    return {
        "about": about,
        "gamma": gamma,
        "tables": tables,
        "M_minus_T": differences,
        "M_minus_T_by_drafter": {b: s for b, s in seeds.items() if s},
        "binding": binding,
        "by_drafter": by_drafter.side_by_side(results, gamma=gamma),
        "contrasts": by_drafter.contrasted(results, contrasts or {}),
    }


def write(folder: Path, report: dict[str, Any]) -> None:
    """`report.json`, `report.md` and two pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    plots.acceptance_by_depth(folder / "acceptance.png", report["tables"])
    plots.speedups(folder / "speedup.png", report["tables"])
    (folder / "report.md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    tables = [(b, m, t) for b, modes in report["tables"].items() for m, t in modes.items()]
    lines = ["# Speculative decoding, measured", "", *findings(report), ""]
    lines += markdown_table(
        ["benchmark", "mode", "n", "tau [95%]", "tau per request", "accepted/cycle", "T_q/T_p", "expected", "DSR [IQR]",
         "ESR [IQR]", "prefill", "identical"],
        [
            [b, m, str(t["requests"]), f"{t['tau']:.2f} {interval(t['tau_interval'])}",
             f"{t['tau_mean_of_requests']:.2f}", f"{t['num_accepted']:.2f}", f"{t['T_q_over_T_p']:.2f}",
             f"{t['expected_speedup']:.2f}x",
             f"{t['DSR']:.2f}x {interval(t['DSR_spread'])}", f"{t['ESR']:.2f}x {interval(t['ESR_spread'])}",
             f"{t['prefill_share']:.0%}", f"{t['identical']}/{t['requests']}"]
            for b, m, t in tables
        ],
    )  # fmt: skip
    lines += [
        "",
        "tau: tokens emitted after the prefill over verification passes, bonus token included; plain decoding has 1. "
        "DSR: speedup of decoding, ESR: end to end, both against plain decoding of the same target in the same run. "
        f"Expected: tau / (gamma T_q/T_p + T_verify/T_p), gamma = {report['gamma']}.",
        "",
        "![acceptance by depth](acceptance.png)",
        "",
        "![speedup, expected and measured](speedup.png)",
        *(by_drafter.markdown(report["by_drafter"], report["contrasts"]) if report.get("by_drafter") else []),
        "",
        "## How it was measured",
        "",
        *(f"- {key}: {value}" for key, value in report["about"].items()),
        "",
    ]
    return "\n".join(lines)


def findings(report: dict[str, Any]) -> list[str]:
    """What the numbers say, in sentences; what did not hold is said as plainly."""
    tables = [(b, m, t) for b, modes in report["tables"].items() for m, t in modes.items()]
    best = max(tables, key=lambda entry: entry[2]["tau"])
    fastest = max(tables, key=lambda entry: entry[2]["DSR"])
    lines = [f"- Best tau: {best[2]['tau']:.2f} ({best[0]}, mode {best[1]})."]
    different = [(b, m, t) for b, m, t in tables if t["identical"] < t["requests"]]
    if report["about"].get("temperature", 0) == 0:
        if different:
            b, m, t = different[0]
            lines.append(f"- **Outputs differ** from plain decoding: {b}, mode {m}, first at {t['first_different']}.")
        else:
            lines.append("- Outputs are identical to plain decoding, every token of every request.")
    if fastest[2]["DSR"] > 1:
        lines.append(
            f"- Best measured speedup of decoding: {fastest[2]['DSR']:.2f}x ({fastest[0]}, mode {fastest[1]})."
        )
    else:
        t = best[2]
        lines.append(
            f"- **No wall-clock gain on this machine**: the best DSR is {fastest[2]['DSR']:.2f}x. A draft step costs "
            f"T_q/T_p = {t['T_q_over_T_p']:.2f} of a target step, so tau {t['tau']:.2f} is expected to give "
            f"{t['expected_speedup']:.2f}x."
        )
    for benchmark, d in report["M_minus_T"].items():
        lines.append(
            f"- {benchmark}: tau with the picture minus without is {d['difference']:+.3f}, 95% interval "
            f"{interval(d['interval'])} ({d['verdict']}; {d['requests']} requests)."
        )
    for benchmark, d in report["M_minus_T_by_drafter"].items():
        each = ", ".join(f"{name} {value:+.3f}" for name, value in d["each"].items())
        lines.append(
            f"- {benchmark}, over {len(d['each'])} drafters: {d['mean']:+.3f}, 95% interval "
            f"{interval(d['interval'])} ({d['verdict']}; {each})."
        )
    for benchmark, modes in report.get("comparison", {}).items():
        lines += [sentence(benchmark, mode, found) for mode, found in modes.items()]
    binding = report["binding"]
    if binding:
        lines.append(
            f"- The target names the right attribute in {binding['accuracy']:.1%} of {binding['questions']} held-out "
            f"questions with the picture and in {binding['blind_accuracy']:.1%} without it."
        )
    for b, m, t in tables:
        if t["beyond_positions"]:
            lines.append(
                f"- **{t['beyond_positions']} of {t['requests']} requests of {b} go beyond the draft's positions** "
                f"in mode {m}: it was not trained there. Modes T and P are shorter."
            )
    vacuous = [f"{b} {m}" for b, m, t in tables if not t["num_accepted"] or not t["rejected_somewhere"]]
    if vacuous:
        lines.append(f"- Nothing accepted, or nothing rejected, in: {', '.join(vacuous)}.")
    return lines
