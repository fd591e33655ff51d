#!/usr/bin/env python
"""Pictures per second of plain decoding, by how many are drawn side by side.

    scripts/benchmark_pictures.py             prints a section for docs/results/benchmarks.md
    scripts/benchmark_pictures.py --quick     fewer rounds

Random text-conditional LlamaGens draw the same guided pictures one, four and sixteen at a time, in turn; captions have
unequal lengths. Each ratio is of one round's neighbours. The tokens are compared as well.
"""

import argparse
import functools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval import timing
from draftsmith.models.decoding.batched import draw_pictures, even_batches
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from draftsmith.models.targets.llamagen import LlamaGenTarget

BATCHES = (1, 4, 16)
PICTURES = 16
# name -> shape: the demo's, and one whose weights fill no cache.
SHAPES = {
    "4 layers of width 128, 64 codes": {"num_layers": 4, "num_heads": 4, "dim": 128, "ffn_hidden": 384, "grid": 8},
    "8 layers of width 512, 64 codes": {"num_layers": 8, "num_heads": 8, "dim": 512, "ffn_hidden": 1536, "grid": 8},
}


def build(shape: dict[str, int], seed: int, device: torch.device) -> tuple[LlamaGenTarget, list[ImageRequest]]:
    """A random target with guidance 7.5, and a request for each picture."""
    config = LlamaGenConfig(
        **shape, vocab_size=1024, caption_dim=64, caption_slots=16, init_std=0.06, dropout=0.0, condition="text"
    )
    model, generator = LlamaGen(config), torch.Generator().manual_seed(seed)
    model.reset_parameters(generator)
    torch.nn.init.normal_(model.output.weight, std=0.2, generator=generator)
    requests = [
        ImageRequest(torch.randn(1 + number % config.caption_slots, config.caption_dim, generator=generator))
        for number in range(PICTURES)
    ]
    return LlamaGenTarget(model.to(device), Guidance(7.5)), requests


def benchmark(name: str, arguments: argparse.Namespace, device: torch.device) -> None:
    """Print a line for each batch size."""
    target, requests = build(SHAPES[name], arguments.seed, device)
    drawn: dict[int, list[list[int]]] = {}

    def draw(size: int) -> None:
        drawn[size] = []
        for some in even_batches(range(PICTURES), size):
            chosen = [requests[number] for number in some]
            drawn[size] += draw_pictures(target, chosen, Warp(1.0, 1000), seeds=list(some))

    count = 3 if arguments.quick else 9
    times = timing.rounds({size: functools.partial(draw, size) for size in BATCHES}, count)
    for size in BATCHES:
        speed = timing.spread([PICTURES / seconds for seconds in times[size]], 2)
        ratio = timing.spread(timing.ratios(times[1], times[size]), 2, unit="x")
        same = sum(a == b for a, b in zip(drawn[size], drawn[1], strict=True))
        timing.row(name, size, speed, ratio, f"{same} of {PICTURES}", count)


def main() -> None:
    parser = timing.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = timing.device()
    timing.header(f"seed {arguments.seed}, float32, {PICTURES} pictures a round, guidance 7.5, top-k 1000, T = 1")
    timing.table(
        "target", "side by side", "pictures/s", "against one at a time", "tokens as of one at a time", "rounds"
    )
    for name in SHAPES:
        benchmark(name, arguments, device)


if __name__ == "__main__":
    main()
