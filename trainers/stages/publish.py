"""Stage kind `publish`: the folder of a run's drafter, tried in a fresh process, and from there to the Hub.

Rank 0 alone works; a run of its own (`draftsmith publish RUN`) holds no other ranks for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator

from ...core import ranks
from ...core.errors import Refused, UserError, first_line
from ...core.fields import Revision
from ...core.files import read_json, read_yaml
from ...core.import_paths import kinds_within
from ...core.interpolation import resolved
from ...core.json_types import JsonObject, object_at, text_at, value_at
from ...core.pretrained import RESTORE
from ...core.results import CARD, write_sums
from ...core.secrets import redact_tree
from ...core.section import Section
from ...data.families.table import picture_family_of
from ...eval.published import assemble, measure
from ...eval.published_section import PublishedSection, UserRequest
from ...models.targets.table import AnyTarget
from ..publish import folder as folders
from ..publish.card import LVLM, CardFacts, model_card, read_evaluation
from ..publish.decoding import no_card, published_section
from ..publish.fresh import OWN_TARGET, PICTURE, Snippet, loop_snippet, transformers_snippet, try_folder
from ..publish.hub_upload import Destination, Hub, check_name, is_repo, suggested
from ..publish.lineage import chain, data_of, hub_id, parts_of, sources_of, target_name, trained_by, training_table
from ..run.context import Context
from ..run.stage import Planned, Stage
from ..train.settings import trained_drafter
from .evaluate import EvaluateStage

REPOSITORY, RESULT = "repository", "published.json"
# A scene of the synthetic dataset (figures on a board), 336 pixels square.
_SCENE = Path(folders.__file__).with_name(PICTURE)


class StoredPrompt(Section):
    """What a published folder is checked with."""

    # null: "Describe the picture." of a drawn scene; of text-only targets and generators a sentence.
    text: str | None = None
    # Files that are published with it: they must be yours to publish.
    pictures: list[str] = Field(default_factory=list)
    # Of generators that draw classes.
    label: int = Field(0, ge=0)


class PublishStage(Stage):
    command: ClassVar[str] = "publish"
    takes_any_data: ClassVar[bool] = True
    # It builds everything anew at each start, with the target as the evaluation held it.
    holds_models: ClassVar[bool] = False
    # Both have SHA256SUMS of their own.
    working: ClassVar[tuple[str, ...]] = (*Stage.working, REPOSITORY, "fetched")
    usual_purpose: ClassVar[str] = "the drafter's folder, tried and published"

    kind: Literal["publish"]
    # NAMESPACE/NAME. Engines guess the method from it: `EAGLE-...` for EAGLE, `EAGLE3-...` for EAGLE-3, and neither
    # for others. null: only build the folder (with a name, upload: false does the same).
    repo: str | None = None
    # false: build and test the folder, and do not change the Hub.
    upload: bool = True
    # public: once the repository has been fetched back and tried. private leaves that to you.
    visibility: Literal["private", "public"] = "private"
    # A branch, created if it does not exist; null: main.
    revision: Revision | None = None
    # Propose the commit as a pull request.
    pull_request: bool = False
    # The stage whose drafter is published; null: the one that no later stage trains on.
    from_stage: str | None = Field(None, alias="from")
    # The evaluation that goes with it; null: the latest that measures the speed of this drafter.
    report: str | None = None
    # The method of that evaluation by which the folder is opened; null: the first exact one that drafts
    # with this stage's drafter.
    method: str | None = None
    prompt: StoredPrompt = StoredPrompt()
    # Hub id of the target, where target.path is a directory or the run trained it; null: target.path.
    base_model: str | None = None
    # As the Hub writes it; null: the target's, where it is known.
    license: str | None = None
    # Hub ids of the training data, for the card's front matter.
    datasets: list[str] = Field(default_factory=list)
    # Languages that the drafter writes, as codes of the Hub (en, de), for the card's front matter.
    languages: list[str] = Field(["en"])

    @field_validator("repo")
    @classmethod
    def _of_the_hub(cls, repo: str | None) -> str | None:
        """A name that the Hub takes: a wrong one would be met after everything is trained."""
        if repo is not None and not is_repo(repo):
            raise Refused("", f"{repo!r} is no NAMESPACE/NAME of the Hub", "write repo: my-name/my-draft, for example")
        return repo

    @model_validator(mode="after")
    def _consistent(self) -> PublishStage:
        if self.visibility == "public" and (self.revision is not None or self.pull_request):
            raise ValueError("visibility: public is of the main branch; a branch or a pull request leaves it as it is")
        if self.pull_request and self.revision is not None:
            raise ValueError("a pull request is made against main; leave revision out")
        return self

    def makes(self) -> set[str]:
        return {"publication"}

    def needs(self) -> dict[str, str | None]:
        return {"drafter": self.from_stage, "report": self.report}

    def uses(self) -> set[str]:
        """Parts of a target that the run trained."""
        return {"target", "processor", "text", "vq"}

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Drafters beside others that are finished, too; evaluations without a speed of this drafter; and parts of a
        target that are not those which the evaluation decoded with.
        """
        drafter, report = inputs.get("drafter"), inputs.get("report")
        if thing == "drafter" and self.from_stage is None:
            trained_on = {maker.inputs.get("drafter") for maker in makers}
            finished = [maker.name for maker in makers if maker.name not in trained_on]
            reasons = {maker.name: "a later stage trained it on" for maker in makers if maker.name in trained_on}
            one_of = f"one of {len(finished)} finished drafters"
            return reasons | (dict.fromkeys(finished, one_of) if len(finished) > 1 else {})
        if thing == "report" and drafter is not None:
            return {maker.name: why for maker in makers if (why := no_card(maker, drafter.name)) is not None}
        if thing in self.uses() and report is not None:
            return {maker.name: "" for maker in makers if maker.name != report.inputs.get(thing)}
        return {}

    def run(self, context: Context) -> None:
        """Rank 0 publishes; an error there is raised on all ranks, and a stop, after which the same command begins the
        upload again.
        """
        problem: UserError | None = None
        with context.stop.together():
            if ranks.is_main():
                try:
                    _publish(self, context)
                except UserError as error:
                    problem = error
                except OSError as error:  # a disk that is full, a file that may not be read
                    hint = "fix it, and run the same command again"
                    problem = UserError(first_line(error), where=error.filename or str(context.folder), hint=hint)
        problem = ranks.broadcast(problem)
        if problem is not None:
            raise problem

    @property
    def uploads(self) -> bool:
        """Whether it sends what it builds to the Hub."""
        return self.upload and self.repo is not None

    def describe(self, plan: Planned) -> list[str]:
        """Which folder would be published where. Raises `UserError` for an invalid name or a name that suggests another
        method.
        """
        trained, evaluation = plan.maker("drafter"), plan.maker("report")
        assert evaluation is not None, "needs() names it"
        target = evaluation.stage.target or plan.recipe.target
        drafter = plan.recipe.drafter if trained is None else trained_drafter(trained)
        assert drafter is not None, "needs() names it"
        method = drafter.kind
        name = self.base_model or target.path
        what = f"  the drafter of stage {plan.inputs.get('drafter', '?')} with the report of {evaluation.name}"
        if self.repo is None:
            usual = suggested(method, name)
            return [what, f"  no repo is named: the folder is built and tested (a usual name: {usual})"]
        check_name(self.repo, method, name, is_language=not target.draws_images)
        if not self.upload:
            return [what, f"  upload: false: the folder is built and tested; {self.repo} is not changed"]
        if self.pull_request or self.revision is not None:
            where = "as a pull request" if self.pull_request else f"to {self.revision}"
            return [what, f"  one commit {where} of {self.repo}, fetched back and tried; main is left alone"]
        return [what, f"  one commit to main of {self.repo}, private until it is fetched back; then {self.visibility}"]


