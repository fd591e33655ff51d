#!/usr/bin/env python
"""Time of a head's cycle relative to a plain step, by the shape of a tiny target and the length of the clip.

    OMP_NUM_THREADS=1 scripts/benchmark_shapes.py               prints a section for docs/results/benchmarks.md
    scripts/benchmark_shapes.py --shapes 4x128 16x64            layers x width

A wide shallow target beside a head of one layer leaves little to win; a deep narrow one is bound by the launches of its
layers, as large ones are on a GPU. Weights are random, which no time depends on. Seconds are this thread's, so that
other work on the machine counts less; what is compared takes turns, and ratios are of neighbours.

A plain step is the target's pass over one token. A cycle reads six accepted tokens, drafts and verifies. Its time over
a plain step's is the tau at which it costs what plain decoding costs: 1.5x takes a tau one and a half times as high.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from draftsmith.core.batch import Request
from draftsmith.core.pictures import TEXT, VIDEO
from draftsmith.eval import timing
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.timing import Action, in_turn, ratios, spread
from draftsmith.models.decoding.tree import Tree, no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.head_proposal import HeadProposal
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.targets.base import Target, TargetStep
from draftsmith.models.targets.llava import LlavaTarget
from transformers import LlamaConfig, LlamaForCausalLM

BEFORE, BEHIND, ACCEPTED, VOCABULARY = 4, 12, 5, 640  # text around the clip, tokens that a cycle accepts, token ids
POLICIES: Mapping[str, Chain | Dynamic] = {
    "chain of 5": Chain(5), "tree 12-5-4": Dynamic(12, 4, 4), "tree 25-5-8": Dynamic(25, 4, 8),
}  # fmt: skip


def target_of(layers: int, width: int) -> LlavaTarget:
    """A random Llama with four query and two key heads."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=4096,
    )  # fmt: skip
    return LlavaTarget(LlamaForCausalLM(config).eval(), num_token_ids=VOCABULARY, image_token_id=None)


class Length:
    """A request with `visual` visual tokens, whose passes can be run again and again."""

    def __init__(self, target: LlavaTarget, visual: int):
        length = BEFORE + visual + BEHIND
        self.target, self.warp = target, Warp()
        # The target runs text of this length, which costs it the same; the head is told which places are visual.
        modality = torch.full((1, length), TEXT, dtype=torch.int8)
        modality[0, BEFORE : BEFORE + visual] = VIDEO
        ids = torch.randint(VOCABULARY, (length,))
        request = Request(ids, torch.full_like(ids, TEXT, dtype=torch.int8), None)
        self.heads: dict[bool, tuple[HeadProposal, int]] = {}
        for vata in (True, False):
            config = SparrowConfig(kind="sparrow", vata=vata)
            proposal = HeadProposal(config.build(cast(Target, target)), cast(Target, target), config)
            self.session, step = target.prefill(request, proposal.taps, capacity=64)
            assert step.prompt is not None
            seen = replace(step, prompt=replace(step.prompt, modality=modality))
            proposal.start(None, seen, self.warp, capacity=64)
            proposal.begin(1)
            self._grow(proposal, Chain(1))
            self.heads[vata] = proposal, proposal.num_held
        self.trees = {name: self.draft(name, vata=True) for name in POLICIES}
        self.held = self.session.cache.length

    def _grow(self, proposal: HeadProposal, policy: Chain | Dynamic) -> Tree:
        expand = lambda parents, tokens: self.warp.truncate(proposal.expand(parents, tokens))  # noqa: E731
        root = self.warp.truncate(proposal.root())
        return policy.grow(root, expand, Draw("top-k"), max_levels=5)

    def step(self) -> None:
        """A plain one."""
        self.target.verify(self.session, 1, no_tree())
        self.session.cache.crop_to(self.held)

    def verify(self, policy: str) -> None:
        """The target's pass over a tree."""
        self.target.verify(self.session, 1, self.trees[policy])
        self.session.cache.crop_to(self.held)

    @torch.inference_mode()
    def draft(self, policy: str, *, vata: bool) -> Tree:
        """The head's part of a cycle."""
        proposal, held = self.heads[vata]
        states = lambda: torch.randn(1, ACCEPTED + 1, self.target.shape.hidden_size)  # noqa: E731
        step = TargetStep(torch.zeros(1, 1), states(), {layer: states() for layer in proposal.taps.layers})
        proposal.accept(SimpleNamespace(step=step, tokens=(5,) * ACCEPTED, bonus=7))
        tree = self._grow(proposal, POLICIES[policy])
        proposal._cache.crop_to(held)
        return tree


def measured(at: Length, count: int) -> dict[object, list[float]]:
    """Seconds of this thread, in `count` rounds of everything after one that does not count."""
    actions: dict[object, Action] = {"step": at.step}
    for policy in POLICIES:
        actions["verify", policy] = partial(at.verify, policy)
        for vata in (True, False):
            actions["draft", policy, vata] = partial(at.draft, policy, vata=vata)
    each = [in_turn(actions, number, time.thread_time) for number in range(count + 1)][1:]
    return {name: [times[name] for times in each] for name in actions}


def main() -> None:
    """Prints a line for each shape, length and tree."""
    parser = timing.options(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["4x128", "12x96", "16x64"], help="layers x width")
    parser.add_argument("--visual", nargs="+", type=int, default=[63, 252, 513, 999, 1998], help="visual tokens")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    timing.header(f"seconds of the thread, seed {options.seed}, float32, {VOCABULARY} ids, n {options.rounds}")
    timing.table(
        "target", "visual tokens", "plain step, ms", "tree", "T_verify/T_p", "T_draft/T_p with VATA",
        "with all inputs", "tau that breaks even with VATA", "cycle with all inputs / with VATA",
    )  # fmt: skip
    for shape in options.shapes:
        torch.manual_seed(options.seed)
        target = target_of(*map(int, shape.split("x")))
        for visual in options.visual:
            times = measured(Length(target, visual), options.rounds)
            for policy in POLICIES:
                verify, *drafts = times["verify", policy], times["draft", policy, True], times["draft", policy, False]
                cycles = [[a + b for a, b in zip(verify, draft, strict=True)] for draft in drafts]
                parts = [spread(ratios(part, times["step"]), 2) for part in (verify, *drafts, cycles[0])]
                step = spread(times["step"], 2, 1000.0)
                timing.row(shape, visual, step, policy, *parts, spread(ratios(cycles[1], cycles[0]), 2))


if __name__ == "__main__":
    main()
