"""Heads that read states on disk: weights without the target's tables, the layer's shape, and what the head expects.

The manifest says what no weight's shape does: which states were read and how layers are counted, what stood at visual
places, positions, the tokenizer and the target. What differs is refused by its name.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor, nn

from ...core.errors import UserError, not_loaded
from ...core.finite import check_weights
from ...core.json_types import JsonMapping, JsonObject
from ...core.placement import fill, without_storage
from ...core.pretrained import CPU, Checkpoint
from ..folders import CONFIG, check_shapes, read_values, shapes_of, write_folder
from ..layer import AT_EXPORT, LayerShape, head_window, refuse_window, stretched, written_rope
from ..targets.base import Target, TargetShape
from .base import DrafterConfig
from .head_module import StateHead
from .head_settings import HeadSettings
from .manifest import MANIFEST, TargetIdentity, check_made_for, manifest_for, refuse, write_manifest

_EMBEDDING = "embed_tokens.weight"
# What says how visual inputs are read. Weights that never read one (`text_only`) can become a head with any of these.
_OF_VISUAL = {"visual_slots", "visual_layer", "visual_embedding", "ivsb"}
NUMBERING = "layers count decoder layers passed, 0 is the embedding; feature is the state behind the final norm"


def head_state(folder: Path, device: torch.device = CPU) -> dict[str, Tensor]:
    """The weights in a head's folder, those of a safetensors file on `device`. Raises `UserError` where there are none,
    or none that can be read safely.
    """
    path = weights_file(folder)
    if (checkpoint := Checkpoint(folder)).weights():
        return checkpoint.tensors(device=device)
    if not path.is_file():
        problem = "no model.safetensors or pytorch_model.bin"
        raise UserError(problem, where=str(folder), hint="give the folder of a head")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        problem = f"unreadable weights: {not_loaded(error)}"
        raise UserError(problem, where=str(path), hint="train or download it again") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path.name} holds no named tensors", where=str(path), hint="give a head's folder")
    check_weights(state, path)
    return state


def weights_file(folder: Path) -> Path:
    """Ours, or of a published head that has only a pickle."""
    ours, older = folder / "model.safetensors", folder / "pytorch_model.bin"
    return older if older.is_file() and not ours.is_file() else ours


def manifest_of(config: HeadSettings, shape: TargetShape, identity: TargetIdentity, **more: object) -> JsonObject:
    """The content of `draftsmith.json`; `more` comes from the stage: command, step, ..."""
    return manifest_for(
        config.kind, identity, tokenizer_sha256=identity.tokenizer_sha256, reads=_read_by(config, shape),
        positions={"kind": config.positions, "gap_share": config.gap_share, "gap": config.gap},
        settings=config.written_settings(), **more,
    )  # fmt: skip


def _read_by(config: HeadSettings, shape: TargetShape) -> JsonObject:
    reads = config.reads(shape, training=True)
    return {
        "numbering": NUMBERING,
        "state": list(reads.state) or "feature",
        "visual_slots": config.visual(training=True),
        "visual_layer": reads.visual,
        "visual_embedding": config.image_input(),
    }


def save_head(head: StateHead, folder: Path, manifest: JsonMapping) -> None:
    """`model.safetensors`, `config.json` and the manifest of `manifest_of`."""
    values = {
        "model_type": head.model_type,
        "fc_bias": head.fc.bias is not None,
        "num_queries": head.num_queries,
        "num_steps": head.num_steps,
        "norm_output": head.norm_output,
        **({"norm_before_residual": True} if head.norm_before_residual else {}),
        **head.shape.to_dict(),
    }
    write_folder(folder, values, head.state_dict())
    write_manifest(folder, manifest)


def load_head(
    config: HeadSettings, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None
) -> StateHead:
    """A trained head, ours or a published MSD, ViSpec or EAGLE one, on the target's device. Raises `UserError` where a
    file is missing, or it was made for another target or with other settings.
    """
    check_manifest(config, folder, target.shape, identity)
    layer = config.layer(target.shape)
    check_layer(folder, layer)
    device = target.embedding.device
    state = head_state(folder, device)
    layer = stored_layer(config, folder, layer, state)
    # Published heads carry a copy of the target's rows; what was trained beside other rows would draft badly.
    if not dict(config).get("own_embedding") and (stored := state.pop(_EMBEDDING, None)) is not None:
        rows, embedding = min(len(stored), len(target.embedding)), target.embedding
        same_width = stored.shape[1:] == embedding.shape[1:]
        if not same_width or (stored[:rows].to(device).float() - embedding[:rows].float()).abs().max() > 1e-2:
            problem = "the head brings embeddings that are not the target's"
            hint = "name the target that it was trained for; a table of its own is drafter.own_embedding: true"
            raise UserError(problem, where=str(folder), hint=hint)
    # An EAGLE-3 file without d2t holds the whole vocabulary.
    ids = state["d2t"].cpu() + torch.arange(len(state["d2t"])) if "d2t" in state else None
    with without_storage(device):
        head = config.module(layer, ids)
    # Whether a head's own state is normed, and what its residual is, are said by no weight.
    if (folder / CONFIG).is_file():
        values = read_values(folder)
        for name in ("norm_output", "norm_before_residual"):
            if bool(values.get(name)) != (expected := getattr(head, name)):
                refuse(name, bool(values.get(name)), expected, folder / CONFIG)
    wanted, rows = head.state_dict().get("lm_head.weight"), target.shape.vocab_size
    lacks = wanted is not None and len(wanted) == rows and "lm_head.weight" not in state
    take_weights(head, state, weights_file(folder), device, dtype, hint=no_lm_head(rows) if lacks else None)
    if "draft_vocab_size" in config.model_fields_set:  # else decoding takes the one that is stored
        check_vocabulary(config, head, target, weights_file(folder))
    return head


def take_weights(
    module: nn.Module, state: Mapping[str, Tensor], path: Path, device: torch.device, dtype: torch.dtype | None = None,
    hint: str | None = None,
) -> None:  # fmt: skip
    """Fill a module that was built in `without_storage`. Raises `UserError` with `hint` where the file at `path`
    differs.
    """
    check_shapes(
        shapes_of(state), shapes_of(module.state_dict()), where=str(path),
        what="the drafter does not fit this target and these settings: ",
        hint=hint or "name the target and the settings that it was trained with",
    )  # fmt: skip
    fill(module, state, device, dtype)


def no_lm_head(rows: int) -> str:
    """The hint for a head without an LM head, whose vocabulary is the target's."""
    return (
        f"the head drafts from the target's full vocabulary ({rows:,} tokens), and vLLM lets such a head use the "
        "target's LM head: if it was trained so, copy the target's lm_head.weight (of tied embeddings its "
        "embed_tokens.weight) into the file, else fetch the whole checkpoint"
    )


