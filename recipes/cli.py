"""The command line: `draftsmith recipe=NAME key=value ...`, the same as `trains/train.py`."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..core import ranks
from ..core.errors import UserError
from ..core.secrets import redact, redact_argument, redact_tree
from .load import Loaded, load, recipe_names


def main(arguments: list[str] | None = None) -> int:
    """Run a recipe. Returns the exit code: 0, 1 on a crash, 2 on a user's mistake, 143 when asked to stop and saved."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # The launcher puts its rank before the user's arguments; it also sets LOCAL_RANK, which is read instead.
    arguments = [a for a in arguments if not a.startswith(("--local_rank", "--local-rank"))]
    if not arguments or arguments[0] in ("-h", "--help"):
        say(usage())
        return 0
    try:
        return _run(arguments)
    except UserError as error:
        # Before the group exists a rank other than 0 may be the only one to know.
        if ranks.is_main() or type(error).__name__ == "AnotherRun":
            print(redact(f"error: {error}"), file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        # A peer that stopped with a message of its own closes the connection: not worth a traceback from every rank.
        if isinstance(error, RuntimeError) and "closed by peer" in str(error) and not ranks.is_main():
            print(f"rank {ranks.rank()}: ends because another rank has ended", file=sys.stderr, flush=True)
        else:
            # Printed here and not by Python: messages of libraries hold addresses and keys.
            print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
        return 1


def say(text: str) -> None:
    """A line for people, from rank 0."""
    if ranks.is_main():
        print(redact(text), flush=True)


def usage() -> str:
    lines = [
        "usage: draftsmith recipe=NAME [key=value ...] [stages=[a,b]] [restart=STAGE] [dry_run=true]",
        "",
        "recipes:",
    ]
    for name, path in recipe_names().items():
        header = path.read_text().splitlines()[0].lstrip("# ")
        lines.append(f"  {name:<24} {header}")
    return "\n".join(lines)


def _run(arguments: list[str]) -> int:
    # The schema brings torch and transformers: a moment's wait that --help does not need.
    from .schema import TRACKS

    loaded = load(arguments, TRACKS)
    from ..trainers.engine import check_engine
    from ..trainers.loop import Stopped
    from ..trainers.run import Planned, run_stages
    from .plan import plan

    recipe, options = loaded.recipe, loaded.options
    check_engine(recipe.engine)
    planned = plan(recipe, loaded.path)
    if options.dry_run:
        from .dry_run import dry_run
        from .dry_run_reading import dry_run_reading
        from .dry_run_visual import dry_run_visual
        from .schema import ReadingRecipe, VisualRecipe

        tracks: dict[type, Any] = {VisualRecipe: dry_run_visual, ReadingRecipe: dry_run_reading}
        say(tracks.get(type(recipe), dry_run)(recipe, planned))
        return 0
    from ..trainers.context import Context
    from ..trainers.engine import init_distributed
    from ..trainers.guard import RunLock, end_with_launcher

    end_with_launcher()
    output = Path(recipe.output)
    RunLock(output, say=say)
    init_distributed()
    command = "trains/train.py " + shlex.join(redact_argument(a) for a in arguments)
    _write_provenance(loaded, output, command)

    def make_context(stage: Planned, folder: Path, inputs: Mapping[str, Path]) -> Context:
        return Context(
            name=stage.name,
            folder=folder,
            seed=recipe.seed,
            fingerprint=stage.fingerprint,
            target=recipe.target,
            drafter=recipe.drafter,
            engine=recipe.engine,
            tracking=recipe.tracking,
            inputs=dict(inputs),
            say=say,
            recipe=redact_tree(loaded.tree),
            command=command,
        )

    try:
        run_stages(
            planned, make_context, output=output, chosen=options.stages, restart=options.restart, say=say
        )  # fmt: skip
    except Stopped as stopped:
        say(f"{stopped}: the checkpoint is written; the same command goes on from there")
        return 143
    return 0


def _write_provenance(loaded: Loaded, output: Path, command: str) -> None:
    """The resolved recipe, the command, versions and git state, before anything else is written."""
    if not ranks.is_main():
        return
    from .provenance import versions

    output.mkdir(parents=True, exist_ok=True)
    (output / "recipe.yaml").write_text(yaml.safe_dump(redact_tree(loaded.tree), sort_keys=False))
    about = {"command": command, "recipe": str(loaded.path.name), "pid": os.getpid(), **versions()}
    (output / "run.yaml").write_text(yaml.safe_dump(about, sort_keys=False))
