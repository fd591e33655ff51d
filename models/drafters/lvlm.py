"""Independent draft LVLMs: a 68M or 160M Llama with the target's kind of eyes (TABED, appendix H.1).

Config, assembly, the files it is saved as, and its proposals (M with the pictures, T without). The
loss is LLaVA's own, `models/llava.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import PreTrainedConfig, PreTrainedModel

from ...core.checksums import check_sums
from ...core.errors import UserError
from ...core.section import Section
from ..decoding.decoder import CachedDecoder
from ..hub import ModelSource, load_language_model, load_vision_tower, read_config, vision_half
from ..llava import TokenIds, assemble, llava_config
from ..targets.load import load_llava
from .ensemble import EnsembleConfig, EnsembleProposal, preset
from .graph import GraphedChain
from .independent import IndependentProposal
from .modes import Mode, StandIns

MANIFEST = "draftsmith.json"


class RopeScaling(Section):
    """More positions than the language model was pretrained with (JackFram's have 2,048)."""

    # linear squeezes positions into those that are known (simple, and right after finetuning); yarn leaves near
    # distances alone (better untrained).
    kind: Literal["linear", "yarn"] = "linear"
    # As many as the longest sample and what is decoded behind it need.
    max_positions: int = Field(ge=1)


class LvlmConfig(Section):
    """A draft LVLM assembled from a language model and a vision tower.

    The draft is a LLaVA-1.5; with a newline it is a LLaVA-OneVision with this language model.
    """

    kind: Literal["lvlm"]
    # Hub id, directory, or an inline config (random weights) of a Llama-like model.
    language_model: ModelSource
    # Hub id, directory or inline config of a CLIP-like tower; "target" copies the target's own.
    vision_tower: ModelSource
    revision: str | None = None
    # The layer whose states the projector reads; null: as the target, and -2 for eyes of its own.
    vision_feature_layer: int | None = None
    # A learned newline: for tiled pictures (anyres), several pictures as OneVision counts them, clips with newlines.
    newline: bool = False
    # target: the draft shares the target's tiles, as far as it can read them (without a newline, of a tiled picture
    # the first tile); own: its tower has another resolution or other statistics, and it gets tiles of its own.
    pictures: Literal["target", "own"] = "target"
    rope_scaling: RopeScaling | None = None

    @property
    def family(self) -> Literal["llava", "llava_onevision"]:
        """transformers' class that holds its weights."""
        return "llava_onevision" if self.newline else "llava"

    @model_validator(mode="after")
    def _own_tower(self) -> LvlmConfig:
        if self.pictures == "own" and self.vision_tower == "target":
            raise ValueError("pictures: own is for another tower than the target's, and vision_tower is target")
        return self

    def provides(self) -> set[str]:
        """Things that need no stage: none, a stage assembles and trains it."""
        return set()


def drafter_config(config: LvlmConfig, target: PreTrainedConfig, ids: TokenIds, *, network: bool) -> PreTrainedConfig:
    """The draft's model config: its own halves, the target's vocabulary and ids."""
    text = read_config(config.language_model, key="drafter.language_model", revision=config.revision, network=network)
    if config.vision_tower == "target":
        vision = target.vision_config
    else:
        vision = vision_half(read_config(config.vision_tower, key="drafter.vision_tower", network=network))
    other = vision.image_size, vision.patch_size
    shares = config.pictures == "target"
    if shares and other != (target.vision_config.image_size, target.vision_config.patch_size):
        raise UserError(
            f"the drafter's tower reads {vision.image_size} pixels in patches of {vision.patch_size}, the target's "
            f"{target.vision_config.image_size} in patches of {target.vision_config.patch_size}",
            where="key drafter.vision_tower",
            cure="use a tower of the target's resolution, or set drafter.pictures: own",
        )
    layer = config.vision_feature_layer
    if layer is None:
        layer = target.vision_feature_layer if shares else -2
    if config.rope_scaling is not None:
        scale_positions(text, config.rope_scaling)
    return llava_config(
        text,
        vision,
        ids,
        vision_feature_layer=layer,
        family=config.family,
    )


def scale_positions(text: PreTrainedConfig, scaling: RopeScaling) -> None:
    """Stretch a language model's rotary positions. Raises `UserError` where it has as many, or stretched ones."""
    known, rope = text.max_position_embeddings, dict(getattr(text, "rope_parameters", None) or {})
    where = "key drafter.rope_scaling"
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"the language model's positions are scaled already: {rope}", where=where, cure="remove it")
    if scaling.max_positions <= known:
        raise UserError(
            f"max_positions is {scaling.max_positions} and the language model has {known}",
            where=where,
            cure="remove it, or ask for more positions",
        )
    rope |= {"rope_type": scaling.kind, "factor": scaling.max_positions / known}
    if scaling.kind == "yarn":
        rope["original_max_position_embeddings"] = known
    text.rope_parameters, text.max_position_embeddings = rope, scaling.max_positions


