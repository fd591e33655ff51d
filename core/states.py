"""What a drafter sees of its frozen target: which hidden states it asks for, and the states of a batch.

Index t of a sequence holds token x_t. H_t is the target's feature there (the hidden state after the final norm, which
the LM head reads) and M_t the hidden state after some decoder layer; layer 0 is the embedding, which at a visual token
is the projected image. A head's input entry j pairs token x_{j+1} with the state at index j and predicts H_{j+1}.
Letters: B rows, T tokens, R rows of positions (3 under M-RoPE), D width, S supervised tokens, K kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from .pictures import TEXT


class OnDevice:
    """A dataclass whose tensors move together. A moved record remembers the one that it was moved from."""

    # No field: what `replace` makes of a moved record has other values, and remembers nothing.
    _source: ClassVar[Any] = None

    def to(self, device: torch.device | str) -> Self:
        """A copy whose tensors, in tuples, dicts and dataclasses as well, are on `device`."""
        record: Any = self
        moved = replace(record, **{f.name: _moved(vars(self)[f.name], device) for f in fields(record)})
        object.__setattr__(moved, "_source", self if self._source is None else self._source)
        return moved

    def on_host(self, name: str) -> Tensor:
        """The tensor of field `name` on the CPU: the one that was moved, without waiting for the device, or a copy."""
        value: Tensor = vars(self)[name]
        if value.device.type != "cpu":
            value = vars(self if self._source is None else self._source)[name]
        return value.cpu()


def uploaded(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`. To a GPU the host hands it over and goes on; otherwise it would wait for all work before."""
    return value.to(device, non_blocking=value.device.type == "cpu")


def _moved(value: object, device: torch.device | str) -> Any:
    match value:
        case Tensor():
            return uploaded(value, torch.device(device))
        case OnDevice():
            return value.to(device)
        case tuple():
            return tuple(_moved(part, device) for part in value)
        case dict():
            return {name: _moved(part, device) for name, part in value.items()}
    return value


@dataclass(frozen=True)
class Taps:
    """What a drafter asks of its target; the target computes, and a cache keeps, no more than that.

    In decoding every tap is served at every position. Training keeps a state only where a head reads it: `feature`
    and `text_layers` at the positions of `feature_places`, `visual_layers` at visual tokens.
    """

    text_layers: tuple[int, ...] = ()  # hidden states after so many decoder layers
    feature: bool = False  # H
    prefill_attention: tuple[int, ...] = ()  # layers whose attention over the prompt is wanted (SpecVLM)
    # The queries that this attention is averaged over: of the text after the last visual token, of all text, or of the
    # last token. Queries of visual tokens are never computed, so that a long clip makes no [T,T].
    attention_queries: Literal["suffix", "text", "last"] = "suffix"
    visual_layers: tuple[int, ...] = ()  # the same as `text_layers`, at visual tokens
    everywhere: bool = False  # keep H and the text layers at every token: each is an ordinary input (EAGLE)
    without_condition: bool = False  # image generators: also the states of each row without its condition

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers to tap, in ascending order."""
        return tuple(sorted({*self.text_layers, *self.visual_layers}))

    @property
    def stored(self) -> dict[str, Any]:
        """The fields that decide what a cache holds, under the names that its manifest uses."""
        return {
            "feature": self.feature,
            "text_layers": self.text_layers,
            "visual_layers": self.visual_layers,
            "everywhere": self.everywhere,
        }

    def __or__(self, other: Taps) -> Taps:
        """The union of both, for training. Attention over a prompt is used in decoding only and is left out."""
        return Taps(
            text_layers=tuple(sorted({*self.text_layers, *other.text_layers})),
            feature=self.feature or other.feature,
            visual_layers=tuple(sorted({*self.visual_layers, *other.visual_layers})),
            everywhere=self.everywhere or other.everywhere,
            without_condition=self.without_condition or other.without_condition,
        )


@dataclass(frozen=True)
class TopLogProbs(OnDevice):
    """The target's likeliest tokens at supervised positions, kept in place of its whole distribution.

    The S supervised positions stand in the order of their batch (row by row), the K tokens likeliest first.
    """

    ids: Tensor  # [S,K] int64
    log_probs: Tensor  # [S,K] float32
    log_rest: Tensor  # [S] float32: of all other tokens together


@dataclass(frozen=True)
class TargetStates(OnDevice):
    """One teacher-forced pass of the frozen target over a batch. States that were not asked for are None or zero.

    A language model runs the batch as it is. An image generator puts its condition in front of the codes, so it also
    says what it ran: `ids`, `mask`, `padding` and `num_generated`.
    """

    feature: Tensor | None = None  # [B,T,D]
    layers: dict[int, Tensor] = field(default_factory=dict)  # layer -> [B,T,D]
    positions: Tensor | None = None  # [R,B,T] int64, the target's own
    top_log_probs: TopLogProbs | None = None  # log-probabilities that a regenerate stage kept, in place of states
    ids: Tensor | None = None  # [B,T] int64; condition tokens that hold no token have id 0
    mask: Tensor | None = None  # [B,T] bool: later positions may attend to it
    num_generated: int = 0  # image codes at the end of each row
    padding: tuple[int, ...] = ()  # B: columns on the left of each row that only longer rows of the batch need
    unconditional: TargetStates | None = None  # of `Taps.without_condition`


def places_of(mask: Tensor, device: torch.device) -> Tensor:
    """Rows and columns [2,S] int64 on `device` of the True entries of a mask [B,T], which is on the CPU.

    A mask on a GPU would say how many there are only when the GPU has come that far.
    """
    assert mask.device.type == "cpu", "counted where the host knows the values"
    return uploaded(mask.nonzero().T.contiguous(), device)


def at_places(values: Tensor, places: Tensor, shift: int = 0) -> Tensor:
    """[B,T,...] -> [S,...] at rows and columns [2,S], or `shift` columns after them."""
    rows, columns = places.to(values.device)
    return values[rows, columns + shift]


def put_at(values: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """[B,T,...] with `rows` [S,...] at rows and columns [2,S].

    Unlike a masked scatter, whose backward pass asks a GPU how many places there are.
    """
    at = tuple(places.to(values.device))
    return values.index_put(at, rows.to(values))


def feature_places(modality: Tensor, mask: Tensor, loss_mask: Tensor, everywhere: bool = False) -> Tensor:
    """[B,T] bool: where H is read by a text input (the next token is text) or is the goal of a trained one.

    Args:
        everywhere: as of `Taps`: all tokens that are no padding.
    """
    if everywhere:
        return mask.clone()
    text = (modality == TEXT) & mask
    read = torch.zeros_like(text)
    read[:, :-1] = text[:, 1:]
    return (read | (loss_mask & mask)) & mask


def visual_places(modality: Tensor, mask: Tensor) -> Tensor:
    """[B,T] bool: visual tokens that are no padding."""
    return (modality != TEXT) & mask
