"""What trains of a LLaVA and what does not, and that a saved draft is an ordinary model. Numbers: test_llava.py."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import IMAGE, Batch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import Picture
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.drafters.lvlm import MANIFEST, LvlmConfig, build_drafter, drafter_config, load_drafter, save_lvlm
from draftsmith.models.parts import PARTS, TokenIds, grow_vocabulary
from draftsmith.models.targets.llava.model import LlavaTraining, assemble, llava_config
from fails import fails_with
from PIL import Image
from tensors import same_weights
from tiled import pixels
from transformers import (
    AutoProcessor,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)

TEXTS = ["USER: ASSISTANT:\n", "USER: Which picture is it? ASSISTANT: It is picture number three."] * 3


@pytest.fixture(scope="module")
def processor():
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    return LLAVA.new(train_tokenizer(TEXTS, 400), image_size=24, patch_size=8, image_mean=mean, image_std=std)


def llama(vocab_size: int = 400, tie: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=vocab_size, max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=tie,
    )  # fmt: skip
    return LlamaForCausalLM(config)


VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24,
    "patch_size": 8, "projection_dim": 8,
}  # fmt: skip


def token_ids(processor, vocab_size: int = 416) -> TokenIds:
    return TokenIds(vocab_size, processor.image_token_id, processor.bos_id, processor.eos_id, processor.pad_id)


def tiny(processor, tie: bool = False) -> LlavaForConditionalGeneration:
    language_model = llama(tie=tie)
    config = llava_config(copy.deepcopy(language_model.config), CLIPVisionConfig(**VISION), token_ids(processor))
    return assemble(config, language_model=language_model, generator=torch.Generator().manual_seed(0))


def batch_of(processor, dummy: bool = False) -> Batch:
    """Two rows, one without a picture; or, with `dummy`, no row with one."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 390, (2, 16), generator=generator)
    modality = torch.zeros(2, 16, dtype=torch.int8)
    if not dummy:
        ids[0, 2:11], modality[0, 2:11] = processor.image_token_id, IMAGE
    loss_mask = torch.zeros(2, 16, dtype=torch.bool)
    loss_mask[:, 12:] = True
    positions = torch.arange(16).expand(1, 2, 16)
    pictures = torch.randn(1, 3, 24, 24, generator=generator)
    return Batch(ids, torch.ones(2, 16).bool(), loss_mask, modality, positions, pictures, ("a", "b"), int(dummy))


def gradients(module: LlavaTraining, batch: Batch) -> dict[str, torch.Tensor]:
    module.train().zero_grad()
    module(batch).loss_sum.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def part_of(name: str) -> str:
    return next((p for p in ("vision_tower", "multi_modal_projector") if p in name), "language_model").replace(
        "multi_modal_projector", "projector"
    )


@pytest.mark.parametrize(
    "trainable", [["projector"], ["projector", "language_model"], ["language_model"], ["vision_tower"], list(PARTS)]
)
def test_frozen_parts_get_no_gradient_and_do_not_move(processor, trainable):
    module = LlavaTraining(tiny(processor), trainable, gradient_checkpointing=False)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert list(module.parts()) == [p for p in PARTS if p in trainable]
    parameters = [p for named in module.parts().values() for _, p in named]
    assert {id(p) for p in parameters} == {id(p) for p in module.parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    result = gradients(module, batch_of(processor))
    assert {part_of(name) for name in result} == set(trainable)
    optimizer.step()
    moved = {part_of(name) for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trainable)


@pytest.mark.parametrize("trainable", [["projector"], ["projector", "language_model"], list(PARTS)])
def test_gradient_checkpointing_changes_no_gradient(processor, trainable):
    plain, saving = (LlavaTraining(tiny(processor), trainable, gradient_checkpointing=on) for on in (False, True))
    assert not plain.model.model.language_model.is_gradient_checkpointing
    assert saving.model.model.language_model.is_gradient_checkpointing
    expected, actual = (gradients(module, batch_of(processor)) for module in (plain, saving))
    assert expected.keys() == actual.keys() and expected
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-6, rtol=1e-5)


def test_a_dummy_picture_keeps_the_projector_in_the_graph_and_teaches_nothing(processor):
    module = LlavaTraining(tiny(processor), ["projector", "language_model"], gradient_checkpointing=False)
    actual = gradients(module, batch_of(processor, dummy=True))
    projector = {name: value for name, value in actual.items() if part_of(name) == "projector"}
    assert len(projector) == 4 and not any(value.any() for value in projector.values())
    batch = batch_of(processor, dummy=True)
    expected = module.model.model.language_model(input_ids=batch.ids).last_hidden_state
    torch.testing.assert_close(module.hidden_states(batch), expected, atol=1e-6, rtol=0)


