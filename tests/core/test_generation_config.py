"""The end tokens that a model's files name, as transformers reads them."""

import json
import re

import pytest
from draftsmith.core.pretrained import Checkpoint
from fails import fails_with
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


@pytest.fixture
def folder(tmp_path):
    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def write(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))


@pytest.mark.parametrize("ends", [7, [7], [9, 7], [30, 7, 9], [9, 7, 30, 2], [7, 7], None, []])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_they_are_those_of_transformers(folder, file, ends):
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    write(folder, file, eos_token_id=ends)
    theirs = LlamaForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    listed = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    assert Checkpoint(folder).generation_ends() == tuple(sorted(set(listed)))


def test_a_text_config_is_read_where_the_whole_ones_names_none(tmp_path):
    values = {"model_type": "llava", "text_config": {"eos_token_id": [5, 3]}}
    write(tmp_path, "config.json", **values)
    assert Checkpoint(tmp_path).generation_ends() == (3, 5)
    assert GenerationConfig.from_model_config(values).eos_token_id == [5, 3]
    write(tmp_path, "config.json", eos_token_id=4)
    assert Checkpoint(tmp_path).generation_ends() == (4,)


def test_a_folder_without_configs_and_ids_below_zero_name_none(tmp_path):
    assert Checkpoint(tmp_path).generation_ends() == ()
    write(tmp_path, "generation_config.json", eos_token_id=[-1, 4])
    assert Checkpoint(tmp_path).generation_ends() == (4,)


@pytest.mark.parametrize("ends", ["</s>", [2, "3"], 2.0, True, [[2]], {"a": 1}])
def test_what_is_no_id_is_refused_with_file_and_key(tmp_path, ends):
    write(tmp_path, "generation_config.json", eos_token_id=ends)
    told = fails_with(r"eos_token_id holds .*, expected the id", Checkpoint(tmp_path).generation_ends)
    assert re.search(r"generation_config\.json", str(told))


@pytest.mark.parametrize(("values", "named"), [
    ({}, None), ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": []}, None),
    ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, None),
    ({"repetition_penalty": 1.05}, "repetition_penalty 1.05,"),
    ({"num_beams": 4, "stop_strings": ["."]}, r"num_beams 4, stop_strings \['\.'\], which"),
    ({"no_repeat_ngram_size": 3, "suppress_tokens": [7]}, r"no_repeat_ngram_size 3, suppress_tokens \[7\], which"),
])  # fmt: skip
def test_penalties_are_named_that_no_loop_here_applies(folder, values, named):
    write(folder, "generation_config.json", **values)
    text = Checkpoint(folder).penalties()
    assert not text if named is None else re.match(rf"generation_config\.json has {named}", text), text
