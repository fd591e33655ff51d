"""Misspelt keys of models that a recipe spells out, at every level of every section that spells one out.

transformers keeps such a key and reads it nowhere: the model had its default size or rotation, and exit code 0.
"""

import copy
import json

import pytest
import tiny_qwen
from draftsmith.core.errors import Refused
from draftsmith.models.inline import new_config
from draftsmith.recipes.commands.recipes import resolved
from draftsmith.recipes.config.files import find_recipe
from draftsmith.recipes.config.load import Written, checked, load
from draftsmith.recipes.config.schema import Recipe
from fails import fails_with
from tiny_qwen import KINDS, text_config, vision_config

ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_parameters": ROPE,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 48, "patch_size": 16}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
VQ = {"base_channels": 16, "ch_mult": [1, 2, 2], "num_res_blocks": 1, "z_channels": 32, "codebook_size": 64,
      "codebook_dim": 8, "groups": 8}  # fmt: skip
SHAPE = {"num_layers": 4, "num_heads": 4, "dim": 128, "ffn_hidden": 384, "vocab_size": 64, "caption_dim": 64,
         "caption_slots": 16}  # fmt: skip
TWO = {"language_model": LLAMA, "vision_tower": CLIP}


def qwen(model_type: str) -> dict:
    kind = model_type.removesuffix("_moe")
    return {"kind": kind, "language_model": text_config(model_type, 2, 32), "vision_tower": vision_config(kind, 32)}


# Name -> recipe, where the section stands in it, the section.
SECTIONS = {
    "llava": ("lvlm", "target", {"kind": "llava", "vision_feature_layer": -1, **TWO}),
    "llava_next": ("lvlm", "target", {"kind": "llava_next", **TWO}),
    "llava_onevision": ("lvlm-ov", "target", {"kind": "llava_onevision", **TWO}),
    **{kind: ("compare", "target", qwen(kind)) for kind in KINDS},
    "causal_lm": ("lvlm", "target", {"kind": "causal_lm", "language_model": LLAMA}),
    "llamagen": ("visual-ar", "target", {"kind": "llamagen", "image_size": 32, "shape": SHAPE, "vq": VQ,
                                         "text_encoder": T5 | {"model_type": "t5"}}),
    "anole": ("visual-ar", "target", {"kind": "anole", "path": "x/y", "vq_path": "x/z"}),
    "lvlm": ("lvlm", "drafter", {"kind": "lvlm", "rope_scaling": {"kind": "yarn", "max_positions": 1024}, **TWO}),
    "lvlm of a stage": ("lvlm", "stages.pretrain.drafter", {"kind": "lvlm", **TWO}),
    "eagle": ("visual-ar", "drafter", {"kind": "eagle", "loss": {"feature": 1.0}}),
    "captioner": ("lvlm", "stages.evaluate.captioner", {"kind": "florence2", "num_beams": 1, "task": "caption"}),
}  # fmt: skip


def tree_of(name: str) -> dict:
    recipe, place, section = SECTIONS[name]
    tree = json.loads(json.dumps(resolved(load([f"recipe=demo/{recipe}"]))))
    at = tree
    *path, last = place.split(".")
    for key in path:
        at = at[key]
    at[last] = copy.deepcopy(section)
    return tree


def validated(name: str, tree: dict) -> Recipe:
    return checked(Written(find_recipe(f"demo/{SECTIONS[name][0]}"), [], tree))


def levels(section: dict, place: tuple = ()):
    yield place, section
    for key, value in section.items():
        if isinstance(value, dict):
            yield from levels(value, (*place, key))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_misspelt_key_is_refused_at_every_level_with_the_nearest(name):
    tree, (_, place, _) = tree_of(name), SECTIONS[name]
    tried = 0
    for inner, section in levels(SECTIONS[name][2]):
        for key in section:
            if key in ("kind", "model_type"):
                continue
            wrong = copy.deepcopy(tree)
            at = wrong
            for part in (*place.split("."), *inner):
                at = at[part]
            misspelt = f"{key}{key[-1]}"
            at[misspelt] = at.pop(key)
            caught = fails_with("", validated, name, wrong)
            told = str(caught)
            if inner[-1:] in (("rope_parameters",), ("rope_scaling",)):  # transformers says it
                assert ".".join((place, *inner[:-1])) in told and ("rope_parameters" in told or misspelt in told), told
            else:
                assert ".".join((place, *inner, misspelt)) in told, told
                assert f"did you mean '{key}'" in told or f"or '{key}'" in told, told
            tried += 1
    assert tried >= 2


