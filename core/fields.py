"""Types of settings that sections of several folders share: seeds, places of files, names that become files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field


def shorthand(kind: type, spelled_out: Callable[[Any], object]) -> BeforeValidator:
    """Return a validator of a setting that may be written shorter: `spelled_out` says what a value of type `kind`
    stands for. Other values are left to the setting's own type.
    """
    return BeforeValidator(lambda value: spelled_out(value) if isinstance(value, kind) else value)


# What Python's, NumPy's and torch's generators all take.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
# Above it scores are as good as even.
Temperature = Annotated[float, Field(ge=0, le=100)]
# Of a distribution: how many of the likeliest tokens are kept (0: all), and how much of the mass.
TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
TopP = Annotated[float, Field(gt=0, le=1)]
MOST_ANSWER = 2**20  # tokens of an answer; its cache is allocated before the first of them
# Of a tree: its nodes are rows of one pass of the target, and its mask has the square of their number.
MOST_NODES, MOST_LEVELS = 4096, 256
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes of a file's name and of a path, on Linux


def _place(text: str) -> str:
    """Raises `ValueError` for what no file system takes as a path."""
    path = text.encode()
    if not text.strip() or "\0" in text:
        raise ValueError("is empty or holds a null, and names a place")
    if len(path) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in path.split(b"/")):
        raise ValueError(f"is longer than a path can be ({len(path):,} bytes)")
    return text


# A file, a folder, or a name of the Hub.
Place = Annotated[str, AfterValidator(_place)]
# A commit, tag or branch of the Hub; git takes no others.
Revision = Annotated[str, Field(pattern=r"^[\w+-]+([./][\w+-]+)*$", max_length=255)]
# In which type weights are held; auto: see `models/stored.py`.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# How transformers' models attend; auto: as transformers chooses. Flash kernels and flex attention take no mask of their
# own, and a tree's nodes would attend to each other; sdpa runs torch's flash kernel wherever a pass needs no mask.
AttentionName = Literal["auto", "eager", "sdpa"]
# accelerate's ways to spread a model, or one device.
DeviceMap = Annotated[str, Field(pattern=r"^(auto|balanced|balanced_low_0|sequential|cpu|[a-z]{3,4}(:\d+)?)$")]


def _sentence(text: str) -> str:
    """Raises `ValueError` for what would break the one line that it is printed in."""
    if not text.strip() or not text.isprintable() or len(text) > 100:
        raise ValueError("is not one line of printable text, of at most 100 characters")
    return text


# What something is for, in one short line for people.
Sentence = Annotated[str, AfterValidator(_sentence)]


# Keys of a section that say where weights lie, and change no result.
PLACES = ("device_map", "offload", "tensor_parallel_size")


def file_name(text: str) -> str:
    """`text`, a name that a file or folder gets. Raises `ValueError` where it would leave its folder or hide there."""
    if not re.fullmatch(r"(?![.\s])[^/\\\x00-\x1f\x7f]+(?<!\s)", text) or len(text.encode()) > 100:
        raise ValueError(
            "a name that files get has 1 to 100 bytes, no / or \\, no dot at its beginning and no blank at its ends"
        )
    return text


# A stage, a split, a method, ...: files and folders are called by it.
FileName = Annotated[str, AfterValidator(file_name)]
