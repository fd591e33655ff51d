"""Where model configs and weights come from: a Hub id, a local directory, or an inline config.

Configs of the published models that recipes name are pinned as JSON in `configs/`, so that a recipe
can be checked at full size without a network; once weights are loaded, their own config wins. Heads are trained beside
a target's embedding, which is read here without loading the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from ..core.errors import UserError, did_you_mean, first_line
from ..core.files import read_json
from ..core.finite import check_module, check_weights
from ..core.json_types import JsonMapping, JsonObject
from ..core.pretrained import (
    INDEX,
    RESTORE,
    Index,
    check_all_read,
    check_quantised,
    reading_pretrained,
    reading_safetensors,
)
from .folders import PREFIX
from .inline import inline_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PINNED = Path(__file__).parent / "configs"

RECURS = "linear_attention"  # what transformers calls such a layer in `layer_types`
# What a model may be named by: a Hub id, a directory, or the config itself (tiny models that a recipe spells out).
ModelSource: TypeAlias = str | JsonObject


def recurrent_layers(text: PreTrainedConfig) -> tuple[bool, ...]:
    """Return for each layer of a text config whether it recurs (Qwen3.5's gated DeltaNet) and has no attention; empty
    where none recurs.
    """
    kinds = config_value(text, "layer_types") or ()
    return tuple(kind == RECURS for kind in kinds) if RECURS in kinds else ()


def num_deepstack(config: PreTrainedConfig) -> int:
    """First decoder layers after which visual states are added (Qwen3-VL); 0 in other families."""
    return len(config_value(config_value(config, "vision_config"), "deepstack_visual_indexes") or ())


def num_experts(text: PreTrainedConfig) -> int:
    """Experts of a layer, of a mixture of them; 0: it is none."""
    return int(config_value(text, "num_experts") or config_value(text, "num_local_experts") or 0)


def has_windows(text: PreTrainedConfig) -> bool:
    """Whether some layers of a text config see a window of positions and others all (Gemma 4)."""
    return "sliding_attention" in (config_value(text, "layer_types") or ())


def sees_window(values: JsonMapping) -> bool:
    """Whether some layers see a window of positions alone.

    Args:
        values: of transformers' text config, or of what a head's config.json says of its layer.
    """
    kinds = {*(values.get("layer_types") or ())}
    uses = values.get("sliding_window") is not None and values.get("use_sliding_window") is not False
    return bool(kinds - {"full_attention"}) or uses


def kv_shapes(text: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return the key-value heads of each layer of a text config, and a head's width: Gemma 4's layers differ."""
    count = text.num_hidden_layers
    if config_value(text, "global_head_dim") is not None:  # as transformers wrote it before 5.20
        shared = config_value(text, "num_global_key_value_heads") if text.attention_k_eq_v else None
        wide = shared or text.num_key_value_heads, text.global_head_dim
        usual = text.num_key_value_heads, text.head_dim
        return [wide if kind == "full_attention" else usual for kind in text.layer_types]
    if config_value(text, "is_heterogeneous", False):
        layers = text.per_layer_config
        return [(layers[n].num_key_value_heads, layers[n].head_dim) for n in range(count)]
    heads = config_value(text, "num_key_value_heads") or text.num_attention_heads
    return [(heads, config_value(text, "head_dim") or text.hidden_size // text.num_attention_heads)] * count


def usual_heads(text: PreTrainedConfig) -> tuple[int, int]:
    """Heads of keys and values, and the width of a head, of most of the layers: those that heads mirror."""
    return Counter(kv_shapes(text)).most_common(1)[0][0]


def own_layers(text: PreTrainedConfig) -> int:
    """Layers that have keys and values of their own: the last of Gemma 4's smaller models read an earlier one's."""
    return int(text.num_hidden_layers - (config_value(text, "num_kv_shared_layers") or 0))


def pinned_config(source: str) -> JsonObject | None:
    """The pinned config of a published model, by the last part of its Hub id, or None."""
    path = PINNED / f"{source.rstrip('/').split('/')[-1].lower()}.json"
    return read_json(path, JsonObject, hint="install draftsmith again") if path.is_file() else None


def read_config(
    source: ModelSource, *, key: str, revision: str | None = None, network: bool = True
) -> PreTrainedConfig:
    """The config of a model.

    Args:
        key: the recipe's key, for error messages.
        network: False reads pinned configs and local directories only (`dry_run`).
    """
    from transformers import AutoConfig

    if isinstance(source, dict):
        return inline_config(source, key)
    if Path(source).is_dir():
        path = str(Path(source) / "config.json")
        with reading_pretrained(source, "cannot read the config of", key=key, where=path, weights=False):
            return AutoConfig.from_pretrained(source)
    if not network:
        values = pinned_config(source)
        if values is None:
            known = sorted(p.stem for p in PINNED.glob("*.json"))
            raise UserError(
                f"{key}: no pinned config for {source!r}, and a dry run uses no network",
                key=key,
                hint="name a local directory, or a pinned model: " + did_you_mean(source.split("/")[-1], known),
            )
        values = dict(values)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    with reading_pretrained(source, "cannot read the config of", key=key, hint=_CURE):
        return AutoConfig.from_pretrained(source, revision=revision)


def load_language_model(source: str, *, key: str, revision: str | None) -> PreTrainedModel:
    """A causal language model in float32."""
    return _load("AutoModelForCausalLM", source, key=key, revision=revision)


def load_vision_tower(source: str, config: PreTrainedConfig, *, key: str) -> PreTrainedModel:
    """A vision tower in float32. A config of both CLIP towers is read for its vision half."""
    name = "CLIPVisionModel" if config.model_type == "clip_vision_model" else "AutoModel"
    return _load(name, source, key=key, revision=None)


def config_value(config: object, name: str, default: object = None) -> Any:
    """A value of a transformers config that not every family's config has."""
    return getattr(config, name, default)


def transformers_class(name: str) -> Any:
    """A class of transformers by its name: its code is imported when it is asked for."""
    import transformers

    return getattr(transformers, name)


def rope_of(text: PreTrainedConfig) -> JsonObject:
    """The rotation of a transformers text config, a copy of its `rope_parameters`; empty where it names none. Where
    kinds of layers have one each (Gemma 4), that of the layers that see all.
    """
    rope = dict(config_value(text, "rope_parameters") or {})
    return dict(rope["full_attention"]) if "full_attention" in rope else rope


def vision_half(config: PreTrainedConfig) -> PreTrainedConfig:
    """CLIP's Hub config holds a text and a vision half; a LLaVA needs the latter."""
    return config_value(config, "vision_config", config)


def _load(name: str, source: str, *, key: str, revision: str | None) -> PreTrainedModel:
    cls = transformers_class(name)
    with reading_pretrained(source, "cannot load", key=key, hint=_CURE):
        # safetensors where the repository has them; older files are read with weights_only, which runs no code.
        model, info = cls.from_pretrained(
            source, revision=revision, dtype=torch.float32, weights_only=True, output_loading_info=True
        )
    check_quantised(model, info, source)
    check_all_read(info, source)
    check_module(model, source)
    return model


_CURE = "check the name and the network, or download it once and give the local directory"


SINGLE = "model.safetensors"
# Of a plain language model, and of models with a vision tower as newer (Idefics' line apart) and older transformers
# write them.
_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)


_SCORES = ("lm_head.weight", "language_model.lm_head.weight")
_NORMS = tuple(name.replace("embed_tokens", "norm") for name in _NAMES)
_CALLED = {_NAMES: "token embedding", _SCORES: "LM head", _SCORES + _NAMES: "LM head", _NORMS: "final norm"}


def target_embedding(source: str | None, *, where: str, revision: str | None = None) -> Tensor:
    """[V,D] of a directory, or of a Hub id, of which only the file that holds it is fetched.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    return _table(source, _NAMES, where=where, revision=revision)


def target_lm_head(source: str | None, *, where: str, tied: bool) -> Tensor:
    """[V,D] that scores a target's tokens: the LM head that its files hold, else of tied tables the embedding.
    transformers keeps two stored tables apart, whatever the config says. Raises as `target_embedding`.
    """
    return _table(source, _SCORES + (_NAMES if tied else ()), where=where, revision=None)


def target_norm(source: str | None, *, where: str) -> Tensor:
    """[D], the weight of a target's final norm. Raises as `target_embedding`."""
    return _table(source, _NORMS, where=where, revision=None)


def _table(source: str | None, names: tuple[str, ...], *, where: str, revision: str | None) -> Tensor:
    """The tensor of one of these names."""
    what = _CALLED[names]
    if source is None:
        raise UserError(f"the target's {what} is needed, and its weights are not named", where=where,
                        hint="give the target's folder: --target")  # fmt: skip
    state, path = _some(source, names.__contains__, what, where=where, revision=revision)
    name = next((n for n in names if n in state), None)
    if name is None:
        raise UserError(f"no {what} among its tensors", where=str(path),
                        hint="give the target that the head was trained for")  # fmt: skip
    return state[name]


def tensors_under(prefix: str, source: str, what: str, *, key: str, revision: str | None = None) -> dict[str, Tensor]:
    """Tensors whose names begin with `prefix`, without it, of a directory or a Hub id, of which only the files that
    hold them are fetched; none: there are none.

    Args:
        what: they are, for a reader of errors.

    Raises:
        UserError: they cannot be read.
    """
    state, _ = _some(source, lambda name: name.startswith(prefix), what, key=key, revision=revision)
    return {name.removeprefix(prefix): value for name, value in state.items()}


def _some(
    source: str,
    wanted: Callable[[str], bool],
    what: str,
    *,
    revision: str | None,
    key: str | None = None,
    where: str | None = None,
) -> tuple[dict[str, Tensor], Path]:
    """The tensors whose names are wanted, and the last file that was read."""
    state, path = dict[str, Tensor](), Path(source)
    try:
        index = fetch_file(source, INDEX, revision)
        files = read_json(index, Index, hint=RESTORE).weight_map if index else {}
        for file in sorted({files[name] for name in files if wanted(name)}) if index else [SINGLE]:
            held = fetch_file(source, file, revision)
            if held is None:
                hint = RESTORE if index else "pickles of targets are not read; convert"
                raise UserError(f"{file} is missing", where=source, hint=hint)
            path = held
            with reading_safetensors(path), safe_open(path, "pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
            check_weights(found, path)
            state |= found
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the {what} of {source!r}: {first_line(error)}", key=key, where=where,
                        hint="check the name and the network, or give a directory") from error  # fmt: skip
    return state, path


def target_tower(source: str | None, *, where: str) -> dict[str, Tensor]:
    """The tower's tensors of a LLaVA in a directory or of a Hub id, named as in a tower without a model around it.

    Raises:
        UserError: they cannot be read.
    """
    if source is None:
        raise UserError("the target's tower is needed, and its weights are not named", where=where,
                        hint="give the target's folder: --target")  # fmt: skip
    sign = "vision_tower."
    held, _ = _some(source, lambda name: sign in name, "tower", where=where, revision=None)
    return {name.partition(sign)[2].removeprefix("vision_model."): value for name, value in held.items()}


def fetch_file(source: str, name: str, revision: str | None) -> Path | None:
    """A file of a directory, or of a Hub id (fetched, or cached); None: there is none.

    Raises:
        OSError, ValueError: the Hub cannot be asked.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except EntryNotFoundError:
        return None


def is_somewhere(place: str | None) -> bool:
    """Whether a name of weights is a directory here, comes with the package, or looks like a Hub id."""
    return place is not None and (Path(place).is_dir() or place.startswith(PREFIX) or place.count("/") == 1)
