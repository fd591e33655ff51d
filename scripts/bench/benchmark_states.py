#!/usr/bin/env python
"""Reading cached states compared with reading their files.

    scripts/bench/benchmark_states.py                            1.5 GB of made-up states at the width of a 7B target
    scripts/bench/benchmark_states.py --gigabytes 20 --folder /data/bench --workers 4     more than the machine's memory
    scripts/bench/benchmark_states.py --gigabytes 0.2 --repeats 2                         a look

The loader's batches (records checked and parsed, ready to be moved to a device) against `read` of the same
files front to back, in blocks of 8 MiB into memory of their own (a batch is new memory, too) and into one reused block,
which is as fast as the disk or the page cache gets. Cold: the page cache is told to forget the files (posix_fadvise)
before each pass, and records' checksums are compared; warm: a pass before has read the files, and checksums were
compared then. All kinds take turns in each repeat, another first each time; median and range are shown.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from draftsmith.core.batch import Batch
from draftsmith.core.pictures import IMAGE, TEXT
from draftsmith.core.states import Taps, TargetStates
from draftsmith.data.loader import Loader, prefetched
from draftsmith.data.order import BucketedOrder
from draftsmith.data.shards.shards import Sample, claim, finish, shard_path
from draftsmith.data.states.estimate import record_bytes, shown
from draftsmith.data.states.reader import CachedCollate, CachedSamples, StatesReader
from draftsmith.data.states.samples import Counts
from draftsmith.data.states.writer import Deal, StatesWriting
from draftsmith.scripts import timing

BLOCK = 8 * 2**20
# Mean tokens of a sample in the stages of a 7B target: text, visual.
KINDS = {"text": (1328, 0), "Qwen picture": (960, 280), "OneVision picture": (960, 1900)}


def lengths(count: int) -> list[tuple[int, int]]:
    """(text, visual) tokens of samples: the three kinds in turn, spread about their means."""
    rng = np.random.default_rng(0)
    means = list(KINDS.values())
    return [(max(16, round(means[n % 3][0] * rng.lognormal(-0.125, 0.5))), means[n % 3][1]) for n in range(count)]


def made_up(number: int, text: int, visual: int, wanted: Taps, width: int, noise: torch.Tensor) -> Batch:
    """States are cut out of one piece of noise: drawing them would take longer than writing them."""
    length = text + visual
    modality = torch.full((1, length), TEXT, dtype=torch.int8)
    modality[0, 8 : 8 + visual] = IMAGE
    loss_mask = torch.zeros(1, length, dtype=torch.bool)
    loss_mask[0, 8 + visual + text // 4 :] = True

    def states(shift: int) -> torch.Tensor:
        return noise[(number * 7 + shift) % 64 :][:length].view(1, length, width)

    positions = torch.arange(length).expand(3, 1, length)
    return Batch(
        torch.randint(0, 150000, (1, length)), torch.ones(1, length, dtype=torch.bool), loss_mask, modality, positions,
        None, (f"sample-{number}",),
        states=TargetStates(states(0), {layer: states(layer) for layer in wanted.layers}, positions),
    )  # fmt: skip


def write(folder: Path, count: int, width: int, shard_bytes: int) -> None:
    """A cache of `count` samples in Sparrow's layout."""
    wanted = Taps(feature=True, visual_layers=(14,))
    sizes = lengths(count)
    longest = max(sum(size) for size in sizes) + 64
    noise = torch.randn(longest, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    totals = np.array([sum(size) for size in sizes])
    counts = Counts(totals, np.array([size[0] for size in sizes]), np.array([size[1] for size in sizes]))
    mean = statistics.fmean(record_bytes(wanted, width, "bf16", text=t, visual=v, position_rows=3) for t, v in sizes)
    deal = Deal(count, max(1, round(shard_bytes / mean)))
    identity = {
        "states": {"feature": True, "text_layers": [], "visual_layers": [14], "everywhere": False}, "dtype": "bf16",
        "samples": {"computed_in": "bfloat16", "pad_id": 0, "position_rows": 3, "width": width},
    }  # fmt: skip
    writing = StatesWriting(folder, wanted, "bf16", counts)
    claim(folder, identity)
    for index in range(len(deal)):
        samples: list[Sample] = []
        for number in deal[index].tolist():
            text, visual = sizes[number]
            batch = made_up(number, text, visual, wanted, width, noise)
            assert batch.states is not None
            samples += writing.samples(batch, batch.states, [number])
        writing.write(index, samples)
    finish(folder, identity, num_shards=len(deal))


def forget(paths: list[Path]) -> None:
    """Tell the page cache to drop these files."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def plain(paths: list[Path]) -> None:
    """Read the files in blocks, into new memory."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(BLOCK):
                pass


def plain_reused(paths: list[Path]) -> None:
    """Read the files in blocks, into one block of memory."""
    block = bytearray(BLOCK)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def through_loader(reader: StatesReader, batch_size: int, workers: int, spread: bool) -> None:
    """One epoch of micro-batches, read ahead by a thread as in a train stage, or by processes; with `spread` each is
    unpacked on the CPU.
    """
    samples = CachedSamples.of(reader)
    order = BucketedOrder(samples.lengths, 0, batch_size)
    loader = Loader(
        samples, seed=0, batch_size=batch_size, micro_batch_size=batch_size, num_workers=workers, order=order,
        total_steps=-(-len(samples) // batch_size), collate=CachedCollate(reader, 0),
    )  # fmt: skip
    for step in loader if workers else prefetched(loader):
        for micro in step.micro:
            if spread:
                micro.to("cpu")


def time_reading(folder: Path, options: argparse.Namespace) -> None:
    """Print rates of plain reads and of the reader in GB/s, with the files cold and warm in the page cache."""
    shards = StatesReader([folder]).shards[0].shards
    paths = [shard_path(folder, shard.index) for shard in shards]
    size = sum(path.stat().st_size for path in paths)
    warm_readers: dict[str, StatesReader] = {}
    kinds: dict[str, Callable[[bool], None]] = {
        "plain read": lambda cold: plain(paths),
        "plain read, one reused block": lambda cold: plain_reused(paths),
    }

    def loader(name: str, workers: int, spread: bool, cold: bool) -> None:
        """An epoch, cold as by a process that compares checksums, or warm as by one that has read the files before."""
        reader = StatesReader([folder]) if cold or name not in warm_readers else warm_readers[name]
        if not cold and name not in warm_readers:
            warm_readers[name] = reader
            reader._checked[:] = True
        through_loader(reader, options.batch_size, workers, spread)

    for workers in sorted({0, options.workers}):
        name = "reader, one thread that reads ahead" if not workers else f"reader, {workers} processes"
        kinds[name] = partial(loader, name, workers, False)
    padded = "reader, and copied into padded tensors on the CPU"
    kinds[padded] = partial(loader, padded, 0, True)
    print(f"{len(shards)} shards, {shown(size)}; GB/s, median (range) of {options.repeats}.\n")
    lines: dict[str, list[str]] = {name: [] for name in kinds}
    for state in ("cold", "warm"):
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for repeat in range(options.repeats):
            turn = repeat % len(kinds)  # what comes after what matters to a disk
            for name, run in [*kinds.items()][turn:] + [*kinds.items()][:turn]:
                if state == "cold":
                    forget(paths)
                else:
                    plain_reused(paths)
                rates[name].append(size / 1e9 / timing.timed(partial(run, state == "cold")))
        base = statistics.median(rates["plain read"])
        for name, some in rates.items():
            rate = statistics.median(some)
            lines[name] += [f"{rate:.2f} ({min(some):.2f} to {max(some):.2f})", f"{rate / base:.0%}"]
    timing.table("GB/s", "cold", "share of plain read", "warm", "share")
    for name, cells in lines.items():
        timing.row(name, *cells)


def main() -> None:
    """Prints the rates of all kinds of reading."""
    parser = timing.options(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of states that are written and read")
    parser.add_argument("--shard-gigabytes", type=float, default=0.5)
    parser.add_argument("--width", type=int, default=3584, help="of a state")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="reading processes, beside none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where files are written; on the disk that is to be measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timing.header(f"width {options.width}, batches of {options.batch_size}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mean = statistics.fmean(7168 * options.width / 3584 * sum(size) for size in lengths(30))
        count = max(3, round(options.gigabytes * 1e9 / mean))
        write(Path(folder) / "states", count, options.width, round(options.shard_gigabytes * 1e9))
        time_reading(Path(folder) / "states", options)


if __name__ == "__main__":
    main()
