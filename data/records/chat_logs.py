"""Logs of an OpenAI-style server as records to train on: JSONL of requests with `messages`, and their answers.

Every line is one request (`logged_requests.py`). Each of its answers becomes a record; without one it is a question
alone, which the target may answer. A record keeps all that the target's chat template writes: the system message,
tools, calls and reasoning. Pictures are `data:` URLs or local files; nothing is fetched from a network.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import UserError, encodable
from ...core.file_kinds import HEAD, MARK, other_kind
from ...core.files import new_folder, open_data
from ...core.json_types import Json, JsonObject, all_are, listed, object_at, parse, text_at, value_at
from ...core.pictures import IMAGE_MARK
from ..families.prompt_templates import SYSTEM_ROLES
from .logged_pictures import PICTURES, LoggedPictures, Unusable
from .logged_requests import CARRIED, LeftOut, check_end, read_line, unpacked
from .record import check_record, num_learned

MOST_BYTES = 256 << 20  # of a line, its pictures included
RECORDS, HELD_OUT, SKIPPED = "records.jsonl", "held-out.jsonl", "skipped.jsonl"
_ROLES = {"user": "human", "assistant": "gpt", "tool": "tool"} | {role: role for role in SYSTEM_ROLES}
_NAMES = re.compile(r"\.(jsonl|ndjson|json|log)(\.gz)?$")  # of a folder's files that are logs
_REDACTED = re.compile(r"\W*redacted([-_ ]by[-_ ]\w+)?\W*|[\[<(*]+(masked|hidden|removed)[\]>)*]+", re.IGNORECASE)


@dataclass
class Converted:
    """What came of a log."""

    records: int = 0
    held_out: int = 0  # of the records, in a file of their own
    pictures: int = 0
    answers: int = 0
    questions: int = 0  # records without an answer to learn
    repeated: int = 0  # records that say what an earlier one says
    models: Counter[str] = field(default_factory=Counter)  # that the answers are of -> answers; "": not named
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> answers, or lines, that were left out for it
    has: Counter[str] = field(default_factory=Counter)  # what records have besides texts and pictures -> how many


def convert(
    logs: Sequence[Path], destination: Path, *, images: Path | None = None, skip: bool = False, held_out: int = 0,
    models: Collection[str] = (), ignored: Collection[str] = (),
) -> Converted:  # fmt: skip
    """Write `records.jsonl`, `held-out.jsonl` if asked for, and `pictures/` to a new folder, whole or not at all.
    Raises `UserError`: a log cannot be read, a line of it cannot be used, none can, nothing can be kept apart, or the
    answers are of several models.

    Args:
        logs: files, and folders of files.
        images: the folder that local pictures lie in, and that relative paths start at; None: each log's.
        skip: leave out lines that cannot be used, and list them in `skipped.jsonl`; else the first one is an error.
            Answers that the server cut, errors and what is redacted are always left out and listed.
        held_out: records to keep apart, at most. Those that share a picture or a conversation's first question stay
            together. The draw is seeded.
        models: whose answers are taken; empty: of the one that the logs name.
        ignored: fields of requests that changed no prompt.
    """
    found, groups, texts = Converted(), _Groups(), set[bytes]()
    where, files = ", ".join(map(str, logs)), list(_files(logs))
    with new_folder(destination) as folder:
        (folder / PICTURES).mkdir()
        pictures = LoggedPictures(folder / PICTURES)
        with (folder / RECORDS).open("w") as records, (folder / SKIPPED).open("w") as skipped:
            for log, name, root in files:
                pictures.root = (images or root).resolve()
                for number, line in _lines_of(log):
                    for record in _records(line, f"{name}-{number}", pictures, models, ignored, found.models):
                        if isinstance(record, Unusable):
                            if not (skip or isinstance(record, LeftOut)):
                                hint = record.cure or "fix the line, or leave such lines out: --skip"
                                raise UserError(str(record), where=f"{log}, line {number}", hint=hint)
                            found.skipped[str(record)] += 1
                            noted = {"file": str(log), "line": number, "problem": str(record), "cure": record.cure}
                            skipped.write(json.dumps(noted) + "\n")
                            continue
                        records.write(json.dumps(record, ensure_ascii=False) + "\n")
                        groups.add(record)
                        _count(record, found, texts)
        named = [f"{model} ({count:,})" for model, count in found.models.most_common() if model]
        if len(named) > 1 and not models:
            raise UserError(f"answers of {len(named)} models: {', '.join(named)}", where=where,
                            hint="name the target: --model NAME (several times, if it has several names)")  # fmt: skip
        found.pictures = pictures.count
        if not found.records:
            first = next(iter(found.skipped), "the file has no lines")
            raise UserError(f"no line can be used: {first}", where=where,
                            hint="without --skip the first one is told with its cure")  # fmt: skip
        if not found.skipped:
            (folder / SKIPPED).unlink()
        if held_out:
            apart = groups.drawn(held_out, where=where)
            found.records, found.held_out = found.records - len(apart), len(apart)
            everything = (folder / RECORDS).rename(folder / ".everything")
            with everything.open() as whole, (folder / RECORDS).open("w") as kept, (folder / HELD_OUT).open("w") as out:
                for number, text in enumerate(whole):
                    (out if number in apart else kept).write(text)
            everything.unlink()
    return found


def _count(record: JsonObject, found: Converted, texts: set[bytes]) -> None:
    turns = record["conversations"]
    found.records += 1
    found.questions += not num_learned(record)
    found.answers += sum(turn["from"] == "gpt" and "weight" not in turn for turn in turns)
    found.has["a system message"] += turns[0]["from"] in SYSTEM_ROLES
    found.has["tools"] += "tools" in record
    found.has["reasoning"] += any("reasoning" in turn for turn in turns)
    text = hashlib.sha256(json.dumps(record | {"id": ""}, sort_keys=True).encode()).digest()[:16]
    found.repeated += text in texts
    texts.add(text)


def _records(
    line: bytes | None, name: str, pictures: LoggedPictures, models: Collection[str], ignored: Collection[str],
    answered: Counter[str],
) -> Iterator[JsonObject | Unusable]:  # fmt: skip
    """A line's records, and why others of it are left out. Their models are counted in `answered`."""
    try:
        if line is None:
            raise Unusable(f"a line of more than {MOST_BYTES >> 20} MiB", "write each request on a line of its own")
        try:
            whole = parse(line)
        except ValueError:
            raise Unusable("not JSON", _ONE_A_LINE) from None
        if not isinstance(whole, dict):
            raise Unusable("no JSON object", _ONE_A_LINE)
        exchange = read_line(whole, ignored)
        if exchange.choices and models and exchange.model not in models:
            raise LeftOut(f"an answer of {f'model {exchange.model[:60]}' if exchange.model else 'no model by name'}")
        if not exchange.choices:
            yield _record(exchange.request, None, name, pictures)
        for place, choice in enumerate(exchange.choices):
            try:
                check_end(choice, exchange)
                if (answer := object_at(choice, "message")) is None:
                    raise Unusable("no answer", _NO_ANSWER)
                yield _record(exchange.request, answer, name + (f".{place + 1}" if place else ""), pictures)
                answered[exchange.model or ""] += 1
            except LeftOut as error:
                yield error
    except Unusable as error:
        yield error


