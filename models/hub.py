"""Model configs and what they say, and models, of a Hub id, a local directory or an inline config.

Configs of the published models that recipes name are pinned as JSON in `configs/`, so that a recipe
can be checked at full size without a network; once weights are loaded, their own config wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core.errors import UserError, did_you_mean
from ..core.files import read_json
from ..core.finite import check_module
from ..core.json_types import JsonMapping, JsonObject
from ..core.pretrained import Checkpoint, check_all_read, check_quantised, reading_pretrained
from .folders import PREFIX
from .inline import inline_config
from .stored import holds_two_tables

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PINNED = Path(__file__).parent / "configs"

_CURE = "check the name and the network, or download it once and give the local directory"
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
    """Whether some layers see a window of positions alone, by the values of a text config or a head's config.json."""
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


def pinned_config(source: str) -> JsonObject | None:
    """The pinned config of a published model, by the last part of its Hub id, or None."""
    path = PINNED / f"{source.rstrip('/').split('/')[-1].lower()}.json"
    return read_json(path, JsonObject, hint="install draftsmith again") if path.is_file() else None


def read_config(
    source: ModelSource, *, key: str, revision: str | None = None, network: bool = True
) -> PreTrainedConfig:
    """The config of a model; `network` False reads pinned configs and local directories only (a dry run)."""
    from transformers import AutoConfig

    if isinstance(source, dict):
        return inline_config(source, key)
    if Path(source).is_dir():
        path = str(Path(source) / "config.json")
        with reading_pretrained(source, "cannot read the config of", key=key, where=path, weights=False):
            config = AutoConfig.from_pretrained(source)
        if is_tied(config) and holds_two_tables(source):
            untie(config)
        return config
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
        with reading_pretrained(source, "cannot read the config of", key=key, weights=False):
            return AutoConfig.for_model(values.pop("model_type"), **values)
    with reading_pretrained(source, "cannot read the config of", key=key, hint=_CURE):
        return AutoConfig.from_pretrained(source, revision=revision)


def config_value(config: object, name: str, default: object = None) -> Any:
    """A value of a transformers config that not every family's config has."""
    return getattr(config, name, default)


def transformers_class(name: str) -> Any:
    """A class of transformers by its name: its code is imported when it is asked for."""
    import transformers

    return getattr(transformers, name)


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether embedding and LM head are one matrix; Qwen-VL's text configs leave that to the whole one."""
    whole = config_value(config, "tie_word_embeddings", False)
    return bool(config_value(config.get_text_config(), "tie_word_embeddings", whole))


def untie(config: PreTrainedConfig) -> None:
    """Let a config say that embedding and LM head are two matrices."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def rope_of(text: PreTrainedConfig) -> JsonObject:
    """The rotation of a transformers text config, a copy of its `rope_parameters`; empty where it names none. Where
    kinds of layers have one each (Gemma 4), that of the layers that see all.
    """
    rope = dict(config_value(text, "rope_parameters") or {})
    return dict(rope["full_attention"]) if "full_attention" in rope else rope


def load_pretrained(
    load: Callable[..., Any], source: str | Path, *, key: str | None = None, hint: str = _CURE, whole: bool = False,
    tables_only: bool = False, **arguments: Any,
) -> Any:  # fmt: skip
    """A model of a folder or Hub id, every tensor read and finite; pickles are read with weights_only: no code runs.

    Args:
        load: a `from_pretrained` of transformers, which takes the other `arguments`.
        tables_only: layers, which alone are quantised, are left out.

    Raises:
        UserError: it cannot be read, is quantised by a method that is not applied, or as `check_all_read`.
    """
    arguments |= {"weights_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading_pretrained(source, "cannot load", key=key, hint=hint):
        Checkpoint(source, arguments.get("revision"), key=key).refuse_two()
        model, info = load(source, **arguments)
    if not tables_only:
        check_quantised(model, info, source, key=key)
    check_all_read(info, source, key=key, whole=whole, model=None if tables_only else model)
    check_module(model, source)
    return model


def is_somewhere(place: str | None) -> bool:
    """Whether a name of weights is a directory here, comes with the package, or looks like a Hub id."""
    return place is not None and (Path(place).is_dir() or place.startswith(PREFIX) or place.count("/") == 1)
