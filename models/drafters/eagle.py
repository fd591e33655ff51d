"""EAGLE-1/2: one layer that predicts the target's next feature (Li et al. 2024), for language models and for image
generators (LANTERN).

The layer is the same: index t reads the target's feature f_t beside the embedding of token x_{t+1}, embedding first,
and predicts f_{t+1}, which the target's own LM head scores; no final norm stands between. What differs: over language
(`HeadConfig`) each prompt token is an input and image tokens enter as projected images; over image codes the condition
stands in front, rows come with and without it (guidance), and the loss can compare guided distributions as well.
Letters: R rows, B samples, N new positions, T positions, F nodes, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.states import Taps
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from .base import PLAIN, CountTokens, Drafter, DraftingOptions, HeadObjective, TargetIdentity
from .eagle_images import EagleLoss, ImageEagleHead, ImageEagleProposal, ImageEagleTraining, load_eagle, save_eagle
from .head_config import FusedHeadConfig, exports_as_eagle
from .head_module import FusedHead, StateHead
from .head_settings import Image, Visual
from .manifest import check_made_for, manifest_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class EagleConfig(FusedHeadConfig):
    """An EAGLE head; everything that is null mirrors the target."""

    kind: Literal["eagle"]
    # Language models: what enters as the embedding of a visual token.
    image: Image = "projected"
    # Language models: text-only window in training and decoding.
    vata: bool = False
    # Image generators: attention heads. LANTERN's for LlamaGen also have norm_eps 1e-6 where their target has 1e-5.
    num_heads: int | None = Field(None, ge=1)
    # Image generators: the terms of the loss.
    loss: EagleLoss = EagleLoss()

    decoding_settings: ClassVar[frozenset[str]] = frozenset({"positions", "vata"})
    for_images: ClassVar[bool] = True
    unread_for_language: ClassVar[frozenset[str]] = frozenset({"num_heads", "loss"})

    def check(self, shape: TargetShape) -> None:
        if not shape.draws_images:
            super().check(shape)

    def lines(self, shape: TargetShape, config: PreTrainedConfig) -> list[str]:
        lines = super().lines(shape, config)
        if shape.draws_images:
            whole = sum(self.count(shape).values()) + shape.vocab_size * shape.hidden_size
            lines.append(f"  {'with embedding':<16} {whole:>16,}   the target's, frozen")
        return lines

    def exports(self, engine: str) -> list[str]:
        return exports_as_eagle(engine)

    def visual(self, *, training: bool) -> Visual:
        return "none" if self.vata else "read"

    def image_input(self, *, training: bool = True) -> Image | None:
        return None if self.vata else self.image

    def layer(self, shape: TargetShape) -> LayerShape:
        """One of the target's layers; heads of image generators are LANTERN's published ones."""
        if shape.layer is None:
            return super().layer(shape)
        mirrored = shape.layer
        heads = self.num_heads or mirrored.num_heads
        grouped = self.kv_heads != "mha" and mirrored.num_kv_heads != mirrored.num_heads
        shared = mirrored.num_kv_heads if grouped else heads
        if heads % shared:
            problem = f"drafter.num_heads is {heads}, no multiple of the target's {shared} heads of keys and values"
            raise UserError(problem, key="drafter.num_heads", hint="choose a multiple, or drafter.kv_heads: mha")
        return replace(
            mirrored, num_heads=heads, num_kv_heads=shared, norm_eps=self.norm_eps or mirrored.norm_eps,
            intermediate_size=self.intermediate_size or mirrored.intermediate_size,
        )  # fmt: skip

    def taps_for(self, shape: TargetShape, *, training: bool) -> Taps:
        """Ask an image generator for the feature; with `loss.guided`, training also runs without the condition."""
        if shape.draws_images:
            return Taps(feature=True, without_condition=training and bool(self.loss.guided))
        return super().taps_for(shape, training=training)

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> FusedHead:
        """Give the head of an image generator a float32 copy of the target's embedding, frozen."""
        if not target.shape.draws_images:
            return cast(FusedHead, super().build(target, count_tokens=count_tokens))
        head = ImageEagleHead(self.layer(target.shape))
        # A copy: the rounded rows of a head that trained in bfloat16 are loaded into it, and must not reach the target.
        head.share_embedding(target.embedding.to(torch.float32, copy=True))
        return head

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> StateHead:
        if not target.shape.draws_images:
            return super().read(folder, target, dtype, identity)
        check_made_for(folder, self.kind, identity, target)
        return load_eagle(folder, target.embedding.to(dtype), self.layer(target.shape), self).to(dtype)

    def copy_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        if not isinstance(module, ImageEagleHead):
            return super().copy_of(module, state)
        copy = ImageEagleHead(module.shape, fc_bias=module.fc.bias is not None)
        copy.has_embedding = module.has_embedding
        copy.load_state_dict(state)
        return copy

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        if isinstance(module, ImageEagleHead):
            save_eagle(module, folder, manifest)
        else:
            super().save(module, folder, manifest)

    def manifest(self, target: Target, identity: TargetIdentity, **training: object) -> JsonObject:
        if not target.shape.draws_images:
            return super().manifest(target, identity, **training)
        return manifest_for(self.kind, identity, drafter=self.model_dump(mode="json"), **training)

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        if target.shape.draws_images:
            return ImageEagleTraining(cast(ImageEagleHead, module), target, self.loss)
        return super().training_objective(module, target, settings)

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        if target.shape.draws_images:
            return ImageEagleProposal(cast(ImageEagleHead, module), target.guided)
        return super().drafter(module, target, options)


EagleConfig.unread_for_images = frozenset({*EagleConfig.model_fields} - {
    "num_heads", "loss", "kind", "path", "revision", "kv_heads", "intermediate_size", "norm_eps",
})  # fmt: skip
