"""States of whole sequences: the numbers of a prefill's taps, with the pictures, and nothing that was not asked for."""

import json
from dataclasses import replace

import pytest
import tiny_qwen
import torch
from draftsmith.core.batch import TEXT, Batch
from draftsmith.core.states import Taps
from draftsmith.data.collate import Sample, collate
from draftsmith.models.targets.llava.section import LlavaTarget, LlavaTargetConfig
from draftsmith.models.targets.load import load_target
from draftsmith.models.targets.qwen.section import QwenTargetConfig
from fails import fails_with
from family_checks import check_pixels_are_seen, check_states
from safetensors.torch import load_file, save_file
from tiled import SIDE, model, processor, request

FAMILIES = ("llava", "llava_next", "llava_onevision")
PICTURES = {"llava": ([(20, 30)], 0), "llava_next": ([(90, 20), (30, 31)], 0), "llava_onevision": ([(33, 50)], 3)}


def target(family: str) -> LlavaTarget:
    made = processor(family)
    return LlavaTarget(model(family), num_token_ids=len(made.tokenizer), image_token_id=made.image_token_id)


def batch_of(family: str, *, louder: float = 1.0) -> tuple[Batch, list]:
    """A row with pictures and a shorter one without; the last ids of both are supervised."""
    asked = [request(family, *PICTURES[family][:1], frames=PICTURES[family][1]), request(family, [])]
    loud = [replace(asked[0], pixels=asked[0].pixels * louder), asked[1]]
    return tiny_qwen.batch_of(*loud, image_size=SIDE, last=4), asked


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_taps_of_a_prefill(family):
    own, (batch, asked) = target(family), batch_of(family)
    states, _, steps = check_states(own, asked, batch, (0, 1), 1e-5)
    assert (batch.modality[0] != TEXT).any() and not batch.attention_mask[1].all()
    for one, step in zip(asked, steps, strict=True):
        torch.testing.assert_close(own.scores(step.feature[0, -1:]), step.logits)
        assert torch.equal(step.prompt.ids[0], one.ids) and torch.equal(step.prompt.modality[0], one.modality)
        assert step.prompt.mask.all() and step.prompt.positions.tolist() == [list(range(len(one.ids)))]
    assert torch.equal(states.positions[0, 0], torch.arange(batch.ids.shape[1]))
    assert own.embedding.shape == (own.vocab_size, own.config.hidden_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_see_the_pixels(family):
    check_pixels_are_seen(target(family), batch_of(family)[0], batch_of(family, louder=-1.0)[0], 1)


def test_what_was_not_asked_for_is_not_there_and_a_head_can_learn_from_it():
    own, (batch, _) = target("llava"), batch_of("llava")
    states = own.states(batch, Taps(visual_layers=(1,)))
    assert states.feature is None and list(states.layers) == [1]
    layer = torch.nn.Linear(own.config.hidden_size, 2)
    layer(states.layers[1]).sum().backward()
    assert layer.weight.grad is not None


def test_a_batch_of_text_alone_has_states():
    own = target("llava")
    sample = Sample([1, 5, 6, 7], [False, False, True, True], [TEXT] * 4, None, "words")
    batch = collate([sample], pad_id=0, image_size=SIDE)
    assert batch.num_dummy_images == 1 and own.states(batch, Taps(feature=True)).feature.abs().sum() > 0


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
def test_the_tables_alone_say_what_the_target_says(family, tmp_path):
    made = tiny_qwen.model(family) if family.startswith("qwen") else model(family)
    made.save_pretrained(tmp_path)
    section = (QwenTargetConfig if family.startswith("qwen") else LlavaTargetConfig)(kind=family, path=str(tmp_path))
    whole, tables = (
        load_target(
            section, tmp_path, num_token_ids=60, image_token_id=None, device=torch.device("cpu"), tables_only=only
        )
        for only in (False, True)
    )
    assert tables.config.num_hidden_layers == whole.config.num_hidden_layers == tables.decoder.num_layers > 0
    states = torch.randn(3, 32)
    assert torch.equal(tables.scores(states), whole.scores(states))
    assert torch.equal(tables.embedding, whole.embedding)
    names = {name for name, _ in tables.decoder.model.named_parameters()}
    assert not any(part in name for name in names for part in ("language_model.layers.", "encoder.layers.", "blocks."))


@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_the_tables_of_a_quantised_target_are_read_without_its_kernels(method, tmp_path):
    """An engine runs it; embedding, norm and LM head are stored as they are, and the layers are not read."""
    made = model("llava")
    made.save_pretrained(tmp_path)
    state = {name: value for name, value in load_file(tmp_path / "model.safetensors").items() if ".layers." not in name}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    quantised = (
        {"quant_method": method, "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        if method == "awq"
        else {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    )
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": quantised}))
    tables = load_target(
        LlavaTargetConfig(kind="llava", path=str(tmp_path)), tmp_path, num_token_ids=60, image_token_id=None,
        device=torch.device("cpu"), tables_only=True,
    )  # fmt: skip
    assert torch.equal(tables.embedding, made.get_input_embeddings().weight)
    assert torch.equal(tables.decoder.language_model.norm.weight, made.model.language_model.norm.weight)


@pytest.mark.parametrize(("change", "said"), [
    (lambda state, name: state.pop(name), "lm_head.weight is missing"),
    (lambda state, name: state.update({name: torch.ones(2, 2)}), r"lm_head.weight is \[2, 2\], expected"),
])  # fmt: skip
def test_a_target_with_other_tensors_than_its_config_says_is_refused(tmp_path, change, said):
    """transformers would draw what is missing at random, and say so in a log alone."""
    made = model("llava")
    made.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state, next(name for name in state if name.endswith("lm_head.weight")))
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"num_token_ids": 8, "image_token_id": 1, "device": torch.device("cpu")}
    refused = fails_with(said, load_target, LlavaTargetConfig(kind="llava", path=str(tmp_path)), tmp_path, **settings)
    assert str(tmp_path) in str(refused)
