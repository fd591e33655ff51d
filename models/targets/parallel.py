"""A target over several ranks: transformers' tensor parallel plan, and what it cannot cut, said before it loads.

Each rank holds a part of every layer and its own heads of the cache; what comes out is whole on all of them. The vision
tower is whole on every rank, as transformers' plans leave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core import ranks
from ...core.errors import UserError
from ..hub import config_value, num_experts, recurrent_layers
from .table import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.distributed import DistributedConfig

KEY = "target.tensor_parallel_size"
# Of a decoder of Llama's shape for which transformers has no plan.
_LAYER = {
    "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise", "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
}  # fmt: skip
# What must be a multiple of the number of ranks, as the text config calls it.
_CUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_ranks(size: int, *, key: str = KEY) -> None:
    """Raises `UserError` unless the run has as many ranks as hold the target."""
    if size > 1 and ranks.world_size() != size:
        raise UserError(
            f"{key} is {size}, and the run has {ranks.world_size()} rank(s)",
            key=key,
            hint=f"start {size} ranks, one for each part: deepspeed --num_accelerators {size} trains/train.py ... "
            f"(or torchrun --nproc_per_node {size} trains/train.py ...)",
        )


def parallel_plan(config: PreTrainedConfig, size: int, source: str, *, key: str = KEY) -> DistributedConfig:
    """transformers' plan that cuts a model of this config for `size` ranks. Raises as `check_cut`."""
    from transformers.distributed import DistributedConfig

    text = config.get_text_config()
    check_cut(config, size, source, key=key)
    if not text_of(text).lacks_parallel_plan:
        return DistributedConfig(tp_size=size, tp_plan="auto")
    plan = {f"model.language_model.layers.*.{name}": style for name, style in _LAYER.items()}
    # A tied head is the embedding's own matrix, and cut with it.
    plan |= {"lm_head": "colwise_gather_output", "model.language_model.embed_tokens": "embedding_rowwise"}
    return DistributedConfig(tp_size=size, tp_plan=plan)


def check_cut(config: PreTrainedConfig, size: int, source: str, *, key: str = KEY) -> None:
    """Raises `UserError` where a model of this config, which is from `source`, cannot be cut for `size` ranks."""
    text = config.get_text_config()
    kind, problem = text.model_type, ""
    if config_value(config, "quantization_config") is not None:
        problem = "the weights are quantised, and ranks hold whole numbers of heads in float weights"
    elif num_experts(text):
        problem = f"{kind} is a mixture of experts, whose published weights transformers cannot cut as it reads them"
    elif recurrent_layers(text):
        problem = f"{kind} has recurrent layers, whose states are not cut over ranks"
    elif not text_of(text).lacks_parallel_plan and not config_value(text, "base_model_tp_plan"):
        problem = f"transformers has no tensor parallel plan for {kind}"
    if problem:
        hint = "leave the key out: device_map: auto spreads the target, in one process"
        raise UserError(problem, key=key, where=source, hint=hint)
    for name in _CUT:
        number = config_value(text, name)
        if number is not None and number % size:
            fits = [n for n in range(2, size) if all((config_value(text, c) or 0) % n == 0 for c in _CUT)]
            hint = f"use {' or '.join(map(str, fits))}" if fits else "use another target, or device_map: auto"
            raise UserError(
                f"{name} is {number}, which {size} ranks cannot share evenly", key=key, where=source, hint=hint
            )
