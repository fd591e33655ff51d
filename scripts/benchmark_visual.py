#!/usr/bin/env python
"""Cost of drafting beyond the models' own time, at the image demo's size (encoding: benchmark_encoding.py).

    scripts/benchmark_visual.py             prints a section for docs/results/benchmarks.md
    scripts/benchmark_visual.py --quick     fewer pairs

1. A request decoded by the loop against its bare forwards: every call of the target's layers, the head and the LM head
   is recorded once, with its tensors and the cache's length, and then replayed without the loop. Each pair is one
   request; its prefill stands on both sides. Where the rest goes: shares of a metered run, and from them the request
   against the target's and the head's own calls, which are the forwards with guidance, masks and caches.
2. LANTERN's proximity sets on the recorded trees and p, against the cycles that they come from; also with LlamaGen's
   16384 codes, 1000 neighbours and 60 nodes, against cycles of a target that has the demo's layers (its real ones would
   take longer), and against an estimate of GPT-XL's pass: 36 times one of its layers, and its LM head.
3. ADT-Tree's own work (reading neighbours, one step, noting the outcome) inside the cycles.

The shapes are those of recipe=demo/visual-ar; the target is random and the head learns from its images for a moment.
Two clocks: wall, and on a CPU also the time of this thread alone, which does not count where it waits for a core.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from draftsmith.eval import timing
from draftsmith.eval.lantern import Lantern, LanternConfig, lantern
from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies.adt import Adt
from draftsmith.eval.policies.chain import ChainTree
from draftsmith.eval.policies.dynamic import Dynamic
from draftsmith.eval.rules import Rule, Verified
from draftsmith.eval.timing import in_turn, row, spread, timed
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.neighbours import NeighbourTable
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.decoding.warp import Distributions
from draftsmith.models.llamagen.transformer import Block, published, rope_table
from draftsmith.recipes.load import load
from metering import PERCENT, Meter, both, compared, own_clock, watched
from visual_requests import Models, build, decode, forwards, record, replay, sampled

WARM_UP = 1  # requests before the clock counts
TOP_K = 1000  # of LlamaGen's decoding, and LANTERN's k for it


# 1 and 3. The loop, and ADT-Tree's own work

ADT, TARGET, HEAD = "ADT-Tree's own work", "target's masks and cache", "head's masks and cache"
PARTS = ("forwards", "guidance and softmax", TARGET, HEAD, "tree", "rule", "loop")


def benchmark_overhead(name: str, models: Models, tree: Any, pairs: int, num_codes: int | None = None) -> list[Any]:
    """Prints the rows of the ratios; returns that of the shares. `num_codes`: of a request, null for a whole image."""
    decoding = sampled(tree.build(grid=models.target.grid), num_codes or models.target.num_codes)
    bare, whole, shares, taus = [], [], [], []

    def distribution(features: torch.Tensor) -> torch.Tensor:
        return decoding.warp(models.target.guided(features, ()))

    for number in range(WARM_UP + pairs):
        calls, first = record(models, decoding, number)
        actions: dict[str, Callable[[], Any]] = {
            "request": partial(decode, models, decoding, number),
            "bare": partial(replay, calls),
            "whole": partial(replay, calls, distribution),
        }
        times = in_turn(actions, number, both)
        if number >= WARM_UP:
            bare.append(times["request"] / times["bare"])
            whole.append(times["request"] / times["whole"])
            shares.append(metered(models, decoding, number))
            taus.append(sum(c.num_emitted for c in first.cycles) / len(first.cycles))
    compared(f"{name} (tau {statistics.mean(taus):.2f}): request / its forwards", "at most 1.10", bare)
    compared(f"{name}: request / forwards with guidance and softmax", "", whole)
    drafting = [sum(s.get(part, 0.0) for part in ("tree", ADT, "rule", "loop")) for s in shares]
    own_calls = [own_clock(1 / (1 - share)) for share in drafting]
    compared(f"{name}: request / the target's and the head's calls", "at most 1.10", own_calls)
    cells = [spread([s.get(part, 0.0) for s in shares], **(PERCENT | {"digits": 1})) for part in PARTS]
    return [name, *cells, len(shares)]


def benchmark_adt(models: Models, tree: Any, pairs: int) -> None:
    """Print the share of a request that ADT-Tree's own work takes."""
    for start in ("horizontal", "token-flock"):
        policy = tree.model_copy(update={"start_from": start}).build(grid=models.target.grid)
        decoding = sampled(policy, models.target.num_codes)
        shares = [metered(models, decoding, number)[ADT] for number in range(WARM_UP + pairs)][WARM_UP:]
        compared(f"ADT-Tree ({start}): its own work / request", "at most 1%", [own_clock(s) for s in shares], **PERCENT)


