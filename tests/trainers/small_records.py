"""Records as LLaVA's JSON has them, written by hand, and what a run lists of those that it leaves out."""

import json
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


def peak(work) -> int:
    """Most bytes that were held at once, above those at the beginning."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
