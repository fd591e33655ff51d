"""Bad records and pictures: fields of the wrong kind, broken JSON, pictures that are none, huge or of odd modes."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attempts.attempt import Attempt
from attempts.recipes import judge, spoil_text
from attempts.reference import Reference
from PIL import Image

_READERS = ("target", "answers", "states")  # stages that read records
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1e400, "", "x", "<image>", "<image>" * 20, "<video>", "a\ud800b", "\x00", "x" * 5000, [], [None],
    [[]], {}, {"from": "human"}, "../../etc/passwd", "/etc/passwd", 10**400,
)  # fmt: skip


def records(attempt: Attempt) -> str:
    """A file of conversations in which one to three things are wrong."""
    reference, dice = attempt.reference("lvlm"), attempt.dice
    world = reference.folder / "world" / "world"
    rows = json.loads((world / "train.json").read_text())
    for _ in range(dice.randint(1, 3)):
        spoil_record(dice, rows)
    lines = dice.random() < 0.5
    text = "\n".join(json.dumps(row) for row in rows) + "\n" if lines else json.dumps(rows)
    data = spoil_text(dice, text.encode()) if dice.random() < 0.25 else text.encode()
    path = attempt.folder / ("data.jsonl" if lines else "data.json")
    path.write_bytes(data)
    return _read(attempt, reference, path, world, names="" if path.stat().st_size == 0 else path.name)


def _read(attempt: Attempt, reference: Reference, path: Path, images: Path, *, names: str) -> str:
    stage = attempt.dice.choice(_READERS)
    finished = reference.stages[: reference.stages.index(stage)]
    reference.copy(attempt.output, finished)
    on_error = attempt.dice.choice(("strict", "skip"))
    section = {"path": str(path), "images": str(images), "aspect": "square", "max_length": 192, "on_error": on_error}
    setting = f"stages.{stage}.data={json.dumps(section | {'from': None})}"
    arguments = attempt.arguments(reference, [stage], setting)
    return f"{judge(attempt, reference, arguments, finished, refused=False, names=names)} ({on_error})"


def spoil_record(dice: random.Random, rows: list[Any]) -> None:
    """Puts an odd value in the place of a record, of one of its fields, or of a field of a turn; or drops a field."""
    number = dice.randrange(len(rows))
    row = rows[number]
    if not isinstance(row, dict) or not row or dice.random() < 0.15:
        rows[number] = dice.choice(_VALUES)
        return
    field = dice.choice(sorted(row))
    turns = row[field]
    if isinstance(turns, list) and turns and isinstance(turns[-1], dict) and turns[-1] and dice.random() < 0.7:
        turn = dice.choice([turn for turn in turns if isinstance(turn, dict) and turn] or [{"x": 1}])
        turn[dice.choice(sorted(turn))] = dice.choice(_VALUES)
    elif dice.random() < 0.25:
        del row[field]
    else:
        row[field] = dice.choice(_VALUES)


def pictures(attempt: Attempt) -> str:
    """Pictures of conversations or captions, some of which are broken, huge, of odd modes, or no files at all."""
    if attempt.dice.random() < 0.5:
        return _captioned(attempt)
    reference = attempt.reference("lvlm")
    world = attempt.folder / "data"
    shutil.copytree(reference.folder / "world" / "world", world)
    files = sorted(path for path in (world / "images" / "train").iterdir())
    for path in attempt.dice.sample(files, attempt.dice.randint(1, 3)):
        attempt.tell(f"picture {path.name}: {spoil_picture(attempt.dice, path)}")
    return _read(attempt, reference, world / "train.json", world, names="train.json")


def _captioned(attempt: Attempt) -> str:
    reference, dice = attempt.reference("visual"), attempt.dice
    folder = attempt.folder / "data"
    folder.mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"number {number}")
    for path in dice.sample(sorted(folder.glob("*.png")), dice.randint(1, 3)):
        attempt.tell(f"picture {path.name}: {spoil_picture(dice, path)}")
    if dice.random() < 0.3:
        (folder / "3.txt").write_bytes(dice.choice((b"", b"\xff\xfe", b"x" * 2_000_000)))
    stage, on_error = dice.choice(("pictures", "codes")), dice.choice(("strict", "skip"))
    finished = reference.stages[: reference.stages.index(stage)]
    reference.copy(attempt.output, finished)
    source = json.dumps({"kind": "folder", "folder": str(folder)})
    arguments = attempt.arguments(
        reference, [stage], f"stages.{stage}.source={source}", f"stages.{stage}.from=null",
        f"stages.{stage}.on_error={on_error}",
    )  # fmt: skip
    return f"{judge(attempt, reference, arguments, finished, refused=False)} ({on_error})"


def spoil_picture(dice: random.Random, path: Path) -> str:
    """Puts something else in a picture's place; returns what."""
    name = dice.choice(sorted(_PICTURES))
    data = path.read_bytes()
    path.unlink()
    _PICTURES[name](dice, path, data)
    return name


def _saved(image: Image.Image, form: str, **settings: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, form, **settings)
    return held.getvalue()


def _bytes(make: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, Path, bytes], None]:
    def write(dice: random.Random, path: Path, data: bytes) -> None:
        path.write_bytes(make(dice, data))

    return write


def _png(width: int, height: int, *, depth: int = 8, kind: int = 2) -> bytes:
    """A PNG's header without the pixels that it promises."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


_EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
_PICTURES: dict[str, Callable[[random.Random, Path, bytes], None]] = {
    "empty": _bytes(lambda dice, data: b""),
    "noise": _bytes(lambda dice, data: dice.randbytes(300)),
    "cut": _bytes(lambda dice, data: data[: dice.randrange(len(data))]),
    "flipped": _bytes(lambda dice, data: _flipped(dice, data)),
    "16-bit grey": _bytes(lambda dice, data: _saved(Image.fromarray(np.full((20, 20), 40_000, np.uint16)), "PNG")),
    "float TIFF": _bytes(lambda dice, data: _saved(Image.new("F", (20, 20), 0.5), "TIFF")),
    "palette": _bytes(lambda dice, data: _saved(Image.new("P", (20, 20)), "PNG", transparency=0)),
    "CMYK": _bytes(lambda dice, data: _saved(Image.new("CMYK", (20, 20)), "JPEG")),
    "one pixel": _bytes(lambda dice, data: _saved(Image.new("RGB", (1, 1)), "PNG")),
    "thin": _bytes(lambda dice, data: _saved(Image.new("L", (6000, 1)), "PNG")),
    "long": _bytes(lambda dice, data: _saved(Image.new("L", (60_000, 200)), "JPEG")),
    "bomb": _bytes(lambda dice, data: _png(2**31 - 1, 2**31 - 1)),
    "large": _bytes(lambda dice, data: _png(30_000, 30_000)),
    "no pixels": _bytes(lambda dice, data: _png(0, 5)),
    "EPS": _bytes(lambda dice, data: _EPS),
    "GIF": _bytes(lambda dice, data: _saved(Image.new("P", (20, 20)), "GIF")),
    "missing": lambda dice, path, data: None,
    "folder": lambda dice, path, data: path.mkdir(),
    "pipe": lambda dice, path, data: os.mkfifo(path),
    "link outside": lambda dice, path, data: path.symlink_to("/etc/hostname"),
    "link to itself": lambda dice, path, data: path.symlink_to(path),
    "zeros without end": lambda dice, path, data: path.symlink_to("/dev/zero"),
}


def _flipped(dice: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)
