"""Weights and config of a published head under the names that we use, whoever saved them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ...core.finite import check_weights
from ...core.json_types import JsonObject
from ...core.pretrained import INDEX, indexed_files, read_safetensors
from ..drafters.head_files import head_state
from ..drafters.outside import find_start
from ..folders import read_values

State = dict[str, Tensor]
# Of the module that a trainer wrapped the head in.
_WRAPPERS = ("module.", "draft_model.", "ea_layer.", "spec_layer.", "model.")
# Tables that follow from the config: older checkpoints hold them.
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def read_published(source: str | Path, revision: str | None) -> tuple[Path, JsonObject, State]:
    """Folder, `config.json` and weights.

    Raises:
        UserError: a file is missing, or cannot be read without running it.
    """
    folder = find_start(source, revision)
    values = read_values(folder)
    state = _shards(folder) if (folder / INDEX).is_file() else head_state(folder)
    return folder, values, {n: v for n, v in _bare(state).items() if not n.endswith(_DERIVED)}


def _shards(folder: Path) -> State:
    state = {key: value for path in indexed_files(folder) for key, value in read_safetensors(path).items()}
    check_weights(state, folder)
    return state


def _bare(state: State) -> State:
    """Without the prefix that every layer's weights carry."""
    while True:
        inner = [name for name in state if ".self_attn." in name]
        prefix = next((w for w in _WRAPPERS if inner and all(name.startswith(w) for name in inner)), None)
        if prefix is None:
            return state
        state = {name.removeprefix(prefix): value for name, value in state.items()}
