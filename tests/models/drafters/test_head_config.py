"""What hidden-state heads read of a target, the layer that mirrors it, and settings that do not fit."""

import json
from typing import get_args

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.states import Taps
from draftsmith.models.decoding.head_layer import Rotary
from draftsmith.models.drafters.base import HeadObjective, states_settings
from draftsmith.models.layer import LayerShape
from draftsmith.models.targets.base import language_shape
from fails import fails_with
from heads_tiny import STRETCHED, config_of, head_of, stretched_text, text_config
from pydantic import ValidationError
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_stretched_rotation_is_the_targets(kind):
    text, positions = stretched_text(kind), torch.tensor([[0, 1, 40, 63, 64, 500, 25000]])
    cos, sin = LlamaRotaryEmbedding(text)(torch.zeros(1), positions)
    shape = config_of(kind="msd").layer(language_shape(text))
    result = Rotary(shape)(positions)
    torch.testing.assert_close(result, torch.stack([cos, sin], -1)[:, :, :16], atol=1e-6, rtol=1e-5)
    plain = config_of(kind="msd", rope="plain").layer(language_shape(text))
    assert plain.rope_scaling is None and not torch.allclose(Rotary(plain)(positions), result, atol=0.1)
    assert LayerShape(**json.loads(json.dumps(shape.to_dict()))).differs_from(shape.to_dict()) is None
    assert plain.differs_from(shape.to_dict())[0] == "rope_scaling"


def test_a_stretched_rotation_of_three_rows():
    text = stretched_text("yarn", qwen=True, mrope_section=[8, 4, 4])
    positions = torch.randint(0, 500, (3, 1, 5), generator=torch.Generator().manual_seed(0))
    cos, sin = qwen2_5.Qwen2_5_VLRotaryEmbedding(text)(torch.zeros(1), positions)
    result = Rotary(config_of(kind="msd", positions="mrope").layer(language_shape(text)))(positions)
    for part, whole in enumerate((cos, sin)):
        if whole.dim() == 4:
            whole = torch.cat([b[n % 3] for n, b in enumerate(whole.split([8, 4, 4] * 2, dim=-1))], -1)
        torch.testing.assert_close(result[..., part], whole[..., :16], atol=1e-5, rtol=1e-5)


def test_rotations_that_a_layer_does_not_know():
    dynamic = stretched_text("dynamic", factor=2.0)
    plain = config_of(kind="msd").layer(language_shape(dynamic))
    assert plain.rope_scaling is None, "plain, up to what it was trained for"
    long = stretched_text("longrope", factor=2.0, short_factor=[1.0] * 16, long_factor=[2.0] * 16)
    fails_with(r"by longrope.*\n.*drafter.rope: plain", config_of(kind="msd").layer, language_shape(long))
    assert config_of(kind="msd", rope="plain").layer(language_shape(long)).rope_scaling is None


SECTIONS = {"loss", "objective", "confidence"}


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "msd", "vispec", "sparrow", "hivis", "dflash", "medusa"])
def test_settings_beside_the_states_change_none(kind):
    """What a cache of states may keep when a recipe changes: it is made again for every other setting."""
    config, shape = config_of(kind=kind), language_shape(text_config())
    wanted = config.taps_for(shape, training=True)
    assert config.beside_states <= {*type(config).model_fields}, "no setting of another kind"
    for name in config.beside_states:
        was, field = getattr(config, name), type(config).model_fields[name]
        choices = [value for value in get_args(field.annotation) if isinstance(value, str) and value != was]
        if choices:
            other = choices[0]
        else:
            other = not was if isinstance(was, bool) else None if name in SECTIONS else (was or 1) + 1
        changed = config.model_copy(update={name: other})
        assert changed.taps_for(shape, training=True) == wanted, name
        assert states_settings(changed) == states_settings(config), name
    read = {"eagle3": {"taps": (1, 2, 3)}, "dflash": {"taps": (1, 2)}, "eagle": {"vata": True},
            "sparrow": {"middle_layer": 2}}.get(kind)  # fmt: skip
    if read is not None:
        changed = config.model_copy(update=read)
        assert changed.taps_for(shape, training=True) != wanted and states_settings(changed) != states_settings(config)


