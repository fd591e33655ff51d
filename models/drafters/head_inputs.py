"""Builds the inputs of a head's layer from a sequence and the target's states: which inputs there are and what each one
holds.

Input j pairs token j + 1 with the state at index j. Kinds of heads differ in what a visual input holds. Rows hold only
the inputs that they keep, in order and padded on the right, so dropped inputs cost nothing. Letters: B rows, T places,
N inputs that a row keeps, D width, S joined states, R rows of positions, Q vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.pictures import TEXT
from ...core.states import OnDevice, uploaded
from ..packed_row import PackedRow
from .head_module import StateHead

# What a visual entry is to the layer: absent, a state that enters it directly, a run's few compressed vectors, an
# ordinary entry (embedding and true state), or one whose state half is a middle layer's.
Visual = Literal["none", "direct", "compressed", "read", "middle"]
# What takes an embedding's place at a visual token: its placeholder's own row, as vLLM embeds it, or the projected
# image, as SGLang does.
Image = Literal["placeholder", "projected"]


@dataclass(frozen=True)
class Reads:
    """Which of the target's layers hold what a head is fed. Layers count decoder layers passed, 0 is the embedding;
    EAGLE-3's published ids mean the same (the input of layer k is the state after k layers).
    """

    state: tuple[int, ...]  # joined as the state half; none: the feature
    visual: int | None  # what stands in visual entries, or what their vectors are made of; None: nothing
    image: int | None  # 0 where the projected image takes an embedding's place


@dataclass(frozen=True)
class Sequences:
    """Places 0 to T - 1; of the last one only the token is read, its state where some input's goal is."""

    ids: Tensor  # [B,T] int64
    mask: Tensor  # [B,T] bool
    modality: Tensor  # [B,T]
    positions: Tensor  # [R,B,T] int64
    feature: Tensor | None  # [B,T or T-1,D]
    layers: dict[int, Tensor]  # layer -> [B,T or T-1,D]


@dataclass(frozen=True)
class Layout(OnDevice):
    """Which inputs each row keeps."""

    index: Tensor  # [B,N] int64 number of the input; 0 where `real` is False
    real: Tensor  # [B,N] bool
    visual: Tensor  # [B,N] bool: its token is visual
    runs: tuple[tuple[int, int, int], ...]  # row, first place and end of each picture: a stretch of one modality

    def pick(self, values: Tensor, shift: int = 0) -> Tensor:
        """[B,T,...] at the inputs' places, or `shift` after them: [B,N,...]."""
        places = (self.index + shift).clamp(max=values.shape[1] - 1)
        return torch.gather(values, 1, places.view(*places.shape, *[1] * (values.dim() - 2)).expand(
            *places.shape, *values.shape[2:]))  # fmt: skip

    def trained(self, loss_mask: Tensor) -> Tensor:
        """[B,N] bool on the CPU: inputs whose token is supervised, of a mask [B,T] on the CPU."""
        return torch.gather(loss_mask, 1, self.on_host("index") + 1) & self.on_host("real") & ~self.on_host("visual")

    def follows(self, *, text: bool) -> Tensor:
        """[B,N] bool: the previous input of the sequence was kept too, and under `text` it is text."""
        before = torch.zeros_like(self.real)
        before[:, 1:] = (self.index[:, 1:] == self.index[:, :-1] + 1) & self.real[:, 1:]
        if text:
            before[:, 1:] &= ~self.visual[:, :-1]
        return before


def lay_out(
    visual: Visual, modality: Tensor, mask: Tensor, *, num_vectors: int = 0, keep: Tensor | None = None,
    device: torch.device | None = None,
) -> Layout:  # fmt: skip
    """
    Args:
        modality, mask: [B,T], best on the CPU: what follows depends on their values.
        num_vectors: of `compressed`: inputs that a picture keeps, its last ones.
        keep: [B,T] bool: visual tokens whose inputs stay, of those that the kind has; None: all.
        device: of the layout; None: where `modality` is.
    """
    modality_, mask_ = modality.cpu(), mask.cpu()
    runs = tuple(_runs(modality_, mask_))
    seen = modality_[:, 1:] != TEXT  # [B,T-1] of inputs
    if visual == "none":
        kept = ~seen
    elif visual == "compressed":
        kept = ~seen
        for row, first, end in runs:
            kept[row, max(end - 1 - num_vectors, first - 1, 0) : end - 1] = True
    else:
        kept = torch.ones_like(seen)
    if keep is not None:
        kept = kept & (~seen | keep[:, 1:].cpu())
    kept = kept & mask_[:, 1:]
    counts = kept.sum(1)
    real = torch.arange(max(1, int(counts.max()))) < counts[:, None]
    # A stable sort of "dropped" puts what is kept in front, in order.
    order = torch.sort((~kept).to(torch.int8), dim=1, stable=True).indices[:, : real.shape[1]]
    index = torch.where(real, order, 0)
    is_visual = torch.gather(seen, 1, index) & real
    return Layout(index, real, is_visual, runs).to(modality.device if device is None else device)


