"""Drafters as GGUF: keys and tensors that llama.cpp reads, the target's tokenizer, and what it would run otherwise."""

import json
import math

import gguf
import pytest
import torch
from draftsmith.models.formats.export import export_drafter, read_export
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from gguf_files import MERGES, llamas_order, write_target
from published_tiny import VOCAB, WIDTH, block_folder, head_folder, target_config, target_folder
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

EAGLE3 = {"kind": "eagle3", "visual_slots": "read", "image": "placeholder"}
DFLASH = {"kind": "dflash", "block_size": 4, "num_layers": 2, "taps": (2, 5), "mask_token_id": 41}
DSPARK = DFLASH | {"kind": "dspark", "markov_rank": 6}
SIZES = {
    "block_count": 1, "context_length": 2048, "embedding_length": WIDTH, "feed_forward_length": 52, "vocab_size": VOCAB,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8, "attention.value_length": 8,
    "rope.dimension_count": 8, "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
}  # fmt: skip
LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """GGUF of the tiny targets' language model."""
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", LlamaForCausalLM(target_config("llama")))


def head(tmp_path, family="llama", **settings):
    make = block_folder if settings["kind"].startswith(("dflash", "dspark")) else head_folder
    return make(tmp_path / "head", target_folder(tmp_path / "model", family), **settings)


def sent(tmp_path, file, **named):
    return export_drafter(tmp_path / "head", tmp_path / "out", "gguf", target_gguf=file, **named)


def held(folder):
    """Keys without the tokenizer's, and tensors."""
    reader = gguf.GGUFReader(folder / "draft.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert keys["tokenizer.ggml.tokens"][-1] == f"w{VOCAB - 1}" and keys["tokenizer.ggml.merges"] == MERGES
    assert keys["tokenizer.ggml.eos_token_id"] == 2 and "tokenizer.chat_template" not in keys
    return {name: value for name, value in keys.items() if name[:15] != "tokenizer.ggml."}, tensors


def layers(count, *more):
    return {f"blk.{number}.{name}.weight" for number in range(count) for name in (*LAYER, *more)}


def as_keys(architecture, **more):
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": one for key, one in (SIZES | more).items()
    }


def test_eagle3(tmp_path, target):
    made = head(tmp_path, **EAGLE3, draft_vocab_size=20, taps=(1, 4, 6), norm_before_residual=True)
    result = sent(tmp_path, target)
    keys, tensors = held(tmp_path / "out")
    assert keys == as_keys(
        "eagle3", target_layers=[1, 4, 6], target_hidden_size=WIDTH, norm_before_residual=True, norm_before_fc=False
    )
    whole = {"fc.weight", "output_norm.weight", "output.weight", "d2t"}
    assert set(tensors) == layers(1, "attn_norm_2") | whole
    layer = made.midlayer
    assert torch.equal(tensors["blk.0.attn_q.weight"], llamas_order(layer.self_attn.q_proj.weight, 4))
    assert torch.equal(tensors["blk.0.attn_k.weight"], llamas_order(layer.self_attn.k_proj.weight, 2))
    same = {"blk.0.attn_v": layer.self_attn.v_proj, "blk.0.attn_norm": layer.input_layernorm, "fc": made.fc,
            "blk.0.attn_norm_2": layer.hidden_norm, "blk.0.ffn_norm": layer.post_attention_layernorm,
            "blk.0.ffn_up": layer.mlp.up_proj, "output": made.lm_head, "output_norm": made.norm}  # fmt: skip
    assert all(torch.equal(tensors[f"{name}.weight"], module.weight) for name, module in same.items())
    assert tensors["d2t"].dtype == torch.int64 and torch.equal(tensors["d2t"], made.draft_ids)
    assert result.command == (
        f"llama-server --model {target} --spec-draft-model {tmp_path / 'out' / 'draft.gguf'} --spec-type draft-eagle3 "
        "--spec-draft-n-max 5 --no-spec-draft-backend-sampling --flash-attn off --metrics"
    )
    assert read_export(tmp_path / "out")[0].trained == str(tmp_path / "head")


def test_parts_that_only_some_heads_have(tmp_path, target):
    """All of the target's ids need no table of them; bfloat16 is spelt out, and stretched positions divide."""
    options = {"norm_before_fc": True, "own_embedding": True}
    made = head(tmp_path, "llama_long", **EAGLE3, **options, dtype=torch.bfloat16)
    sent(tmp_path, target)
    keys, tensors = held(tmp_path / "out")
    more = {"token_embd.weight", "enc.output_norm.weight", "rope_freqs.weight", "fc.weight", "output_norm.weight"}
    assert set(tensors) == layers(1, "attn_norm_2") | more | {"output.weight"}
    assert keys["eagle3.norm_before_fc"] and tensors["fc.weight"].dtype == torch.float32
    assert torch.equal(tensors["fc.weight"], made.fc.weight.float())
    # Llama 3's: the shortest wave lies between the two bounds, the others are 8 times as long.
    share = (16 / (2 * math.pi) - 1) / 3
    assert tensors["rope_freqs.weight"].tolist() == pytest.approx([1 / ((1 - share) / 8 + share), 8, 8, 8], rel=1e-5)


