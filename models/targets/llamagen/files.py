"""LlamaGen and its tokenizer on disk: saved and loaded as directories, ours or LANTERN's.

Ours is `config.json` beside `model.safetensors` under the official names; LANTERN's is told by its config. What is read
is checked in full, names and shapes, before a model is made of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch

from ....core.errors import UserError
from ....core.files import checked
from ....core.json_types import JsonMapping, JsonObject
from ....core.pretrained import CPU
from ....core.section import Section
from ...folders import CONFIG, Shapes, State, find_folder, read_values, read_weights, shapes_of, write_folder
from .lantern_layout import from_lantern, is_lantern, lantern_config, to_lantern
from .transformer import LlamaGen, LlamaGenConfig, rope_table
from .vq import VqConfig, VqTokenizer

LLAMAGEN, VQ = "llamagen", "llamagen_vq"
C = TypeVar("C", bound=Section)


def save_model(model: LlamaGen | VqTokenizer, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`. The weights keep their type."""
    write_folder(folder, values_of(model.config), model.state_dict())


def load_llamagen(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> LlamaGen:
    """A LlamaGen in eval mode.

    Args:
        source: our directory, one of LANTERN's layout, or the Hub id of either.
        device: where its weights go, straight from the file.

    Raises:
        UserError: a file or key that is missing, unknown, unreadable or of another shape.
    """
    state, config = read_llamagen(source, revision=revision, dtype=dtype, device=device)
    with torch.device("meta"):
        model = LlamaGen(config)
    model.load_state_dict(state, assign=True)
    model._rope = rope_table(config.grid, config.head_dim, config.rope_base, zeros_before=config.num_condition_tokens)
    return model.eval()


def read_llamagen(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
) -> tuple[State, LlamaGenConfig]:
    """Weights under the official names, and the config, of either layout. `dtype` None keeps what is stored."""
    folder = find_folder(source, revision)
    values = read_values(folder)
    config = config_in(folder, values)
    if is_lantern(values):
        expected = shapes_of(to_lantern(_meta_state(config), config)[0])
        return from_lantern(read_weights(folder, expected, dtype, device)), config
    return read_weights(folder, shapes_for(config), dtype, device), config


def is_ours(values: JsonMapping) -> bool:
    """Whether a `config.json` is a LlamaGen's, of either layout."""
    return values.get("model_type") == LLAMAGEN or is_lantern(values)


def config_in(folder: Path, values: JsonMapping) -> LlamaGenConfig:
    """The config that a folder's `config.json` (`values`) says in either layout. Raises `UserError` as above."""
    if is_lantern(values):
        return lantern_config(values, where=str(folder / CONFIG))
    return _config(LlamaGenConfig, LLAMAGEN, values, folder / CONFIG)


def load_vq(source: str | Path, device: torch.device = CPU) -> VqTokenizer:
    """A tokenizer in eval mode, from our directory or the Hub id of one. Raises `UserError` as above."""
    folder = find_folder(source, None)
    config = _config(VqConfig, VQ, read_values(folder), folder / CONFIG)
    state = read_weights(folder, shapes_for(config), torch.float32, device)
    with torch.device("meta"):
        model = VqTokenizer(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def values_of(config: LlamaGenConfig | VqConfig) -> JsonObject:
    """What `config.json` holds."""
    return {"model_type": VQ if isinstance(config, VqConfig) else LLAMAGEN, **config.model_dump(mode="json")}


def shapes_for(config: LlamaGenConfig | VqConfig) -> Shapes:
    """Shapes of the model's state dict, without allocating it."""
    return shapes_of(_meta_state(config))


def _meta_state(config: LlamaGenConfig | VqConfig) -> State:
    with torch.device("meta"):
        return (VqTokenizer(config) if isinstance(config, VqConfig) else LlamaGen(config)).state_dict()


def _config(schema: type[C], model_type: str, values: JsonMapping, path: Path) -> C:
    written = values.get("model_type")
    if written != model_type:
        raise UserError(
            f"model_type is {written!r}, expected {model_type!r}",
            where=f"{path}, key model_type",
            hint="give the other directory: transformer and tokenizer have one each"
            if written in (LLAMAGEN, VQ)
            else "`draftsmith convert` makes such a directory of a published file",
        )
    fields = {name: value for name, value in values.items() if name != "model_type"}
    return checked(fields, schema, where=str(path), hint="restore the file, or fix the key")