def _runs(modality: Tensor, mask: Tensor) -> list[tuple[int, int, int]]:
    """Row, first place and end of every stretch of places of one visual modality."""
    runs = []
    shown = torch.where(mask, modality, TEXT).int()
    for row, kinds in enumerate(shown):
        values, counts = torch.unique_consecutive(kinds, return_counts=True)
        ends = counts.cumsum(0)
        for kind, count, end in zip(values.tolist(), counts.tolist(), ends.tolist(), strict=True):
            if kind != TEXT:
                runs.append((row, end - count, end))
    return runs


@dataclass(frozen=True)
class Filled:
    """What the layer reads at the inputs of a layout, beside positions."""

    layout: Layout
    embeds: Tensor  # [B,N,D]
    states: Tensor  # [B,N,S*D] true ones, not fused yet
    middle: Tensor | None  # [B,N,D] the state half of visual inputs, where it is not a true state
    direct: tuple[Tensor, Tensor] | None  # as of `FusedHead.forward`
    image: Tensor | None

    def part(self, start: int, stop: int) -> Filled:
        """Inputs `start` to `stop`."""
        layout, some = self.layout, (slice(None), slice(start, stop))
        return Filled(
            Layout(layout.index[some], layout.real[some], layout.visual[some], layout.runs),
            self.embeds[some],
            self.states[some],
            None if self.middle is None else self.middle[some],
            None if self.direct is None else (self.direct[0][some], self.direct[1][some]),
            None if self.image is None else self.image[some],
        )

    def fused(self, head: StateHead, states: Tensor | None = None) -> Tensor:
        """[B,N,D] state halves of a first pass; `states` in place of the true ones (with noise)."""
        fused = head.fuse((self.states if states is None else states).to(head.dtype))
        return fused if self.middle is None else torch.where(self.layout.visual.unsqueeze(-1), self.middle, fused)


@dataclass(frozen=True)
class Inputs:
    """What all passes of a training forward share: [B,N,...], or [1,M,...] of a packed row."""

    embeds: Tensor
    states: Tensor  # [B,N,D] fused true ones
    positions: Tensor  # [B,N] or [3,B,N] int64
    replaced: Tensor  # [B,N,1] bool: later passes read the output before them in place of the true state
    direct: tuple[Tensor, Tensor] | None  # as of `FusedHead.forward`
    image: Tensor | None

    def behind(self, count: int) -> Inputs:
        """All but the first `count` inputs of each row."""
        some = (slice(None), slice(count, None))
        return Inputs(
            self.embeds[some],
            self.states[some],
            self.positions[..., count:],
            self.replaced[some],
            None if self.direct is None else (self.direct[0][some], self.direct[1][some]),
            None if self.image is None else self.image[some],
        )

    def packed(self, row: PackedRow) -> Inputs:
        """The inputs of all samples in one row."""
        places = self.positions
        return Inputs(
            row.pack(self.embeds),
            row.pack(self.states),
            row.pack(places) if places.dim() == 2 else torch.stack([row.pack(axis) for axis in places]),
            row.pack(self.replaced),
            None if self.direct is None else (row.pack(self.direct[0]), row.pack(self.direct[1])),
            None if self.image is None else row.pack(self.image),
        )


def fill(
    head: StateHead, visual: Visual, reads: Reads, layout: Layout, sequences: Sequences, embedding: Tensor
) -> Filled:
    """Gather the content of each input. ViSpec's adaptor runs here, once for all pictures of all rows.

    Args:
        embedding: [V,D], the target's.
    """
    dtype, at_visual = head.dtype, layout.visual.unsqueeze(-1)
    embeds = torch.nn.functional.embedding(layout.pick(sequences.ids, 1), embedding).to(dtype)
    if reads.image is not None:
        embeds = torch.where(at_visual, layout.pick(sequences.layers[reads.image], 1).to(dtype), embeds)
    if reads.state:
        states = torch.cat([layout.pick(sequences.layers[layer]) for layer in reads.state], dim=-1)
    else:
        assert sequences.feature is not None
        states = layout.pick(sequences.feature)
    direct = middle = image = None
    if head.num_queries:
        vectors = _adapted(head, sequences.layers[0], layout.runs)
        image = _global_vectors(layout, vectors)
        if visual == "compressed":
            direct = layout.visual, _spread(layout, vectors[:, :-1])
    elif reads.visual is not None and visual in ("direct", "middle"):
        values = layout.pick(sequences.layers[reads.visual], 1).to(dtype)
        if visual == "direct":
            direct = layout.visual, values
        else:
            middle = values
    return Filled(layout, embeds, states, middle, direct, image)


