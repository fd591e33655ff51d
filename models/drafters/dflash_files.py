"""Files of DFlash drafts: weights under their published names, `config.json`, and the manifest.

A published draft has no manifest: what its `config.json` says of the block, the layers and the mask is compared.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.placement import without_storage
from ..folders import CONFIG, read_values
from ..targets.base import Target, TargetShape
from .dflash_module import DflashHead, DflashShape
from .dflash_settings import DflashSettings
from .head_files import NUMBERING, check_vocabulary, head_state, take_weights, weights_file
from .manifest import (
    MANIFEST,
    TargetIdentity,
    check_made_for,
    manifest_for,
    read_manifest,
    refuse,
)  # fmt: skip

# What a draft's `config.json` says of heads that read the token before a place.
WALKS = ("markov_rank", "markov_head_type", "markov_above", "conv_group_size", "selector_rank", "selector_top_k")
# Keys of a DSpark draft at the top of its `config.json`, as published.
DSPARK = ("sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head",
          "confidence_head_with_markov")  # fmt: skip
# Of a DFlash 2 draft, there in speculators' layout.
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# What published drafts may do and ours do not, by its key, with the value that leaves it out.
_OTHERWISE = {
    "conv_kernel_size": 2, "input_embedding_scale": 1, "output_multiplier": 1, "logit_scale": 1,
    "final_logit_softcapping": 0, "attention_value_scale": 1, "use_swa": False, "is_neox_style": True,
}  # fmt: skip
# Tables of the target that some published files repeat; the target's own are used.
_REPEATED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


def dflash_manifest(config: DflashSettings, shape: TargetShape, identity: TargetIdentity, **more: object) -> JsonObject:
    """The content of `draftsmith.json`; `more` comes from the stage."""
    reads = {
        "numbering": NUMBERING, "state": list(config.shape(shape).taps), "visual_slots": config.visual(training=True)
    }  # fmt: skip
    return manifest_for(
        config.kind, identity, tokenizer_sha256=identity.tokenizer_sha256, reads=reads,
        positions={"kind": config.positions}, **more,
    )  # fmt: skip


def load_dflash(
    config: DflashSettings, head_class: type[DflashHead], folder: Path, target: Target, dtype: torch.dtype,
    identity: TargetIdentity | None,
) -> DflashHead:  # fmt: skip
    """A trained draft, ours or a published one in its native layout, on the target's device. Raises `UserError` where a
    file is missing, or it was made for another target or with other settings.
    """
    written = check_made_for(folder, config.kind, identity, target if target.shape.draws_images else None)
    shape = config.shape(target.shape)
    held = (written.get("reads") or {}).get("visual_slots")
    # Weights that never read a picture can be used either way.
    if held is not None and held != config.visual_slots and not written.get("text_only"):
        refuse("visual_slots", held, config.visual_slots, folder / MANIFEST)
    _check_config(folder, shape)
    device = target.embedding.device
    state = {name: value for name, value in head_state(folder, device).items() if name not in _REPEATED}
    ids = state["d2t"].cpu() + torch.arange(len(state["d2t"])) if "d2t" in state else None
    if ids is None:
        state.pop("lm_head.weight", None)  # the target's, repeated
    state.pop("t2d", None)
    with without_storage(device):
        head = head_class(shape, ids)
    take_weights(head, state, weights_file(folder), device, dtype)
    if "draft_vocab_size" in config.model_fields_set:  # else decoding takes the one that is stored
        check_vocabulary(config, head, target, weights_file(folder))
    return head


def holds_dflash(folder: Path) -> bool:
    """Whether a folder, ours or a published one, holds a DFlash draft, no other block draft."""
    method = read_manifest(folder).get("method")
    if method is not None:
        return method == "dflash"
    return not any(name.startswith(("markov_head.", "candidate_selector.")) for name in head_state(folder))


def _check_config(folder: Path, shape: DflashShape) -> None:
    """Compare what no weight's shape says."""
    path = folder / CONFIG
    if not path.is_file():
        return
    values = native_values(read_values(folder), path)
    expected = settings_of(shape.to_dict(), path)
    for name, value in settings_of(values, path).items():
        if value is None and name not in ("mask_token_id", "sliding_window"):
            continue  # the file does not say
        if name in expected and value != expected[name]:
            refuse(name, value, expected[name], path)
    # Ours has the whole layer.
    of_layer = values | {"sliding_window": None}  # a block's own was compared above
    if "zeros_before" in values and (different := shape.layer.differs_from(of_layer)) is not None:
        refuse(*different, path)


