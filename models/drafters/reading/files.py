"""Heads that read states on disk: weights without the target's tables, the layer's shape, and what the head expects.

The manifest says what no weight's shape does: which states were read and how layers are counted, what stood at visual
places, positions, the tokenizer and the target. What differs is refused by its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....core.errors import UserError
from ...llamagen.folders import CONFIG, WEIGHTS, check_shapes, find_folder, read_values, shapes_of, write_folder
from ..eagle import head_state, weights_file
from ..layer import LayerShape, stretched
from ..made_for import MANIFEST, tested_with
from .config import AnyReading, Eagle3Config, image_of, written_settings
from .head import AnyHead, Eagle3Head, ReadingHead
from .shape import reading_shape, reads

_FILES = (CONFIG, MANIFEST, WEIGHTS, "pytorch_model.bin")
_EMBEDDING = "embed_tokens.weight"
NUMBERING = "layers count decoder layers passed, 0 is the embedding; feature is the state behind the final norm"


def build_reading_head(config: AnyReading, text: Any, *, draft_ids: Tensor | None = None) -> AnyHead:
    """A fresh head in float32 (the global generator draws its weights).

    Args:
        text: the target's text config.
        draft_ids: of EAGLE-3, see `likeliest_ids`; None where the config has no draft_vocab_size: every id.
    """
    shape = reading_shape(config, text)
    if isinstance(config, Eagle3Config):
        if draft_ids is None:
            assert config.draft_vocab_size is None, "a reduced vocabulary needs the ids that are in it"
            draft_ids = torch.arange(shape.vocab_size)
        return Eagle3Head(shape, draft_ids)
    return ReadingHead(
        shape, fc_bias=config.fc_bias, num_queries=getattr(config, "num_queries", 0),
        num_steps=getattr(config, "num_steps", 0),
    )  # fmt: skip


def likeliest_ids(counts: Tensor, size: int, never: Tensor | None = None) -> Tensor:
    """The `size` most frequent ids in ascending order (equal counts: the smaller id), [V] -> [size] int64.

    Args:
        counts: [V] how often the target's answers hold each id.
        never: [V] bool, ids that cannot come.

    Raises:
        UserError: fewer ids can come than are asked for.
    """
    ranked = counts.double()
    if never is not None:
        ranked = ranked.masked_fill(never, -1.0)
    if size > int((ranked >= 0).sum()):
        raise UserError(
            f"drafter.draft_vocab_size is {size}, and {int((ranked >= 0).sum())} ids can come", cure="make it smaller"
        )
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def reading_head_like(head: AnyHead, state: dict[str, Tensor]) -> AnyHead:
    """A head like `head` in float32, with the weights of `state` and none that it shares with `head`."""
    copy: AnyHead
    if isinstance(head, Eagle3Head):
        copy = Eagle3Head(head.shape, head.draft_ids.cpu())
    else:
        copy = ReadingHead(
            head.shape, fc_bias=head.fc.bias is not None, num_queries=head.num_queries, num_steps=head.num_steps
        )  # fmt: skip
    copy.load_state_dict(state)
    return copy


def reading_manifest(
    config: AnyReading, text: Any, *, target: dict[str, Any], tokenizer_sha256: str | None = None, **more: Any
) -> dict[str, Any]:
    """What stands in `draftsmith.json`.

    Args:
        text: the target's text config.
        target: the recipe's section, with path and revision.
        more: of the stage: command, step, ...
    """
    return {
        "method": config.kind,
        "target": target,
        "tokenizer_sha256": tokenizer_sha256,
        "reads": _read_by(config, text),
        "positions": {"kind": config.positions, "gap_share": config.gap_share, "gap": config.gap},
        "settings": written_settings(config),
        "tested_with": tested_with(),
        **more,
    }


def _read_by(config: AnyReading, text: Any) -> dict[str, Any]:
    found = reads(config, text, training=True)
    return {
        "numbering": NUMBERING,
        "state": list(found.state) or "feature",
        "visual_slots": config.visual(training=True),
        "visual_layer": found.visual,
        "visual_embedding": image_of(config),
    }


def save_reading_head(head: AnyHead, folder: Path, manifest: dict[str, Any]) -> None:
    """`model.safetensors`, `config.json` and the manifest of `reading_manifest`."""
    values = {
        "model_type": "eagle3" if isinstance(head, Eagle3Head) else "reading",
        "fc_bias": head.fc.bias is not None,
        "num_queries": head.num_queries,
        "num_steps": head.num_steps,
        **head.shape.to_dict(),
    }
    write_folder(folder, values, head.state_dict())
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def find_reading_head(config: AnyReading) -> Path:
    """The folder of the head that the recipe names; one on the Hub is downloaded."""
    return find_folder(str(config.path), config.revision, files=_FILES)


def load_reading_head(
    config: AnyReading,
    folder: Path,
    target: Any,
    dtype: torch.dtype,
    *,
    named: dict[str, Any] | None = None,
    tokenizer_sha256: str | None = None,
) -> AnyHead:
    """A trained head, ours or a published MSD, ViSpec or EAGLE one, on the target's device.

    Args:
        target: a `ReadTarget`.
        named: the recipe's section of the target, where there is a recipe.

    Raises:
        UserError: a file is missing, or the head was made for another target or with other settings.
    """
    _check_manifest(config, folder, target.config, named, tokenizer_sha256)
    shape = reading_shape(config, target.config)
    _check_shape(folder, shape)
    state = head_state(folder)
    _check_embedding(state.pop(_EMBEDDING, None), target.embedding, folder)
    ids = None
    if isinstance(config, Eagle3Config) and "d2t" in state:
        ids = state["d2t"] + torch.arange(len(state["d2t"]))
    # A file without d2t holds the whole vocabulary, whatever the recipe says.
    head = build_reading_head(config.model_copy(update={"draft_vocab_size": None}), target.config, draft_ids=ids)
    check_shapes(
        shapes_of(state), shapes_of(head.state_dict()), where=str(weights_file(folder)),
        what="the head does not fit this target and kind: ",
        cure="name the target and the settings that the head was trained with",
    )  # fmt: skip
    head.load_state_dict(state)
    return head.to(target.embedding.device, dtype)


def _check_shape(folder: Path, shape: LayerShape) -> None:
    """Ours say what they mirror, most of which is in no weight's shape; published configs but how positions turn."""
    if not (folder / CONFIG).is_file():
        return
    written = read_values(folder)
    if "zeros_before" not in written:
        rope = written.get("rope_parameters") or written.get("rope_scaling") or {}
        scaling = stretched(rope, written.get("max_position_embeddings"))
        if scaling != shape.rope_scaling:
            _refuse("its rotation (drafter.rope)", scaling or "plain", shape.rope_scaling or "plain", folder / CONFIG)
        return
    # Positions are decoding's choice, and these only say what positions of three rows would turn.
    axes = {name: shape.to_dict()[name] for name in ("mrope_section", "mrope_interleaved")}
    different = shape.differs_from(written | axes)
    if different is not None:
        _refuse(different[0], different[1], different[2], folder / CONFIG)