def test_padding_and_neighbours_change_nothing(processor):
    """The row without a picture, cut and padded, has the states that it has alone."""
    module, whole = LlavaTraining(tiny(processor), [], gradient_checkpointing=False), batch_of(processor)
    keep = whole.attention_mask.clone()
    keep[1, 10:] = False
    padded = replace(whole, ids=whole.ids.masked_fill(~keep, processor.pad_id), attention_mask=keep)
    alone = Batch(
        whole.ids[1:, :10], keep[1:, :10], whole.loss_mask[1:, :10], whole.modality[1:, :10],
        whole.positions[:, 1:, :10], torch.zeros(1, 3, 24, 24), ("b",), 1,
    )  # fmt: skip
    result = module.hidden_states(padded)
    torch.testing.assert_close(result[1, :10], module.hidden_states(alone)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(result[0], module.hidden_states(whole)[0], atol=1e-5, rtol=0)


def test_the_loss_is_a_sum_over_supervised_tokens(processor):
    """Against transformers' own mean, and with the counts that the report shows."""
    model, batch = tiny(processor), batch_of(processor)
    labels = batch.ids.masked_fill(~batch.loss_mask, -100)
    output = model(input_ids=batch.ids, pixel_values=batch.pixels, labels=labels)
    module = LlavaTraining(model, PARTS, gradient_checkpointing=False)
    choice = output.logits[:, :-1].argmax(-1)[batch.loss_mask[:, 1:]]
    target_choice = choice.clone()
    target_choice[:3] += 1
    result = module(batch, None, target_choice)
    assert int(result.num_tokens) == 8
    torch.testing.assert_close(result.loss_sum / 8, output.loss, atol=1e-5, rtol=0)
    assert int(result.metrics["accuracy"]) == int((choice == labels[:, 12:].flatten()).sum())
    assert int(result.metrics["agreement"]) == 5


@pytest.mark.parametrize("tie", [False, True])
def test_tied_embeddings_stay_one_and_untied_two(processor, tmp_path, tie):
    model = tiny(processor, tie)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == tie
    module = LlavaTraining(model, PARTS, gradient_checkpointing=False)
    named = [name for part in module.parts().values() for name, _ in part]
    assert sum(p.shape == embedding.shape for part in module.parts().values() for _, p in part) == (1 if tie else 2)
    assert len(named) == len(set(named))
    optimizer = torch.optim.SGD([p for part in module.parts().values() for _, p in part], lr=0.1)
    gradients(module, batch_of(processor))
    optimizer.step()
    assert torch.equal(model.get_input_embeddings().weight, model.lm_head.weight) == tie
    save_lvlm(model, tmp_path / "saved", {})
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tie
    assert same_weights(loaded, model)


@pytest.mark.parametrize("tie", [False, True])
def test_a_grown_vocabulary_keeps_its_rows_and_adds_ones_near_the_mean(tie):
    model = llama(vocab_size=300, tie=tie)
    old = [table.weight.detach().clone() for table in (model.get_input_embeddings(), model.get_output_embeddings())]
    grow_vocabulary(model, 4300, torch.Generator().manual_seed(3))
    assert model.config.vocab_size == 4300
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tie
    for before, table in zip(old, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True):
        assert table.weight.shape == (4300, 32) and torch.equal(table.weight[:300], before)
        offsets = (table.weight[300:] - before.mean(0)).detach().double()
        expected = 1e-5 * torch.cov(before.T.double(), correction=0)
        spread = expected.diagonal().sqrt()
        # 4000 draws: each mean within 5 standard errors, each covariance within 12 % of the variances' product.
        assert (offsets.mean(0).abs() < 5 * spread / 4000**0.5).all()
        assert ((torch.cov(offsets.T) - expected).abs() < 0.12 * spread[:, None] * spread).all()
    again = llama(vocab_size=300, tie=tie)
    grow_vocabulary(again, 4300, torch.Generator().manual_seed(3))
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_a_saved_draft_is_an_ordinary_llava(processor, tmp_path):
    """Plain transformers loads model and processor, and from a picture and a text they make the scores that we do."""
    model, folder = tiny(processor).eval(), tmp_path / "draft"
    save_lvlm(model, folder, {"tokenizer_hash": processor.tokenizer_hash})
    processor.save(folder)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8))
    turns = [{"from": "human", "value": "<image>\nWhich picture is it?"}, {"from": "gpt", "value": ""}]
    form = PromptFormat(system="", image_join="hf")
    ours = encode(turns, form, processor, pictures=[Picture(processor.patches)], open_ended=True)

    theirs = AutoProcessor.from_pretrained(folder)(
        text="USER: <image>\nWhich picture is it? ASSISTANT:", images=image, return_tensors="pt"
    )
    loaded = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    pictures = pixels([image], processor, "square")
    assert theirs["input_ids"][0].tolist() == ours.ids
    torch.testing.assert_close(theirs["pixel_values"], pictures, atol=1e-6, rtol=0)
    with torch.no_grad():
        expected = loaded(**{k: theirs[k] for k in ("input_ids", "attention_mask", "pixel_values")}).logits[0]
        ids = torch.tensor([ours.ids])
        modality = torch.tensor([ours.modality], dtype=torch.int8)
        keep = torch.ones_like(ids).bool()
        batch = Batch(ids, keep, keep, modality, torch.arange(len(ours.ids))[None, None], pictures, ("a",))
        hidden = LlavaTraining(model, [], gradient_checkpointing=False).hidden_states(batch)
        torch.testing.assert_close(model.lm_head(hidden)[0], expected, atol=1e-5, rtol=0)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_draft_of_another_tokenizer_is_refused(processor, tmp_path):
    folder = tmp_path / "draft"
    save_lvlm(tiny(processor), folder, {"tokenizer_hash": processor.tokenizer_hash})
    loaded = load_drafter(folder, tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, tiny(processor).lm_head.weight)
    other = LLAVA.new(
        train_tokenizer([*TEXTS, "Another word"], 401), image_size=24, patch_size=8, image_mean=(0, 0, 0),
        image_std=(1, 1, 1),
    )  # fmt: skip
    assert other.tokenizer_hash != processor.tokenizer_hash
    with pytest.raises(UserError) as caught:
        load_drafter(folder, tokenizer_hash=other.tokenizer_hash, dtype=torch.float32)
    assert "another tokenizer" in str(caught.value)
    assert str(folder / MANIFEST) in str(caught.value) and "train the draft with this target" in str(caught.value)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Directories as one downloads them: a language model, a vision tower, and both towers of a CLIP."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(5)
    llama(vocab_size=400, seed=6).save_pretrained(folder / "llama")
    CLIPVisionModel(CLIPVisionConfig(**VISION)).save_pretrained(folder / "vision")
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPModel(CLIPConfig(text_config=text, vision_config=VISION)).save_pretrained(folder / "clip")
    return {name: folder / name for name in ("llama", "vision", "clip")}


