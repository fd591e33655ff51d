"""Drafts that are made for an engine: on the target's projected features, and without a prompt's first token."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from draftsmith.core.batch import IMAGE, TEXT, Batch, Request
from draftsmith.core.errors import UserError
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.eval.pair import trained_section
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.lvlm import LvlmConfig, build_drafter, load_drafter, save_lvlm
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.formats.lvlm import from_plugin
from draftsmith.models.hub import is_tied
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.llava.made_for_engines import reading_of
from draftsmith.models.targets.llava.model import LlavaDecoder, LlavaTraining, assemble, llava_config
from fails import fails_with
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaForConditionalGeneration

VOCAB, IMAGE_ID, TOKENS = 44, 40, 4  # a picture of 16 pixels in patches of 8
LLAMA = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 3, "initializer_range": 0.3}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    """A LLaVA of width 32 whose tower is 16 wide."""
    text = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                       vocab_size=VOCAB, initializer_range=0.3)  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              image_size=16, patch_size=8)  # fmt: skip
    torch.manual_seed(0)
    model = assemble(llava_config(text, vision, TokenIds(VOCAB, IMAGE_ID, 1, 2, 0))).eval()
    model.model.multi_modal_projector.linear_1.weight.data.normal_(0, 0.5)
    return model


def section(**settings):
    made = {"kind": "lvlm", "language_model": LLAMA, "vision_tower": "target", "projector_input": "projected"}
    return LvlmConfig.model_validate(made | {"first_token": False} | settings)


def draft_of(target, **settings):
    torch.manual_seed(1)
    return build_drafter(section(**settings), target, TokenIds(VOCAB, IMAGE_ID, 1, 2, 0), seed=0).eval()


def batch(packed=False):
    """A row with a picture, and a shorter one of text."""
    rows = [[1, 5, *[IMAGE_ID] * TOKENS, 6, 7, 8, 9], [1, 11, 12, 13, 14]]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    modality = torch.where(ids == IMAGE_ID, IMAGE, TEXT).to(torch.int8)
    loss = mask & (torch.arange(width) >= 3) & (modality == TEXT)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(width).expand(1, 2, width)
    return Batch(ids, mask, loss, modality, positions, pixels, ("a", "b"), packed=packed)


def test_the_targets_projector_is_copied_and_stays(target):
    draft = draft_of(target)
    inner = draft.model.multi_modal_projector.target.state_dict()
    theirs = target.model.multi_modal_projector.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in inner.items()) and inner.keys() == theirs.keys()
    module = LlavaTraining(draft, ["projector", "language_model"], gradient_checkpointing=False)
    names = [name for name, _ in module.parts()["projector"]]
    assert sorted(names) == sorted(f"projector.linear_{n}.{part}" for n in (1, 2) for part in ("weight", "bias"))
    module(batch()).loss_sum.backward()
    assert all(p.grad is None for p in draft.model.multi_modal_projector.target.parameters())
    assert draft.model.multi_modal_projector.linear_1.weight.grad.abs().sum() > 0
    assert draft.model.multi_modal_projector.linear_1.weight.shape == (24, 32)
    fails_with("trains the tower under them", LlavaTraining, draft, ["vision_tower"], gradient_checkpointing=False)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("first_token", [False, True])
def test_the_first_token_teaches_nothing_where_it_is_left_out(target, packed, first_token):
    draft = draft_of(target, first_token=first_token)
    module = LlavaTraining(draft, ["language_model"], gradient_checkpointing=False)
    given = batch(packed)
    other = replace(given, ids=torch.where(torch.arange(given.ids.shape[1]) == 0, 3, given.ids))
    with torch.no_grad():
        found, changed = module(given), module(other)
        assert torch.equal(found.loss_sum, changed.loss_sum) == (not first_token)
        assert torch.allclose(found.loss_sum, LlavaTraining(
            draft, [], gradient_checkpointing=False)(replace(given, packed=not packed)).loss_sum)  # fmt: skip


def test_training_and_decoding_see_the_same(target):
    """The proposal's scores after a prompt are those of the training forward at its last token."""
    draft, given = draft_of(target), batch()
    module = LlavaTraining(draft, [], gradient_checkpointing=False)
    with torch.no_grad():
        scores = module.scores(module.hidden_states(given))[0, -1]
    scores[IMAGE_ID] = float("-inf")  # never proposed
    ids, modality = given.ids[0], given.modality[0]
    request = Request(ids[:-1], modality[:-1], given.pixels, "a")
    proposer = IndependentProposal(LlavaDecoder(draft, num_token_ids=VOCAB, never=(IMAGE_ID,)), "M", newline_id=3)
    proposer.start(request, None, Warp(1.0), capacity=8)
    proposer.begin(int(ids[-1]))
    torch.testing.assert_close(proposer.root(), scores.softmax(-1), atol=1e-5, rtol=0)
    assert len(proposer.views(request)[0].request.ids) == len(request.ids) - 1
    seen = Request(torch.tensor([IMAGE_ID] * TOKENS + [5]), torch.tensor([IMAGE] * TOKENS + [TEXT], dtype=torch.int8),
                   given.pixels, "b")  # fmt: skip
    fails_with("begins with a picture", proposer.start, seen, None, Warp(1.0), capacity=8)


def saved(draft, folder, **more):
    save_lvlm(draft, folder, {"model": "drafter", "target": None, "tokenizer_hash": "x", **more})
    return folder


