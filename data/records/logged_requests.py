"""One line of a log: the request, the choices that answer it, and why they cannot be learned.

The lines are those of vLLM, SGLang and OpenAI (also batch files), LiteLLM's log and Langfuse's exports of generations.
A field of a request that is not known to leave the prompt alone is refused: no record could say what the server made
of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...core.json_types import Json, JsonObject, all_are, list_at, listed, object_at, parse, text_at, value_at
from .logged_pictures import Unusable

_REGENERATE = "let the target write it: a regenerate stage"
# Where servers and gateways write the two halves of a request. Some write them as a string of JSON.
_ASKED = ("request", "body", "request_body", "input")
_ANSWERED = ("response", "response_body", "output")
_PARAMETERS = ("model_parameters", "modelParameters", "optional_params", "extra_body")  # more fields of the request
CARRIED = ("tools", "chat_template_kwargs")  # a record hands them to the target's template
# Fields of a request that leave its prompt as it is.
_HARMLESS = {
    *CARRIED, *_PARAMETERS, "messages", "model",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "logit_bias", "bad_words",
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "use_beam_search", "watermarking", "ignore_eos",
    "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf",
    "tool_choice", "parallel_tool_calls", "stream", "stream_options", "stream_interval", "stream_reasoning",
    "separate_reasoning", "spaces_between_special_tokens", "no_stop_trim", "return_token_ids", "return_hidden_states",
    "return_tokens_as_token_ids", "priority", "cache_salt", "user", "store", "service_tier", "metadata",
    "extra_headers", "safety_identifier", "prompt_cache_key", "timeout", "max_retries", "rid", "request_id",
    "session_id",
}  # fmt: skip
# Fields that do so at this value.
_DEFAULTS = {
    "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "echo": False,
    "include_reasoning": True, "skip_special_tokens": True,
}  # fmt: skip
# What stands beside messages where a line is its own request: notes of servers, of LiteLLM and of data sets.
_NOTES = {
    *_ANSWERED, "choices", "usage", "id", "uuid", "custom_id", "trace_id", "conversation_id", "response_id", "url",
    "method", "object", "created", "created_at", "timestamp", "ts", "time", "date", "latency", "latency_ms", "duration",
    "duration_ms", "status", "status_code", "finish_reason", "stop_reason", "matched_stop", "system_fingerprint",
    "error", "call_type", "response_cost", "cost_breakdown", "response_cost_failure_debug_info", "status_fields",
    "custom_llm_provider", "total_tokens", "prompt_tokens", "completion_tokens", "startTime", "endTime",
    "completionStartTime", "response_time", "model_map_information", "model_id", "model_group", "api_base", "cache_hit",
    "cache_key", "saved_cache_cost", "request_tags", "end_user", "requester_ip_address", "user_agent", "error_str",
    "error_information", "hidden_params", "source", "dataset", "category", "split", "tags", "lang", "language",
}  # fmt: skip
_WHOLE = {"None", "stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn"}
# Where the number of an answer's tokens stands that has no finish_reason.
_USED = (("usage", "completion_tokens"), ("usage", "output"), ("usageDetails", "output"), ("completionTokens",))


class LeftOut(Unusable):
    """Nobody's mistake: such a part of a log is left out and counted, and stops nothing."""


@dataclass(frozen=True)
class Exchange:
    """A request, and what answers it."""

    request: JsonObject  # its fields; `messages` are objects
    choices: list[JsonObject]  # each with a `message`; none: a question alone
    model: str | None  # that answered, where the line names one
    used: int | None  # tokens of the answer, where it says so


def read_line(line: JsonObject, ignored: Collection[str] = ()) -> Exchange:
    """The line's request and answers. Raises `Unusable`.

    Args:
        ignored: fields of requests that changed no prompt, by the user's word.
    """
    answer = next((value for key in _ANSWERED if (value := unpacked(line.get(key))) not in (None, {}, [], "")), None)
    body = unpacked(value_at(answer, "body"))
    _check_error(line, answer, body)
    answer = answer if body is None else body
    request = _request(line)
    harmless = {*ignored, *(_NOTES if request is line else ())}
    messages = request["messages"]
    if not all_are(messages, dict):
        raise Unusable("a message is no JSON object")
    for key in _PARAMETERS:
        request = {**_fields(line.get(key)), **_fields(request.get(key)), **request}
    request = {key: line[key] for key in CARRIED if line.get(key)} | request
    _check_fields(request, harmless)
    choices = list_at(line, "choices")
    if choices is None and answer is None and messages and messages[-1].get("role") == "assistant":
        request, choices = request | {"messages": messages[:-1]}, [{**line, "message": messages[-1]}]
    else:
        # Answers before a choice have weight 0: each was logged with a request of its own, or is not the target's.
        request |= {"messages": [m | {"weight": 0} if m.get("role") == "assistant" else m for m in messages]}
        choices = _choices(answer, text_at(line, "output") is not None) if choices is None else choices
    if not all_are(choices, dict):
        raise Unusable("a choice is no JSON object")
    if any("delta" in choice and "message" not in choice for choice in choices):
        raise Unusable("a piece of a streamed answer", "write all pieces of an answer as a list under `response`")
    pieces = answer if isinstance(answer, list) else [answer]
    named = (text_at(one, "model") for one in (*pieces, request, line))
    used = (value_at(one, *keys) for one in (line, *pieces) for keys in _USED)
    return Exchange(request, choices, next(filter(None, named), None), next((n for n in used if type(n) is int), None))