def native_values(values: JsonObject, path: Path) -> JsonObject:
    """A `config.json` in the native layout, also where it is in DeepSpec's (DSpark) or speculators', whose blocks may
    be causal. Raises `UserError` for what drafts here do not compute.
    """
    merged = {**(values.get("transformer_layer_config") or {}), **values, **(values.get("dflash_config") or {})}
    anchored, window = merged.get("sample_from_anchor"), merged.get("sliding_window")
    causal = merged.get("causal") if merged.get("is_causal") is None else merged["is_causal"]
    values = _as_native(values)
    if causal is not None and values.get("is_causal") not in (causal, None):
        _unread(f"is_causal is {causal}, and its layout says otherwise (sliding_window_non_causal)", path)
    if anchored and "markov_rank" not in values:
        _unread("its pass also drafts at the last committed token (sample_from_anchor)", path)
    for name, plain in _OTHERWISE.items():
        if merged.get(name, plain) not in (plain, None):
            _unread(f"{name} is {merged[name]}, and drafts here have {plain}", path)
    if merged.get("swa_window_size", window) not in (window, None):
        _unread(f"swa_window_size is {merged['swa_window_size']}, and sliding_window {window}", path)
    return values if causal is None else values | {"is_causal": causal}


def _unread(problem: str, path: Path) -> None:
    hint = "a draft is read whose layers are all alike, with one window or none, and whose masks alone answer"
    raise UserError(problem, where=str(path), hint=hint)


def _as_native(values: JsonObject) -> JsonObject:
    kind = values.get("speculators_model_type")
    if kind is None and "markov_rank" in values and "target_layer_ids" in values:
        mask = {name: values.get(name) for name in ("mask_token_id", "target_layer_ids")}
        return values | {"dflash_config": mask, "is_causal": False, "sample_from_anchor": True}
    if kind not in ("dflash", "dspark", "dflash2"):
        return values
    layer = dict(values["transformer_layer_config"])
    windows = "sliding_attention" in (layer.get("layer_types") or ())  # layers without one see all of a block
    causal = windows and not values.get("sliding_window_non_causal", kind == "dflash2")
    ids = [one - 1 for one in values["aux_hidden_state_layer_ids"]]
    of_kind = {"dspark": DSPARK, "dflash2": DFLASH2}.get(kind, ())
    of_block = {name: values[name] for name in ("block_size", "draft_vocab_size", *of_kind) if name in values}
    mask = {"mask_token_id": values.get("mask_token_id"), "target_layer_ids": ids}
    return layer | of_block | {"dflash_config": mask, "is_causal": causal}


def settings_of(values: JsonObject, path: Path) -> JsonObject:
    """Blocks and layers by a `config.json`, ours or a published one, under the names of the settings."""
    draft = values.get("dflash_config") or {}
    taps, kinds = draft.get("target_layer_ids"), values.get("layer_types")
    merged = values | draft
    anchor = ("sample_from_anchor",) if "markov_rank" in merged else ()  # of DSpark alone
    windows = "zeros_before" in values or (kinds is not None and "sliding_attention" in kinds)
    if kinds is not None and windows and (len({*kinds}) > 1 or values.get("is_causal") is None):
        _unread("it does not say whether blocks are causal within a sliding window, or only some layers have one", path)
    return {
        "num_layers": values.get("num_hidden_layers"),
        "block_size": draft.get("block_size") or values.get("block_size"),  # newer published ones have it there alone
        "mask_token_id": draft.get("mask_token_id"),
        "taps": None if taps is None else [tap + 1 for tap in taps],
        "intermediate_size": values.get("intermediate_size"),
        "sliding_window": values.get("sliding_window") if windows else None,
        "causal": bool(values.get("is_causal")),
        **{name: merged[name] for name in (*WALKS, *anchor) if name in merged},
    }
