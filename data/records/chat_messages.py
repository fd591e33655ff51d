"""A record as the messages of a chat completion: what a server is asked, which has a chat template of its own."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import UserError
from ...core.json_types import Json, JsonMapping, JsonObject
from ..pictures.media_files import located, open_media
from ..pictures.picture_files import mime_type
from ..pictures.picture_marks import MARKS
from .record import paths

_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "developer": "developer"}


@dataclass(frozen=True)
class Conversation:
    """A record up to its last answer, and the questions that are asked after it.

    Args:
        name: in messages; unique within its set.
        record: LLaVA JSON, with further questions under `turns`.
        images: folder that the names of its pictures are relative to.
        allow_outside: they may lead out of it.
    """

    name: str
    record: JsonMapping
    images: Path
    allow_outside: bool = False

    @property
    def further(self) -> tuple[str, ...]:
        """Questions that follow the server's answers."""
        return tuple(self.record.get("turns", ()))

    def messages(self) -> list[JsonObject]:
        """The messages before the first answer, pictures as data: URLs where their marks stand.

        Raises:
            UserError: a picture is missing or broken, or the record has what no message can hold.
        """
        record = dict(self.record)
        turns = record["conversations"][: -1 if record["conversations"][-1]["from"] == "gpt" else None]
        odd = [turn["from"] for turn in turns if turn["from"] not in _ROLES or turn.get("tool_calls")]
        if odd or record.get("tools") or paths(record, "video"):
            what = "clips" if paths(record, "video") else "tools"
            raise UserError(f"the record has {what}, and a server is asked texts and pictures alone", where=self.name,
                            hint="leave such records out")  # fmt: skip
        pictures = iter([_url(self.images, name, self.allow_outside) for name in paths(record, "image")])
        return [{"role": _ROLES[turn["from"]], "content": _content(turn["value"], pictures)} for turn in turns]


def _content(text: str, pictures: Json) -> str | list[JsonObject]:
    """The text alone; with marks a list of texts and pictures in their order."""
    first, *others = MARKS[False].split(text)
    if not others:
        return text
    parts = [{"type": "text", "text": first.strip()}]
    for other in others:
        parts += [{"type": "image_url", "image_url": {"url": next(pictures)}}, {"type": "text", "text": other.strip()}]
    return [part for part in parts if part.get("text") != ""]


def _url(folder: Path, name: Json, allow_outside: bool) -> str:
    file = located(folder, name, allow_outside=allow_outside)
    kind = mime_type(file)
    with open_media(file, "image") as data:
        return f"data:{kind};base64,{base64.b64encode(data.read()).decode()}"