def check_end(choice: JsonObject, exchange: Exchange) -> None:
    """Raises `LeftOut` where the target has not ended this answer: to learn an end there would be wrong."""
    request = exchange.request
    most = request.get("max_completion_tokens") or request.get("max_tokens")
    reason = choice.get("finish_reason")
    if reason is None and exchange.used is not None and isinstance(most, int) and exchange.used >= most:
        reason = "length"
    if str(reason) not in _WHOLE:
        raise LeftOut(f"the server cut the answer (finish_reason: {str(reason)[:40]})",
                      f"allow more tokens, or {_REGENERATE}")  # fmt: skip
    ends = [choice[key] for key in ("stop_reason", "matched_stop") if key in choice]  # vLLM's name and SGLang's
    stops = [*listed(request.get("stop")), *listed(request.get("stop_token_ids"))]
    if any(isinstance(end, str) or end in stops for end in ends):
        raise LeftOut("a stop string cut the answer", _REGENERATE)
    if stops and not ends:
        raise LeftOut("the request has stops, and the answer does not say which ended it", _REGENERATE)


def unpacked(value: Json) -> Json:
    """What stands in a string of JSON, or of a stream's events (SSE), as some write halves and parameters; else it."""
    if not isinstance(value, str):
        return value
    try:
        if not value.lstrip().startswith(("data:", "event:", ":")):
            return parse(value)
        data = (line.removeprefix("data:").strip() for line in value.splitlines() if line.startswith("data:"))
        return [parse(one) for one in data if one not in ("", "[DONE]")]
    except ValueError:
        return value


def _fields(value: Json) -> JsonObject:
    return object_at(unpacked(value)) or {}


def _request(line: JsonObject) -> JsonObject:
    """The half that asks, or the line itself."""
    halves = {key: unpacked(line.get(key)) for key in _ASKED}
    within = unpacked(value_at(halves["request"], "body"))
    for half in (line, *halves.values(), within, {"messages": halves["input"]}):
        if list_at(half, "messages") is not None:
            return half
    names = ", ".join(map(str, line))[:80] or "nothing"
    raise Unusable(
        "no messages", f"a line has `messages`, or `request: {{messages}}` and `response: {{choices}}`; found {names}"
    )


def _check_fields(request: JsonObject, harmless: Collection[str]) -> None:
    """Raises `Unusable` where a field may have made another prompt of the messages."""
    known = _HARMLESS.union(harmless)
    odd = [key for key, value in request.items() if value not in (None, [], {}, "") and key not in known
           and not (key in _DEFAULTS and value == _DEFAULTS[key])]  # fmt: skip
    choice = request.get("tool_choice")  # without which some servers leave tools out, or all but one
    if request.get("tools") and choice not in (None, "auto", "required") and "tool_choice" not in harmless:
        odd.append("tool_choice")
    if odd:
        cure = "no record can say what the server made of it; where it changed no prompt: "
        raise Unusable(f"a request with {', '.join(odd)}", cure + " ".join(f"--ignore {key}" for key in odd))


def _check_error(*parts: object) -> None:
    """Raises `LeftOut` where the server, or a gateway before it, answered with an error."""
    for part in filter(None, map(object_at, parts)):
        statuses = [part.get(key) for key in ("status", "status_code")]
        failed = any(s >= 400 if isinstance(s, int) else s in ("failure", "failed", "error") for s in statuses)
        if failed or part.get("error") or part.get("error_str") or part.get("level") == "ERROR":
            raise LeftOut("the server answered with an error", _REGENERATE)


def _choices(answer: Json, is_text: bool) -> list[Json]:
    """The choices of an answer: a response, the pieces of a stream, a message alone, or its text (Langfuse)."""
    if answer is None:
        return []
    if isinstance(answer, list) and all(list_at(piece, "choices") is not None for piece in answer):
        return _joined([choice for piece in answer for choice in piece["choices"]])
    if (choices := list_at(answer, "choices")) is not None:
        return choices
    if text_at(answer, "role") == "assistant":
        return [{"message": answer}]
    if isinstance(answer, str) and is_text:
        return [{"message": {"content": answer}}]
    raise Unusable("an answer of no known form", "write it as `response: {choices: [{message}]}`")


def _joined(pieces: list[Json]) -> list[Json]:
    """Choices of a streamed answer's pieces: texts follow each other, as do the arguments of a call."""
    choices: dict[str, JsonObject] = {}
    calls: dict[tuple[str, str], JsonObject] = {}
    for piece in filter(None, map(object_at, pieces)):
        number = str(piece.get("index"))
        choice = choices.setdefault(number, {"finish_reason": "the stream breaks off", "message": {}})
        ends = {key: piece[key] for key in ("finish_reason", "stop_reason", "matched_stop") if key in piece}
        choice |= {key: end for key, end in ends.items() if end is not None or key not in choice}
        message, delta = choice["message"], object_at(piece, "delta") or {}
        for key in ("content", "reasoning", "reasoning_content", "refusal"):
            if text := text_at(delta, key):
                message[key] = message.get(key, "") + text
        for part in filter(None, map(object_at, listed(delta.get("tool_calls")))):
            place = number, str(part.get("index"))
            if place not in calls:
                calls[place] = {"function": {"name": "", "arguments": ""}}
                message.setdefault("tool_calls", []).append(calls[place])
            calls[place] |= {key: part[key] for key in ("id", "type") if part.get(key)}
            for key in ("name", "arguments"):
                calls[place]["function"][key] += text_at(part, "function", key) or ""
    return [*choices.values()]
