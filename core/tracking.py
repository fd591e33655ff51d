"""Where numbers of a run go: a JSONL file always, wandb where the recipe names a project.

A full disk or a dead network never stops training; the first failure is said once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from . import ranks
from .secrets import redact, redact_tree
from .section import Section


class WandbConfig(Section):
    project: str
    entity: str | None = None
    # null: online where a key is set, offline else.
    mode: Literal["online", "offline", "disabled"] | None = None


class TrackingConfig(Section):
    # null: JSONL only.
    wandb: WandbConfig | None = None


class Tracker:
    """Rank 0 logs; on other ranks every call does nothing.

    Args:
        name: of the run, for wandb.
        say: where a failure is told.
    """

    def __init__(
        self, config: TrackingConfig, folder: Path, *, name: str, recipe: dict[str, Any], say: Callable[[str], None]
    ):
        self.path, self.say = folder / "metrics.jsonl", say
        self._run: Any = None
        self._failed = False
        if not ranks.is_main():
            return
        folder.mkdir(parents=True, exist_ok=True)
        if config.wandb is not None and self._mode(config.wandb) != "disabled":
            self._attempt(lambda: self._start(config.wandb, folder, name, recipe))

    def log(self, values: Mapping[str, float | Path], step: int) -> None:
        """One line: values at an optimizer step. A path is a picture: the line names it, wandb gets it."""
        if not ranks.is_main():
            return
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **plain}) + "\n"
        self._attempt(lambda: self._append(line))
        if self._run is not None:
            self._attempt(lambda: self._run.log(_with_pictures(values), step=step))

    def rewind(self, step: int) -> None:
        """Drop lines after `step`: a resumed run writes them again, and each step stands once."""
        if ranks.is_main() and self.path.is_file():
            self._attempt(lambda: self._keep_until(step))

    def finish(self) -> None:
        if self._run is not None:
            self._attempt(self._run.finish)

    def _keep_until(self, step: int) -> None:
        kept = [line for line in self.path.read_text().splitlines() if _step(line) <= step]
        aside = self.path.with_suffix(".partial")
        aside.write_text("".join(line + "\n" for line in kept))
        os.replace(aside, self.path)

    def _append(self, line: str) -> None:
        with open(self.path, "a") as file:
            file.write(line)

    def _mode(self, config: WandbConfig) -> Any:
        if config.mode is not None:
            return config.mode
        return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")

    def _start(self, config: Any, folder: Path, name: str, recipe: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=self._mode(config),
            name=name,
            dir=str(folder),
            config=redact_tree(recipe),
            # Its metadata holds the command line as it was typed, its console log whatever a library prints.
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True),
        )

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # tracking is never worth a run: any failure of a tracker is said and survived
            if not self._failed:
                self.say(f"tracking failed and goes on without: {redact(str(error))}")
            self._failed = True


def _with_pictures(values: Mapping[str, float | Path]) -> dict[str, Any]:
    import wandb

    return {name: wandb.Image(str(value)) if isinstance(value, Path) else value for name, value in values.items()}


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 1 << 62  # a line cut off by a crash
