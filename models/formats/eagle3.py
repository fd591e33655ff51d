"""EAGLE-3 and P-EAGLE: heads with an LM head of their own that join three layers, in every layout and back.

Ids of tapped layers count what enters a layer at the top level (vLLM, speculators, ours), and what leaves it in
SGLang's `eagle_config`: one less. The layer is `midlayer` (ours, EAGLE's, vLLM's, SGLang's) or `layers.0` (others).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..drafters.eagle3 import OPTIONS, Eagle3Config, Eagle3Head
from ..drafters.head_files import no_lm_head
from ..folders import State
from ..layer import NORMS_HEADS
from ..targets.base import language_shape
from .expressible import Engine
from .source import CHAIN, Files, Source, llama_values, proposals, window_values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYER, _LAYER_OF_SPECULATORS = "midlayer.", "layers.0."
TAPS, _OF_SGLANG = "eagle_aux_hidden_state_layer_ids", "eagle_config"
# The id of P-EAGLE's mask: vLLM's key, speculators', and that of parallel draft models.
_MASKS = ("pard_token", "mask_token_id", "ptd_token_id")
# Variants with other layers: the keys that say so, in files of any origin.
_VARIANTS = ("use_aux_norm", "use_sp_ulysses")


def from_ours(engine: Engine, source: Source) -> Files:
    """`config.json` and tensors."""
    head, text, config = cast(Eagle3Head, source.head), source.target.text, cast(Eagle3Config, source.config)
    taps, layers, state = config.layers_of(source.target.shape), text.num_hidden_layers, dict(head.state_dict())
    mask, parallel = dict(config).get("mask_token_id"), dict(config).get("parallel_tokens")
    vocabulary, layer = len(cast(Tensor, head.d2t)), llama_values(head.shape, text)
    norms = {"norm_before_residual": config.norm_before_residual}
    norms |= {"norm_before_fc": True} if config.norm_before_fc else {}
    if config.fc_norm or config.norm_output:  # EAGLE-3.1's
        norms |= {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    norms |= {"embed_requires_grad": True} if config.own_embedding else {}
    if head.shape.sliding_window is not None:
        layer |= window_values(head.shape.sliding_window, 1)
    if head.shape.qk_rms_norm:
        layer |= {"model_type": NORMS_HEADS}
        del layer["mlp_bias"]
    if engine in ("vllm", "speculators") and vocabulary == head.shape.vocab_size:
        # vLLM has no place for the two tables of ids where the draft has all of the target's.
        state = {name: value for name, value in state.items() if name not in ("d2t", "t2d")}
    if engine == "speculators":
        del layer["rope_scaling"]
        values = {
            "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
            "speculators_model_type": config.kind,
            "speculators_version": "0.9.0",
            "draft_vocab_size": vocabulary,
            "norm_before_fc": False,
            "embed_requires_grad": False,
            # vLLM takes norm_before_residual for true where it is not written, and the package for false.
            **norms,
            "target_hidden_size": None,
            TAPS: list(taps),
            "transformer_layer_config": layer,
            "tie_word_embeddings": False,
            "torch_dtype": source.dtype,
            "speculators_config": proposals(config.kind, parallel or CHAIN, source.target),
        }
        state = {name.replace(LAYER, _LAYER_OF_SPECULATORS): value for name, value in state.items()}
        return values if mask is None else values | {_MASKS[1]: mask}, state
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        "draft_vocab_size": vocabulary,
        "target_hidden_size": text.hidden_size,
        "target_model_type": source.target.config.model_type,
        **norms,
        "torch_dtype": source.dtype,
    }
    if engine == "vllm":
        values[TAPS] = list(taps)
        values |= {} if mask is None else {_MASKS[0]: mask}
    elif engine == "sglang" and taps != (2, layers // 2, layers - 3):
        # Its default is the same layers, and needs no ids that another engine would read differently.
        values[_OF_SGLANG] = {TAPS: [tap - 1 for tap in taps]}
    return values, state


def lost_elsewhere(source: Source) -> list[str]:
    """Notes on what converters of the export to other programs leave out without an error (tried in 2026)."""
    config, shape = cast(Eagle3Config, source.config), source.target.shape
    taps, layers = config.layers_of(shape), shape.num_layers
    usual = (2, layers // 2, layers - 3)  # which a target of few layers cannot have
    other = f"it joins layers {list(taps)}: a converter that writes none (OpenVINO's) has the engine join {list(usual)}"
    notes = [] if taps == usual else [other]
    if source.head.norm_output:
        notes.append("llama.cpp's converter reads it without norm_output: its chains are others after the first token")
    if (window := source.head.shape.sliding_window) is not None:
        notes.append(f"it sees the last {window} inputs alone: an engine that does not read layer_types shows it all")
    return notes


def to_ours(
    values: JsonObject, state: State, text: PreTrainedConfig, kind: str, where: str, notes: list[str]
) -> tuple[JsonObject, State]:
    """The settings that config and weights show, and the weights, with both tables of ids. `notes`: takes what was
    decided. Raises `UserError`: no file says how the head runs, or files contradict each other.
    """
    taps = _taps(values, where, notes)
    settings: JsonObject = {} if taps is None else {"taps": taps}
    settings |= {name: True for name in OPTIONS if values.get(name)}
    settings |= {"own_embedding": True} if "embed_tokens.weight" in state else {}
    settings |= {"qk_norm": True} if f"{LAYER}self_attn.q_norm.weight" in state else {}
    if taps is None:
        taken = Eagle3Config(kind="eagle3").layers_of(language_shape(text))
        notes.append(f"names no layers: {taken}, the default of every engine, are taken")
    rows = text.vocab_size
    if "lm_head.weight" not in state:
        is_whole = len(state["d2t"]) == rows if "d2t" in state else values.get("draft_vocab_size", 0) in (None, rows)
        hint = no_lm_head(rows) if is_whole else "EAGLE-3 brings its own; is this EAGLE-1?"
        raise UserError("lm_head.weight is missing", where=where, hint=hint)
    state |= _vocabulary(state, rows, where, notes)
    if (size := len(state["lm_head.weight"])) != rows:
        settings["draft_vocab_size"] = size
    if kind == "peagle":
        mask = next((values[name] for name in _MASKS if name in values), None)
        if mask is None:
            raise UserError("no id of a mask: pard_token or mask_token_id is missing", where=where,
                            hint="fetch its config.json again; is it EAGLE-3?")  # fmt: skip
        settings["mask_token_id"] = int(mask)
        methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
        if count := methods[0].get("speculative_tokens"):
            settings["parallel_tokens"] = int(count)
    return settings, state


def refuse_variants(values: JsonObject, state: State, where: str) -> None:
    """Raises `UserError` for EAGLE-3 with other norms or another width."""
    variants = [name for name in _VARIANTS if values.get(name)] + [
        name for name in state
        if (name.startswith("fc_norm") and not values.get("fc_norm"))
        or (name.startswith("input_norm") and not values.get("norm_before_fc"))
    ]  # fmt: skip
    if variants:
        raise UserError(f"a variant of EAGLE-3 with other norms ({variants[0]})", where=where, hint="it is not read")
    if values.get("norm_before_residual") is None and "speculators_model_type" in values:
        raise UserError(
            "norm_before_residual is not written: vLLM takes it for true, the speculators package for false",
            where=where, hint="write into its config.json which it was trained with",
        )  # fmt: skip
    width = (values.get("transformer_layer_config") or values)["hidden_size"]
    if values.get("target_hidden_size") not in (None, width):
        raise UserError("it is narrower than its target (target_hidden_size)", where=where, hint="it is not read")


def _taps(values: JsonObject, where: str, notes: list[str]) -> tuple[int, int, int] | None:
    nested = values.get(_OF_SGLANG) or {}
    # vLLM reads them under this name, too, and counts them as at the top level.
    top = values.get(TAPS) or nested.get("layer_ids")
    inner = nested.get(TAPS)
    if inner is not None:
        raised = [one + 1 for one in inner]
        if top is not None and list(top) != raised:
            raise UserError(
                f"eagle_aux_hidden_state_layer_ids are {list(top)}, and {list(inner)} in eagle_config, which count one "
                "less: they name different layers", where=where, hint="remove the wrong one from its config.json",
            )  # fmt: skip
        notes.append(f"layers {list(inner)} of eagle_config count what leaves a layer: {raised} here")
        top = raised
    if top is None:
        return None
    if len(top) != 3:
        raise UserError(f"it joins {len(top)} layers, {list(top)}", where=where, hint="three are what is read")
    return tuple(sorted(top))  # type: ignore[return-value]


def _vocabulary(state: State, rows: int, where: str, notes: list[str]) -> State:
    """d2t as an offset and t2d as a mask. Raises `UserError` where they contradict each other or the target."""
    size = len(state["lm_head.weight"])
    offset = state.get("d2t")
    if offset is None:
        if size != rows:
            raise UserError(f"{size} draft tokens and no d2t to say which of the target's {rows}", where=where,
                            hint="fetch the whole checkpoint")  # fmt: skip
        offset = torch.zeros(size, dtype=torch.int64)
    offset, known = offset.long(), state.get("t2d")
    ids = offset + torch.arange(size)
    if known is not None and not _names(ids, known, rows) and _names(offset, known, rows):
        ids = offset
        notes.append("d2t held the target's ids themselves; engines read offsets, and would propose other tokens")
    if len(ids) != size or not bool(((ids >= 0) & (ids < rows)).all()) or len(ids.unique()) != size:
        raise UserError(f"d2t leads out of the target's {rows} ids, or twice to one", where=where,
                        hint="name the target that it was trained for")  # fmt: skip
    if known is not None and not _names(ids, known, rows):
        raise UserError("d2t and t2d name different tokens", where=where, hint="fetch the checkpoint again")
    if not bool((ids.diff() > 0).all()):
        order = ids.argsort()
        ids, state["lm_head.weight"] = ids[order], state["lm_head.weight"][order]
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": mask, "lm_head.weight": state["lm_head.weight"]}


def _names(ids: Tensor, known: Tensor, rows: int) -> bool:
    inside = bool(((ids >= 0) & (ids < min(rows, len(known)))).all())
    return inside and int(known.sum()) == len(ids) and bool(known.bool()[ids].all())
