"""DFlash and DFlash 2 drafts in their published native layout (`z-lab/*-DFlash`, `incoai/*-DFlash2`), which vLLM reads,
and in speculators'; DSpark's in speculators', and read in DeepSpec's, in which one with Gemma's layers is written.

Ids of joined layers count what leaves a layer in `dflash_config` (one less than ours), and what enters one in
speculators' layout (as ours). Whether blocks are causal is written, since layouts have different defaults for it; in
speculators' only layers with a window can be.
Weights have our names in both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..drafters.dflash import CONFIDENCE, DflashConfig
from ..drafters.dflash2 import Dflash2Config
from ..drafters.dflash_files import DFLASH2, DSPARK, native_values, settings_of
from ..drafters.dflash_module import DflashHead
from ..drafters.dspark import DsparkConfig, DsparkShape
from ..folders import CONFIG, State
from ..hub import usual_heads
from ..layer import NORMS_HEADS
from ..targets.table import text_of
from .expressible import Engine
from .source import Files, Source, layer_settings, llama_values, proposals, window_values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BlockKind = Literal["dflash", "dspark", "dflash2"]
BLOCK_KINDS: tuple[BlockKind, ...] = get_args(BlockKind)
_SECOND = "DFlash2DraftModel"


def whole_blocks(source: Source) -> tuple[Source, list[str]]:
    """A draft as engines run it, and what the reader of the export must know. Engines' DFlash verifies whole blocks,
    and drafts the same without the confidence head.
    """
    config, head = source.config, source.head
    most = head.shape.num_drafts
    notes = [f"the engine drafts {most} tokens a cycle, as the block was trained: asked for more than {most} it drafts "
             "places that no block has, without a word"]  # fmt: skip
    if config.kind in ("dspark", "dflash2"):
        notes.append("vLLM 0.32 drafts with it in model runner V2 alone, which needs a GPU: its walk was not run")
    elif cast(DflashConfig, config).confidence is not None:
        config = config.model_copy(update={"confidence": None, "cut_below": None})
        alone = DflashHead(replace(head.shape, confidence=False), head.draft_ids).to(head.dtype)
        state = {name: value for name, value in head.state_dict().items() if not name.startswith(CONFIDENCE)}
        alone.load_state_dict(state)
        manifest = source.manifest | {"drafter": config.model_dump(mode="json")}
        source = replace(source, config=config, head=alone.eval(), manifest=manifest)
        notes.append("its confidence head is left out: the engine verifies whole blocks")
    if isinstance(head.shape, DsparkShape) and head.shape.markov_head_type != "vanilla":
        notes.append(f"vLLM 0.32 loads no {head.shape.markov_head_type} Markov head")
    if head.shape.causal:
        notes.append("its blocks are causal, which was run in no engine here")
    if config.kind == "dflash" and head.shape.num_layers > 1:
        notes.append("on a CPU vLLM 0.32 norms the keys of every layer by the first layer's weight; GPUs are right")
    return source, notes


def from_ours(engine: Engine, source: Source, copied: Tensor | None = None) -> Files:
    """`config.json` and tensors. `copied`: the target's table [V,D], which a draft with Gemma's layers brings."""
    shape, head = source.head.shape, source.head
    vocabulary = shape.layer.vocab_size if head.draft_ids is None else len(head.draft_ids)
    state = dict(head.state_dict())
    if copied is not None:
        return _of_target(source), state | {"embed_tokens.weight": copied, "lm_head.weight": copied.clone()}
    if engine != "speculators":
        return _native(source, vocabulary), state
    if head.draft_ids is not None:  # the package's own files name them in both directions
        state["t2d"] = torch.zeros(shape.layer.vocab_size, dtype=torch.bool).index_fill(0, head.draft_ids.cpu(), True)
    return _speculators(source, vocabulary), state


def _layers(source: Source) -> JsonObject:
    """The config of the draft's layers, which norm heads, whatever the target is."""
    shape = source.head.shape
    values = llama_values(shape.layer, source.target.text) | {
        "model_type": NORMS_HEADS,
        "num_hidden_layers": shape.num_layers,
    }
    del values["mlp_bias"]
    if shape.sliding_window is None:
        return values | {"layer_types": ["full_attention"] * shape.num_layers}
    return values | window_values(shape.sliding_window, shape.num_layers)


def _native(source: Source, vocabulary: int) -> JsonObject:
    shape = source.head.shape
    block = shape.to_dict()["dflash_config"]
    if source.config.kind == "dflash2":  # z-lab's code looks for it there first
        block["block_size"] = shape.block_size
    return {
        "architectures": [{"dflash": "DFlashDraftModel", "dflash2": _SECOND}[source.config.kind]],
        **_layers(source),
        "draft_vocab_size": vocabulary,
        "block_size": shape.block_size,
        "num_target_layers": source.target.shape.num_layers,
        "is_causal": shape.causal,
        "dflash_config": block,
        "torch_dtype": source.dtype,
    }


