"""Model configs that a recipe spells out, checked when the recipe loads: transformers keeps a misspelt key and reads
none, only warns of the keys of rotary positions (`RotaryEmbeddingConfigMixin.validate_rope`), and meets a wrong size in
the middle of a run.
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from ..core.errors import Refused, UserError, did_you_mean, first_line
from ..core.json_types import JsonObject, object_at, text_at
from ..core.pretrained import MOST_SIZES
from ..core.secrets import shortened

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Of models to train our own arithmetic wants one number for these, where transformers takes lists, too.
_WHOLE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
_LARGEST = 1 << 31
# Of numbers with a fraction: (above or from, up to).
_RANGES = {
    "initializer_range": (0.0, 10.0), "initializer_factor": (0.0, 1e6), "rope_theta": (1.0, 1e12),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (0.0, 1.0)),
    **dict.fromkeys(("attention_dropout", "dropout_rate", "hidden_dropout_prob"), (0.0, 1.0)),
}  # fmt: skip


# Keys of configs from before transformers 5, which reads them into `rope_parameters` and `dtype`.
_EARLIER = {
    "rope_parameters": ("rope_theta", "rope_scaling"), "dtype": ("torch_dtype",),
    "per_layer_config": ("global_head_dim", "num_global_key_value_heads"),  # Gemma 4's, which it still reads
}  # fmt: skip
_ROPES = ("rope_parameters", "rope_scaling")
_EVERY_ROPE = {"rope_type", "type", "rope_theta"}
# rope_type -> what transformers' modeling_rope_utils reads beside these.
ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "axial": set(),  # of towers: a coordinate for each half of a head
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"},
    "longrope": {"short_factor", "long_factor", "original_max_position_embeddings", "attention_factor", "factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "proportional": {"partial_rotary_factor", "factor"},
}  # fmt: skip
_PART = "partial_rotary_factor"


def _checked(values: JsonObject, *, uneven: bool = False) -> JsonObject:
    _check_whole(values)
    new_config(values, uneven=uneven)
    return values


def _checked_part(values: JsonObject) -> JsonObject:
    _check_whole(values)
    check_sizes(values)
    return values


def _checked_t5(values: JsonObject) -> JsonObject:
    if values.get("model_type", "t5") != "t5":
        raise Refused("model_type", f"{values['model_type']!r} is no text encoder here", "leave it out, or write t5")
    new_config({**values, "model_type": "t5"})
    return values


# A config in a recipe, with its model_type.
InlineModel = Annotated[JsonObject, AfterValidator(_checked)]
# That of a family whose layers may differ in their sizes.
UnevenModel = Annotated[JsonObject, AfterValidator(functools.partial(_checked, uneven=True))]
# Part of a model whose family says what it is: a tower of Qwen-VL.
InlinePart = Annotated[JsonObject, AfterValidator(_checked_part)]
# That of a T5 encoder, whose model_type need not be said.
InlineT5 = Annotated[JsonObject, AfterValidator(_checked_t5)]


def inline_config(values: JsonObject, key: str, *, uneven: bool = False) -> PreTrainedConfig:
    """The config of `new_config`; a refusal is a `UserError` that names the recipe's key."""
    try:
        return new_config(values, uneven=uneven)
    except Refused as refused:
        where = f"{key}.{refused.key}".rstrip(".")
        raise UserError(f"{where}: {refused.problem}", key=key, hint=refused.hint) from refused


