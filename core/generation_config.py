"""The end tokens that a model's own files name."""

from __future__ import annotations

from pathlib import Path

from .errors import UserError
from .files import read_json
from .json_types import JsonObject, listed, value_at
from .pretrained import RESTORE, reading_pretrained

_CURE = "check the name and the network, or give a directory"


def generation_ends(source: str | Path, revision: str | None = None) -> tuple[int, ...]:
    """`eos_token_id` of a model's `generation_config.json`, or where there is no such file of its `config.json`, as
    transformers reads them; in ascending order, empty where they name none.

    Args:
        source: Hub id or directory.

    Raises:
        UserError: it is neither an id nor a list of ids, or cannot be read.
    """
    path = _stored(source, "generation_config.json", revision) or _stored(source, "config.json", revision)
    if path is None:
        return ()
    values = read_json(path, JsonObject, hint=RESTORE)
    ends = values.get("eos_token_id")
    if ends is None and path.name == "config.json":
        ends = value_at(values, "text_config", "eos_token_id")
    ids = listed(ends)
    if wrong := [end for end in ids if type(end) is not int]:
        raise UserError(f"eos_token_id holds {wrong[0]!r}, expected the id of a token or a list of ids",
                        where=str(path), hint="write the ids as numbers, as the model was published")  # fmt: skip
    return tuple(sorted({end for end in ids if end >= 0}))  # -1 stands for none


def _stored(source: str | Path, file: str, revision: str | None) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() else None
    from transformers.utils import cached_file

    with reading_pretrained(source, "cannot read the end tokens of", hint=_CURE, weights=False):
        found = cached_file(str(source), file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
