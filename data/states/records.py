"""One sequence as a cache stores it: states only at the tokens that a head reads, in order, without an index.

Which places those are follows from modality and loss mask (`core.states`), so nothing says so twice. Embeddings are
looked up from ids, scores made from H: neither is ever written. Samples are dealt to shards beforehand by a fixed
shuffle: a killed build skips the shards that it finished, shards of mixed data get one size, and ranks like loads.
Letters: B rows, T places, R position rows, D width, n places of a record that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...core.batch import Batch
from ...core.finite import check_states
from ...core.pictures import TEXT
from ...core.states import Taps, TargetStates, feature_places, visual_places
from ..shards.shards import Sample, write_shard
from .samples import Counts, draw_of
from .storage import StatesDtype, decode, encode

# Whole numbers of each record that its shard's index lists: the sample's number, its places, 1 where it has pictures,
# its supervised tokens, and the hash of its name, which decides whether it is held out.
COLUMNS = ("number", "length", "visual", "supervised", "draw")


def state_places(wanted: Taps, modality: Tensor, mask: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Name of a tensor of states -> [B,T] bool, the places that it is kept at."""
    text = feature_places(modality, mask, loss_mask, wanted.everywhere)
    visual = visual_places(modality, mask)
    masks = {"feature": text} if wanted.feature else {}
    for layer in wanted.layers:
        held = torch.zeros_like(mask)
        if layer in wanted.text_layers:
            held |= text
        if layer in wanted.visual_layers:
            held |= visual
        masks[_layer(layer)] = held
    return masks


def _layer(layer: int) -> str:
    return f"layer_{layer:03d}"


def record(batch: Batch, computed: TargetStates, row: int, wanted: Taps, dtype: StatesDtype) -> dict[str, Tensor]:
    """The tensors of one row of `batch` and of its states, on the CPU."""
    assert computed.positions is not None
    mask = batch.attention_mask[row : row + 1]
    length = int(mask.sum())
    tensors = {
        "ids": batch.ids[row, :length].to(torch.int32),
        "modality": batch.modality[row, :length].to(torch.int8),
        "loss_mask": batch.loss_mask[row, :length],
        "positions": computed.positions[:, row, :length].to(torch.int32),
    }
    all_places = state_places(wanted, batch.modality[row : row + 1], mask, batch.loss_mask[row : row + 1])
    for name, places in all_places.items():
        states = computed.feature if name == "feature" else computed.layers[int(name[len("layer_") :])]
        assert states is not None, f"{name} is wanted and was not computed"
        for part, tensor in encode(states[row][places[0].to(states.device)], dtype).items():
            tensors[f"{name}.{part}" if part else name] = tensor
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class StatesForm:
    """What a reader must know about a cache to read its records."""

    wanted: Taps  # what the records hold
    dtype: StatesDtype
    computed_in: torch.dtype  # the target's, which read states have again
    pad_id: int
    num_position_rows: int  # 1, or 3 with M-RoPE
    width: int


