"""Pictures of a log, copied beside the records: from `data:` URLs and local files. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from pathlib import Path
from urllib.parse import unquote, urlparse

from PIL import Image

PICTURES = "pictures"
MOST_BYTES = 64 * 2**20  # of a picture


class Unusable(Exception):
    """Why a part of a log cannot become a record, and what to do about it.

    Args:
        cure: empty: fix the line.
    """

    def __init__(self, problem: str, cure: str = ""):
        super().__init__(problem)
        self.cure = cure


class LoggedPictures:
    """Copies pictures to a folder under the hash of their bytes: one that comes often is kept once.

    Args:
        root: local pictures must lie in it: who wrote a log could otherwise have any file of this machine copied.
    """

    def __init__(self, folder: Path, root: Path):
        self._folder, self._root = folder, root
        self.count = 0

    def keep(self, url: object) -> str:
        """The picture's name below the folder of the records. Raises `Unusable`."""
        if not isinstance(url, str) or not url:
            raise Unusable("a picture without an address")
        data = _inline(url) if url.startswith("data:") else self._local(url)
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

    def _local(self, url: str) -> bytes:
        try:
            return self._read(url)
        except (OSError, ValueError):  # too long, a zero byte, half a character, brackets of no address, no rights
            raise Unusable("a picture's address that no file can have", f"{url[:80]!r}: mend or remove it") from None

    def _read(self, url: str) -> bytes:
        parsed = urlparse(url)
        if parsed.scheme in ("http", "https"):
            raise Unusable("a picture on the network, and nothing is fetched",
                            "download it, and write its path (or a data: URL) into the log")  # fmt: skip
        if parsed.scheme not in ("", "file"):
            raise Unusable(f"a picture's address of scheme {parsed.scheme}", "data: URLs and local files are read")
        path = (self._root / (unquote(parsed.path) if parsed.scheme else url)).resolve()
        if not path.is_relative_to(self._root):
            raise Unusable(
                "a picture outside the folder of pictures",
                f"{url}: name a folder that holds it: --images (it is {self._root} now)",
            )
        if not path.is_file():
            raise Unusable("a picture that is not there", f"{url}: paths start at --images, {self._root}")
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
