"""Mixtures that ship with the project: recipes name them as `data/NAME.yaml`, and the package has them.

A file of the user's at that path wins. Otherwise the package's is read as if it lay there, so that its relative paths
start at `data/` of the folder where the run starts. Its header has the commands that fetch the data.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ...core.files import read_yaml
from ...core.json_types import JsonObject

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
    own = FOLDER / path.name
    return own if path.parent == PLACE and own.is_file() and not path.exists() else None


def identity(path: Path) -> str:
    """Hash of what a shipped mixture says: its comments may change from version to version."""
    tree = read_yaml(path, JsonObject, hint="install draftsmith again")
    return hashlib.sha256(json.dumps([path.name, tree]).encode()).hexdigest()


def fetch_commands(path: Path) -> list[str]:
    """The commands of a shipped mixture's header that fetch its data."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix(_COMMAND) for line in lines if line.startswith(_COMMAND)]
