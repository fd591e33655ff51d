"""Which target a recipe names, and how its weights come onto the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field

from ...core.errors import UserError, did_you_mean
from ...core.import_paths import OrImported
from ...core.section import torch_dtype
from ..hub import read_config
from ..parts import TokenIds
from ..stored import resolved_dtype
from .language import LanguageTarget
from .loading import load_weights
from .parallel import check_ranks, parallel_plan
from .section import TargetSection
from .table import FAMILIES, LANGUAGE_TARGETS, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# A recipe's `target` of the language tracks.
TargetConfig = Annotated[LANGUAGE_TARGETS, Field(discriminator="kind"), OrImported(TargetSection)]


def target_config(config: TargetConfig, ids: TokenIds | None, *, network: bool) -> PreTrainedConfig:
    """The model config of a target; `ids` come from the processor where the target is inline."""
    if config.path is not None:
        return read_config(config.path, key="target.path", revision=config.revision, network=network)
    assert ids is not None
    return config.inline_config(ids)


def build_target(config: TargetConfig, ids: TokenIds) -> PreTrainedModel:
    """A target to train: from its weights, or random from inline configs (the global generator decides)."""
    if config.path is not None:
        return target_weights(config, config.path, dtype=torch.float32)
    return config.new(config.inline_config(ids))


def load_target(
    config: TargetConfig,
    source: str | Path,
    *,
    num_token_ids: int,
    image_token_id: int | None,
    device: torch.device,
    tables_only: bool = False,
    key: str = "target",
) -> LanguageTarget:
    """A frozen target from `source` (a trained stage's folder, or `config.path`).

    Args:
        key: of `config` in the recipe, for messages.
        num_token_ids: of the target's tokenizer; ids from here on, rows that only pad the tables, are never emitted.
        tables_only: no layer and no tower is read or held. Embedding, LM head and config are all that is asked of a
            target whose states are on disk.

    Raises:
        UserError: the section's own `num_token_ids` is another, the weights cannot be read, or do not fit where its
            device map would spread them.
    """
    config.check_token_ids(num_token_ids, str(source))
    dtype = resolved_dtype(config, source, device, key=key)
    held: dict[str, Any] = {"device": device, "tables_only": tables_only, "key": f"{key}.path"}
    held["attn_implementation"] = config.attn_implementation
    if not tables_only:  # the tables fit on each rank's device
        held |= {"device_map": config.device_map, "offload": config.offload}
        held["tensor_parallel_size"] = config.tensor_parallel_size
    model = target_weights(config, source, dtype=torch_dtype(dtype), **held)
    return config.target(model, num_token_ids=num_token_ids, image_token_id=image_token_id)


def target_weights(
    config: TargetConfig, source: str | Path, *, key: str = "target.path", tensor_parallel_size: int = 1, **held: Any
) -> PreTrainedModel:
    """The model of a target's kind, from published weights or a stage's folder. Raises `UserError` for another kind.

    Args:
        held: as of `load_weights`.
    """
    revision = None if Path(source).is_dir() else config.revision
    stored = read_config(str(source), key=key, revision=revision)
    check_kind(config, stored.model_type, str(source))
    if tensor_parallel_size > 1:
        cut = f"{key.removesuffix('.path')}.tensor_parallel_size"
        check_ranks(tensor_parallel_size, key=cut)
        held["plan"] = parallel_plan(stored, tensor_parallel_size, str(source), key=cut)
    return load_weights(config.model_class(stored.model_type, str(source)), source, revision=revision, key=key, **held)


def check_kind(config: TargetConfig, model_type: str, source: str) -> None:
    """Raises `UserError` for weights of another kind than the recipe names."""
    own = config.own_families
    if model_type in own or not own or config.reads_text_alone:
        return
    known = [name for name, tower in FAMILIES if not tower]
    hint = f"write kind: {FAMILIES[model_type, ''].kind}" if model_type in known else did_you_mean(model_type, known)
    raise UserError(
        f"target.path: {source!r} is of model_type {model_type!r}, expected {' or '.join(own)}",
        key="target.path",
        hint=config.lookalikes.get(model_type, hint),
    )


def load_lvlm(
    source: str | Path, *, revision: str | None, dtype: torch.dtype | Literal["auto"], key: str, **held: Any
) -> PreTrainedModel:
    """A draft LVLM, of the family that its own config names.

    Args:
        dtype: auto: as it is stored.
        held: as of `load_weights`.

    Raises:
        UserError: the weights cannot be read, or are of a family that reads other pictures.
    """
    config = read_config(str(source), key=key, revision=revision)
    if not (family := family_of(config)).shares_pictures:
        known = [name for (name, _), family in FAMILIES.items() if family.shares_pictures]
        raise UserError(
            f"{key}: {str(source)!r} is of model_type {config.model_type!r}, expected {' or '.join(known)}",
            key=key,
            hint=did_you_mean(config.model_type, known),
        )
    return load_weights(family.class_of(config), source, revision=revision, dtype=dtype, key=key, **held)
