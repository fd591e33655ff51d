"""What a target offers the decoding loop, whatever model it is.

Letters: N nodes without the root, R rows (2 under guidance), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from ...core.nouns import Batch
from ...core.states import StatesBatch, StatesWanted
from ..decoding.rows import Guidance
from ..decoding.tree import Tree


@dataclass(frozen=True)
class Taps:
    """What a drafter wants to see of its target; the target serves no more than that."""

    layers: tuple[int, ...] = ()  # states after so many decoder layers, 0 is the embedding
    feature: bool = False  # the post-final-norm state that feeds the LM head
    prefill_attention: tuple[int, ...] = ()  # layers whose attention over the prompt is wanted (SpecVLM)
    # Mean over whose: of the text behind the last visual token, of all text, or of the last place. Visual places look
    # at nobody here, so that a long clip makes no [T,T].
    attention_queries: Literal["suffix", "text", "last"] = "suffix"


@dataclass(frozen=True)
class Prompt:
    """The prompt as the target ran it, for heads that read its states: R rows (conditional, unconditional), T places.

    Where guidance pads a row, its padding stands on the left; condition slots that hold no token have id 0.
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

    def along(self, rows: Sequence[int]) -> TargetStep:
        """The step at the chosen positions (row 0 is the root)."""
        index = list(rows)
        return TargetStep(
            self.logits[index],
            None if self.feature is None else self.feature[:, index],
            {layer: states[:, index] for layer, states in self.layers.items()},
            {},
        )


@dataclass(frozen=True)
class TargetSequence:
    """A teacher-forced pass over whole sequences, all of which end with n generated tokens: what a head learns from."""

    ids: Tensor  # [B,T] int64, as in `Prompt`
    feature: Tensor  # [B,T,D]
    mask: Tensor  # [B,T] bool
    positions: Tensor  # [B,T] int64
    num_generated: int
    # B places on the left of each row that only longer rows of the batch need, its condition's own kept.
    padding: tuple[int, ...]


class ReadTarget(Protocol):
    """What a head of a language model trains and drafts with, beside `Target`."""

    config: Any  # transformers' text config: width, heads, theta, ...

    @property
    def embedding(self) -> Tensor:
        """[V,D], of token ids."""
        ...

    def scores(self, feature: Tensor) -> Tensor:
        """[...,D] -> [...,V] float32 of the LM head; minus infinity where no token may come."""
        ...

    def states(self, batch: Batch, wanted: StatesWanted, *, seeds: Sequence[int] = ()) -> StatesBatch:
        """One teacher-forced pass over the batch with our positions, in inference mode and outside any gradient."""
        ...


class Target(Protocol):
    """Frozen. `session` is the target's own state of one request; the loop passes it back unread."""

    vocab_size: int

    def prefill(self, request: Any, taps: Taps, *, capacity: int) -> tuple[Any, TargetStep]:
        """Run the prompt (a `Request` or an `ImageRequest`); scores are those of its end, taps of all of it."""
        ...

    def verify(self, session: Any, root: int, tree: Tree) -> TargetStep:
        """One pass over the root (the last committed token) and the tree; row 0 is the root."""
        ...

    def commit(self, session: Any, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path` of the last verification."""
        ...
