"""Our side of the comparisons: sizes, targets with random weights, requests, and how they are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from draftsmith.core.batch import ImageRequest, Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.warp import Warp
from peers.pairs import DRAFTING, GROWING, VERIFYING, Answer, Method
from transformers import LlamaConfig

SIZES: dict[str, dict[str, Any]] = {
    "demo size": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 512},
    "width 512": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 32000},
}
TREE = {"total": 60, "depth": 5, "width": 10}


def target_config(size: str, layers: int) -> LlamaConfig:
    """A Llama with this number of layers."""
    return LlamaConfig(
        **SIZES[size], num_hidden_layers=layers, max_position_embeddings=4096, initializer_range=0.06, bos_token_id=1,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


def passes(target: Any) -> list[Method]:
    """What runs the target in our loop: once for the prompt, then once in each cycle."""
    return [(target, "prefill"), (target, "verify")]


def parts(
    target: Any, drafter: Any, decoding: Decoding, own_work: Mapping[str, Sequence[Method]]
) -> dict[str, Sequence[Method]]:
    """Parts of our cycle, of which `own_work` says what the models' own is spent in."""
    return {
        **own_work,
        GROWING: [(decoding.policy, "grow")],
        DRAFTING: [(drafter, name) for name in ("root", "expand", "accept")],
        VERIFYING: [(target, name) for name in ("verify", "commit")],
    }


def prompt(number: int, length: int, vocab_size: int) -> torch.Tensor:
    """[T] random ids that follow from the number."""
    return torch.randint(8, vocab_size, (length,), generator=torch.Generator().manual_seed(number))


def settings(policy: Any, temperature: float, draw: Any = "top-k", top_k: int = 0) -> Decoding:
    """Greedy at temperature 0, else exact speculative sampling."""
    rule = RULES["sampling" if temperature else "greedy"]
    return Decoding(policy, rule, Draw(draw), Warp(temperature, top_k), 1, ())


def text(target: Any, length: int, number: int) -> Request:
    """A request of `length` random tokens."""
    ids = prompt(number, length, target.vocab_size)
    return Request(ids, torch.zeros(length, dtype=torch.int8), None, str(number))


def answer(
    target: Any, drafter: Any, decoding: Decoding, request: Request | ImageRequest, seed: int, tokens: int
) -> Answer:
    """Decode a request with our loop."""
    decoding = replace(decoding, max_new_tokens=tokens)
    done = generate(target, drafter, request, decoding, torch.Generator().manual_seed(seed))
    return Answer(done.tokens, [cycle.num_accepted for cycle in done.cycles])