def _publish(stage: PublishStage, context: Context) -> None:
    stages = resolved(context.recipe)["stages"]
    redacted = redact_tree(context.recipe["stages"])  # what goes out: without secrets and values of variables
    source = context.inputs.get("drafter")
    if source is None:
        raise UserError("no stage of this run trained a drafter", key=f"stages.{context.name}",
                        hint="publish what a run trains; a published drafter is on the Hub already")  # fmt: skip
    if value_at(stages, context.name, "prompt") != value_at(context.recipe, "stages", context.name, "prompt"):
        raise UserError("the stored prompt is published word for word, and ${...} gives it",
                        key=f"stages.{context.name}.prompt", hint="write it out: prompt.text='...'")  # fmt: skip
    # Before anything is built: a login that is missing.
    hub = Hub(context.say, stop=context.stop) if stage.uploads else None
    report = context.inputs["report"]
    evaluation = EvaluateStage.model_validate(stages[report.name])
    context = replace(context, target=evaluation.target or context.target)
    evaluated = read_evaluation(report, source.name)
    folder = context.folder / REPOSITORY
    shutil.rmtree(folder, ignore_errors=True)
    folders.copy_model(source, folder)
    target = _target_on_hub(stage, context)
    context.stop.check("before the drafter was measured on the stored prompt")
    section = published_section(
        evaluation, stage.method, context, source, _store_prompt(stage.prompt, context, folder), stage.base_model,
        measured=evaluated.methods, report=report,
    )  # fmt: skip
    method = section.drafter["kind"]
    if stage.repo is not None:
        check_name(stage.repo, method, target, is_language=not context.target.draws_images)
    # As trained, from its own stage's folder: what is published must do the same.
    sources = sources_of(context, stage.base_model)
    expected = measure(assemble(source, section, sources), section.prompt, folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if not any(expected.accepted):
        context.say("warning: no drafted token is accepted on the stored prompt, so it shows little: set prompt.text")
    section, tau = section.model_copy(update={"expected": expected}), expected.tau
    folders.write_manifest(source, folder, section)
    folders.copy_provenance(context.folder.parent, context.recipe, folder)
    plots = folders.copy_report(report, folder)
    repo = stage.repo or f"me/{folder.parent.parent.name}"
    snippets, names = _snippets(repo, section, folder, sources, target)
    drafter = stages[source.name].get("drafter") or context.drafter
    base = None if drafter is None else hub_id(text_at(dict(drafter), "language_model"))
    trained = trained_by(stages, source.name)
    starts = [str(start["path"]) for name in trained if (start := object_at(stages, name, "from")) is not None]
    data = [name for stage_name in trained for name in data_of(redacted, stage_name)]
    run_file = context.folder.parent / "run.yaml"
    hint = "restore the file, or run the recipe's command again"
    facts = CardFacts(
        repo=repo, method=method, task=_task(context.target), target=target, target_name=target_name(context),
        base=base, links=chain(parts_of(context, drafter, target, starts, stage.datasets or data)),
        license=stage.license, languages=stage.languages, datasets=stage.datasets,
        training=training_table(redacted, trained, context.folder.parent), evaluated=evaluated, plots=plots,
        section=section, snippets=snippets,
        versions=read_yaml(run_file, JsonObject, hint=hint) if run_file.is_file() else {},
    )  # fmt: skip
    (folder / CARD).write_text(model_card(facts))
    write_sums(folder)
    try:
        folders.refuse_secrets(folder, hub.token if hub is not None else None)
    except UserError:
        shutil.rmtree(folder)
        raise
    context.say(f"{context.name}: tau {tau:.2f} on the stored prompt; testing it in a fresh process")
    try_folder(folder, sources, snippets, names(folder), stop=context.stop)
    result: JsonObject = {"repo": stage.repo, "uploaded": False, "tau": tau}
    if hub is None:
        context.say(f"built and tested, not uploaded: {folder}")
    else:
        assert stage.repo is not None
        done = hub.publish(
            folder, Destination(stage.repo, stage.revision, stage.pull_request, stage.visibility == "public"),
            message=f"draftsmith: {method} drafter, tau {tau:.2f} on the stored prompt",
            fetched=context.folder / "fetched",
            try_it=lambda place: try_folder(place, sources, snippets, names(place), stop=context.stop),
        )  # fmt: skip
        context.say(f"published: {done.pull_request or done.url} ({'private' if done.private else 'public'})")
        result |= {"uploaded": True} | done.__dict__
    (context.folder / RESULT).write_text(json.dumps(result, indent=1))


def _target_on_hub(stage: PublishStage, context: Context) -> str | None:
    """Hub id of the target that was measured; None: a stage trained it, or its path is a directory."""
    return hub_id(stage.base_model or (None if "target" in context.inputs else context.target.path))


def _task(target: AnyTarget) -> str:
    """The Hub's name of what a target does; of those that draw classes it has none."""
    if target.draws_images:
        return "text-to-image" if target.condition == "text" else "image-generation"
    return "text-generation" if target.base_kind == "causal_lm" else "image-text-to-text"


def _store_prompt(prompt: StoredPrompt, context: Context, folder: Path) -> UserRequest:
    """The prompt as the folder keeps it, its pictures copied there."""
    target, text, pictures = context.target, prompt.text, prompt.pictures
    if target.draws_images:
        label = prompt.label if target.condition == "class" else None
        return UserRequest(text=text or "a red circle and a blue square", label=label)
    if target.reads_text_alone or (text is not None and not pictures):
        return UserRequest(text=text or "Explain how a bicycle stays upright.")
    (folder / folders.CHECK).mkdir()
    names = []
    for number, name in enumerate(pictures or [str(_SCENE)]):
        if not Path(name).is_file():
            raise UserError("no such picture", where=name, hint="fix prompt.pictures")
        # The card's code names one picture of the reader's.
        names.append(f"{folders.CHECK}/" + (PICTURE if not number else f"picture-{number}{Path(name).suffix}"))
        shutil.copyfile(name, folder / names[-1])
    return UserRequest(text=text or "Describe the picture.", pictures=names)


def _snippets(
    repo: str, section: PublishedSection, folder: Path, sources: Mapping[str, Path] | None, target: str | None
) -> tuple[list[Snippet], Callable[[Path], dict[str, str]]]:
    """The card's code, and a function: folder -> what stands for its names where it is tried."""
    shown, prompt = None if sources is None else target or OWN_TARGET, section.prompt
    kinds = kinds_within([section.drafter, section.target, section.decoding.model_dump()])
    modules = sorted({kind.partition(":")[0] for kind in kinds})
    snippets = [loop_snippet(repo, shown, prompt.text, pictures=min(1, len(prompt.pictures)), label=prompt.label,
                             modules=modules)]  # fmt: skip
    if section.drafter["kind"] == LVLM:
        family = picture_family_of(str(read_json(folder / "config.json", JsonObject, hint=RESTORE).get("model_type")))
        snippets.append(transformers_snippet(repo, has_processor=family is None or family.loads_plainly))

    def names(place: Path) -> dict[str, str]:
        literals = {repo: json.dumps(str(place)), PICTURE: json.dumps(str(place / folders.CHECK / PICTURE))}
        if shown is not None and sources is not None:
            literals[shown] = json.dumps({thing: str(where) for thing, where in sources.items()})
        return literals

    return snippets, names
