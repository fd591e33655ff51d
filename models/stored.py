"""In which type weights are held where a setting says `dtype: auto`: as they are stored on a GPU, float32 on a CPU.

This is the only place where `auto` becomes a type. A folder's safetensors say what they hold; of a Hub id its
config.json is asked, so that no weights are fetched for the question.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from safetensors import safe_open
from torch import nn

from ..core.errors import UserError, first_line
from ..core.files import read_json
from ..core.json_types import JsonMapping, JsonObject, object_at, text_at
from ..core.pretrained import INDEX, RESTORE, indexed_files, reading_safetensors
from ..core.ranks import notice
from .hub import SINGLE, fetch_file

_CONFIG = "config.json"
# Names that safetensors' headers have; torch computes in float64 for nobody here.
_NAMES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_KNOWN = ("float32", "bfloat16", "float16")


class Held(Protocol):
    """What a section says of the weights that it names."""

    @property
    def dtype(self) -> str | None: ...
    @property
    def path(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...


def is_on_cpu(section: Held) -> bool:
    """Whether a `device_map`, which sections of large models have, keeps it there."""
    return getattr(section, "device_map", None) == "cpu"


def resolved_dtype(section: Held, source: str | Path | None, device: torch.device, *, key: str) -> str:
    """The section's own `dtype`, or what `auto` means for these weights on this device.

    Args:
        section: with `dtype` and `revision`.
        source: folder or Hub id of the weights; None: they are spelt out, and were never stored.
        key: of the section in the recipe, for messages.

    Raises:
        UserError: `auto` has no answer: the weights are quantised, say nothing of their type, or are stored in
            bfloat16 and the GPU does not compute in it.
    """
    if section.dtype != "auto":
        return str(section.dtype)
    if source is None or device.type == "cpu" or is_on_cpu(section):
        return "float32"
    name = stored_dtype(source, section.revision, key=key)
    if name == "bfloat16" and not computes_in_bfloat16(device):
        raise UserError(
            f"{key}.dtype is auto, the weights are stored in bfloat16, and this GPU does not compute in it",
            key=f"{key}.dtype", where=str(source), hint=f"set {key}.dtype to float16 (half the memory) or float32",
        )  # fmt: skip
    return name


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has bfloat16 of its own; torch emulates it on others, slowly."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def stored_dtype(source: str | Path, revision: str | None, *, key: str) -> str:
    """float32, bfloat16 or float16: the type of most of the parameters. Of mixed weights it is the larger part's.

    Raises:
        UserError: most parameters have another type, config.json says that they are quantised, or nothing says.
    """
    values = _config_of(source, revision)
    if values.get("quantization_config") is not None:
        _refuse(key, source, "the weights are quantised")
    files, said = weight_files(Path(source)), named_dtype(values)
    if not files and said is None and (single := fetch_file(str(source), SINGLE, revision)) is not None:
        files = [single]  # of a Hub id whose config does not say
    if not files:
        return said if said in _KNOWN else _refuse(key, source, f"{_CONFIG} says no type that auto knows ({said})")
    counts = parameters_by_dtype(files)
    (most, _), *_ = counts.most_common(1) or [("none", 0)]
    return _NAMES.get(most) or _refuse(key, source, f"most parameters are stored in {most}")


def parameters_by_dtype(files: list[Path]) -> Counter[str]:
    """Safetensors' name of a type -> parameters, from the headers alone."""
    counts: Counter[str] = Counter()
    for path in files:
        with reading_safetensors(path), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                counts[part.get_dtype()] += prod(part.get_shape())
    return counts


_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def check_types(folder: Path, module: nn.Module) -> None:
    """Compare the types of stored tensors with those that a loaded module computes in; another type of float is said.

    Raises:
        UserError: a weight is stored as whole numbers, or in a float that weights need a scale for.
    """
    used = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point()}
    casts: Counter[str] = Counter()
    for path in weight_files(folder):
        with reading_safetensors(path), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                stored = file.get_slice(name).get_dtype()
                if stored not in _FLOATS and name.endswith((".weight", ".bias")):
                    problem = f"{name} is stored as {stored}, and weights are {', '.join(_FLOATS.values())}"
                    raise UserError(problem, where=str(path), hint=RESTORE)
                casts[_FLOATS.get(stored, "")] += 1
    for stored in sorted(casts.keys() - used - {""}):
        notice(f"{folder}: {casts[stored]} tensors are stored as {stored} and read as {' and '.join(sorted(used))}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that a loader would open; none of a Hub id, or of a folder with pickles alone."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return indexed_files(folder) if (folder / INDEX).is_file() else []


def _config_of(source: str | Path, revision: str | None) -> JsonMapping:
    """config.json; empty where there is none."""
    problem, hint = f"cannot read {_CONFIG} of {str(source)!r}", "check the name and the network, or set dtype"
    try:
        path = fetch_file(str(source), _CONFIG, revision)
    except (OSError, ValueError) as error:
        raise UserError(f"{problem}: {first_line(error)}", hint=hint) from error
    if path is None and not Path(source).is_dir():
        raise UserError(problem, hint=hint)
    return {} if path is None else read_json(path, JsonObject, hint=RESTORE)


def named_dtype(values: JsonMapping) -> str | None:
    """The type that a config names, itself or of its language model."""
    for part in (values, object_at(values, "text_config")):
        if name := text_at(part, "dtype") or text_at(part, "torch_dtype"):
            return name.removeprefix("torch.")
    return None


def _refuse(key: str, source: str | Path, problem: str) -> NoReturn:
    raise UserError(
        f"{key}.dtype is auto, which holds weights as they are stored, and {problem}",
        key=f"{key}.dtype", where=str(source),
        hint=f"say in which type to compute: {key}.dtype=bfloat16, float16 or float32",
    )  # fmt: skip
