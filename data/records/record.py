"""One record of a conversation: what is wrong with its text, and the pictures and clips that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...core.errors import UserError, encodable
from ...core.json_types import Json, JsonObject, list_at, listed, object_at, text_at
from ...core.pictures import IMAGE_MARK, MARKS, VIDEO_MARK
from ..families.prompt_templates import ROLES, SYSTEM_ROLES
from ..pictures.media_files import Embedded


@dataclass(frozen=True)
class Unreadable:
    """Stands for a record that cannot be read at all, where others of its file can."""

    problem: str


def check_record(record: object) -> str | None:
    """What is wrong with a record's text, or None. Pictures are looked at when they are read."""
    if isinstance(record, Unreadable):
        return record.problem
    if not isinstance(record, dict):
        actual = f" but a list of {len(record)} items" if isinstance(record, list) else ""
        return f"not an object with id and conversations{actual}"
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        if "messages" in record:
            return "no conversations, but messages: a chat log, which `draftsmith logs` reads"
        others = [encodable(str(key)) for key in record if key not in ("id", "image", "video", "conversations")]
        return "no conversations" + (f" (it has {', '.join(sorted(others)[:6])})" if others else "")
    for key, kind in _HANDED.items():
        if not isinstance(record.get(key) or kind(), kind):
            return f"{key} is no {'list' if kind is list else 'object'}"
    images, clips = paths(record, "image"), paths(record, "video")
    for key, names in (("image", images), ("video", clips)):
        if not all(isinstance(name, str | Embedded) for name in names):
            return f"{key} is neither a path nor a list of paths"
        if any(encodable(name) != name for name in names if isinstance(name, str)):
            return f"{key} {_BROKEN}"
    problem = _check_turns(turns, len(images), len(clips))
    others = [
        k for k in ("images", "videos") if any(n and isinstance(n, str | dict | list) for n in listed(record.get(k)))
    ]
    if others and not (images or clips) and (problem is None or " marks for " in problem):
        problem = problem or "its pictures would not be shown"
        problem += f" (key {others[0]} is not read: call it {others[0][:-1]}, or read the file by kind: datasets)"
    return problem


def _check_turns(turns: list[Json], images: int, clips: int) -> str | None:
    """One loop: at 665k records most of the time of a first start goes here."""
    expected, marks, asks, before = "human", 0, False, ""
    for place, turn in enumerate(turns):
        role = turn.get("from") if isinstance(turn, dict) else None
        if role not in _EVERY_ROLE:
            if role is None and {"role", "content"} <= (object_at(turn) or {}).keys():
                return "turns with role and content, as in a chat log; they have from (human, gpt) and value"
            return f"unknown role {role!r} (roles are human and gpt)"
        text = turn.get("value")
        if not isinstance(text, str):
            return "a turn without text"
        if encodable(text) != text:
            return f"a turn's text {_BROKEN}"
        if role == "tool" and before in ("gpt", "tool"):
            expected = "gpt"
        elif role != expected:
            if place == 0 and role != "tool":
                continue  # a system message, or an opening answer, which templates drop
            return "the roles human (user) and gpt (assistant) do not alternate"
        else:
            expected = "human" if role == "gpt" else "gpt"
        calls = turn.get("tool_calls")
        if calls and not (isinstance(calls, list) and None not in [text_at(c, "function", "name") for c in calls]):
            return "tool_calls is no list of calls, each with a function's name"
        if not isinstance(turn.get("reasoning", ""), str):
            return "a turn's reasoning is no text"
        if turn.get("weight") not in (None, 0, 1):
            return "a turn's weight is neither 0 (read, not learned) nor 1"
        if role == "gpt" and (not text or text.isspace()) and not calls:
            return "empty answer"
        asks |= role != "gpt"
        marks += text.count(IMAGE_MARK) + (text.count(VIDEO_MARK) if clips else 0)
        before = role
    if not asks:
        return "no question"
    if marks == images + clips:
        return None
    return f"{marks} <image> marks for {images} images" + (f" and {clips} clips" if clips else "")


# What a target's own chat template is handed beside the messages.
_HANDED: dict[str, type] = {"tools": list, "chat_template_kwargs": dict}
_EVERY_ROLE = (*ROLES, *SYSTEM_ROLES, "tool")  # no set: a file may have a list there, which has no hash


# JSON's "\ud83d" without its other half, which neither a tokenizer nor a file takes.
_BROKEN = "has half a character (a lone surrogate)"


def num_learned(record: JsonObject) -> int:
    """Answers that can be learned: those of weight 0, and an opening one, which templates drop, cannot."""
    turns = record["conversations"]
    first = next(place for place, turn in enumerate(turns) if turn["from"] != "gpt")
    return sum(turn["from"] == "gpt" and turn.get("weight") != 0 for turn in turns[first:])


def paths(record: JsonObject, key: str) -> list[Json]:
    """The paths (or `Embedded` bytes) that a record names under `key` (image, video): none, one, or a list."""
    named = record.get(key)
    return [] if not named else named if isinstance(named, list) else [named]


def in_words(record: JsonObject) -> JsonObject:
    """The record without its pictures: each mark becomes the next text of key `told`. Raises `UserError` where there is
    not one for each.
    """
    texts, mark = list_at(record.get("told")) or [], MARKS[False]
    count = sum(len(mark.findall(turn["value"])) for turn in record["conversations"])
    if len(texts) != count or not all(isinstance(text, str) for text in texts):
        problem = f"told holds {len(texts)} texts for {count} pictures"
        raise UserError(problem, hint="write a list with a text for each picture, in order")
    left = iter(texts)
    turns = [turn | {"value": mark.sub(lambda _: str(next(left)), turn["value"])} for turn in record["conversations"]]
    return {key: value for key, value in record.items() if key != "image"} | {"conversations": turns}


def with_end(record: JsonObject, end: str) -> JsonObject:
    """The record with `end` after its last question."""
    turns = list(record["conversations"])
    last = max(place for place, turn in enumerate(turns) if turn["from"] == "human")
    turns[last] = turns[last] | {"value": f"{turns[last]['value'].rstrip()} {end}"}
    return record | {"conversations": turns}


def without_marks(record: JsonObject) -> list[JsonObject]:
    """The turns with every picture's mark, and the line break after it, taken away."""
    marks = MARKS[bool(paths(record, "video"))]

    def stripped(text: str) -> str:
        return marks.sub("", re.sub(f"({marks.pattern})\n", "", text)).strip()

    return [turn | {"value": stripped(turn["value"])} for turn in record["conversations"]]
