"""Drafters of image generators, whichever method: how each is built, trained, loaded and put to work.

A new one adds a branch here and a file of its own with its config, its loss and its proposal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ..decoding.rows import Guidance
from ..generators import TargetConfig
from ..llamagen.files import load_llamagen
from ..llamagen.folders import CONFIG, WEIGHTS, find_folder
from ..targets.llamagen import LlamaGenTarget
from .base import Drafter
from .eagle import EagleConfig, EagleHead, EagleProposal, EagleTraining, eagle_shape, load_eagle, save_eagle
from .made_for import MANIFEST, check_made_for
from .medusa import MedusaConfig, MedusaHead, MedusaProposal, MedusaTraining, load_medusa, medusa_shape, save_medusa
from .sibling import SiblingConfig, SiblingProposal, check_sibling

# Of a head on the Hub; LANTERN's weights are in the last one.
_FILES = (CONFIG, MANIFEST, WEIGHTS, "pytorch_model.bin")

HeadConfig = Annotated[EagleConfig | MedusaConfig | SiblingConfig, Field(discriminator="kind")]


def build_head(config: EagleConfig | MedusaConfig, target: Any) -> nn.Module:
    """A fresh head in float32 for a loaded `target` (the global generator draws its weights)."""
    if isinstance(config, MedusaConfig):
        return MedusaHead(medusa_shape(config, target.config))
    head = EagleHead(eagle_shape(config, target.config))
    # A copy: the rounded rows of a head that trained in bfloat16 are loaded into it, and must not reach the target.
    head.share_embedding(target.embedding.to(torch.float32, copy=True))
    return head


def head_with(head: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """A head like `head` in float32, with the weights of `state` and none that it shares with `head` or the target."""
    if isinstance(head, MedusaHead):
        copy: nn.Module = MedusaHead(head.shape)
    else:
        assert isinstance(head, EagleHead)
        copy = EagleHead(head.shape, fc_bias=head.fc.bias is not None)
        copy.own_embedding = head.own_embedding
    copy.load_state_dict(state)
    return copy


def head_training(head: nn.Module, target: Any, config: EagleConfig | MedusaConfig) -> nn.Module:
    if isinstance(config, MedusaConfig):
        return MedusaTraining(head, target, config.loss)
    assert isinstance(head, EagleHead)
    return EagleTraining(head, target, config.loss)


def head_proposal(head: nn.Module, target: Any) -> Drafter:
    if isinstance(head, MedusaHead):
        return MedusaProposal(head, target.guided)
    assert isinstance(head, EagleHead)
    return EagleProposal(head, target.guided)


def save_head(head: nn.Module, folder: Path, manifest: dict[str, Any]) -> None:
    if isinstance(head, MedusaHead):
        save_medusa(head, folder, manifest)
    else:
        assert isinstance(head, EagleHead)
        save_eagle(head, folder, manifest)


def find_head(config: EagleConfig | MedusaConfig) -> Path:
    """The folder of the head that the recipe names; one on the Hub is downloaded."""
    return find_folder(str(config.path), config.revision, files=_FILES)


def load_head(
    config: EagleConfig | MedusaConfig,
    folder: Path,
    target: Any,
    dtype: torch.dtype,
    *,
    named: TargetConfig | None = None,
) -> nn.Module:
    """A trained head beside its target.

    Args:
        named: the recipe's section of the target, where there is a recipe.

    Raises:
        UserError: the head does not fit, or was made for another target.
    """
    check_made_for(folder, target, named)
    if isinstance(config, MedusaConfig):
        return load_medusa(folder, medusa_shape(config, target.config)).to(target.device, dtype)
    embedding = target.embedding.to(dtype)
    return load_eagle(folder, embedding, eagle_shape(config, target.config)).to(dtype)


def load_proposal(
    config: EagleConfig | MedusaConfig | SiblingConfig,
    folder: Path | None,
    target: Any,
    *,
    named: TargetConfig | None = None,
) -> Drafter:
    """A drafter ready to propose: of a stage's folder, or the published one that the recipe names.

    Args:
        named: the recipe's section of the target, where there is a recipe.
    """
    if isinstance(config, SiblingConfig):
        model = load_llamagen(config.path, revision=config.revision, dtype=target.embedding.dtype).to(target.device)
        check_sibling(target.config, model.config)
        guidance = target.guidance
        if config.cfg_scale is not None:
            guidance = Guidance(config.cfg_scale, guidance.interval)
        return SiblingProposal(LlamaGenTarget(model, guidance))
    source = folder if folder is not None else find_head(config)
    return head_proposal(load_head(config, source, target, target.embedding.dtype, named=named), target)
