"""Medusa heads as vLLM 0.32 reads them (`MedusaModel`): residual blocks by level, and a copy of the LM head."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ...core.errors import UserError
from ..drafters.medusa import MedusaConfig, MedusaHead
from ..folders import check_shapes, shapes_of
from ..targets.base import language_shape
from .published_head import State
from .source import Files, Source

LM_HEAD = "lm_head.weight"
_OURS = re.compile(r"heads\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_THEIRS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def from_ours(source: Source, lm_head: Tensor) -> Files:
    """`config.json` and tensors.

    Args:
        lm_head: the target's [V,D], which all levels share.
    """
    head, text = source.head, source.target.text
    assert isinstance(head, MedusaHead)
    shape = head.shape
    values = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": shape.hidden_size,
        "vocab_size": text.vocab_size, "num_heads": shape.num_heads, "num_hidden_layers": shape.num_layers,
        "medusa_fc_bias": True, "original_lm_head": True, "torch_dtype": source.dtype,
        "max_position_embeddings": text.max_position_embeddings,
    }  # fmt: skip
    state = {_OURS.sub(r"blocks.\1.layers.\2.\3", name): value for name, value in head.state_dict().items()}
    return values, state | {LM_HEAD: lm_head.to(next(head.parameters()).dtype)}


def to_ours(values: dict[str, Any], state: State, text: Any, where: str) -> tuple[MedusaHead, MedusaConfig, list[str]]:
    """The heads, their section, and what was decided.

    Raises:
        UserError: levels have LM heads of their own, or the file is no Medusa's for this target.
    """
    own = [name for name in state if name.startswith("lm_heads.")]
    if own or values.get("truncated_vocab_size") not in (None, values.get("vocab_size")) or "token_map" in state:
        raise UserError("its levels have LM heads or a vocabulary of their own", where=where,
                        hint="Medusa heads that score with the target's LM head are read")  # fmt: skip
    notes = [f"{LM_HEAD} is left out: the target's own scores are used"] if LM_HEAD in state else []
    blocks = {_THEIRS.sub(r"heads.\1.\2.linear.\3", name): value for name, value in state.items() if name != LM_HEAD}
    for name in [name for name in blocks if name.endswith(".weight")]:  # vLLM's biases are an option
        blocks.setdefault(name.replace(".weight", ".bias"), torch.zeros_like(blocks[name][0]))
    places = [(int(found[1]), int(found[2])) for name in blocks if (found := _OURS.fullmatch(name))]
    if not places:
        raise UserError(f"no Medusa heads: the file begins with {', '.join(sorted(state)[:4])}", where=where,
                        hint="give a folder with blocks.0.layers.0.weight")  # fmt: skip
    heads, layers = (max(numbers) + 1 for numbers in zip(*places, strict=True))
    config = MedusaConfig(kind="medusa", num_heads=heads, num_layers=layers)
    head = MedusaHead(config.shape(language_shape(text)), text.vocab_size)
    check_shapes(
        shapes_of(blocks), shapes_of(head.state_dict()), where=where, what="not Medusa heads for this target: ",
        hint="give the --target that they were trained for",
    )  # fmt: skip
    head.load_state_dict(blocks)
    return head.to(next(iter(blocks.values())).dtype).eval(), config, notes
