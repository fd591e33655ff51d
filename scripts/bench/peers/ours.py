"""Our side of the comparisons: sizes, targets with random weights, requests, and how they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from draftsmith.core.batch import ImageRequest, Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.warp import Warp
from peers.pairs import DRAFTING, GROWING, VERIFYING, Answer, Method, Side
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


def side(
    target: Any, drafter: Any, decoding: Decoding, asked: Callable[[int], Request | ImageRequest],
    own_work: Mapping[str, Sequence[Method]],
) -> Side:  # fmt: skip
    """Our loop: the target runs once for the prompt, then once in each cycle.

    Args:
        asked: number of a request -> the request.
        own_work: part of a cycle that is the models' own -> what it is spent in.
    """

    def answer(number: int, tokens: int) -> Answer:
        luck = torch.Generator().manual_seed(number)
        done = generate(target, drafter, asked(number), replace(decoding, max_new_tokens=tokens), luck)
        return Answer(done.tokens, [cycle.num_accepted for cycle in done.cycles])

    parts = {
        **own_work,
        GROWING: [(decoding.policy, "grow")],
        DRAFTING: [(drafter, name) for name in ("root", "expand", "accept")],
        VERIFYING: [(target, name) for name in ("verify", "commit")],
    }
    return Side([(target, "prefill"), (target, "verify")], answer, parts)


def layers_config(kind: type, layer: Any, target: Any, count: int = 1, **more: Any) -> Any:
    """`count` layers of a head of ours, as a config of transformers that peers' drafts read."""
    base = target.decoder.model.config
    return kind(
        hidden_size=layer.hidden_size, intermediate_size=layer.intermediate_size, head_dim=layer.head_dim,
        num_attention_heads=layer.num_heads, num_key_value_heads=layer.num_kv_heads, vocab_size=layer.vocab_size,
        num_hidden_layers=count, rms_norm_eps=layer.norm_eps, pad_token_id=None, attention_bias=False,
        max_position_embeddings=base.max_position_embeddings, rope_parameters=dict(base.rope_parameters), **more,
    )  # fmt: skip
