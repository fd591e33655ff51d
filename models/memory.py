"""Bytes of a language model on one GPU while it decodes: weights, cache, and what lives for a moment.

Weights and cache (keys and values, states of recurrent layers) are exact. The rest is an estimate from the largest
tensors that live at once, right within a factor of two on tiny models (tests/models/test_memory.py).
Letters: P places of a prompt, N new places, D width, I width of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from .decoding.delta_rule import CHUNK
from .gemma import SOFT_TOKENS
from .hub import config_value, has_windows, kv_shapes, own_layers, recurrent_layers
from .sizes import empty_model, num_parameters, parameter_counts

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TILES = 32  # that a tower of single tiles reads at once
_QUERIES = 256  # places whose attention weights are computed at once
# Modules of a decoder layer that a tensor parallel plan leaves whole on every rank.
_WHOLE = ("norm", "layernorm")


@dataclass(frozen=True)
class Decoding:
    """What a model is asked to do.

    Args:
        positions: of prompt and answer together.
        chunk: places of a prompt that are run at once.
        nodes: of a tree, with its root.
        attention: whether the attention over the prompt is computed, eagerly, for a drafter to read.
        size: ranks that hold the model together.
    """

    positions: int
    chunk: int | None = None
    nodes: int = 1
    attention: bool = False
    size: int = 1


def weight_bytes(config: PreTrainedConfig, dtype: str, size: int = 1) -> dict[str, float]:
    """Of each part of a model on each rank, where `size` ranks hold it together. A tower is whole on all of them."""
    counts = dict(parameter_counts(config))
    if size > 1:
        counts["language_model"] = _share(config, size)
    return {part: BYTES[dtype] * count for part, count in counts.items()}


def _share(config: PreTrainedConfig, size: int) -> int:
    """Parameters of the language model, with embedding and head, on one of `size` ranks."""
    model: Any = empty_model(config)
    core = dict(model.model.named_children()).get("language_model", model.model)
    whole = num_parameters([m for name, m in core.named_modules() if name.rsplit(".", 1)[-1].endswith(_WHOLE)])
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
    state = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim * BYTES["float32"]
    return keys + recurring * (state + (text.linear_conv_kernel_dim - 1) * _channels(text) * BYTES[dtype])


def _channels(text: Any) -> int:
    """Of a recurrent layer's convolution: queries, keys and values."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    return 2 * keys + text.linear_num_value_heads * text.linear_value_head_dim


def _recurrent_bytes(text: Any, width: int, places: int, nodes: int) -> float:
    """Of a pass over so many places of recurrent layers: one layer's moment, and what a tree wrote in all of them."""
    if not (layers := sum(recurrent_layers(text))):
        return 0.0
    heads, key, value = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
    # Inputs and outputs of the convolution; then in float32 queries, keys, values, what is solved and its solution, and
    # who sees whom in a chunk, three times.
    moment = places * (4 * _channels(text) * width + 4 * heads * (5 * key + 5 * value + 3 * CHUNK))
    return moment + layers * nodes * (_channels(text) * width + 4 * heads * (key + value + 2))


def _head_width(text: Any) -> int:
    """Of the widest layer."""
    return max(head for _, head in kv_shapes(text))


def _embedded_width(text: Any) -> int:
    """Of what enters of a token: Gemma 4's layers have tables of their own."""
    return int(text.hidden_size + text.num_hidden_layers * (config_value(text, "hidden_size_per_layer_input") or 0))


def activation_bytes(config: PreTrainedConfig, dtype: str, asked: Decoding) -> dict[str, float]:
    """What lives for a moment: the larger of a chunk of the prompt and a tree, the attention that a drafter reads, and
    the tower's pass.
    """
    text, width = config.get_text_config(), BYTES[dtype]
    chunk = min(asked.chunk or asked.positions, asked.positions)
    places, heads, head = max(chunk, asked.nodes), text.num_attention_heads // asked.size, _head_width(text)
    # Keys and values as many as queries, where heads share them, and the mask.
    layer = _layer_bytes(text, width, places, asked.size)
    layer += 2 * heads * head * asked.positions * width + places * asked.positions
    layer = max(layer, _recurrent_bytes(text, width, places, asked.nodes))
    # The prompt's embeddings and its last states, joined of chunks.
    prompt = asked.positions * text.hidden_size * width * (2 if chunk == asked.positions else 3)
    # The layers' own: of the prompt, and of the chunk as they are projected, normed in float32 and summed.
    tables = _embedded_width(text) - text.hidden_size
    prompt += tables * (asked.positions * width + chunk * (3 * width + 4))
    if has_windows(text):
        prompt += 2 * places * asked.positions  # a second mask, and what it is made of
    # What Qwen3-VL's tower adds after its first layers; like the embeddings it stays while every method decodes.
    prompt += asked.positions * text.hidden_size * width * _num_deepstack(config)
    scores = 4 * 4 * asked.nodes * text.vocab_size  # float32: scores, warped, sorted, probabilities
    parts: dict[str, float] = {"prompt and tree": layer + prompt + scores}
    if asked.attention:
        queries = min(_QUERIES, chunk)
        # Scores and probabilities in the model's type, and a softmax in float32.
        parts["eager attention"] = heads * queries * asked.positions * (2 * width + 4)
    if (tower := _tower_bytes(config, width, asked.positions)) is not None:
        parts["vision tower's pass"] = tower
    return parts


