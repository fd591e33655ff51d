#!/usr/bin/env python
"""Makes the weights that come with the package from a run that trained them: 16 bits, with hash, seed and commit.

    draftsmith demo lvlm-from-nothing "stages=[world,seeing,target]" output=RUN
    scripts/ship_target.py RUN/target models/weights/shapes-llava
    scripts/ship_target.py RUN/learn models/weights/emoji-vlm --halves weights/smollm2 weights/lite0
    scripts/ship_target.py RUN/vq models/weights/drawings-vq

Recipes name the first folder as `shipped:shapes-llava`. Of a target of pretrained halves what was trained is written,
which `draftsmith fetch emoji-vlm` puts on the halves. made.json beside the weights says which run they are of.
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
from draftsmith.models.folders import ADAPTERS, CONFIG, State, joined_halves
from draftsmith.models.hub import PINNED
from draftsmith.recipes.config.files import recipe_names
from safetensors.torch import save_file

WEIGHTS, MADE = "model.safetensors", "made.json"
COPIED = ("generation_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
RANK = 12  # of what is written of two merged adapters of rank 8, one after the other: all three parts have 12 MB
_HINT = "give the folder of a finished `train` stage of a target"


def trained(state: State, halves: State) -> State:
    """What a training changed, as `with_adapters` reads it: of a linear layer the nearest product of rank `RANK`."""
    result = {}
    for name, tensor in state.items():
        start = halves.get(name)
        if start is not None and tensor.ndim and len(start) < len(tensor):
            result[f"{name}.rows"], tensor = tensor[len(start) :], tensor[: len(start)]
        if start is None or (tensor.ndim < 2 and not torch.equal(tensor, start)):
            result[name] = tensor
        elif not torch.equal(tensor, start):
            up, sizes, down = torch.linalg.svd(tensor.float() - start.float(), full_matrices=False)
            root = sizes[:RANK].sqrt()
            result[f"{name}.up"], result[f"{name}.down"] = (up[:, :RANK] * root).half(), (root * down[:RANK].T).T.half()
    return {name: tensor.contiguous() for name, tensor in result.items()}


def ship(stage: Path, folder: Path, halves: tuple[Path, Path] | None = None) -> dict[str, Any]:
    """Write the folder. Returns what made.json says. `halves`: language model and tower that training began with.

    Raises:
        UserError: the stage's folder is not complete, or the run's code was not that of a commit.
    """
    run = read_yaml(stage.parent / "run.yaml", dict[str, Any], hint=_HINT)
    about = stage / "draftsmith.json"  # a generator has none, nor words
    manifest = read_json(about, dict[str, Any], hint=_HINT) if about.is_file() else {}
    begun = read_json(stage / "fingerprint.json", dict[str, Any], hint=_HINT)["settings"]
    if run["git"]["commit"] is None or run["git"]["changed_files"]:
        raise UserError(
            "its code is not that of a commit", where=str(stage.parent), hint="run it in a clone without changes"
        )
    config, state = read_json(stage / CONFIG, dict[str, Any], hint=_HINT), read_safetensors(stage / WEIGHTS)
    folder.mkdir(parents=True, exist_ok=True)
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part.pop("_name_or_path", None)  # where the halves lay
        part |= {"dtype": "float16"} if halves is None and "dtype" in part else {}
    copied = [name for name in COPIED if (stage / name).is_file()]
    if halves is None:
        weights, written = folder / WEIGHTS, folder / CONFIG
        tensors = {name: tensor.to(torch.float16) for name, tensor in state.items()}
    else:
        # The tokenizer is the language model's; the config is read where nothing was fetched, by a dry run.
        weights, written, copied[2:] = folder / ADAPTERS, PINNED / f"{folder.name}.json", ["chat_template.jinja"]
        tensors = trained(state, joined_halves(*halves))
    save_file(tensors, weights, metadata={"format": "pt"})
    written.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    for name in copied:
        shutil.copyfile(stage / name, folder / name)
    [recipe] = [name for name in recipe_names() if Path(name).name == Path(run["recipe"]).stem]
    made = {
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(), "tokenizer_hash": manifest.get("tokenizer_hash"),
        "recipe": recipe, "stage": stage.name, "seed": begun["seed"], "steps": begun["stages"][stage.name]["steps"],
        "commit": run["git"]["commit"], "packages": manifest.get("tested_with") or run["packages"],
    }  # fmt: skip
    (folder / MADE).write_text(json.dumps(made, indent=1) + "\n")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", type=Path, help="folder of the stage that trained the target: RUN/target")
    parser.add_argument("folder", type=Path, help="where the weights go: models/weights/NAME")
    parser.add_argument("--halves", type=Path, nargs=2, help="language model and tower that training began with")
    options = parser.parse_args()
    try:
        made = ship(options.stage, options.folder, options.halves)
    except UserError as error:
        sys.exit(f"error: {error}")
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    print(f"{options.folder}: {size:,} bytes; weights sha256 {made['sha256']}")


if __name__ == "__main__":
    main()
