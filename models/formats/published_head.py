"""Weights and config of a published head under the names that we use, whoever saved them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ...core.errors import UserError
from ...core.finite import check_weights
from ...core.pretrained import INDEX, indexed_files, read_safetensors
from ..drafters.head_files import head_state
from ..hub import rope_of
from ..layer import stretched, written_rope
from ..llamagen.folders import CONFIG, find_folder, read_values

State = dict[str, Tensor]
# What is fetched of a Hub id. Pickles are read without running anything that is in them.
FILES = (CONFIG, "draftsmith.json", "*.safetensors", INDEX, "pytorch_model.bin")
# Of the module that a trainer wrapped the head in.
_WRAPPERS = ("module.", "draft_model.", "ea_layer.", "spec_layer.", "model.")
# Tables that follow from the config: older checkpoints hold them.
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def read_published(source: str | Path, revision: str | None) -> tuple[Path, dict[str, Any], State]:
    """Folder, `config.json` and weights.

    Raises:
        UserError: a file is missing, or cannot be read without running it.
    """
    folder = find_folder(source, revision, files=FILES)
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


def as_one_layer(state: State, layer: str, where: str) -> State:
    """The layer under the name that we have for it: `layers.0.` and `midlayer.` are both in use for EAGLE-3.

    Raises:
        UserError: the head has more layers than one.
    """
    deeper = sorted(name for name in state if name.startswith("layers.") and not name.startswith("layers.0."))
    if deeper:
        raise UserError(f"the head has several layers ({deeper[0]})", where=where, hint="one layer is what is read")
    names = {"layers.0.", "midlayer."}
    return {
        next((layer + name.removeprefix(n) for n in names if name.startswith(n)), name): value
        for name, value in state.items()
    }


def theta_of(values: dict[str, Any], where: str) -> float:
    """Base of the rotation; EAGLE's code takes 10,000 where a config says nothing, whatever its target has.

    Raises:
        UserError: the config names two.
    """
    return float(written_rope(values, Path(where) / CONFIG).get("rope_theta") or 10000.0)


def check_rope(values: dict[str, Any], text: Any, where: str) -> tuple[tuple[int, ...], Literal["target", "plain"]]:
    """M-RoPE's sections, none where there is one position; and whether the target's stretched rotation is the head's.

    Raises:
        UserError: the head stretches its positions otherwise than the target.
    """
    rope = written_rope(values, Path(where) / CONFIG)
    own = stretched(rope, values.get("max_position_embeddings"))
    targets = stretched(rope_of(text))
    if own not in (None, targets):
        raise UserError(f"the head's positions are stretched ({own['rope_type']}), the target's otherwise or not",
                        where=where, hint="name the target that it was trained for")  # fmt: skip
    return tuple(rope.get("mrope_section") or ()), "target" if own == targets else "plain"
