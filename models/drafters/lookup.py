"""Drafting without a model: what followed the same words before, in the prompt, the answer, or earlier answers.

`ngram` is prompt lookup (Saxena 2023, "Prompt lookup decoding"; `prompt_lookup_num_tokens` of transformers and `ngram`
of vLLM, which take the earliest match): the tokens after the most recent match of the last few. `suffix` is
SuffixDecoding (Oliaro et al. 2025, arXiv 2411.04975, section 3): the longest match, and its continuations by how often
they came. Tokens that stand for pictures are never matched and never proposed. Nothing is trained, and nothing of the
target's is read.
Letters: E ends of matches, F nodes, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.batch import Request
from ...core.json_types import JsonObject
from ...core.pictures import TEXT
from ...core.states import Taps
from ..decoding.tree import ROOT
from ..decoding.warp import Warp
from ..targets.base import Target, TargetStep, Verified
from .base import PLAIN, DraftingOptions, WeightlessDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Node(NamedTuple):
    """A place in the tree: the drafted tokens that lead to it, and where in the text its continuations stand."""

    path: tuple[int, ...]
    ends: np.ndarray  # [E] int64; at or behind the text's end, the continuation is what was drafted
    share: float = 1.0  # of the match's continuations that came this way


class LookupConfig(WeightlessDrafter):
    """Settings of both kinds: no weights, no states, any target that answers in words."""

    # Fewest tokens of a match; nothing is drafted where there is none.
    min_match: int = Field(1, ge=1, le=1024)
    # Most tokens of a match.
    max_match: int = Field(3, ge=1, le=1024)

    def levels(self, length: int) -> int | None:
        """The most levels to draft after a match of `length` tokens; None: any."""
        return None

    def weighed(self, node: Node, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids among `tokens` [E], which follow the node's matches, latest first, and a weight for each."""
        raise NotImplementedError

    def lines(self, shape: Any, config: PreTrainedConfig) -> list[str]:
        return ["  no weights, no training; drafts what followed the same tokens before"]

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> LookupProposal:
        return LookupProposal(self, target.vocab_size)

    @property
    def lookup_in_vllm(self) -> JsonObject:
        """The settings of vLLM's own look-up."""
        raise NotImplementedError

    def exports(self, engine: str) -> list[str]:
        """There is nothing to export: engines look up by themselves."""
        count = {"num_speculative_tokens": 5} if self.kind == "ngram" else {}
        section = json.dumps({"method": self.kind, **count, **self.lookup_in_vllm})
        how = f"vllm serve TARGET --speculative-config '{section}'" if engine == "vllm" else "see its documentation"
        return [f"a drafter of kind {self.kind} has no weights to export, and engines look up in their own way: {how}"]


