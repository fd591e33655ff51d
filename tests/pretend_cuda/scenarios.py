"""What runs on the pretend device, in a process of `process.py`. Every function returns what JSON holds."""

import copy
import functools
from collections import Counter
from types import SimpleNamespace

import dflash_tiny
import test_head_decoding as heads
import tiny
import torch
import visual_tiny
from accelerate import dispatch_model
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.model_cache import ModelCache
from draftsmith.models.decoding.warp import Warp
from draftsmith.trainers.evaluate.text import capture, why_not
from draftsmith.trainers.train.engine import init_distributed

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
    if name == "dflash":
        return big, dflash_tiny.config_of(**dflash_tiny.SMALL).drafter(draft, big), Chain(4), asked
    policy = Dynamic(**TREE) if name == "draft tree" else Chain(4)
    return big, None if name == "plain" else tiny.proposal(draft), policy, asked


def _with_graphs(big, drafter, policy):
    """The target's passes are graphs, and the head's or the draft's."""
    drafting = [SimpleNamespace(title="it", drafter=drafter, policy=policy)]
    capture(True, big, drafting, 90)
    assert big.graphs is not None and drafter.graphs is not None


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
        _with_graphs(big, drafter, policy)
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
    "plain", "chain", "draft tree", *HEADS, "dflash", "image eagle", "eagle3" + GRAPHED, "sparrow" + GRAPHED,
    "chain" + GRAPHED,
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
    spread = tiny.target(_spread(tiny.llava(0))).decoder
    result["no graphs"] = why_not(spread) == "the model lies on several devices"
    return result


def _committed(*devices):
    """What a cache holds whose layers lie on these devices once the second and fourth of four new positions count."""
    cache = ModelCache(len(devices), 12)
    for layer, device in enumerate(devices):
        keys = torch.arange(9.0, device=device).view(1, 1, 9, 1)
        cache.update(keys, -keys, layer)
    cache.advance(5)
    cache.commit([1, 3])
    return [[kept[0, 0, :7, 0].tolist() for kept in (layer.keys, layer.values)] for layer in cache.kv_layers]


def _spread(model):
    """A model whose last layers, norm and LM head lie on the other device, as a device map puts them."""
    language = model.model.language_model
    half = len(language.layers) // 2
    places = {f"model.language_model.layers.{n}": OTHER if n >= half else ONE for n in range(len(language.layers))}
    places |= {"model.language_model.norm": OTHER, "lm_head": OTHER, "model.language_model.embed_tokens": ONE}
    places |= {"model.language_model.rotary_emb": ONE, "model.vision_tower": ONE, "model.multi_modal_projector": ONE}
    return dispatch_model(model, {name: device.index for name, device in places.items()}, force_hooks=True)
