"""A running server with OpenAI's API: chat completions as a stream, and vLLM's counters."""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

from ...core.errors import UserError, first_line
from ...core.json_types import Json, JsonObject

_SAMPLE = re.compile(r'(vllm:\w+?)(?:_total)?(?:\{(?:.*position="(\d+)".*|.*)\})? (\S+)')
_DIED = "look into the server's own log: it may have ended, or run out of memory"
_REFUSED = "the words are the server's: ask for less (--tokens), or start it with other settings"


@dataclass(frozen=True)
class Streamed:
    """An answer. Seconds are of `time.perf_counter`.

    Args:
        content: without the reasoning, where the server tells it apart.
        tokens: as the server counts them, the end token among them.
        began_s, first_s, ended_s: when it was asked, when its first token came, and its last.
    """

    content: str
    reasoning: str
    tokens: int
    began_s: float
    first_s: float
    ended_s: float


@dataclass(frozen=True)
class ChatServer:
    """One server.

    Args:
        url: with or without /v1.
        asked_model: its name there; None: the only one that the server has.
        timeout_s: without a byte, after which it is taken for hung.
    """

    url: str
    asked_model: str | None = None
    timeout_s: float = 600.0

    @cached_property
    def model(self) -> str:
        """The model's name in requests. Raises `UserError` where the server has several, or not the asked one."""
        with self._open("/v1/models") as response:
            names = [str(model["id"]) for model in self._json(response.read())["data"]]
        if self.asked_model in names or (self.asked_model is None and len(names) == 1):
            return self.asked_model or names[0]
        raise UserError(f"the server has the models {', '.join(names)}", where=self.url, hint="name one with --model")

    @cached_property
    def engine(self) -> str:
        """vLLM with its version; of others "server"."""
        try:
            with self._open("/version") as response:
                return f"vLLM {self._json(response.read())['version']}"
        except (UserError, KeyError):
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
        with self._open("/v1/chat/completions", json.dumps(body).encode()) as response:
            for chunk in self._chunks(response):
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
        found = defaultdict[str, float](float)
        try:
            with self._open("/metrics") as response:
                text = response.read().decode()
        except UserError:
            return found
        for line in text.splitlines():
            if (sample := _SAMPLE.fullmatch(line)) is not None:
                name, position, value = sample.groups()
                found[name if position is None else f"{name}/{position}"] += float(value)
        return found

    def _open(self, path: str, body: bytes | None = None) -> Any:
        root = self.url.rstrip("/").removesuffix("/v1")
        if urlparse(root).scheme not in ("http", "https"):
            raise UserError("no address of a server", where=self.url, hint="write http://localhost:8000")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            return urlopen(Request(root + path, body, headers), timeout=self.timeout_s)
        except HTTPError as error:
            said = error.read().decode(errors="replace")
            told = re.search(r'"message": ?("(?:[^"\\]|\\.)*")', said)
            message = json.loads(told[1]) if told else " ".join(said.split())
            problem = f"the server answers {error.code} to {path}: {message[:300]}"
            raise self._error(problem, _DIED if error.code >= 500 else _REFUSED) from error
        except (OSError, HTTPException) as error:
            raise self._error(f"the server does not answer: {first_line(error)}") from error

    def _chunks(self, response: HTTPResponse) -> Iterator[JsonObject]:
        """The events of a stream up to its last one."""
        try:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data.startswith("{"):
                    chunk = self._json(data)
                    if error := chunk.get("error"):
                        raise self._error(f"the server ends an answer: {error.get('message', error)}")
                    yield chunk
        except (OSError, HTTPException) as error:
            raise self._error(f"the server ends within an answer: {first_line(error)}") from error
        raise self._error("the server ends within an answer")

    def _json(self, text: str | bytes) -> Json:
        try:
            return json.loads(text)
        except ValueError as error:
            raise self._error(f"no answer of an OpenAI-style server: {first_line(error)}") from error

    def _error(self, problem: str, hint: str = _DIED) -> UserError:
        return UserError(problem, where=self.url, hint=hint)