def check_layer(folder: Path, shape: LayerShape, *, generator: bool = False) -> None:
    """Compare the layer with what `config.json` says: ours says what it mirrors, most of which is in no weight's shape;
    published ones of language models (no `generator`) how positions turn.
    """
    if not (folder / CONFIG).is_file():
        return
    path, written = folder / CONFIG, read_values(folder)
    if "zeros_before" in written:
        # Positions are decoding's choice, and these only say what positions of three rows would turn.
        axes = {name: shape.to_dict()[name] for name in ("mrope_section", "mrope_interleaved")}
        if (different := shape.differs_from(written | axes)) is not None:
            refuse(*different, path)
    elif not generator:
        scaling = stretched(written_rope(written, path), written.get("max_position_embeddings"))
        if scaling != shape.rope_scaling:
            refuse("its rotation (drafter.rope)", scaling or "plain", shape.rope_scaling or "plain", path,
                   more=f"; {AT_EXPORT}")  # fmt: skip


class _Written(BaseModel):
    """Keys of a published head's `config.json` that its layer is built from; null: the file does not say. Each is named
    as the field of the layer, which the drafter's setting of the same name chooses.
    """

    num_heads: PositiveInt | None = Field(None, alias="num_attention_heads")
    intermediate_size: PositiveInt | None = None
    norm_eps: PositiveFloat | None = Field(None, alias="rms_norm_eps")
    rope_theta: PositiveFloat | None = None


