"""A head that others published, or an export, as training starts from it. `drafters/outside.py` asks this."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..drafters.base import DrafterConfig, TargetIdentity
from ..drafters.eagle import EagleConfig
from ..drafters.head_config import HeadConfig
from ..drafters.head_files import check_identity, check_manifest
from ..drafters.manifest import MANIFEST
from ..drafters.medusa import MedusaConfig
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from . import lantern
from .heads import LANGUAGE_HEADS, LanguageHead, import_head


def load_published(
    config: DrafterConfig, folder: Path, target: Target, identity: TargetIdentity, embedding: Tensor | None
) -> nn.Module:
    """The head in float32 on the target's device, as `load_start` has it.

    Args:
        embedding: of the target, which the head's files may be compared with; None: they are not.
    """
    if config.base_kind == "eagle" and target.shape.draws_images:
        return _lantern(cast(EagleConfig, config), folder, target, identity)
    if config.kind not in LANGUAGE_HEADS or target.shape.draws_images:
        raise UserError(
            f"published heads that are read are EAGLE, EAGLE-3, P-EAGLE, MSD, ViSpec, DFlash, DSpark, "
            f"DFlash 2, Medusa, LANTERN's; this is {config.kind}",
            where=str(folder), hint=f"give a folder that draftsmith wrote (it has {MANIFEST})",
        )  # fmt: skip
    if isinstance(config, MedusaConfig):
        check_identity(folder, config.kind, identity)
        levels = import_head("medusa", str(folder), target.shape.text, embedding=None)
        if levels.head.shape != config.shape(target.shape):
            _refuse("sizes", levels.head.shape, config.shape(target.shape), levels.settings, str(folder))
        return levels.head.float().to(target.embedding.device).train()
    assert isinstance(config, HeadConfig)
    check_manifest(config, folder, target.shape, identity)
    kind = cast(LanguageHead, config.kind)
    image = config.image_input() or "placeholder" if kind in ("eagle", "eagle3", "peagle") else None
    imported = import_head(kind, str(folder), target.shape.text, embedding=embedding, image=image)
    _check_settings(config, cast(HeadConfig, imported.config), imported.settings, target.shape, str(folder))
    return imported.head.float().to(target.embedding.device).train()


def _lantern(config: EagleConfig, folder: Path, target: Any, identity: TargetIdentity) -> nn.Module:
    """LANTERN's head of an image generator, which brings the rows that it was trained beside."""
    _, settings, _ = lantern.to_ours(str(folder), target.shape)
    told = EagleConfig.model_validate(settings)
    _check_layer(config.layer(target.shape), told.layer(target.shape), settings, str(folder))
    return config.load(folder, target, dtype=torch.float32, identity=identity)


def _check_settings(config: HeadConfig, told: HeadConfig, settings: JsonObject, shape: TargetShape, where: str) -> None:
    """Compare what is no weight's shape."""
    _check_layer(config.layer(shape), told.layer(shape), settings, where)
    ours, theirs = config.reads(shape, training=True), told.reads(shape, training=True)
    if ours.state != theirs.state:
        _refuse("layers that it reads", list(theirs.state) or "feature", list(ours.state) or "feature", settings, where)
    for name in ("fc_bias", "num_queries", "fc_norm", "norm_output"):  # both have one, or none, as their kind has
        if dict(told).get(name) != dict(config).get(name):
            _refuse(name, dict(told).get(name), dict(config).get(name), settings, where)


# How positions turn where they have three rows: decoding's choice.
_AXES = ("mrope_section", "mrope_interleaved")


def _check_layer(ours: LayerShape, theirs: LayerShape, settings: JsonObject, where: str) -> None:
    written = theirs.to_dict() | {name: ours.to_dict()[name] for name in _AXES}
    different = ours.differs_from(written)
    if different is not None:
        _refuse(*different, settings, where)


def _refuse(name: str, theirs: object, ours: object, settings: JsonObject, where: str) -> None:
    section = ", ".join(f"{key}: {_text(value)}" for key, value in settings.items())
    raise UserError(
        f"the head was trained with {name} {theirs}, and the recipe's drafter has {ours}", where=where,
        hint=f"write what its files say: drafter: {{{section}}}",
    )  # fmt: skip


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