@pytest.mark.parametrize(("settings", "more", "count"), [
    (DFLASH | {"sliding_window": 8},
     {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True]}, 3),
    (DFLASH | {"causal": True, "draft_vocab_size": 20}, {"attention.causal": True}, 3),
    (DSPARK | {"confidence": {}}, {"sample_from_anchor": True, "has_confidence_head": False}, 4),
    (DSPARK | {"sample_from_anchor": False}, {"sample_from_anchor": False, "has_confidence_head": False}, 3),
])  # fmt: skip
def test_block_drafts(tmp_path, target, settings, more, count):
    made = head(tmp_path, **settings)
    result = sent(tmp_path, target)
    keys, tensors = held(tmp_path / "out")
    all_of_them = {"block_count": 2, "target_layers": [2, 5], "block_size": 4, "attention.causal": False} | more
    assert keys == as_keys("dflash", **all_of_them)
    mask = gguf.GGUFReader(tmp_path / "out" / "draft.gguf").fields["tokenizer.ggml.mask_token_id"].contents()
    kind = settings["kind"]
    assert mask == 41 and f"--spec-type draft-{kind} --spec-draft-n-max {count} " in result.command
    names = layers(2, "attn_q_norm", "attn_k_norm") | {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}
    names |= {"markov_w1.weight", "markov_w2.weight"} if kind == "dspark" else set()
    assert set(tensors) == names | ({"d2t", "output.weight"} if "draft_vocab_size" in settings else set())
    assert torch.equal(tensors["enc.output_norm.weight"], made.hidden_norm.weight)
    assert torch.equal(tensors["blk.1.attn_q.weight"], made.layers[1].self_attn.q_proj.weight)
    assert any("shorter block" in note for note in result.notes)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_draft_language_models(tmp_path, target, config):
    """With as many rows as the target; Qwen2's halves stay as they are, and its biases come along."""
    is_llama = config is LlamaConfig
    made = config(vocab_size=30, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=is_llama)  # fmt: skip
    model = (LlamaForCausalLM if is_llama else Qwen2ForCausalLM)(made)
    model.save_pretrained(tmp_path / "head")
    model_folder = target_folder(tmp_path / "model", "llama")
    result = sent(tmp_path, target, target=str(model_folder))
    keys, tensors = held(tmp_path / "out")
    architecture = "llama" if is_llama else "qwen2"
    assert keys["general.architecture"] == architecture and keys[f"{architecture}.attention.key_length"] == 4
    assert tensors["token_embd.weight"].shape == (VOCAB, 16) and "draft-simple" in result.command
    query = model.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(tensors["blk.1.attn_q.weight"], llamas_order(query, 4) if is_llama else query)
    assert ("output.weight" in tensors, "blk.0.attn_k.bias" in tensors) == (not is_llama, not is_llama)


@pytest.mark.parametrize(("settings", "words"), [
    (EAGLE3 | {"norm_output": True}, "it has norm_output, which its class is not known to have"),
    (EAGLE3 | {"fc_norm": True}, "it has fc_norm"), (EAGLE3 | {"sliding_window": 4}, "it has sliding_window"),
    (EAGLE3 | {"qk_norm": True}, "queries and keys are normed"),
    ({"kind": "peagle", "mask_token_id": 3}, "draft in parallel"), ({"kind": "eagle"}, "only EAGLE-3's"),
    (DSPARK | {"markov_head_type": "gated"}, "Markov head is gated of rank 6"),
    (DFLASH | {"mask_token_id": None}, "its mask is a trained vector"),
])  # fmt: skip
def test_what_llama_cpp_would_run_otherwise_is_refused(tmp_path, target, settings, words):
    head(tmp_path, **settings)
    fails_with(words, sent, tmp_path, target)
    assert not (tmp_path / "out").exists()


def test_pictures_are_refused(tmp_path, target):
    """EAGLE-3 stops the request, and a draft LVLM gets zeros for them; on text EAGLE-3 is written."""
    head(tmp_path, "llava", **EAGLE3)
    fails_with("picture by HTTP 500", sent, tmp_path, target)
    assert sent(tmp_path, target, prompts="text").method == "draft-eagle3"
    lvlm = target_folder(tmp_path / "lvlm", weights=True)
    named = {"target": str(tmp_path / "model"), "target_gguf": target}
    fails_with(r"llama.cpp: zero rows", export_drafter, lvlm, tmp_path / "other", "gguf", **named)


def test_the_targets_file_must_be_the_targets(tmp_path, target, capsys):
    head(tmp_path, **EAGLE3)
    config = target_config("llama")
    fails_with("--target-gguf FILE", sent, tmp_path, None)
    fails_with("is no GGUF", sent, tmp_path, tmp_path / "none.gguf")
    (tmp_path / "cut.gguf").write_bytes(target.read_bytes()[:600])
    fails_with("the package gguf cannot read", sent, tmp_path, tmp_path / "cut.gguf")
    fewer = LlamaForCausalLM(type(config)(**config.to_dict() | {"num_hidden_layers": 3}))
    other = write_target(tmp_path / "other.gguf", fewer)
    fails_with(r"has \[3, 32, 44\] layers, width and tokens", sent, tmp_path, other)
    qwen = write_target(tmp_path / "qwen.gguf", LlamaForCausalLM(config), architecture="qwen2")
    fails_with("llama.cpp's qwen2 is not known to hand layers", sent, tmp_path, qwen)
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["num_hidden_layers"] == 8
    words = ["export", str(tmp_path / "head"), str(tmp_path / "out"), "--target-gguf", str(target), "--to"]
    assert main([*words, "vllm"]) == 2 and "beside --to gguf alone" in capsys.readouterr().err
    assert main([*words, "gguf"]) == 0
    assert f"check    draftsmith verify-engine {tmp_path / 'out'}" in capsys.readouterr().out
