#!/usr/bin/env python
"""Cost of an ensemble of drafting modes: its draft step, and the choice of its weights.

    scripts/bench/benchmark_ensemble.py                    sizes of the demo, on this machine
    scripts/bench/benchmark_ensemble.py --size full        a 7B target and a 68M draft with random weights (CUDA)

1. Time of a draft step of four modes in one batch over that of a single mode: bound 1.6 on a CPU at demo size.
2. Share of the weight selection in a cycle (MT*, and for comparison the other rules): bound 5% on a CPU at demo size,
   2% of a 7B target's cycle on a GPU.

Requests are decoded in every mode in turn, in changing order; what is compared stands side by side in time. Models
are random, and latency depends on how many drafted tokens stand, not on which: cycles accept 0, 1, ... gamma in turn.
"""

from statistics import median
from typing import Any

import torch
from draftsmith.core.batch import Request
from draftsmith.core.pictures import Picture
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Verified
from draftsmith.models.decoding.warp import Distributions, Warp
from draftsmith.models.drafters.ensemble import EnsembleConfig, EnsembleProposal, preset
from draftsmith.models.drafters.lvlm import proposal
from draftsmith.models.drafters.modes import ImageSubstitutes
from draftsmith.models.drafters.weights import GridWeights
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.decoder import LlavaDecoder
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.scripts import timing
from draftsmith.scripts.papers.latency_models import random_llava
from draftsmith.scripts.timing import spread

IMAGE, BOS, EOS, PAD, NEWLINE = 3, 1, 2, 0, 5
# vocabulary, picture side, patch, words, (width, inner, layers, heads) of target and draft, of the tower
SIZES = {
    "demo": (700, 48, 16, 30, (128, 384, 4, 4), (64, 192, 1, 2), (64, 192, 2, 2)),
    "full": (32064, 336, 14, 60, (4096, 11008, 32, 32), (768, 3072, 2, 12), (1024, 4096, 24, 16)),
}
GRID = EnsembleConfig(name="MTCP, grid of 286", members=tuple("MTCP"), weights=GridWeights(kind="grid"))


class Words:
    """Captions without a captioner: its time is not an ensemble's."""

    def captions(self, request):
        """The same caption for each picture."""
        return ["x" * 12] * len(request.pixels)


class InTurn:
    """Accepts one token more in each cycle, then none again; what comes out means nothing."""

    name, cycle = "in turn", 0

    def __call__(self, tree, p, uniforms=()):
        path = tuple(range(self.cycle % (tree.num_nodes + 1)))
        self.cycle += 1
        tokens, bonus = tree.tokens.tolist(), int(Distributions.of(p).row(len(path)).argmax())
        return Verified(path, tuple(tokens[: len(path)]), bonus)


class Timed(EnsembleProposal):
    """Notes how long each choice of weights takes, between two synchronisations."""

    seconds: list[float]

    def _observe(self, verified):
        observe = super()._observe
        self.seconds.append(timing.timed(lambda: observe(verified)))


def request(number, vocabulary, side, patch, words):
    """A random prompt with one picture."""
    generator = torch.Generator().manual_seed(number)
    run = (side // patch) ** 2
    text = torch.randint(8, vocabulary, (words,), generator=generator)
    ids = torch.cat([torch.tensor([BOS]), torch.full((run,), IMAGE), text])
    pixels = torch.randn(1, 3, side, side, generator=generator)
    return Request(ids, (ids == IMAGE).to(torch.int8), pixels, str(number), (Picture(side // patch),))


@torch.inference_mode()
def main() -> None:
    """Decodes requests by one drafter and by ensembles, in turn, and prints what each cycle takes."""
    parser = timing.options(__doc__)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="after two of warm-up")
    parser.add_argument("--tokens", type=int, default=64, help="emitted by each request")
    options = parser.parse_args()
    device = timing.device()
    dtype = torch.bfloat16 if options.size == "full" else torch.float32
    vocabulary, side, patch, words, of_target, of_draft, tower = SIZES[options.size]
    ids = TokenIds(vocabulary, IMAGE, BOS, EOS, PAD)
    with device:
        model, draft = (
            random_llava(text, tower, ids, side=side, patch=patch).to(dtype) for text in (of_target, of_draft)
        )
    target = LlavaTarget(model, num_token_ids=vocabulary, image_token_id=IMAGE)
    substitutes = ImageSubstitutes(NEWLINE, (7, 8), (9, 10), lambda text: [20] * len(text), Words())
    shared: dict[str, Any] = {"newline_id": NEWLINE, "substitutes": substitutes}
    named = {"num_token_ids": vocabulary, "never": (IMAGE,), **shared}
    drafters = {name: proposal(draft, preset(name), **named) for name in ("M", "MT", "MTCP")}
    if device.type == "cuda":
        for name in ("M", "MTCP", "MTCP*"):
            graph = proposal(draft, preset(name), chain=options.gamma, capacity=1024, **named)
            drafters[f"{name}, one graph"] = graph
    decoder = LlavaDecoder(draft, num_token_ids=vocabulary, never=(IMAGE,))
    for config in (preset("MT*"), preset("MTCP*"), GRID):
        weights = config.weights.build(len(config.members))
        drafters[config.name] = Timed(decoder, config.members, weights, **shared)
    steps: dict[str, list[float]] = {name: [] for name in drafters}
    shares: dict[str, list[float]] = {name: [] for name, drafter in drafters.items() if isinstance(drafter, Timed)}
    chosen_ms: dict[str, list[float]] = {name: [] for name in shares}
    for number in range(options.requests + 2):
        asked = request(number, vocabulary, side, patch, words)
        for name, drafter in list(drafters.items())[:: 1 if number % 2 else -1]:
            if isinstance(drafter, Timed):
                drafter.seconds = []
            decoding = Decoding(Chain(options.gamma), InTurn(), Draw("top-k"), Warp(), options.tokens, ())
            cycles = generate(target, drafter, asked, decoding).cycles
            if number < 2:
                continue
            full = [c for c in cycles if c.num_drafted == options.gamma]
            steps[name].append(median(c.draft_s / c.num_drafted for c in full))
            if isinstance(drafter, Timed):
                shares[name].append(sum(drafter.seconds) / sum(c.total_s for c in cycles))
                chosen_ms[name].append(1e3 * median(drafter.seconds))
    timing.header(
        f"size {options.size}, {dtype}, vocabulary {vocabulary}, gamma {options.gamma}, n {options.requests} requests "
        f"of {options.tokens} tokens, seed 0; medians [quartiles] over requests"
    )
    timing.table("draft step", "ms", "over M, request by request")
    for name, values in steps.items():
        timing.row(name, spread(values, scale=1e3), spread(timing.ratios(values, steps["M"])))
    print()
    timing.table("weight selection", "ms a cycle", "share of the cycles")
    for name, values in shares.items():
        timing.row(name, spread(chosen_ms[name]), spread(values))


if __name__ == "__main__":
    main()
