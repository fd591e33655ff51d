"""Heads that read states on disk: weights without the target's tables, the layer's shape, and what the head expects.

The manifest says what no weight's shape does: which states were read and how layers are counted, what stood at visual
places, positions, the tokenizer and the target. What differs is refused by its name.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor

from ...core.errors import UserError, not_loaded
from ...core.finite import check_weights
from ...core.json_types import JsonMapping, JsonObject, object_at
from ...core.placement import fill, without_storage
from ...core.pretrained import CPU, Checkpoint
from ..folders import CONFIG, check_shapes, read_values, shapes_of, write_folder
from ..layer import LayerShape, refuse_window, stretched, written_rope
from ..targets.base import Target, TargetShape
from .base import DrafterConfig, TargetIdentity
from .head_module import StateHead
from .head_settings import HeadSettings
from .made_for import OtherTarget, tested_with
from .manifest import MANIFEST, read_manifest

_EMBEDDING = "embed_tokens.weight"
# What says how visual inputs are read. Weights that never read one (`text_only`) can become a head with any of these.
_OF_VISUAL = {"visual_slots", "visual_layer", "visual_embedding", "ivsb"}
NUMBERING = "layers count decoder layers passed, 0 is the embedding; feature is the state behind the final norm"


def head_state(folder: Path, device: torch.device = CPU) -> dict[str, Tensor]:
    """The weights in a head's folder. Raises `UserError` where there are none, or none that can be read safely.

    Args:
        device: where those of a safetensors file are read to; a pickle's lie on the host.
    """
    path = weights_file(folder)
    if (checkpoint := Checkpoint(folder)).weights():
        return checkpoint.tensors(device=device)
    try:
        if path.is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values()):
                check_weights(state, path)
                return state
            raise UserError("pytorch_model.bin holds no named tensors", where=str(path), hint="give a head's folder")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise UserError(
            f"unreadable weights: {not_loaded(error)}", where=str(path), hint="train or download it again"
        ) from error
    raise UserError("no model.safetensors or pytorch_model.bin", where=str(folder), hint="give the folder of a head")


def weights_file(folder: Path) -> Path:
    """Ours, or of a published head that has only a pickle."""
    ours, older = folder / "model.safetensors", folder / "pytorch_model.bin"
    return older if older.is_file() and not ours.is_file() else ours


def manifest_of(config: HeadSettings, shape: TargetShape, identity: TargetIdentity, **more: object) -> JsonObject:
    """What stands in `draftsmith.json`.

    Args:
        more: of the stage: command, step, ...
    """
    return {
        "method": config.kind,
        "target": dict(identity.section),
        "tokenizer_sha256": identity.tokenizer_sha256,
        "reads": _read_by(config, shape),
        "positions": {"kind": config.positions, "gap_share": config.gap_share, "gap": config.gap},
        "settings": config.written_settings(),
        "tested_with": tested_with(),
        **more,
    }


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
        **head.shape.to_dict(),
    }
    write_folder(folder, values, head.state_dict())
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def load_head(
    config: HeadSettings, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None
) -> StateHead:
    """A trained head, ours or a published MSD, ViSpec or EAGLE one, on the target's device.

    Raises:
        UserError: a file is missing, or the head was made for another target or with other settings.
    """
    check_manifest(config, folder, target.shape, identity)
    layer = config.layer(target.shape)
    _check_shape(folder, layer)
    device = target.embedding.device
    state = head_state(folder, device)
    layer = stored_layer(config, folder, layer, state)
    _check_embedding(state.pop(_EMBEDDING, None), target.embedding, folder)
    # An EAGLE-3 file without d2t holds the whole vocabulary.
    ids = state["d2t"].cpu() + torch.arange(len(state["d2t"])) if "d2t" in state else None
    with without_storage(device):
        head = config.module(layer, ids)
    _check_norm(folder, head)
    wanted, rows = shapes_of(head.state_dict()), target.shape.vocab_size
    lacks = wanted.get("lm_head.weight", ())[:1] == (rows,) and "lm_head.weight" not in state
    check_shapes(
        shapes_of(state), wanted, where=str(weights_file(folder)),
        what="the head does not fit this target and kind: ",
        hint=no_lm_head(rows) if lacks else "name the target and the settings that the head was trained with",
    )  # fmt: skip
    fill(head, state, device, dtype)
    if "draft_vocab_size" in config.model_fields_set:  # else decoding takes the one that is stored
        check_vocabulary(config, head, target, weights_file(folder))
    return head


def _check_norm(folder: Path, head: StateHead) -> None:
    """Compare whether a head's own state is normed, which no weight says."""
    if not (folder / CONFIG).is_file():
        return
    written = bool(read_values(folder).get("norm_output", False))
    if written != head.norm_output:
        _refuse("norm_output", written, head.norm_output, folder / CONFIG)