def _check_manifest(
    config: AnyReading, folder: Path, text: Any, named: dict[str, Any] | None, tokenizer: str | None
) -> None:
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        written = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"unreadable: {error}", where=str(path), cure="train the head again, or restore it") from error
    expected = {"method": config.kind, **written_settings(config), **_read_by(config, text)}
    found = {"method": written.get("method"), **(written.get("settings") or {}), **(written.get("reads") or {})}
    for name, value in expected.items():
        if name in found and name != "numbering" and found[name] != value:
            _refuse(name, found[name], value, path)
    made = written.get("target") or {}
    for name in ("path", "revision"):
        value, other = (named or {}).get(name), made.get(name)
        # A directory may have moved; what is not said is not compared.
        if None in (value, other) or Path(str(value)).is_dir() or Path(str(other)).is_dir():
            continue
        if value != other:
            _refuse(f"target.{name}", other, value, path)
    if None not in (tokenizer, written.get("tokenizer_sha256")) and tokenizer != written["tokenizer_sha256"]:
        _refuse("tokenizer_sha256", written["tokenizer_sha256"], tokenizer, path)


def _refuse(name: str, found: Any, expected: Any, path: Path) -> None:
    raise UserError(
        f"the head was made otherwise: {name} is {found}, expected {expected}", where=str(path),
        cure="name the target and the settings that the head was trained with, or train one for these",
    )  # fmt: skip


def _check_embedding(own: Tensor | None, target: Tensor, folder: Path) -> None:
    """Published heads carry a copy of the target's rows; what was trained beside other rows would draft badly."""
    if own is None:
        return
    rows = min(len(own), len(target))
    same_width = own.shape[1:] == target.shape[1:]
    if not same_width or (own[:rows].float() - target[:rows].float().cpu()).abs().max() > 1e-2:
        raise UserError(
            "the head brings embeddings that are not the target's", where=str(folder),
            cure="name the target that it was trained for",
        )  # fmt: skip
