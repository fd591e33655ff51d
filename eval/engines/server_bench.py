"""A running server with OpenAI's API: what it does with the conversations of benchmarks, so many at once.

The results are cells of `served_results`.
Times are the client's. tau and acceptance are the server's own counters before and after a cell: vLLM counts a pass of
a request as one latency between tokens, and each draft with what it accepted by position.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlparse
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np

from ...core.errors import UserError, first_line
from ...core.json_types import Json, JsonObject, parse
from ...data.records.logged_pictures import Conversation
from ..measured_rows import PLAIN
from .served_results import cell_of

_SAMPLE = re.compile(r'(vllm:\w+?)(?:_total)?(?:\{(?:.*position="(\d+)".*|.*)\})? (\S+)')
_MOST_BYTES = 16 << 20  # of an answer's line, or of a page
_DIED = "look into the server's own log: it may have ended, or run out of memory"
_REFUSED = "the words are the server's: ask for less (--tokens), or start it with other settings"


@dataclass(frozen=True)
class Streamed:
    """An answer. Seconds are of `time.perf_counter`.

    Args:
        began_s, first_s, ended_s: when it was asked, when its first token came, and its last.
    """

    content: str  # without the reasoning, where the server tells it apart
    reasoning: str
    tokens: int  # as the server counts them, the end token among them
    began_s: float
    first_s: float
    ended_s: float


class _SameOrigin(HTTPRedirectHandler):
    """Follows no redirect to another server: the request has the user's key, questions and pictures."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        if urlparse(newurl)[:2] != urlparse(req.full_url)[:2]:
            raise UserError(f"the server sends requests on to {newurl[:200]}", where=req.full_url,
                            hint="if you trust that server, name its address")  # fmt: skip
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@dataclass(frozen=True)
class ChatServer:
    """One server."""

    url: str  # with or without /v1
    asked_model: str | None = None  # its name there; None: the only one that the server has
    timeout_s: float = 600.0  # without a byte, after which it is taken for hung

    @cached_property
    def model(self) -> str:
        """The model's name in requests. Raises `UserError` where the server has several, or not the asked one."""
        with self._open("/v1/models") as response, self._understood():
            names = [str(model["id"]) for model in parse(response.read(_MOST_BYTES))["data"]]
        if self.asked_model in names or (self.asked_model is None and len(names) == 1):
            return self.asked_model or names[0]
        raise UserError(f"the server has the models {', '.join(names)}", where=self.url, hint="name one with --model")

    @cached_property
    def engine(self) -> str:
        """vLLM with its version; of others "server"."""
        try:
            with self._open("/version") as response, self._understood():
                return f"vLLM {parse(response.read(_MOST_BYTES))['version']}"
        except UserError:
            return "server"

    def ask(self, messages: Sequence[Json], *, temperature: float, max_new_tokens: int, seed: int) -> Streamed:
        """The answer to messages. Raises `UserError` for an error of the server, or where it ends within the answer."""
        body = {
            "model": self.model, "messages": messages, "temperature": temperature, "max_tokens": max_new_tokens,
            "seed": seed, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        content, reasoning, tokens = "", "", 0
        began = time.perf_counter()
        first = last = 0.0
        with self._open("/v1/chat/completions", json.dumps(body).encode()) as response, self._understood():
            for number, chunk in enumerate(self._chunks(response)):
                if number > 100 + 10 * max_new_tokens:
                    raise self._error(f"an answer that does not end after {max_new_tokens} tokens")
                now, (choice,) = time.perf_counter(), chunk.get("choices") or [{}]
                delta, count = choice.get("delta") or {}, (chunk.get("usage") or {}).get("completion_tokens", 0)
                said, thought = delta.get("content"), delta.get("reasoning") or delta.get("reasoning_content")
                if said or thought or (choice and count > tokens):
                    first, last = first or now, now
                content, reasoning, tokens = content + (said or ""), reasoning + (thought or ""), max(tokens, count)
        if not first or not tokens:
            raise self._error("an answer without a token, or without a count of them (stream_options.include_usage)")
        return Streamed(content, reasoning, tokens, began, first, last)

    def counters(self) -> Mapping[str, float]:
        """vLLM's counters over all its engines: name without `_total`, or name and position as `NAME/0` -> value.
        Empty: the server shows none.
        """
        counts = defaultdict[str, float](float)
        try:
            with self._open("/metrics") as response, self._understood():
                for line in response.read(_MOST_BYTES).decode().splitlines():
                    if (sample := _SAMPLE.fullmatch(line)) is not None:
                        name, position, value = sample.groups()
                        counts[name if position is None else f"{name}/{position}"] += float(value)
        except UserError:
            counts.clear()
        return counts

    def _open(self, path: str, body: bytes | None = None) -> Any:
        root = self.url.rstrip("/").removesuffix("/v1")
        if urlparse(root).scheme not in ("http", "https"):
            raise UserError("no address of a server", where=self.url, hint="write http://localhost:8000")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            return build_opener(_SameOrigin).open(Request(root + path, body, headers), timeout=self.timeout_s)
        except HTTPError as error:
            said = error.read(1 << 16).decode(errors="replace")
            told = re.search(r'"message": ?("(?:[^"\\]|\\.)*")', said)
            message = json.loads(told[1]) if told else " ".join(said.split())
            problem = f"the server answers {error.code} to {path}: {message[:300]}"
            raise self._error(problem, _DIED if error.code >= 500 else _REFUSED) from error
        except (OSError, HTTPException) as error:
            raise self._error(f"the server does not answer: {first_line(error)}") from error

    def _chunks(self, response: HTTPResponse) -> Iterator[JsonObject]:
        """The events of a stream up to its last one."""
        try:
            for line in iter(functools.partial(response.readline, _MOST_BYTES), b""):
                data = line.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data.startswith("{"):
                    chunk = parse(data)
                    if error := chunk.get("error"):
                        raise self._error(f"the server ends an answer: {error.get('message', error)}")
                    yield chunk
        except (OSError, HTTPException) as error:
            raise self._error(f"the server ends within an answer: {first_line(error)}") from error
        raise self._error("the server ends within an answer")

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Whatever else than OpenAI's API a server answers with is one sentence."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise self._error(f"no answer of an OpenAI-style server: {first_line(error)}") from error

    def _error(self, problem: str, hint: str = _DIED) -> UserError:
        return UserError(problem, where=self.url, hint=hint)


# Tokens, the first one of each request, and the passes after these.
_TOKENS, _FIRST = "vllm:generation_tokens", "vllm:time_to_first_token_seconds_count"
_PASSES = "vllm:inter_token_latency_seconds_count"
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"
_CACHED, _PROMPTS = "vllm:prefix_cache_hits", "vllm:prefix_cache_queries"
_SETTLED_S = 5.0


@dataclass(frozen=True)
class ServerBench:
    """Measures one server, and one of the same model without drafts beside it."""

    server: ChatServer
    beside: ChatServer | None  # None: there are no speedups
    at_once: Sequence[int]  # numbers of conversations that are held side by side
    temperature: float
    max_new_tokens: int
    seed: int
    say: Callable[[str], None]  # is told of each cell
    notes: list[str] = field(default_factory=list)  # what a reader of the cells must know; grows

    def _check(self) -> None:
        names = dict.fromkeys(server.model for server in (self.server, self.beside) if server is not None)
        if self.beside is not None and _DRAFTS in self.beside.counters():
            raise UserError("the server beside drafts itself, and speedups are over plain decoding",
                            where=self.beside.url, hint="start it without --speculative-config")  # fmt: skip
        if len(names) > 1:
            self.notes.append(f"The servers call their models {' and '.join(names)}: speedup and identical answers are "
                              "those of a drafter only where both are one model.")  # fmt: skip

    def measure(self, sets: Mapping[str, Sequence[Conversation]]) -> tuple[list[JsonObject], list[JsonObject]]:
        """Cells, and a record of each answer. Raises `UserError`: a server does not answer, fails or ends, or the one
        beside drafts itself.
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
        """The answers of all conversations, their cell, and records of them. `plain`: the answers of the server beside.
        `plain_rate`: its tokens/s; None: this is that server.
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
        places = sorted(int(name.rpartition("/")[2]) for name in counted if name.startswith(f"{_ACCEPTED}/"))
        accepted = [counted[f"{_ACCEPTED}/{place}"] / drafts for place in places] if drafts else []
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
        """The answers to a conversation's questions, each after the server's own answers to those before it. `most`:
        questions that are asked; None: all.
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
