"""DFlash drafts as engines read them: the published native layout for vLLM, and speculators'.

Ids of joined layers count what leaves a layer in `dflash_config` (one less than ours), and what enters one in
speculators' layout (as ours). Blocks are bidirectional: where a layout has a default for that, it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.files import checked
from ...core.pages import page
from ..drafters.dflash import DflashConfig
from ..drafters.dflash_module import DflashHead
from ..drafters.head_files import head_state
from ..drafters.manifest import MANIFEST, read_manifest
from ..mistral import reads_whole
from ..qwen import num_deepstack
from .eagle import Files, llama_values, proposals
from .rules import UNCOMPARED, Engine, Prompts
from .source import Target

# Targets whose classes hand states to a DFlash draft in vLLM.
_SERVED = ("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class DflashSource:
    """A trained draft with its settings and target."""

    folder: Path
    config: DflashConfig
    head: DflashHead
    target: Target


def read_dflash(folder: Path, target: Target) -> DflashSource:
    """A draft of ours, on the CPU in the precision that it is stored in.

    Raises:
        UserError: a file is missing, or the draft was made for another target.
    """
    written, hint = read_manifest(folder).get("drafter"), "train it with this version, or import it again"
    config = checked(written, DflashConfig, where=f"{folder / MANIFEST}, drafter", hint=hint)
    stored = next(value.dtype for value in head_state(folder).values() if value.is_floating_point())
    beside: Any = SimpleNamespace(shape=target.shape, embedding=torch.empty(0, target.text.hidden_size))
    return DflashSource(folder, config, config.read(folder, beside, stored, None).eval(), target)


def without_confidence(source: DflashSource) -> DflashSource:
    """The draft alone: engines' DFlash verifies whole blocks, and drafts the same without the confidence head."""
    config = source.config.model_copy(update={"confidence": None, "cut_below": None})
    ids = source.head.draft_ids
    head = DflashHead(replace(source.head.shape, confidence=False), ids).to(source.head.dtype)
    state = source.head.state_dict()
    head.load_state_dict({name: value for name, value in state.items() if not name.startswith("confidence_head.")})
    return replace(source, config=config, head=head.eval())


def check_dflash(engine: Engine, source: DflashSource, prompts: Prompts) -> None:
    """Raises `UserError` with every reason why an engine would run something else than this draft."""
    reasons = _reasons(engine, source)
    pictures = _pictures(source) if source.target.sees and prompts == "all" and not reasons else []
    if reasons or pictures:
        raise UserError(
            f"--to {engine} cannot express this draft:\n" + "\n".join(f"  - {why}" for why in reasons + pictures),
            where=str(source.folder),
            hint="on text alone it can: --prompts text, if it will only be asked without pictures"
            if not reasons
            else f"train it with settings that the engine knows ({page('exports.md')}), or decode with our own loop",
        )


def _reasons(engine: Engine, source: DflashSource) -> list[str]:
    if engine not in ("vllm", "speculators"):
        return ["it has no layout for DFlash drafts that was read here"]
    config, shape, reasons = source.config, source.head.shape, []
    model = source.target.config.model_type
    if model not in _SERVED:
        reasons.append(f"its class of {model} is not known to hand states to a DFlash draft")
    if shape.mask_token_id is None:
        reasons.append("its mask is a trained vector, and the engine embeds an id: drafter.mask_token_id")
    if shape.taps[-1] == source.target.shape.num_layers:
        reasons.append(f"it joins the state after the last layer ({shape.taps[-1]}), and engines tap what enters one")
    if config.positions != "flat":
        reasons.append("engines count every token of the prompt: drafter.positions: flat")
    return reasons


def _pictures(source: DflashSource) -> list[str]:
    if source.config.visual(training=False) == "none":
        return ["it sees no state at a picture (text-only window), and the engine shows it all of them"]
    if reads_whole(source.target.config):
        return [UNCOMPARED]
    added, first = num_deepstack(source.target.config), source.head.shape.taps[0]
    if first <= added:
        return [
            f"it joins layer {first} as that hands it over, and Qwen3-VL adds to each of its first {added} layers what "
            "its tower saw: what an engine taps there is something else (drafter.taps above it)"
        ]
    return []


def lay_out_dflash(engine: Engine, source: DflashSource) -> Files:
    """`config.json` and tensors of a draft that `check_dflash` has let through."""
    return _speculators(source) if engine == "speculators" else (_native(source), _state(source))


def _state(source: DflashSource) -> dict[str, Tensor]:
    return dict(source.head.state_dict())


def _layers(source: DflashSource) -> dict[str, Any]:
    """Qwen3's config of the draft's layers, whatever the target is."""
    shape = source.head.shape
    values = llama_values(shape.layer, source.target.text) | {
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
    }
    del values["mlp_bias"]
    if shape.sliding_window is None:
        return values | {"layer_types": ["full_attention"] * shape.num_layers}
    return values | {
        "layer_types": ["sliding_attention"] * shape.num_layers,
        "sliding_window": shape.sliding_window,
        "use_sliding_window": True,
    }


def _vocabulary(head: DflashHead) -> int:
    """Number of tokens that the draft can propose."""
    return head.shape.layer.vocab_size if head.draft_ids is None else len(head.draft_ids)


def _native(source: DflashSource) -> dict[str, Any]:
    shape = source.head.shape
    return {
        "architectures": ["DFlashDraftModel"],
        **_layers(source),
        "draft_vocab_size": _vocabulary(source.head),
        "block_size": shape.block_size,
        "num_target_layers": source.target.shape.num_layers,
        "is_causal": False,
        "dflash_config": shape.to_dict()["dflash_config"],
        "torch_dtype": str(source.head.dtype).removeprefix("torch."),
    }


def _speculators(source: DflashSource) -> Files:
    shape = source.head.shape
    layer = _layers(source)
    del layer["rope_scaling"]
    values = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": _vocabulary(source.head),
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": list(shape.taps),
        "mask_token_id": shape.mask_token_id,
        "target_hidden_size": None,
        # Left out, the package takes a window for causal, and vLLM 0.32 every layer.
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(source.head.dtype).removeprefix("torch."),
        "speculators_config": proposals("dflash", shape.num_masks, source.target),
    }
    return values, _state(source)
