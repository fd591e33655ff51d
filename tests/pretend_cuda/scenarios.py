"""What runs on the pretend device, in a process of `process.py`. Every function returns what JSON holds."""

import contextlib
import copy
import functools
import io
from collections import Counter
from types import SimpleNamespace

import dflash_tiny
import test_head_decoding as heads
import tiny
import torch
import visual_tiny
from accelerate import dispatch_model
from draftsmith.core.errors import UserError
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.captured import Graphs, PassGraphs
from draftsmith.models.decoding.model_cache import ModelCache
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import head_graphs
from draftsmith.models.drafters.graph import GraphedChain
from draftsmith.models.drafters.weights import Fixed
from draftsmith.models.targets import verification
from draftsmith.models.targets.llava.decoder import LlavaDecoder
from draftsmith.trainers.evaluate.graphs import about_graphs, capture_heads, capture_target
from draftsmith.trainers.evaluate.methods import GraphsConfig
from draftsmith.trainers.train.engine import init_distributed

from pretend_cuda.captures import Captures
from pretend_cuda.device import COUNTS, GRAPHS, aside

ONE, OTHER = torch.device("cuda", 1), torch.device("cuda", 0)
TREE = {"total": 16, "depth": 3, "width": 4}


@functools.cache
def _built(name):
    """Target's model, what drafts, and a request; on the CPU."""
    if name == "image eagle":
        generator = visual_tiny.llamagen("text", 0)
        head = visual_tiny.trained(visual_tiny.target(generator, 3.0), visual_tiny.EAGLE, steps=10)[0]
        return generator, head, visual_tiny.request(generator, 7)
    whole, asked = tiny.llava(0, layers=6 if name in (*HEADS, "dflash") else 2), tiny.request(1, 1)
    if name == "dflash":
        return whole, dflash_tiny.draft(tiny.target(whole))[1], asked
    draft = heads.loud_head(heads.settings_of(name), tiny.target(whole)) if name in HEADS else tiny.near(whole)
    return whole, draft, asked


def _case(name, device, spread=False):
    """Target, drafter and policy on a device, with a request; `spread`: the target lies on both devices."""
    with aside():
        whole, draft, asked = copy.deepcopy(_built(name))
    draft_device = ONE if spread else device
    if name == "image eagle":
        big = visual_tiny.target(whole.to(device), 3.0)
        return big, visual_tiny.EAGLE.drafter(draft.to(device), big), Dynamic(**TREE), asked
    big = tiny.target(_spread(whole) if spread else whole.to(device))
    draft = draft.to(draft_device)
    if name in HEADS:
        return big, heads.settings_of(name).drafter(draft, big), Dynamic(**TREE), asked
    if name == "graph":
        decoder = LlavaDecoder(draft, num_token_ids=tiny.TOKENS, never=(tiny.IMAGE_ID,))
        return big, GraphedChain(decoder, ["M"], Fixed((1.0,)), newline_id=5, gamma=4, capacity=96), Chain(4), asked
    if name == "dflash":
        return big, dflash_tiny.config_of(**dflash_tiny.SMALL).drafter(draft, big), Chain(4), asked
    policy = Dynamic(**TREE) if name == "draft tree" else Chain(4)
    return big, None if name == "plain" else tiny.proposal(draft), policy, asked


def _with_graphs(big, drafter):
    """The head's passes are graphs, and the target's where it is a language model."""
    assert head_graphs.why_not(big) is None, head_graphs.why_not(big)
    drafter.graphs = PassGraphs(big.device, (48, 72, 96), (1, 4, 8), functools.partial(Cache, 1))
    if hasattr(big, "decoder"):
        assert verification.why_not(big.decoder) is None, verification.why_not(big.decoder)
        big.graphs = PassGraphs(big.device, (48, 72, 96), (1, 8, 16), big.decoder.new_cache)


@functools.cache
def _said_by_the_cpu(name, temperature):
    with aside():
        return _decoded(name.removesuffix(GRAPHED), temperature, "cpu")[0]


def _decoded(name, temperature, device, spread=False):
    """Tokens, and of whole cycles in which no graph was captured: mean launches, reads, uploads and clock waits, and
    places of the reads.
    """
    big, drafter, policy, asked = _case(name.removesuffix(GRAPHED), device, spread)
    if name.endswith(GRAPHED):
        _with_graphs(big, drafter)
    return _cycles(big, drafter, policy, asked, temperature)


def _cycles(big, drafter, policy, asked, temperature):
    # An end token, so that policies look for it as they do in a run.
    rule = Sampling() if temperature else Greedy()
    decoding = Decoding(policy, rule, Draw("top-k"), Warp(temperature), 14, (tiny.EOS,))
    totals, places, count = Counter(), Counter(), 0
    with torch.no_grad():
        run = loop._Run(big, drafter, decoding, torch.Generator().manual_seed(0), loop._clock(big, drafter))
        run.prefill(asked)
        while not run.ended:
            # The first cycle may read a prompt, and those at the end draft less.
            captured, whole = len(GRAPHS), len(run.tokens) > 1 and run.room > policy.num_levels
            COUNTS.clear()
            run.cycle()
            if whole and len(GRAPHS) == captured:
                totals.update(COUNTS.totals())
                places.update(COUNTS.reads)
                count += 1
    means = {key: round(value / count, 2) for key, value in totals.items()} if count else {}
    return run.tokens, means | {"places": {place: round(n / count, 2) for place, n in places.items()}}


