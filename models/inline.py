"""Model configs that a recipe spells out, checked when the recipe loads: transformers keeps a misspelt key and reads
none, only warns of the keys of rotary positions, and meets a wrong size in the middle of a run.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from ..core.errors import Refused, UserError, did_you_mean, first_line, nearest, shown_value
from ..core.json_types import JsonObject, object_at, text_at, walk
from ..core.pretrained import MOST_SIZES

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
_COUNTS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "image_size", "patch_size")
_PART = "partial_rotary_factor"
_EXAMPLES = "llama and clip_vision_model, for example"


def _checked(values: JsonObject, *, uneven: bool = False, model_type: str | None = None) -> JsonObject:
    new_config(values, uneven=uneven, model_type=model_type)
    return values


# A config in a recipe, with its model_type.
InlineModel = Annotated[JsonObject, AfterValidator(_checked)]
# That of a family whose layers may differ in their sizes.
UnevenModel = Annotated[JsonObject, AfterValidator(functools.partial(_checked, uneven=True))]
# That of a T5 encoder, whose model_type need not be said.
InlineT5 = Annotated[JsonObject, AfterValidator(functools.partial(_checked, model_type="t5"))]


def inline_config(values: JsonObject, key: str, *, uneven: bool = False) -> PreTrainedConfig:
    """The config of `new_config`; a refusal is a `UserError` that names the recipe's key."""
    with building(key):
        return new_config(values, uneven=uneven)


def new_config(values: JsonObject, *, uneven: bool = False, model_type: str | None = None) -> PreTrainedConfig:
    """transformers' config of what a recipe spells out. Raises `Refused` for keys and values that it cannot mean.

    Args:
        uneven: its layers may differ in their sizes; who asks for it reads them layer by layer.
        model_type: the only one that it may have, and then need not say.
    """
    from transformers import CONFIG_MAPPING

    named = values.get("model_type", model_type)
    if named is None:
        raise Refused("", "an inline config needs model_type", "add model_type: llama or clip_vision_model")
    if text_at(named) not in CONFIG_MAPPING or model_type not in (None, named):
        near = nearest(str(named), list(CONFIG_MAPPING) if model_type is None else [model_type])
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"write {model_type or _EXAMPLES}"
        raise Refused("model_type", f"transformers knows no model {shown_value(named)!r} here", hint)
    return made(values, CONFIG_MAPPING[named], uneven=uneven)


def made(values: JsonObject, config_class: type[PreTrainedConfig], *, uneven: bool = False) -> PreTrainedConfig:
    """The same of a part of a model whose class follows from the family."""
    named = values.get("model_type", config_class.model_type)
    if named != config_class.model_type:
        problem = f"should be {config_class.model_type}, and is {shown_value(named)!r}"
        raise Refused("model_type", problem, "leave it out, or write that")
    values = {name: value for name, value in values.items() if name != "model_type"}
    for name in _WHOLE:
        if name in values and type(values[name]) is not int:
            problem = f"should be a whole number, and is {shown_value(values[name])}"
            raise Refused(name, problem, "write a number")
    check_sizes(values)
    _check_shape(values)
    if (activation := values.get("hidden_act")) is not None:
        from transformers.activations import ACT2FN  # brings the code of models

        if str(activation) not in ACT2FN:
            problem = f"transformers knows no activation {shown_value(activation)!r}"
            raise Refused("hidden_act", problem, did_you_mean(str(activation), ACT2FN))
    check_known(values, config_class)
    try:
        with _rope_warnings_raised():  # of a copy: transformers writes what it fills up into the dicts that it is given
            config = config_class(**copy.deepcopy(values))
    except Exception as error:  # of transformers' own checks, and of what its arithmetic meets
        raise Refused("", f"transformers refuses it: {_on_one_line(error)}", "fix the size or type") from error
    layers = [part for part in _parts(config) if _value(part, "is_heterogeneous")]
    if layers and not uneven:
        problem = f"the layers of {config_class.model_type} differ in their sizes, which nothing here reads"
        raise Refused("model_type", problem, _EXAMPLES)
    for part in layers:
        for number in range(part.num_hidden_layers):
            _check_shape(part.per_layer_config[number])
    if not layers:
        _check_shape(config)
    return config


