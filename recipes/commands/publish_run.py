"""Publish a run that is finished, whether or not its recipe has a stage for it: `draftsmith publish RUN key=value ...`.

Nothing is trained or measured. A publication that was made with other settings is kept aside, and made anew.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from ...core.errors import UserError
from ...core.files import read_yaml
from ...core.json_types import JsonObject, object_at, text_at
from ...core.results import BEGUN, DONE, read_mark
from ...core.secrets import redact_argument
from ..config.launch import context_maker, describe, say
from ..config.load import blamed, load

KIND = "publish"


def publish_run(run: Path, settings: Sequence[str]) -> int:
    """Run the publishing stage of a run, or describe it (`dry_run=true`); returns the exit code.

    Args:
        settings: `key=value`, keys of the stage (`repo=me/name`) or of the whole recipe.

    Raises:
        UserError: it would be uploaded, and nobody is logged in to the Hub.
        Stopped: the run was asked to stop; what the Hub has by then stays there.
    """
    from ...trainers.publish.hub_upload import usable_token
    from ...trainers.run.guard import RunLock
    from ...trainers.run.matching import is_done
    from ...trainers.run.run import run_stages
    from ...trainers.stages.publish import PublishStage
    from ..config.plan import plan

    own = {field.alias or name for name, field in PublishStage.model_fields.items()}
    name, known = _stage(run)
    arguments = [f"recipe={run / 'recipe.yaml'}", f"output={run}", *([] if known else [f"stages.{name}.kind={KIND}"])]
    again = f"restart={name}" in settings
    for setting in settings:
        if setting in (f"restart={name}", f"stages={name}", f"stages=[{name}]"):
            continue  # a stage that the recipe lacks is none of its stages
        key = setting.partition("=")[0]
        arguments.append(f"stages.{name}.{setting}" if key.split(".")[0] in own else setting)
    loaded = load(arguments)
    planned = plan(loaded.recipe, loaded.path)
    stage = next(p for p in planned if p.name == name)
    options = loaded.options
    if options.stages or options.restart:
        raise UserError("a run's folder is published by its own stage alone", where="command line: stages=, restart=",
                        hint=f"leave them out, or name {name}")  # fmt: skip
    if options.dry_run:
        with blamed(loaded.written):
            return describe(loaded.recipe, planned)
    # Refuses a misleading name before a model is loaded.
    say("\n".join(stage.stage.describe(stage)))
    RunLock(run, say=say)
    restart = name if again or _is_other(run / name, stage.fingerprint) else None
    # An earlier publication is not set aside for an upload that cannot begin.
    if cast(PublishStage, stage.stage).uploads and (restart is not None or not is_done(stage, run)):
        usable_token()
    command = "draftsmith publish " + shlex.join(redact_argument(a) for a in (str(run), *settings))
    run_stages(
        planned, context_maker(loaded, command), output=run, chosen=(name,),
        restart=restart, say=say,
    )  # fmt: skip
    return 0


def _stage(run: Path) -> tuple[str, bool]:
    """The name of the run's publishing stage, and whether its recipe has one."""
    path = run / "recipe.yaml"
    if not path.is_file():
        raise UserError("no run", where=str(run), hint="name the folder of a run, which holds its recipe.yaml")
    hint = "name the folder of a run, as it was left: its recipe.yaml says what was run"
    stages = object_at(read_yaml(path, JsonObject, hint=hint), "stages") or {}
    names = [name for name, stage in stages.items() if text_at(stage, "kind") == KIND]
    if len(names) > 1:
        command = f"draftsmith recipe={path} output={run} 'stages=[{names[-1]}]'"
        raise UserError(f"this run's recipe publishes in {len(names)} stages, {', '.join(names)}", where=str(path),
                        hint=f"run the one that you mean: {command}")  # fmt: skip
    return (names[0], True) if names else (KIND, False)


def _is_other(folder: Path, fingerprint: str) -> bool:
    """Whether it was made with other settings; what can be read of neither record, the stage itself sets aside."""
    mark = read_mark(folder / BEGUN) or read_mark(folder / DONE)
    return mark is not None and mark.fingerprint != fingerprint
