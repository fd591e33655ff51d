"""What a run says about where its drafter came from: the stages that trained it, their data, and what came of them.

Read from the resolved recipe (as the run's `recipe.yaml` has it) and from the stages' folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ...core.files import LOG_BYTES, read_small
from ...core.json_types import JsonMapping, listed, object_at, text_at
from ...core.ranks import notice
from ...core.results import DONE, read_mark

SCRATCH = "scratch"
SYNTHETIC_DATASET = "draftsmith shapes world"
# Sections of a stage that name files of data, or the stage that wrote them.
_DATA = ("data", "source", "answers", "prompts")


@dataclass(frozen=True)
class Trained:
    """One stage of a drafter's training, as a row of the card's table."""

    name: str
    trains: str
    data: str
    length: str  # "300 steps" or "1 epoch"
    batch_size: int | None
    rate: str
    loss: float | None  # the last that was logged
    hours: float | None

    @property
    def lasted(self) -> str:
        """Its wall time with a unit: minutes under 0.1 h."""
        if self.hours is None:
            return "-"
        return f"{self.hours:.2f} h" if self.hours >= 0.1 else f"{60 * self.hours:.2g} min"


def trained_by(stages: JsonMapping, name: str) -> list[str]:
    """The `train` stages that made the drafter of stage `name`, the first one first."""
    order, names = list(stages), [name]
    while (start := stages[names[-1]].get("from")) != SCRATCH:
        # Without `from` a stage trains the recipe's own drafter on, and none that a stage has for itself.
        earlier = [n for n in order[: order.index(names[-1])] if _trains_drafter(stages[n]) and not _own(stages[n])]
        if object_at(start) is not None or (start is None and not earlier):
            break
        names.append(start if start is not None else earlier[-1])
    return names[::-1]


def starts_of(stages: JsonMapping, names: Iterable[str]) -> list[str]:
    """Heads outside the run that the stages `names` started from."""
    starts = [object_at(stages, name, "from") for name in names]
    return [str(start["path"]) for start in starts if start is not None]


def _trains_drafter(stage: JsonMapping) -> bool:
    return stage.get("kind") == "train" and stage.get("model", "drafter") == "drafter"


def _own(stage: JsonMapping) -> bool:
    return stage.get("drafter") is not None


def finished(stages: JsonMapping) -> list[str]:
    """The `train` stages whose drafter no later stage trains on: the recipe's own before those of stages."""
    lines = {name: trained_by(stages, name) for name, stage in stages.items() if _trains_drafter(stage)}
    last = [name for name in lines if not any(name in line[:-1] for line in lines.values())]
    return sorted(last, key=lambda name: any(_own(stages[one]) for one in lines[name]))


def data_of(stages: JsonMapping, name: str) -> list[str]:
    """Names of the data that a stage read, through the stages that prepared it: files by their name alone."""
    names: list[str] = []
    _collect(stages, name, names, set())
    return list(dict.fromkeys(names))


def _collect(stages: JsonMapping, name: str, names: list[str], seen: set[str]) -> None:
    if name in seen or name not in stages:
        return
    seen.add(name)
    stage = stages[name]
    if stage.get("kind") == "generate":
        names.append(SYNTHETIC_DATASET)
        return
    for key in _DATA:
        if (section := object_at(stage, key)) is None:
            continue
        source = section.get("from")
        if source is None and key == "source" and section.get("kind") in ("cached", "cached_on_first_epoch"):
            source = _latest(stages, name, lambda stage: stage.get("kind") == "cache")
        if source is None and key == "data" and not section.get("path"):
            source = _latest(stages, name, _writes_codes)
        for maker in listed(source):
            _collect(stages, maker, names, seen)
        # With `from` on the stage itself, paths are inside what that stage wrote.
        paths = section.get("path") or section.get("annotations")
        if source is None and paths and not (stage.get("kind") == "encode" and stage.get("from")):
            names += [Path(str(path)).name for path in listed(paths)]
    # An `encode` stage's own input.
    if stage.get("kind") == "encode" and (maker := text_at(stage, "from")) is not None:
        _collect(stages, maker, names, seen)


def _writes_codes(stage: JsonMapping) -> bool:
    """Encoded pictures, or what the target drew; of pixels alone no drafter learns."""
    if stage.get("kind") == "encode":
        return "codes" in (stage.get("write") or ("codes",))
    return stage.get("kind") == "regenerate" and stage.get("prompts") is not None


def _latest(stages: JsonMapping, name: str, makes: Callable[[JsonMapping], bool]) -> str | None:
    before = list(stages)[: list(stages).index(name)]
    return next((n for n in reversed(before) if makes(stages[n])), None)


def training_table(stages: JsonMapping, names: list[str], run: Path) -> list[Trained]:
    """A row for each of the stages `names`, whose folders lie in `run`."""
    return [_row(name, stages, run / name) for name in names]


def _row(name: str, stages: JsonMapping, folder: Path) -> Trained:
    stage = stages[name]
    optim = stage.get("optim") or {}
    steps, epochs = stage.get("steps"), stage.get("epochs")
    number, what = (steps, "step") if steps else (epochs, "epoch")
    # A variable's number is text: `${oc.env:STEPS}`.
    length = f"{number:,} {what}" + ("s" if number != 1 else "") if isinstance(number, int) else f"{number} {what}s"
    done = read_mark(folder / DONE)
    seconds = None if done is None else done.seconds
    return Trained(
        name=name,
        trains=", ".join(stage.get("trainable") or ["head"]),
        data=", ".join(data_of(stages, name)) or "-",
        length=length,
        batch_size=stage.get("batch_size"),
        rate=str(optim.get("lr", "-")),
        loss=_last_loss(folder / "metrics.jsonl"),
        hours=None if seconds is None else seconds / 3600,
    )


_AGAIN = "restore the file, or run the stage again (restart=STAGE)"


def _last_loss(path: Path) -> float | None:
    loss, damaged = None, 0
    for line in read_small(path, hint=_AGAIN, max_bytes=LOG_BYTES).splitlines() if path.is_file() else ():
        try:
            loss = json.loads(line).get("loss", loss)
        except (ValueError, AttributeError, RecursionError):
            damaged += 1
    if damaged:
        notice(f"{path}: {damaged} damaged or cut lines are skipped (a run that was killed leaves one)")
    return loss
