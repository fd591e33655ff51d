"""Logs of an OpenAI-style server as records to train on: JSONL of requests with `messages`, and their answers.

Every line is one request. Its answer is the last message, or each choice of its `response`; without one it is a
question alone, which the target may answer. A record keeps all that the
target's chat template writes: the system message, tools, calls and reasoning. Pictures are `data:` URLs or local files;
nothing is fetched from a network.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import UserError, encodable
from ...core.file_kinds import HEAD, MARK, other_kind
from ...core.files import new_folder, open_data
from ...core.json_types import Json, JsonObject, all_are, list_at, listed, object_at, text_at, value_at
from ...core.pictures import IMAGE_MARK
from ..families.prompt_templates import SYSTEM_ROLES
from .logged_pictures import PICTURES, LoggedPictures, Unusable
from .record import check_record, num_learned

MOST_BYTES = 256 << 20  # of a line, its pictures included
RECORDS, HELD_OUT, SKIPPED = "records.jsonl", "held-out.jsonl", "skipped.jsonl"
_ROLES = {"user": "human", "assistant": "gpt", "tool": "tool"} | {role: role for role in SYSTEM_ROLES}
# Where servers and gateways write the two halves of a request.
_ASKED: tuple[tuple[str, ...], ...] = ((), ("request",), ("request", "body"), ("body",), ("request_body",))
_ANSWERED = (("choices",), ("response", "choices"), ("response", "body", "choices"), ("response_body", "choices"))
_HALVES = {"request", "response", "body", "request_body", "response_body"}  # which some write as a string of JSON
# What a request may hold that makes another prompt of its messages, and no record can say.
_ELSEWHERE = ("functions", "documents", "chat_template", "continue_final_message")
_ONE_A_LINE = "one JSON object on each line: jq -c . LOG > log.jsonl, or of a list jq -c '.[]' LOG > log.jsonl"
_WHOLE = {"None", "stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn"}


@dataclass
class Converted:
    """What came of a log."""

    records: int = 0
    held_out: int = 0  # of the records, in a file of their own
    pictures: int = 0
    answers: int = 0
    questions: int = 0  # records without an answer to learn
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> answers, or lines, that were left out for it
    has: Counter[str] = field(default_factory=Counter)  # what records have besides texts and pictures -> how many


def convert(
    log: Path, destination: Path, *, images: Path | None = None, skip: bool = False, held_out: int = 0
) -> Converted:
    """Write `records.jsonl`, `held-out.jsonl` if asked for, and `pictures/` to a new folder, whole or not at all.
    Raises `UserError`: the log cannot be read, a line of it cannot be used, none can, or nothing can be kept apart.

    Args:
        images: the folder that local pictures lie in, and that relative paths start at; None: the log's.
        skip: leave out lines that cannot be used, and list them in `skipped.jsonl`; else the first one is an error.
            Answers that the server cut are always left out and listed.
        held_out: records to keep apart, at most. Those that share a picture or a conversation's first question stay
            together. The draw is seeded.
    """
    found, groups = Converted(), _Groups()
    with new_folder(destination) as folder:
        (folder / PICTURES).mkdir()
        pictures = LoggedPictures(folder / PICTURES, (images or log.parent).resolve())
        with (folder / RECORDS).open("w") as records, (folder / SKIPPED).open("w") as skipped:
            for number, line in _lines_of(log):
                for record in _usable(number, line, log, pictures, skip):
                    if isinstance(record, Unusable):
                        found.skipped[str(record)] += 1
                        noted = {"line": number, "problem": str(record), "cure": record.cure}
                        skipped.write(json.dumps(noted) + "\n")
                        continue
                    records.write(json.dumps(record, ensure_ascii=False) + "\n")
                    groups.add(record)
                    turns = record["conversations"]
                    found.records += 1
                    found.questions += not num_learned(record)
                    found.answers += sum(turn["from"] == "gpt" and "weight" not in turn for turn in turns)
                    found.has["a system message"] += turns[0]["from"] in SYSTEM_ROLES
                    found.has["tools"] += "tools" in record
                    found.has["reasoning"] += any("reasoning" in turn for turn in turns)
        found.pictures = pictures.count
        if not found.records:
            first = next(iter(found.skipped), "the file has no lines")
            raise UserError(f"no line can be used: {first}", where=str(log),
                            hint="without --skip the first one is told with its cure")  # fmt: skip
        if not found.skipped:
            (folder / SKIPPED).unlink()
        if held_out:
            apart = groups.drawn(held_out, where=str(log))
            found.records, found.held_out = found.records - len(apart), len(apart)
            everything = (folder / RECORDS).rename(folder / ".everything")
            with everything.open() as whole, (folder / RECORDS).open("w") as kept, (folder / HELD_OUT).open("w") as out:
                for number, text in enumerate(whole):
                    (out if number in apart else kept).write(text)
            everything.unlink()
    return found


def _usable(
    number: int, line: bytes | None, log: Path, pictures: LoggedPictures, skip: bool
) -> Iterator[JsonObject | Unusable]:
    """The line's records, and why others of it are left out. Raises `UserError` at the first fault without `skip`."""
    try:
        if line is None:
            raise Unusable(f"a line of more than {MOST_BYTES >> 20} MiB", "write each request on a line of its own")
        try:
            whole = object_at(json.loads(line))
        except (ValueError, RecursionError):
            raise Unusable("not JSON", _ONE_A_LINE) from None
        if whole is None:
            raise Unusable("no JSON object", _ONE_A_LINE)
        asked, choices = _halves(whole)
        if not choices:
            yield _record(asked, None, f"{log.stem}-{number}", pictures)
        for place, choice in enumerate(choices):
            name = f"{log.stem}-{number}" + (f".{place + 1}" if place else "")
            if (cut := _cut(choice)) is not None:
                yield cut
                continue
            if (answer := object_at(choice, "message")) is None:
                raise Unusable("no answer", "log answers, too, or let the target write them: a regenerate stage")
            yield _record(asked, answer, name, pictures)
    except Unusable as error:
        if not skip:
            hint = error.cure or "fix the line, or leave such lines out: --skip"
            raise UserError(str(error), where=f"{log}, line {number}", hint=hint) from None
        yield error