HEADS = ("eagle3", "eagle", "sparrow")
GRAPHED = " in graphs"
CASES = (
    "plain", "chain", "draft tree", "graph", *HEADS, "dflash", "image eagle", "eagle3" + GRAPHED, "sparrow" + GRAPHED,
    "image eagle" + GRAPHED,
)  # fmt: skip


def decoding():
    """Case and temperature -> whether the device says what the CPU says, and what a cycle takes. Decoding names its
    device: the current one is the other one by then.
    """
    init_distributed()
    current = torch.cuda.current_device()
    torch.cuda.set_device(OTHER)
    equal, cycles, graphs, waits = {}, {}, {}, set()
    for name in CASES:
        for temperature in (0.0, 1.0):
            case, before = f"{name} T={temperature:g}", len(GRAPHS)
            tokens, cycles[case] = _decoded(name, temperature, ONE)
            waits |= set(COUNTS.waits)
            equal[case], graphs[case] = tokens == _said_by_the_cpu(name, temperature), GRAPHS[before:]
    return {"equal": equal, "cycles": cycles, "current": current, "graphs": graphs, "waits": sorted(waits)}


def one_pool():
    """What a graph returned, before and after another graph of the same memory pool has run."""
    init_distributed()
    graphs, ones = Graphs(ONE), torch.ones(3, device=ONE)
    (first,) = graphs("double", lambda value: (value * 2,), ones)
    before = first.tolist()
    graphs("treble", lambda value: (value * 3,), ones)
    return before, first.tolist()


def wanted():
    """`graphs` -> what evaluations with it do: two equal requests each, greedy, of a language model and its head.

    broken N: the N-th capture breaks off, and all later ones would.
    """
    init_distributed()
    said = _said_by_the_cpu("eagle3", 0.0)
    cases = {"auto": ("auto", None), "true": (True, None), "false": (False, None)}
    cases |= {f"broken {n}": ("auto", n) for n in (0, 1, 2, 4)} | {"true, broken": (True, 0)}
    result = {}
    for name, (value, left) in cases.items():
        big, drafter, policy, asked = _case("eagle3", ONE)
        drafting = [SimpleNamespace(title="EAGLE-3", drafter=drafter, policy=policy)]
        config, notes, found = GraphsConfig(target=value, head=value, length=90), io.StringIO(), []
        Captures.left, Captures.tried = left, 0
        try:
            with contextlib.redirect_stderr(notes):
                for capture in (capture_target, capture_heads):
                    capture(config, big, drafting, 90, stage="evaluate")
                for _ in range(2):
                    tokens, counts = _cycles(big, drafter, policy, asked, 0.0)
                    found.append({"equal": tokens == said, "tried": Captures.tried, "counts": counts})
                    found[-1]["left"] = Captures.leaves()
        except UserError as error:
            result[name] = {"error": str(error), "left": Captures.leaves()}
            continue
        finally:
            Captures.left = None
        parts = [part.graphs for part in (big, drafter) if part.graphs is not None]
        result[name] = {
            "requests": found, "notes": notes.getvalue().splitlines(), "about": about_graphs(config, big, drafting),
            "held": [part._cache is not None or bool(part._placed) or bool(part.captured) for part in parts],
        }  # fmt: skip
    return result


def two_devices():
    """Case and temperature -> whether a target whose layers lie on both devices says what the CPU says."""
    init_distributed()
    result = {
        f"{name} T={temperature:g}":
            _decoded(name, temperature, None, spread=True)[0] == _said_by_the_cpu(name, temperature)
        for name, temperature in (("chain", 0.0), ("eagle3", 1.0), ("eagle", 0.0))
    }  # fmt: skip
    # The paths above hold no gap.
    result["commit"] = _committed(ONE, OTHER) == _committed("cpu", "cpu")
    result["no graphs"] = head_graphs.why_not(tiny.target(_spread(tiny.llava(0)))) == "the target lies on 2 devices"
    return result


def _committed(*devices):
    """What a cache holds whose layers lie on these devices once the second and fourth of four new positions count."""
    cache = ModelCache(len(devices), 12)
    for layer, device in enumerate(devices):
        keys = torch.arange(9.0, device=device).view(1, 1, 9, 1)
        cache.update(keys, -keys, layer)
    cache.advance(5)
    cache.commit([1, 3])
    return [[kept[0, 0, :7, 0].tolist() for kept in (layer.keys, layer.values)] for layer in cache.own_layers]


def _spread(model):
    """A model whose last layers, norm and LM head lie on the other device, as a device map puts them."""
    language = model.model.language_model
    half = len(language.layers) // 2
    places = {f"model.language_model.layers.{n}": OTHER if n >= half else ONE for n in range(len(language.layers))}
    places |= {"model.language_model.norm": OTHER, "lm_head": OTHER, "model.language_model.embed_tokens": ONE}
    places |= {"model.language_model.rotary_emb": ONE, "model.vision_tower": ONE, "model.multi_modal_projector": ONE}
    return dispatch_model(model, {name: device.index for name, device in places.items()}, force_hooks=True)
