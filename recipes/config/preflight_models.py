"""A recipe's models before anything is loaded: whether their weights are here, and what several ranks cannot do with a
model that each would spread over the GPUs of a node, or with a target that they hold together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ...core.errors import UserError
from ...core.json_types import text_at, value_at, walk
from ...core.placement import check_one_rank
from ...core.section import within
from ...models.drafters.base import PublishedDrafter
from ...models.targets.load import target_config
from ...models.targets.parallel import check_cut, check_ranks
from ...trainers.estimate.models import target_shape
from ...trainers.run.stage import Planned, Stage, WholeRecipe
from ...trainers.train.fit import OutsideStart
from .finding import Finding, fault, ok
from .schema import Recipe

_SIZE = "tensor_parallel_size"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def check_placement(
    recipe: Recipe, planned: Sequence[Planned], chosen: Collection[str] | None = None, *, dry_run: bool = False
) -> None:
    """Look at the stages that run.

    Args:
        chosen: names of the stages that run; None: all.
        dry_run: the ranks that will run it are not these, and no stage will look at the target's config.

    Raises:
        UserError: several ranks would read a device map; the run has another number of ranks than hold the target, the
            target cannot be cut for them, two models of a stage want different numbers, or a stage trains beside such a
            target. It has the key.
    """
    for plan in planned:
        stage, name = plan.stage, f"stages.{plan.name}"
        if chosen is not None and plan.name not in chosen:
            continue
        held = dict(recipe.target).get(_SIZE, 1)  # an image generator's section has none
        for key, hint in stage.runs_target().items() if stage.kind == "train" and held > 1 else ():
            raise UserError(
                f"{name}.{key} runs the target while ranks train on batches of their own, and target.{_SIZE} is "
                f"{held}: all ranks hold it together, for one batch", key=f"{name}.{key}", hint=hint,
            )  # fmt: skip
        if not stage.loads_target:
            continue
        own = plan.own_target
        target, key = (recipe.target, "target") if own is None else (own, f"{name}.target")
        size = dict(target).get(_SIZE, 1)
        if not dry_run:
            check_ranks(size, key=f"{key}.{_SIZE}")
        elif size > 1:
            config = target_shape(recipe) if own is None else target_config(own, None, network=False)
            check_cut(config, size, str(target.path), key=f"{key}.{_SIZE}")
        for first, section in (("target", recipe.target), ("drafter", recipe.drafter), (name, stage)):
            for keys, part in walk(None if section is None else section.model_dump(mode="json"), (first,)):
                place = ".".join(keys)
                check_one_rank(text_at(part, "device_map"), key=place)
                other = value_at(part, _SIZE)  # a serving engine's names its own GPUs
                if first != "target" and "engine" not in keys and other not in (None, 1, size):
                    raise UserError(
                        f"{place}.{_SIZE} is {other}, and the target's is {size}", key=f"{place}.{_SIZE}",
                        hint="use 1: each rank then holds this model whole" + f", or {size}" * (size > 1),
                    )  # fmt: skip


def models_findings(recipe: WholeRecipe) -> list[Finding]:
    """Whether the published models that the recipe names are on this machine."""
    findings = []
    for part, section in (("target", recipe.target), ("drafter", recipe.drafter)):
        values = {} if section is None else dict(section)
        for key in ("path", "language_model", "vision_tower"):
            if (name := text_at(values, key)) not in (None, "target"):
                findings.append(_place(f"{part}.{key}", name, values.get("revision"), Path(recipe.output)))
    return findings


def weight_findings(name: str, stage: Stage, recipe: WholeRecipe) -> list[Finding]:
    """A finding for each trained drafter outside the run that a stage reads (`from: {path}`, a method's `drafter:
    {path}`): hours of earlier stages must not end at a name that is nobody's.
    """
    outside: dict[str, OutsideStart | PublishedDrafter] = {}
    for kind in (OutsideStart, PublishedDrafter) if stage.kind != "cache" else ():  # which reads their settings alone
        outside |= {".".join(("stages", name, *keys, "path")): section for keys, section in within(stage, kind)}
    if stage.trains and isinstance(recipe.drafter, PublishedDrafter):
        outside["drafter.path"] = recipe.drafter
    named = {key: section for key, section in outside.items() if section.path is not None}
    return [_place(key, str(one.path), one.revision, Path(recipe.output)) for key, one in named.items()]


def _place(key: str, name: str, revision: str | None, output: Path) -> Finding:
    """Whether the weights that a key names are here, or will be."""
    if Path(name).resolve().is_relative_to(output.resolve()) and not Path(name).exists():
        return ok(key, f"{name} is written by an earlier stage")
    if Path(name).is_dir():
        return ok(key, f"{name} is on this machine")
    try:
        validate_repo_id(name)
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if any(path.suffix in _WEIGHTS for path in folder.rglob("*")):  # `check` itself fetches the small files
            return ok(key, f"{name} is on this machine")
    except HFValidationError:
        hint = "train it first, name another folder with this key, or run where the folder lies"
        return fault(key, f"there is no folder {Path(name).absolute()}", hint)
    except LocalEntryNotFoundError:
        pass
    if constants.HF_HUB_OFFLINE:
        return fault(key, f"{name} is not on this machine, and HF_HUB_OFFLINE is set",
                     f"where there is a network: hf download {name}")  # fmt: skip
    return ok(key, f"{name} will be downloaded")
