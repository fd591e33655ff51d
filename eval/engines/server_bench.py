"""What a running server does with the conversations of benchmarks, so many at once: its cells of `served_results`.

Times are the client's. tau and acceptance are the server's own counters before and after a cell: vLLM counts a pass of
a request as one latency between tokens, and each draft with what it accepted by position.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...data.records.logged_pictures import Conversation
from ..measured_rows import PLAIN
from .chat_server import ChatServer, Streamed
from .served_results import cell_of

# Tokens, the first one of each request, and the passes after these.
_TOKENS, _FIRST = "vllm:generation_tokens", "vllm:time_to_first_token_seconds_count"
_PASSES = "vllm:inter_token_latency_seconds_count"
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"
_CACHED, _PROMPTS = "vllm:prefix_cache_hits", "vllm:prefix_cache_queries"
_SETTLED_S = 5.0


@dataclass(frozen=True)
class ServerBench:
    """Measures one server, and one of the same model without drafts beside it.

    Args:
        beside: None: there are no speedups.
        at_once: numbers of conversations that are held side by side.
        say: is told of each cell.
        notes: what a reader of the cells must know; grows.
    """

    server: ChatServer
    beside: ChatServer | None
    at_once: Sequence[int]
    temperature: float
    max_new_tokens: int
    seed: int
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    def _check(self) -> None:
        names = dict.fromkeys(server.model for server in (self.server, self.beside) if server is not None)
        if self.beside is not None and _DRAFTS in self.beside.counters():
            raise UserError("the server beside drafts itself, and speedups are over plain decoding",
                            where=self.beside.url, hint="start it without --speculative-config")  # fmt: skip
        if len(names) > 1:
            self.notes.append(f"The servers call their models {' and '.join(names)}: speedup and identical answers are "
                              "those of a drafter only where both are one model.")  # fmt: skip

    def measure(self, sets: Mapping[str, Sequence[Conversation]]) -> tuple[list[JsonObject], list[JsonObject]]:
        """Cells, and a record of each answer.

        Raises:
            UserError: a server does not answer, fails or ends, or the one beside drafts itself.
        """
        self._check()
        cells, records = list[JsonObject](), list[JsonObject]()
        for place, conversations in sets.items():
            drafted = []
            for together in self.at_once:
                plain, rate = None, math.nan
                if self.beside is not None:
                    plain, cell, more = self._cell(self.beside, PLAIN, place, conversations, together)
                    rate, records = cell["tokens_per_s"], records + more
                    cells.append(cell)
                _, cell, more = self._cell(self.server, self.server.url, place, conversations, together, plain, rate)
                drafted.append(cell)
                records += more
            cells += drafted
        return cells, records

    def _cell(
        self,
        server: ChatServer,
        method: str,
        place: str,
        conversations: Sequence[Conversation],
        together: int,
        plain: Sequence[Sequence[Streamed]] | None = None,
        plain_rate: float | None = None,
    ) -> tuple[list[list[Streamed]], JsonObject, list[JsonObject]]:
        """The answers of all conversations, their cell, and records of them.

        Args:
            plain: the answers of the server beside.
            plain_rate: its tokens/s; None: this is that server.
        """
        with ThreadPoolExecutor(together) as pool:
            before = server.counters()
            warm = list(pool.map(lambda one: [*self._answers(server, one, 1)], conversations[:together]))
            before = self._settled(server, before, sum(answer.tokens for (answer,) in warm))
            talks = list(pool.map(lambda one: [*self._answers(server, one)], conversations))
        answers = [answer for talk in talks for answer in talk]
        tokens, label = sum(answer.tokens for answer in answers), f"{place}, {together} at once, {method}"
        after = self._settled(server, before, tokens)
        counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
        self._note(counted, tokens, label)
        seconds = max(a.ended_s for a in answers) - min(a.began_s for a in answers)
        rate, between = tokens / seconds, [(a.ended_s - a.first_s) / (a.tokens - 1) for a in answers if a.tokens > 1]
        passes, drafts = counted.get(_PASSES, 0.0), counted.get(_DRAFTS, 0.0)
        accepted = [counted[name] / drafts for name in _positions(counted)] if drafts else []
        same = sum((a.reasoning, a.content) == (b.reasoning, b.content)
                   for mine, theirs in zip(talks, plain or [], strict=False)
                   for a, b in zip(mine, theirs, strict=False))  # fmt: skip
        cell = cell_of(
            rate, rate if plain_rate is None else plain_rate,
            np.array([a.first_s - a.began_s for a in answers]), np.array(between),
            place=place, method=method, concurrency=together, requests=len(answers),
            tau=(counted[_TOKENS] - counted[_FIRST]) / passes if passes else math.nan, accepted=accepted,
            identical=same if plain is not None and self.temperature == 0 else None,
        )  # fmt: skip
        self.say(f"{label}: {rate:,.1f} tokens/s")
        about = {"set": place, "url": server.url, "at_once": together}
        records = [about | {"conversation": one.name, "turn": turn} | vars(answer)
                   for one, talk in zip(conversations, talks, strict=True)
                   for turn, answer in enumerate(talk, 1)]  # fmt: skip
        return talks, cell, records

    def _answers(self, server: ChatServer, one: Conversation, most: int | None = None) -> Iterator[Streamed]:
        """The answers to a conversation's questions, each after the server's own answers to those before it.

        Args:
            most: questions that are asked; None: all.
        """
        messages, questions = one.messages(), iter(one.further[: None if most is None else most - 1])
        while True:
            answer = server.ask(
                messages, temperature=self.temperature, max_new_tokens=self.max_new_tokens, seed=self.seed
            )
            yield answer
            question = next(questions, None)
            if question is None or not answer.content.strip():
                return
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": question}]

    @staticmethod
    def _settled(server: ChatServer, before: Mapping[str, float], tokens: int) -> Mapping[str, float]:
        """The counters once they have so many tokens more than `before`: they come after the tokens themselves."""
        deadline = time.monotonic() + _SETTLED_S
        while True:
            after = server.counters()
            if after.get(_TOKENS, math.inf) - before.get(_TOKENS, 0.0) >= tokens or time.monotonic() > deadline:
                return after
            time.sleep(0.05)

    def _note(self, counted: Mapping[str, float], tokens: int, label: str) -> None:
        if counted.get(_TOKENS, tokens) != tokens:
            self.notes.append(f"{label}: the server counts {counted[_TOKENS]:,.0f} tokens, and ours are {tokens:,}: "
                              "others were served meanwhile, and are in tau and in acceptance.")  # fmt: skip
        if counted.get(_CACHED):
            self.notes.append(f"{label}: {counted[_CACHED] / counted[_PROMPTS]:.0%} of the prompts' tokens came from "
                              "the cache of prefixes, which shortens the time to the first token.")  # fmt: skip


def _positions(counted: Mapping[str, float]) -> list[str]:
    """The names of the counters of accepted tokens, by position."""
    names = [name for name in counted if name.startswith(f"{_ACCEPTED}/")]
    return sorted(names, key=lambda name: int(name.rpartition("/")[2]))