_ONE_A_LINE = "one JSON object on each line: jq -c . LOG > log.jsonl, or of a list jq -c '.[]' LOG > log.jsonl"
_NO_ANSWER = "log answers, too, or let the target write them: a regenerate stage"


def _record(asked: JsonObject, answer: JsonObject | None, name: str, pictures: LoggedPictures) -> JsonObject:
    """The record of a request and its answer; None: it is a question alone."""
    images: list[str] = []
    messages = [*asked["messages"], *([] if answer is None else [{"role": "assistant"} | answer])]
    turns = [_turn(message, number, pictures, images) for number, message in enumerate(messages)]
    if answer is not None and turns[-1]["from"] != "gpt":
        raise Unusable("no answer", _NO_ANSWER)
    if answer is not None and not turns[-1]["value"].strip() and "tool_calls" not in turns[-1]:
        raise Unusable("an empty answer")
    shown = {} if not images else {"image": images[0] if len(images) == 1 else images}
    more = {key: asked[key] for key in CARRIED if asked.get(key)}
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
    if message.get("function_call"):
        raise Unusable("a message with the older function_call", "write it as tool_calls")
    return turn | {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}


def _calls(calls: Json) -> list[JsonObject]:
    """Arguments become objects, as servers hand them to templates."""
    kept = []
    for call in listed(calls):
        name, written = text_at(call, "function", "name"), value_at(call, "function", "arguments")
        arguments = {} if written in (None, "") else object_at(unpacked(written))
        if arguments is None or name is None:
            raise Unusable("a tool call without a function's name and arguments")
        known = {key: call[key] for key in ("id", "type") if key in call}
        kept.append({**known, "function": {"name": name, "arguments": arguments}})
    return kept


def _value(content: object, role: str, pictures: LoggedPictures, images: list[str]) -> str:
    """A turn's text with a mark for each picture, in order; template `chat` takes the breaks beside marks away."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not all_are(parts, dict):
        raise Unusable("a message without text", "content is a text, or a list of parts")
    value, after_mark = "", False
    for part in parts:
        kind, text = part.get("type"), text_at(part, "text")
        if kind == "text" and text is not None:
            if _REDACTED.fullmatch(text):
                raise LeftOut("a redacted text")
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


def _files(logs: Sequence[Path]) -> Iterator[tuple[Path, str, Path]]:
    """Each log with the name that its records' ids begin with, and the folder that its pictures start at."""
    names = Counter[str]()
    for log in logs:
        root, files = log.parent, [log]
        if log.is_dir():
            root, files = log, sorted(p for p in log.rglob("[!.]*") if _NAMES.search(p.name) and p.is_file())
        if not files:
            raise UserError("no log in this folder", where=str(log), hint="logs are named *.jsonl, *.json or *.log")
        for file in files:
            name = str(file.relative_to(root).with_suffix(""))
            names[name] += 1
            yield file, name if names[name] == 1 else f"{name}.{names[name]}", root


def _lines_of(log: Path) -> Iterator[tuple[int, bytes | None]]:
    """Number, from 1, and bytes of each line that is not blank; None for one of more than `MOST_BYTES`."""
    with open_data(log) as raw:
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
