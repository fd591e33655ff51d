#!/usr/bin/env python
"""A whole sampled cycle of this code against another checkout's: what visiting few rows of p saves.

    git worktree add FOLDER/draftsmith 31cd134^          the code before sampled decoding read what it visits alone
    OMP_NUM_THREADS=1 scripts/benchmark_sampled.py --before FOLDER

Two child processes, one with each code and the same weights, take turns; a cycle runs from one pass of the target to
the next, in the child's own thread time. The cases: EAGLE-3's dynamic tree at temperature 1, a sampled chain of a draft
model, and EAGLE-2's tree over codes of pictures with guidance and top-k 1,000.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import draftsmith
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval import timing
from draftsmith.eval.policies import Chain, Dynamic
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from draftsmith.models.targets.causal import CausalTarget
from draftsmith.models.targets.llamagen import LlamaGenTarget
from peers.ours import SIZES, TREE, answer, passes, settings, target_config, text
from peers.pairs import Side, cycle_seconds
from transformers import LlamaForCausalLM

CODES = 16384


def eagle3(size: str) -> Side:
    """EAGLE-3's tree over a language model."""
    model = LlamaForCausalLM(target_config(size, 7)).eval()
    target = CausalTarget(model, num_token_ids=model.config.vocab_size)
    drafts = Eagle3Config(kind="eagle3")
    drafter = drafts.drafter(drafts.build(target).eval(), target)
    decoding = settings(Dynamic(**TREE), 1.0)
    return Side(passes(target), lambda n, tokens: answer(target, drafter, decoding, text(target, 64, n), n, tokens))


def draft_model(size: str) -> Side:
    """A chain of five tokens, drawn from a draft model's own distributions."""
    models = [LlamaForCausalLM(target_config(size, layers)).eval() for layers in (4, 1)]
    vocab_size = models[0].config.vocab_size
    target = CausalTarget(models[0], num_token_ids=vocab_size)
    drafter = IndependentProposal(CachedDecoder(models[1], num_token_ids=vocab_size), "T", newline_id=5)
    decoding = settings(Chain(5), 1.0, "sample")
    return Side(passes(target), lambda n, tokens: answer(target, drafter, decoding, text(target, 64, n), n, tokens))


def picture(size: str) -> Side:
    """EAGLE-2's tree over codes, guided."""
    sizes = SIZES[size]
    config = LlamaGenConfig(
        num_layers=4, num_heads=sizes["num_attention_heads"], dim=sizes["hidden_size"], caption_dim=64, init_std=0.06,
        ffn_hidden=sizes["intermediate_size"], vocab_size=CODES, grid=16, dropout=0.0,
    )  # fmt: skip
    model = LlamaGen(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    torch.nn.init.normal_(model.output.weight, std=0.06)
    target = LlamaGenTarget(model, Guidance(3.0))
    drafts = EagleConfig(kind="eagle")
    drafter = drafts.drafter(drafts.build(target).eval(), target)
    decoding = settings(Dynamic(60, 4, 10), 1.0, top_k=1000)

    def request(number: int) -> ImageRequest:
        return ImageRequest(torch.randn(20, 64, generator=torch.Generator().manual_seed(number)), str(number))

    return Side(passes(target), lambda n, tokens: answer(target, drafter, decoding, request(n), n, tokens))


CASES = {
    "EAGLE-3's tree": eagle3,
    "a draft model's sampled chain": draft_model,
    "tree over codes, guidance, top-k 1,000": picture,
}


def serve(size: str, case: str) -> None:
    """In a child: read numbers of requests, print the seconds of a cycle of each."""
    torch.manual_seed(0)
    side = CASES[case](size)
    print(Path(draftsmith.__file__).resolve().parent, flush=True)
    for line in sys.stdin:
        print(cycle_seconds(side, int(line)), flush=True)


def _child(parent: Path, size: str, case: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--serve", size, case], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(parent)},
    )  # fmt: skip


def _asked(child: subprocess.Popen[str], number: int) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{number}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def main() -> None:
    """Prints a table for docs/results/benchmarks.md."""
    parser = timing.options(__doc__)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="that holds the other checkout as `draftsmith`")
    parser.add_argument("--sizes", nargs="+", default=["demo size"], choices=[*SIZES])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--serve", nargs=2, help=timing.HIDDEN)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    timing.header("seed 0, float32, the children's thread time")
    timing.table("cycle at temperature 1", "this code / before [quartiles]", "ms, this code and before", "pairs")
    here = Path(draftsmith.__file__).resolve().parents[1]
    for size in arguments.sizes:
        for case in CASES:
            children = [_child(parent.resolve(), size, case) for parent in (here, arguments.before)]
            for child, parent in zip(children, (here, arguments.before), strict=True):
                assert child.stdout is not None
                loaded = child.stdout.readline().strip()
                assert loaded == str(parent.resolve() / "draftsmith"), loaded
            asked = [partial(_asked, child) for child in children]
            times: tuple[list[float], list[float]] = ([], [])
            for number in range(arguments.pairs + 1):
                for index in (0, 1) if number % 2 else (1, 0):
                    seconds = asked[index](number)
                    if number:  # the first warms up
                        times[index].append(seconds)
            for child in children:
                child.communicate()
            both = ", ".join(timing.spread(side, 1, 1e3) for side in times)
            timing.row(f"{case}, {size}", timing.spread(timing.ratios(*times)), both, arguments.pairs)


if __name__ == "__main__":
    main()