def build_drafter(
    config: LvlmConfig, target: PreTrainedModel | PreTrainedConfig, ids: TokenIds, *, seed: int
) -> PreTrainedModel:
    """A float32 draft before its first stage. A whole target is needed only for `vision_tower: target`."""
    full = target.config if isinstance(target, PreTrainedModel) else target
    joined = drafter_config(config, full, ids, network=True)
    text = read_config(config.language_model, key="drafter.language_model", revision=config.revision)
    language_model = load_language_model(
        config.language_model, text, key="drafter.language_model", revision=config.revision
    ) if not isinstance(config.language_model, dict) else None  # fmt: skip
    if config.vision_tower == "target":
        assert isinstance(target, PreTrainedModel)
        tower = target.model.vision_tower
    elif isinstance(config.vision_tower, dict):
        tower = None
    else:
        tower = load_vision_tower(config.vision_tower, joined.vision_config, key="drafter.vision_tower", revision=None)
    generator = torch.Generator().manual_seed(seed)
    return assemble(joined, language_model=language_model, vision_tower=tower, generator=generator)


def save_llava(model: PreTrainedModel, folder: Path, manifest: dict[str, Any]) -> None:
    """A directory that plain `from_pretrained` of the model's class loads, plus our small manifest."""
    model.save_pretrained(folder)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def load_drafter(folder: Path, *, tokenizer_hash: str, dtype: torch.dtype) -> PreTrainedModel:
    """A trained draft.

    Raises:
        UserError: it was made for another tokenizer, or a file of a published one is missing or has been changed.
    """
    check_sums(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["tokenizer_hash"] != tokenizer_hash:
        raise UserError(
            "the draft was trained with another tokenizer than the target's: it would propose noise",
            where=str(folder / MANIFEST),
            cure="train the draft with this target's processor, or evaluate it with its own target",
        )
    return load_llava(folder, revision=None, dtype=dtype, key="drafter", whole=True)


def proposal(
    model: PreTrainedModel,
    mode: Mode | EnsembleConfig,
    *,
    num_token_ids: int,
    image_token_id: int,
    newline_id: int,
    stand_ins: StandIns | None = None,
    chain: int | None = None,
    capacity: int = 0,
    record: bool = False,
) -> IndependentProposal:
    """The draft as the decoding loop calls it.

    Args:
        stand_ins: what stands for a picture in the text modes; needed for C and T-text.
        record: keep an ensemble's weights over time in its `trace`.
        chain: drafted tokens, where a cycle's proposal is the likeliest chain; on CUDA it is then one graph.
        capacity: positions that a request may take; for the graph.
    """
    decoder = CachedDecoder(model, num_token_ids=num_token_ids, never=(image_token_id,))
    if chain is not None and decoder.device.type == "cuda":
        return GraphedChain(
            decoder,
            mode,
            newline_id=newline_id,
            gamma=chain,
            capacity=capacity,
            stand_ins=stand_ins,
            record=record,
        )
    config = mode if isinstance(mode, EnsembleConfig) else preset(mode)
    if len(config.members) == 1:
        return IndependentProposal(decoder, config.members[0], newline_id=newline_id, stand_ins=stand_ins)
    weights = config.weights.build(len(config.members))
    return EnsembleProposal(decoder, config.members, weights, newline_id=newline_id, stand_ins=stand_ins, record=record)