@dataclass(frozen=True)
class PackedStates:
    """A micro-batch as it was read: records, which become a `Batch` on the device they are moved to. States are copied
    to the device as they are stored, and expanded to padded tensors there.
    """

    rows: tuple[dict[str, Tensor], ...]  # none: a filler that supervises nothing
    sample_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    num_supervised: int
    form: StatesForm
    packed: bool = False  # as of `Batch`

    def to(self, device: torch.device | str) -> Batch:
        """The batch without pixels; the target's states come with it."""
        rows = [{name: t.to(device) for name, t in row.items()} for row in self.rows or (self._filler(),)]
        form = self.form
        lengths = [len(row["ids"]) for row in rows]
        shape = (len(rows), max(lengths))
        ids = torch.full(shape, form.pad_id, device=device)
        mask, loss_mask = (torch.zeros(shape, dtype=torch.bool, device=device) for _ in range(2))
        modality = torch.full(shape, TEXT, dtype=torch.int8, device=device)
        positions = torch.zeros((form.num_position_rows, *shape), dtype=torch.int64, device=device)
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids[number, :length] = row["ids"]
            mask[number, :length] = True
            loss_mask[number, :length] = row["loss_mask"]
            modality[number, :length] = row["modality"]
            positions[:, number, :length] = row["positions"]
        spread = {}
        for name, places in state_places(form.wanted, modality, mask, loss_mask).items():
            states = torch.zeros((*shape, form.width), dtype=form.computed_in, device=device)  # [B,T,D]
            for number, row in enumerate(rows):
                parts = {"": row[name]}  # as `encode` made them
                parts |= {key[len(name) + 1 :]: part for key, part in row.items() if key.startswith(f"{name}.")}
                states[number, places[number]] = decode(parts, form.dtype, form.computed_in)
            spread[name] = states
        layers = {layer: spread[_layer(layer)] for layer in form.wanted.layers}
        return Batch(
            ids=ids,
            attention_mask=mask,
            loss_mask=loss_mask,
            modality=modality,
            positions=positions,
            pixels=None,
            sample_ids=self.sample_ids,
            seeds=self.seeds,
            states=TargetStates(spread.get("feature"), layers, positions),
            packed=self.packed,
        )

    def _filler(self) -> dict[str, Tensor]:
        """Two padding ids that are read and not learned from, as `empty_sample`."""
        form = self.form
        tensors = {
            "ids": torch.full((2,), form.pad_id, dtype=torch.int32),
            "modality": torch.full((2,), TEXT, dtype=torch.int8),
            "loss_mask": torch.zeros(2, dtype=torch.bool),
            "positions": torch.arange(2).expand(form.num_position_rows, 2),
        }
        modality, loss_mask = tensors["modality"][None], tensors["loss_mask"][None]
        for name, places in state_places(form.wanted, modality, torch.ones_like(loss_mask), loss_mask).items():
            for part, tensor in encode(torch.zeros(int(places.sum()), form.width), form.dtype).items():
                tensors[f"{name}.{part}" if part else name] = tensor
        return tensors


_DEAL = 5  # of the shuffle that deals samples to shards: no seed of a recipe's, caches are shared


@dataclass(frozen=True)
class Deal:
    """Which samples lie in which shard, `per_shard` in each."""

    num_samples: int
    per_shard: int

    def __len__(self) -> int:
        """Shards."""
        return -(-self.num_samples // self.per_shard)

    def __getitem__(self, shard: int) -> np.ndarray:
        """[n] int64 numbers of samples, ascending."""
        order = np.random.default_rng(_DEAL).permutation(self.num_samples)
        return np.sort(order[shard * self.per_shard : (shard + 1) * self.per_shard])


def batches(numbers: np.ndarray, counts: Counts, size: int) -> list[list[int]]:
    """A shard's samples in micro-batches of like lengths: padding costs as much as text."""
    alike = numbers[np.argsort(counts.length[numbers], kind="stable")].tolist()
    return [alike[start : start + size] for start in range(0, len(alike), size)]


@dataclass(frozen=True)
class StatesWriting:
    """How rows of states become samples of shards."""

    folder: Path  # of the shards
    wanted: Taps
    dtype: StatesDtype
    counts: Counts  # of all samples: a record says its length as it was counted, so that every source orders alike

    def write(self, index: int, samples: Iterable[Sample]) -> None:
        """Write shard number `index`: it is whole or not there."""
        write_shard(self.folder, index, samples, {}, columns=COLUMNS)

    def samples(self, batch: Batch, states: TargetStates, numbers: Sequence[int]) -> Iterator[Sample]:
        """Yield key, tensors and info of each row but fillers. Raises `NotFinite`: states hold NaN or infinity."""
        check_states(states, batch.sample_ids[: len(numbers)])
        for row, number in enumerate(numbers):
            name = batch.sample_ids[row]
            info = {
                "name": name,
                "number": number,
                "length": int(self.counts.length[number]),
                "visual": int(bool((batch.modality[row] != TEXT).any())),
                "supervised": int(batch.loss_mask[row, 1:].sum()),
                "draw": draw_of(name),
            }
            yield f"{number:09d}", record(batch, states, row, self.wanted, self.dtype), info
