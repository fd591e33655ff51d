#!/usr/bin/env python
"""What a drafting cycle costs a head at 0.5k and at 25k visual tokens, with the text-only window (VATA) and without.

    OMP_NUM_THREADS=1 scripts/benchmark_vata.py            prints a section for docs/results/benchmarks.md
    scripts/benchmark_vata.py --width 3584 --dtype bfloat16     a 7B target's layer, for a GPU

A cycle is the head's part of it: reading three accepted tokens, and a tree 25-5-8 over a vocabulary. The states are
random, which no time depends on; the two lengths take turns, and ratios are of neighbours. Bound: with VATA, 25k costs
what 0.5k does, within 5% beyond the spread.
"""

from types import SimpleNamespace
from typing import cast

import torch
from draftsmith.core.pictures import TEXT, VIDEO
from draftsmith.core.section import torch_dtype
from draftsmith.eval import timing
from draftsmith.eval.policies import Draw, Dynamic
from draftsmith.eval.timing import ratios, rounds, spread
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.head_module import StateHead
from draftsmith.models.drafters.head_proposal import HeadProposal
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.targets.base import Prompt, Target, TargetStep, language_shape
from transformers import LlamaConfig

BEFORE, BEHIND, ACCEPTED = 24, 40, 3  # text around the clip, and tokens that a cycle accepts


def target_of(width: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> SimpleNamespace:
    """What a head asks of a target: its config, embedding and LM head."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=round(5.3 * width), num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 448), num_hidden_layers=28, vocab_size=vocabulary,
        max_position_embeddings=65536,
    )  # fmt: skip
    table = torch.randn(vocabulary, width, device=device, dtype=dtype) * 0.02
    return SimpleNamespace(
        config=config, shape=language_shape(config), embedding=table, scores=lambda feature: (feature @ table.T).float()
    )


class Cycles:
    """One request with `visual` tokens, whose cycles can be run again and again."""

    def __init__(self, target: SimpleNamespace, visual: int, *, vata: bool, head: StateHead):
        self.target, self.device = target, target.embedding.device
        length = BEFORE + visual + BEHIND
        modality = torch.full((1, length), TEXT, dtype=torch.int8, device=self.device)
        modality[0, BEFORE : BEFORE + visual] = VIDEO
        ids = torch.randint(target.config.vocab_size, (1, length), device=self.device)
        seen, positions = torch.ones_like(ids, dtype=torch.bool), torch.arange(length, device=self.device)[None]
        prompt = Prompt(ids, seen, positions, Guidance(), modality)
        self.proposal = HeadProposal(head, cast(Target, target), SparrowConfig(kind="sparrow", vata=vata))
        layers = {layer: self._states(length) for layer in self.proposal.taps.layers}
        step = TargetStep(torch.zeros(1, target.config.vocab_size), self._states(length), layers, {}, prompt)
        self.policy, self.warp = Dynamic(25, 4, 8), Warp()
        # Cycles are cut back to the prompt, so that any number of them can follow each other.
        self.proposal.start(None, step, self.warp, capacity=512)
        self.proposal.begin(1)
        self._grow()
        self.held = self.proposal.num_held

    def _states(self, count: int) -> torch.Tensor:
        width = self.target.config.hidden_size
        return torch.randn(1, count, width, device=self.device, dtype=self.target.embedding.dtype)

    def _grow(self) -> None:
        expand = lambda parents, tokens: self.warp.truncate(self.proposal.expand(parents, tokens))  # noqa: E731
        root = self.warp.truncate(self.proposal.root())
        self.policy.grow(root, expand, Draw("top-k"), max_levels=5)

    @torch.inference_mode()
    def __call__(self) -> None:
        step = TargetStep(
            torch.zeros(1, 1),
            self._states(ACCEPTED + 1),
            {layer: self._states(ACCEPTED + 1) for layer in self.proposal.taps.layers},
        )
        self.proposal.accept(SimpleNamespace(step=step, tokens=(5,) * ACCEPTED, bonus=7))
        self._grow()
        self.proposal._cache.crop_to(self.held)


def main() -> None:
    """Prints what a head of random weights takes with and without visual inputs."""
    parser = timing.options(__doc__)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device, dtype = timing.device(), torch_dtype(options.dtype)
    target = target_of(options.width, options.vocabulary, dtype, device)
    head = SparrowConfig(kind="sparrow").build(cast(Target, target)).to(device, dtype)
    timing.header(f"seed {options.seed}, {options.dtype}, width {options.width}, {options.vocabulary} ids, "
                  f"tree 25-5-8, n {options.rounds}")  # fmt: skip
    timing.table(
        "window", "inputs held at 0.5k", "at 25k", "cycle at 0.5k, ms", "at 25k / at 0.5k", "same length twice"
    )
    for vata in (True, False):
        short, again, long = (Cycles(target, n, vata=vata, head=head) for n in (500, 500, 25000))
        times = rounds({"short": short, "again": again, "long": long}, options.rounds, warm_up=3)
        over_short = [spread(ratios(times[name], times["short"])) for name in ("long", "again")]
        window = "text only (VATA)" if vata else "all inputs"
        timing.row(window, short.held, long.held, spread(times["short"], 2, 1000.0), *over_short)


if __name__ == "__main__":
    main()
