"""How a published drafter is opened: its target, its section and one exact way of decoding, of those measured.

Exact ways alone: a relaxed rule changes what the target says, and belongs to whoever decodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import UserError, did_you_mean
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...eval.published import Asked, Looking, PublishedDecoding, PublishedSection
from ...models.drafters.made_for import MANIFEST
from ..context import Context
from ..stages.evaluate import EvaluateStage
from ..stages.reading.evaluate import ReadingEvaluateStage
from ..stages.visual.evaluate import VisualEvaluateStage


def published_section(
    evaluation: Mapping[str, Any], method: str | None, context: Context, source: Path, prompt: Asked, base: str | None
) -> PublishedSection:
    """What `draftsmith.json` says under "published", without the outcome.

    Args:
        evaluation: the `evaluate` stage's section as the recipe has it.
        method: its name there; None: the first that fits.
        source: folder of the stage that trained the drafter.
        base: Hub id of the target in place of the recipe's path.

    Raises:
        UserError: no exact way of decoding with this drafter was measured.
    """
    written = json.loads((source / MANIFEST).read_text()).get("drafter")
    drafter = written if isinstance(written, dict) else context.drafter.model_dump(mode="json", by_alias=True)
    common = {"drafter": _elsewhere(drafter), "seed": context.seed, "prompt": prompt}
    if context.target.kind in ("llamagen", "anole"):
        stage = VisualEvaluateStage.model_validate(evaluation)
        return PublishedSection(
            target=_target(context.target, base), decoding=_drawing(stage, method, source), **common
        )
    if context.drafter is not None and context.drafter.kind == "lvlm":
        answering = EvaluateStage.model_validate(evaluation)
        return PublishedSection(
            target=_target(answering.target or context.target, base), decoding=_mode(answering, method, source),
            prompt_format=answering.format, looking=_looking(answering.data[0]), **common,
        )  # fmt: skip
    reading = ReadingEvaluateStage.model_validate(evaluation)
    data = [b.data for b in reading.benchmarks] + ([reading.suite.data] if reading.suite else [])
    return PublishedSection(
        target=_target(context.target, base), decoding=_head(reading, method, source), prompt_format=_form(reading),
        looking=_looking(data[0]), **common,
    )  # fmt: skip


def _form(stage: ReadingEvaluateStage) -> PromptFormat:
    return stage.format


def _target(section: Any, base: str | None) -> dict[str, Any]:
    """The target's section without places on this disk and without what is of this machine."""
    found = section.model_dump(mode="json", by_alias=True, exclude={"device_map", "prefill_chunk"})
    if found.get("path") is not None or base is not None:
        found["path"] = base or _name(found["path"])
        # Inline configs are of a target that the run trained; with a name of its own it is one of the Hub's.
        if base is not None:
            found |= {key: None for key in ("language_model", "vision_tower") if key in found}
    return _elsewhere(found)


def _elsewhere(values: Mapping[str, Any]) -> dict[str, Any]:
    """Directories of this disk by their last name."""
    return {key: _name(value) if isinstance(value, str) else value for key, value in values.items()}


def _name(value: str) -> str:
    return Path(value).name if value.startswith(("/", "~", ".")) or Path(value).is_dir() else value


def _looking(data: ConversationData) -> Looking:
    return Looking(**data.model_dump(include=set(Looking.model_fields)))


def _chosen(names: list[str], method: str | None, what: str) -> str:
    if method is not None and method not in names:
        raise UserError(f"method: no exact {what} {method!r} drafts with what is published",
                        where="key method", cure=did_you_mean(method, names))  # fmt: skip
    if not names:
        raise UserError(
            f"no exact {what} of this evaluation drafts with what is published", where="key report",
            cure="name another evaluation, or measure the drafter that is published with an exact rule",
        )  # fmt: skip
    return method or names[0]


def _mode(stage: EvaluateStage, method: str | None, source: Path) -> PublishedDecoding:
    """Of a draft LVLM alone: ensembles and captions want more than one prompt of it."""
    measured = stage.from_stages is None or source.name in stage.from_stages
    names = [mode.name for mode in stage.modes if len(mode.members) == 1 and mode.members[0] != "C"] if measured else []
    chosen = next(m for m in stage.modes if m.name == _chosen(names, method, "mode"))
    tree: Any = {"kind": "chain", "gamma": stage.gamma} if stage.tree == "chain" else stage.tree
    return PublishedDecoding(
        name=chosen.name, tree=tree, draw=stage.draw, temperature=stage.temperature, top_k=stage.top_k,
        top_p=stage.top_p, max_new_tokens=stage.max_new_tokens, mode=chosen.members[0],
    )  # fmt: skip


def _head(stage: ReadingEvaluateStage, method: str | None, source: Path) -> PublishedDecoding:
    fitting = {name: m for name, m in stage.methods.items() if m.drafter is None or m.stage == source.name}
    name = _chosen(list(fitting), method, "method")
    chosen = fitting[name]
    return PublishedDecoding(
        name=name, tree=chosen.tree, draw=chosen.draw, reading=chosen.reading, top_k=stage.top_k, top_p=stage.top_p,
        temperature=min(t for t in stage.temperatures if chosen.allowed(t)),
        max_new_tokens=max(stage.max_new_tokens),
    )  # fmt: skip


def _drawing(stage: VisualEvaluateStage, method: str | None, source: Path) -> PublishedDecoding:
    fitting = {n: m for n, m in stage.methods.items() if m.drafter in (None, source.name) and m.rule.kind == "exact"}
    name = _chosen(list(fitting), method, "method")
    chosen = fitting[name]
    return PublishedDecoding(
        name=name, tree=chosen.tree, draw=chosen.draw, top_k=stage.top_k, top_p=stage.top_p,
        temperature=min(t for t in stage.temperatures if chosen.allowed(t)),
    )  # fmt: skip
