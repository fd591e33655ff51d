"""A running server of vLLM, llama.cpp or SGLang: token ids in, token ids and log-probabilities out.

The fields are those of vLLM's `/v1/completions` and `/v1/chat/completions`, llama-server's `/completion` and SGLang's
`/generate`; SGLang's are read in its documentation and untried. Answers are checked and bounded.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlparse
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ...core.errors import UserError, first_line
from ...core.json_types import Json, JsonObject, parse
from .audit import END, Answer
from .exact_law import Ids, Sampling

_SAMPLE = re.compile(r'(?:vllm|llamacpp):(spec_decode_\w+?)(?:_total)?(?:\{(?:.*position="(\d+)".*|.*)\})? (\S+)')
_MOST_BYTES = 16 << 20  # of an answer
_DIED = "look into the server's own log: it may have ended, or run out of memory"
_REFUSED = "the words are the server's: ask for less (--tokens), or start it with other settings"
_LATE_S = 0.5  # vLLM counts an answer's tokens after it has sent them


class _SameOrigin(HTTPRedirectHandler):
    """Follows no redirect to another server: the request has the user's key, questions and pictures."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        if urlparse(newurl)[:2] != urlparse(req.full_url)[:2]:
            raise UserError(f"the server sends requests on to {newurl[:200]}", where=req.full_url,
                            hint="if you trust that server, name its address")  # fmt: skip
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@dataclass(frozen=True, eq=False)
class WithPictures:
    """A prompt that no ids can say."""

    messages: Sequence[JsonObject]


Prompt = Ids | WithPictures


