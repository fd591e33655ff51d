"""SafeAILab/EAGLE's `eagenerate`: EAGLE-3's and EAGLE-1's heads with EAGLE-2's tree, over the same target and head."""

from __future__ import annotations

import argparse
import copy
import random
import types
from functools import partial
from typing import Any

import torch
from draftsmith.eval.policies import Dynamic
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.targets.causal.section import CausalTarget
from peers.clones import EAGLE, accepted_by, clone, joined
from peers.ours import TREE, prompt, settings, side, target_config, text
from peers.pairs import DRAFT, SCORES, TARGET, Answer, Profile, Side, compare
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

KINDS: dict[str, Any] = {"EAGLE-3": Eagle3Config(kind="eagle3"), "EAGLE-1": EagleConfig(kind="eagle")}


def official_eagle(size: str, arguments: argparse.Namespace) -> list[Profile]:
    """Both heads, greedy and sampled; at the demo's size after a long prompt as well."""
    clone(arguments.peers, EAGLE)
    profiles = []
    lengths = (64, 1024) if size == "demo size" else (64,)
    for kind, drafts in KINDS.items():
        torch.manual_seed(arguments.seed)
        config = target_config(size, 7)  # the fewest layers of which EAGLE-3 taps three different ones
        model = LlamaForCausalLM(config).eval()
        target = CausalTarget(model, num_token_ids=config.vocab_size)
        head = drafts.build(target).eval().requires_grad_(False)
        official, accepted = _official(kind, model, head, target)
        drafter = drafts.drafter(head, target)
        own_work = {
            TARGET: [(target.decoder, "forward")], DRAFT: [(head, "forward"), (head, "fuse")],
            SCORES: [(target.decoder, "logits"), (head, "draft_scores")],
        }  # fmt: skip
        for length in lengths:
            for temperature in (0.0, 1.0):
                decoding = settings(Dynamic(**TREE), temperature)
                theirs = partial(_generate, official, accepted, length, temperature)
                what = f"{kind}'s loop, {size}, T {temperature:g}, after {length} tokens"
                mine = side(target, drafter, decoding, partial(text, target, length), own_work)
                other = Side([(official.base_model.model, "forward")], theirs)
                profiles.append(compare(what, mine, other, arguments, goal=0.70, equal=not temperature))
    return profiles


def _generate(official: Any, accepted: list[Any], length: int, temperature: float, number: int, tokens: int) -> Answer:
    set_seed(number)
    random.seed(number)
    ids = prompt(number, length, official.config.vocab_size)[None]
    accepted.clear()
    # It ends after the first cycle that leads over what it is asked for.
    whole = official.eagenerate(ids, temperature=temperature, max_new_tokens=tokens - 2, max_length=2048)
    return Answer(whole[0, length:].tolist(), [int(count) for count in accepted])


def _official(kind: str, model: LlamaForCausalLM, head: nn.Module, target: CausalTarget) -> tuple[Any, list[Any]]:
    """Their model with the same weights, and the list of what each of its cycles accepts."""
    from eagle.model import ea_model  # type: ignore[import-not-found]
    from eagle.model.modeling_llama_kv import LlamaForCausalLM as OfficialLlama  # type: ignore[import-not-found]

    config = model.config
    own = copy.deepcopy(config)
    own.pretraining_tp, own.rope_scaling, own.rope_theta = 1, None, 1e4
    own._attn_implementation = "eager"  # its own file is what attends
    base = OfficialLlama(own).eval()
    base.load_state_dict(model.state_dict(), strict=False)
    sizes = {"total_tokens": TREE["total"], "depth": TREE["depth"], "top_k": TREE["width"]}
    made = ea_model.Model if kind == "EAGLE-3" else ea_model.Model1
    layer = made(plain_config(config), bias=kind == "EAGLE-1", **sizes).eval()
    if kind == "EAGLE-3":
        del layer.d2t, layer.t2d  # as its loader does where the head scores the whole vocabulary
    weights = {**head.state_dict(), "embed_tokens.weight": target.embedding}
    official = joined(ea_model.EaModel, base, layer, config, weights)
    official.use_eagle3 = kind == "EAGLE-3"
    official.tokenizer = types.SimpleNamespace(eos_token_id=-1)
    return official, accepted_by(ea_model)


def plain_config(config: LlamaConfig) -> types.SimpleNamespace:
    """A config as their heads read it: transformers 5 would turn `rope_scaling` into what they do not know."""
    values = {key: value for key, value in config.to_dict().items() if key != "rope_parameters"}
    more = {
        "draft_vocab_size": config.vocab_size, "rope_scaling": None, "rope_theta": 1e4, "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads, "pretraining_tp": 1,
    }  # fmt: skip
    return types.SimpleNamespace(**values | more)
