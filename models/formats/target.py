"""A target that was trained here, as vLLM reads it: the other half of a served pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from ...core.errors import UserError
from ...core.files import check_new, new_folder, read_json
from ...core.json_types import JsonObject
from ...core.pretrained import INDEX, RESTORE, reading_safetensors
from ...core.results import check_sums, check_written
from ..drafters.manifest import MANIFEST
from ..hub import read_config
from ..targets.table import family_of

# What a served model's folder holds beside its weights.
_BESIDE = (
    "config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json", "chat_template.jinja",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "video_preprocessor_config.json", MANIFEST,
)  # fmt: skip
# transformers 5.23 leaves out a name of CLIP's and SigLIP's tower, and vLLM knows the tower by it.
_TOWER, _NAMED = "vision_tower.", "vision_tower.vision_model."


def export_target(source: Path, destination: Path) -> None:
    """Write the target of a run, whole or not at all: its weights under the names that vLLM reads.

    Raises:
        UserError: the folder has no weights of a target, or is not as its stage wrote it.
    """
    check_new(destination)
    check_sums(source)
    check_written(source)
    files = sorted(source.glob("*.safetensors"))
    if not files or not (source / "config.json").is_file():
        raise UserError(
            "no weights of a target", where=str(source), hint="give the folder of the stage that trained it"
        )
    renames = family_of(read_config(str(source), key="target")).shares_pictures
    with new_folder(destination) as aside:
        for name in _BESIDE:
            if (source / name).is_file():
                shutil.copy2(source / name, aside / name)
        for file in files:
            with reading_safetensors(file), safe_open(file, "pt") as stored:
                state = {_served(key) if renames else key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
            save_file(state, aside / file.name, {"format": "pt"})
        if (source / INDEX).is_file():
            index = read_json(source / INDEX, JsonObject, hint=RESTORE)
            if renames:
                index["weight_map"] = {_served(key): file for key, file in index["weight_map"].items()}
            (aside / INDEX).write_text(json.dumps(index, indent=1))


def vllm_reads(source: Path) -> bool:
    """Whether vLLM reads the weights of this folder as they are."""
    if not family_of(read_config(str(source), key="target")).shares_pictures:
        return True
    for file in source.glob("*.safetensors"):
        with reading_safetensors(file), safe_open(file, "pt") as stored:
            if any(_served(key) != key for key in stored.keys()):  # noqa: SIM118
                return False
    return True


def _served(name: str) -> str:
    """The name of a tensor as vLLM reads it."""
    prefix, sign, rest = name.rpartition(_TOWER)
    if not sign or prefix not in ("", "model.") or rest.startswith("vision_model."):
        return name
    return f"{prefix}{_NAMED}{rest}"
