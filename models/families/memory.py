"""Bytes of a language model on one GPU while it decodes: weights and cache exactly, and what CUDA graphs keep.

What lives for a moment is counted on the meta device (`trainers/estimate/passes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..hub import config_value, has_windows, kv_shapes, own_layers, recurrent_layers
from ..parts import language_model_of, num_parameters
from .sizes import empty_model, parameter_counts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Modules of a decoder layer that a tensor parallel plan leaves whole on every rank.
_WHOLE = ("norm", "layernorm")


def weight_bytes(config: PreTrainedConfig, dtype: str, size: int = 1) -> dict[str, float]:
    """Return the bytes of each part of a model on one of the `size` ranks that share it; each holds a whole tower."""
    counts = dict(parameter_counts(config))
    if size > 1:
        counts["language_model"] = _share(config, size)
    return {part: BYTES[dtype] * count for part, count in counts.items()}


def _share(config: PreTrainedConfig, size: int) -> int:
    """Parameters of the language model, with embedding and head, on one of `size` ranks."""
    model: PreTrainedModel = empty_model(config)
    named = language_model_of(model).named_modules()
    whole = num_parameters([m for name, m in named if name.rsplit(".", 1)[-1].endswith(_WHOLE)])
    total = parameter_counts(config)["language_model"]
    return whole + (total - whole) // size


def cache_bytes(config: PreTrainedConfig, dtype: str, positions: int, size: int = 1) -> int:
    """Keys and values of the layers that attend for one row of so many positions, on one of `size` ranks, and states of
    those that recur.
    """
    text, recurs = config.get_text_config(), recurrent_layers(config.get_text_config())
    recurring, shapes = sum(recurs), kv_shapes(text)[: own_layers(text)]
    attending = [shape for number, shape in enumerate(shapes) if not (recurs and recurs[number])]
    keys = 2 * sum((heads // size) * head for heads, head in attending) * positions * BYTES[dtype]
    if has_windows(text):
        keys += 8 * positions  # where each key stands
    if not recurring:
        return keys
    key_heads, value_heads = text.linear_num_key_heads, text.linear_num_value_heads
    state = value_heads * text.linear_key_head_dim * text.linear_value_head_dim * BYTES["float32"]
    # Of the convolution: queries, keys and values.
    channels = 2 * key_heads * text.linear_key_head_dim + value_heads * text.linear_value_head_dim
    return keys + recurring * (state + (text.linear_conv_kernel_dim - 1) * channels * BYTES[dtype])


def _layer_bytes(text: PreTrainedConfig, width: int, places: int) -> float:
    """Memory of a layer's pass over this number of tokens, without its attention."""
    heads, head = text.num_attention_heads, max(head for _, head in kv_shapes(text))
    inner = config_value(text, "moe_intermediate_size") or text.intermediate_size
    # Its input and the sum, normed in float32, queries and outputs; gate, up and their product.
    return places * (text.hidden_size * (3 * width + 8) + 2 * heads * head * width + 3 * inner * width)


def graph_bytes(config: PreTrainedConfig, dtype: str, nodes: Sequence[int], lengths: Sequence[int]) -> float:
    """What CUDA graphs of a target's passes keep: what each of them returns, and one pool for what they compute with.

    Args:
        nodes: of the passes, with the root and padding.
        lengths: places that attention reads; there is a graph for each pair, if every pair comes up.
    """
    text, width = config.get_text_config(), BYTES[dtype]
    # Scores in float32, and states, of each graph.
    returned = sum(nodes) * len(lengths) * (4 * text.vocab_size + text.hidden_size * width)
    scores = 0 if dtype == "float32" else max(nodes) * text.vocab_size * width
    # Grouped heads read keys and values as they are; the mask is made of three of its kind.
    return returned + _layer_bytes(text, width, max(nodes)) + 3 * max(nodes) * max(lengths) + scores
