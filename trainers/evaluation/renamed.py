"""Keys that an `evaluate` stage had once, and how the same is written now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml


class _Plain(yaml.SafeDumper):
    """Without anchors: a list that stands twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Plain, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n...\n").strip()


def _modes(stage: Mapping[str, Any]) -> str:
    """The methods that modes, drafters and settings of the whole stage stood for."""
    drafters = list(stage.get("from") or ()) + list(stage.get("drafters") or ())
    common: dict[str, Any] = {"drafter": drafters[0]} if len(drafters) == 1 else {"drafters": drafters}
    common = common if drafters else {}
    if stage.get("gamma") is not None and stage.get("tree", "chain") == "chain" and stage["gamma"] != 5:
        common["tree"] = {"kind": "chain", "gamma": stage["gamma"]}
    elif stage.get("tree", "chain") != "chain":
        common["tree"] = stage["tree"]
    if stage.get("draw", "top-k") != "top-k":
        common["draw"] = stage["draw"]
    methods = {}
    for mode in stage.get("modes") or ["M", "T"]:
        name = mode if isinstance(mode, str) else mode.get("name", "ensemble")
        methods[name] = common if mode == "M" else {**common, "mode": mode}
    return f"methods: {_flow(methods)}"


def _suite(stage: Mapping[str, Any]) -> str:
    suite = stage["suite"] if isinstance(stage["suite"], Mapping) else {}
    of_tabed = {"turns", "tasks", "transcript", "quality"} & {*suite} or "modes" in stage
    kind = "tabed" if of_tabed or suite.get("convention") in ("paper", "released") else "sets"
    return f"benchmarks: {{suite: {{kind: {kind}, ...}}}} with the suite's keys"


# Old key -> how to write it now.
_RENAMED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "modes": _modes,
    "from": _modes,
    "gamma": lambda stage: (
        f"tree: {_flow({'kind': 'chain', 'gamma': stage['gamma']})}"
        if stage["gamma"]
        else "tree: one with its own sizes (gamma: null is not needed)"
    ),
    "rule": lambda stage: "methods: {NAME: {rule: exact}} (the default; greedy at temperature 0, sampling above)",
    "draw": lambda stage: f"methods: {{NAME: {{draw: {stage['draw']}}}}}",
    "temperature": lambda stage: f"temperatures: [{stage['temperature']}]",
    "suite": _suite,
    "looks": lambda stage: "probes: {confidence: true, states: true, ...} (importance and requests keep their names)",
    "binding": lambda stage: f"probes: {_flow({'binding': stage['binding']})}",
    "analysis": lambda stage: f"probes: {_flow({'analysis': stage['analysis']})}",
    "prompts": lambda stage: f"benchmarks: {_flow({'prompts': {'prompts': stage['prompts']}})}",
    "quality": lambda stage: "benchmarks: {prompts: {prompts: ..., quality: ...}}",
    "reader": lambda stage: "benchmarks: {prompts: {prompts: ..., reader: true}}",
    "shown": lambda stage: f"benchmarks: {{prompts: {{prompts: ..., shown: {stage['shown']}}}}}",
}


def refuse_old_keys(stage: Any) -> None:
    """Raises `ValueError` where a stage's section has such keys, with the same in today's words."""
    if not isinstance(stage, Mapping):
        return
    by_text: dict[str, list[str]] = {}
    for key, now in _RENAMED.items():
        if key in stage:
            by_text.setdefault(now(stage), []).append(key)
    told = [f"{' and '.join(keys)}: now written {text}" for text, keys in by_text.items()]
    drafters = stage.get("drafters")
    for name, draft in drafters.items() if isinstance(drafters, Mapping) else ():
        if isinstance(draft, Mapping) and "kind" not in draft:
            told.append(f"drafters.{name} needs its kind: {_flow({'kind': 'lvlm', **draft})}")
    if told:
        raise ValueError("; ".join(told))
