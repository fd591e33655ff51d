"""Independent draft LVLMs: a 68M or 160M Llama with the target's kind of eyes (TABED, appendix H.1).

Config, assembly, the files it is saved as, and its proposals (M with the pictures, T without). The
loss is LLaVA's own, `models/llava.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from ...core.errors import UserError
from ...core.section import Section
from ..decoding.decoder import CachedDecoder
from ..hub import ModelSource, load_language_model, load_vision_tower, read_config, vision_half
from ..llava import TokenIds, assemble, llava_config
from ..targets.load import load_llava
from .graph import GraphedChain
from .independent import IndependentProposal, Mode

MANIFEST = "draftsmith.json"


class LvlmConfig(Section):
    """A draft LVLM assembled from a language model and a vision tower."""

    kind: Literal["lvlm"]
    # Hub id, directory, or an inline config (random weights) of a Llama-like model.
    language_model: ModelSource
    # Hub id, directory or inline config of a CLIP-like tower; "target" copies the target's own.
    vision_tower: ModelSource
    revision: str | None = None
    # The layer whose states the projector reads; null: as the target.
    vision_feature_layer: int | None = None

    def provides(self) -> set[str]:
        """Things that need no stage: none, a stage assembles and trains it."""
        return set()


def drafter_config(config: LvlmConfig, target: LlavaConfig, ids: TokenIds, *, network: bool) -> LlavaConfig:
    """The draft's model config: its own halves, the target's vocabulary and ids."""
    text = read_config(config.language_model, key="drafter.language_model", revision=config.revision, network=network)
    if config.vision_tower == "target":
        vision = target.vision_config
    else:
        vision = vision_half(read_config(config.vision_tower, key="drafter.vision_tower", network=network))
    if vision.image_size != target.vision_config.image_size or vision.patch_size != target.vision_config.patch_size:
        raise UserError(
            f"the drafter's tower reads {vision.image_size} pixels in patches of {vision.patch_size}, the target's "
            f"{target.vision_config.image_size} in patches of {target.vision_config.patch_size}",
            where="key drafter.vision_tower",
            cure="use a tower of the target's resolution: drafts share the target's pixels",
        )
    layer = target.vision_feature_layer if config.vision_feature_layer is None else config.vision_feature_layer
    return llava_config(text, vision, ids, vision_feature_layer=layer)


def build_drafter(
    config: LvlmConfig, target: LlavaForConditionalGeneration | LlavaConfig, ids: TokenIds, *, seed: int
) -> LlavaForConditionalGeneration:
    """A float32 draft before its first stage. A whole target is needed only for `vision_tower: target`."""
    full = target.config if isinstance(target, LlavaForConditionalGeneration) else target
    joined = drafter_config(config, full, ids, network=True)
    text = read_config(config.language_model, key="drafter.language_model", revision=config.revision)
    language_model = load_language_model(
        config.language_model, text, key="drafter.language_model", revision=config.revision
    ) if not isinstance(config.language_model, dict) else None  # fmt: skip
    if config.vision_tower == "target":
        assert isinstance(target, LlavaForConditionalGeneration)
        tower = target.model.vision_tower
    elif isinstance(config.vision_tower, dict):
        tower = None
    else:
        tower = load_vision_tower(config.vision_tower, joined.vision_config, key="drafter.vision_tower", revision=None)
    generator = torch.Generator().manual_seed(seed)
    return assemble(joined, language_model=language_model, vision_tower=tower, generator=generator)


def save_llava(model: LlavaForConditionalGeneration, folder: Path, manifest: dict[str, Any]) -> None:
    """A directory that plain `LlavaForConditionalGeneration.from_pretrained` loads, plus our small manifest."""
    model.save_pretrained(folder)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def load_drafter(folder: Path, *, tokenizer_hash: str, dtype: torch.dtype) -> LlavaForConditionalGeneration:
    """A trained draft. Raises `UserError` where it was made for another tokenizer."""
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["tokenizer_hash"] != tokenizer_hash:
        raise UserError(
            "the draft was trained with another tokenizer than the target's: it would propose noise",
            where=str(folder / MANIFEST),
            cure="train the draft with this target's processor, or evaluate it with its own target",
        )
    return load_llava(folder, revision=None, dtype=dtype, key="drafter")


def proposal(
    model: LlavaForConditionalGeneration,
    mode: Mode,
    *,
    num_token_ids: int,
    image_token_id: int,
    newline_id: int,
    chain: int | None = None,
    capacity: int = 0,
) -> IndependentProposal:
    """The draft as the decoding loop calls it.

    Args:
        chain: drafted tokens, where a cycle's proposal is the likeliest chain; on CUDA it is then one graph.
        capacity: positions that a request may take; for the graph.
    """
    decoder = CachedDecoder(model, num_token_ids=num_token_ids, never=(image_token_id,))
    if chain is not None and decoder.device.type == "cuda":
        return GraphedChain(decoder, mode, newline_id=newline_id, gamma=chain, capacity=capacity)
    return IndependentProposal(decoder, mode, newline_id=newline_id)