class NgramConfig(LookupConfig):
    """Prompt lookup."""

    kind: Literal["ngram"]
    # Most tokens of a match. The longest match counts, then the most recent one. More are surer and rarer.
    max_match: int = Field(3, ge=1, le=1024)
    # Matches that a tree can branch into, the most recent ones.
    branches: int = Field(8, ge=1, le=64)

    @model_validator(mode="after")
    def _in_order(self) -> NgramConfig:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}")
        return self

    def weighed(self, node: Node, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most recent match has the largest part of q, so that a chain follows it; a tree branches into others."""
        ids, first = np.unique(tokens, return_index=True)
        ids = ids[np.argsort(first)][: self.branches]
        return ids, 0.5 ** np.arange(len(ids))  # more than half on the first

    @property
    def lookup_in_vllm(self) -> JsonObject:
        return {"prompt_lookup_max": self.max_match, "prompt_lookup_min": self.min_match}


class SuffixConfig(LookupConfig):
    """SuffixDecoding's longest match."""

    kind: Literal["suffix"]
    # Most tokens of a match: longer ones are not told apart, and a text that repeats one token has very long ones.
    max_match: int = Field(64, ge=1, le=1024)
    # Levels drafted for each token of the match (alpha of the paper): a long match is trusted further.
    levels_per_match: float = Field(1.0, gt=0, le=64)
    # A token is drafted where its path has this much of the match's continuations.
    min_prob: float = Field(0.1, ge=0, le=1)
    # frequencies: q is how often each token followed; one_hot: all of q on the most frequent one.
    proposal: Literal["frequencies", "one_hot"] = "frequencies"
    # Answers to other prompts of the run that are matched, too, the latest ones. Rows then depend on the order of the
    # requests, on the number of ranks, each of which remembers its own, and on where a stopped run went on.
    earlier_answers: int = Field(0, ge=0, le=100_000)

    def levels(self, length: int) -> int | None:
        return max(1, int(length * self.levels_per_match))

    def weighed(self, node: Node, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Continuations by how often they came, down to a share of the match's."""
        ids, counts = np.unique(tokens, return_counts=True)
        likely = node.share * counts >= self.min_prob * len(node.ends)
        ids, counts = ids[likely], counts[likely]
        if self.proposal == "one_hot" and len(ids):
            return ids[[counts.argmax()]], np.ones(1)
        return ids, counts.astype(np.float64)

    @property
    def lookup_in_vllm(self) -> JsonObject:
        return {
            "suffix_decoding_max_spec_factor": self.levels_per_match,
            "suffix_decoding_min_token_prob": self.min_prob,
            "suffix_decoding_max_cached_requests": self.earlier_answers,
        }


class LookupProposal:
    """Proposes what followed the longest match of the last tokens. A match that reaches the end of the text goes on in
    what was drafted, so that a repetition goes on. q are made on the CPU, where all of this is.
    """

    may_pass: ClassVar[bool] = True  # rows of zeros, and `max_levels` 0, where nothing was found

    def __init__(self, config: LookupConfig, vocab_size: int):
        self.taps = Taps()
        self.max_levels: int | None = 0
        self._most: int | None = None  # levels of this cycle
        self._config, self._vocab_size = config, vocab_size
        self._earlier_answers = config.earlier_answers if isinstance(config, SuffixConfig) else 0
        self._earlier = dict[bytes, np.ndarray]()  # prompt -> answer
        self._prompt = b""
        self._text, self._length, self._begins = np.empty(0, dtype=np.int64), 0, 0
        self._nodes: list[Node] = []
        self._root = Node((), np.empty(0, dtype=np.int64))

    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Take the prompt; earlier answers stand before it."""
        if self._earlier_answers and self._length > self._begins:
            self._earlier.pop(self._prompt, None)
            self._earlier[self._prompt] = self._text[self._begins : self._length].copy()
            self._earlier = dict([*self._earlier.items()][-self._earlier_answers :])
        prompt = request.ids.cpu().numpy().copy()
        self._prompt = prompt.tobytes()
        visual = (request.modality != TEXT).cpu().numpy()
        others = (answer for prompt_before, answer in self._earlier.items() if prompt_before != self._prompt)
        before = [part for answer in others for part in (answer, [-1])]
        self._text = np.concatenate([*before, prompt, np.zeros(capacity + 1)]).astype(np.int64)
        self._begins = self._length = len(self._text) - capacity - 1
        self._text[self._begins - len(prompt) : self._begins][visual] = -1
        # Numbers of their own match nothing.
        apart = np.flatnonzero(self._text[: self._length] < 0)
        self._text[apart] = -1 - np.arange(len(apart))

    def begin(self, first: int) -> None:
        self._append((first,))

    def root(self) -> Tensor:
        """q [V] after the longest match; zeros, with `max_levels` 0, where there is none."""
        length, ends = self._matches()
        self._root, self._nodes, self._most = Node((), ends), [], None
        q = self._q([self._root])[0]
        self._most, self.max_levels = self._config.levels(length), None if q.any() else 0
        return q

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [F,V]; a row of zeros where nothing followed."""
        made = []
        for parent, token in zip(parents, tokens.tolist(), strict=True):
            node = self._root if parent == ROOT else self._nodes[parent]
            follows = self._following(node) == token
            share = node.share * follows.sum() / max(1, len(follows))
            made.append(Node((*node.path, token), node.ends[follows] + 1, share))
        self._nodes += made
        return self._q(made)

    def accept(self, verified: Verified) -> None:
        self._append((*verified.tokens, verified.bonus))

    def _append(self, tokens: Sequence[int]) -> None:
        self._text[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)

    def _matches(self) -> tuple[int, np.ndarray]:
        """The longest match's tokens, and the places [E] behind each place that it ends at, latest first."""
        text = self._text[: self._length]
        longest = min(self._config.max_match, self._length - 1)
        ends = np.flatnonzero(text[:-1] == text[-1])  # a match is anywhere but at the end itself
        length = 1 if len(ends) else 0
        while 0 < length < longest:
            further = ends[ends >= length]
            further = further[text[further - length] == text[-1 - length]]
            if not len(further):
                break
            ends, length = further, length + 1
        return length, ends[::-1] + 1 if length >= self._config.min_match else ends[:0]

    def _following(self, node: Node) -> np.ndarray:
        """[E] the token at each end; below 0: nothing that can be proposed."""
        inside = node.ends < self._length
        tokens = self._text[np.minimum(node.ends, self._length - 1)]
        if not inside.all():
            tokens[~inside] = np.array(node.path)[node.ends[~inside] - self._length]
        return tokens

    def _q(self, nodes: Sequence[Node]) -> Tensor:
        q = np.zeros((len(nodes), self._vocab_size), dtype=np.float32)
        for row, node in zip(q, nodes, strict=True):
            if self._most is not None and len(node.path) >= self._most:
                continue
            tokens = self._following(node)
            ids, weights = self._config.weighed(node, tokens[tokens >= 0])
            if len(ids):
                row[ids] = weights / weights.sum()
        return torch.from_numpy(q)
