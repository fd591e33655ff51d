#!/usr/bin/env python
"""How much of what ranks compute is real tokens: plain and grouped batches, batches by length, packed rows.

    scripts/benchmark_batches.py                     665,000 lengths, 8 ranks, batch 128
    scripts/benchmark_batches.py --samples 20000     a look

The sampler alone runs. Each rank computes its micro-batches padded to their longest sample, and all ranks wait for the
slowest in each micro-batch, as under ZeRO 3: the share is the real tokens of all ranks divided by ranks times the
slowest's, summed over an epoch. Sources and their numbers are those of LLaVA-1.5's finetuning mixture (its author's
list); the text lengths of each are assumptions (log-normal about the mean below), pictures are 576 tokens, or tiles of
729 as LLaVA-OneVision's anyres_max_9 makes of pictures whose sides are drawn.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from draftsmith.data.order import BucketedOrder, epoch_order, rows_of_rank
from draftsmith.data.packing import packed_rows
from draftsmith.eval import timing

# Samples, and about how many text tokens a sample of the source has (an assumption); ShareGPT has no pictures.
SOURCES = {
    "LLaVA": (157_712, 300), "ShareGPT": (40_688, 1200), "VQAv2": (82_783, 130), "GQA": (72_140, 160),
    "OKVQA": (8_998, 60), "OCR-VQA": (80_000, 120), "A-OKVQA": (66_160, 110), "TextCaps": (21_953, 60),
    "RefCOCO": (48_447, 260), "VG": (86_417, 330),
}  # fmt: skip
LIMIT = {"one tile": 2048, "tiles": 8192}


def drawn(count: int, pictures: str, rng: np.random.Generator) -> np.ndarray:
    """[count] tokens, negative without pictures."""
    shares = np.array([number for number, _ in SOURCES.values()], dtype=float)
    source = rng.choice(len(SOURCES), count, p=shares / shares.sum())
    means = np.array([mean for _, mean in SOURCES.values()])[source]
    text = (means * rng.lognormal(-0.18, 0.6, count)).astype(np.int64).clip(16)
    has_picture = source != list(SOURCES).index("ShareGPT")
    if pictures == "one tile":
        visual = np.full(count, 576)
    else:
        sides = rng.choice((336, 480, 640, 768, 1024), (2, count), p=(0.1, 0.3, 0.35, 0.1, 0.15))
        tiles = (np.ceil(sides / 384).prod(0)).clip(1, 9).astype(np.int64)
        visual = 729 * (1 + tiles) + 27 * np.ceil(sides[1] / 384).astype(np.int64)
    lengths = (text + np.where(has_picture, visual, 0)).clip(16, LIMIT[pictures])
    return np.where(has_picture, lengths, -lengths)


def padded(order: np.ndarray, lengths: np.ndarray, batch: int, micro: int, ranks: int) -> Iterator[list[int]]:
    """What each rank computes in each micro-batch: rows times the longest."""
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        shares = [np.abs(lengths[rows_of_rank(rows, lengths, rank, ranks)]) for rank in range(ranks)]
        for first in range(0, -(-batch // ranks), micro):
            parts = [share[first : first + micro] for share in shares]
            yield [len(part) * int(part.max(initial=0)) for part in parts]


def packed(order: np.ndarray, lengths: np.ndarray, batch: int, tokens: int, ranks: int) -> Iterator[list[int]]:
    """Tokens of each rank's row in each micro-batch."""
    for start in range(0, len(order), batch):
        own = np.abs(lengths[order[start : start + batch]])
        for part in packed_rows(own, tokens, ranks):
            yield [int(own[row].sum()) for row in part]


def shares(lengths: np.ndarray, computed: Iterator[list[int]], ranks: int) -> tuple[float, float, float]:
    """Real tokens by what is computed while all wait, the same without waiting, and real tokens of a micro-batch."""
    waiting = own = count = 0
    for parts in computed:
        waiting, own, count = waiting + ranks * max(parts), own + sum(parts), count + 1
    real = int(np.abs(lengths).sum())
    return real / waiting, real / own, real / (count * ranks)


def main() -> None:
    """Prints a table of padded batches and one of packed rows."""
    parser = timing.options(__doc__)
    parser.add_argument("--samples", type=int, default=665_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128, help="samples of an optimizer step over all ranks")
    options = parser.parse_args()
    ranks, batch = options.ranks, options.batch
    timing.header(f"{options.samples:,} drawn lengths, {ranks} ranks, batch {batch}, seed 0")
    all_lengths = {pictures: drawn(options.samples, pictures, np.random.default_rng(0)) for pictures in LIMIT}
    orders = {
        pictures: {
            "plain": epoch_order(lengths, seed=0, epoch=0, batch_size=batch, grouped=False),
            "`group_by_modality`": epoch_order(lengths, seed=0, epoch=0, batch_size=batch, grouped=True),
            "`window: 50`": BucketedOrder(lengths, 0, batch)(0),
            "`group_by_modality`, `window: 50`": BucketedOrder(lengths, 0, batch, apart=True)(0),
        }
        for pictures, lengths in all_lengths.items()
    }
    for pictures, lengths in all_lengths.items():
        print(f"{pictures}: mean {np.abs(lengths).mean():,.0f} tokens, longest {np.abs(lengths).max():,}.\n")
    ways = list(itertools.product(LIMIT, (4, 16)))
    timing.table("batches", *(f"{pictures}, micro-batch {micro}" for pictures, micro in ways))
    for name in next(iter(orders.values())):
        cells = []
        for pictures, micro in ways:
            lengths = all_lengths[pictures]
            computed = padded(orders[pictures][name], lengths, batch, micro, ranks)
            share, without_waiting, _ = shares(lengths, computed, ranks)
            cells.append(f"{share:.1%} ({without_waiting:.1%})")
        timing.row(name, *cells)
    print()
    packing = list(itertools.product(LIMIT, ("plain", "`group_by_modality`")))
    timing.table("`packing.max_tokens`", *(f"{pictures}, {name}: share; tokens of a row" for pictures, name in packing))
    for tokens in sorted({*LIMIT.values(), 16384}):
        cells = []
        for pictures, name in packing:
            lengths = all_lengths[pictures]
            if tokens < LIMIT[pictures]:
                cells.append("")  # its longest sample would not fit
                continue
            rows = packed(orders[pictures][name], lengths, batch, tokens, ranks)
            share, _, each = shares(lengths, rows, ranks)
            cells.append(f"{share:.1%}; {each:,.0f}")
        timing.row(f"{tokens:,}", *cells)


if __name__ == "__main__":
    main()
