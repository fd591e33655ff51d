"""How a published drafter is opened: its target, its section and one exact way of decoding, of those measured.

Exact ways alone: a relaxed rule changes what the target says, and belongs to whoever decodes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from ...core.errors import UserError, did_you_mean
from ...core.fields import PLACES
from ...core.json_types import JsonMapping, JsonObject
from ...data.conversations import end_ids
from ...eval.published_section import ImageSettings, PublishedDecoding, PublishedSection, UserRequest
from ...models.drafters.base import DrafterConfig
from ...models.drafters.manifest import read_manifest
from ...models.stored import resolved_dtype
from ..evaluate.evaluate_settings import EvaluateSettings
from ..evaluate.methods import Method
from ..run.context import Context
from ..run.matching import begun
from ..run.stage import Planned


def published_section(
    stage: EvaluateSettings, method: str | None, context: Context, source: Path, prompt: UserRequest, base: str | None,
    *, measured: Collection[str], report: Path,
) -> PublishedSection:  # fmt: skip
    """What `draftsmith.json` says under "published", without the outcome.

    Args:
        stage: the evaluation, whose folder is `report`.
        method: its name there; None: the first that fits.
        source: folder of the stage that trained the drafter.
        base: Hub id of the target in place of the recipe's path.
        measured: methods of the evaluation that have rows of this drafter.

    Raises:
        UserError: no exact way of decoding with this drafter was measured.
    """
    drafter = read_manifest(source).get("drafter") or cast(DrafterConfig, context.drafter).model_dump(
        mode="json", by_alias=True
    )
    trained = context.inputs.get("target")
    target = _target(
        _typed(context.target, measured_dtype(report), context), base, None if trained is None else trained.name
    )
    decoding = _decoding(stage, method, measured, kind=str(drafter.get("kind")))
    common = {"target": target, "drafter": _elsewhere(drafter), "seed": context.seed, "prompt": prompt}
    if stage.draws:
        return PublishedSection(decoding=decoding, **common)
    decoding = decoding.model_copy(update={"end_ids": list(end_ids(context.processor(), stage.format))})
    looking = ImageSettings(**stage.data[0].model_dump(include=set(ImageSettings.model_fields)))
    return PublishedSection(decoding=decoding, prompt_format=stage.format, looking=looking, **common)


def measured_dtype(report: Path) -> str | None:
    """In which type an evaluation held its target, where its recipe says `auto`; None: nothing says."""
    mark = begun(report)
    resolved = {} if mark is None or mark.resolved is None else mark.resolved
    return resolved.get(f"stages.{report.name}.target.dtype") or resolved.get("target.dtype")


def _typed(section: Any, dtype: str | None, context: Context) -> Any:
    """The target's section with a type in the place of `auto`: whoever opens the folder gets the measured tokens."""
    if section.dtype != "auto":
        return section
    source = context.inputs.get("target") or section.path
    return section.model_copy(
        update={"dtype": dtype or resolved_dtype(section, source, context.device(), key="target")}
    )


def _target(section: Any, base: str | None, trained: str | None) -> JsonObject:
    """The target's section without places on this disk and without what is of this machine.

    Args:
        trained: the stage that trained it, from the weights of its path where it has one; None: none did.
    """
    values = section.model_dump(mode="json", by_alias=True, exclude={*PLACES, "prefill_chunk"})
    if values.get("path") is not None or base is not None:
        # What a run trained on from published weights is no longer what the Hub has under their name and revision.
        named = base or trained or _name(values["path"])
        if named != values["path"] and "revision" in values:
            values["revision"] = None
        values["path"] = named
        # Inline configs are of a target that the run trained; with a name of its own it is one of the Hub's.
        if base is not None:
            values |= {key: None for key in ("language_model", "vision_tower") if key in values}
    return _elsewhere(values)


def _elsewhere(values: JsonMapping) -> JsonObject:
    """Directories of this disk by their last name."""
    return {key: _name(value) if isinstance(value, str) else value for key, value in values.items()}


def _name(value: str) -> str:
    return Path(value).name if value.startswith(("/", "~", ".")) or Path(value).is_dir() else value


def _decoding(
    stage: EvaluateSettings, method: str | None, measured: Collection[str], *, kind: str
) -> PublishedDecoding:
    """An exact method whose drafter is what is published, alone."""
    fitting = {name: m for name, m in stage.methods.items() if name in measured and _opens(m)}
    if method is not None and method not in fitting:
        raise UserError(f"method: no exact method {method!r} drafts with what is published",
                        key="method", hint=did_you_mean(method, fitting))  # fmt: skip
    if not fitting:
        raise UserError(
            "no exact method of this evaluation drafts with what is published", key="report",
            hint="name another evaluation, or measure the drafter that is published with an exact rule",
        )  # fmt: skip
    name = method or next(iter(fitting))
    chosen, more = fitting[name], dict[str, Any]()
    if not stage.draws:
        more["max_new_tokens"] = max(stage.max_new_tokens)
        if kind == "lvlm":
            more["mode"] = chosen.mode.members[0] if chosen.mode else "M"
        else:
            more["reading"] = chosen.settings
    return PublishedDecoding(
        name=name, tree=chosen.tree, draw=chosen.draw, top_k=stage.top_k, top_p=stage.top_p,
        temperature=min(t for t in stage.temperatures if chosen.allowed(t)), **more,
    )  # fmt: skip


def _opens(method: Method) -> bool:
    """Ensembles and captions want more than one prompt of a draft; a relaxed rule changes what the target says. A
    folder holds no threshold of ViSkip.
    """
    if method.rule.kind != "exact" or method.section is not None or method.visual_skip is not None:
        return False
    return method.mode is None or (len(method.mode.members) == 1 and method.mode.members[0] != "C")


def no_card(evaluation: Planned, drafter: str) -> str | None:
    """Why an evaluation cannot go with the drafter of a stage, after "which"; None: it can."""
    stage: EvaluateSettings = evaluation.stage
    if not stage.is_timed:
        return "draws pictures for their quality and measures no speed (untimed)"
    if stage.engine.kind != "transformers":
        return "is decoded by an engine, and cards say what our loop measured"
    default = evaluation.inputs.get("drafter", "")  # of methods that name none
    if any(drafter in (method.names or [default]) for method in stage.methods.values() if _opens(method)):
        return None
    return f"measures no drafter of stage {drafter!r} by itself with an exact rule"
