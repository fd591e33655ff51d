"""Records as LLaVA's JSON has them, written by hand, and what a run lists of those that it leaves out."""

import io
import json
import tarfile
import tracemalloc
from itertools import cycle
from pathlib import Path


def talk(*texts: str) -> list[dict[str, str]]:
    """Turns of a conversation: a question, its answer, and so on in turn."""
    return [{"from": role, "value": text} for role, text in zip(cycle(("human", "gpt")), texts, strict=False)]


def record(number: int, **changes) -> dict:
    """One with a picture, which asks for its number."""
    conversation = talk("<image>\nWhich picture?", f"It is picture {number}.")
    return {"id": f"r{number}", "image": f"images/{number}.png", "conversations": conversation} | changes


def log(folder: Path) -> list[dict]:
    """What `folder`'s run has listed as left out."""
    path = folder / "run" / "skipped.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def flip(path: Path, place: int | None = None) -> None:
    """One bit of a file turned over, in its middle where no place is named."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def tar_of(*members: tuple[str, bytes] | tarfile.TarInfo, form: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of these names and contents (a name that ends with a slash is a folder's), or of headers alone."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=form) as file:
        for member in members:
            info, content = (member, b"") if isinstance(member, tarfile.TarInfo) else named(*member)
            file.addfile(info, io.BytesIO(content))
    return data.getvalue()


def named(name: str, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
    return info, content


def write_tar(path: Path, members: list[tuple[str, bytes] | tarfile.TarInfo], form: int = tarfile.GNU_FORMAT) -> Path:
    """The same as a file."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(tar_of(*members, form=form))
    return path


def peak(work) -> int:
    """Most bytes that were held at once, above those at the beginning."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
