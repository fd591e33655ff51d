"""A PEFT adapter where a model is expected: named as one, with the command that merges it."""

import pytest
import torch
from draftsmith.models.hub import read_config
from fails import fails_with
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder / "lora")
    return folder / "lora", model


def test_the_command_of_the_message_merges_it(adapter, tmp_path, monkeypatch):
    folder, model = adapter
    refusal = fails_with("PEFT adapter", read_config, str(folder), key="target.path")
    command = refusal.hint.split("python -c '")[1].split("', then")[0]
    monkeypatch.chdir(tmp_path)
    exec(command, {})
    merged, ids = LlamaForCausalLM.from_pretrained(tmp_path / "merged"), torch.arange(8)[None]
    torch.testing.assert_close(merged(ids).logits, model(ids).logits)
