"""Drafts with a newline, with an image processor of their own and with more positions; targets of the tiled
families.
"""

import json
from dataclasses import replace

import pytest
import torch
from draftsmith.core.batch import Batch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import TEXT
from draftsmith.data.processor_files import with_own_image_processor
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.lvlm import (
    LvlmConfig,
    RopeScaling,
    build_drafter,
    drafter_config,
    load_drafter,
    save_lvlm,
    scale_positions,
)
from draftsmith.models.parts import PARTS
from draftsmith.models.targets.llava.model import LlavaDecoder, LlavaTraining
from draftsmith.models.targets.llava.section import LlavaTarget, LlavaTargetConfig
from draftsmith.models.targets.load import build_target, load_lvlm, load_target
from pydantic import ValidationError
from tensors import learn
from tiled import VOCAB, look, model, processor, request, token_ids
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)

LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 24, "patch_size": 8}  # fmt: skip
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "image_size": 16, "vision_use_head": False}


def config(**more) -> LvlmConfig:
    return LvlmConfig(**({"kind": "lvlm", "language_model": LLAMA, "vision_tower": CLIP} | more))


def own(**more) -> LvlmConfig:
    """llava-ov-68m-anyres at tiny size: its own tower, a newline, stretched positions."""
    scaling = {"kind": "linear", "max_positions": 512}
    return config(**({"vision_tower": SIGLIP, "pictures": "own", "newline": True, "rope_scaling": scaling} | more))


def own_processor(family="llava_onevision"):
    return with_own_image_processor(processor("llava"), None, image_size=16, patch_size=8, family=family, revision=None)


def test_a_newline_makes_a_onevision_of_a_llama():
    target, ids = model("llava_next"), token_ids(processor("llava_next"))
    flat, tiled = (build_drafter(config(newline=n), target, ids, seed=0) for n in (False, True))
    assert flat.config.model_type == "llava" and tiled.config.model_type == "llava_onevision"
    assert isinstance(tiled, LlavaOnevisionForConditionalGeneration) and tiled.model.image_newline.shape == (16,)
    assert tiled.config.text_config.model_type == "llama" and tiled.config.vision_feature_select_strategy == "default"
    assert (tiled.config.vision_feature_layer, tiled.config.text_config.vocab_size) == (-2, VOCAB)
    decoders = [LlavaDecoder(m, num_token_ids=400) for m in (flat, tiled)]
    assert [d.reads_newlines for d in decoders] == [False, True]


def test_a_draft_with_an_image_processor_of_its_own_is_saved_loaded_and_exact(tmp_path):
    """From published halves to the decoding loop, beside a LLaVA-1.5 that reads other tiles."""
    torch.manual_seed(2)
    text = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, vocab_size=VOCAB - 8)
    LlamaForCausalLM(text).save_pretrained(tmp_path / "language")
    tower = SiglipVisionModel(SiglipVisionConfig(**{k: v for k, v in SIGLIP.items() if k != "model_type"}))
    tower.save_pretrained(tmp_path / "tower")
    made, target = processor("llava"), model("llava")
    asked_of = own(language_model=str(tmp_path / "language"), vision_tower=str(tmp_path / "tower"))
    draft = build_drafter(asked_of, target, token_ids(made), seed=0)
    copied = draft.model.vision_tower.state_dict()
    assert all(torch.equal(copied[name], value) for name, value in tower.state_dict().items())
    save_lvlm(draft, tmp_path / "draft", {"tokenizer_hash": "h"})
    again = load_drafter(tmp_path / "draft", tokenizer_hash="h", dtype=torch.float32)
    assert type(again) is type(draft) and torch.equal(again.model.image_newline, draft.model.image_newline)
    assert again.config.text_config.max_position_embeddings == 512
    assert again.config.text_config.rope_parameters["factor"] == 8.0

    asked = request("llava", [(40, 30)])
    pixels, pictures = look(own_processor(), [(40, 30)], "anyres_max_9")
    placeholder = int(asked.ids[asked.modality != TEXT][0])
    first, run = int((asked.modality != TEXT).nonzero()[0, 0]), pictures[0].num_tokens
    behind = first + asked.pictures[0].num_tokens
    view = replace(
        asked, pixels=pixels, pictures=pictures,
        ids=torch.cat([asked.ids[:first], torch.full((run,), placeholder), asked.ids[behind:]]),
        modality=torch.cat([asked.modality[:first], torch.ones(run, dtype=torch.int8), asked.modality[behind:]]),
    )  # fmt: skip
    seen = []
    for llava in (draft, again):
        decoder = LlavaDecoder(llava, num_token_ids=400, never=(placeholder,))
        drafter = IndependentProposal(decoder, "M", newline_id=made.newline_id)
        decoding = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(), 12, ())
        given = replace(asked, drafter_view=view)
        plain = LlavaTarget(target, num_token_ids=len(made.tokenizer), image_token_id=made.image_token_id)
        assert generate(plain, drafter, given, decoding).tokens == generate(plain, None, asked, decoding).tokens
        assert [len(v.request.ids) for v in drafter.views(given)] == [len(view.ids)]
        seen.append(drafter.root())
    assert torch.equal(*seen)


