"""What a `publish` stage would put where; a name that engines would misread is refused before anything is trained."""

from __future__ import annotations

from typing import Any

from ..trainers.publishing.names import check_name, suggested
from ..trainers.run import Planned
from .schema import Recipe


def publishing(plan: Planned, recipe: Recipe) -> list[str]:
    """The lines of a `publish` stage. Raises `UserError` for a name that is none, or is another method's."""
    stage, target = plan.stage, recipe.target
    drafter: Any = recipe.stages[plan.inputs["drafter"]] if "drafter" in plan.inputs else None
    method = (getattr(drafter, "drafter", None) or recipe.drafter).kind
    name = stage.base_model or target.path
    what = f"  the drafter of stage {plan.inputs.get('drafter', '?')} with the report of {plan.inputs['report']}"
    if stage.repo is None:
        return [what, f"  no repo is named: the folder is built and tried (a usual name: {suggested(method, name)})"]
    check_name(stage.repo, method, name, is_language=target.kind not in ("llamagen", "anole"))
    if stage.dry_run:
        return [what, f"  dry_run: the folder is built and tried, {stage.repo} is left alone"]
    where = "as a pull request" if stage.pull_request else f"to {stage.revision or 'main'}"
    return [what, f"  one commit {where} of {stage.repo}, private until it is fetched back; then {stage.visibility}"]
