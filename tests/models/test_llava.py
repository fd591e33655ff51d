"""LLaVA as we assemble, train, decode and save it: the recorded numbers of the published class, and its parts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import Batch
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.lvlm import LvlmConfig, build_drafter, save_lvlm
from draftsmith.models.drafters.modes import without_pictures
from draftsmith.models.parts import PARTS, TokenIds
from draftsmith.models.pictures import pooled_view
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llava.model import (
    LlavaDecoder,
    LlavaTraining,
    assemble,
    llava_config,
    pool_features,
    selected_features,
)
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.load import load_target
from tiny import IMAGE_ID, VOCAB, llava, request
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlamaConfig

VECTORS = np.load(Path(__file__).parents[1] / "data" / "vectors" / "lvlm" / "llava_logits.npz", allow_pickle=False)


def tensor(name: str) -> torch.Tensor:
    return torch.from_numpy(VECTORS[name])


@pytest.fixture(scope="module")
def recorded():
    """The model of the vectors, in float64."""
    sizes = json.loads(str(VECTORS["config_json"]))
    text, vision = sizes["text"], sizes["vision"]
    language = LlamaConfig(
        hidden_size=text["hidden"], intermediate_size=text["intermediate"], num_hidden_layers=text["layers"],
        num_attention_heads=text["heads"], num_key_value_heads=text["kv_heads"], rms_norm_eps=text["rms_norm_eps"],
        vocab_size=text["vocab"], max_position_embeddings=128,
    )  # fmt: skip
    tower = CLIPVisionConfig(
        hidden_size=vision["hidden"], intermediate_size=vision["intermediate"], num_hidden_layers=vision["layers"],
        num_attention_heads=vision["heads"], image_size=vision["image"], patch_size=vision["patch"],
        layer_norm_eps=vision["layer_norm_eps"], hidden_act=vision["act"],
    )  # fmt: skip
    ids = TokenIds(text["vocab"], sizes["image_token_id"], 1, 2, 0)
    model = assemble(llava_config(language, tower, ids, vision_feature_layer=vision["feature_layer"]))
    weights = {n.removeprefix("w."): torch.from_numpy(VECTORS[n]) for n in VECTORS.files if n.startswith("w.")}
    assert weights.keys() == model.state_dict().keys()
    model.load_state_dict(weights)
    return model.double().eval()


def batch(prefix: str = "") -> Batch:
    ids, mask = tensor(f"{prefix}input_ids"), tensor(f"{prefix}attention_mask").bool()
    modality = (ids == 90).to(torch.int8)
    positions = torch.arange(ids.shape[1]).expand(1, *ids.shape)
    return Batch(ids, mask, tensor(f"{prefix}labels") != -100, modality, positions, tensor("pixel_values"), ("a", "b"))


def test_recorded_logits_features_and_loss(recorded):
    data = batch()
    training = LlavaTraining(recorded, PARTS, gradient_checkpointing=False).eval()
    with torch.no_grad():
        selected = training.selected_features(data.pixels)
        projected = recorded.model.multi_modal_projector(selected)
        logits = recorded.lm_head(training.hidden_states(data))
        loss = training(data)
    assert (selected - tensor("image_features_selected")).abs().max() < 1e-6
    assert (projected - tensor("image_features_projected")).abs().max() < 1e-6
    real = data.attention_mask
    assert (logits - tensor("logits"))[real].abs().max() < 3e-4
    assert int(loss.num_tokens) == int(VECTORS["n_supervised"])
    assert float(loss.loss_sum / loss.num_tokens) == pytest.approx(float(VECTORS["loss"]), abs=1e-5)


@pytest.mark.parametrize("prefix", ["", "pooled_"])
def test_recorded_logits_through_the_cached_decoder(recorded, prefix):
    """Row by row, pictures pooled 2 x 2 before the projector in the pooled variant."""
    data, decoder, losses = batch(prefix), LlavaDecoder(recorded, num_token_ids=96), []
    for row, length in enumerate(data.attention_mask.sum(1).tolist()):
        ids, modality = data.ids[row : row + 1, :length], data.modality[row : row + 1, :length]
        with torch.no_grad():
            embeds = decoder.embed(ids, modality, data.pixels[row : row + 1], pool=2 if prefix else 1)
            states = decoder.forward(embeds, decoder.new_cache(length), torch.arange(length)[None])
            logits = recorded.lm_head(states.feature)[0]
        assert (logits - tensor(f"{prefix}logits")[row, :length]).abs().max() < 3e-4
        keep = data.loss_mask[row, 1:length]
        losses.append(F.cross_entropy(logits[:-1][keep], ids[0, 1:][keep], reduction="none"))
    assert float(torch.cat(losses).mean()) == pytest.approx(float(VECTORS[f"{prefix}loss"]), abs=1e-5)


def test_pooling_stands_before_the_projector(recorded):
    with torch.no_grad():
        pooled = pool_features(selected_features(recorded, tensor("pixel_values")), 2)
        projected = recorded.model.multi_modal_projector(pooled)
    assert (pooled - tensor("pooled_features")).abs().max() < 1e-6
    assert (projected - tensor("pooled_projected")).abs().max() < 1e-6
    assert (projected - tensor("projected_then_pooled")).abs().max() > 1


def test_views_of_a_request():
    """M's prompt holds each picture's run, P's a quarter of it, T's one newline for each, adjacent ones too."""
    asked = request(0, images=2, words=3)
    joined = type(asked)(
        torch.cat([asked.ids[:6], asked.ids[7:]]), torch.cat([asked.modality[:6], asked.modality[7:]]), asked.pixels
    )
    assert joined.ids[2:10].tolist() == [IMAGE_ID] * 8
    blind, pooled = without_pictures(joined, 5), pooled_view(joined, 2)
    assert blind.ids.tolist() == [1, 7, 5, 5, *joined.ids[-3:].tolist()]
    assert blind.pixels is None and not blind.modality.any()
    assert pooled.ids.tolist() == [1, 7, IMAGE_ID, IMAGE_ID, *joined.ids[-3:].tolist()]
    assert pooled.pixels is joined.pixels


def test_a_tower_of_another_resolution_is_refused():
    other = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "image_size": 32, "patch_size": 8}  # fmt: skip
    text = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2}  # fmt: skip
    config = LvlmConfig(kind="lvlm", language_model=text, vision_tower=other)
    with pytest.raises(UserError, match="32 pixels in patches of 8, the target's 16 in patches of 8"):
        build_drafter(config, llava(0), TokenIds(VOCAB, IMAGE_ID, 1, 2, 3), seed=0)


def test_a_device_map_places_the_target_and_changes_nothing(tmp_path):
    """Through accelerate, as for targets larger than one device; here all of it comes to lie on the CPU."""
    save_lvlm(llava(0), tmp_path / "target", {})
    asked, steps = request(0, 2), []
    for device_map in (None, "auto"):
        config = LlavaTargetConfig(kind="llava", path=str(tmp_path / "target"), device_map=device_map)
        loaded = load_target(
            config, tmp_path / "target", num_token_ids=60, image_token_id=IMAGE_ID, device=torch.device("cpu")
        )
        steps.append(loaded.prefill(asked, Taps(text_layers=(1,)), capacity=4)[1])
    assert torch.equal(steps[0].logits, steps[1].logits)
    assert torch.equal(steps[0].layers[1], steps[1].layers[1])
