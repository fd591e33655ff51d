"""Bytes that a training step holds for its backward pass: what layers keep of each position, and what the loss keeps.

Counted by hand from the operations of a Llama's layer and a head's. torch saves at most a fifth more or less than that
on small models (tests/models/test_training_memory.py). Kernels' workspaces and the allocator's gaps are not counted.
Letters: D width, I width of the MLP, V vocabulary, W bytes of a number in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from .hub import config_value, kv_shapes
from .layer import LayerShape
from .memory import BYTES

SUPERVISED = 0.25  # of the positions of a conversation, about


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of a rank trains a drafter on.

    Args:
        rows: samples.
        positions: of all rows, padding and an image generator's prompts included.
        width: bytes of a number in training (W).
        held: bytes of a number of the target's states.
        codes: of all rows, of an image generator; 0 of a language model.
        objective: the stage's terms of a head's loss; None: the drafter's own.
    """

    rows: int
    positions: int
    width: int
    held: int
    codes: int = 0
    objective: Any = None


@dataclass(frozen=True)
class Block:
    """One decoder layer's sizes.

    Args:
        queries, keys: widths of all heads together.
        norms: of the width of the residual stream.
    """

    width: int
    inner: int
    queries: int
    keys: int
    norms: int = 2

    @classmethod
    def of_config(cls, text: Any) -> Block:
        """Of transformers' config of a language model; of experts those that a token runs through."""
        heads = text.num_attention_heads
        groups, head = max(kv_shapes(text), key=lambda shape: shape[0] * shape[1])
        experts = config_value(text, "moe_intermediate_size")
        inner = text.intermediate_size if experts is None else experts * text.num_experts_per_tok
        return cls(text.hidden_size, inner, heads * head, groups * head)

    @classmethod
    def of_layer(cls, shape: LayerShape) -> Block:
        """Of a head's layer."""
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return cls(shape.hidden_size, shape.intermediate_size, queries, keys, 1 + shape.input_norm)

    def trained(self, width: int) -> float:
        """Bytes of a position in a layer whose weights learn; `width` is W."""
        # A norm keeps its input in float32, and what it made before and after the gain.
        norms = self.norms * self.width * (4 + 2 * width) + (2 - self.norms) * self.width * width
        # Queries and keys turned, values, what attention made, twice; gate, up, their product's two factors.
        return norms + width * (3 * self.queries + 2 * self.keys + 4 * self.inner)

    def passed_through(self, width: int) -> float:
        """Bytes of a position in a frozen layer that a gradient runs through: products keep no input."""
        return self.norms * self.width * 4 + width * (2 * self.queries + 2 * self.keys + 3 * self.inner)


def decoder_activations(
    text: PreTrainedConfig, positions: int, width: int, *, learns: bool, checkpointing: bool
) -> float:
    """Bytes of a language model's layers in one micro-batch of so many positions.

    Args:
        learns: its weights are trained; else a gradient runs through it to a projector.
        checkpointing: layers run again in the backward pass, one at a time.
    """
    block, layers = Block.of_config(text), text.num_hidden_layers
    each = block.trained(width) if learns else block.passed_through(width)
    kept = each + layers * block.width * width if checkpointing else layers * each
    return positions * (kept + 3 * block.width * width)  # the embeddings, the last norm


def cross_entropy_bytes(vocabulary: int, tokens: float, width: int) -> float:
    """Of the scores of so many supervised tokens: as they come, in float32, their logarithms, and their gradient."""
    return tokens * vocabulary * (width + 12)


def tower_activations(vision: Any, patches: int, width: int) -> float:
    """Bytes of a vision tower that trains, which reads so many patches in a micro-batch."""
    wide = int(config_value(vision, "embed_dim") or vision.hidden_size)
    inner = int(config_value(vision, "intermediate_size") or 4 * wide)
    layers = int(config_value(vision, "num_hidden_layers") or vision.depth)
    return patches * width * layers * (9 * wide + 3 * inner)


def head_activations(shape: LayerShape, inputs: int, passes: int, width: int) -> float:
    """Bytes of a hidden-state head in one micro-batch: its layer, and embedding and state beside each other below it.

    Args:
        inputs: of all rows.
        passes: over its own states, the first one included.
    """
    return inputs * passes * (Block.of_layer(shape).trained(width) + 2 * shape.hidden_size * width)


def head_beside(
    shape: LayerShape, inputs: int, passes: int, width: int, *, states: int, target_width: int, chunk: int
) -> float:
    """Bytes that live beside those: the target's states, what the passes made, and the scores of one chunk.

    Args:
        states: of the target at each input: the feature and the layers that are read.
        target_width: bytes of a number of them.
        chunk: inputs whose vocabulary is projected at once.
    """
    each = shape.hidden_size * (states * target_width + 3 * passes * width)
    return inputs * each + 40.0 * min(chunk, inputs) * passes * shape.vocab_size


def head_memory(layer: LayerShape, micro: MicroBatch, *, passes: int, states: int, chunk: int) -> dict[str, float]:
    """Of a hidden-state head of a language model: both of these, as a dry run names them."""
    return {
        "activations": head_activations(layer, micro.positions, passes, micro.width),
        "states and scores": head_beside(
            layer, micro.positions, passes, micro.width, states=states, target_width=micro.held, chunk=chunk
        ),
    }


def dflash_activations(
    shape: LayerShape, layers: int, joined: int, context: int, places: int, width: int, *, chunks: int = 1
) -> float:
    """Bytes of a DFlash draft in one micro-batch.

    Args:
        joined: states of the target that fc joins.
        context: tokens of all rows.
        places: of all blocks of all rows.
        chunks: parts of the blocks whose attention is computed at once; each copies the keys that it sees.
    """
    block = Block.of_layer(shape)
    # fc's input, the norm of what it makes, and that.
    held = context * shape.hidden_size * (joined * width + 4 + 2 * width)
    # Of the states a layer keeps its input beside the block's, keys before and after their norm, turned, and values.
    each = context * (shape.hidden_size * width + block.keys * (4 + 3 * width + 2 * width * chunks))
    # Of a block, what other layers keep, its input a second time, and the norms of queries and keys.
    own = block.trained(width) + width * shape.hidden_size + (block.queries + block.keys) * (4 + width)
    return held + layers * (each + places * own)


def dflash_beside(
    shape: LayerShape, joined: int, context: int, places: int, width: int, *, target_width: int, chunk: int
) -> float:
    """Bytes that live beside those: the target's states and feature, the blocks' outputs, the scores of one chunk."""
    states = context * shape.hidden_size * (joined + 1) * target_width
    return states + 3.0 * places * shape.hidden_size * width + 40.0 * min(chunk, places) * shape.vocab_size


def image_head_activations(shape: LayerShape, positions: int, codes: int, width: int) -> float:
    """Bytes of an image generator's EAGLE head: its layer at so many positions, and the scores of so many codes."""
    return head_activations(shape, positions, 1, width) + code_scores(shape.vocab_size, codes)


def medusa_activations(
    states: int, levels: int, layers: int, codes: int, vocabulary: int, width: int, *, compares: bool
) -> float:
    """Bytes of Medusa's heads over so many codes.

    Args:
        states: width of the target's states.
        compares: distributions, not one token with its scores (`token_divergence: ce`).
    """
    blocks = codes * states * width * (1 + levels * (2 * layers - 1))
    return blocks + levels * code_scores(vocabulary, codes, compares=compares)


def code_scores(vocabulary: int, codes: int, *, compares: bool = True) -> float:
    """Bytes that the loss of so many codes keeps of their scores, which are not taken in chunks: the logarithms, and
    where distributions are compared the target's and masks.
    """
    return (2.2 if compares else 1.0) * 4 * codes * vocabulary


def code_scores_beside(vocabulary: int, codes: int) -> float:
    """Bytes that live beside those for a moment: the target's scores, the head's, and a gradient."""
    return 3.0 * 4 * codes * vocabulary


def image_head_memory(activations: float, vocabulary: int, width: int, codes: int) -> dict[str, float]:
    """Of a head of an image generator, as a dry run names it.

    Args:
        width: of the target's states, which are kept in float32.
    """
    return {
        "activations": activations,
        "scores": code_scores_beside(vocabulary, codes),
        "states": codes * width * BYTES["float32"],
    }