def test_a_saved_draft_comes_back_and_transformers_refuses_it(target, tmp_path):
    draft = draft_of(target)
    back = load_drafter(saved(draft, tmp_path / "draft"), tokenizer_hash="x", dtype=torch.float32)
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in draft.state_dict().items())
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["draftsmith"] == {
        "projector_input": "projected", "first_token": False, "target_width": 32}  # fmt: skip
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        LlavaForConditionalGeneration.from_pretrained(tmp_path / "draft")
    plain = draft_of(target, projector_input="tower")  # without its first token alone it is a plain LLaVA
    saved(plain, tmp_path / "plain")
    assert type(load_drafter(tmp_path / "plain", tokenizer_hash="x", dtype=torch.float32)) is type(target)


def test_an_export_for_the_plugin_comes_back(target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    draft = draft_of(target)
    named = {"target": str(tmp_path / "target"), "drafter": section().model_dump(mode="json")}
    made = export_drafter(saved(draft, tmp_path / "draft", **named), tmp_path / "out", "vllm")
    assert made.method == "eagle" and any("pip install ./serving/draftsmith-vllm" in note for note in made.notes)
    values, state = (
        json.loads((tmp_path / "out/config.json").read_text()),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert values["architectures"] == ["EagleDraftsmithLvlm"] and values["draftsmith"]["drafter"] == "lvlm"
    assert (values["hidden_size"], values["projection_dim"]) == (32, 24)
    assert values["draftsmith"]["language_model"]["hidden_size"] == 24
    assert not any("tower" in name or ".target." in name for name in state)
    back = from_plugin(tmp_path / "out", target)
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in draft.state_dict().items())
    with pytest.raises(UserError, match="without a prompt's first token"):
        export_drafter(tmp_path / "draft", tmp_path / "text", "vllm", prompts="text")


def as_trained(target, tmp_path, trained=(), **settings):
    """Folder of a draft beside the target's, with the section that it was trained by."""
    target.save_pretrained(tmp_path / "target")
    words = train_tokenizer(["one two three\n", "four five\n"] * 8, VOCAB)
    words.save_pretrained(tmp_path / "target")
    named = {"projector_input": "tower", "first_token": True} | settings
    draft = draft_of(target, **named)
    for name in trained:
        draft.state_dict()[name] += 1
    manifest = {"target": str(tmp_path / "target"), "drafter": section(**named).model_dump(mode="json")}
    return draft, saved(draft, tmp_path / "draft", **manifest), words("\n", add_special_tokens=False).input_ids[-1]


@pytest.mark.parametrize("reads", ["tower", "projected"])
def test_a_draft_as_it_was_trained_is_served_with_patches(target, tmp_path, reads):
    draft, folder, newline = as_trained(target, tmp_path, projector_input=reads)
    made = export_drafter(folder, tmp_path / "out", "vllm")
    assert made.method == "draft_model" and "--no-enable-prefix-caching" not in made.command
    assert made.command.startswith("DRAFTSMITH_VLLM_PATCHES=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ")
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["draftsmith"] == {"format": 1, "drafter": "lvlm-m", "projector_input": reads}
    back = from_plugin(tmp_path / "out", target)
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in draft.state_dict().items())
    assert reading_of(back.config).first_token and type(back) is type(draft)

    blind = export_drafter(folder, tmp_path / "blind", "vllm", mode="T")
    assert "--no-enable-prefix-caching" in blind.command
    values = json.loads((tmp_path / "blind/config.json").read_text())
    assert values["draftsmith"] == {"format": 1, "drafter": "lvlm-t", "newline_id": newline}
    assert not any("projector" in name for name in load_file(tmp_path / "blind/model.safetensors"))
    assert trained_section(tmp_path / "blind", hint="").mode.members == ("T",)
    back = from_plugin(tmp_path / "blind", target).model.language_model
    own = draft.model.language_model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in back.state_dict().items())


@pytest.mark.parametrize(("settings", "trained", "words"), [
    ({"mode": "MT"}, (), r"drafts as an ensemble \(M, T\)"),
    ({"mode": "P"}, (), "in mode P it is shown something else"),
    ({"first_token": False}, (), "was trained without a prompt's first token"),
    ({"vision_feature_layer": -1}, (), "its vision_feature_layer is -1, and the target's -2"),
    ({}, ("model.vision_tower.embeddings.patch_embedding.weight",), r"1 of its tower's \d+ tensors are not"),
])  # fmt: skip
def test_a_draft_that_no_patch_serves_is_refused_with_every_reason(target, tmp_path, settings, trained, words):
    _, folder, _ = as_trained(target, tmp_path, trained, **settings)
    with pytest.raises(UserError, match=rf"not even with patches:\n  - (.|\n)*{words}(.|\n)*our own loop"):
        export_drafter(folder, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_an_exports_tables_are_tied_as_the_drafts_own_are(target, tmp_path, theirs, own):
    """Whatever the target's are."""
    given = copy.deepcopy(target.config)
    given.tie_word_embeddings = given.text_config.tie_word_embeddings = theirs
    other = assemble(given).eval()
    other.save_pretrained(tmp_path / "target")
    draft = draft_of(other, language_model=LLAMA | {"tie_word_embeddings": own})
    named = {"target": str(tmp_path / "target"), "drafter": section().model_dump(mode="json")}
    export_drafter(saved(draft, tmp_path / "draft", **named), tmp_path / "out", "vllm")
    back = from_plugin(tmp_path / "out", other)
    assert is_tied(back.config) == is_tied(draft.config) == own
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in draft.state_dict().items())


@pytest.mark.parametrize("settings", [{"vision_tower": "openai/clip"}, {"newline": True}])
def test_projected_features_are_of_the_targets_own_tower(settings):
    fails_with("wants vision_tower: target", section, error=ValidationError, **settings)
