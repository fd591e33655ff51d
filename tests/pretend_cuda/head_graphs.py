"""A head's passes as graphs on the pretend device: the same tokens with and without them, and the launches of both."""

import functools

import test_head_decoding as heads
import tiny
import torch
import visual_tiny
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies import Chain, Draw, Dynamic, Static
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.head_graphs import HeadGraphs, why_not
from draftsmith.models.targets.verification import VerificationGraphs
from draftsmith.trainers.engine import init_distributed

from pretend_cuda.device import COUNTS, GRAPHS
from pretend_cuda.scenarios import _spread

ONE = torch.device("cuda", 1)
BESIDE = "sparrow"  # whose target's passes are graphs, too
LENGTHS, SIZES = tuple(range(24, 130, 16)), (1, 4, 8)
TREE, CHAIN, STATIC = Dynamic(total=16, depth=3, width=4), Chain(4), Static([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
KINDS = ("eagle3", "eagle", "sparrow", "vispec")
# What drafts, how, temperature.
CASES = [
    ("eagle3", TREE, 1.0), ("eagle3", CHAIN, 0.0), ("eagle", TREE, 0.0), ("sparrow", STATIC, 1.0),
    ("vispec", TREE, 1.0), ("image eagle", TREE, 0.0),
]  # fmt: skip


@functools.cache
def _models():
    language, images = tiny.llava(0, layers=6), visual_tiny.llamagen("text", 0)
    heads_of = {kind: heads.loud_head(heads.settings_of(kind), tiny.target(language)).to(ONE) for kind in KINDS}
    torch.manual_seed(0)
    heads_of["image eagle"] = visual_tiny.EAGLE.build(visual_tiny.target(images, 3.0)).to(ONE)
    return language.to(ONE), images.to(ONE), heads_of


def _case(kind):
    """Target, the head's config, head and requests."""
    language, images, heads_of = _models()
    if kind == "image eagle":
        requests = [visual_tiny.request(images, seed) for seed in (1, 2)]
        return visual_tiny.target(images, 3.0), visual_tiny.EAGLE, heads_of[kind], requests
    requests = [tiny.request(seed, seed % 2) for seed in (1, 2)]
    return tiny.target(language), heads.settings_of(kind), heads_of[kind], requests


def _decoded(target, drafter, policy, requests, temperature):
    """Tokens and cycles of each request; of each cycle what it took, None where graphs were captured or an
    image head read its prompt.
    """
    decoding = Decoding(policy, Sampling() if temperature else Greedy(), Draw("top-k"), Warp(temperature), 10, ())
    said, counts = [], []
    for asked in requests:
        with torch.no_grad():
            run = loop._Run(target, drafter, decoding, torch.Generator().manual_seed(0), loop._clock(target, drafter))
            run.prefill(asked)
            run._drafted = _counting(run._drafted, drafted := [])
            cycles = []
            while not run.ended:
                COUNTS.clear()
                before = len(GRAPHS)
                cycles.append(run.cycle().num_accepted)
                totals = {name: COUNTS.totals()[name] for name in ("launches", "reads", "uploads", "blocking")}
                plain = len(GRAPHS) == before and len(cycles) > 1
                counts.append(totals | {"drafting": drafted[-1]} if plain else None)
        said.append((run.tokens, cycles))
    return said, counts


def _counting(grow, drafted):
    """`grow`, with the launches of each call in `drafted`, and how many of them are graphs."""

    def counted(drafter):
        before = COUNTS.launches.copy()
        tree = grow(drafter)
        drafted.append((sum((COUNTS.launches - before).values()), (COUNTS.launches - before)["graph"]))
        return tree

    return counted


def levels():
    """Case -> whether tokens are those of eager passes, what each cycle took, and what was captured."""
    init_distributed()
    torch.cuda.set_device(torch.device("cuda", 0))
    result = {}
    for kind, policy, temperature in CASES:
        target, config, head, requests = _case(kind)
        expected, eager = _decoded(target, config.drafter(head, target), policy, requests, temperature)
        captured, drafter = len(GRAPHS), config.drafter(head, target)
        assert why_not(target) is None, why_not(target)
        drafter.graphs = HeadGraphs(target.device, LENGTHS, SIZES)
        if kind == BESIDE:
            target.graphs = VerificationGraphs(target.decoder, LENGTHS, (1, 8, 16))
        said, replayed = _decoded(target, drafter, policy, requests, temperature)
        result[f"{kind} {policy.name} T={temperature:g}"] = {
            "equal": said == expected, "cycles": list(zip(eager, replayed, strict=True)), "captured": GRAPHS[captured:],
            "num_replayed": drafter.graphs.num_replayed, "num_eager": drafter.graphs.num_eager,
            "passes": sorted({(key[1], key[2]) for key in drafter.graphs.graphs.captured}),
            "lengths": sorted({key[3] for key in drafter.graphs.graphs.captured}),
        }  # fmt: skip
    result["spread"] = why_not(tiny.target(_spread(tiny.llava(0))))
    return result
