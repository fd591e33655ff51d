#!/usr/bin/env python
"""What an ensemble of drafting modes costs: its draft step, and the choice of its weights.

    scripts/benchmark_ensemble.py                    sizes of the demo, on this machine
    scripts/benchmark_ensemble.py --size full        a 7B target and a 68M draft with random weights (CUDA)

1. Time of a draft step of four modes in one batch over that of a single mode: bound 1.6 on a CPU at demo size.
2. Share of the weight selection in a cycle (MT*, and for comparison the other rules): bound 5% on a CPU at demo size,
   2% of a 7B target's cycle on a GPU.

Requests are decoded in every mode in turn, in changing order; what is compared stands side by side in time. Models
are random, and latency depends on how many drafted tokens stand, not on which: cycles accept 0, 1, ... gamma in turn.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from draftsmith.core.nouns import Request
from draftsmith.core.pictures import Picture
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Verified, along
from draftsmith.eval.timing import command, machine, spread
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleConfig, EnsembleProposal, preset
from draftsmith.models.drafters.lvlm import proposal
from draftsmith.models.drafters.modes import StandIns
from draftsmith.models.drafters.weights import GridWeights
from draftsmith.models.llava import TokenIds, assemble, llava_config
from draftsmith.models.targets.llava import LlavaTarget
from transformers import CLIPVisionConfig, LlamaConfig

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
        tokens, bonus = tree.tokens.tolist(), int(p[len(path)].argmax())
        return Verified(path, tuple(tokens[: len(path)]), bonus, along(p, path))


class Timed(EnsembleProposal):
    """Notes how long each choice of weights takes, between two synchronisations."""

    seconds: list[float]

    def _observe(self, verified):
        wait()
        start = time.perf_counter()
        super()._observe(verified)
        wait()
        self.seconds.append(time.perf_counter() - start)


def wait() -> None:
    """Wait until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def llava(vocabulary, side, patch, text, tower, device, dtype):
    """A LLaVA with random weights; `text` and `tower` are (width, inner width, layers, heads)."""
    width, inner, layers, heads = text
    config = llava_config(
        LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, vocab_size=vocabulary, max_position_embeddings=2048, initializer_range=0.03,
        ),
        CLIPVisionConfig(
            hidden_size=tower[0], intermediate_size=tower[1], num_hidden_layers=tower[2],
            num_attention_heads=tower[3], image_size=side, patch_size=patch,
        ),
        TokenIds(vocabulary, IMAGE, BOS, EOS, PAD),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return assemble(config).eval().to(dtype)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="after two of warm-up")
    parser.add_argument("--tokens", type=int, default=64, help="emitted by each request")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if arguments.size == "full" else torch.float32
    vocabulary, side, patch, words, of_target, of_draft, tower = SIZES[arguments.size]
    model = llava(vocabulary, side, patch, of_target, tower, device, dtype)
    target = LlavaTarget(model, num_token_ids=vocabulary, image_token_id=IMAGE)
    draft = llava(vocabulary, side, patch, of_draft, tower, device, dtype)
    stands = StandIns(NEWLINE, (7, 8), (9, 10), lambda text: [20] * len(text), Words())
    given: dict[str, Any] = {
        "num_token_ids": vocabulary,
        "image_token_id": IMAGE,
        "newline_id": NEWLINE,
        "stand_ins": stands,
    }
    drafters = {name: proposal(draft, preset(name), **given) for name in ("M", "MT", "MTCP")}
    if device.type == "cuda":
        for name in ("M", "MTCP", "MTCP*"):
            drafters[f"{name}, one graph"] = proposal(
                draft, preset(name), chain=arguments.gamma, capacity=1024, **given
            )
    decoder = CachedDecoder(draft, num_token_ids=vocabulary, never=(IMAGE,))
    for config in (preset("MT*"), preset("MTCP*"), GRID):
        weights = config.weights.build(len(config.members))
        drafters[config.name] = Timed(decoder, config.members, weights, newline_id=NEWLINE, stand_ins=stands)
    steps: dict[str, list[float]] = {name: [] for name in drafters}
    shares: dict[str, list[float]] = {name: [] for name in drafters}
    chosen: dict[str, list[float]] = {name: [] for name in drafters}
    for number in range(arguments.requests + 2):
        asked = request(number, vocabulary, side, patch, words)
        for name, drafter in list(drafters.items())[:: 1 if number % 2 else -1]:
            if isinstance(drafter, Timed):
                drafter.seconds = []
            decoding = Decoding(Chain(arguments.gamma), InTurn(), Draw("top-k"), Warp(), arguments.tokens, ())
            found = generate(target, drafter, asked, decoding)
            full = [c for c in found.cycles if c.num_drafted == arguments.gamma]
            if number < 2:
                continue
            steps[name].append(statistics.median(c.draft_s / c.num_drafted for c in full))
            if isinstance(drafter, Timed):
                shares[name].append(sum(drafter.seconds) / sum(c.total_s for c in found.cycles))
                chosen[name].append(1e3 * statistics.median(drafter.seconds))
    print(
        f"`{command()}`: {machine()}, size {arguments.size}, {dtype}, vocabulary {vocabulary}, "
        f"gamma {arguments.gamma}, n {arguments.requests} requests of {arguments.tokens} tokens, seed 0; "
        "medians [quartiles] over requests\n"
    )
    print("| draft step | ms | over M, request by request |\n| --- | --- | --- |")
    for name, values in steps.items():
        ratios = [a / b for a, b in zip(values, steps["M"], strict=True)]
        print(f"| {name} | {spread([1e3 * v for v in values])} | {spread(ratios)} |")
    print("\n| weight selection | ms a cycle | share of the cycles |\n| --- | --- | --- |")
    for name, values in shares.items():
        if values:
            print(f"| {name} | {spread(chosen[name])} | {spread(values)} |")


if __name__ == "__main__":
    main()
