"""LlamaGen and its tokenizer on disk: our directories, LANTERN's, and the published `.pt` files.

Ours is `config.json` beside `model.safetensors` under the official names. LANTERN's (jadohu/LlamaGen-T2I) renames the
weights like transformers' Llama, for a private class of the same name; it is recognised by its config. What is read
is checked in full, names and shapes, before a model is made of it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from huggingface_hub import snapshot_download
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...core.errors import UserError, did_you_mean
from ...core.section import Section
from .transformer import SIZES, LlamaGen, LlamaGenConfig, rope_table
from .vq import VqConfig, VqTokenizer

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LLAMAGEN, VQ = "llamagen", "llamagen_vq"
State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
C = TypeVar("C", bound=Section)


# ---- models


def save_llamagen(model: LlamaGen, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`. The weights keep their type."""
    write_folder(folder, llamagen_values(model.config), model.state_dict())


def load_llamagen(source: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32) -> LlamaGen:
    """A LlamaGen in eval mode on the CPU.

    Args:
        source: our directory, one of LANTERN's layout, or the Hub id of either.

    Raises:
        UserError: a file or key that is missing, unknown, unreadable or of another shape.
    """
    state, config = read_llamagen(source, revision=revision, dtype=dtype)
    with torch.device("meta"):
        model = LlamaGen(config)
    model.load_state_dict(state, assign=True)
    model._rope = rope_table(config.grid, config.head_dim, config.rope_base, zeros_before=config.num_slots)
    return model.eval()


def read_llamagen(
    source: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None
) -> tuple[State, LlamaGenConfig]:
    """Weights under the official names, and the config, of either layout. `dtype` None keeps what is stored."""
    folder = find_folder(source, revision)
    values = read_values(folder)
    if is_lantern(values):
        config = lantern_config(values, where=str(folder / CONFIG))
        expected = shapes_of(to_lantern(_meta_state(LlamaGen, config), config)[0])
        return from_lantern(_read_weights(folder, expected, dtype), values)
    config = _config(LlamaGenConfig, LLAMAGEN, values, folder / CONFIG)
    return _read_weights(folder, llamagen_shapes(config), dtype), config


