"""Pictures of a log, copied beside the records: from `data:` URLs and local files. Nothing is fetched. And back: a
record as the messages that a server is asked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from PIL import Image

from ...core.errors import UserError
from ...core.json_types import Json, JsonMapping, JsonObject
from ...core.pictures import MARKS
from ..pictures.media_files import MediaFile, located, open_media
from ..pictures.picture_files import mime_type
from .record import paths

PICTURES = "pictures"
MOST_BYTES = 64 * 2**20  # of a picture


class Unusable(Exception):
    """Why a part of a log cannot become a record, and what to do about it; no `cure`: fix the line."""

    def __init__(self, problem: str, cure: str = ""):
        super().__init__(problem)
        self.cure = cure


class LoggedPictures:
    """Copies pictures to a folder under the hash of their bytes: one that comes often is kept once. Local ones must lie
    in `root`: who wrote a log could otherwise have any file of this machine copied.
    """

    root: Path  # of the log that is read; resolved

    def __init__(self, folder: Path):
        self._folder = folder
        self.count = 0

    def keep(self, url: object) -> str:
        """The picture's name below the folder of the records. Raises `Unusable`."""
        if not isinstance(url, str) or not url:
            raise Unusable("a picture without an address")
        try:
            data = _inline(url) if url.startswith("data:") else self._read(url)
        except (OSError, ValueError):  # too long, a zero byte, half a character, brackets of no address, no rights
            raise Unusable("a picture's address that no file can have", f"{url[:80]!r}: mend or remove it") from None
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.verify()
                suffix = (image.format or "").lower()
        except Exception:  # PIL raises many kinds of exceptions for broken files
            raise Unusable("a picture that cannot be read", f"{url[:80]}: mend or remove it") from None
        name = f"{PICTURES}/{hashlib.sha256(data).hexdigest()[:32]}.{suffix}"
        path = self._folder.parent / name
        if not path.is_file():
            path.write_bytes(data)
            self.count += 1
        return name

    def _read(self, url: str) -> bytes:
        parsed = urlparse(url)
        if parsed.scheme in ("http", "https"):
            raise Unusable("a picture on the network, and nothing is fetched",
                            "download it, and write its path (or a data: URL) into the log")  # fmt: skip
        if parsed.scheme not in ("", "file"):
            raise Unusable(f"a picture's address of scheme {parsed.scheme}", "data: URLs and local files are read")
        path = (self.root / (unquote(parsed.path) if parsed.scheme else url)).resolve()
        if not path.is_relative_to(self.root):
            problem = "a picture outside the folder of pictures"
            raise Unusable(problem, f"{url}: name a folder that holds it: --images (it is {self.root} now)")
        if not path.is_file():
            raise Unusable("a picture that is not there", f"{url}: paths start at --images, {self.root}")
        if path.stat().st_size > MOST_BYTES:
            raise Unusable("a picture of more than 64 MiB")
        return path.read_bytes()


def _inline(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise Unusable("a data: URL that is not base64")
    if len(body) > MOST_BYTES * 4 // 3:
        raise Unusable("a picture of more than 64 MiB")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error:
        raise Unusable("a data: URL that is not base64") from None


_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "developer": "developer"}


@dataclass(frozen=True)
class Conversation:
    """A record up to its last answer."""

    name: str  # in messages; unique within its set
    record: JsonMapping  # LLaVA JSON
    images: Path  # folder that the names of its pictures are relative to
    allow_outside: bool = False  # they may lead out of it

    def messages(self) -> list[JsonObject]:
        """The messages before the first answer, pictures as data: URLs where their marks stand. Raises `UserError`: a
        picture is missing or broken, or the record has what no message can hold.
        """
        record = dict(self.record)
        turns = record["conversations"][: -1 if record["conversations"][-1]["from"] == "gpt" else None]
        odd = [turn["from"] for turn in turns if turn["from"] not in _ROLES or turn.get("tool_calls")]
        if odd or record.get("tools") or paths(record, "video"):
            what = "clips" if paths(record, "video") else "tools"
            raise UserError(f"the record has {what}, and a server is asked texts and pictures alone", where=self.name,
                            hint="leave such records out")  # fmt: skip
        files = (located(self.images, name, allow_outside=self.allow_outside) for name in paths(record, "image"))
        pictures = iter([_url(file) for file in files])
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


def _url(file: MediaFile) -> str:
    kind = mime_type(file)
    with open_media(file, "image") as data:
        return f"data:{kind};base64,{base64.b64encode(data.read()).decode()}"
