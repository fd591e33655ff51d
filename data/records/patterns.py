"""Names of files in recipes: braces ({a,b}.json) and glob patterns (part-*.json).

Mixtures that ship with the project are named as `data/NAME.yaml`. A file of the user's at that path wins. Otherwise the
package's is read as if it lay there, so that its relative paths start at `data/` of the folder where the run starts.
Its header has the commands that fetch the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from glob import glob, has_magic
from pathlib import Path

from braceexpand import braceexpand

from ...core.errors import NotFound, UserError
from ...core.files import read_yaml
from ...core.json_types import JsonObject

MOST_NAMES = 200_000  # the largest published sets have 140,000 shards
_GROUP, _NUMBER = re.compile(r"\{([^{}]*)\}"), re.compile("\0(\\d+)\0")
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")


def braces(name: str, *, key: str | None = None, where: str | None = None) -> list[Path]:
    """A name as it is where such a file exists, else with its braces expanded and its glob patterns matched, sorted. A
    pattern that matches nothing stands for itself: `matched` tells of it.
    """
    if Path(name).exists():
        return [Path(name)]
    try:
        if (count := _count(name)) > MOST_NAMES:
            raise ValueError(f"they are {count:,} names, and at most {MOST_NAMES:,} are read")
        names = list(braceexpand(name)) if "{" in name else [name]
    except ValueError as error:
        raise UserError(f"braces that do not expand: {name!r} ({error})", key=key, where=where,
                        hint="write them as {a,b}.json") from error  # fmt: skip
    return [Path(match) for one in names for match in (sorted(glob(one)) if is_pattern(one) else []) or [one]]


def _count(name: str) -> int:
    """How many names the braces give, without making them. Inner groups first, each then stands as its number."""
    groups = [1]
    while (group := _GROUP.search(name)) is not None:
        if (ends := _RANGE.fullmatch(group[1])) is not None:
            first, last = (int(end) if end.lstrip("-").isdigit() else ord(end) for end in ends.group(1, 2))
            count = abs(last - first) // max(1, abs(int(ends[3] or 1))) + 1
        else:
            parts = group[1].split(",")
            count = sum(math.prod(groups[int(number)] for number in _NUMBER.findall(part)) for part in parts)
        groups.append(count)
        name = f"{name[: group.start()]}\0{len(groups) - 1}\0{name[group.end() :]}"
    return math.prod(groups[int(number)] for number in _NUMBER.findall(name))


def is_pattern(name: str) -> bool:
    return has_magic(name) and not Path(name).exists()


def matched(name: str, key: str) -> str:
    """`name`, a file or a pattern. Raises `UserError` with pattern and folder where it is one that matches nothing."""
    if is_pattern(name) and not glob(name):
        folder = Path(name).parent
        missing = "" if folder.is_dir() or has_magic(str(folder)) else ", which is no folder"
        raise NotFound(f"no file matches the pattern {Path(name).name!r} in {folder}{missing}", key=key,
                        hint="correct the pattern or the folder")  # fmt: skip
    return name


FOLDER = Path(__file__).parents[1] / "mixtures"
PLACE = Path("data")
# Files of the Hub, by the place at which recipes name them -> the commands that fetch them. Pictures of LLaVA-Instruct
# (coco, gqa, ocr_vqa, textvqa, vg) are their own publishers': LLaVA's README says where.
PUBLISHED = {
    "data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json": (
        "hf download liuhaotian/LLaVA-Pretrain blip_laion_cc_sbu_558k.json images.zip --repo-type dataset --local-dir "
        "data/LLaVA-Pretrain",
        "unzip -q data/LLaVA-Pretrain/images.zip -d data/LLaVA-Pretrain/images",
    ),
    "data/llava_v1_5_mix665k.json": (
        "hf download liuhaotian/LLaVA-Instruct-150K llava_v1_5_mix665k.json --repo-type dataset --local-dir data",
    ),
}
_COMMAND = "#   "  # how a line of the header begins that is a command


def shipped(path: Path) -> Path | None:
    """The package's file for `data/NAME.yaml`; None for other names, and where a file of the user's lies there."""
    candidate = FOLDER / path.name
    return candidate if path.parent == PLACE and candidate.is_file() and not path.exists() else None


def identity(path: Path) -> str:
    """Hash of what a shipped mixture says: its comments may change from version to version."""
    tree = read_yaml(path, JsonObject, hint="install draftsmith again")
    return hashlib.sha256(json.dumps([path.name, tree]).encode()).hexdigest()


def fetch_commands(path: Path) -> list[str]:
    """The commands of a shipped mixture's header that fetch its data."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(_COMMAND) for line in lines if line.startswith(_COMMAND)]