@contextmanager
def _rope_warnings_raised() -> Iterator[None]:
    """transformers only warns of a rotation that it does not know, and of keys that the rotation does not read."""
    from transformers import modeling_rope_utils

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "validate" in record.funcName or record.funcName == "_check_received_keys":
                raise ValueError(record.getMessage())

    logger, handler = logging.getLogger(modeling_rope_utils.__name__), Raising()
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def check_known(values: JsonObject, config_class: type[PreTrainedConfig], key: str = "") -> None:
    """Raises `Refused` for keys that nothing reads, at every level.

    Before the config is made: transformers tells a misspelt key by what does not go together without it.

    Args:
        values: of a config, or of a part of one, as the recipe spells them.
        key: of `values`, where they are inside a config.
    """
    from transformers import CONFIG_MAPPING

    try:
        defaults = config_class()
    except Exception as error:  # some classes of transformers have no defaults that go together
        problem = f"transformers makes no {config_class.model_type} from its defaults: {first_line(error)}"
        raise Refused(f"{key}model_type", problem, _EXAMPLES) from error
    known = {*defaults.to_dict(), *defaults.attribute_map, "model_type"}
    known |= {earlier for name, names in _EARLIER.items() if name in known for earlier in names}
    known |= {_PART} & (defaults.to_dict().get("rope_parameters") or {}).keys()
    for name, value in values.items():
        if name not in known:
            problem = f"a config of model_type {config_class.model_type} has no such key"
            raise Refused(f"{key}{name}", problem, did_you_mean(name, known))
        inner, part = object_at(value), config_class.sub_configs.get(name)
        if inner is not None and part is not None:
            named = text_at(inner, "model_type") or ""
            # `get` of this mapping never gives anything.
            inner_class: Any = CONFIG_MAPPING[named] if named in CONFIG_MAPPING else part  # noqa: SIM401
            if not hasattr(inner_class, "sub_configs"):  # transformers' AutoConfig, which stands for any
                problem = f"is {inner.get('model_type')!r}, and no model of transformers"
                raise Refused(f"{key}{name}.model_type", problem, "write llama, for example")
            check_known(inner, inner_class, f"{key}{name}.")
    _check_rope(values, defaults, _PART in known, key)


def _check_rope(values: JsonObject, defaults: PreTrainedConfig, has_part: bool, key: str) -> None:
    """Raises `Refused` for rotary positions of which transformers, without a word, would read only some."""
    ropes = [name for name in ("rope_parameters", "rope_scaling") if object_at(values, name) is not None]
    if len(ropes) == 2:
        raise Refused(f"{key}rope_scaling", "stands beside rope_parameters, which nothing reads then", "merge the two")
    for name in ropes:
        rope = values[name]
        inside, outside = rope.get("rope_theta"), values.get("rope_theta")
        if None not in (inside, outside) and inside != outside:
            raise Refused(f"{key}rope_theta", f"{outside} here, and {inside} in {name}", "leave one of them out")
        layers = [*map(str, values.get("layer_types") or getattr(defaults, "layer_types", None) or ())]
        for layer, one in rope.items():  # one rotation for each type of layer, perhaps
            if object_at(one) is not None and layer not in layers:
                problem = f"a config of model_type {defaults.model_type} has no such type of layers"
                raise Refused(f"{key}{name}.{layer}", problem, did_you_mean(str(layer), layers))
        for one in (rope, *rope.values()):
            if _PART in (object_at(one) or {}) and not has_part and one.get("rope_type") != "proportional":
                problem = f"no rotation of model_type {defaults.model_type} reads it"
                raise Refused(f"{key}{name}.{_PART}", problem, "leave it out")


def check_sizes(values: JsonObject) -> None:
    """Raises `Refused` for numbers that no model has; what is missing or of another type is for transformers to say."""
    for place, value in walk(values):
        if isinstance(value, int | float) and not isinstance(value, bool):
            name = place[-1]
            low, high = (1, MOST_SIZES[name]) if name in MOST_SIZES else _RANGES.get(name, (-_LARGEST, _LARGEST))
            if not low <= value <= high:
                problem = f"should be {low:g} to {high:,g}, and is {value:g}"
                raise Refused(".".join(place), problem, "write another")


def _check_shape(config: object) -> None:
    """Raises `Refused` for sizes that do not go together.

    Args:
        config: as the recipe spells it, or as transformers fills it up, which lets some of these through.
    """
    for part in _parts(config):
        # What is no whole number is for transformers to say.
        width, heads, groups, side, image, patch = (
            size if type(size := _value(part, name)) is int else None for name in _COUNTS
        )
        if not side and width and heads and width % heads:
            raise Refused("hidden_size", f"{width} is no multiple of num_attention_heads, {heads}", "change one")
        if heads and groups and heads % groups:
            raise Refused("num_key_value_heads", f"{heads} attention heads are no multiple of {groups}", "change one")
        side = side or (width // heads if width and heads else None)
        if side and side % 2 and _value(part, "rope_parameters") is not None:
            problem = f"a head of {side} cannot be rotated: rotary positions turn pairs"
            raise Refused("hidden_size", problem, "write an even multiple of num_attention_heads, or head_dim")
        if image and patch and patch > image:
            raise Refused("patch_size", f"{patch} is more than image_size, {image}", "write a part of image_size")


def _parts(config: object) -> tuple[Any, ...]:
    return config, _value(config, "text_config"), _value(config, "vision_config")


def _value(config: object, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


@contextmanager
def building(key: str) -> Iterator[None]:
    """What a library finds wrong with sizes while it builds a model on the meta device becomes a `UserError`."""
    try:
        yield
    except UserError as error:
        if error.key or error.where:
            raise
        raise UserError(error.problem, key=key, hint=error.hint) from error
    except Refused as refused:
        where = f"{key}.{refused.key}".rstrip(".")
        raise UserError(f"{where}: {refused.problem}", key=key, hint=refused.hint) from refused
    except Exception as error:  # their arithmetic raises anything: ZeroDivisionError, TypeError, errors of their own
        raise UserError(f"{key} cannot be built: {_on_one_line(error)}", key=key, hint="fix its sizes") from error


def _on_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if " " in text else f"{type(error).__name__}: {text}"
