"""Which keys an inline config may have: transformers keeps those that it does not know and reads none of them.

A config's own keys follow from its class. Those of its rotary positions follow from their type, of which transformers
only warns (`RotaryEmbeddingConfigMixin.validate_rope`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import did_you_mean, first_line
from ..core.json_types import JsonObject, object_at, text_at
from ..core.refused import Refused
from ..core.secrets import shortened

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


def check_known(values: JsonObject, config_class: type[PreTrainedConfig], key: str = "") -> None:
    """Raises `Refused` for keys that nothing reads, at every level.

    Before the config is made: transformers tells a misspelt key by what does not go together without it.

    Args:
        values: of a config, or of a part of one, as the recipe spells them.
        key: of `values`, where they are inside a config.
    """
    defaults = _defaults(config_class, key)
    known = {*defaults.to_dict(), *defaults.attribute_map, "model_type"}
    known |= {earlier for name, names in _EARLIER.items() if name in known for earlier in names}
    known |= {_PART} if _PART in _rope(defaults) else set()
    for name, value in values.items():
        if name not in known:
            problem = f"a config of model_type {config_class.model_type} has no such key"
            raise Refused(f"{key}{name}", problem, did_you_mean(name, known))
        inner, part = object_at(value), config_class.sub_configs.get(name)
        if inner is not None and part is not None:
            check_known(inner, _class_of(inner, part, f"{key}{name}"), f"{key}{name}.")
    _check_rope(values, defaults, key)


def _defaults(config_class: type[PreTrainedConfig], key: str) -> PreTrainedConfig:
    try:
        return config_class()
    except Exception as error:  # some classes of transformers have no defaults that go together
        problem = f"transformers makes no {config_class.model_type} from its defaults: {first_line(error)}"
        raise Refused(f"{key}model_type", problem, "llama and clip_vision_model, for example") from error


def _class_of(values: JsonObject, part: object, key: str) -> Any:
    """Return a part's config class, by its own model_type or its family's. Raises `Refused` where neither says it."""
    from transformers import CONFIG_MAPPING

    if (named := text_at(values, "model_type")) is not None and named in CONFIG_MAPPING:
        return CONFIG_MAPPING[named]
    if not hasattr(part, "sub_configs"):  # transformers' AutoConfig, which stands for any
        raise Refused(
            f"{key}.model_type",
            f"is {values.get('model_type')!r}, and no model of transformers",
            "write llama, for example",
        )
    return part


def _check_rope(values: JsonObject, defaults: PreTrainedConfig, key: str) -> None:
    """Raises `Refused` for rotary positions that transformers would read otherwise than they are spelt."""
    given = [name for name in _ROPES if object_at(values, name) is not None]
    if len(given) == 2:
        raise Refused(f"{key}rope_scaling", "stands beside rope_parameters, which nothing reads then", "merge the two")
    for name in given:
        _check_turning(values, values[name], defaults, f"{key}{name}.")
        inside, outside = values[name].get("rope_theta"), values.get("rope_theta")
        if None not in (inside, outside) and inside != outside:
            raise Refused(f"{key}rope_theta", f"{outside} here, and {inside} in {name}", "leave one of them out")


def _check_turning(values: JsonObject, rope: JsonObject, defaults: PreTrainedConfig, key: str) -> None:
    """Raise `Refused` for keys that nothing reads, of one rotation or of one for each type of layer."""
    if all(object_at(value) is None for value in rope.values()):
        _check_keys(rope, defaults, key)
        return
    layers = {*(values.get("layer_types") or getattr(defaults, "layer_types", None) or ())}
    for layer, value in rope.items():
        if layer not in layers:
            problem = f"a config of model_type {defaults.model_type} has no such type of layers"
            raise Refused(f"{key}{layer}", problem, did_you_mean(str(layer), map(str, layers)))
        if (inner := object_at(value)) is not None:
            _check_keys(inner, defaults, f"{key}{layer}.")


def _check_keys(rope: JsonObject, defaults: PreTrainedConfig, key: str) -> None:
    own = {*(type(defaults).ignore_keys_at_rope_validation or ())}  # of this family alone
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = ROPE_KEYS | ({"mrope": set()} if "mrope_section" in own else {})  # Qwen-VL's earlier name of its default
    if text_at(kind) is None or kind not in keys:
        problem = f"transformers knows no rotation {shortened(str(kind), 40)!r}"
        raise Refused(f"{key}rope_type", problem, did_you_mean(str(kind), ROPE_KEYS))
    known = _EVERY_ROPE | keys[kind] | own | ({_PART} if _PART in _rope(defaults) else set())
    of_any = set().union(known, *ROPE_KEYS.values())
    for name in sorted(rope, key=lambda name: name in of_any):  # a misspelt rope_type before what its default lacks
        if name not in known:
            problem = f"positions of rope_type {kind} (model_type {defaults.model_type}) have no such key"
            raise Refused(f"{key}{name}", problem, did_you_mean(str(name), known))


def _rope(config: PreTrainedConfig) -> JsonObject:
    return dict(config.to_dict().get("rope_parameters") or {})
