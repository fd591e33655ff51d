"""transformers' assisted generation: chains of gamma tokens by a draft of the target's first layer."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from draftsmith.eval.policies import Chain
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.targets.causal.section import CausalTarget
from peers.ours import prompt, settings, side, target_config, text
from peers.pairs import DRAFT, SCORES, TARGET, Answer, Profile, Side, compare
from transformers import LlamaForCausalLM, set_seed
from transformers.generation.candidate_generator import AssistedCandidateGenerator

GAMMA = 5


def assisted(size: str, arguments: argparse.Namespace) -> list[Profile]:
    """Greedy and sampled; at the demo's size after a long prompt as well."""
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(target_config(size, 4)).eval()
    draft = _first_layer(model)
    reference, own_draft = copy.deepcopy(model), copy.deepcopy(draft)
    target = CausalTarget(model, num_token_ids=model.config.vocab_size)
    drafter = IndependentProposal(CachedDecoder(draft, num_token_ids=model.config.vocab_size), "T", newline_id=5)
    options = own_draft.generation_config
    options.num_assistant_tokens, options.num_assistant_tokens_schedule = GAMMA, "constant"
    options.assistant_confidence_threshold = 0.0
    decoders = target.decoder, drafter.decoder
    own_work = {
        TARGET: [(target.decoder, "forward")], DRAFT: [(drafter.decoder, "forward")],
        SCORES: [(decoder, "logits") for decoder in decoders],
    }  # fmt: skip
    profiles = []
    for length in (1, 1024) if size == "demo size" else (1,):
        for temperature in (0.0, 1.0):
            decoding = settings(Chain(GAMMA), temperature, "sample" if temperature else "top-k")
            what = f"transformers' assisted generation, {size}, T {temperature:g}, after {length} tokens"
            mine = side(target, drafter, decoding, partial(text, target, length), own_work)
            theirs = partial(_generate, reference, own_draft, length, temperature > 0)
            other = Side([(reference.model, "forward")], theirs)
            profiles.append(compare(what, mine, other, arguments, goal=0.60, equal=not temperature))
    return profiles


@torch.inference_mode()
def _generate(reference: Any, draft: Any, length: int, sampled: bool, number: int, tokens: int) -> Answer:
    ids = prompt(number, length, reference.config.vocab_size)[None]
    set_seed(number)
    with _accepted() as accepted:
        whole = reference.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=tokens,
            do_sample=sampled, top_k=0, pad_token_id=0,
        )  # fmt: skip
    found = [int(count) for count in accepted]
    # The end cuts the last one's room, not what it accepted.
    return Answer(whole[0, length:].tolist(), found[:-1], before=0)


@contextmanager
def _accepted() -> Iterator[list[Any]]:
    """What each cycle within it accepts."""
    own, found = AssistedCandidateGenerator.update_candidate_strategy, []

    def noted(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        found.append(num_matches)
        own(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = own  # type: ignore[method-assign]


def _first_layer(model: LlamaForCausalLM) -> LlamaForCausalLM:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    draft = LlamaForCausalLM(config).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft
