"""Hidden states and attention weights of chosen layers, kept while one of transformers' decoders runs.

Letters: R rows, N new positions, D width, P past positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from .parallel import all_heads

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


class Tapped:
    """Keeps states and attention weights of the named layers of one forward, and of no other layer.

    Weights are wanted for a prompt only; for that one pass the model computes attention eagerly. They are averaged over
    the queries as they are seen: of 80 layers of 64 heads over 25k places the whole would be gigabytes.
    """

    def __init__(self, model: LanguageModel, layers: Sequence[int], attention: Sequence[int]):
        self.model, self.layers, self.attention = model, layers, attention
        self.states: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}

    def __enter__(self) -> Tapped:
        self._hooks = []
        for layer in self.layers:
            if layer > 0:
                self._hooks.append(self.model.layers[layer - 1].register_forward_hook(self._keep_state(layer)))
        for layer in self.attention:
            attention = cast(Any, self.model.layers[layer]).self_attn
            self._hooks.append(attention.register_forward_hook(self._keep_weights(layer)))
        self._before = self.model.config._attn_implementation
        if self.attention:
            self.model.set_attn_implementation("eager")
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.attention:
            self.model.set_attn_implementation(self._before)

    def _keep_state(self, layer: int) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self.states[layer] = output if isinstance(output, Tensor) else output[0]

        return keep

    def _keep_weights(self, layer: int) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
            heads = output[1].mean(2, dtype=torch.float32)
            self.weights[layer] = all_heads(heads, self.model.config.num_attention_heads)

        return keep