def metered(models: Models, decoding: Decoding, number: int) -> dict[str, float]:
    """Shares of a request's time, by part."""
    meter, target, proposal, policy = Meter(), models.target, models.proposal, decoding.policy
    watches: dict[str, Sequence[tuple[Any, str]]] = {
        TARGET: [(target, "prefill"), (target, "verify"), (target, "commit")],
        HEAD: [(proposal, name) for name in ("start", "begin", "root", "expand", "accept")],
        "tree": [(policy, "grow")],
        ADT: [(policy, "_next"), (policy, "observe")] if isinstance(policy, Adt) else [],
        "guidance and softmax": [(target, "guided"), (proposal, "guided"), (decoding.warp, "apply_temperature")],
        "forwards": forwards(models),
    }
    with ExitStack() as stack:
        for part, functions in watches.items():
            stack.enter_context(watched(functions, meter.part(part)))
        decode(models, replace(decoding, rule=cast(Rule, meter.part("rule")(decoding.rule))), number)
    return meter.shares()


# 2. LANTERN's proximity sets


@dataclass(frozen=True)
class Watched(Lantern):
    """Keeps what each cycle asked of the sets."""

    cycles: list[tuple[Tree, torch.Tensor, int]] = field(default_factory=list)  # tree, p, sets after rejections
    later: list[int] = field(default_factory=list)

    def __call__(self, tree: Tree, p: Any, uniforms: Sequence[float] = ()) -> Verified:
        self.later.clear()
        verified = super().__call__(tree, p, uniforms)
        self.cycles.append((tree, Distributions.of(p).whole(), len(self.later)))
        return verified

    def _weigh(self, values: torch.Tensor, *others: Any) -> list[tuple[float, float, float]]:
        self.later.append(len(values))
        return super()._weigh(values, *others)


@torch.inference_mode()
def weigh_again(rule: Lantern, cycles: Sequence[tuple[Tree, torch.Tensor, int]]) -> None:
    """All that `Lantern` does for the sets of these cycles: on a CPU those of the children that it tries."""
    for tree, p, num_later in cycles:
        members, known = rule._members(tree.tokens.to(p.device))
        if not Distributions(p).one_by_one:
            rows = torch.tensor(tree.parents, device=p.device) + 1
            rule._weigh(p[rows[:, None], members], known, None)
            num_later -= 1
        for node in range(num_later):
            here = slice(node, node + 1)
            rule._weigh(p[0][members[here]], known[here], None)


def benchmark_proximity(what: str, models: Models, decoding: Decoding, pairs: int, xl: Any = None) -> None:
    """`xl`: estimates GPT-XL's pass, to compare with that too."""
    rule, shares, later, nodes, of_xl = decoding.rule, [], [], [], []
    assert isinstance(rule, Lantern)
    for number in range(WARM_UP + pairs):
        watching = Watched(rule.config, rule.table, rule.greedy)
        decode(models, replace(decoding, rule=watching), number)
        cycles = [cycle for cycle in watching.cycles if cycle[0].num_nodes]
        actions: dict[str, Callable[[], Any]] = {
            "sets": partial(weigh_again, rule, cycles),
            "request": partial(decode, models, decoding, number),
            "prefill": partial(decode, models, decoding.with_length(1), number),
        }
        times = in_turn(actions, number, both)
        if number >= WARM_UP:
            shares.append(times["sets"] / (times["request"] - times["prefill"]))
            later.append(sum(cycle[2] for cycle in cycles) / len(cycles))
            nodes.append(sum(cycle[0].num_nodes for cycle in cycles) / len(cycles))
            of_xl += [] if xl is None else [times["sets"] / len(cycles) / xl()]
    detail = f"{rule.table.num_codes} codes, k {rule.config.k}, {statistics.mean(nodes):.0f} nodes"
    detail += f", {statistics.mean(later):.1f} sets after rejections"
    compared(f"proximity sets / cycle, {what} ({detail})", "at most 5%", shares, **PERCENT)
    if of_xl:
        compared("the same sets / estimate of GPT-XL's pass alone", "at most 5%", of_xl, **PERCENT)


