"""A target section of another package that names how its pictures are read."""

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData
from draftsmith.data.families.llava import LlavaFamily
from draftsmith.data.processor_files import load_processor
from draftsmith.eval.pair import open_pair
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.targets.causal.section import CausalTarget, CausalTraining
from draftsmith.models.targets.family import Family
from draftsmith.models.targets.section import TargetSection
from draftsmith.trainers.estimate.data import image_reader_of, on_disk, text_lengths
from draftsmith.trainers.run.context import Context
from fails import fails_with
from small_records import talk
from tiled import processor
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig

LLAMA = Family("own", "LlamaForCausalLM", CausalTraining, CachedDecoder)


OWN = LlavaFamily("own", "OwnProcessor")


class OwnSection(TargetSection):
    families: ClassVar[dict[str, Family]] = {"llama": LLAMA}
    picture_family: ClassVar[Any] = OWN

    kind: str

    def target(self, model, *, num_token_ids, image_token_id):
        return CausalTarget(model, num_token_ids=num_token_ids)


@pytest.fixture(name="section")
def _section(tmp_path):
    made = processor("llava").of_family(OWN)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=made.num_token_ids, **sizes)).save_pretrained(tmp_path)
    made.save(tmp_path)
    fails_with("processor_class is OwnProcessor", load_processor, tmp_path)
    return OwnSection(path=str(tmp_path))


def test_a_stage_and_an_evaluation_read_its_files(section):
    context = Context.__new__(Context)
    object.__setattr__(context, "target", section)
    object.__setattr__(context, "inputs", {})
    assert context.processor().picture_family is OWN
    assert open_pair(section, {}, device=torch.device("cpu")).processor.picture_family is OWN


def test_a_dry_run_counts_by_it(section, tmp_path):
    turns = talk("Which?", "A cat.")
    (tmp_path / "data.json").write_text(json.dumps([{"id": "a", "conversations": turns}]))
    data = ConversationData(path=str(tmp_path / "data.json"))
    stage = SimpleNamespace(data=data, format=PromptFormat(), learns_answers=True)
    plan = SimpleNamespace(stage=stage, recipe=SimpleNamespace(target=section))
    assert text_lengths(plan, on_disk(stage), prompt=False).tolist()[0] > 0
    config = LlavaConfig(vision_config=CLIPVisionConfig(), text_config=LlamaConfig())
    assert image_reader_of(data, config, section.picture_family).processor.picture_family is OWN
    assert image_reader_of(data, config).processor.family == "llava"
