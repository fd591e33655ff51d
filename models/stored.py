"""Facts of stored weights, read without a model: tied or not, tables that heads are trained beside, and `dtype: auto`.

`auto` becomes a type here alone: as the weights are stored on a GPU, float32 on a CPU. A folder's safetensors say what
they hold; of a Hub id its config.json is asked, so that no weights are fetched for the question.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from ..core.errors import UserError
from ..core.json_types import JsonMapping, object_at, text_at
from ..core.pretrained import CONFIG, RESTORE, SINGLE, Checkpoint
from ..core.ranks import notice

PROCESSORS = Path("/proc/cpuinfo")
# Of a plain language model, and of models with a vision tower as newer (Idefics' line apart) and older transformers
# write them.
_EMBEDDING = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)
_HEAD = ("lm_head.weight", "language_model.lm_head.weight")
_NAMES_OF = {
    "token embedding": _EMBEDDING, "LM head": _HEAD,
    "final norm": tuple(name.replace("embed_tokens", "norm") for name in _EMBEDDING),
}  # fmt: skip


def holds_two_tables(folder: str | Path) -> bool:
    """Whether embedding and LM head are both stored and differ: transformers keeps both, whatever the config says."""
    checkpoint = Checkpoint(folder)
    if not any(name in _HEAD for _, name, _ in checkpoint.headers()):
        return False
    tables = [*checkpoint.tensors((*_HEAD, *_EMBEDDING).__contains__).values()]
    return len(tables) == 2 and not torch.equal(*tables)


def stored_table(
    what: Literal["token embedding", "LM head", "final norm"], source: str | None, *, where: str, tied: bool = False,
    revision: str | None = None,
) -> Tensor:  # fmt: skip
    """[V,D], of a norm [D], of a target's directory or Hub id, of which only the file that holds it is fetched.

    Where no LM head is stored and tables are `tied`, it is the embedding. Raises `UserError` where there is none.
    """
    names = _NAMES_OF[what] + (_EMBEDDING if tied else ())
    state = _checkpoint(source, what, where, revision).tensors(names.__contains__)
    for name in names:
        if name in state:
            return state[name]
    raise UserError(f"no {what} among its tensors", where=source, hint="give the target that the head was trained for")


def stored_tower(source: str | None, *, where: str) -> dict[str, Tensor]:
    """The tower's tensors of a LLaVA, named as in a tower without a model around it; else as `stored_table`."""
    sign = "vision_tower."
    state = _checkpoint(source, "tower", where).tensors(lambda name: sign in name)
    return {name.partition(sign)[2].removeprefix("vision_model."): value for name, value in state.items()}


def _checkpoint(source: str | None, what: str, where: str, revision: str | None = None) -> Checkpoint:
    if source is None:
        raise UserError(f"the target's {what} is needed, and its weights are not named", where=where,
                        hint="give the target's folder: --target")  # fmt: skip
    return Checkpoint(source, revision, where=where)


# Names that safetensors' headers have, and types to compute in: torch computes in float64 for nobody here.
_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES = _FLOATS | {"F64": "float32"}
_KNOWN = {*_NAMES.values()}


def is_on_cpu(section: Any) -> bool:
    """Whether a `device_map`, which sections of large models have, keeps it there."""
    return getattr(section, "device_map", None) == "cpu"


def resolved_dtype(section: Any, source: str | Path | None, device: torch.device, *, key: str) -> str:
    """The section's own `dtype`, or what `auto` means for these weights on this device.

    Args:
        section: with `dtype` and `revision`.
        source: folder or Hub id of the weights; None: they are spelt out, and were never stored.

    Raises:
        UserError: as `stored_dtype`, or they are stored in bfloat16 and the GPU does not compute in it.
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


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it, as AVX512_BF16, AMX or ARM's; without them torch's products in
    bfloat16 take several times as long as in float32. True where nothing tells (Linux alone does).
    """
    if not PROCESSORS.is_file():
        return True
    listed = PROCESSORS.read_text().splitlines()
    flags = {
        flag for line in listed if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()
    }
    return not flags or bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def stored_dtype(source: str | Path, revision: str | None, *, key: str) -> str:
    """float32, bfloat16 or float16: the type of most of the parameters. Raises `UserError` where that is another one,
    config.json says that they are quantised, or nothing says.
    """
    checkpoint = Checkpoint(source, revision)
    if checkpoint.file(CONFIG) is None and not Path(source).is_dir():
        raise UserError(f"cannot read {CONFIG} of {str(source)!r}", hint="check the name and the network, or set dtype")
    values = checkpoint.values()
    if values.get("quantization_config") is not None:
        _refuse(key, source, "the weights are quantised")
    said, counts = named_dtype(values), Counter[str]()
    if Path(source).is_dir() or (said is None and checkpoint.file(SINGLE) is not None):
        for _, _, part in checkpoint.headers():
            counts[part.get_dtype()] += prod(part.get_shape())
    if not counts:
        return said if said in _KNOWN else _refuse(key, source, f"{CONFIG} says no type that auto knows ({said})")
    (most, _), *_ = counts.most_common(1)
    return _NAMES.get(most) or _refuse(key, source, f"most parameters are stored in {most}")


def check_types(folder: Path, module: nn.Module) -> None:
    """Compare the types of stored tensors with those that a loaded module computes in; another type of float is said.

    Raises `UserError` for a weight that is stored as whole numbers, or in a float that weights need a scale for.
    """
    used = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point()}
    casts: Counter[str] = Counter()
    for path, name, part in Checkpoint(folder).headers():
        stored = part.get_dtype()
        if stored not in _FLOATS and name.endswith((".weight", ".bias")):
            problem = f"{name} is stored as {stored}, and weights are {', '.join(_FLOATS.values())}"
            raise UserError(problem, where=str(path), hint=RESTORE)
        casts[_FLOATS.get(stored, "")] += 1
    for stored in sorted(casts.keys() - used - {""}):
        notice(f"{folder}: {casts[stored]} tensors are stored as {stored} and read as {' and '.join(sorted(used))}")


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
