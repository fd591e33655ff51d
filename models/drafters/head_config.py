"""Files, training and drafting of language models' hidden-state heads: EAGLE, EAGLE-3, Sparrow, MSD, ViSpec, HiViS.

They share one layer and differ in what stands at a visual token, so that each ablation of Sparrow's Table 6 is a
setting (`head_settings.py`): MTP is `mtp_steps`, IVSB is `ivsb`, VATA is `vata`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.states import Taps
from ..hub import recurrent_layers
from ..layer import LayerShape
from ..targets.base import Target, TargetShape
from .base import PLAIN, Drafter, DraftingOptions, HeadObjective, TargetIdentity
from .head_files import load_head, manifest_of, save_head
from .head_module import FusedHead, StateHead
from .head_proposal import HeadProposal
from .head_settings import HeadSettings, Reads, Visual
from .head_training import HeadTraining

# ViSpec's two stages, which Sparrow follows.
TEXT_STAGE = HeadObjective(feature=1.0, token=0.1, listmle=0.01, mtp_steps=0)
VISUAL_STAGE = HeadObjective(l1=10.0, listmle=0.1)


class HeadConfig(HeadSettings):
    """Files, training and drafting of any of these heads."""

    starts_outside: ClassVar[bool] = True

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> StateHead:
        return load_head(self, folder, target, dtype, identity)

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        save_head(cast(StateHead, module), folder, manifest)

    def manifest(self, target: Target, identity: TargetIdentity, **training: object) -> JsonObject:
        return manifest_of(self, target.shape, identity, drafter=self.model_dump(mode="json"), **training)

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        return HeadTraining(cast(StateHead, module), target, self, settings)

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        return HeadProposal(cast(StateHead, module), target, self)


def exports_as_eagle(engine: str) -> list[str]:
    """`exports` of a head that the classes for EAGLE-1 run: refuse speculators, whose format has no such type."""
    return ["the format has no EAGLE-1 type; --to vllm writes what vLLM reads"] if engine == "speculators" else []


class FusedHeadConfig(HeadConfig):
    """Heads whose fc joins an embedding and a state (EAGLE-1's form)."""

    # Whether the fc layer that joins the two has a bias.
    fc_bias: bool = True
    # A norm before the attention; null: for Qwen alone, as MSD's published heads have it.
    input_norm: bool | None = False
    # The state that the head reads: the feature, which feeds the target's LM head, or the state before the last layer
    # (Sparrow's text says second-to-last). The head's output is a feature in both cases.
    state: Literal["feature", -2] = "feature"

    beside_states: ClassVar[frozenset[str]] = HeadConfig.beside_states | {"fc_bias", "input_norm"}

    def reads(self, shape: TargetShape, *, training: bool) -> Reads:
        """Join one state; layer 0 gives visual tokens their embedding where `image_input` is "projected"."""
        image = 0 if self.image_input(training=training) == "projected" else None
        state = () if self.state == "feature" else (shape.num_layers - 1,)
        return Reads(state, self.visual_layer(shape, training=training), image)

    def visual_layer(self, shape: TargetShape, *, training: bool) -> int | None:
        """The layer that visual inputs are made of; None: they are none, or ordinary."""
        return 0 if self.visual(training=training) == "direct" else None

    def layer(self, shape: TargetShape) -> LayerShape:
        return self.mirrored(shape.text, input_norm=self.input_norm, qkv_bias=self.qkv_bias)

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        return FusedHead(layer, draft_ids, fc_bias=self.fc_bias)


class DirectHeadConfig(FusedHeadConfig):
    """Heads that hold visual inputs whose states enter the layer directly."""

    # Text-only window: decoding holds no visual input at all. Nothing need be trained for it.
    vata: bool = False
    # Share of visual tokens that decoding keeps (without vata), by the attention they get in one layer of the target
    # from the prompt's last token or from all its text.
    visual_share: float = Field(1.0, ge=0, le=1)
    # Whose attention chooses: the prompt's last token's, or that of all its text.
    share_by: Literal["last", "text"] = "last"
    # Null: half of the target's layers, or the next above that attends.
    share_layer: int | None = Field(None, ge=0)
    # Share of visual inputs that training keeps in each sample, at random because states carry no attention. 0 trains
    # without any; above 0 every sample with a picture has some. `blind_share` makes samples that have none.
    train_visual_share: float = Field(1.0, ge=0, le=1)

    decoding_settings: ClassVar[frozenset[str]] = frozenset(
        {"positions", "vata", "visual_share", "share_by", "share_layer"}
    )

    def visual(self, *, training: bool) -> Visual:
        if training:
            return "direct" if self.train_visual_share else "none"
        return "direct" if self.visual_share and not self.vata else "none"

    def visual_fraction(self, *, training: bool) -> float:
        return self.train_visual_share if training else self.visual_share

    def taps_for(self, shape: TargetShape, *, training: bool) -> Taps:
        """Ask also for attention where a part of the visual tokens is held: that of `share_layer`, null: of the first
        layer from half depth on that attends.
        """
        taps = super().taps_for(shape, training=training)
        if training or self.vata or self.visual_share in (0.0, 1.0):
            return taps
        recurs = recurrent_layers(shape.text) or (False,) * shape.num_layers
        attending = [number for number, recurring in enumerate(recurs) if not recurring]
        half = next((number for number in attending if number >= shape.num_layers // 2), attending[-1])
        layer = half if self.share_layer is None else self.share_layer
        if layer not in attending:
            raise UserError(
                f"drafter.share_layer is {layer}, and the target's layers with attention are {attending}",
                key="drafter.share_layer", hint="leave it null for one at half depth",
            )  # fmt: skip
        return replace(taps, prefill_attention=(layer,), attention_queries=self.share_by)

    def exports(self, engine: str) -> list[str]:
        return exports_as_eagle(engine)