@pytest.mark.parametrize("tower", ["vision", "clip", "target"])
def test_a_draft_is_assembled_from_directories(processor, sources, tower):
    target = tiny(processor)
    vision = "target" if tower == "target" else str(sources[tower])
    config = LvlmConfig(kind="lvlm", language_model=str(sources["llama"]), vision_tower=vision)
    draft = build_drafter(config, target, token_ids(processor), seed=9)
    language = LlamaForCausalLM.from_pretrained(sources["llama"])
    for name, value in language.model.state_dict().items():
        actual = draft.model.language_model.state_dict()[name]
        assert torch.equal(actual[:400] if name == "embed_tokens.weight" else actual, value), name
    assert torch.equal(draft.lm_head.weight[:400], language.lm_head.weight)
    assert draft.lm_head.weight.shape[0] == draft.config.text_config.vocab_size == 416
    same = {"vision": CLIPVisionModel, "clip": CLIPModel}
    source = same[tower].from_pretrained(sources[tower]) if tower != "target" else target.model.vision_tower
    pictures = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    if tower == "vision":
        assert same_weights(draft.model.vision_tower, source)
    source = getattr(source, "vision_model", source)
    with torch.no_grad():
        expected = source(pictures, output_hidden_states=True).hidden_states[-2][:, 1:]
        actual = LlavaTraining(draft, [], gradient_checkpointing=False).selected_features(pictures)
    assert torch.equal(actual, expected)
    assert torch.equal(build_drafter(config, target, token_ids(processor), seed=9).lm_head.weight, draft.lm_head.weight)
    assert (draft.config.image_token_id, draft.config.pad_token_id) == (processor.image_token_id, processor.pad_id)


def test_a_draft_is_some_layers_of_its_target(processor):
    """The target without its other layers, and no weight of it: training the draft must not move the target."""
    target, batch = tiny(processor), batch_of(processor)
    every, first, last = (
        build_drafter(
            LvlmConfig(kind="lvlm", language_model="target", layers=layers, vision_tower="target"), target,
            token_ids(processor), seed=9,
        )
        for layers in (None, (0,), (1,))
    )  # fmt: skip
    whole, *parts = (LlavaTraining(one, [], gradient_checkpointing=False) for one in (target, every, first, last))
    with torch.no_grad():
        assert torch.equal(parts[0].hidden_states(batch), whole.hidden_states(batch))
        target.model.language_model.layers.pop(0)
        assert torch.equal(parts[2].hidden_states(batch), whole.hidden_states(batch)), "the second layer alone"
        assert not torch.equal(parts[1].hidden_states(batch), whole.hidden_states(batch))
    ours = {p.data_ptr() for draft in (every, first, last) for p in draft.parameters()}
    assert ours.isdisjoint(p.data_ptr() for p in target.parameters())
    config = LvlmConfig(kind="lvlm", language_model="target", layers=(1, 0), vision_tower="target")
    fails_with("layers are 1, 0, and the target has 2", drafter_config, config, tiny(processor).config,
               token_ids(processor), network=False)  # fmt: skip


def test_a_missing_directory_is_named(processor, tmp_path):
    source = str(tmp_path / "none")
    config = LvlmConfig(kind="lvlm", language_model=source, vision_tower="target")
    with pytest.raises(UserError, match=r"drafter\.language_model") as caught:
        build_drafter(config, tiny(processor), token_ids(processor), seed=0)
    assert source in str(caught.value) and caught.value.hint
