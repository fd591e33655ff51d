"""Runs that nobody disturbs: what every attempt starts from, and what its end is compared with."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from attempts.process import command, run
from freeze import cleaned, of_stage, shown
from goldens import differences

HERE = Path(__file__).parent
RECIPES = ("lvlm", "visual")
# Of a publication: files whose text holds times, dates or sums over such files, as freeze.py names them.
_TIMED = {"SHA#SUMS", "run.yaml", "recipe.yaml"}


@dataclass
class Reference:
    """A finished run of one recipe.

    Args:
        stages: in the recipe's order.
        events: stage -> how often a run of it alone changes the folder.
        seconds: stage -> how long that takes.
        results: stage -> what of it must come out equal.
    """

    name: str
    folder: Path
    stages: list[str]
    events: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Path:
        """Its file."""
        return HERE / f"{self.name}.yaml"

    def copy(self, folder: Path, stages: Sequence[str]) -> None:
        """These stages of the finished run as a run of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in stages:
            shutil.copytree(self.folder / name, folder / name, symlinks=True)

    def differences(self, folder: Path, stages: Sequence[str]) -> list[str]:
        """What differs between these stages of a run and those of the reference; empty where nothing does."""
        lines = []
        for name in stages:
            if not (folder / name / "done.json").is_file():
                lines.append(f"{name} has not finished")
                continue
            found = json.loads(json.dumps(results(folder / name)))
            lines += [f"{name}: {line}" for line in differences(self.results[name], found, same_machine=True)]
        return lines


def build(name: str, folder: Path) -> Reference:
    """Runs a recipe stage by stage. Raises `SystemExit` where a stage fails."""
    reference = Reference(name, folder, [])
    recipe = yaml.safe_load(reference.recipe.read_text())
    reference.stages += [stage for stage in recipe["stages"] if stage != "publish"]
    for stage in reference.stages:
        arguments = [f"recipe={reference.recipe}", f"output={folder}", f"stages=[{stage}]"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        ended = run(command(arguments), folder, folder.with_name(f"{folder.name}.log"))
        if ended.code != 0:
            raise SystemExit(f"{name}, stage {stage}, undisturbed: exit code {ended.code}\n{ended.text[-3000:]}")
        reference.events[stage], reference.seconds[stage] = ended.events, ended.seconds
        reference.results[stage] = json.loads(json.dumps(results(folder / stage)))
    return reference


def results(folder: Path) -> dict[str, Any]:
    """What of a stage must not depend on how often it was stopped: files, losses, weights, data and rows.

    Checkpoints are left out, and what `tests/tools/freeze.py` leaves out: times, dates and caches.
    """
    record = of_stage(folder)
    names = Counter(shown(str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file())
    record["files"] = {name: count for name, count in sorted(names.items()) if _is_result(name)}
    record["data"] = {name: value for name, value in record.get("data", {}).items() if _is_result(name)}
    rows = folder / "rows.jsonl"
    if rows.is_file():
        lines = [json.dumps(cleaned(json.loads(line)), sort_keys=True) for line in rows.read_text().splitlines()]
        record["rows"] = sorted(lines)
    report = folder / "report.json"
    if report.is_file():
        numbers = cleaned(json.loads(report.read_text()))  # without its sentences, which tell times
        record["report"] = {key: value for key, value in numbers.items() if key not in ("text", "sentences")}
    return record


def _is_result(name: str) -> bool:
    path = Path(name)
    return not (set(path.parts) & {"checkpoints", "cache"} or path.name in _TIMED or path.suffix == ".lock")