def test_what_each_kind_wants():
    shape = language_shape(text_config())
    of = lambda **settings: config_of(**settings).taps_for(shape, training=True)  # noqa: E731
    assert of(kind="sparrow") == Taps(feature=True, visual_layers=(4,))
    single = language_shape(text_config(layers=1))
    half = config_of(kind="sparrow").taps_for(single, training=True)
    assert half.visual_layers == (1,), "half of one layer is that one"
    assert of(kind="sparrow", middle_layer=6, state=-2) == Taps(feature=True, text_layers=(7,), visual_layers=(6,))
    for settings in ({"kind": "sparrow", "ivsb": False}, {"kind": "msd"}, {"kind": "vispec"}):
        assert of(**settings) == Taps(feature=True, visual_layers=(0,))
    assert of(kind="hivis") == Taps(feature=True)
    assert of(kind="eagle") == Taps(feature=True, visual_layers=(0,), everywhere=True)
    assert of(kind="eagle", vata=True) == Taps(feature=True)
    assert of(kind="eagle3") == Taps(feature=True, text_layers=(2, 4, 5))
    assert of(kind="eagle3", visual_slots="middle") == Taps(feature=True, text_layers=(2, 4, 5), visual_layers=(4,))
    assert of(kind="eagle3", visual_slots="read", image="projected").everywhere
    taps = lambda **settings: config_of(**settings).taps_for(shape, training=False)  # noqa: E731
    assert taps(kind="sparrow").layers == () and taps(kind="sparrow").feature
    assert taps(kind="sparrow", vata=False).layers == (4,) and taps(kind="msd", vata=True).layers == ()
    assert taps(kind="eagle3").layers == (2, 4, 5) and not taps(kind="eagle3").feature
    shared = taps(kind="msd", visual_share=0.5)
    assert (shared.prefill_attention, shared.attention_queries) == ((4,), "last")
    assert taps(kind="msd", visual_share=0.5, share_by="text", share_layer=1).attention_queries == "text"


def test_sizes_at_full_scale():
    """Trainable parameters for Qwen2.5-VL-7B: the target's grouped heads, or a key for each of them (ViSpec's)."""
    text = text_config(hidden=3584, heads=28, kv_heads=4, intermediate=18944, vocab=152064, layers=28)
    for settings, millions in (
        ({"kind": "sparrow"}, 258.7),
        ({"kind": "sparrow", "kv_heads": "mha"}, 280.8),
        ({"kind": "vispec"}, 345.0),
    ):
        config = config_of(**settings)
        with torch.device("meta"):
            head = head_of(config, language_shape(text))
        assert sum(p.numel() for p in head.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
        assert not any("embed" in n or "lm_head" in n for n, _ in head.named_parameters())
    with torch.device("meta"):
        head = head_of(config_of(kind="eagle3", draft_vocab_size=32000), language_shape(text), torch.arange(32000))
    assert head.lm_head.weight.shape == (32000, 3584) and head.midlayer.self_attn.q_proj.weight.shape == (3584, 7168)


def test_the_layer_mirrors_the_target():
    shape = config_of(kind="sparrow").layer(language_shape(text_config()))
    assert shape.qkv_bias and shape.input_norm and shape.num_kv_heads == 2 and not shape.mrope_section
    llama = config_of(kind="msd").layer(language_shape(text_config(qwen=False)))
    assert not llama.qkv_bias and not llama.input_norm and llama.rope_theta == 10000
    assert config_of(kind="msd").layer(language_shape(text_config())).input_norm
    assert config_of(kind="vispec").layer(language_shape(text_config())).num_kv_heads == 4
    assert config_of(kind="sparrow", qkv_bias=False).layer(language_shape(text_config())).qkv_bias is False
    text = qwen3.Qwen3VLTextConfig(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    three = config_of(kind="sparrow").layer(language_shape(text))
    assert three.head_dim == 16 and three.qk_rms_norm and not three.qkv_bias
    assert config_of(kind="eagle3").layer(language_shape(text_config())).attention_input == 64


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"positions: mrope, and the target \(llama\) has no M-RoPE"):
        config_of(kind="sparrow", positions="mrope").layer(language_shape(text_config(qwen=False)))
    with pytest.raises(UserError, match=r"drafter\.taps"):
        config_of(kind="eagle3").taps_for(language_shape(text_config(layers=4)), training=True)
    with pytest.raises(UserError, match="middle_layer is 9, and the target has 8"):
        config_of(kind="sparrow", middle_layer=9).taps_for(language_shape(text_config()), training=True)
    with pytest.raises(UserError, match="share_layer is 8"):
        config_of(kind="msd", visual_share=0.5, share_layer=8).taps_for(language_shape(text_config()), training=False)
    fails_with("no term has a weight", HeadObjective, error=ValidationError)
    fails_with("this head's are its own", config_of, kind="eagle3", objective={"feature": 1.0}, error=ValidationError)
    fails_with("ascending", config_of, kind="eagle3", taps=(4, 2, 5), error=ValidationError)
    fails_with("vata", config_of, kind="hivis", vata=False, error=ValidationError)
