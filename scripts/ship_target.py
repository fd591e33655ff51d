#!/usr/bin/env python
"""Makes the weights that come with the package from a run that trained them: float16, with hash, seed and commit.

    draftsmith demo lvlm-from-nothing "stages=[world,seeing,target]" output=RUN
    scripts/ship_target.py RUN/target models/weights/shapes-llava

Recipes name the folder as `shipped:shapes-llava`. made.json beside the weights says which run they are of.
"""

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from draftsmith.core.errors import UserError
from draftsmith.core.files import read_json, read_yaml
from draftsmith.core.pretrained import read_safetensors
from safetensors.torch import save_file

WEIGHTS, MADE = "model.safetensors", "made.json"
COPIED = ("generation_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
_HINT = "give the folder of a finished `train` stage of a target"


def ship(stage: Path, folder: Path) -> dict[str, Any]:
    """Write the folder. Returns what made.json says.

    Raises:
        UserError: the stage's folder is not complete, or the run's code was not that of a commit.
    """
    run = read_yaml(stage.parent / "run.yaml", dict[str, Any], hint=_HINT)
    manifest = read_json(stage / "draftsmith.json", dict[str, Any], hint=_HINT)
    if run["git"]["commit"] is None or run["git"]["changed_files"]:
        raise UserError(
            "its code is not that of a commit", where=str(stage.parent), hint="run it in a clone without changes"
        )
    config = read_json(stage / "config.json", dict[str, Any], hint=_HINT)
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float16"
    tensors = {name: tensor.to(torch.float16) for name, tensor in read_safetensors(stage / WEIGHTS).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    for name in COPIED:
        shutil.copyfile(stage / name, folder / name)
    made = {
        "sha256": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
        "tokenizer_hash": manifest["tokenizer_hash"],
        "recipe": f"demo/{Path(run['recipe']).stem}", "stage": stage.name, "seed": manifest["training"]["seed"],
        "steps": manifest["training"]["steps"], "commit": run["git"]["commit"], "packages": manifest["tested_with"],
    }  # fmt: skip
    (folder / MADE).write_text(json.dumps(made, indent=1) + "\n")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", type=Path, help="folder of the stage that trained the target: RUN/target")
    parser.add_argument("folder", type=Path, help="where the weights go: models/weights/NAME")
    options = parser.parse_args()
    try:
        made = ship(options.stage, options.folder)
    except UserError as error:
        sys.exit(f"error: {error}")
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    print(f"{options.folder}: {size:,} bytes; weights sha256 {made['sha256']}")


if __name__ == "__main__":
    main()