def no_lm_head(rows: int) -> str:
    """The hint for a head without an LM head, whose vocabulary is the target's."""
    return (
        f"the head drafts from the target's full vocabulary ({rows:,} tokens), and vLLM lets such a head use the "
        "target's LM head: if it was trained so, copy the target's lm_head.weight (of tied embeddings its "
        "embed_tokens.weight) into the file, else fetch the whole checkpoint"
    )


def _check_shape(folder: Path, shape: LayerShape) -> None:
    """Ours say what they mirror, most of which is in no weight's shape; published configs but how positions turn."""
    if not (folder / CONFIG).is_file():
        return
    written = read_values(folder)
    if "zeros_before" not in written:
        rope = written_rope(written, folder / CONFIG)
        scaling = stretched(rope, written.get("max_position_embeddings"))
        if scaling != shape.rope_scaling:
            _refuse("its rotation (drafter.rope)", scaling or "plain", shape.rope_scaling or "plain", folder / CONFIG)
        return
    # Positions are decoding's choice, and these only say what positions of three rows would turn.
    axes = {name: shape.to_dict()[name] for name in ("mrope_section", "mrope_interleaved")}
    different = shape.differs_from(written | axes)
    if different is not None:
        _refuse(different[0], different[1], different[2], folder / CONFIG)


class _Written(BaseModel):
    """Keys of a published head's `config.json` that its layer is built from; null: the file does not say. Each is named
    as the field of the layer, which the drafter's setting of the same name chooses.
    """

    num_heads: PositiveInt | None = Field(None, alias="num_attention_heads")
    intermediate_size: PositiveInt | None = None
    norm_eps: PositiveFloat | None = Field(None, alias="rms_norm_eps")
    rope_theta: PositiveFloat | None = None


def stored_layer(config: HeadSettings, folder: Path, mirrored: LayerShape, state: Mapping[str, Tensor]) -> LayerShape:
    """The layer that a published head was trained with; what its files leave out mirrors the target.

    The heads of keys and values are counted in the weights, since some published configs copy the target's number. Our
    own folders hold the whole layer, which `LayerShape.differs_from` compares instead.

    Args:
        mirrored: the layer by the recipe's settings and the target.
        state: the head's weights.

    Raises:
        UserError: the recipe sets another value than the folder has.
    """
    values = read_values(folder) if (folder / CONFIG).is_file() else {}
    if "zeros_before" in values:
        return mirrored
    written, chosen = _written_fields(values, folder), config.model_fields_set
    if mirrored.rope != "half":
        written.pop("rope_theta", None)
    for name, value in written.items():
        expected = mirrored.to_dict()[name]
        if name in chosen and value != expected:
            _refuse(f"{name} (drafter.{name})", value, expected, folder / CONFIG)
    layer = replace(mirrored, **written)
    keys = next((weight for name, weight in state.items() if name.endswith("self_attn.k_proj.weight")), None)
    heads = layer.num_kv_heads if keys is None else len(keys) // layer.head_dim
    if heads not in (layer.num_kv_heads, 0) and layer.num_heads % heads == 0:
        if "kv_heads" in chosen:
            _refuse("num_kv_heads (drafter.kv_heads)", heads, layer.num_kv_heads, weights_file(folder))
        layer = replace(layer, num_kv_heads=heads)
    return layer


