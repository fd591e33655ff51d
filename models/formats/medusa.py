"""Medusa heads as vLLM 0.32 reads them (`MedusaModel`): residual blocks by level, and a copy of the LM head."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..drafters.medusa import MedusaConfig, MedusaHead
from ..folders import State, check_shapes, shapes_of
from ..targets.base import language_shape
from .source import Files, Source

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LM_HEAD, _IDS = "lm_head.weight", "token_map"
_OURS = re.compile(r"heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_THEIRS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def from_ours(source: Source, lm_head: Tensor | None) -> Files:
    """`config.json` and tensors. `lm_head`: the target's [V,D], which all levels share; None: the heads have one of
    their own.
    """
    head, text = source.head, source.target.text
    shape, ids = head.shape, head.draft_ids
    values = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": shape.hidden_size,
        "vocab_size": text.vocab_size, "num_heads": shape.num_heads, "num_hidden_layers": shape.num_layers,
        "medusa_fc_bias": True, "original_lm_head": True, "torch_dtype": source.dtype,
        "max_position_embeddings": text.max_position_embeddings,
    }  # fmt: skip
    state = {_OURS.sub(r"blocks.\1.layers.\2.\3", name): value for name, value in head.state_dict().items()}
    if ids is not None:
        del state["d2t"]
        return values | {"truncated_vocab_size": len(ids)}, state | {_IDS: ids}
    assert lm_head is not None
    return values, state | {LM_HEAD: lm_head.to(next(head.parameters()).dtype)}


def to_ours(
    values: JsonObject, state: State, text: PreTrainedConfig, where: str
) -> tuple[MedusaHead, MedusaConfig, list[str]]:
    """The heads, their section, and what was decided. Raises `UserError`: levels have LM heads of their own, or the
    file is no Medusa's for this target.
    """
    if any(name.startswith("lm_heads.") for name in state):
        raise UserError("its levels have LM heads of their own", where=where,
                        hint="Medusa heads that share one are read")  # fmt: skip
    ids = state.get(_IDS)
    notes = [f"{LM_HEAD} is left out: the target's own scores are used"] if LM_HEAD in state and ids is None else []
    blocks = {_THEIRS.sub(r"heads.\1.\2.linear.\3", name): value for name, value in state.items()
              if name not in (LM_HEAD, _IDS)}  # fmt: skip
    for name in [name for name in blocks if name.endswith(".weight")]:  # vLLM's biases are an option
        blocks.setdefault(name.replace(".weight", ".bias"), torch.zeros_like(blocks[name][0]))
    places = [(int(match[1]), int(match[2])) for name in blocks if (match := _OURS.fullmatch(name))]
    if not places:
        raise UserError(f"no Medusa heads: the file begins with {', '.join(sorted(state)[:4])}", where=where,
                        hint="give a folder with blocks.0.layers.0.weight")  # fmt: skip
    heads, layers = (max(numbers) + 1 for numbers in zip(*places, strict=True))
    size = None
    if ids is not None:
        ids, order = ids.sort()
        size, whole = len(ids), state.get(LM_HEAD)
        if whole is None or len(whole) not in (size, text.vocab_size):
            raise UserError(f"{_IDS} names {size} ids, and {LM_HEAD} does not score them", where=where,
                            hint="restore the file, or give another head")  # fmt: skip
        blocks[LM_HEAD] = whole[order] if len(whole) == size else whole[ids]
        blocks["d2t"] = ids - torch.arange(size)
    config = MedusaConfig(kind="medusa", num_heads=heads, num_layers=layers, draft_vocab_size=size)
    head = MedusaHead(config.shape(language_shape(text)), text.vocab_size, ids)
    check_shapes(
        shapes_of(blocks), shapes_of(head.state_dict()), where=where, what="not Medusa heads for this target: ",
        hint="give the --target that they were trained for",
    )  # fmt: skip
    head.load_state_dict(blocks)
    return head.to(next(iter(blocks.values())).dtype).eval(), config, notes