def _adapted(head: Any, embeds: Tensor, runs: Sequence[tuple[int, int, int]]) -> Tensor:
    """[pictures,Q,D]. Without a picture a zero one runs: ranks that call other modules hang in ZeRO's collectives."""
    parts = [embeds[row, first:end] for row, first, end in runs] or [embeds.new_zeros(1, embeds.shape[-1])]
    features = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(head.dtype)
    lengths = uploaded(torch.tensor([len(part) for part in parts]), features.device)
    mask = torch.arange(features.shape[1], device=features.device) < lengths[:, None]
    return head.imadpt(features, mask)


def _global_vectors(layout: Layout, vectors: Tensor) -> Tensor:
    """[B,N,D]: at each input the last vector of the last picture that ended before its token; zeros before any."""
    rows, count = layout.index.shape
    which = torch.zeros(rows, count, dtype=torch.int64, device=vectors.device)  # 0 is none
    for number, (row, _, end) in enumerate(layout.runs, 1):
        # Pictures are processed in order, so a later one replaces an earlier one.
        which[row] = torch.where(layout.index[row] >= end - 1, number, which[row])
    # The vector of the zero picture belongs to no input but still gets a gradient of zero.
    known = torch.cat([0 * vectors[:1, -1], vectors[: len(layout.runs), -1]])
    return known[which]


def _spread(layout: Layout, vectors: Tensor) -> Tensor:
    """[B,N,D]: the inputs that a picture kept hold its vectors, the last ones where there are fewer inputs."""
    values = vectors.new_zeros(*layout.index.shape, vectors.shape[-1])
    visual, index = layout.on_host("visual"), layout.on_host("index")
    for number, (row, first, end) in enumerate(layout.runs):
        held = (visual[row] & (index[row] >= first - 1) & (index[row] < end - 1)).nonzero()[:, 0]
        held = uploaded(held, values.device)
        values = values.index_put(
            (torch.full_like(held, row), held), vectors[number, vectors.shape[1] - len(held) :]
        )  # fmt: skip
    return values


def base_positions(kind: str, layout: Layout, sequences: Sequences, *, visual_held: bool) -> Tensor:
    """[B,N], or [3,B,N] under M-RoPE, before any gap is drawn.

    Args:
        kind: as of the config. `compact` counts inputs; in a row with visual inputs that only training holds it has
            no meaning, and `flat` stands for it.
        visual_held: False where visual inputs are held for training alone.
    """
    if kind == "mrope":
        return torch.stack([layout.pick(rows) for rows in sequences.positions])
    if kind == "flat":
        return layout.index
    counted = torch.arange(layout.index.shape[1], device=layout.index.device).expand_as(layout.index)
    return counted if visual_held else torch.where(layout.visual.any(1, keepdim=True), layout.index, counted)


def with_gaps(positions: Tensor, layout: Layout, gaps: Sequence[int | None]) -> Tensor:
    """Text after a row's last picture stands `gap` places after the text before that picture; None leaves a row.

    Args:
        positions: [B,N] or [3,B,N].
    """
    moved = positions.clone()
    real, visual, index = (layout.on_host(name) for name in ("real", "visual", "index"))
    last = {row: (first, end) for row, first, end in layout.runs}  # in the order of their places
    for row, gap in enumerate(gaps):
        if gap is None or row not in last:
            continue
        first, end = last[row]
        before = (real[row] & ~visual[row] & (index[row] < first - 1)).nonzero()[:, 0]
        text_after = real[row] & (index[row] >= end - 1)
        if not bool(text_after.any()):
            continue
        here = positions[..., row, :]
        device = here.device
        ends_at = here[..., uploaded(before, device)].amax(-1) if len(before) else torch.full_like(here[..., 0], -1)
        starts_at = here[..., uploaded(text_after.nonzero()[:, 0], device)].amin(-1)
        shifted = here + (gap - (starts_at - ends_at - 1))[..., None]
        moved[..., row, :] = torch.where(uploaded(text_after, device), shifted, here)
    return moved
