"""Cached states as samples of the loader. Their order is a pure function of (seed, epoch, step), on any rank.

A micro-batch is read into one piece of memory, record by record; nothing is copied after that. A record's checksum is
compared the first time that a process reads it: disks do not rot between two epochs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ...core.json_types import JsonMapping, JsonObject
from ...core.section import torch_dtype
from ...core.states import Taps
from ..shards.codes import forward_seed
from ..shards.shard_files import BAD_MEMBERS, TensorPlace, edited, places, tensor_places
from ..shards.shards import ShardReader, Span
from .identity import check_identity, check_together
from .memory import Lender
from .records import PackedStates, StatesForm

_THREADS = 2  # that read and check the records of a micro-batch, unless more are asked for
_HEAD_BYTES = 2**16  # of a record: more than its first tar header and the names of its tensors


class StatesReader:
    """Caches of one target as one sequence of records, in the order of the samples that they were made of.

    Args:
        folders: of shards; several follow each other.
        expected: what `states_identity` says of the reader's own target and settings; None compares nothing.
        accept: fields that may differ from it.

    Raises:
        UserError: a cache is not finished, damaged, or made with something else; the message names file or field.
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
        orders = [np.argsort(reader.column("number"), kind="stable") for reader in self.shards]
        ends = np.cumsum([0, *(len(reader) for reader in self.shards)])
        self._records = np.concatenate([order + end for order, end in zip(orders, ends[:-1], strict=True)])
        self._ends = ends[1:]
        self._checked = np.zeros(len(self), dtype=bool)
        self._supervised: np.ndarray | None = None  # [n], once it is asked for
        self.num_threads = _THREADS
        self._pool: tuple[int, ThreadPoolExecutor, Lender] | None = None  # of the process with this id

    def __len__(self) -> int:
        return int(self._ends[-1])

    def column(self, name: str) -> np.ndarray:
        """[n] int64, one of `COLUMNS`."""
        return np.concatenate([reader.column(name) for reader in self.shards])[self._records]

    def span(self, index: int) -> Span:
        """Where the bytes of sample `index` are."""
        record = int(self._records[index])
        cache = int(np.searchsorted(self._ends, record, side="right"))
        return self.shards[cache].span(record - (int(self._ends[cache - 1]) if cache else 0))

    def read(self, indices: Sequence[int]) -> tuple[Tensor, list[dict[str, TensorPlace]], list[JsonObject]]:
        """The records' bytes, one after the other, where the tensors of each lie in them, and what is said of each."""
        spans = [self.span(index) for index in indices]
        starts = np.cumsum([0, *(span.stop - span.start for span in spans)]).tolist()
        buffer = self._memory(starts[-1])
        memory = memoryview(buffer.numpy().data)
        parts = [memory[start : start + span.stop - span.start] for span, start in zip(spans, starts, strict=False)]
        for span in spans:
            _expect(span)
        # Threads: the disk reads a record while the checksum of another is taken; both leave Python to itself.
        list(self._threads().map(self._fill, indices, spans, parts))
        rows, infos = [], []
        for span, part, start in zip(spans, parts, starts, strict=False):
            try:
                tensors, info = places(part)
            except BAD_MEMBERS as error:
                raise span.broken(error) from error
            rows.append({name: replace(p, start=p.start + start, stop=p.stop + start) for name, p in tensors.items()})
            infos.append(info)
        return buffer, rows, infos

    def use_threads(self, count: int) -> None:
        """Read and check the records of a micro-batch with `count` threads, where it had fewer."""
        if count > self.num_threads:
            self.num_threads, self._pool = count, None

    def _fill(self, index: int, span: Span, memory: memoryview) -> None:
        span.read_into(memory)
        if not self._checked[index]:
            span.check(memory)
            self._checked[index] = True

    def _threads(self) -> ThreadPoolExecutor:
        """The thread pool of this process, since threads do not survive a fork."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self.num_threads), Lender()
        return self._pool[1]

    def _memory(self, size: int) -> Tensor:
        """[size] uint8. A worker process allocates it in shared memory, so that the rank needs no copy."""
        self._threads()
        assert self._pool is not None
        if get_worker_info() is None or not size:
            return self._pool[2].lend(size)
        storage = torch.UntypedStorage._new_shared(size)
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_pool": None}

    def supervised_ids(self, index: int) -> Tensor:
        """[n] int64 of one record, without reading its states.

        A checksum is of the whole record, and compared when its states are read. Here the ids are as many as the
        record's own column says.

        Raises:
            UserError: they are not, or the record cannot be parsed.
        """
        span = self.span(index)
        head = span.read(0, min(_HEAD_BYTES, span.stop - span.start))
        if len(head) == span.stop - span.start:
            span.check(head)
        try:
            members = tensor_places(head)
            ids, mask = (
                torch.frombuffer(bytearray(span.read(place.start, place.stop)), dtype=place.dtype)
                for place in (members["ids"], members["loss_mask"])
            )
        except (*BAD_MEMBERS, KeyError) as error:
            raise span.broken(error) from error
        if self._supervised is None:
            self._supervised = self.column("supervised")
        supervised = int(self._supervised[index])
        if ids.shape != mask.shape or int(mask.sum()) != supervised or bool((ids < 0).any()):
            found = f"{int(mask.sum())} supervised ids among {len(ids)}, and {supervised} were written"
            raise edited(span.path, f"sample {span.number} has {found}")
        return ids[mask].long()


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
        buffer, rows, infos = self.reader.read(samples)
        names = tuple(info["name"] for info in infos)
        return PackedStates(
            buffer=buffer,
            rows=tuple(rows),
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


def _expect(span: Span) -> None:
    """Tell the disk what is read next."""
    if sys.platform == "linux" and span.path.is_file():
        with open(span.path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), span.start, span.stop - span.start, os.POSIX_FADV_WILLNEED)
