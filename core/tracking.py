"""Where numbers of a run go: a JSONL file always, wandb where the recipe names a project.

A full disk or a dead network never stops training and never delays it by more than `START_S` and `FINISH_S` (or
`WEIGHTS_S`). The first failure of each tracker is printed once.
"""

from __future__ import annotations

import json
import netrc
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from pydantic import Field

from . import ranks
from .errors import first_line
from .files import LOG_BYTES, append_lines, read_small, write_whole
from .json_types import JsonObject, listed, nulls, value_at
from .ranks import notice
from .secrets import redact, redact_tree
from .section import Section

# Longest waits for wandb's server: at a stage's start, for what is left at its end, and where weights are part of that.
START_S, FINISH_S, WEIGHTS_S = 30, 60, 600
ID_FILE = "wandb-id"  # in a stage's folder: a resumed stage goes on in the same wandb run


class WandbConfig(Section):
    """Where wandb keeps a run, and what it is sent."""

    # wandb's project.
    project: str
    # wandb's user or team; null: the login's own.
    entity: str | None = None
    # null: online where a key is set, offline else.
    mode: Literal["online", "offline", "disabled"] | None = None
    # Labels to find runs by.
    tags: list[str] = Field(default_factory=list)
    # Weights that wandb keeps. results: the model that a stage leaves; checkpoints: also every checkpoint with its
    # optimizer states. Each is copied before it is sent (to WANDB_DATA_DIR).
    artifacts: Literal["none", "results", "checkpoints"] = "none"


class TrackingConfig(Section):
    """Which tracker is used beside each stage's `metrics.jsonl`."""

    # null: JSONL only.
    wandb: WandbConfig | None = None