def new_config(values: JsonObject, *, uneven: bool = False) -> PreTrainedConfig:
    """transformers' config of what a recipe spells out. Raises `Refused` for keys and values that it cannot mean.

    Args:
        uneven: its layers may differ in their sizes; who asks for it reads them layer by layer.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    values = dict(values)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise Refused("", "an inline config needs model_type", "add model_type: llama or clip_vision_model")
    if text_at(model_type) not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), 3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "llama and clip_vision_model, for example"
        raise Refused("model_type", f"transformers knows no model {shortened(str(model_type), 60)!r}", hint)
    check_sizes(values)
    _check_shape(values)
    _check_activation(values)
    check_known(values, CONFIG_MAPPING[model_type])
    config = _made(functools.partial(AutoConfig.for_model, model_type), values)
    layers = [part for part in _parts(config) if _value(part, "is_heterogeneous")]
    if layers and not uneven:
        problem = f"the layers of {model_type} differ in their sizes, which nothing here reads"
        raise Refused("model_type", problem, "llama and clip_vision_model, for example")
    for part in layers:
        for number in range(part.num_hidden_layers):
            _check_shape(part.per_layer_config[number])
    if not layers:
        _check_shape(config)
    return config


def _check_activation(values: JsonObject) -> None:
    if (activation := values.get("hidden_act")) is None:
        return
    from transformers.activations import ACT2FN  # brings the code of models

    if str(activation) not in ACT2FN:
        problem = f"transformers knows no activation {shortened(str(activation), 60)!r}"
        raise Refused("hidden_act", problem, did_you_mean(str(activation), ACT2FN))


def _made(make: Callable[..., PreTrainedConfig], values: JsonObject) -> PreTrainedConfig:
    try:
        # Of a copy: transformers writes what it fills up into the dicts that it is given.
        return make(**copy.deepcopy(values))
    except Exception as error:  # of transformers' own checks, and of what its arithmetic meets
        named, told = _told(error)
        raise Refused(named, f"transformers refuses it: {told}", "fix the size or type") from error


def check_part(values: JsonObject, config_class: type[PreTrainedConfig], key: str) -> None:
    """Raises `Refused` for what a part of a model cannot mean whose class follows from the family.

    Args:
        values: as the recipe spells them; `model_type` may be left out.
        key: of the part in its section.
    """
    named, own = values.get("model_type", config_class.model_type), config_class.model_type
    if named != own:
        problem = f"should be {own}, and is {shortened(str(named), 60)!r}"
        raise Refused(f"{key}.model_type", problem, f"leave it out, or write {own}")
    values = {name: value for name, value in values.items() if name != "model_type"}
    try:
        _check_activation(values)
        check_known(values, config_class)
        _made(config_class, values)
    except Refused as refused:
        raise refused.under(key) from refused


def check_known(values: JsonObject, config_class: type[PreTrainedConfig], key: str = "") -> None:
    """Raises `Refused` for keys that nothing reads, at every level.

    Before the config is made: transformers tells a misspelt key by what does not go together without it.

    Args:
        values: of a config, or of a part of one, as the recipe spells them.
        key: of `values`, where they are inside a config.
    """
    try:
        defaults = config_class()
    except Exception as error:  # some classes of transformers have no defaults that go together
        problem = f"transformers makes no {config_class.model_type} from its defaults: {first_line(error)}"
        raise Refused(f"{key}model_type", problem, "llama and clip_vision_model, for example") from error
    rope = dict(defaults.to_dict().get("rope_parameters") or {})
    known = {*defaults.to_dict(), *defaults.attribute_map, "model_type"}
    known |= {earlier for name, names in _EARLIER.items() if name in known for earlier in names}
    known |= {_PART} & rope.keys()
    for name, value in values.items():
        if name not in known:
            problem = f"a config of model_type {config_class.model_type} has no such key"
            raise Refused(f"{key}{name}", problem, did_you_mean(name, known))
        inner, part = object_at(value), config_class.sub_configs.get(name)
        if inner is not None and part is not None:
            check_known(inner, _class_of(inner, part, f"{key}{name}"), f"{key}{name}.")
    _check_rope(values, defaults, key)


def _class_of(values: JsonObject, part: Any, key: str) -> Any:
    """Return a part's config class, by its own model_type or its family's. Raises `Refused` where neither says it."""
    from transformers import CONFIG_MAPPING

    if (named := text_at(values, "model_type")) is not None and named in CONFIG_MAPPING:
        return CONFIG_MAPPING[named]
    if not hasattr(part, "sub_configs"):  # transformers' AutoConfig, which stands for any
        problem = f"is {values.get('model_type')!r}, and no model of transformers"
        raise Refused(f"{key}.model_type", problem, "write llama, for example")
    return part


def _check_rope(values: JsonObject, defaults: PreTrainedConfig, key: str) -> None:
    """Raises `Refused` for rotary positions that transformers would read otherwise than they are spelt."""
    ropes = [name for name in _ROPES if object_at(values, name) is not None]
    if len(ropes) == 2:
        raise Refused(f"{key}rope_scaling", "stands beside rope_parameters, which nothing reads then", "merge the two")
    for name in ropes:
        rope = values[name]
        inside, outside = rope.get("rope_theta"), values.get("rope_theta")
        if any(object_at(value) is not None for value in rope.values()):  # one rotation for each type of layer
            layers = [*map(str, values.get("layer_types") or getattr(defaults, "layer_types", None) or ())]
            for layer, one in rope.items():
                if layer not in layers:
                    problem = f"a config of model_type {defaults.model_type} has no such type of layers"
                    raise Refused(f"{key}{name}.{layer}", problem, did_you_mean(str(layer), layers))
                _check_keys(object_at(one) or {}, defaults, f"{key}{name}.{layer}.")
        else:
            _check_keys(rope, defaults, f"{key}{name}.")
        if None not in (inside, outside) and inside != outside:
            raise Refused(f"{key}rope_theta", f"{outside} here, and {inside} in {name}", "leave one of them out")


def _check_keys(rope: JsonObject, defaults: PreTrainedConfig, key: str) -> None:
    own = {*(type(defaults).ignore_keys_at_rope_validation or ())}  # of this family alone
    own |= {_PART} & (defaults.to_dict().get("rope_parameters") or {}).keys()
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = ROPE_KEYS | ({"mrope": set()} if "mrope_section" in own else {})  # Qwen-VL's earlier name of its default
    if text_at(kind) is None or kind not in keys:
        problem = f"transformers knows no rotation {shortened(str(kind), 40)!r}"
        raise Refused(f"{key}rope_type", problem, did_you_mean(str(kind), ROPE_KEYS))
    known = _EVERY_ROPE | keys[kind] | own
    of_any = set().union(known, *ROPE_KEYS.values())
    for name in sorted(rope, key=lambda name: name in of_any):  # a misspelt rope_type before what its default lacks
        if name not in known:
            problem = f"positions of rope_type {kind} (model_type {defaults.model_type}) have no such key"
            raise Refused(f"{key}{name}", problem, did_you_mean(str(name), known))


def _check_whole(values: JsonObject) -> None:
    for name in _WHOLE:
        if name in values and type(values[name]) is not int:
            raise Refused(
                name, f"should be a whole number, and is {shortened(str(values[name]), 40)!r}", "write a number"
            )


def check_sizes(values: JsonObject, key: str = "") -> None:
    """Raises `Refused` for numbers that no model has; what is missing or of another type is for transformers to say."""
    for name, value in values.items():
        if (inner := object_at(value)) is not None:
            check_sizes(inner, f"{key}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            low, high = (1, MOST_SIZES[name]) if name in MOST_SIZES else _RANGES.get(name, (-_LARGEST, _LARGEST))
            if not low <= value <= high:
                raise Refused(f"{key}{name}", f"should be {low:g} to {high:,g}, and is {value:g}", "write another")


def _check_shape(config: object) -> None:
    """Raises `Refused` for sizes that do not go together.

    Args:
        config: as the recipe spells it, or as transformers fills it up, which lets some of these through.
    """
    for part in _parts(config):
        width, heads = _count(part, "hidden_size"), _count(part, "num_attention_heads")
        groups, side = _count(part, "num_key_value_heads"), _count(part, "head_dim")
        if not side and width and heads and width % heads:
            raise Refused("hidden_size", f"{width} is no multiple of num_attention_heads, {heads}", "change one")
        if heads and groups and heads % groups:
            raise Refused("num_key_value_heads", f"{heads} attention heads are no multiple of {groups}", "change one")
        side = side or (width // heads if width and heads else None)
        if side and side % 2 and _value(part, "rope_parameters") is not None:
            problem = f"a head of {side} cannot be rotated: rotary positions turn pairs"
            raise Refused("hidden_size", problem, "write an even multiple of num_attention_heads, or head_dim")
        image, patch = _count(part, "image_size"), _count(part, "patch_size")
        if image and patch and patch > image:
            raise Refused("patch_size", f"{patch} is more than image_size, {image}", "write a part of image_size")


@contextmanager
def building(key: str) -> Iterator[None]:
    """What a library finds wrong with sizes while it builds a model on the meta device becomes a `UserError`.

    Args:
        key: of the recipe, that the sizes are of.
    """
    try:
        yield
    except UserError as error:
        if error.key or error.where:
            raise
        raise UserError(error.problem, key=key, hint=error.hint) from error
    except Refused as refused:
        raise UserError(f"{key}.{refused.key}: {refused.problem}", key=key, hint=refused.hint) from refused
    except Exception as error:  # their arithmetic raises anything: ZeroDivisionError, TypeError, errors of their own
        named, told = _told(error)
        where = f"{key}.{named}".rstrip(".")
        raise UserError(f"{where} cannot be built: {told}", key=where, hint="fix its sizes") from error


def _told(error: Exception) -> tuple[str, str]:
    """The field that another library's error names, or nothing, and its message on one line."""
    told = " ".join(str(error).split())
    field = re.search(r"field '(\w+)'", told)
    told = re.sub(r"^.*?(?=Field '|The )", "", told)[:300]
    return (field[1] if field else ""), f"{type(error).__name__}: {told}" if " " not in told else told


def _parts(config: object) -> tuple[Any, ...]:
    return config, _value(config, "text_config"), _value(config, "vision_config")


def _value(config: object, name: str) -> object:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _count(config: object, name: str) -> int | None:
    """A whole number; what is of another type is for transformers to say."""
    return value if type(value := _value(config, name)) is int else None
