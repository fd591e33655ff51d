"""Logs of an OpenAI-style server as records to train on: JSONL of requests with `messages`, and their answers.

Every line is one request. Its answer is the last message, or the first choice of its `response`. Pictures are `data:`
URLs or local files; nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from PIL import Image

from ..core.errors import UserError
from ..core.files import new_folder, open_data
from .picture_marks import IMAGE_MARK

RECORDS, PICTURES, SKIPPED = "records.jsonl", "pictures", "skipped.jsonl"
_ROLES = {"user": "human", "assistant": "gpt"}
_SYSTEM = ("system", "developer")
_MOST_BYTES = 64 * 2**20  # of a picture
# Where servers and gateways write the two halves of a request.
_ASKED = (("messages",), ("request", "messages"), ("request", "body", "messages"), ("body", "messages"))
_ANSWERED = (("choices",), ("response", "choices"), ("response", "body", "choices"))


class _Unusable(Exception):
    """Why a line cannot become a record, and what to do."""

    def __init__(self, problem: str, cure: str = ""):
        super().__init__(problem)
        self.cure = cure


@dataclass
class Converted:
    """What came of a log.

    Args:
        system: the system message of the records; empty: they have none.
        skipped: reason -> lines that were left out for it.
    """

    records: int = 0
    pictures: int = 0
    turns: int = 0
    system: str = ""
    skipped: Counter[str] = field(default_factory=Counter)


def convert(
    log: Path, destination: Path, *, images: Path | None = None, skip: bool = False, any_system: bool = False
) -> Converted:
    """Write `records.jsonl` and `pictures/` to a new folder, whole or not at all.

    Args:
        images: the folder that local pictures lie in, and that relative paths start at; None: the log's.
        skip: leave out lines that cannot be used, and list them in `skipped.jsonl`; else the first one is an error.
        any_system: keep records whatever their system message; else those of another one than most have are left out,
            since training shows all records one system message (`format.system`).

    Raises:
        UserError: the log cannot be read, a line of it cannot be used, or none can.
    """
    found = Converted(system=_usual_system(log))
    with new_folder(destination) as folder:
        (folder / PICTURES).mkdir()
        pictures = _Pictures(folder / PICTURES, (images or log.parent).resolve())
        with (folder / RECORDS).open("w") as records, (folder / SKIPPED).open("w") as skipped:
            for number, line in _lines(log):
                try:
                    record = _record(line, f"{log.stem}-{number}", pictures, None if any_system else found.system)
                except _Unusable as error:
                    if not skip:
                        hint = error.cure or "fix the line, or leave such lines out: --skip"
                        raise UserError(str(error), where=f"{log}, line {number}", hint=hint) from None
                    found.skipped[str(error)] += 1
                    skipped.write(json.dumps({"line": number, "problem": str(error), "cure": error.cure}) + "\n")
                    continue
                records.write(json.dumps(record, ensure_ascii=False) + "\n")
                found.records += 1
                found.turns += len(record["conversations"]) // 2
        found.pictures = pictures.count
        if not found.records:
            first = next(iter(found.skipped), "the file has no lines")
            raise UserError(f"no line can be used: {first}", where=str(log), hint="is it a log of chat completions?")
        if not found.skipped:
            (folder / SKIPPED).unlink()
    return found


def _lines(log: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of each line that is not empty."""
    with open_data(log) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _usual_system(log: Path) -> str:
    """The system message that most lines have; empty where most have none."""
    counts: Counter[str] = Counter()
    for _, line in _lines(log):
        try:
            messages = _messages(_parsed(line))
            counts[_system(messages)] += 1
        except _Unusable:
            continue
    return counts.most_common(1)[0][0] if counts else ""


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise _Unusable("not JSON", "one JSON object on each line") from None
    if not isinstance(value, dict):
        raise _Unusable("no JSON object", "one JSON object on each line")
    return value


