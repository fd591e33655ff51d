"""A target's folder as vLLM reads it: of a target that was trained here, or of one with a fine-tuned MTP head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from ...core.errors import UserError
from ...core.files import check_new, new_folder, read_json, write_whole
from ...core.json_types import JsonObject
from ...core.pretrained import INDEX, RESTORE, Checkpoint, opened
from ...core.results import SUMS, check_sums, check_written
from ..drafters.manifest import MANIFEST
from ..drafters.mtp import PREFIX
from ..folders import CONFIG, find_folder, read_values
from ..hub import read_config
from ..stored import named_dtype
from ..targets.family import tower_type
from ..targets.load import load_lvlm
from ..targets.table import family_of
from .lvlm import language_model_alone
from .source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What a served model's folder holds beside its weights.
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
_OF_TEXT = ("generation_config.json", *TOKENIZER, MANIFEST)
_BESIDE = (
    "config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", *_OF_TEXT,
)  # fmt: skip
# transformers 5.23 leaves out a name of CLIP's and SigLIP's tower, and vLLM knows the tower by it.
_TOWER, _NAMED = "vision_tower.", "vision_tower.vision_model."


def export_target(source: Path, destination: Path) -> str:
    """Write the target of a run, whole or not at all: its weights under the names that vLLM reads, and of one whose
    tower no engine has, its language model. Returns what was written, in words. Raises `UserError`: the folder has no
    weights of a target, or is not as its stage wrote it.
    """
    check_new(destination)
    check_sums(source)
    check_written(source)
    files = Checkpoint(source).weights()
    if not files or not (source / "config.json").is_file():
        raise UserError(
            "no weights of a target", where=str(source), hint="give the folder of the stage that trained it"
        )
    config = read_config(str(source), key="target")
    renamed = _served if family_of(config).shares_pictures else str
    with new_folder(destination) as aside:
        if unserved_tower(config):
            model = load_lvlm(source, revision=None, key="target", dtype="auto", whole=True)
            language_model_alone(model).to(model.dtype).save_pretrained(aside)  # type: ignore[arg-type]
            for file in filter(Path.is_file, (source / name for name in _OF_TEXT)):
                shutil.copy2(file, aside)
            return "the target's language model alone, which sees no picture"
        for name in _BESIDE:
            if (source / name).is_file():
                shutil.copy2(source / name, aside / name)
        for file in files:
            with opened(file) as stored:
                state = {renamed(key): stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
            save_file(state, aside / file.name, {"format": "pt"})
        if (source / INDEX).is_file():
            index = read_json(source / INDEX, JsonObject, hint=RESTORE)
            index["weight_map"] = {renamed(key): file for key, file in index["weight_map"].items()}
            (aside / INDEX).write_text(json.dumps(index, indent=1))
    return "the target"


def unserved_tower(config: PreTrainedConfig) -> str | None:
    """model_type of a tower of our own, so that no engine has a class of it; None: engines have it."""
    from ..lite0 import LITE0  # which loads transformers

    return LITE0 if tower_type(config) == LITE0 else None


def vllm_reads(source: Path) -> bool:
    """Whether vLLM reads the weights of this folder as they are."""
    if not family_of(read_config(str(source), key="target")).shares_pictures:
        return True
    for file in source.glob("*.safetensors"):
        with opened(file) as stored:
            if any(_served(key) != key for key in stored.keys()):  # noqa: SIM118
                return False
    return True


def _served(name: str) -> str:
    """The name of a tensor as vLLM reads it."""
    prefix, sign, rest = name.rpartition(_TOWER)
    if not sign or prefix not in ("", "model.") or rest.startswith("vision_model."):
        return name
    return f"{prefix}{_NAMED}{rest}"


# transformers takes model.safetensors before an index: what was one file gets another name.
_ALONE, _HEAD = "model-target.safetensors", "model-mtp.safetensors"


def with_mtp_head(source: Source, destination: Path) -> None:
    """Write the target's folder with this head, in the target's dtype, in place of the one that it shipped, if it did.
    `destination`: exists, and is empty. Raises `UserError`: the target's weights are no safetensors.
    """
    state = {PREFIX + name: value for name, value in source.head.state_dict().items()}
    target = find_folder(source.target.place, source.target.revision, files=["*"])
    files, values = Checkpoint(target).weights(), read_values(target)
    if not files:
        raise UserError(
            "no safetensors of the target, which the head would be put beside", where=str(target),
            hint="pickles of targets are not read; convert them",
        )  # fmt: skip
    dtype = getattr(torch, named_dtype(values) or "", None)
    # Weights are written below, and checksums of other files would not hold.
    shutil.copytree(
        target, destination, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", INDEX, SUMS)
    )
    index = dict.fromkeys(state, _HEAD)
    for path in files:
        name = path.name if len(files) > 1 else _ALONE
        with opened(path) as stored:
            names = list(stored.keys())
            others = [one for one in names if not one.startswith(PREFIX)]
            if len(others) == len(names):
                shutil.copy2(path, destination / name)
            elif others:
                save_file({one: stored.get_tensor(one) for one in others}, destination / name, {"format": "pt"})
        index |= dict.fromkeys(others, name)
    head = {name: value.to(dtype or value.dtype).contiguous() for name, value in state.items()}
    save_file(head, destination / _HEAD, {"format": "pt"})
    size = sum(path.stat().st_size for path in destination.glob("*.safetensors"))
    about = {"metadata": {"total_size": size}, "weight_map": index}
    write_whole(destination / INDEX, json.dumps(about, indent=1).encode())
    values.get("text_config", values)["mtp_num_hidden_layers"] = 1
    write_whole(destination / CONFIG, json.dumps(values, indent=1).encode())