@pytest.mark.parametrize("name", KINDS)
def test_the_sections_themselves_are_taken(name):
    written = SECTIONS[name][2]
    assert tiny_qwen.section(**written).vision_tower == written["vision_tower"]


@pytest.mark.parametrize("model_type", ["llama", "qwen2_vl_text", "qwen3_vl"])
def test_a_language_model_of_another_family_is_refused(model_type):
    tree = tree_of("qwen3_vl")
    tree["target"]["language_model"] = {"model_type": model_type}
    caught = fails_with(r"target\.language_model\.model_type: .*qwen3_vl", validated, "qwen3_vl", tree)
    assert "qwen3_vl_text or qwen3_vl_moe_text" in str(caught)


@pytest.mark.parametrize(
    ("tower", "key"),
    [({"model_type": "clip_vision_model"}, "model_type"), ({"hidden_act": "gleu"}, "hidden_act"),
     ({"depth": "two"}, "depth")],
)  # fmt: skip
def test_a_qwen_tower_is_of_its_family(tower, key):
    tree = tree_of("qwen2_5_vl")
    tree["target"]["vision_tower"] |= tower
    fails_with(rf"target\.vision_tower.*{key}", validated, "qwen2_5_vl", tree)


# ---- rotary positions

VALUES = {
    "factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 1.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "short_factor": [1.0] * 16, "long_factor": [1.0] * 16, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
READ = {
    "default": set(), "linear": {"factor"}, "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"},
    "longrope": {"short_factor", "long_factor", "original_max_position_embeddings", "attention_factor", "factor"},
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_each_rotation_has_the_keys_that_transformers_reads(kind):
    """It only warns of the others."""
    given = {name: VALUES[name] for name in READ[kind]} | {"rope_type": kind, "rope_theta": 10000.0}
    new_config(LLAMA | {"rope_parameters": given})
    for other in {*VALUES} - READ[kind]:
        with pytest.raises(Refused, match=f"'rope_type'='{kind}': .*{other}"):
            new_config(LLAMA | {"rope_parameters": given | {other: VALUES[other]}})
    with pytest.raises(Refused, match="no rotation of model_type llama reads it"):
        new_config(LLAMA | {"rope_parameters": given | {"partial_rotary_factor": 0.5}})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rope_parameters": {"rope_type": "linaer", "factor": 2.0}}, "linaer"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factorr": 2.0, "factor": 1.0}}, "factorr"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling: stands beside"),
        ({"rope_theta": 5e5}, "rope_theta: 500000.0 here, and 10000.0"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "mrope_section"),
    ],
)  # fmt: skip
def test_a_rotation_that_would_be_read_otherwise_is_refused(values, says):
    with pytest.raises(Refused, match=says) as caught:
        new_config({name: value for name, value in (LLAMA | values).items() if value is not None})
    assert caught.value.hint


def test_a_rotation_for_each_type_of_layer_has_its_keys_checked_too():
    own = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": own}
    new_config(gemma)
    for layer, value, key in (
        ("full_attention", {"rope_type": "linear", "factor": 8.0, "fctor": 8.0}, "fctor"),
        ("full_atention", own["full_attention"], "rope_parameters.full_atention"),
    ):
        fails_with(key, new_config, gemma | {"rope_parameters": own | {layer: value}}, error=Refused)


def test_what_transformers_fills_up_does_not_reach_the_recipe():
    """It wrote `original_max_position_embeddings` into the dict that it was given, and so into recipe.yaml."""
    given = {"rope_type": "yarn", "factor": 2.0}
    new_config(LLAMA | {"rope_parameters": given})
    assert given == {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_text", "dots3_note", "gemma4_assistant", "nougat"])
def test_models_whose_layers_differ_are_refused_by_name(model_type):
    """Reading one of their sizes, or making one of defaults alone, raises an error of transformers' own."""
    caught = fails_with("", new_config, {"model_type": model_type}, error=Refused)
    assert caught.key == "model_type"
