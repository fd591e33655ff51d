"""The interface of a target to the decoding loop, the same for every model.

Letters: N nodes without the root, R rows (2 under guidance), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import UserError
from ...core.states import Taps, TargetStates, uploaded
from ..decoding.decoder import PromptRows
from ..decoding.rows import Guidance
from ..decoding.tree import Tree
from ..layer import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Prompt:
    """The prompt as the target ran it, for heads that read its states: R rows (conditional, unconditional), T places.

    Where guidance pads a row, its padding stands on the left; condition tokens that hold no token have id 0.
    """

    ids: Tensor  # [R,T] int64
    mask: Tensor  # [R,T] bool: places that later ones may attend to
    positions: Tensor  # [R,T] int64, or [3,R,T] where rotations have three coordinates (M-RoPE)
    guidance: Guidance
    modality: Tensor | None = None  # [R,T] int8; None: every place is text or a condition


@dataclass(frozen=True)
class TargetStep:
    """A target pass over N positions: guided, unwarped scores and the taps."""

    logits: Tensor  # [N,V] float32
    feature: Tensor | None = None  # [R,N,D]
    layers: dict[int, Tensor] = field(default_factory=dict)  # layer -> [R,N,D]
    attention: dict[int, Tensor] = field(default_factory=dict)  # layer -> [R,heads,T], of the prefill only
    prompt: Prompt | None = None  # of the prefill only
    received: PromptRows | None = None  # of a language model's prefill only: embeddings, with what the tower made

    def along(self, rows: Sequence[int]) -> TargetStep:
        """The step at the chosen positions (row 0 is the root)."""
        # Rows from the first on are a slice; others are looked up with one copy of their numbers.
        index: slice | Tensor = slice(len(rows))
        if list(rows) != list(range(len(rows))):
            index = uploaded(torch.tensor(list(rows)), self.logits.device)
        return TargetStep(
            self.logits[index],
            None if self.feature is None else self.feature[:, index],
            {layer: states[:, index] for layer, states in self.layers.items()},
            {},
        )


@dataclass(frozen=True)
class TargetShape:
    """The target's sizes that a drafter mirrors, known without weights: dry runs count parameters from them."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    # transformers' text config of a language model; None: an image generator.
    text: Any = None
    # The layer that heads of an image generator mirror; None: a language model.
    layer: LayerShape | None = None
    # Image generators: codes along a side, and what they are asked by (class or text).
    grid: int = 0
    condition: str = ""

    @property
    def draws_images(self) -> bool:
        """Whether the target is an image generator, not a language model."""
        return self.text is None


def language_shape(text: PreTrainedConfig) -> TargetShape:
    """Return the shape of a language model, from transformers' text config."""
    return TargetShape(text.vocab_size, text.hidden_size, text.num_hidden_layers, text=text)


class Target(Protocol):
    """Frozen. `session` is the target's own state of one request; the loop passes it back unread."""

    vocab_size: int

    @property
    def shape(self) -> TargetShape:
        """Sizes, and the text config or the layer, that heads mirror."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of inputs, and of a drafter."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[V,D] of token ids."""
        ...

    def scores(self, feature: Tensor) -> Tensor:
        """[...,D] -> [...,V] float32 of the LM head, each row's own; minus infinity where no token may come."""
        ...

    def guided(self, feature: Tensor, steps: Sequence[int]) -> Tensor:
        """[R,N,D] -> [N,V] what is decoded from; entry i scores generated token number `steps[i]`."""
        ...

    def states(self, batch: Any, taps: Taps) -> TargetStates:
        """One teacher-forced pass over a `Batch` or `CodeBatch`, without gradients."""
        ...

    def prefill(self, request: Any, taps: Taps, *, capacity: int) -> tuple[Any, TargetStep]:
        """Run the prompt (a `Request` or an `ImageRequest`); scores are those of its end, taps of all of it."""
        ...

    def verify(self, session: Any, root: int, tree: Tree) -> TargetStep:
        """One pass over the root (the last committed token) and the tree; row 0 is the root."""
        ...

    def commit(self, session: Any, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path` of the last verification."""
        ...


class ShapeAlone:
    """A target without values: the shape, the two tables, and what they give. Building and training ask no more."""

    device = torch.device("meta")

    def __init__(self, shape: Any, dtype: torch.dtype = torch.float32):
        self.shape, self.vocab_size = shape, shape.vocab_size
        tables = torch.empty(2, shape.vocab_size, shape.hidden_size, dtype=dtype, device="meta")
        self.embedding, self._head = tables

    def scores(self, feature: Tensor) -> Tensor:
        """[...,D] -> [...,V] float32."""
        return self._scores_of(slice(None), feature)

    def score_parts(self, size: int) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
        """Return the parts of `scores` as `LanguageTarget.score_parts` does."""
        return [
            (first, partial(self._scores_of, slice(first, first + size))) for first in range(0, self.vocab_size, size)
        ]

    def _scores_of(self, ids: slice, feature: Tensor) -> Tensor:
        return F.linear(feature, self._head[ids]).float()

    def guided(self, feature: Tensor, steps: Sequence[int]) -> Tensor:
        """[R,N,D] -> [N,V] float32, of an image generator's rows with a condition and without."""
        return Guidance(scale=2.0)(self.scores(feature), steps, banned=False)


def check_layers(taps: Taps, num_layers: int) -> None:
    """Raises `UserError` for layers that a target does not have."""
    behind = [layer for layer in taps.layers if layer > num_layers]
    if behind:
        raise UserError(
            f"states after layer {behind[0]} are wanted, and the target has {num_layers}",
            hint=f"name layers from 0 (the embedding) to {num_layers}",
        )


@dataclass(frozen=True)
class Verified:
    """The outcome of a cycle."""

    path: tuple[int, ...]  # accepted nodes from the root down
    tokens: tuple[int, ...]  # their tokens
    bonus: int  # the token after them, the target's own
    step: TargetStep | None = None  # what the target computed at the root and along the path
    tree: Tree | None = None
    scores: Tensor | None = None  # [N+1,V] the target's at the root and at all nodes, before the temperature
    ended: bool = False  # the bonus token is an end token that was drafted and accepted: nothing could follow it

    def until_end(self, eos_ids: Collection[int]) -> Verified:
        """Up to the first accepted end token, which takes the bonus token's place.

        TABED's released loop counts alike: a drafted end token saves no pass, for the target would have added it.
        """
        place = next((n for n, token in enumerate(self.tokens) if token in eos_ids), None)
        if place is None:
            return self
        return replace(self, path=self.path[:place], tokens=self.tokens[:place], bonus=self.tokens[place], ended=True)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens accepted, without the bonus token: one less than the cycle emits."""
        return len(self.path)