def _written_fields(values: JsonMapping, folder: Path) -> JsonObject:
    """Field of the layer -> value, of the keys that a published config has."""
    layer = values.get("transformer_layer_config") or values
    refuse_window(layer, str(folder / CONFIG))
    rope = written_rope(layer, folder / CONFIG)
    try:
        written = _Written.model_validate({**layer, "rope_theta": rope.get("rope_theta")})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{first['loc'][0]}: {first['msg']}", where=str(folder / CONFIG), hint="download the file again"
        ) from error
    return written.model_dump(exclude_none=True)


def check_manifest(config: HeadSettings, folder: Path, shape: TargetShape, identity: TargetIdentity | None) -> None:
    """Compare what the head read in training with what it would read now. Without a manifest nothing is compared."""
    written = check_identity(folder, config.kind, identity)
    expected = {**config.written_settings(), **_read_by(config, shape)}
    stored = {**(written.get("settings") or {}), **(written.get("reads") or {})}
    skipped = {"numbering"} | (_OF_VISUAL if written.get("text_only") else set())
    for name, value in expected.items():
        if name in stored and name not in skipped and stored[name] != value:
            _refuse(name, stored[name], value, folder / MANIFEST)


def check_identity(folder: Path, kind: str, identity: TargetIdentity | None) -> JsonObject:
    """Compare the manifest of a head of a language model with its kind and its target; returns the manifest.

    Raises:
        UserError: it cannot be read, or names another kind, target or tokenizer.
    """
    path, written = folder / MANIFEST, read_manifest(folder)
    if written.get("method", kind) != kind:
        _refuse("method", written["method"], kind, path)
    target = object_at(written, "target") or {"path": written.get("target") or None}
    for name in ("path", "revision"):
        value, other = (identity.section if identity else {}).get(name), target.get(name)
        # A directory may have moved. Fields that the manifest lacks are not compared.
        if None in (value, other) or Path(str(value)).is_dir() or Path(str(other)).is_dir():
            continue
        if value != other:
            _refuse(f"target.{name}", other, value, path, OtherTarget)
    tokenizer, other = identity.tokenizer_sha256 if identity else None, written.get("tokenizer_sha256")
    if None not in (tokenizer, other) and tokenizer != other:
        _refuse("tokenizer_sha256", other, tokenizer, path)
    return written


def check_vocabulary(config: DrafterConfig, head: Any, target: Target, path: Path) -> None:
    """Compare the draft vocabulary of loaded weights with the one that a recipe trains.

    Raises:
        UserError: `draft_vocab_size` is another than the weights have; null: they score a part of the vocabulary.
    """
    settings = dict(config)
    if "draft_vocab_size" not in settings:
        return
    whole = target.shape.vocab_size
    held = whole if head.draft_ids is None else len(head.draft_ids)
    if held != (settings["draft_vocab_size"] or whole):
        _refuse("draft_vocab_size", held, settings["draft_vocab_size"] or f"null, all {whole} ids", path)


def _refuse(name: str, value: object, expected: object, path: Path, error: type[UserError] = UserError) -> None:
    raise error(
        f"the head was made otherwise: {name} is {value}, expected {expected}", where=str(path),
        hint="name the target and the settings that the head was trained with, or train one for these",
    )  # fmt: skip


def _check_embedding(own: Tensor | None, target: Tensor, folder: Path) -> None:
    """Published heads carry a copy of the target's rows; what was trained beside other rows would draft badly."""
    if own is None:
        return
    rows = min(len(own), len(target))
    same_width = own.shape[1:] == target.shape[1:]
    if not same_width or (own[:rows].to(target.device).float() - target[:rows].float()).abs().max() > 1e-2:
        raise UserError(
            "the head brings embeddings that are not the target's", where=str(folder),
            hint="name the target that it was trained for",
        )  # fmt: skip