class Tracker:
    """Rank 0 logs; on other ranks every call does nothing.

    Args:
        name: of the stage, for wandb.
        say: prints a message to the user.
        group: of the run whose stage this is; wandb shows its stages together.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        *,
        name: str,
        recipe: JsonObject,
        say: Callable[[str], None],
        group: str | None = None,
    ):
        self.path, self.say, self.folder = folder / "metrics.jsonl", say, folder
        self.name, self.group = name, group
        self.artifacts = config.wandb.artifacts if config.wandb is not None else "none"
        self._run: Any = None
        self._identity = ""
        self._failed: set[str] = set()
        self._unwritten: list[str] = []  # lines that a full disk had no room for
        if not ranks.is_main():
            return
        folder.mkdir(parents=True, exist_ok=True)
        if config.wandb is not None:
            mode = config.wandb.mode or os.environ.get("WANDB_MODE") or ("online" if wandb_login() else "offline")
            if mode != "disabled":
                with self._attempt("wandb"):
                    self._start(config.wandb, mode, recipe)

    def log(self, values: Mapping[str, float | Path], step: int) -> None:
        """Log values at an optimizer step as one line. A path is a picture: the line holds its name, and wandb receives
        the file.
        """
        if not ranks.is_main():
            return
        line = nulls({"step": step, "time": time.time(), **values})
        self._unwritten.append(json.dumps(line, default=os.fspath) + "\n")
        with self._attempt("file"):
            append_lines(self.path, "".join(self._unwritten).encode())
            self._unwritten = []
        if self._run is None:
            return
        with self._attempt("wandb"):
            self._run.log(_with_pictures(values), step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table for wandb: samples, or what an evaluation measured. Its file is the caller's."""
        if self._run is None:
            return
        with self._attempt("wandb"):
            import wandb

            shown = [[redact(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
            self._run.log({name: wandb.Table(columns=list(columns), data=shown, allow_mixed_types=True)})

    def pictures(self, files: Sequence[Path]) -> None:
        """Plots for wandb, named as their files."""
        if self._run is not None and files:
            with self._attempt("wandb"):
                self._run.log(_with_pictures({file.stem: file for file in files}))

    def artifact(
        self, kind: Literal["result", "checkpoint", "report"], files: Sequence[Path], step: int | None
    ) -> None:
        """Files of this stage, copied and sent while the run goes on."""
        wanted = {"result": ("results", "checkpoints"), "checkpoint": ("checkpoints",)}.get(kind)
        if self._run is None or (wanted is not None and self.artifacts not in wanted):
            return
        with self._attempt("wandb"):
            import wandb

            name = re.sub(r"[^A-Za-z0-9_.-]", "-", "-".join(part for part in (self.group, self.name, kind) if part))
            artifact = wandb.Artifact(name, type=kind, metadata={} if step is None else {"step": step})
            for path in files:
                artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
            self._run.log_artifact(artifact, aliases=["latest"] if step is None else ["latest", f"step-{step}"])

    def rewind(self, step: int) -> None:
        """Drop lines after `step`: a resumed run writes them again, and each step stands once.

        wandb drops the repetition itself: a step below the last is not taken, and the numbers are the same.
        """
        if not ranks.is_main() or not self.path.is_file():
            return
        with self._attempt("file"):
            earlier, lines = list[bytes](), read_small(self.path, hint="delete it", max_bytes=LOG_BYTES).splitlines()
            for number, line in enumerate(lines, 1):
                try:
                    earlier += [line + b"\n"] if int(json.loads(line)["step"]) <= step else []
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    if number < len(lines):  # the last may be cut off by a crash, and is logged again
                        notice(f"{self.path}: line {number} cannot be read, and is left out of the log")
            write_whole(self.path, b"".join(earlier))

    def finish(self, exit_code: int = 0) -> None:
        """Close the wandb run; on other ranks, or without wandb, does nothing."""
        if self._run is None:
            return
        with self._attempt("wandb"):
            try:
                self._run.finish(exit_code=exit_code)
            except TimeoutError:
                self.say(f"wandb did not take all of this run in time: send the rest later, {self._sync()}")

    def _start(self, config: WandbConfig, mode: str, recipe: JsonObject) -> None:
        import wandb

        if mode == "online" and wandb_login() is None:  # in a terminal wandb would ask for a key, and wait
            mode = "offline"
            self.say("wandb has no key (wandb login, or WANDB_API_KEY): this run is kept offline")

        # As they are written: the value of a variable that one asks for stands in no file of ours, either.
        tags = listed(value_at(recipe, "tracking", "wandb", "tags")) or config.tags

        def start(mode: Any, identity: str) -> Any:
            return wandb.init(
                project=config.project,
                entity=config.entity,
                mode=mode,
                name=self.name,
                group=self.group,
                tags=list(dict.fromkeys(redact_tree(tags))),
                id=identity,
                resume="allow",
                dir=str(self.folder),
                config=redact_tree(recipe),
                # Its metadata holds the command line as it was typed, its console log whatever a library prints, and
                # the address of a checkout's remote may hold a token as the user's name. The commit is kept.
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    x_disable_meta=True,
                    git_remote="",
                    init_timeout=START_S,
                    finish_timeout=FINISH_S if self.artifacts == "none" else WEIGHTS_S,
                    finish_timeout_raises=True,
                ),
            )

        path = self.folder / ID_FILE  # of the wandb run that this stage was begun in
        begun = path.read_bytes().decode("ascii", "replace").strip() if path.is_file() else ""
        if is_new := re.fullmatch(r"[0-9a-f]{12}", begun) is None:
            begun = uuid.uuid4().hex[:12]
            path.write_text(begun)
        self._identity = begun
        try:
            self._run = start(mode, begun)
        except Exception as error:
            if mode != "online":
                raise
            # Use another name, because wandb's process still holds the run that failed to start.
            self._identity = uuid.uuid4().hex[:12]
            self._run = start("offline", self._identity)
            if is_new:  # the server may not know the first name: this one is the stage's
                path.write_text(self._identity)
            into = "" if is_new else f" --id {begun}"
            self.say(f"wandb does not answer ({redact(first_line(error))}): send this run later, {self._sync(into)}")

    def _sync(self, options: str = "") -> str:
        return f"wandb sync{options} {self.folder / 'wandb'}/*run-*-{self._identity}"

    @contextmanager
    def _attempt(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a failed tracker must not end a run: the failure is printed and training continues
            if where not in self._failed:
                self.say(f"tracking failed, and the run continues without it: {redact(str(error))}")
            self._failed.add(where)


def wandb_login() -> str | None:
    """Where wandb would read its key from, without reading it. Returns None if no place has one."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(name):
            return f"{name} is set"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        return f"a key for {host} is in {path}" if netrc.netrc(path).authenticators(host) else None
    except (OSError, RuntimeError, netrc.NetrcParseError):  # RuntimeError: a user without a home
        return None


def _with_pictures(values: Mapping[str, float | Path]) -> dict[str, Any]:
    import wandb

    return {name: wandb.Image(str(value)) if isinstance(value, Path) else value for name, value in values.items()}
