"""What runs on the pretend device, in a process of `process.py`. Every function returns what JSON holds."""

import copy
import functools
from dataclasses import replace

import test_head_decoding as heads
import tiny
import torch
import visual_tiny
from accelerate import dispatch_model
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.graph import GraphedChain
from draftsmith.trainers.engine import init_distributed

from pretend_cuda.device import COUNTS, GRAPHS, aside

ONE, OTHER = torch.device("cuda", 1), torch.device("cuda", 0)
TREE = {"total": 16, "depth": 3, "width": 4}


def _decoding(policy, temperature, length=12):
    return Decoding(policy, Sampling() if temperature else Greedy(), Draw("top-k"), Warp(temperature), length, ())


@functools.cache
def _built(name):
    """Target's model, what drafts, and a request; on the CPU."""
    if name == "image eagle":
        generator = visual_tiny.llamagen("text", 0)
        head = visual_tiny.trained(visual_tiny.target(generator, 3.0), visual_tiny.EAGLE, steps=10)[0]
        return generator, head, visual_tiny.request(generator, 7)
    whole, asked = tiny.llava(0, layers=6 if name in HEADS else 2), tiny.request(1, 1)
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
        decoder = CachedDecoder(draft, num_token_ids=tiny.TOKENS, never=(tiny.IMAGE_ID,))
        return big, GraphedChain(decoder, "M", newline_id=5, gamma=4, capacity=96), Chain(4), asked
    return big, None if name == "plain" else tiny.proposal(draft), Chain(4), asked


@functools.cache
def _said_by_the_cpu(name, temperature):
    with aside():
        return _said(name, temperature, "cpu")


def _said(name, temperature, device, spread=False):
    big, drafter, policy, asked = _case(name, device, spread)
    return generate(big, drafter, asked, _decoding(policy, temperature), torch.Generator().manual_seed(0)).tokens


HEADS = ("eagle3", "eagle", "sparrow")
CASES = ("plain", "chain", "graph", "eagle3", "eagle", "sparrow", "image eagle")


def same_tokens():
    """Case and temperature -> whether the device says what the CPU says. Decoding names its device: the current one is
    the other one by then.
    """
    init_distributed()
    current = torch.cuda.current_device()
    torch.cuda.set_device(OTHER)
    result = {
        f"{name} T={temperature:g}": _said(name, temperature, ONE) == _said_by_the_cpu(name, temperature)
        for name in CASES
        for temperature in (0.0, 1.0)
    }
    return {"equal": result, "current": current, "graphs": GRAPHS, "waits": dict(COUNTS.waits)}


def cycles():
    """Case and temperature -> mean launches, reads, uploads and clock waits of a decode cycle; places of the reads."""
    init_distributed()
    result = {}
    for name in CASES:
        for temperature in (0.0, 1.0):
            big, drafter, policy, asked = _case(name, ONE)
            # An end token, so that policies look for it as they do in a run.
            decoding = replace(_decoding(policy, temperature, 16), eos_ids=(tiny.EOS,))
            with torch.no_grad():
                run = loop._Run(big, drafter, decoding, torch.Generator().manual_seed(0), loop._clock(big, drafter))
                run.prefill(asked)
                run.cycle()  # graphs are captured
                COUNTS.clear()
                count = 0
                while not run.ended and run.room > policy.num_levels:
                    run.cycle()
                    count += 1
            assert count, name
            places = {place: round(n / count, 2) for place, n in COUNTS.reads.items()}
            totals = {key: round(value / count, 2) for key, value in COUNTS.totals().items()}
            result[f"{name} T={temperature:g}"] = totals | {"places": places}
    return result


def two_devices():
    """Case and temperature -> whether a target whose layers lie on both devices says what the CPU says."""
    init_distributed()
    result = {
        f"{name} T={temperature:g}": _said(name, temperature, None, spread=True) == _said_by_the_cpu(name, temperature)
        for name in ("chain", "eagle3", "eagle")
        for temperature in (0.0, 1.0)
    }
    # The paths above hold no gap.
    result["commit"] = _committed(ONE, OTHER) == _committed("cpu", "cpu")
    return result


def _committed(*devices):
    """What a cache holds whose layers lie on these devices once the second and fourth of four new positions count."""
    cache = Cache(len(devices), 12)
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
