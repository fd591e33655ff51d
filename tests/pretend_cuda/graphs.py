"""Passes as graphs on the pretend device: the same tokens with and without them, and how much fewer launches."""

import functools

import test_head_decoding as heads
import tiny
import tiny_qwen
import torch
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.tree import chain, no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llava import LlavaTarget
from draftsmith.models.targets.verification import VerificationGraphs, why_not
from draftsmith.trainers.engine import init_distributed
from transformers import LlamaConfig, LlamaForCausalLM

from pretend_cuda.device import COUNTS, GRAPHS
from pretend_cuda.large import _causal

ONE = torch.device("cuda", 1)
LENGTHS, NODES = tuple(range(16, 100, 8)), (1, 8, 16)
TREE, CHAIN = Dynamic(total=16, depth=3, width=4), Chain(4)


@functools.cache
def _models():
    return {
        "llama": _causal().to(ONE), "llava": tiny.llava(0).to(ONE),
        "qwen2_5_vl": tiny_qwen.model("qwen2_5_vl", layers=2).to(ONE),
    }  # fmt: skip


def _target(family, graphs):
    model = _models()[family]
    if family == "qwen2_5_vl":
        target = tiny_qwen.target(model)
    else:
        image = None if family == "llama" else tiny.IMAGE_ID
        target = LlavaTarget(model, num_token_ids=tiny.TOKENS, image_token_id=image)
    if graphs:
        assert why_not(target.decoder) is None, why_not(target.decoder)
        target.graphs = VerificationGraphs(target.decoder, LENGTHS, NODES)
    return target


def _requests(family):
    if family == "qwen2_5_vl":
        return [tiny_qwen.request(family, seed=seed, words=3 + 4 * seed) for seed in range(2)]
    return [tiny.request(seed, 0 if family == "llama" else 1) for seed in (1, 2)]


def _drafter(kind, target):
    if kind == "tree":
        config = heads.settings_of("eagle")
        return config.drafter(heads.loud_head(config, target).to(ONE), target)
    if target.vocab_size == tiny.VOCAB:
        return tiny.proposal(tiny.near(tiny.llava(0)).to(ONE))
    torch.manual_seed(3)
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
                         vocab_size=target.vocab_size, initializer_range=0.3)  # fmt: skip
    decoder = CachedDecoder(LlamaForCausalLM(config).to(ONE), num_token_ids=tiny_qwen.TOKENS)
    return tiny.IndependentProposal(decoder, "T", newline_id=5)


# Family, what drafts, temperature.
CASES = [
    ("llama", "chain", 0.0), ("llama", "tree", 1.0), ("llava", "plain", 0.0), ("llava", "chain", 1.0),
    ("llava", "tree", 0.0), ("qwen2_5_vl", "chain", 0.0), ("qwen2_5_vl", "tree", 1.0),
]  # fmt: skip


def _decoded(target, kind, requests, temperature):
    """Tokens and cycles of each request; launches of each cycle, None where graphs were captured."""
    drafter = None if kind == "plain" else _drafter(kind, target)
    rule, policy = Sampling() if temperature else Greedy(), TREE if kind == "tree" else CHAIN
    decoding = Decoding(policy, rule, Draw("top-k"), Warp(temperature), 9, ())
    said, launches = [], []
    for asked in requests:
        with torch.no_grad():
            run = loop._Run(target, drafter, decoding, torch.Generator().manual_seed(0), loop._clock(target, drafter))
            run.prefill(asked)
            cycles = []
            while not run.ended:
                COUNTS.clear()
                before = len(GRAPHS)
                cycles.append(run.cycle().num_accepted)
                launches.append(None if len(GRAPHS) > before else sum(COUNTS.launches.values()))
        said.append((run.tokens, cycles))
    return said, launches


def verification():
    """Case -> whether tokens are those of eager passes, launches of a cycle, and what the graphs counted."""
    init_distributed()
    torch.cuda.set_device(torch.device("cuda", 0))
    result = {}
    for family, kind, temperature in CASES:
        eager, graphed = _target(family, False), _target(family, True)
        expected, launched = _decoded(eager, kind, _requests(family), temperature)
        captured = len(GRAPHS)
        said, replayed = _decoded(graphed, kind, _requests(family), temperature)
        result[f"{family} {kind} T={temperature:g}"] = {
            "equal": said == expected, "accepted": sum(sum(cycles) for _, cycles in said),
            "launches": list(zip(launched, replayed, strict=True)), "captured": GRAPHS[captured:],
            "num_replayed": graphed.graphs.num_replayed,
            "num_eager": graphed.graphs.num_eager,
            "lengths": sorted({length for _, length, _ in graphed.graphs.graphs.captured}),
        }  # fmt: skip
    result["outlives"] = _outlives()
    return result


def _outlives():
    """Whether a pass's results stay as they are while other graphs run."""
    target = _target("llava", True)
    session, _ = target.prefill(_requests("llava")[0], Taps(feature=True), capacity=40)
    first = target.verify(session, 7, no_tree())
    before = first.logits.cpu().clone(), first.feature.cpu().clone()
    target.verify(session, 9, no_tree())
    target.verify(session, 8, chain(torch.tensor([5, 6])))
    assert len(target.graphs.graphs) == 2
    return torch.equal(first.logits.cpu(), before[0]) and torch.equal(first.feature.cpu(), before[1])