def xl_pass(nodes: int, device: torch.device) -> Callable[[], np.ndarray]:
    """Estimates a pass of GPT-XL: 36 times one of its layers over root and nodes in two rows, and its LM head."""
    config = published("XL")
    block = Block(config).to(device).eval()
    output = torch.nn.Linear(config.dim, config.vocab_size, bias=False).to(device)
    past = config.num_condition_tokens + config.num_codes // 2
    states = torch.randn(2, nodes + 1, config.dim, device=device)
    rope = rope_table(config.grid, config.head_dim, config.rope_base, zeros_before=config.num_condition_tokens).to(
        device
    )
    mask = torch.ones(nodes + 1, past + nodes + 1, dtype=torch.bool, device=device)
    cache = Cache(1, past + nodes + 1)

    @torch.inference_mode()
    def estimate() -> np.ndarray:
        cache.crop_to(past)
        layer = timed(lambda: block(states, rope[past : past + nodes + 1], mask, cache, 0), both)
        return config.num_layers * layer + timed(lambda: output(states), both)

    estimate()
    return estimate


def random_table(num_codes: int, k: int, device: torch.device, seed: int) -> NeighbourTable:
    """Random neighbours: what the sets cost does not depend on who is near, and ranking 16384 codes takes a minute."""
    generator = torch.Generator().manual_seed(seed)
    return NeighbourTable(torch.randint(num_codes, (num_codes, k), generator=generator).int().to(device))


# The sections


def demo_recipe() -> Any:
    """The shipped recipe demo/visual-ar as it stands, without overrides."""
    return load(["recipe=demo/visual-ar"]).recipe


def decoding_section(arguments: argparse.Namespace) -> None:
    """Print what the loop, LANTERN's sets and ADT-Tree cost beside the models, and each part's share of a request."""
    device = timing.device()
    seed, pairs, few = arguments.seed, *((3, 2) if arguments.quick else (9, 3))
    recipe = demo_recipe()
    config, guidance = recipe.target.model_config_of(), recipe.target.guidance
    methods = recipe.stages["evaluate"].methods
    dynamic, adt = methods["EAGLE-2"].tree, methods["ADT-Tree"].tree
    timing.header(
        f"seed {seed}, float32, {config.num_layers} layers of width {config.dim}, {config.num_codes} codes out of "
        f"{config.vocab_size}, guidance {guidance.scale:g}, temperature 1"
    )
    timing.table("what", "bound", "wall: median [quartiles]", "this thread's time", "pairs")
    models = build(config, guidance, device, seed=seed, head_steps=60)
    trees = {"EAGLE-2": dynamic, "ADT-Tree": adt, "chain": ChainTree(kind="chain", gamma=4)}
    shares = [benchmark_overhead(name, models, tree, pairs) for name, tree in trees.items()]
    larger = config.model_copy(update={"num_layers": 8, "num_heads": 8, "dim": 512, "ffn_hidden": 1536})
    name = "EAGLE-2, 8 layers of width 512"
    shares.append(benchmark_overhead(name, build(larger, guidance, device, seed=seed, head_steps=0), dynamic, few, 24))
    codebook = torch.randn(config.vocab_size, 8, generator=torch.Generator().manual_seed(seed)).to(device)
    relaxed = lantern(methods["LANTERN"].rule, codebook, greedy=False)
    benchmark_proximity("the demo", models, sampled(dynamic.build(), config.num_codes, rule=relaxed), pairs)
    wide = config.model_copy(update={"vocab_size": 16384, "grid": 16, "caption_slots": 120})
    rule = LanternConfig(kind="lantern", k=TOP_K, delta=0.4)
    table = random_table(wide.vocab_size, rule.num_neighbours(wide.vocab_size), device, seed)
    decoding = sampled(Dynamic(60, 4, 10), 24, rule=Lantern(rule, table, greedy=False), top_k=TOP_K)
    models_wide = build(wide, guidance, device, seed=seed, head_steps=0)
    benchmark_proximity("the demo's layers", models_wide, decoding, few, xl=xl_pass(59, device))
    benchmark_adt(models, adt, pairs)
    print("\nShares of a request, from metered runs:\n")
    timing.table("tree", *PARTS, "n")
    for cells in shares:
        row(*cells)
    print()


def main() -> None:
    """Prints the measurements of decoding."""
    parser = timing.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs, for a look")
    parser.add_argument("--seed", type=int, default=0)
    decoding_section(parser.parse_args())


if __name__ == "__main__":
    main()
