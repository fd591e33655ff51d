"""How a model's weights come onto the device, whole or spread, and are held against its config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...core.errors import UserError
from ...core.finite import check_module
from ...core.placement import check_spread, onto, spread
from ...core.pretrained import check_quantised, reading_pretrained
from ..hub import config_value, read_config
from ..parts import is_tied

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.distributed import DistributedConfig

# Tables that follow from the config: older checkpoints hold them.
_DERIVED = ("position_ids", "rotary_emb.inv_freq")


def load_weights(
    maker: Any,
    source: str | Path,
    *,
    revision: str | None,
    dtype: torch.dtype | Literal["auto"],
    key: str,
    device: torch.device | None = None,
    device_map: str | None = None,
    offload: str | None = None,
    plan: DistributedConfig | None = None,
    tables_only: bool = False,
    attn_implementation: str = "auto",
    whole: bool = False,
) -> PreTrainedModel:
    """What `maker` makes of a folder or Hub id, every tensor read: transformers draws a missing one at random.

    Args:
        maker: a class of transformers with `from_pretrained`.
        device: where to, without a `device_map`; None: they stay on the CPU. A GPU gets them straight from the file.
            The check that all are finite reads them once where they are then: 2 GB/s on one CPU core, nothing that
            shows on a GPU.
        device_map: accelerate's way to spread them over this node's GPUs; for a single rank.
        offload: as of `core.placement.spread`.
        plan: how the ranks that hold it together cut it; all of them call. None: each holds all of it.
        tables_only: as of `load_target`.
        attn_implementation: of the language model and the tower; auto: as transformers chooses.
        whole: refuse tensors that the config has no place for, too.

    Raises:
        UserError: it cannot be read; or names a tensor that is missing, of another shape than the config's, or not
            finite; or the GPUs do not hold what is spread over them.
    """
    section = key.removesuffix(".path")
    placed = onto(device) if device_map is None else spread(device_map, offload=offload, key=section)
    if plan is not None:
        placed = {"distributed_config": plan}
    arguments: dict[str, Any] = {"revision": revision, "dtype": dtype, "weights_only": True, **placed}
    if attn_implementation != "auto":
        arguments["attn_implementation"] = attn_implementation
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    loaded: Any
    with reading_pretrained(source, "cannot load", key=key, hint="check the name and the network"):
        if tables_only:
            loaded = _tables(maker, source, read_config(str(source), key=key, revision=revision), arguments)
        else:
            loaded = maker.from_pretrained(source, **arguments)
    model, info = loaded
    if not tables_only:  # embedding and LM head are not quantised
        check_quantised(model, info, source, key=key)
    problems = [f"{name} is {list(shape)}, expected {list(wanted)}" for name, shape, wanted in info["mismatched_keys"]]
    problems += [f"{name} is missing" for name in info["missing_keys"]]
    if whole:
        unknown = [name for name in info["unexpected_keys"] if not name.endswith(_DERIVED)]
        problems += [f"{name} is not part of this model" for name in unknown]
    if problems:
        raise UserError(
            f"{key}: model.safetensors does not fit its config.json: {min(problems)}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
            key=key, where=str(source), hint="the two do not belong together: restore the one that was changed",
        )  # fmt: skip
    if device_map is not None:
        check_spread(model, device_map, offload=offload, key=section)
    check_module(model, source)
    if is_tied(model.config) and not model.all_tied_weights_keys:  # the files hold two tables, which transformers keeps
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    return model


def _tables(maker: Any, source: str | Path, config: PreTrainedConfig, arguments: dict[str, Any]) -> Any:
    """The model without its layers; its config says how many it has."""
    from transformers.utils import logging

    text, vision = config.get_text_config(), config_value(config, "vision_config")
    for part in (config, text):  # layers alone are quantised, and their kernels may not be installed here
        if config_value(part, "quantization_config") is not None:
            del part.quantization_config
    layers, text.num_hidden_layers = text.num_hidden_layers, 0
    if own := config_value(text, "hidden_size_per_layer_input"):  # Gemma 4's tables are of layers that are left out
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
    if own:
        model.config.get_text_config().hidden_size_per_layer_input = own
    return model, info
