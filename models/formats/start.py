"""A head outside the run, as training starts from it: a folder of ours, an export, or a head that others published.

The recipe's `drafter` section says what is trained, so the files must agree with it: kind, layer, layers that are read,
and the target. What no file says (what stood at pictures in training) is what the section says from now on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ..drafters.base import DrafterConfig, TargetIdentity
from ..drafters.dflash import DflashConfig
from ..drafters.dflash_files import holds_dflash
from ..drafters.eagle import EagleConfig
from ..drafters.head_config import FusedHeadConfig, HeadConfig
from ..drafters.head_files import check_identity, check_manifest
from ..drafters.made_for import OtherTarget
from ..drafters.manifest import MANIFEST, read_manifest
from ..drafters.medusa import MedusaConfig
from ..folders import find_folder
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from . import lantern
from .heads import LANGUAGE_HEADS, LanguageHead, import_head
from .published_head import FILES


def is_own(folder: Path) -> bool:
    """Whether a folder holds a drafter in our own layout: of a stage, published, or imported. An export has another."""
    return (folder / MANIFEST).is_file() and "export" not in read_manifest(folder)


def find_start(source: str, revision: str | None) -> Path:
    """The folder of the weights; those on the Hub are downloaded. Raises `UserError` where there is none."""
    return find_folder(source, revision, files=FILES)


def load_start(
    config: DrafterConfig, folder: Path, target: Target, identity: TargetIdentity, *, other_target: bool = False
) -> nn.Module:
    """The head in float32 on the target's device, ready to be trained on.

    Args:
        other_target: it was trained for another target of the same shape and tokenizer, whose name and embedding are
            not compared.

    Raises:
        UserError: a file is missing, or the head is of another kind, target or making than `config` says.
    """
    if other_target:
        return _load(config, folder, target, TargetIdentity({}, identity.tokenizer_sha256), None)
    try:
        return _load(config, folder, target, identity, target.embedding)
    except OtherTarget as error:
        hint = (
            f"{error.hint}; if it was trained for a base model of this target: from: {{path: ..., other_target: true}}"
        )
        raise UserError(error.problem, where=error.where, hint=hint) from error


def _load(
    config: DrafterConfig, folder: Path, target: Target, identity: TargetIdentity, embedding: Tensor | None
) -> nn.Module:
    if isinstance(config, DflashConfig) and config.kind != "dflash" and holds_dflash(folder):
        return config.grown(folder, target, identity)
    if is_own(folder) or isinstance(config, DflashConfig):  # whose published layout is ours
        return config.load(folder, target, dtype=torch.float32, identity=identity)
    if isinstance(config, EagleConfig) and target.shape.draws_images:
        return _lantern(config, folder, target, identity)
    if config.kind not in LANGUAGE_HEADS or target.shape.draws_images:
        raise UserError(
            f"published heads that are read are EAGLE, EAGLE-3, P-EAGLE, MSD, ViSpec, DFlash, DSpark, "
            f"Medusa, LANTERN's; this is {config.kind}",
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
    assert isinstance(imported.config, HeadConfig)
    _check_settings(config, imported.config, imported.settings, target.shape, str(folder))
    return imported.head.float().to(target.embedding.device).train()


def _lantern(config: EagleConfig, folder: Path, target: Any, identity: TargetIdentity) -> nn.Module:
    """LANTERN's head of an image generator, which brings the rows that it was trained beside."""
    _, settings, _ = lantern.to_ours(str(folder), target.config)
    told = EagleConfig.model_validate(settings)
    _check_layer(config.layer(target.shape), told.layer(target.shape), settings, str(folder))
    return config.load(folder, target, dtype=torch.float32, identity=identity)


def _check_settings(
    config: HeadConfig, told: HeadConfig, settings: dict[str, Any], shape: TargetShape, where: str
) -> None:
    """Compare what is no weight's shape."""
    _check_layer(config.layer(shape), told.layer(shape), settings, where)
    ours, theirs = config.reads(shape, training=True), told.reads(shape, training=True)
    if ours.state != theirs.state:
        _refuse("layers that it reads", list(theirs.state) or "feature", list(ours.state) or "feature", settings, where)
    if isinstance(config, FusedHeadConfig) and isinstance(told, FusedHeadConfig) and config.fc_bias != told.fc_bias:
        _refuse("fc_bias", told.fc_bias, config.fc_bias, settings, where)
    queries = told.written_settings().get("num_queries"), config.written_settings().get("num_queries")
    if queries[0] != queries[1]:
        _refuse("num_queries", *queries, settings, where)


# How positions turn where they have three rows: decoding's choice.
_AXES = ("mrope_section", "mrope_interleaved")


def _check_layer(ours: LayerShape, theirs: LayerShape, settings: dict[str, Any], where: str) -> None:
    written = theirs.to_dict() | {name: ours.to_dict()[name] for name in _AXES}
    different = ours.differs_from(written)
    if different is not None:
        _refuse(*different, settings, where)


def _refuse(name: str, theirs: Any, ours: Any, settings: dict[str, Any], where: str) -> None:
    section = ", ".join(f"{key}: {_text(value)}" for key, value in settings.items())
    raise UserError(
        f"the head was trained with {name} {theirs}, and the recipe's drafter has {ours}", where=where,
        hint=f"write what its files say: drafter: {{{section}}}",
    )  # fmt: skip


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def starts(config: DrafterConfig, draws_images: bool) -> bool:
    """Whether a training of this kind can start from a folder outside the run."""
    return isinstance(config, HeadConfig | MedusaConfig | DflashConfig) and (config.for_images or not draws_images)
