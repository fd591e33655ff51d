"""A fine-tuned MTP head back in its target's folder, where transformers and vLLM look for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...core.errors import UserError
from ...core.files import write_whole
from ...core.pretrained import INDEX, reading_safetensors
from ...core.results import SUMS
from ..drafters.mtp import PREFIX
from ..folders import CONFIG, find_folder, read_values
from ..stored import named_dtype, weight_files
from .source import Source

# transformers takes model.safetensors before an index: what was one file gets another name.
_ALONE, _HEAD = "model-target.safetensors", "model-mtp.safetensors"


def from_ours(source: Source, place: str, revision: str | None, destination: Path) -> None:
    """Write the target's folder with this head in place of the one that it shipped, if it did.

    Args:
        source: the head, which is stored in the target's dtype.
        place: Hub id or directory of the target.
        destination: exists, and is empty.

    Raises:
        UserError: the target's weights are no safetensors.
    """
    state = {PREFIX + name: value for name, value in source.head.state_dict().items()}
    target = find_folder(place, revision, files=["*"])
    files, values = weight_files(target), read_values(target)
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
        with reading_safetensors(path), safe_open(path, "pt") as stored:
            names = list(stored.keys())
            kept = [one for one in names if not one.startswith(PREFIX)]
            if len(kept) == len(names):
                shutil.copy2(path, destination / name)
            elif kept:
                save_file({one: stored.get_tensor(one) for one in kept}, destination / name, {"format": "pt"})
        index |= dict.fromkeys(kept, name)
    head = {name: value.to(dtype or value.dtype).contiguous() for name, value in state.items()}
    save_file(head, destination / _HEAD, {"format": "pt"})
    size = sum(path.stat().st_size for path in destination.glob("*.safetensors"))
    about = {"metadata": {"total_size": size}, "weight_map": index}
    write_whole(destination / INDEX, json.dumps(about, indent=1).encode())
    values.get("text_config", values)["mtp_num_hidden_layers"] = 1
    write_whole(destination / CONFIG, json.dumps(values, indent=1).encode())
