"""Opens a finished run of an image generator's recipe for scripts, with the recipe's keys and the script's own options.

A script brings a section of options, whose fields say what they are for; what it draws and how it is judged it reads
from the recipe's stage of kind evaluate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from draftsmith.core.errors import UserError, did_you_mean
from draftsmith.core.results import DONE, read_mark
from draftsmith.core.secrets import redact
from draftsmith.core.section import Section
from draftsmith.data.captioned.prompts import ImagePrompt, PromptSource, read_prompts
from draftsmith.data.stage_folders import DATASET_FOLDER
from draftsmith.recipes.commands.cli import say
from draftsmith.recipes.exit_codes import MISTAKE, OK, STOPPED
from draftsmith.recipes.load import RUN_OPTIONS, load
from draftsmith.recipes.plan import plan
from draftsmith.recipes.schema import Recipe
from draftsmith.trainers.run.finished_stages import InputCheck
from draftsmith.trainers.run.matching import input_problem
from draftsmith.trainers.run.stage import Planned
from draftsmith.trainers.stages.evaluate import EvaluateStage
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo


class ScriptOptions(Section):
    """What every such script is told besides the recipe; the description is what --help says."""

    count: int = Field(100, ge=1, description="prompts drawn; speed wants 1000, FID thousands")
    stage: str | None = Field(None, description="the recipe's stage of kind evaluate; null: the last")
    name: str = Field(min_length=1, description="folder inside the run, which must not hold a report")


Options = TypeVar("Options", bound=ScriptOptions)


class Finished(Generic[Options]):
    """A recipe, the stage of kind evaluate that says what is drawn, and where its earlier stages left their results.

    Raises `UserError` for anything that a user got wrong, before a model is loaded.
    """

    def __init__(self, arguments: Sequence[str], schema: type[Options]):
        own, others = _split(arguments, schema)
        try:
            self.options = schema.model_validate(own)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
            raise UserError("; ".join(problems), hint="see --help") from error
        self.loaded = load(others)
        self.recipe: Any = self.loaded.recipe
        # `seed=` draws anew from what was trained with the recipe's own.
        self._unseeded = load([argument for argument in others if not argument.startswith("seed=")]).recipe
        if not self.recipe.target.draws_images:
            raise UserError(f"target {self.recipe.target.kind} draws no pictures", where=str(self.loaded.path),
                            hint="take a recipe of an image generator")  # fmt: skip
        self.folder = Path(self.recipe.output) / self.options.name
        if self.options.name in self.recipe.stages:
            raise UserError(f"{self.options.name!r} is a stage's folder", where=str(self.loaded.path),
                            hint="give another name=")  # fmt: skip
        self.stage_name, self.stage = self._stage()

    def _stage(self) -> tuple[str, EvaluateStage]:
        evaluations = {n: s for n, s in self.recipe.stages.items() if isinstance(s, EvaluateStage)}
        where = str(self.loaded.path)
        if not evaluations:
            raise UserError("the recipe has no stage of kind evaluate, which would say what is drawn", where=where,
                            hint="add one, or take a recipe that has one")  # fmt: skip
        name = self.options.stage or list(evaluations)[-1]
        if name not in evaluations:
            raise UserError(
                f"stage={name}: no stage of kind evaluate", where=where, hint=did_you_mean(name, evaluations)
            )
        return name, evaluations[name].with_count(self.options.count)

    def inputs(self, things: Iterable[str]) -> dict[str, Path]:
        """Thing -> folder of the finished stage that made it, of those of `things` that a stage makes.

        Raises `UserError` where it has not finished with this recipe's settings, or a file is not as it was written.
        """
        output = Path(self.recipe.output)
        planned = self._planned(self.recipe)
        makers = {thing: planned.inputs[thing] for thing in things if thing in planned.inputs}
        folders = {thing: output / maker for thing, maker in makers.items()}
        for thing, folder in folders.items():
            if read_mark(folder / DONE) is None:
                raise UserError(f"the {thing} of stage {folder.name} is not there, or not finished", where=str(folder),
                                hint="give the output= of a finished run, or run the recipe first")  # fmt: skip
            problem = input_problem(planned, thing, folder.name, output)
            if problem is not None and input_problem(self._planned(self._unseeded), thing, folder.name, output):
                raise problem
        InputCheck(output, say).check(planned, sorted({*makers.values()}))
        return folders

    def _planned(self, recipe: Any) -> Planned:
        return next(p for p in plan(recipe, self.loaded.path) if p.name == self.stage_name)

    def refuse_old(self, file: str) -> None:
        """Raises `UserError` where the script's folder already holds `file`."""
        if (self.folder / file).exists():
            raise UserError("the folder holds a report", where=str(self.folder),
                            hint="give another name=, or remove it")  # fmt: skip

    def prompts(self, inputs: dict[str, Path]) -> tuple[PromptSource, list[ImagePrompt]]:
        """The requested number of prompts, and their source."""
        source = self.stage.drawing.prompts.resolved(inputs["data"] / DATASET_FOLDER if "data" in inputs else None)
        prompts, count = read_prompts(source), self.options.count
        if len(prompts) < count:
            raise UserError(f"count={count}, and there are {len(prompts)} prompts", where=str(source.path),
                            hint=f"count={len(prompts)}, or a larger file")  # fmt: skip
        return source, prompts


def run_script(
    run: Callable[[list[str]], None], doc: str | None, schema: type[ScriptOptions], arguments: Sequence[str] | None
) -> int:
    """A script's whole `main`. Returns the exit code: 0, 2 on a user's mistake, or 143 where it was interrupted."""
    words = [a for a in (sys.argv[1:] if arguments is None else arguments) if not a.startswith("--local")]
    if not words or words[0] in ("-h", "--help"):
        rows = ((f"{name}={json.dumps(field.default)}", field.description) for name, field in _named(schema).items())
        say((doc or "") + "\n".join(f"    {setting:<30} {what}" for setting, what in rows))
        return OK
    try:
        run(words)
    except UserError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("stopped: what the script had not written yet is lost", file=sys.stderr)
        return STOPPED
    return OK


def _named(schema: type[Section]) -> dict[str, FieldInfo]:
    """The options by the names that users write."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}


def _split(arguments: Sequence[str], schema: type[Section]) -> tuple[dict[str, Any], list[str]]:
    """The script's own options, and the recipe's arguments."""
    own: dict[str, Any] = {}
    others: list[str] = []
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key in _named(schema):
            try:
                own[key] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise UserError(f"cannot read the value of {argument}", hint="quote it as YAML wants it") from error
        elif key != "recipe" and (key in RUN_OPTIONS or key.split(".")[0] not in Recipe.model_fields):
            known = [*_named(schema), *Recipe.model_fields, "recipe"]
            raise UserError(f"no option {key!r} here", hint=did_you_mean(key, known))
        else:
            others.append(argument)
    return own, others