def _at(value: object, keys: tuple[str, ...]) -> Json:
    for key in keys:
        value = value_at(value, key)
        if key in _HALVES and (text := text_at(value)) is not None:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                return None
    return value


def _halves(line: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
    """The request, and the choices that answer it, of which the last message may be one. Answers before a choice have
    weight 0: each was logged with a request of its own, or is not the target's.
    """
    found = (_at(line, keys) for keys in _ASKED)
    asked = next((one for one in found if list_at(one, "messages") is not None), None)
    if asked is None:
        keys = ", ".join(map(str, line))[:80] or "nothing"
        raise Unusable(
            "no messages",
            f"a line has `messages`, or `request: {{messages}}` and `response: {{choices}}`; found {keys}",
        )
    messages = asked["messages"]
    if not all_are(messages, dict):
        raise Unusable("a message is no JSON object")
    if key := next((key for key in _ELSEWHERE if asked.get(key)), None):
        raise Unusable(f"a request with {key}", "no record can say what the server made of it")
    choices = next(filter(None, (list_at(_at(line, keys)) for keys in _ANSWERED)), None)
    if choices is None:
        if messages and messages[-1].get("role") == "assistant":
            return asked | {"messages": messages[:-1]}, [{**line, "message": messages[-1]}]
        choices = []
    asked |= {"messages": [m | {"weight": 0} if m.get("role") == "assistant" else m for m in messages]}
    if not all_are(choices, dict):
        raise Unusable("a choice is no JSON object")
    if any("delta" in choice for choice in choices):
        raise Unusable("a piece of a streamed answer", "join its pieces into one `message` first")
    return asked, choices


def _cut(choice: JsonObject) -> Unusable | None:
    """Why the target has not ended this answer: to learn an end there would be wrong."""
    if (reason := str(choice.get("finish_reason"))) not in _WHOLE:
        return Unusable(f"the server cut the answer (finish_reason: {reason[:40]})",
                        "allow more tokens, or let the target write it: a regenerate stage")  # fmt: skip
    if text_at(choice, "stop_reason") is not None:
        return Unusable("a stop string cut the answer", "let the target write it: a regenerate stage")
    return None


def _record(asked: JsonObject, answer: JsonObject | None, name: str, pictures: LoggedPictures) -> JsonObject:
    """The record of a request and its answer; None: it is a question alone."""
    images: list[str] = []
    messages = [*asked["messages"], *([] if answer is None else [{"role": "assistant"} | answer])]
    turns = [_turn(message, number, pictures, images) for number, message in enumerate(messages)]
    if answer is not None and turns[-1]["from"] != "gpt":
        raise Unusable("no answer", "log answers, too, or let the target write them: a regenerate stage")
    if answer is not None and not turns[-1]["value"].strip() and "tool_calls" not in turns[-1]:
        raise Unusable("an empty answer")
    shown = {} if not images else {"image": images[0] if len(images) == 1 else images}
    more = {key: asked[key] for key in ("tools", "chat_template_kwargs") if asked.get(key)}
    record = {"id": name, **shown, **more, "conversations": turns}
    text = json.dumps(record, ensure_ascii=False)
    if text.count(IMAGE_MARK) != len(images):
        raise Unusable(f"a text says {IMAGE_MARK}, which stands for a picture in records")
    if encodable(text) != text:
        raise Unusable("half a character (a lone surrogate)")
    if problem := check_record(record):
        raise Unusable(problem)
    return record


def _turn(message: JsonObject, number: int, pictures: LoggedPictures, images: list[str]) -> JsonObject:
    role = _ROLES.get(str(message.get("role")))
    if role is None or (role in SYSTEM_ROLES and number):
        raise Unusable(f"message {number} is of role {message.get('role')!r}; user and assistant must alternate")
    content = message.get("content")
    turn: JsonObject = {"from": role}
    turn["value"] = "" if content is None and role == "gpt" else _value(content, role, pictures, images)
    if message.get("tool_calls"):
        turn["tool_calls"] = _calls(message["tool_calls"])
    # vLLM's older and newer name.
    reasoning = text_at(message.get("reasoning_content") or message.get("reasoning"))
    if reasoning is not None and reasoning.strip():
        turn["reasoning"] = reasoning
    if role == "gpt" and message.get("weight") == 0:  # as in files for OpenAI's fine-tuning
        turn["weight"] = 0
    return turn | {key: message[key] for key in ("tool_call_id", "name") if role == "tool" and message.get(key)}


def _calls(calls: Json) -> list[JsonObject]:
    """Arguments become objects, as servers hand them to templates."""
    kept = []
    for call in listed(calls):
        name, arguments = text_at(call, "function", "name"), _arguments(value_at(call, "function", "arguments"))
        if arguments is None or name is None:
            raise Unusable("a tool call without a function's name and arguments")
        known = {key: call[key] for key in ("id", "type") if key in call}
        kept.append({**known, "function": {"name": name, "arguments": arguments}})
    return kept


def _arguments(written: Json) -> JsonObject | None:
    """None: they are neither an object nor the text of one."""
    if written is None or text_at(written) is not None:
        try:
            written = json.loads(written or "{}")
        except (ValueError, RecursionError):
            return None
    return object_at(written)


def _value(content: object, role: str, pictures: LoggedPictures, images: list[str]) -> str:
    """A turn's text with a mark for each picture, in order; template `chat` takes the breaks beside marks away."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not all_are(parts, dict):
        raise Unusable("a message without text", "content is a text, or a list of parts")
    value, after_mark = "", False
    for part in parts:
        kind, text = part.get("type"), text_at(part, "text")
        if kind == "text" and text is not None:
            value += "\n" * (after_mark and bool(text)) + text
            after_mark &= not text
        elif kind == "image_url" and role == "human":
            images.append(pictures.keep(text_at(part, "image_url", "url") or part.get("image_url")))
            value += "\n" * bool(value) + IMAGE_MARK
            after_mark = True
        else:
            raise Unusable(f"a part of type {kind!r}", "parts that are read: text, and image_url of a user")
    return value


class _Groups:
    """Which records may not be parted: those that show a picture of one another, or begin with the same question."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._owners: dict[str, int] = {}

    def add(self, record: JsonObject) -> None:
        """The next record, in the order of the file."""
        number = len(self._parents)
        self._parents.append(number)
        images = listed(record.get("image"))
        first = next(turn["value"] for turn in record["conversations"] if turn["from"] == "human")
        shown = images[: first.count(IMAGE_MARK)]  # "What is this?" of another picture is another question
        for key in (*images, hashlib.sha256("/".join([first, *shown]).encode()).hexdigest()):
            self._parents[self._root(number)] = self._root(self._owners.setdefault(key, number))

    def _root(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def drawn(self, count: int, *, where: str) -> set[int]:
        """Up to `count` records in whole groups, at random from seed 0. Raises `UserError` where none fits."""
        groups: dict[int, list[int]] = {}
        for number in range(len(self._parents)):
            groups.setdefault(self._root(number), []).append(number)
        order = list(groups.values())
        random.Random(0).shuffle(order)
        chosen: set[int] = set()
        for group in order:
            if len(chosen) + len(group) <= min(count, len(self._parents) - 1):
                chosen |= set(group)
        if not chosen:
            smallest = min(map(len, order))
            raise UserError(
                f"{count} records cannot be kept apart: the smallest group with pictures or questions in common has "
                f"{smallest} of {len(self._parents)}", where=where, hint="name a larger number, or split the log",
            )  # fmt: skip
        return chosen


def _lines_of(log: Path) -> Iterator[tuple[int, bytes | None]]:
    """Number, from 1, and bytes of each line that is not blank; None for one of more than `MOST_BYTES`."""
    with open_data(log, hint="give a file of JSON lines") as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            with gzip.open(raw) if is_packed else raw as file:
                kind = other_kind(head := file.read(HEAD))  # of the text that was packed
                if kind is None and head.removeprefix(MARK).lstrip().startswith(b"["):
                    kind = "a JSON array", _ONE_A_LINE  # of which the last line could be read
                if kind is not None:
                    problem = f"{kind[0]}, and a log has one JSON object on each line"
                    raise UserError(problem, where=str(log), hint=kind[1])
                file.seek(0)
                for number, line in enumerate(iter(functools.partial(file.readline, MOST_BYTES + 1), b""), 1):
                    is_long = len(line) > MOST_BYTES
                    while is_long and line and not line.endswith(b"\n"):
                        line = file.readline(1 << 16)
                    if is_long or line.strip():
                        yield number, None if is_long else line.removeprefix(MARK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"a damaged gzip file: {error}", where=str(log), hint="copy or pack it again") from error