def _at(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _messages(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The request's messages with the answer after them."""
    asked = next((found for keys in _ASKED if isinstance(found := _at(line, keys), list)), None)
    if asked is None:
        raise _Unusable("no messages", "a line has `messages`, or `request: {messages}` and `response: {choices}`")
    if not all(isinstance(message, dict) for message in asked):
        raise _Unusable("a message is no JSON object")
    choices = next((found for keys in _ANSWERED if isinstance(found := _at(line, keys), list)), None)
    answer = _at(choices[0], ("message",)) if choices else None
    return [*asked, answer] if isinstance(answer, dict) else asked


def _system(messages: list[dict[str, Any]]) -> str:
    first = messages[0] if messages else {}
    return _text(first.get("content")) if first.get("role") in _SYSTEM else ""


def _text(content: Any) -> str:
    """Of a message that has no pictures."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _record(line: bytes, name: str, pictures: _Pictures, system: str | None) -> dict[str, Any]:
    messages = _messages(_parsed(line))
    if system is not None and _system(messages) != system:
        raise _Unusable("another system message than most lines have", "convert it by itself, or say --any-system")
    messages = [message for number, message in enumerate(messages) if number or message.get("role") not in _SYSTEM]
    turns: list[dict[str, str]] = []
    images: list[str] = []
    for number, message in enumerate(messages):
        if message.get("tool_calls") or message.get("role") in ("tool", "function"):
            raise _Unusable("calls tools", "no template of this project writes tools")
        role = _ROLES.get(str(message.get("role")))
        if role != ("human", "gpt")[number % 2]:
            raise _Unusable(f"message {number} is of role {message.get('role')!r}; user and assistant must alternate")
        turns.append({"from": role, "value": _value(message.get("content"), role, pictures, images)})
    if not turns or turns[-1]["from"] != "gpt":
        raise _Unusable("no answer", "log answers, too, or let the target write them: a regenerate stage")
    if not turns[-1]["value"].strip():
        raise _Unusable("an empty answer")
    shown = {} if not images else {"image": images[0] if len(images) == 1 else images}
    return {"id": name, **shown, "conversations": turns}


def _value(content: Any, role: str, pictures: _Pictures, images: list[str]) -> str:
    """A turn's text with a mark for each picture, in order."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _Unusable("a message without text", "content is a text, or a list of parts")
    texts = []
    for part in parts:
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            if IMAGE_MARK in part["text"]:
                raise _Unusable(f"a text says {IMAGE_MARK}, which stands for a picture in records")
            texts.append(part["text"])
        elif kind == "image_url" and role == "human":
            url = part.get("image_url")
            images.append(pictures.keep(url.get("url") if isinstance(url, dict) else url))
            texts.append(IMAGE_MARK)
        else:
            raise _Unusable(f"a part of type {kind!r}", "parts that are read: text, and image_url of a user")
    return "\n".join(texts)


class _Pictures:
    """Copies pictures to a folder under the hash of their bytes: one that comes often is kept once.

    Args:
        root: local pictures must lie in it: who wrote a log could otherwise have any file of this machine copied.
    """

    def __init__(self, folder: Path, root: Path):
        self._folder, self._root = folder, root
        self.count = 0

    def keep(self, url: Any) -> str:
        """The picture's name below the folder of the records. Raises `_Unusable`."""
        if not isinstance(url, str) or not url:
            raise _Unusable("a picture without an address")
        data = _inline(url) if url.startswith("data:") else self._local(url)
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.verify()
                suffix = (image.format or "").lower()
        except Exception:  # PIL raises many kinds of exceptions for broken files
            raise _Unusable("a picture that cannot be read") from None
        name = f"{PICTURES}/{hashlib.sha256(data).hexdigest()[:32]}.{suffix}"
        path = self._folder.parent / name
        if not path.is_file():
            path.write_bytes(data)
            self.count += 1
        return name

    def _local(self, url: str) -> bytes:
        parsed = urlparse(url)
        if parsed.scheme in ("http", "https"):
            raise _Unusable("a picture on the network, and nothing is fetched",
                            "download it, and write its path (or a data: URL) into the log")  # fmt: skip
        if parsed.scheme not in ("", "file"):
            raise _Unusable(f"a picture's address of scheme {parsed.scheme}", "data: URLs and local files are read")
        path = (self._root / (unquote(parsed.path) if parsed.scheme else url)).resolve()
        if not path.is_relative_to(self._root):
            raise _Unusable(
                "a picture outside the folder of pictures",
                f"name a folder that holds it: --images (it is {self._root} now)",
            )
        if not path.is_file():
            raise _Unusable("a picture that is not there", f"paths start at --images, {self._root}")
        if path.stat().st_size > _MOST_BYTES:
            raise _Unusable("a picture of more than 64 MiB")
        return path.read_bytes()


def _inline(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise _Unusable("a data: URL that is not base64")
    if len(body) > _MOST_BYTES * 4 // 3:
        raise _Unusable("a picture of more than 64 MiB")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error:
        raise _Unusable("a data: URL that is not base64") from None
