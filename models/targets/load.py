"""Which target a recipe names, and how its weights come onto the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ...core.errors import UserError, did_you_mean, first_line
from ...core.section import torch_dtype
from ..hub import config_value, read_config
from ..llava import FAMILIES, TokenIds, assemble, llava_config
from ..qwen import QWEN_FAMILIES, QWEN_KINDS, qwen_config
from .causal import CausalTarget, CausalTargetConfig
from .language import LanguageTarget
from .llava import LlavaTarget
from .qwen import QwenTarget, QwenTargetConfig
from .section import TargetSection


class LlavaTargetConfig(TargetSection):
    """A LLaVA target: published weights, or a tiny one that a recipe spells out and trains itself."""

    # LLaVA-1.5, LLaVA-NeXT (1.6) or LLaVA-OneVision; the model_type of the weights' own config.
    kind: Literal["llava", "llava_next", "llava_onevision"]
    # Inline configs of a target that a `train` stage with `model: target` makes from nothing.
    language_model: dict[str, Any] | None = None
    vision_tower: dict[str, Any] | None = None
    # Of an inline tower; null: the family's, -2, or -1 in OneVision (whose tower has lost its last layer).
    vision_feature_layer: int | None = None
    # Whether it reads pictures in tiles, as the data must then cut them (aspect). false: the first tile alone, without
    # a newline, which is what TABED's released code feeds LLaVA-NeXT; null: as the family was trained.
    anyres: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> LlavaTargetConfig:
        inline = self.language_model is not None and self.vision_tower is not None
        if (self.path is None) == (not inline):
            raise ValueError("give path, or both language_model and vision_tower")
        if self.anyres and self.kind == "llava":
            raise ValueError("anyres is true, and LLaVA-1.5 reads one tile; use kind llava_next or llava_onevision")
        return self

    @property
    def reads_tiles(self) -> bool | None:
        """None: the family has one tile and nothing to choose."""
        return None if self.kind == "llava" else self.anyres is not False


# A recipe's `target` of the language tracks.
TargetConfig = Annotated[LlavaTargetConfig | QwenTargetConfig | CausalTargetConfig, Field(discriminator="kind")]


def target_config(config: TargetConfig, ids: TokenIds | None, *, network: bool) -> PreTrainedConfig:
    """The model config of a target; `ids` come from the processor where the target is inline."""
    if config.path is not None:
        return read_config(config.path, key="target.path", revision=config.revision, network=network)
    assert config.language_model is not None and ids is not None
    if isinstance(config, CausalTargetConfig):
        text = read_config(config.language_model, key="target.language_model")
        text.vocab_size = ids.vocab_size
        text.bos_token_id, text.eos_token_id, text.pad_token_id = ids.bos, ids.eos, ids.pad
        return text
    assert config.vision_tower is not None
    if isinstance(config, QwenTargetConfig):
        return qwen_config(config.kind, config.language_model, config.vision_tower, ids)
    vision = read_config(config.vision_tower, key="target.vision_tower")
    layer = config.vision_feature_layer
    if layer is None:
        layer = -1 if config.kind == "llava_onevision" else -2
    return llava_config(
        read_config(config.language_model, key="target.language_model"),
        vision,
        ids,
        vision_feature_layer=layer,
        family=config.kind,
    )


def build_target(config: TargetConfig, ids: TokenIds) -> PreTrainedModel:
    """A target to train: from its weights, or random from inline configs (the global generator decides)."""
    if config.path is not None:
        return target_weights(config, config.path, dtype=torch.float32)
    made = target_config(config, ids, network=False)
    if isinstance(config, QwenTargetConfig):
        return QWEN_FAMILIES[made.model_type][1](made).float()
    if isinstance(config, CausalTargetConfig):
        return AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    return assemble(made)


def load_target(
    config: TargetConfig,
    source: str | Path,
    *,
    num_token_ids: int,
    image_token_id: int | None,
    device: torch.device,
    tables_only: bool = False,
) -> LanguageTarget:
    """A frozen target from `source` (a trained stage's folder, or `config.path`).

    Args:
        tables_only: no layer and no tower is read or held. Embedding, LM head and config are all that is asked of a
            target whose states are on disk.
    """
    dtype = torch_dtype(config.dtype)
    model = target_weights(config, source, dtype=dtype, device_map=config.device_map, tables_only=tables_only)
    if config.device_map is None:
        cast(nn.Module, model).to(device)  # transformers' decorated `to` has lost its arguments' types
    num_token_ids, chunk = config.num_token_ids or num_token_ids, config.prefill_chunk
    if isinstance(config, QwenTargetConfig):
        return QwenTarget(model, num_token_ids=num_token_ids, resume=config.resume, prefill_chunk=chunk)
    if isinstance(config, CausalTargetConfig):
        return CausalTarget(model, num_token_ids=num_token_ids, prefill_chunk=chunk)
    return LlavaTarget(
        model,
        num_token_ids=num_token_ids,
        image_token_id=image_token_id,
        reads_tiles=config.reads_tiles,
        prefill_chunk=chunk,
    )


def target_weights(
    config: TargetConfig,
    source: str | Path,
    *,
    dtype: torch.dtype,
    device_map: str | None = None,
    tables_only: bool = False,
) -> PreTrainedModel:
    """The model of a target's kind, from published weights or a stage's folder. Raises `UserError` for another kind."""
    revision, key = (None if Path(source).is_dir() else config.revision), "target.path"
    held: dict[str, Any] = {"dtype": dtype, "device_map": device_map, "tables_only": tables_only}
    if isinstance(config, LlavaTargetConfig):
        return load_llava(source, revision=revision, key=key, kind=config.kind, **held)
    found = read_config(str(source), key=key, revision=revision).model_type
    if isinstance(config, QwenTargetConfig):
        if found not in QWEN_KINDS[config.kind]:
            kinds = [kind for kind, types in QWEN_KINDS.items() if found in types]
            raise UserError(
                f"{key}: {str(source)!r} is of model_type {found!r}, expected {' or '.join(QWEN_KINDS[config.kind])}",
                cure=f"write kind: {kinds[0]}" if kinds else did_you_mean(found, [*QWEN_FAMILIES]),
            )
        maker: Any = QWEN_FAMILIES[found][1]
    else:
        maker = AutoModelForCausalLM
    return load_weights(maker, source, revision=revision, key=key, **held)


def load_llava(
    source: str | Path,
    *,
    revision: str | None,
    dtype: torch.dtype | Literal["auto"],
    key: str,
    device_map: str | None = None,
    kind: str | None = None,
    whole: bool = False,
    tables_only: bool = False,
) -> PreTrainedModel:
    """A LLaVA of the family that its own config names.

    Args:
        dtype: auto: as it is stored.
        tables_only: as of `load_target`.
        kind: the family that is expected; None: any.
        whole: refuse weights that lack a tensor, where transformers draws a random one, or have one of another shape.

    Raises:
        UserError: the weights cannot be read, or are of another family.
    """
    found = read_config(str(source), key=key, revision=revision).model_type
    if found not in FAMILIES or kind not in (None, found):
        raise UserError(
            f"{key}: {str(source)!r} is of model_type {found!r}, expected {kind or ' or '.join(FAMILIES)}",
            cure=f"write kind: {found}" if found in FAMILIES else did_you_mean(found, FAMILIES),
        )
    maker = FAMILIES[found][1]
    held: dict[str, Any] = {"dtype": dtype, "device_map": device_map, "tables_only": tables_only}
    return load_weights(maker, source, revision=revision, key=key, whole=whole, **held)


# Tables that follow from the config: older checkpoints hold them.
_DERIVED = ("position_ids", "rotary_emb.inv_freq")


def load_weights(
    maker: Any,
    source: str | Path,
    *,
    revision: str | None,
    dtype: torch.dtype | Literal["auto"],
    key: str,
    device_map: str | None = None,
    tables_only: bool = False,
    whole: bool = False,
) -> PreTrainedModel:
    """What `maker` makes of a folder or Hub id, every tensor read: transformers draws a missing one at random.

    Args:
        maker: a class of transformers with `from_pretrained`.
        tables_only: as of `load_target`.
        whole: refuse tensors that the config has no place for, too.

    Raises:
        UserError: it cannot be read; or names a tensor that is missing or of another shape than the config's.
    """
    given: dict[str, Any] = {"revision": revision, "dtype": dtype, "device_map": device_map, "weights_only": True}
    given |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        found: Any
        if tables_only:
            found = _tables(maker, source, read_config(str(source), key=key, revision=revision), given)
        else:
            found = maker.from_pretrained(source, **given)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}: cannot load {str(source)!r}: {first_line(error)}", cure="check the name and the network"
        ) from error
    model, told = found
    problems = [f"{name} is {list(shape)}, expected {list(wanted)}" for name, shape, wanted in told["mismatched_keys"]]
    problems += [f"{name} is missing" for name in told["missing_keys"]]
    if whole:
        unknown = [name for name in told["unexpected_keys"] if not name.endswith(_DERIVED)]
        problems += [f"{name} is not part of this model" for name in unknown]
    if problems:
        raise UserError(
            f"{key}: model.safetensors does not fit its config.json: {min(problems)}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
            where=str(source), cure="the two do not belong together: restore the one that was changed",
        )  # fmt: skip
    return model


def _tables(maker: Any, source: str | Path, config: PreTrainedConfig, given: dict[str, Any]) -> Any:
    """The model without its layers; its config says how many it has."""
    text, vision = config.get_text_config(), config_value(config, "vision_config")
    layers, text.num_hidden_layers = text.num_hidden_layers, 0
    if vision is not None:
        setattr(vision, "num_hidden_layers" if config_value(vision, "depth") is None else "depth", 0)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every tensor that is left out
    try:
        model, told = maker.from_pretrained(source, config=config, **given)
    finally:
        logging.set_verbosity(before)
    model.config.get_text_config().num_hidden_layers = layers
    return model, told
