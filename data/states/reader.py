"""Cached states as samples of the loader. Their order is a pure function of (seed, epoch, step), on any rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ...core.json_types import JsonMapping, JsonObject
from ...core.section import torch_dtype
from ...core.states import Taps
from ..shards.codes import forward_seed
from ..shards.shards import ShardReader
from .identity import check_identity, check_together
from .records import PackedStates, StatesForm


class StatesReader:
    """Caches of one target (folders of shards) as one sequence of records, in the order of the samples that they were
    made of. `expected` is what `states_identity` says of the reader's own target and settings (None compares nothing);
    fields of `accept` may differ. Raises `UserError` that names file or field: a cache is not finished, damaged, or
    made with something else.
    """

    def __init__(self, folders: Sequence[Path], *, expected: JsonMapping | None = None, accept: Iterable[str] = ()):
        accept = tuple(accept)
        self.shards = [ShardReader(folder) for folder in folders]
        identities = [reader.identity for reader in self.shards]
        for folder, identity in zip(folders, identities, strict=True):
            if expected is not None:
                check_identity(identity, expected, folder, accept)
        check_together(identities, list(folders), accept)
        self.form = form_of(identities[0])
        # Shards hold samples in an order of their own; here they come by number, cache after cache.
        self._orders = [np.argsort(reader.column("number"), kind="stable") for reader in self.shards]
        self._ends = np.cumsum([len(reader) for reader in self.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], JsonObject]:
        """The tensors of a record, and what is said of it."""
        reader, place = self._place(index)
        _, tensors, info = reader[place]
        return tensors, info

    def column(self, name: str) -> np.ndarray:
        """[n] int64, one of `COLUMNS`."""
        columns = zip(self.shards, self._orders, strict=True)
        return np.concatenate([reader.column(name)[order] for reader, order in columns])

    def supervised_ids(self, index: int) -> Tensor:
        """[n] int64 of one record, without reading its states."""
        reader, place = self._place(index)
        tensors = reader.tensors(place, ("ids", "loss_mask"))
        return tensors["ids"][tensors["loss_mask"]].long()

    def _place(self, index: int) -> tuple[ShardReader, int]:
        cache = int(np.searchsorted(self._ends, index, side="right"))
        order = self._orders[cache]
        return self.shards[cache], int(order[index - (int(self._ends[cache]) - len(order))])


@dataclass(frozen=True)
class CachedSamples:
    """The records `indices` of a reader, as the loader counts them; what a sample is, the collation reads."""

    reader: StatesReader
    indices: np.ndarray
    lengths: np.ndarray  # places, negative without pictures

    @classmethod
    def of(cls, reader: StatesReader, indices: np.ndarray | None = None) -> CachedSamples:
        """All records, or some."""
        chosen = np.arange(len(reader)) if indices is None else indices
        lengths = reader.column("length") * np.where(reader.column("visual") > 0, 1, -1)
        return cls(reader, chosen, lengths[chosen])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> int:
        return int(self.indices[index])


@dataclass(frozen=True)
class CachedCollate:
    """Numbers of records to a `PackedStates`, whose seeds are those that the same samples have when computed online."""

    reader: StatesReader
    seed: int

    def __call__(self, samples: Sequence[int], *, epoch: int) -> PackedStates:
        records = [self.reader[index] for index in samples]
        infos = [info for _, info in records]
        names = tuple(info["name"] for info in infos)
        return PackedStates(
            rows=tuple(tensors for tensors, _ in records),
            sample_ids=names or ("(filler)",),
            seeds=tuple(forward_seed(self.seed, epoch, name) for name in names or ("(filler)",)),
            num_supervised=sum(info["supervised"] for info in infos),
            form=self.reader.form,
        )


def form_of(identity: JsonMapping) -> StatesForm:
    """How the records of a cache are to be read, from its identity."""
    states, samples = identity["states"], identity["samples"]
    return StatesForm(
        wanted=Taps(
            text_layers=tuple(states["text_layers"]),
            feature=states["feature"],
            visual_layers=tuple(states["visual_layers"]),
            everywhere=states["everywhere"],
        ),
        dtype=identity["dtype"],
        computed_in=torch_dtype(samples["computed_in"]),
        pad_id=samples["pad_id"],
        num_position_rows=samples["position_rows"],
        width=samples["width"],
    )