def _of_target(source: Source) -> JsonObject:
    """The target's text config with what DeepSpec's Gemma4DSparkModel reads, its taps counted one less."""
    shape, layer, values = source.head.shape, source.head.shape.layer, source.target.text.to_dict()
    # Widths of layers by their kind: all layers are of one.
    values = {name: value for name, value in values.items() if name not in ("per_layer_config", "_name_or_path")}
    return values | {
        "architectures": [text_of(source.target.text).dspark],
        "intermediate_size": layer.intermediate_size,
        **dict.fromkeys(("head_dim", "global_head_dim"), layer.head_dim),
        **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), layer.num_kv_heads),
        **dict.fromkeys(("attention_bias", "use_double_wide_mlp", "enable_moe_block", "tie_word_embeddings"), False),
        **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0),
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": layer.norm_eps,
        "rope_parameters": {"full_attention": {**(layer.rope_scaling or {}), "rope_theta": layer.rope_theta}},
        "num_hidden_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_target_layers": source.target.shape.num_layers,
        "target_layer_ids": shape.to_dict()["dflash_config"]["target_layer_ids"],
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        **{name: shape.to_dict()[name] for name in DSPARK if name != "enable_confidence_head"},
        "enable_confidence_head": shape.confidence,
        "dtype": source.dtype,
    }


def _speculators(source: Source, vocabulary: int) -> JsonObject:
    shape, layer = source.head.shape, _layers(source)
    del layer["rope_scaling"]
    kind, of_kind = source.config.kind, JsonObject(sample_from_anchor=shape.sample_from_anchor)
    if kind == "dflash2":
        of_kind |= {name: shape.to_dict()["dflash_config"][name] for name in DFLASH2}
    if isinstance(shape, DsparkShape):
        of_kind |= {name: shape.to_dict()[name] for name in DSPARK if name != "enable_confidence_head"}
        of_kind["enable_confidence_head"] = shape.confidence
    return {
        "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "dflash2": _SECOND}[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": vocabulary,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": list(shape.taps),
        "mask_token_id": shape.mask_token_id,
        "target_hidden_size": None,
        # Left out, the package takes a window for causal, and vLLM 0.32 every layer.
        "sliding_window_non_causal": not shape.causal,
        **of_kind,
        "tie_word_embeddings": False,
        "torch_dtype": source.dtype,
        "speculators_config": proposals(kind, shape.num_drafts, source.target),
    }


def to_ours(
    kind: BlockKind, values: JsonObject, state: State, text: PreTrainedConfig, folder: Path
) -> tuple[DflashConfig, JsonObject, list[str]]:
    """The config, the recipe's section, and what was decided. Raises `UserError`: no such draft, or one that runs
    otherwise.
    """
    where, path = str(folder), folder / CONFIG
    values = native_values(values, path)
    if "hidden_norm.weight" not in state or not values.get("dflash_config"):
        raise UserError("no block draft: hidden_norm.weight or dflash_config is missing", where=where,
                        hint="give --as the kind that it was published as")  # fmt: skip
    if (other := _held(values, state)) != kind:
        raise UserError(f"the folder holds a draft of kind {other}, and {kind} is asked for", where=where,
                        hint=f"read it as {other}: --as {other}")  # fmt: skip
    heads, width = text.num_attention_heads, usual_heads(text)[1]
    for name, ours in {"hidden_size": text.hidden_size, "num_attention_heads": heads, "head_dim": width}.items():
        if values.get(name) not in (ours, None):
            raise UserError(f"{name} is {values[name]}, the target's {ours}", where=where,
                            hint="a draft with the target's own width and heads is read: name its target")  # fmt: skip
    settings: JsonObject = {"kind": kind}
    if any(name.startswith(CONFIDENCE) for name in state):
        reads = values.get("confidence_head_with_markov", False)
        settings["confidence"] = {"with_markov": reads} if kind == "dspark" else {}
    settings |= {name: value for name, value in settings_of(values, path).items() if value is not None}
    of_layer, sections = layer_settings(values, text, where)
    if sections:
        raise UserError("its positions turn by three (mrope_section)", where=where, hint="such drafts are not read")
    notes = [f"layers {values['dflash_config']['target_layer_ids']} count what leaves a layer: {settings['taps']} here"]
    if not settings["causal"]:
        del settings["causal"]
    if "d2t" in state:
        settings["draft_vocab_size"] = len(state["d2t"])
    settings |= of_layer
    if settings.get("intermediate_size") == text.intermediate_size:
        del settings["intermediate_size"]
    if values.get("num_key_value_heads") not in (None, usual_heads(text)[0]):
        settings["kv_heads"] = "mha"  # compared with the weights' shapes when they are read
    made = {"dflash": DflashConfig, "dspark": DsparkConfig, "dflash2": Dflash2Config}[kind]
    return made.model_validate(settings), settings, notes


def _held(values: JsonObject, state: State) -> BlockKind:
    if "markov_rank" in values:
        return "dspark"
    return "dflash2" if any(name.startswith("candidate_selector.") for name in state) else "dflash"
