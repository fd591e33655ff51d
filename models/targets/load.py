"""Loads the target that a recipe names, and puts its weights on the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import UserError, did_you_mean
from ...core.placement import check_spread, onto, spread
from ...core.section import torch_dtype
from ..hub import config_value, is_tied, load_pretrained, read_config, untie
from ..parts import TokenIds
from ..stored import resolved_dtype
from .language import LanguageTarget
from .parallel import check_ranks, parallel_plan
from .table import FAMILIES, TargetConfig, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.distributed import DistributedConfig


def load_weights(
    maker: Any,
    source: str | Path,
    *,
    revision: str | None,
    key: str,
    device: torch.device | None = None,
    device_map: str | None = None,
    offload: str | None = None,
    plan: DistributedConfig | None = None,
    tables_only: bool = False,
    attn_implementation: str = "auto",
    **settings: Any,
) -> PreTrainedModel:
    """`load_pretrained` of a class of transformers (`maker`), straight onto the devices.

    Args:
        device: where to, without a `device_map`; None: they stay on the CPU. The check that all are finite reads them
            once where they are then: 2 GB/s on one CPU core, nothing that shows on a GPU.
        device_map: accelerate's way to spread them over this node's GPUs; for a single rank.
        plan: how the ranks that hold it together cut it; all of them call. None: each holds all of it.
        settings: `dtype`, and `whole` of `load_pretrained`.

    Raises:
        UserError: as `load_pretrained`, or the GPUs do not hold what is spread over them.
    """
    section = key.removesuffix(".path")
    placed = onto(device) if device_map is None else spread(device_map, offload=offload, key=section)
    if plan is not None:
        placed = {"distributed_config": plan}
    if attn_implementation != "auto":
        placed = {**placed, "attn_implementation": attn_implementation}
    load = maker.from_pretrained
    if tables_only:
        load = partial(_tables, maker, read_config(str(source), key=key, revision=revision))
    model = load_pretrained(
        load, source, key=key, hint="check the name and the network", tables_only=tables_only, revision=revision,
        **placed, **settings,
    )  # fmt: skip
    if device_map is not None:
        check_spread(model, device_map, offload=offload, key=section)
    if is_tied(model.config) and not model.all_tied_weights_keys:  # the files hold two tables, which transformers keeps
        untie(model.config)
    return model


def _tables(maker: Any, config: PreTrainedConfig, source: str | Path, **arguments: Any) -> Any:
    """The model without its layers; its config says how many it has."""
    from transformers.utils import logging

    text, vision = config.get_text_config(), config_value(config, "vision_config")
    for part in (config, text):  # layers alone are quantised, and their kernels may not be installed here
        if config_value(part, "quantization_config") is not None:
            del part.quantization_config
    layers, text.num_hidden_layers = text.num_hidden_layers, 0
    if width := config_value(text, "hidden_size_per_layer_input"):  # Gemma 4's tables are of layers that are left out
        text.hidden_size_per_layer_input = 0
    if vision is not None:
        setattr(vision, "num_hidden_layers" if config_value(vision, "depth") is None else "depth", 0)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every tensor that is left out
    try:
        model, info = maker.from_pretrained(source, config=config, **arguments)
    finally:
        logging.set_verbosity(before)
    model.config.get_text_config().num_hidden_layers = layers
    if width:
        model.config.get_text_config().hidden_size_per_layer_input = width
    return model, info


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
        num_token_ids: of the target's tokenizer; ids from here on, rows that only pad the tables, are never emitted.
        tables_only: no layer and no tower is read or held. Embedding, LM head and config are all that is asked of a
            target whose states are on disk.

    Raises:
        UserError: the section's own `num_token_ids` is another, or as `load_weights`.
    """
    config.check_token_ids(num_token_ids, str(source))
    dtype = resolved_dtype(config, source, device, key=key)
    held: dict[str, Any] = {}
    if not tables_only:  # the tables fit on each rank's device
        held = {name: dict(config)[name] for name in ("device_map", "offload", "tensor_parallel_size")}
    model = target_weights(
        config, source, key=f"{key}.path", dtype=torch_dtype(dtype), device=device, tables_only=tables_only,
        attn_implementation=config.attn_implementation, **held,
    )  # fmt: skip
    return config.target(model, num_token_ids=num_token_ids, image_token_id=image_token_id)


def target_weights(
    config: TargetConfig, source: str | Path, *, key: str = "target.path", tensor_parallel_size: int = 1, **held: Any
) -> PreTrainedModel:
    """The model of a target's kind, from published weights or a stage's folder, `held` as of `load_weights`. Raises
    `UserError` for another kind.
    """
    revision = None if Path(source).is_dir() else config.revision
    stored = read_config(str(source), key=key, revision=revision)
    check_kind(config, stored.model_type, str(source))
    if tensor_parallel_size > 1:
        cut = f"{key.removesuffix('.path')}.tensor_parallel_size"
        check_ranks(tensor_parallel_size, key=cut)
        held["plan"] = parallel_plan(stored, tensor_parallel_size, str(source), key=cut)
    return load_weights(config.record_of(stored).class_of(stored), source, revision=revision, key=key, **held)


def check_kind(config: TargetConfig, model_type: str, source: str) -> None:
    """Raises `UserError` for weights of another kind than the recipe names."""
    families = config.families_of_kind
    if model_type in families or not families or config.reads_text_alone:
        return
    known = [name for name, tower in FAMILIES if not tower]
    hint = f"write kind: {FAMILIES[model_type, ''].kind}" if model_type in known else did_you_mean(model_type, known)
    problem = f"target.path: {source!r} is of model_type {model_type!r}, expected {' or '.join(families)}"
    raise UserError(problem, key="target.path", hint=config.lookalikes.get(model_type, hint))


def load_lvlm(source: str | Path, *, revision: str | None, key: str, **held: Any) -> PreTrainedModel:
    """A draft LVLM, of the family that its own config names, `held` as of `load_weights`. Raises `UserError` for a
    family that reads other pictures.
    """
    config = read_config(str(source), key=key, revision=revision)
    if not (family := family_of(config)).shares_pictures:
        known = [name for (name, _), family in FAMILIES.items() if family.shares_pictures]
        problem = f"{key}: {str(source)!r} is of model_type {config.model_type!r}, expected {' or '.join(known)}"
        raise UserError(problem, key=key, hint=did_you_mean(config.model_type, known))
    return load_weights(family.class_of(config), source, revision=revision, key=key, **held)