def test_towers_and_layers_by_default():
    target, ids = model("llava_onevision").config, token_ids(processor("llava_onevision"))
    shared = drafter_config(config(vision_tower="target", newline=True), target, ids, network=False)
    assert (shared.vision_feature_layer, shared.vision_feature_select_strategy) == (-1, "full")
    assert shared.video_token_index == processor("llava_onevision").video_token_id
    alone = drafter_config(own(), target, ids, network=False)
    assert (alone.vision_feature_layer, alone.vision_feature_select_strategy) == (-2, "full")
    assert alone.image_grid_pinpoints[:3] == [[16, 16], [16, 32], [16, 48]], "in multiples of its own tile"
    with pytest.raises(UserError, match=r"16 pixels in patches of 8.*24[\s\S]*drafter.pictures: own"):
        drafter_config(own(pictures="target"), target, ids, network=False)
    with pytest.raises(ValidationError, match="pictures: own is for another tower"):
        config(vision_tower="target", pictures="own")


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_stretched_positions(kind):
    """Linear halves every angle; both leave a draft with as many positions as were asked for."""
    plain = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, vocab_size=VOCAB)
    stretched = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, vocab_size=VOCAB)
    scale_positions(stretched, RopeScaling(kind=kind, max_positions=128))
    assert stretched.max_position_embeddings == 128
    torch.manual_seed(0)
    old, new = LlamaForCausalLM(plain), LlamaForCausalLM(stretched)
    new.load_state_dict(old.state_dict())
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        expected = old(ids, position_ids=torch.arange(20)[None].float() / 2).logits
        actual = new(ids, position_ids=torch.arange(20)[None]).logits
    assert torch.allclose(actual, expected, atol=1e-5) == (kind == "linear")
    assert not torch.allclose(actual, old(ids).logits, atol=1e-5)


def test_positions_that_need_no_stretching_are_refused():
    text = LlamaConfig(max_position_embeddings=128)
    with pytest.raises(UserError, match="max_positions is 128 and the language model has 128"):
        scale_positions(text, RopeScaling(max_positions=128))
    scale_positions(text, RopeScaling(max_positions=256))
    with pytest.raises(UserError, match="scaled already"):
        scale_positions(text, RopeScaling(max_positions=512))


def test_a_newline_draft_learns_on_tiles():
    """A few steps on one sample: the loss falls, and the newline moves with the projector."""
    made, target = own_processor(), model("llava")
    draft = build_drafter(own(), target, token_ids(processor("llava")), seed=0)
    training = LlavaTraining(draft, PARTS, gradient_checkpointing=False).train()
    pixels, pictures = look(made, [(40, 30)], "anyres_max_9")
    run = pictures[0].num_tokens
    ids = torch.cat([torch.tensor([1]), torch.full((run,), made.image_token_id), torch.arange(20, 32)])[None]
    modality = torch.zeros(ids.shape, dtype=torch.int8)
    modality[0, 1 : 1 + run] = 1
    supervised = torch.zeros(ids.shape, dtype=torch.bool)
    supervised[0, -6:] = True
    positions = torch.arange(ids.shape[1]).expand(1, *ids.shape)
    batch = Batch(ids, torch.ones_like(supervised), supervised, modality, positions, pixels, ("a",), pictures=pictures)
    before = draft.model.image_newline.detach().clone()
    losses = learn(training, batch, None, steps=20, lr=1e-2)
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(draft.model.image_newline, before)


@pytest.mark.parametrize("kind", ["llava", "llava_next", "llava_onevision"])
def test_an_inline_target_of_each_family(kind, tmp_path):
    tower = SIGLIP if kind == "llava_onevision" else CLIP
    section = LlavaTargetConfig(kind=kind, language_model=LLAMA | {"vocab_size": VOCAB}, vision_tower=tower)
    made = build_target(section, token_ids(processor(kind)))
    assert made.config.model_type == kind
    assert made.config.vision_feature_layer == (-1 if kind == "llava_onevision" else -2)
    save_lvlm(made, tmp_path, {})
    result = load_target(section, tmp_path, num_token_ids=400, image_token_id=4, device=torch.device("cpu"))
    assert result.reads_tiles is (None if kind == "llava" else True)
    state = result.decoder.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in made.state_dict().items())


def test_weights_of_another_family_are_refused(tmp_path):
    save_lvlm(model("llava_next"), tmp_path, {})
    assert isinstance(
        load_lvlm(tmp_path, revision=None, dtype=torch.float32, key="k"), LlavaNextForConditionalGeneration
    )
    section = LlavaTargetConfig(kind="llava", path=str(tmp_path))
    with pytest.raises(UserError, match=r"model_type 'llava_next', expected llava\n.*kind: llava_next"):
        load_target(section, tmp_path, num_token_ids=400, image_token_id=4, device=torch.device("cpu"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(UserError, match="model_type 'llama', expected llava or llava_next"):
        load_lvlm(tmp_path, revision=None, dtype=torch.float32, key="k")
