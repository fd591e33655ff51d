"""One table of a published model, without loading the model: its token embedding.

Heads are trained beside it and published with or without a copy; whether a copy is the target's is seen by comparing.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.errors import UserError, first_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Of a plain language model, and of models with eyes as older and newer transformers write them.
_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)


def target_embedding(source: str | None, *, where: str, revision: str | None = None) -> Tensor:
    """[V,D] of a directory, or of a Hub id, of which only the file that holds it is fetched.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if source is None:
        raise UserError("the target's embedding is needed, and its weights are not named", where=where,
                        cure="give the target's folder: --target")  # fmt: skip
    try:
        index = _fetch(source, INDEX, revision)
        files = json.loads(index.read_text())["weight_map"] if index else None
        name = next((n for n in _NAMES if files is not None and n in files), None)
        path = _fetch(source, files[name] if files and name else SINGLE, revision)
        if path is None:
            raise UserError(f"{SINGLE} is missing", where=str(source), cure="pickles of targets are not read; convert")
        with safe_open(path, "pt") as file:
            held = set(file.keys())
            found = next((n for n in _NAMES if n in held), None)
            if found is None:
                raise UserError(f"no token embedding among {len(held)} tensors", where=str(path),
                                cure="give the target that the head was trained for")  # fmt: skip
            return file.get_tensor(found)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"cannot read the embedding of {source!r}: {first_line(error)}", where=where,
                        cure="check the name and the network, or give a directory") from error  # fmt: skip


def _fetch(source: str, name: str, revision: str | None) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except EntryNotFoundError:
        return None
