"""What a server would do otherwise than a run: build another prompt, or apply penalties of the generation config."""

from __future__ import annotations

from typing import Any

from ...core.errors import UserError
from ...data.served_prompt import difference
from ...trainers.run.context import Context
from ...trainers.run.stage import Planned
from .finding import Finding, warning
from .preflight_samples import fetched

_ALIKE = "for a drafter that an engine serves: format: {template: chat}, or export it with a chat template of its own"


def prompt_findings(plan: Planned, context: Context, finished: set[str]) -> list[Finding]:
    """Warnings of one stage, where the target's files are here. `finished`: things whose stage has finished."""
    stage: dict[str, Any] = dict(plan.stage)
    target, key, findings = context.target, f"stages.{plan.name}.format", list[Finding]()
    if target.draws_images or {"processor", "target"} & (context.inputs.keys() - finished):
        return []
    if "processor" not in context.inputs and fetched(str(target.path), target.revision):
        return []
    try:
        if plan.stage.answer_format is not None and (text := context.penalties()):
            findings.append(warning("target", text, "serve so, or take the key out of the file"))
        form, processor = stage.get("format"), context.processor()
        trains = plan.stage.trains and stage.get("model") == "drafter" and form and form.template != "plain"
        if trains and form and processor.tokenizer.chat_template and (part := difference(form, processor)) is not None:
            findings.append(warning(key, f"prompts part from the target's chat template {part}", _ALIKE))
    except UserError as error:
        findings.append(warning(key, f"not compared with a server's: {error.problem}", _ALIKE))
    return findings