def save_vq(model: VqTokenizer, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`. The weights keep their type."""
    write_folder(folder, vq_values(model.config), model.state_dict())


def load_vq(source: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32) -> VqTokenizer:
    """A tokenizer in eval mode on the CPU, from our directory or the Hub id of one. Raises `UserError` as above."""
    folder = find_folder(source, revision)
    config = _config(VqConfig, VQ, read_values(folder), folder / CONFIG)
    state = _read_weights(folder, vq_shapes(config), dtype)
    with torch.device("meta"):
        model = VqTokenizer(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def llamagen_values(config: LlamaGenConfig) -> dict[str, Any]:
    """What `config.json` holds."""
    return {"model_type": LLAMAGEN, **config.model_dump(mode="json")}


def vq_values(config: VqConfig) -> dict[str, Any]:
    return {"model_type": VQ, **config.model_dump(mode="json")}


def llamagen_shapes(config: LlamaGenConfig) -> Shapes:
    return shapes_of(_meta_state(LlamaGen, config))


def vq_shapes(config: VqConfig) -> Shapes:
    return shapes_of(_meta_state(VqTokenizer, config))


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _meta_state(make: Callable[[Any], nn.Module], config: Section) -> State:
    with torch.device("meta"):
        return make(config).state_dict()


# ---- directories


def write_folder(folder: Path, values: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Both files, each whole or not at all; the weights first, so that a config never stands without them."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{WEIGHTS}.partial"
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, aside, {"format": "pt"})
    os.replace(aside, folder / WEIGHTS)
    aside = folder / f".{CONFIG}.partial"
    aside.write_text(json.dumps(values, indent=1))
    os.replace(aside, folder / CONFIG)


def find_folder(source: str | Path, revision: str | None) -> Path:
    """A directory as it is; a Hub id downloaded (only the two files that are read)."""
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{str(source)!r} is no directory, and cannot be fetched from the Hub: {first}",
            cure="check the name and the network, or download it once and give the local directory",
        ) from error


def read_values(folder: Path) -> dict[str, Any]:
    """What `config.json` holds."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        cure = (
            "give a directory with config.json and model.safetensors; scripts/convert_llamagen makes one of a .pt file"
        )
        raise UserError(f"cannot read {CONFIG}: {error.strerror}", where=str(path), cure=cure) from error
    except ValueError as error:
        raise UserError(f"not JSON: {error}", where=str(path), cure="restore the file") from error
    if not isinstance(values, dict):
        raise UserError("not a JSON object", where=str(path), cure="restore the file")
    return values


def _config(schema: type[C], model_type: str, values: dict[str, Any], path: Path) -> C:
    found = values.get("model_type")
    if found != model_type:
        raise UserError(
            f"model_type is {found!r}, expected {model_type!r}",
            where=f"{path}, key model_type",
            cure="give the other directory: transformer and tokenizer have one each"
            if found in (LLAMAGEN, VQ)
            else "scripts/convert_llamagen makes such a directory of a published file",
        )
    try:
        return schema.model_validate({name: value for name, value in values.items() if name != "model_type"})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        unknown = first["type"] == "extra_forbidden"
        cure = did_you_mean(key, schema.model_fields) if unknown else "restore the file, or mend the key"
        where = f"{path}, key {key}" if key else str(path)
        raise UserError(f"{key or 'the config'}: {first['msg']}", where=where, cure=cure) from error


def _read_weights(folder: Path, expected: Shapes, dtype: torch.dtype | None) -> State:
    """All expected tensors, one by one, so that a change of type holds no second copy of the file."""
    path = folder / WEIGHTS
    if not path.is_file():
        cure = "a single safetensors file is read; shards and pickles are not"
        raise UserError(f"{WEIGHTS} is missing", where=str(folder), cure=cure)
    try:
        with safe_open(path, "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            check_shapes(found, expected, where=str(path))
            return {name: _cast(file.get_tensor(name), dtype) for name in expected}
    except (SafetensorError, OSError) as error:
        cure = "the file is cut off or damaged: fetch or write it again"
        raise UserError(f"cannot be read: {error}", where=str(path), cure=cure) from error


def check_shapes(found: Mapping[str, tuple[int, ...]], expected: Shapes, *, where: str) -> None:
    """Raises `UserError` with the first few keys that are missing, unknown or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not part of this model" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        cure = f"the weights and {CONFIG} do not belong together: restore the one that was changed"
        raise UserError("; ".join(problems[:3]) + more, where=where, cure=cure)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


# ---- LANTERN's layout

_TO_LANTERN = {
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_FROM_LANTERN = {theirs: ours for ours, theirs in _TO_LANTERN.items()}
_QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_LANTERN_NEEDED = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps"),
    *("input_type", "block_size"),
)
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")


def is_lantern(values: Mapping[str, Any]) -> bool:
    """Whether a config is of LANTERN's layout: a Llama that says what its images are asked for by."""
    return values.get("model_type") == "llama" and "input_type" in values


def to_lantern(state: Mapping[str, Tensor], config: LlamaGenConfig) -> tuple[State, dict[str, Any]]:
    """Weights and config in LANTERN's layout. Nothing is permuted: the rotation stays one of neighbouring pairs."""
    renamed: State = {}
    for name, tensor in state.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            top = {"tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
            renamed[top.get(name, f"model.{name}")] = tensor
            continue
        prefix, part = f"model.layers.{layer[1]}.", layer[2]
        if part == "attention.wqkv.weight":
            renamed |= {prefix + name: third for name, third in zip(_QKV, tensor.chunk(3), strict=True)}
        else:
            renamed[prefix + _TO_LANTERN[part]] = tensor
    return renamed, _lantern_values(config)


def from_lantern(state: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[State, LlamaGenConfig]:
    """Weights under the official names, and the config, of a model in LANTERN's layout."""
    renamed: State = {}
    for name, tensor in state.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            top = {"model.embed_tokens.weight": "tok_embeddings.weight", "lm_head.weight": "output.weight"}
            renamed[top.get(name, name.removeprefix("model."))] = tensor
            continue
        prefix, part = f"layers.{layer[1]}.", layer[2]
        if part == _QKV[0]:
            thirds = [state[f"model.{prefix}{third}"] for third in _QKV]
            renamed[f"{prefix}attention.wqkv.weight"] = torch.cat(thirds)
        elif part not in _QKV:
            renamed[prefix + _FROM_LANTERN[part]] = tensor
    return renamed, lantern_config(values, where=CONFIG)


def _lantern_values(config: LlamaGenConfig) -> dict[str, Any]:
    """Fields of transformers' Llama, and those that LANTERN's class reads besides."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": config.init_std,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "input_type": "c2i" if config.condition == "class" else "t2i",
        "block_size": config.num_codes,
        "cls_token_num": config.num_slots,
        "rope_base": config.rope_base,
        "num_classes": config.num_classes,
        "caption_dim": config.caption_dim,
        "token_dropout_p": config.dropout,
        "attn_dropout_p": 0.0,
        "resid_dropout_p": config.dropout,
        "ffn_dropout_p": config.dropout,
        # Above zero: their label table has a row for the unconditional class only then.
        "class_dropout_p": 0.1,
    }


def lantern_config(values: Mapping[str, Any], *, where: str) -> LlamaGenConfig:
    """Our config of theirs. Of their dropouts, which act in training alone, the tokens' is taken for all."""
    for key in _LANTERN_NEEDED:
        if key not in values:
            cure = "a directory with input_type but without block_size is a LANTERN drafter, not a target"
            raise UserError(f"{key} is missing", where=where, cure=cure if key == "block_size" else "restore the file")
    grid = round(values["block_size"] ** 0.5)
    if grid * grid != values["block_size"]:
        raise UserError(f"block_size {values['block_size']} is not a square", where=where, cure="restore the file")
    kinds: dict[str, Literal["class", "text"]] = {"c2i": "class", "t2i": "text", "t2i2": "text"}
    if values["input_type"] not in kinds:
        cure = did_you_mean(str(values["input_type"]), kinds)
        raise UserError(f"input_type is {values['input_type']!r}", where=f"{where}, key input_type", cure=cure)
    try:
        return LlamaGenConfig(
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            dim=values["hidden_size"],
            ffn_hidden=values["intermediate_size"],
            vocab_size=values["vocab_size"],
            grid=grid,
            condition=kinds[values["input_type"]],
            num_classes=values.get("num_classes", 1000),
            caption_dim=values.get("caption_dim", 2048),
            caption_slots=values.get("cls_token_num", 120) if kinds[values["input_type"]] == "text" else 120,
            norm_eps=values["rms_norm_eps"],
            rope_base=values.get("rope_base", 10000.0),
            init_std=values.get("initializer_range", 0.02),
            dropout=values.get("token_dropout_p", 0.1),
        )
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where=where, cure="restore the file") from error


# ---- published .pt files

# Where training scripts put the weights: DDP, DeepSpeed, others; FSDP files are the bare dict.
WRAPPERS = ("model", "module", "state_dict")


def load_pickle(path: Path) -> dict[str, Any]:
    """A `.pt` file's top level, memory mapped. Runs no code from it.

    Raises:
        UserError: not such a file, or one that would build objects other than tensors (and a script's own arguments).
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UserError(
            "the file asks for more than tensors" + (f" ({name[1]})" if name else "")
            + ": loading that could run code from the file, so it is not loaded",
            where=str(path),
            cure="fetch it from its publisher again; if it is your own, save only the state dict",
        ) from error  # fmt: skip
    except (OSError, RuntimeError, EOFError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot be read as a .pt file: {first}", where=str(path), cure="fetch it again") from error
    if not isinstance(loaded, dict):
        raise UserError(f"holds a {type(loaded).__name__}, expected a dict of weights", where=str(path))
    return loaded


def weights_in(loaded: Mapping[str, Any], *, where: str) -> State:
    """The state dict among a file's top-level entries, or the file itself."""
    inner = next((loaded[name] for name in WRAPPERS if isinstance(loaded.get(name), Mapping)), loaded)
    if not inner or not all(isinstance(value, Tensor) for value in inner.values()):
        cure = f"weights are looked for under {', '.join(WRAPPERS)}, or as the whole file"
        held = ", ".join(list(map(str, loaded))[:8]) or "nothing"
        raise UserError(f"no weights found; the file holds {held}", where=where, cure=cure)
    return dict(inner)


def read_official(path: Path) -> State:
    """The weights of a published `.pt` file, memory mapped, under their official names."""
    return weights_in(load_pickle(path), where=str(path))


def grid_of(name: str, image_size: int | None = None) -> int:
    """Codes per side: of `image_size` pixels, or of the size in a published file's name (c2i_B_384.pt)."""
    named = re.search(r"(?<!\d)(256|384|512)(?!\d)", name)
    size = image_size or (int(named[1]) if named else None)
    if size is None:
        cure = "give --image-size: 256, 384 or 512; the file does not hold it, and the wrong one gives garbled images"
        raise UserError("the image size is neither given nor part of the file's name", where=name, cure=cure)
    if size % 16 or size < 16:
        raise UserError(f"image size {size} is not a multiple of 16 pixels, the side of a code", where=name)
    return size // 16


def infer_config(
    state: Mapping[str, Tensor], *, grid: int, size: str | None = None, num_heads: int | None = None, where: str = ""
) -> LlamaGenConfig:
    """The config behind an official state dict. Heads are not in it: they come from the published size that has as
    many layers of this width, or from the arguments.

    Args:
        grid: codes per side; see `grid_of`.
        size: a key of `SIZES`.
    """
    rows, dim = _shape(state, "tok_embeddings.weight", where)
    layers = 1 + max((int(m[1]) for name in state if (m := _LAYER.fullmatch(name))), default=-1)
    if size is not None and size not in SIZES:
        raise UserError(f"no published size {size!r}", where=where, cure=did_you_mean(size, SIZES))
    names = [n for n, (depth, _, width) in SIZES.items() if (depth, width) == (layers, dim) and size in (None, n)]
    if size is not None and not names:
        raise UserError(
            f"size {size} has {SIZES[size][0]} layers of width {SIZES[size][2]}, the file {layers} of width {dim}",
            where=where,
            cure="leave the size out: the published ones are told apart by their shapes",
        )
    if num_heads is None and not names:
        cure = f"give --heads; published sizes are {', '.join(SIZES)}"
        raise UserError(f"{layers} layers of width {dim} are no published size: heads unknown", where=where, cure=cure)
    known: dict[str, Any] = {}
    if "cls_embedding.embedding_table.weight" in state:
        known |= {"condition": "class", "num_classes": len(state["cls_embedding.embedding_table.weight"]) - 1}
    else:
        slots, width = _shape(state, "cls_embedding.uncond_embedding", where)
        known |= {"condition": "text", "caption_slots": slots, "caption_dim": width}
    try:
        heads = num_heads or SIZES[names[0]][1]
        config = LlamaGenConfig(num_layers=layers, num_heads=heads, dim=dim, vocab_size=rows, grid=grid, **known)
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where=where, cure="give other --heads") from error
    hidden, _ = _shape(state, "layers.0.feed_forward.w1.weight", where)
    return config if hidden == config.hidden else config.model_copy(update={"ffn_hidden": hidden})


def infer_vq_config(state: Mapping[str, Tensor], *, where: str = "") -> VqConfig:
    """The config behind an official tokenizer's state dict (32 groups, which the file does not hold)."""
    base = _shape(state, "encoder.conv_in.weight", where)[0]
    blocks = re.compile(r"encoder\.conv_blocks\.(\d+)\.res\.(\d+)\.conv1\.weight")
    found = {(int(m[1]), int(m[2])): state[name].shape[0] for name in state if (m := blocks.fullmatch(name))}
    levels = sorted({level for level, _ in found})
    rows, width = _shape(state, "quantize.embedding.weight", where)
    try:
        return VqConfig(
            base_channels=base,
            ch_mult=tuple(found[level, 0] // base for level in levels),
            num_res_blocks=1 + max((block for _, block in found), default=0),
            z_channels=_shape(state, "quant_conv.weight", where)[1],
            codebook_size=rows,
            codebook_dim=width,
        )
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where=where or None, cure="give a published tokenizer") from error


def leave_out(state: Mapping[str, Tensor], expected: Iterable[str]) -> tuple[State, list[str]]:
    """The expected entries of a state dict, and the names of the others."""
    wanted = set(expected)
    return {n: t for n, t in state.items() if n in wanted}, [n for n in state if n not in wanted]


def _shape(state: Mapping[str, Tensor], name: str, where: str) -> tuple[int, ...]:
    if name not in state:
        first = ", ".join(list(state)[:3])
        raise UserError(
            f"{name} is missing; the file begins with {first}",
            where=where or None,
            cure="give a LlamaGen transformer, or --vq for its tokenizer",
        )
    return tuple(state[name].shape)
