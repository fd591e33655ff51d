"""A model's directory, or one on the Hub: `config.json` beside `model.safetensors`.

Written whole or not at all; names and shapes are checked before any weight is read. Recipes name the trained weights
that come with the package as `shipped:NAME`; models/weights/README.md says how each was made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, PlainSerializer
from safetensors.torch import save_file
from torch import Tensor

from ..core.errors import Refused, UserError, first_line
from ..core.fields import Place
from ..core.files import read_json, write_whole
from ..core.finite import check_weights
from ..core.json_types import JsonMapping, JsonObject
from ..core.pretrained import CPU, check_config, opened, read_safetensors
from ..core.results import SUMS, check_sums

CONFIG, WEIGHTS, ADAPTERS = "config.json", "model.safetensors", "adapters.safetensors"
State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def write_folder(folder: Path, values: JsonMapping, state: Mapping[str, Tensor]) -> None:
    """Both files, each whole or not at all; the weights first, so that a config never stands without them."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{WEIGHTS}.partial"
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, aside, {"format": "pt"})
    os.replace(aside, folder / WEIGHTS)
    write_whole(folder / CONFIG, json.dumps(values, indent=1).encode())


def joined_halves(language_model: Path, tower: Path) -> State:
    """The weights of a LLaVA's halves in bfloat16, as they are trained; statistics of norms stay."""
    halves = (("language_model.", language_model), ("vision_tower.", tower))
    whole = {f"{prefix}{name}": t for prefix, half in halves for name, t in read_safetensors(half / WEIGHTS).items()}
    stays = ("running_mean", "running_var", "num_batches_tracked")
    return {name: tensor if name.endswith(stays) else tensor.bfloat16() for name, tensor in whole.items()}


def with_adapters(state: State, adapters: State) -> State:
    """The weights of halves with what was trained of them: `NAME.up` [O,R] times `NAME.down` [R,I] is added to NAME,
    `NAME.rows` stand below its rows, others take their places. Rounded once, so that every machine has the same bits.
    """
    state = dict(state)
    for name, tensor in adapters.items():
        base, _, kind = name.rpartition(".")
        if kind == "up":
            product = tensor.double() @ adapters[f"{base}.down"].double()
            state[base] = (state[base].double() + product).to(state[base].dtype)
        elif kind == "rows":
            state[base] = torch.cat([state[base], tensor])
        elif kind != "down":
            state[name] = tensor
    return state


def downloaded(source: str | Path, revision: str | None, *, files: Sequence[str] | None = None) -> Path:
    """A directory as it is; a Hub id downloaded, whole or no more than the `files`."""
    from huggingface_hub import snapshot_download

    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(
            snapshot_download(str(source), revision=revision, allow_patterns=None if files is None else [*files])
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(source)!r} is no directory, and cannot be fetched from the Hub: {first_line(error)}",
            hint="check the name, the network and your login (hf auth login), or give a directory",
        ) from error


def find_folder(source: str | Path, revision: str | None, *, files: Sequence[str] = (CONFIG, WEIGHTS)) -> Path:
    """`downloaded`, no more than the `files` that are read; held against its checksums."""
    folder = downloaded(source, revision, files=(*files, SUMS))
    check_sums(folder, only=files)
    return folder


def read_values(folder: Path) -> JsonObject:
    """What `config.json` holds."""
    path = folder / CONFIG
    hint = "give a directory with config.json and model.safetensors; `draftsmith convert` makes one of a .pt"
    values = read_json(path, JsonObject, hint=hint)
    check_config(values, path)
    return values


def read_weights(folder: Path, expected: Shapes, dtype: torch.dtype | None, device: torch.device = CPU) -> State:
    """All expected tensors, finite and one by one, so that a change of type or place holds no second copy of the file;
    `dtype` None: as they are stored.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        hint = "a single safetensors file is read; shards and pickles are not"
        raise UserError(f"{WEIGHTS} is missing", where=str(folder), hint=hint)
    with opened(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        check_shapes(shapes, expected, where=str(path))
        weights = {name: file.get_tensor(name).to(device, dtype) for name in expected}
    check_weights(weights, path)
    return weights


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """Name -> shape of a state dict."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    expected: Shapes,
    *,
    where: str,
    what: str = "",
    hint: str = f"the weights and {CONFIG} do not belong together: restore the one that was changed",
) -> None:
    """Raises `UserError` with the first few keys that are missing, unknown or of another shape, after `what`."""
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not part of this model" for name in shapes if name not in expected]
    problems += [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(what + "; ".join(problems[:3]) + more, where=where, hint=hint)


FOLDER = Path(__file__).parent / "weights"
PREFIX = "shipped:"


def shipped_folder(place: str) -> str:
    """The folder of `shipped:NAME`; any other place as it is. Raises `Refused` where nothing of this name ships."""
    if not place.startswith(PREFIX):
        return place
    folder, names = FOLDER / place.removeprefix(PREFIX), [path.parent.name for path in FOLDER.glob("*/config.json")]
    if folder.name not in names or folder.parent != FOLDER:
        raise Refused("", f"no weights {place!r} come with draftsmith", f"these do: {', '.join(sorted(names))}")
    return str(folder)


def opened_target(place: str, *, key: str | None = None, where: str | None = None) -> str:
    """`shipped_folder` of a name outside a recipe: of a manifest, or of a command's option. Raises `UserError`."""
    try:
        return shipped_folder(place)
    except Refused as refused:
        raise UserError(refused.problem, key=key, where=where, hint=refused.hint) from refused


def shipped_name(place: str) -> str:
    """`shipped:NAME` of a folder of the package, where it lies differs between machines; any other place as it is."""
    return f"{PREFIX}{Path(place).name}" if Path(place).parent == FOLDER else place


# Of a target: a Hub id, a directory, or `shipped:NAME`, by which manifests and fingerprints hold it on every machine.
TargetPlace = Annotated[Place, AfterValidator(shipped_folder), PlainSerializer(shipped_name)]
