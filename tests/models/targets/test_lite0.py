"""EfficientNet-Lite0 as a LLaVA's tower: the published arithmetic, and a target of pretrained halves by folders."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.processor_files import processor_of_halves
from draftsmith.models.hub import read_config
from draftsmith.models.lite0 import EfficientNetLite0Config, EfficientNetLite0Model, save_lite0
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.model import llava_config
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from fails import fails_with
from halves_tiny import language_model, tower
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel, CLIPVisionConfig, LlamaConfig


def published() -> dict[str, torch.Tensor]:
    """A state of the sizes and names of the published checkpoint, of random numbers."""
    torch.manual_seed(0)
    ours = EfficientNetLite0Model(EfficientNetLite0Config()).state_dict()
    state = {}
    for name, value in ours.items():
        if name not in ("mean", "std"):
            parts = [f"_{part}" if part[0] in "bcdep" and part != "bias" else part for part in name.split(".")]
            state[".".join(parts)] = torch.rand_like(value) + 0.5 if "running_var" in name else value
    return state | {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}


def slow(state, pixels):
    """The published forward, written out: features [B,3072]."""

    def norm(name, x):
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts, eps=1e-3)

    def same(name, x, stride, groups=1):
        kernel = state[name].shape[-1]
        total = max((-(-x.shape[-1] // stride) - 1) * stride + kernel - x.shape[-1], 0)
        return F.conv2d(F.pad(x, (total // 2, total - total // 2) * 2), state[name], stride=stride, groups=groups)

    x, number, kept = F.relu6(norm("_bn0", same("_conv_stem.weight", pixels, 2))), 0, None
    for _, stride, expansion, width, count in EfficientNetLite0Config().rows:
        for again in range(count):
            name, h = f"_blocks.{number}", x
            if expansion > 1:
                h = F.relu6(norm(f"{name}._bn0", F.conv2d(h, state[f"{name}._expand_conv.weight"])))
            by = 1 if again else stride
            h = F.relu6(norm(f"{name}._bn1", same(f"{name}._depthwise_conv.weight", h, by, h.shape[1])))
            h = norm(f"{name}._bn2", F.conv2d(h, state[f"{name}._project_conv.weight"]))
            x = x + h if by == 1 and x.shape[1] == width else h
            kept = x if number == 10 else kept
            number += 1
    last = F.relu6(norm("_bn1", F.conv2d(x, state["_conv_head.weight"])))
    return torch.cat([last.mean((2, 3)), F.adaptive_avg_pool2d(kept, 4).flatten(1)], 1)


@torch.no_grad()
def test_nine_places_of_the_published_features(tmp_path):
    """In training mode as in evaluation but for dropout, whatever picture stands beside; the classifier is left out."""
    state, pixels = published(), torch.randn(2, 3, 224, 224)
    save_lite0(state, tmp_path)
    model = AutoModel.from_pretrained(tmp_path).train()
    assert 0.3 < (model(pixels).last_hidden_state[..., :3072] == 0).float().mean() < 0.5
    model.config.feature_dropout = 0.0
    states = model(pixels, output_hidden_states=True)
    assert states.last_hidden_state.shape == (2, 9, 3081) and states.hidden_states[-1] is states.last_hidden_state
    expected = slow(state, pixels)
    for place in range(9):
        torch.testing.assert_close(states.last_hidden_state[:, place, :3072], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.last_hidden_state[0, :, 3072:], torch.eye(9), atol=0, rtol=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items()), "training moved them"
    weights |= {"mean": expected.mean(0), "std": torch.full((3072,), 2.0)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    normed = AutoModel.from_pretrained(tmp_path)(pixels).last_hidden_state[:, 0, :3072]
    torch.testing.assert_close(normed, (expected - expected.mean(0)) / 2, atol=1e-4, rtol=1e-4)
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert images["image_mean"] == [0.498] * 3 and images["image_std"] == [0.502] * 3 and images["resample"] == 3


def test_whoever_reads_a_folder_knows_the_tower(tmp_path):
    """In a process that has imported no more of it than recipes do."""
    code = "import draftsmith.models.targets.table; from draftsmith.models.hub import read_config;"
    code += f"print(read_config({str(tower(tmp_path))!r}, key='tower').model_type)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "efficientnet_lite0"


def test_whether_the_first_state_goes_is_the_towers_own_property(tmp_path):
    text, ids = LlamaConfig(hidden_size=16, num_attention_heads=2), TokenIds(40, 4, 1, 2, 3)
    clip = CLIPVisionConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=3, image_size=24, patch_size=8)
    joined = llava_config(copy.deepcopy(text), clip, ids)
    assert (joined.vision_feature_select_strategy, joined.vision_feature_layer) == ("default", -2)
    assert joined.image_seq_length == 9
    joined = llava_config(copy.deepcopy(text), read_config(str(tower(tmp_path)), key="tower"), ids)
    assert (joined.vision_feature_select_strategy, joined.vision_feature_layer) == ("full", -1)
    assert joined.image_seq_length == 4
    fails_with("tower has 0 layers", llava_config, text, joined.vision_config, ids, vision_feature_layer=-2)


def test_halves_that_do_not_fit_are_named(tmp_path):
    lm, vision = str(language_model(tmp_path / "lm")), str(tower(tmp_path / "tower"))
    with pytest.raises(ValueError, match="both folders, or both inline"):
        LlavaTargetConfig(kind="llava", language_model=lm, vision_tower={"model_type": "clip_vision_model"})
    ids = TokenIds(40, 4, 1, 2, 3)
    swapped = LlavaTargetConfig(kind="llava", language_model=vision, vision_tower=lm)
    error = fails_with("no vocab_size", swapped.inline_config, ids)
    assert error.key == "target.language_model" and error.where == vision and error.hint
    missing = LlavaTargetConfig(kind="llava", language_model=str(tmp_path / "none"), vision_tower=vision)
    error = fails_with("target.language_model", missing.inline_config, ids)
    assert "name a local directory" in error.hint
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "lm" / name).unlink()
    error = fails_with("cannot load the tokenizer", processor_of_halves, lm, vision, LLAVA)
    assert error.key == "target.language_model" and "target.language_model: " in error.problem