def _layer_bytes(text: Any, width: int, places: int, size: int = 1) -> float:
    """Memory of a layer's pass over this number of tokens, without its attention."""
    heads, head = text.num_attention_heads // size, _head_width(text)
    inner = config_value(text, "moe_intermediate_size") or text.intermediate_size
    # Its input and the sum, normed in float32, queries and outputs; gate, up and their product.
    return places * (text.hidden_size * (3 * width + 8) + 2 * heads * head * width + 3 * inner // size * width)


def graph_bytes(
    config: PreTrainedConfig, dtype: str, nodes: Sequence[int], lengths: Sequence[int], taps: int = 0
) -> float:
    """What CUDA graphs of a target's passes keep: what each of them returns, and one pool for what they compute with.

    Args:
        nodes: of the passes, with the root and padding.
        lengths: places that attention reads; there is a graph for each pair, if every pair comes up.
        taps: layers whose states a pass returns.
    """
    text, width = config.get_text_config(), BYTES[dtype]
    # Scores in float32, and states, of each graph.
    returned = sum(nodes) * len(lengths) * (4 * text.vocab_size + (1 + taps) * text.hidden_size * width)
    scores = 0 if dtype == "float32" else max(nodes) * text.vocab_size * width
    # Grouped heads read keys and values as they are; the mask is made of three of its kind.
    return returned + _layer_bytes(text, width, max(nodes)) + 3 * max(nodes) * max(lengths) + scores


def _num_deepstack(config: PreTrainedConfig) -> int:
    vision = config_value(config, "vision_config")
    return 0 if vision is None else len(config_value(vision, "deepstack_visual_indexes") or ())


def _tower_bytes(config: PreTrainedConfig, width: int, positions: int) -> float | None:
    """Of the largest pass of the tower over a prompt of nothing but visual tokens; None: there is no tower."""
    vision = config_value(config, "vision_config")
    if vision is None:
        return None
    wide = int(config_value(vision, "embed_dim") or vision.hidden_size)
    inner = int(config_value(vision, "intermediate_size") or 4 * wide)
    merge = config_value(vision, "spatial_merge_size")
    if merge is not None:  # pictures whole: every patch at once
        return positions * merge**2 * (8 * wide + 2 * inner) * width
    if config_value(vision, "model_type") == "gemma4_vision":  # one picture whole
        pooled = min(positions, SOFT_TOKENS)
        seen = pooled * vision.pooling_kernel_size**2
        # Pooling weighs every patch for every token: whole numbers, and float32.
        return seen * ((8 * wide + 2 * inner) * width + 12 * pooled)
    if config_value(vision, "model_type") == "pixtral":  # one picture whole, all layers' states and a mask
        seen = min(positions * config_value(config, "spatial_merge_size", 1) ** 2, _most_patches(vision))
        return seen * ((vision.num_hidden_layers + 8) * wide + 2 * inner + seen) * width
    side, patch = _one(vision.image_size), _one(vision.patch_size)
    patches = (side // patch) ** 2 + 1
    # InternVL merges patches: a token is of 2 x 2.
    seen = positions * round(1 / config_value(config, "downsample_ratio", 1.0)) ** 2
    held = min(_TILES * patches, max(seen, patches))
    # All layers' states are returned.
    return held * ((vision.num_hidden_layers + 8) * wide + 2 * inner) * width


def _most_patches(vision: Any) -> int:
    return (_one(vision.image_size) // _one(vision.patch_size)) ** 2


def _one(size: Any) -> int:
    """Of a side in pixels, which some configs write for both sides."""
    return int(size[0] if isinstance(size, list | tuple) else size)


def peak(parts: dict[str, float]) -> float:
    """Of what lives one after the other: the tower's pass is over when the language model begins."""
    tower = parts.get("vision tower's pass", 0.0)
    return max(tower, sum(parts.values()) - tower)