def stored_layer(config: HeadSettings, folder: Path, mirrored: LayerShape, state: Mapping[str, Tensor]) -> LayerShape:
    """The layer that a published head with the weights `state` was trained with; what its files leave out is that of
    `mirrored`. The heads of keys and values are counted in the weights, since some published configs copy the target's
    number. Our own folders hold the whole layer, which `check_layer` compares. Raises `UserError` where the recipe sets
    another value than the folder has.
    """
    values = read_values(folder) if (folder / CONFIG).is_file() else {}
    if "zeros_before" in values:
        return mirrored
    values = values.get("transformer_layer_config") or values
    if not config.is_eagle3:
        refuse_window(values, str(folder / CONFIG))
    elif (window := head_window(values, str(folder / CONFIG))) != mirrored.sliding_window:
        refuse("sliding_window (drafter.sliding_window)", window, mirrored.sliding_window, folder / CONFIG)
    rope = written_rope(values, folder / CONFIG)
    try:
        fields = _Written.model_validate({**values, "rope_theta": rope.get("rope_theta")})
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{first['loc'][0]}: {first['msg']}"
        raise UserError(problem, where=str(folder / CONFIG), hint="download the file again") from error
    written, chosen = fields.model_dump(exclude_none=True), config.model_fields_set
    if mirrored.rope != "half":
        written.pop("rope_theta", None)
    for name, value in written.items():
        expected = mirrored.to_dict()[name]
        if name in chosen and value != expected:
            refuse(f"{name} (drafter.{name})", value, expected, folder / CONFIG)
    layer = replace(mirrored, **written)
    keys = next((weight for name, weight in state.items() if name.endswith("self_attn.k_proj.weight")), None)
    heads = layer.num_kv_heads if keys is None else len(keys) // layer.head_dim
    if heads not in (layer.num_kv_heads, 0) and layer.num_heads % heads == 0:
        if "kv_heads" in chosen:
            refuse("num_kv_heads (drafter.kv_heads)", heads, layer.num_kv_heads, weights_file(folder))
        layer = replace(layer, num_kv_heads=heads)
    return layer


def check_manifest(config: HeadSettings, folder: Path, shape: TargetShape, identity: TargetIdentity | None) -> None:
    """Compare what the head read in training with what it would read now. Without a manifest nothing is compared."""
    written = check_made_for(folder, config.kind, identity)
    expected = {**config.written_settings(), **_read_by(config, shape)}
    stored = {**(written.get("settings") or {}), **(written.get("reads") or {})}
    skipped = {"numbering"} | (_OF_VISUAL if written.get("text_only") else set())
    for name, value in expected.items():
        if name in stored and name not in skipped and stored[name] != value:
            refuse(name, stored[name], value, folder / MANIFEST)


def check_vocabulary(config: DrafterConfig, head: Any, target: Target, path: Path) -> None:
    """Compare the draft vocabulary of loaded weights with the one that a recipe trains. Raises `UserError` for another
    `draft_vocab_size` than the weights have.
    """
    settings = dict(config)
    if "draft_vocab_size" not in settings:
        return
    whole = target.shape.vocab_size
    held = whole if head.draft_ids is None else len(head.draft_ids)
    if held != (settings["draft_vocab_size"] or whole):
        refuse("draft_vocab_size", held, settings["draft_vocab_size"] or f"null, all {whole} ids", path)