@dataclass(frozen=True)
class Server:
    """One server. Methods raise `UserError` for errors of the server, and for answers that are none."""

    url: str  # with or without /v1
    asked_model: str | None = None  # its name there; None: the only one that the server has
    timeout_s: float = 600.0  # without a byte, after which it is taken for hung

    @cached_property
    def _entry(self) -> JsonObject:
        models = self._asked("/v1/models")
        with self._understood():
            names = {str(model["id"]): model for model in models["data"]}
        if self.asked_model in names or (self.asked_model is None and len(names) == 1):
            return names[self.asked_model or next(iter(names))]
        raise UserError(f"the server has the models {', '.join(names)}", where=self.url, hint="name one with --model")

    @property
    def model(self) -> str:
        """The model's name in requests."""
        return str(self._entry["id"])

    @property
    def engine(self) -> str:
        """llamacpp, sglang, or what answers as vLLM does."""
        owner = self._entry.get("owned_by")
        return owner if owner in ("llamacpp", "sglang") else "vllm"

    def prompt(self, messages: Sequence[JsonObject]) -> Prompt:
        """Messages as ids, by the server's own template and tokenizer; with pictures as they are."""
        if any(not isinstance(message["content"], str) for message in messages):
            if self.engine != "vllm":
                raise UserError(f"prompts with pictures are not audited at {self.engine}", where=self.url,
                                hint="name records without pictures")  # fmt: skip
            return WithPictures(messages)
        if self.engine == "llamacpp":
            text = self._asked("/apply-template", {"messages": messages})
            with self._understood():
                body: JsonObject = {"content": text["prompt"], "add_special": True, "parse_special": True}
        elif self.engine == "sglang":
            body = {"model": self.model, "prompt": "\n".join(message["content"] for message in messages)}
        else:
            body = {"model": self.model, "messages": messages}
        answer = self._asked("/tokenize", body)
        with self._understood():
            return _ids(answer["tokens"])

    def answer(
        self, prompt: Prompt, said: Ids, count: int, sampling: Sampling, *, seed: int = 0, shown: int = 0
    ) -> Answer | None:
        """As of `audit.Engine`. None: the text of `said` is read as other tokens, so that none can go on from it."""
        if self.engine == "vllm" or isinstance(prompt, WithPictures):
            reply = self._of_vllm(prompt, said, count, sampling, seed, shown)
        else:
            ask = self._of_llama if self.engine == "llamacpp" else self._of_sglang
            reply = ask(prompt, said, count, sampling, seed, shown)
        tokens, laws, ended = reply or (None, (), False)
        if tokens is None:
            return None
        if len(tokens) > count or (shown and len(laws) < len(tokens)) or not (tokens or ended):
            problem = f"{len(tokens)} tokens with {len(laws)} log-probabilities, and {count} were asked for"
            raise self._error(f"an answer of {problem}", "it must return ids (vLLM: return_token_ids) and logprobs")
        return Answer((*tokens, END) if ended else tokens, tuple(laws[: len(tokens)] if shown else ()))

    def _of_vllm(self, prompt: Prompt, said: Ids, count: int, sampling: Sampling, seed: int, shown: int) -> Any:
        body: JsonObject = {
            "model": self.model, "max_tokens": count, "temperature": sampling.temperature, "seed": seed,
            "top_k": sampling.top_k or -1, "top_p": sampling.top_p, "return_token_ids": True,
            # whatever the model's generation_config.json says
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        } | ({"return_tokens_as_token_ids": True} if shown else {})  # fmt: skip
        if isinstance(prompt, WithPictures):
            messages = list(prompt.messages)
            if said:
                text = self._asked("/detokenize", {"model": self.model, "tokens": said})
                with self._understood():
                    messages.append({"role": "assistant", "content": text["prompt"]})
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            body |= {"messages": messages} | ({"logprobs": True, "top_logprobs": shown} if shown else {})
            answer = self._asked("/v1/chat/completions", body)
        else:
            body |= {"prompt": [*prompt, *said]} | ({"logprobs": shown} if shown else {})
            answer = self._asked("/v1/completions", body)
        with self._understood():
            (choice,) = answer["choices"]
            if isinstance(prompt, WithPictures) and said and _ids(answer["prompt_token_ids"])[-len(said) :] != said:
                return None
            scored = (choice.get("logprobs") or {}) if shown else {}
            places = scored.get("top_logprobs") or [
                {one["token"]: one["logprob"] for one in place["top_logprobs"]} for place in scored.get("content") or []
            ]
            laws = [_law({int(t.removeprefix("token_id:")): v for t, v in place.items()}, shown) for place in places]
            return _ids(choice["token_ids"]), laws, choice["finish_reason"] == "stop"

    def _of_llama(self, prompt: Ids, said: Ids, count: int, sampling: Sampling, seed: int, shown: int) -> Any:
        answer = self._asked("/completion", {
            "prompt": [*prompt, *said], "n_predict": count, "temperature": sampling.temperature, "seed": seed,
            "top_k": sampling.top_k if sampling.temperature else 1, "top_p": sampling.top_p, "min_p": 0.0,
            "n_probs": shown, "return_tokens": True, "cache_prompt": False,
        })  # fmt: skip
        with self._understood():
            laws = [_law({one["id"]: one["logprob"] for one in place["top_logprobs"]}, shown)
                    for place in answer.get("completion_probabilities", ())]  # fmt: skip
            return _ids(answer["tokens"]), laws, answer["stop_type"] == "eos"

    def _of_sglang(self, prompt: Ids, said: Ids, count: int, sampling: Sampling, seed: int, shown: int) -> Any:
        settings = {"max_new_tokens": count, "temperature": sampling.temperature, "top_k": sampling.top_k or -1,
                    "top_p": sampling.top_p, "min_p": 0.0, "sampling_seed": seed}  # fmt: skip
        body = {"input_ids": [*prompt, *said], "sampling_params": settings}
        answer = self._asked("/generate", body | ({"return_logprob": True, "top_logprobs_num": shown} if shown else {}))
        with self._understood():
            about = answer["meta_info"]
            laws = [_law({token: value for value, token, *_ in place}, shown)
                    for place in about.get("output_top_logprobs", ())]  # fmt: skip
            return _ids(answer["output_ids"]), laws, about["finish_reason"]["type"] == "stop"

    def counters(self) -> Mapping[str, float]:
        """The counters of speculation of vLLM or llama.cpp, all of them: name without prefix and `_total`, or
        name and position as `NAME/0` -> value. Empty: the server shows none.
        """
        counts = self._counters()
        if counts:
            time.sleep(_LATE_S)
        return self._counters() if counts else counts

    def _counters(self) -> dict[str, float]:
        counts = defaultdict[str, float](float)
        try:
            page = self._read("/metrics").decode(errors="replace")
            with self._understood():
                for sample in filter(None, map(_SAMPLE.fullmatch, page.splitlines())):
                    name, position, value = sample.groups()
                    counts[name if position is None else f"{name}/{position}"] += float(value)
        except UserError:
            return {}
        return counts

    def _asked(self, path: str, body: JsonObject | None = None) -> Json:
        text = self._read(path, None if body is None else json.dumps(body).encode())
        with self._understood():
            answer: Json = parse(text)
        return answer

    def _read(self, path: str, body: bytes | None = None) -> bytes:
        root = self.url.rstrip("/").removesuffix("/v1")
        if urlparse(root).scheme not in ("http", "https"):
            raise UserError("no address of a server", where=self.url, hint="write http://localhost:8000")
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            with build_opener(_SameOrigin).open(Request(root + path, body, headers), timeout=self.timeout_s) as answer:
                read: bytes = answer.read(_MOST_BYTES)
                return read
        except HTTPError as error:
            said = error.read(1 << 16).decode(errors="replace")
            told = re.search(r'"message": ?("(?:[^"\\]|\\.)*")', said)
            message = json.loads(told[1]) if told else " ".join(said.split())
            problem = f"the server answers {error.code} to {path}: {message[:300]}"
            raise self._error(problem, _DIED if error.code >= 500 else _REFUSED) from error
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", None)  # urllib wraps what the machine said
            said = first_line(why if isinstance(why, BaseException) else error)
            raise self._error(f"the server does not answer: {said}", f"is it started? {_DIED}") from error

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Whatever else than its API a server answers with is one sentence."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise self._error(f"no answer of an OpenAI-style server: {first_line(error)}") from error

    def _error(self, problem: str, hint: str = _DIED) -> UserError:
        return UserError(problem, where=self.url, hint=hint)


def _ids(value: Json) -> Ids:
    """Raises `ValueError`, `TypeError`: no token ids."""
    if any(type(token) is not int or token < 0 for token in value):
        raise ValueError("no token ids")
    return tuple(value)


def _law(logprobs: Mapping[int, float], shown: int) -> Mapping[int, float]:
    """The likeliest ones: vLLM adds the token that was drawn. Raises `ValueError`, `TypeError`: these are none."""
    best = dict(sorted(logprobs.items(), key=lambda pair: -pair[1])[:shown])
    if not best or any(type(token) is not int for token in best) or not max(best.values()) <= 1e-3:
        raise ValueError("no log-probabilities")
    return best
