"""z-lab/dflash's `dflash_generate` and deepseek-ai/DeepSpec's `generate_decoding_sample`: chains of a block's tokens,
over the same target and draft.

At temperature 1 DFlash's loop drafts its likeliest tokens and accepts what the target draws; ours does so with drafts
that are not drawn. DeepSpec draws its drafts, and so do we. Besides answers and accepted lengths the tokens that each
greedy cycle verifies are compared: tau is 1 here, and accepted lengths alone would not tell drafts apart.
"""

from __future__ import annotations

import argparse
import copy
import time
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from draftsmith.eval.policies import Chain
from draftsmith.models.targets.causal.section import CausalTarget
from peers.clones import DEEPSPEC, DFLASH, clone, crops_to_lengths
from peers.ours import SIZES, prompt, settings, side, target_config, text
from peers.pairs import DRAFT, SCORES, TARGET, Answer, Profile, Side, compare, watched
from peers.speculators_step import KINDS, TAPS, draft_config, with_bias
from torch import Tensor
from transformers import LlamaForCausalLM, set_seed

Generate = Callable[[int, float, int, int], Answer]  # (length of the prompt, temperature, number, tokens)
PLAIN: dict[str, Any] = {"confidence": None}  # a confidence head that no threshold reads takes part in training alone


@crops_to_lengths()
def official_blocks(size: str, arguments: argparse.Namespace) -> list[Profile]:
    """Both kinds, greedy and sampled; at the demo's size after a long prompt as well."""
    profiles = []
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(target_config(size, TAPS[-1] + 1)).eval()
    target, reference = CausalTarget(model, num_token_ids=SIZES[size]["vocab_size"]), copy.deepcopy(model)
    # A model that was asked for its states is hooked from then on, and notes it in a dict that `watched` puts back.
    reference(prompt(0, 8, target.vocab_size)[None], output_hidden_states=True)
    for kind, official in (("DFlash", _dflash), ("DSpark", _deepspec)):
        drafts = KINDS[kind][0].model_copy(update=PLAIN)
        head = with_bias(drafts.build(target)).eval().requires_grad_(False)
        drafter = drafts.drafter(head, target)
        generate = official(arguments, reference, target, head)
        own_work = {
            TARGET: [(target.decoder, "forward")], DRAFT: [(head, name) for name in ("forward", "context", "blocks")],
            SCORES: [(target.decoder, "logits"), (head, "draft_scores")],
        }  # fmt: skip
        count = head.shape.num_drafts
        for length in (64, 1024) if size == "demo size" else (64,):
            for temperature in (0.0, 1.0):
                drawn = "sample" if temperature and head.walks else "top-k"
                decoding = settings(Chain(count), temperature, drawn)
                theirs = partial(generate, length, temperature)
                what = f"{kind}'s loop, {size}, T {temperature:g}, after {length} tokens"
                mine = side(target, drafter, decoding, partial(text, target, length), own_work)
                other = Side([(reference.model, "forward")], theirs)
                if not temperature:
                    check_drafts(what, target, reference, mine.answer, theirs, arguments)
                profiles.append(compare(what, mine, other, arguments, goal=0.75, equal=not temperature))
    return profiles


def check_drafts(
    what: str, target: Any, model: Any, ours: Callable[[int, int], Answer], theirs: Callable[[int, int], Answer],
    arguments: argparse.Namespace,
) -> None:  # fmt: skip
    """Compare the tokens that each greedy cycle verifies.

    Raises:
        SystemExit: they differ.
    """
    mine: list[list[int]] = []
    other: list[list[int]] = []

    def tree(verify: Callable) -> Callable:
        def noted(session: Any, root: int, tree: Any) -> Any:
            mine.append([root, *tree.tokens.tolist()])
            return verify(session, root, tree)

        return noted

    def block(forward: Callable) -> Callable:
        def noted(input_ids: Tensor, **named: Any) -> Any:
            other.append(input_ids[0].tolist())
            return forward(input_ids, **named)

        return noted

    for number in range(100, 100 + arguments.checked):
        mine.clear()
        other.clear()
        with watched([(target, "verify")], tree):
            ours(number, arguments.tokens)
        with watched([(model.model, "forward")], block):
            theirs(number, arguments.tokens)
        blocks = other[1:]  # after the prompt
        if not mine or not blocks:
            raise SystemExit(f"{what}: no cycle was seen: {len(mine)} of ours, {len(blocks)} of theirs")
        for own, their in zip(mine, blocks, strict=False):  # ours may end with the answer
            if own != their[: len(own)]:  # and its last block with it
                raise SystemExit(f"{what}: other drafts\nours   {own}\ntheirs {their}")


def _weights(model: LlamaForCausalLM, head: Any) -> Mapping[str, Tensor]:
    return {
        **head.state_dict(), "embed_tokens.weight": model.model.embed_tokens.weight,
        "lm_head.weight": model.lm_head.weight,
    }  # fmt: skip


def _dflash(arguments: argparse.Namespace, model: LlamaForCausalLM, target: CausalTarget, head: Any) -> Generate:
    clone(arguments.peers, DFLASH)
    from dflash import model as published  # type: ignore[import-not-found]

    vars(published)["_cuda_time"] = time.perf_counter  # it returns what each cycle accepted to whoever asks for times
    config = draft_config(head, target)
    config.dflash_config = {"target_layer_ids": [tap - 1 for tap in TAPS], "mask_token_id": head.shape.mask_token_id}
    config.block_size, config.num_target_layers = head.shape.block_size, target.shape.num_layers
    draft = published.DFlashDraftModel(config).eval()
    draft.load_state_dict(head.state_dict())

    def generate(length: int, temperature: float, number: int, tokens: int) -> Answer:
        set_seed(number)
        ids = prompt(number, length, target.vocab_size)[None]
        done = published.dflash_generate(draft, model, ids, tokens, None, temperature, return_stats=True)
        return Answer(done.output_ids[0, length:].tolist(), [count - 1 for count in done.acceptance_lengths])

    return generate


def _deepspec(arguments: argparse.Namespace, model: LlamaForCausalLM, target: CausalTarget, head: Any) -> Generate:
    clone(arguments.peers, DEEPSPEC)
    from deepspec.eval.dspark.evaluator import Qwen3DSparkEvaluator  # type: ignore[import-not-found]
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel  # type: ignore[import-not-found]

    config, shape = draft_config(head, target), head.shape
    more = {
        "target_layer_ids": [tap - 1 for tap in TAPS], "mask_token_id": shape.mask_token_id, "num_anchors": 1,
        "enable_confidence_head": False, "markov_rank": shape.markov_rank, "markov_head_type": shape.markov_head_type,
        "block_size": shape.block_size,
    }  # fmt: skip
    for name, value in more.items():
        setattr(config, name, value)
    draft = Qwen3DSparkModel(config).eval()
    draft.load_state_dict(_weights(model, head))
    evaluator = Qwen3DSparkEvaluator.__new__(Qwen3DSparkEvaluator)  # its constructor starts a process group
    evaluator.target_model, evaluator.draft_model, evaluator.confidence_head_recorder = model, draft, None

    def generate(length: int, temperature: float, number: int, tokens: int) -> Answer:
        set_seed(number)
        evaluator.args = types.SimpleNamespace(temperature=temperature, max_new_tokens=tokens, confidence_threshold=0.0)
        ids = prompt(number, length, target.vocab_size)[None]
        done = evaluator.generate_one_sample(input_ids=ids, stop_token_ids=None)
        return Answer(done.output_ids[0, length:].tolist(), done.accepted_draft_lengths)

    return generate
