"""Hidden states and attention weights of chosen layers, kept while one of transformers' decoders runs.

Letters: R rows, N new positions, D width, P past positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from .end_attention import all_heads

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LanguageModel(Protocol):
    """What the cached forward reads of transformers' decoders (`LlamaModel` and its likes)."""

    config: PreTrainedConfig
    layers: Sequence[nn.Module]

    def get_input_embeddings(self) -> nn.Embedding:
        """The table that turns token ids into embeddings; its weight is [V,D]."""
        ...

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Switch to another attention kernel of transformers: "eager" is the one that returns weights."""
        ...

    def __call__(self, **inputs: Any) -> Any: ...


@contextmanager
def tapped(
    model: LanguageModel, layers: Sequence[int], attention: Sequence[int]
) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Within it, keeps states and attention weights of the named layers of one forward, and of no other layer.

    Weights are wanted for a prompt only; for that one pass the model computes attention eagerly. They are averaged over
    the queries as they are seen: of 80 layers of 64 heads over 25k places the whole would be gigabytes.
    """
    states, weights = dict[int, Tensor](), dict[int, Tensor]()

    def keep_state(layer: int, module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states[layer] = output if isinstance(output, Tensor) else output[0]

    def keep_weights(layer: int, module: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        heads = output[1].mean(2, dtype=torch.float32)
        weights[layer] = all_heads(heads, model.config.num_attention_heads)

    hooks = [model.layers[layer - 1].register_forward_hook(partial(keep_state, layer)) for layer in layers if layer > 0]
    for layer in attention:
        module = cast(Any, model.layers[layer]).self_attn
        hooks.append(module.register_forward_hook(partial(keep_weights, layer)))
    before = model.config._attn_implementation
    if attention:
        model.set_attn_implementation("eager")
    try:
        yield states, weights
    finally:
        for hook in hooks:
            hook.remove()
        if attention:
            model.set_attn_implementation(before)
