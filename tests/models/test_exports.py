"""Exports: the contract of each engine key by key, the same numbers by its own layer, and what is refused and why."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.results import BEGUN, DONE, Mark, sums_of, write_mark, write_sums
from draftsmith.eval.pair import trained_section
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.eagle import from_export
from draftsmith.models.formats.export import export_drafter, files_of, read_export
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.heads import import_head
from draftsmith.models.formats.plugin import PATCHES
from draftsmith.models.formats.source import Target, read_beside, read_source
from draftsmith.models.formats.target import export_target
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.base import language_shape
from draftsmith.models.targets.llava.model import assemble, llava_config
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from published_tiny import (
    LONG,
    VOCAB,
    WIDTH,
    block_folder,
    eagle1_of_engines,
    eagle3_of_engines,
    exported,
    head_folder,
    inputs,
    ours,
    target_config,
    target_folder,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)
from visual_tiny import EAGLE, MEDUSA, llamagen
from visual_tiny import target as drawing

READ = {"kind": "eagle3", "visual_slots": "read", "draft_vocab_size": 20}
LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj")  # fmt: skip
DFLASH = {"kind": "dflash", "block_size": 4, "num_layers": 2, "taps": (2, 5), "mask_token_id": 41}
MIDDLE = {"kind": "sparrow", "vata": False}
PEAGLE = READ | {"kind": "peagle", "parallel_tokens": 5, "mask_token_id": 41}


def made(tmp_path, family="llava", weights=False, **settings):
    """Folders of a target and of a head beside it, and the head."""
    target = target_folder(tmp_path / "target", family, weights=weights)
    make = block_folder if settings["kind"] == "dflash" else head_folder
    return target, tmp_path / "head", make(tmp_path / "head", target, **settings)


def sent(tmp_path, engine, family="llava", *, prompts="all", weights=False, **settings):
    """A head, and what was exported of it: its config and tensors, and what the export says."""
    target, folder, head = made(tmp_path, family, weights, **settings)
    result = export_drafter(folder, tmp_path / "out", engine, prompts=prompts)
    values, state = exported(tmp_path / "out")
    return SimpleNamespace(target=target, folder=folder, head=head, result=result, values=values, state=state)


def engines_layer(out, kind="eagle3", **more):
    """What the engine's layer computes."""
    return (eagle3_of_engines if kind == "eagle3" else eagle1_of_engines)(out.values, out.state, *inputs(), **more)


def same_tensors(head, state):
    assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items())


def back(kind, folder, family="llava", image="placeholder"):
    return import_head(kind, str(folder), target_config(family).get_text_config(), embedding=None, image=image)


def same(found, head, tolerance=2e-5):
    embeds, states = inputs()
    torch.testing.assert_close(found, ours(head, embeds, states), atol=tolerance, rtol=0)


# ---- EAGLE-3


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llama"])
def test_eagle3_for_vllm(tmp_path, family):
    out = sent(tmp_path, "vllm", family, **READ)
    head, values, state = out.head, out.values, out.state
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": WIDTH,
        "vocab_size": VOCAB, "draft_vocab_size": 20, "tie_word_embeddings": False, "attention_bias": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "norm_before_residual": False, "target_hidden_size": WIDTH,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10000.0,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert "eagle_config" not in values and "bias" not in values
    norms = [f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", *LAYER)]
    assert set(state) == {f"{name}.weight" for name in (*norms, "norm", "fc", "lm_head")} | {"d2t", "t2d"}
    assert state["fc.weight"].shape == (WIDTH, 3 * WIDTH) and state["d2t"].dtype == torch.int64
    assert torch.equal(state["d2t"] + torch.arange(20), head.draft_ids)
    assert torch.equal(state["t2d"].nonzero()[:, 0], head.draft_ids)
    same(engines_layer(out), head)
    # Readers of transformers 4 and 5 find the same rotation.
    read = LlamaConfig(**{k: v for k, v in values.items() if k != "architectures"})
    assert read.rope_parameters["rope_theta"] == 10000.0
    assert '"method": "eagle3"' in out.result.command and out.result.method == "eagle3"


@pytest.mark.parametrize(("settings", "words"), [
    (READ | {"taps": (1, 4, 6)}, r"joins layers \[1, 4, 6\]: a converter that writes none .* join \[2, 4, 5\]"),
    (READ | {"norm_output": True}, "converter reads it without norm_output"),
    (DFLASH, "asked for more than 3 it drafts places that no block has"), (READ, None),
])  # fmt: skip
def test_what_others_would_run_differently_without_a_word_is_named(tmp_path, settings, words):
    notes = "\n".join(sent(tmp_path, "vllm", **settings).result.notes)
    assert re.search(words or "", notes) and (words is not None or "converter" not in notes)


def test_a_draft_with_all_ids_has_no_table_of_them(tmp_path):
    """vLLM makes the parameter for fewer ids only, and stops at a file that has it all the same."""
    out = sent(tmp_path, "vllm", **READ | {"draft_vocab_size": None})
    assert out.values["draft_vocab_size"] == out.head.shape.vocab_size and not {"d2t", "t2d"} & set(out.state)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_end_of_the_target_is_written(tmp_path, engine):
    target, folder, _ = made(tmp_path, "qwen2_5_vl", **READ, image="projected")
    for ends in ([9, 2, 7], [7]):
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        export_drafter(folder, tmp_path / f"out-{len(ends)}", engine, prompts="text")
        values, _ = exported(tmp_path / f"out-{len(ends)}")
        own = json.loads((target / "config.json").read_text())["text_config"].get("eos_token_id")
        assert values["eos_token_id"] == (sorted(ends) if len(ends) > 1 else own)


@pytest.mark.parametrize(("taps", "ids"), [(None, None), ((1, 4, 6), [0, 3, 5])])
def test_sglang_counts_what_leaves_a_layer(tmp_path, taps, ids):
    """The layer before ours; and no ids at the top level, which it would read in the same way."""
    out = sent(tmp_path, "sglang", "qwen2_5_vl", **READ, image="projected", taps=taps)
    assert out.values.get("eagle_config") == (ids and {"eagle_aux_hidden_state_layer_ids": ids})
    assert "eagle_aux_hidden_state_layer_ids" not in out.values
    assert {"fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t"} <= set(out.state)
    same(engines_layer(out), out.head)
    assert back("eagle3", tmp_path / "out", "qwen2_5_vl", "projected").config.taps == taps


def test_sglang_turns_by_three_positions(tmp_path):
    out = sent(tmp_path, "sglang", "qwen2_5_vl", **READ, image="projected", positions="mrope")
    assert out.values["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 1, 1]}
    assert back("eagle3", tmp_path / "out", "qwen2_5_vl", "projected").config.positions == "mrope"


def test_speculators(tmp_path):
    """Every key that vLLM and the package validate; what their defaults disagree on is written."""
    _, folder, head = made(tmp_path, "qwen2_5_vl", **READ)
    fails_with("names the target by its Hub id", export_drafter, folder, tmp_path / "out", "speculators")
    whose = Target(target_config("qwen2_5_vl"), "org/tiny-qwen")
    values, state = files_of("speculators", read_source(folder, whose))
    assert values["speculators_model_type"] == "eagle3" and values["architectures"] == ["Eagle3Speculator"]
    assert values["norm_before_residual"] is False and values["draft_vocab_size"] == 20
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and values["target_hidden_size"] is None
    said, whole = values["speculators_config"], ["Qwen2_5_VLForConditionalGeneration"]
    assert said["verifier"] == {"name_or_path": "org/tiny-qwen", "architectures": whole}
    assert said["algorithm"] == "eagle3" and said["default_proposal_method"] == "greedy"
    assert {"proposal_type": "greedy", "speculative_tokens": 5}.items() <= said["proposal_methods"][0].items()
    layer = values["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["vocab_size"] == VOCAB and layer["num_hidden_layers"] == 1
    assert not any(name.startswith("midlayer") for name in state) and "layers.0.hidden_norm.weight" in state
    same(eagle3_of_engines(layer, state, *inputs(), prefix="layers.0."), head)


def test_eagle3_in_eagles_own_layout(tmp_path):
    out = sent(tmp_path, "eagle", "llama", **READ)
    assert "midlayer.hidden_norm.weight" in out.state and "embed_tokens.weight" not in out.state
    same(engines_layer(out), out.head)
    head_folder(tmp_path / "other", out.target, **READ, taps=(1, 2, 3))
    with pytest.raises(UserError, match=r"joins layers \(1, 2, 3\), and the code always takes \(2, 4, 5\)"):
        export_drafter(tmp_path / "other", tmp_path / "no", "eagle")


# ---- EAGLE-1


@pytest.mark.parametrize("fc_bias", [True, False])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_eagle1_for_vllm(tmp_path, family, fc_bias):
    """Its fc has no bias: ours moves into the attention's, and the layer computes the same."""
    out = sent(tmp_path, "vllm", family, kind="eagle", image="placeholder", fc_bias=fc_bias)
    values, state = out.values, out.state
    assert values["architectures"] == ["LlamaForCausalLM"] and values["model_type"] == "llama" and "bias" not in values
    assert state["fc.weight"].shape == (WIDTH, 2 * WIDTH) and "fc.bias" not in state
    assert not any("input_layernorm" in name or "embed" in name or "lm_head" in name for name in state)
    assert values["attention_bias"] is fc_bias and ("layers.0.self_attn.o_proj.bias" in state) is fc_bias
    assert ("qkv_bias" in values) == (family == "qwen2_5_vl" and not fc_bias)
    same(engines_layer(out, "eagle"), out.head)
    assert any("no bias" in note for note in out.result.notes) is fc_bias
    again = back("eagle", tmp_path / "out", family)
    same(ours(again.head, *inputs()), out.head)
    assert again.config.fc_bias is fc_bias and again.config.image == "placeholder"


@pytest.mark.parametrize("fc_bias", [True, False])
def test_eagle1_for_sglang(tmp_path, fc_bias):
    """Its fc has a bias that nothing sets to zero."""
    out = sent(tmp_path, "sglang", prompts="text", kind="eagle", fc_bias=fc_bias)
    assert out.values["architectures"] == ["LlamaForCausalLMEagle"] and out.state["fc.bias"].shape == (WIDTH,)
    assert bool(out.state["fc.bias"].any()) is fc_bias
    same(engines_layer(out, "eagle"), out.head)
    same(ours(back("eagle", tmp_path / "out").head, *inputs()), out.head)


@pytest.mark.parametrize("kind", ["msd", "vispec", "eagle"])
def test_eagles_own_layout(tmp_path, kind):
    """With a copy of the target's rows, which that code loads strictly, and flags under its names."""
    target, folder, head = made(tmp_path, weights=True, kind=kind, **({} if kind == "vispec" else {"fc_bias": True}))
    prompts = "text" if kind == "eagle" else "all"
    result = export_drafter(folder, tmp_path / "out", "eagle", target=str(target), prompts=prompts)
    values, state = exported(tmp_path / "out")
    assert values["bias"] is True and values["qkv_bias"] is False and values["num_hidden_layers"] == 1
    rows = load_file(target / "model.safetensors")
    (name,) = [n for n in rows if n.endswith("embed_tokens.weight")]
    assert torch.equal(state.pop("embed_tokens.weight"), rows[name])
    same_tensors(head, state)
    assert len(state) == len(head.state_dict()) and any("licence" in note for note in result.notes)
    text = target_config().get_text_config()
    again = import_head(kind, str(tmp_path / "out"), text, embedding=rows[name], image="placeholder")
    same_tensors(again.head, head.state_dict())


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "eagle3"), ("sglang", "eagle3"), ("vllm", "eagle")])
def test_a_stretched_rotation_travels(tmp_path, engine, kind):
    """Llama 3.1's: engines read it from the head's own config, and so do we when it comes back."""
    settings = READ if kind == "eagle3" else {"kind": "eagle", "image": "placeholder"}
    out = sent(tmp_path, engine, "llama_long", **settings)
    values = out.values
    assert values["rope_scaling"] == LONG and values["rope_parameters"] == {"rope_theta": 10000.0, **LONG}
    same(engines_layer(out, kind), out.head)
    again = back(kind, tmp_path / "out", "llama_long")
    assert again.config.rope == "target" and again.head.shape.rope_scaling == out.head.shape.rope_scaling == LONG
    plain = {**values, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(plain))
    result = back(kind, tmp_path / "out", "llama_long")
    assert result.config.rope == "plain" and result.head.shape.rope_scaling is None
    assert any("rope: plain" in note for note in result.notes)
    fails_with("positions are stretched", export_drafter, out.folder, tmp_path / "third", "eagle")


# ---- refused


@pytest.mark.parametrize(
    ("engine", "family", "settings", "says"),
    [
        ("vllm", "llava", {"kind": "eagle3"}, "no input stands at a picture"),
        ("vllm", "llava", {"kind": "eagle3", "visual_slots": "middle"}, "one middle state"),
        ("vllm", "llava", READ | {"image": "projected"}, "the projected embedding stands at pictures here"),
        ("speculators", "llava", READ | {"image": "projected"}, "puts the placeholder"),
        ("sglang", "qwen2_5_vl", READ, "puts the projected"),
        ("sglang", "llava", READ, "its class of llava hands no states to a head of EAGLE-3"),
        ("vllm", "qwen2_5_vl", READ | {"positions": "mrope"}, "turns by three"),
        ("vllm", "llava", READ | {"taps": (2, 4, 8)}, "taps after the last layer"),
        ("sglang", "llava", {"kind": "msd"}, "a picture enters its layer directly"),
        ("vllm", "qwen2_5_vl", {"kind": "msd"}, "norms its input"),
        ("sglang", "llava", {"kind": "vispec"}, "a few vectors stand for a picture"),
        ("vllm", "llava", {"kind": "sparrow", "positions": "flat"}, "(drafter.positions: flat), and in the engine"),
        ("vllm", "llava", {"kind": "vispec", "positions": "compact", "num_queries": 9}, "a picture has 4 tokens"),
        ("vllm", "qwen2_5_vl", {"kind": "vispec", "positions": "compact"}, "pictures alone, not qwen2_5_vl"),
        ("vllm", "llava", {"kind": "msd", "visual_share": 0.5}, "a share of 0.5 of a picture's tokens"),
        ("vllm", "llava", {"kind": "hivis", "num_steps": 2, "input_norm": False}, "a vector for each step"),
        ("vllm", "llava", {"kind": "eagle", "image": "placeholder", "state": -2}, "before the last layer"),
        ("sglang", "llava", {"kind": "eagle", "image": "placeholder", "vata": True}, "text-only window"),
        ("speculators", "llava", {"kind": "eagle", "image": "placeholder"}, "no EAGLE-1 type"),
        ("sglang", "llava", {"kind": "eagle"}, "hashes and no ids"),
        ("eagle", "llava", {"kind": "sparrow"}, "no published code"),
        ("eagle", "llava", READ, "reads text alone"),
        ("vllm", "qwen3_vl", READ, "it joins layer 2 as that hands it over"),
        ("vllm", "qwen3_vl", {"kind": "eagle", "image": "placeholder"}, "queries and keys are normed"),
        ("sglang", "qwen3_vl", READ | {"image": "projected", "positions": "mrope", "taps": (4, 5, 6)}, "alternate"),
        # Middle states that vLLM would not hand over.
        ("vllm", "llava", MIDDLE | {"middle_layer": 8}, "its middle layer is the last one"),
        ("vllm", "llava", MIDDLE | {"norm_eps": 1e-3}, "its norms add another number"),
        ("vllm", "llava", MIDDLE | {"visual_share": 0.5}, "it keeps a share of 0.5"),
        ("vllm", "llava", DFLASH | {"mask_token_id": None}, "drafter.mask_token_id"),
        ("vllm", "llava", DFLASH | {"taps": (2, 8)}, "after the last layer"),
        ("vllm", "llava", DFLASH | {"positions": "compact"}, "drafter.positions: flat"),
        ("vllm", "llava", DFLASH | {"visual_slots": "none"}, "sees no state at a picture"),
        ("vllm", "qwen3_vl", DFLASH | {"taps": (2, 5)}, "Qwen3-VL adds"),
        ("sglang", "llava", DFLASH, "no layout for DFlash drafts"),
        ("vllm", "llava", PEAGLE | {"mask_token_id": None}, "mask_token_id"),
        ("sglang", "llava", PEAGLE, "no layout for heads that draft in par"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_express(tmp_path, engine, family, settings, says):
    _, folder, _ = made(tmp_path, family, **settings)
    caught = fails_with("", export_drafter, folder, tmp_path / "out", engine)
    assert says in str(caught) and str(folder) in str(caught)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "target"]


@pytest.mark.parametrize(
    "settings",
    [{"kind": "msd"}, {"kind": "eagle", "vata": True}, {"kind": "sparrow", "input_norm": False}, {"kind": "eagle3"}],
)
def test_a_head_that_only_pictures_would_confuse(tmp_path, settings):
    """For prompts of text it is the same layer; the folder says so."""
    out = sent(tmp_path, "vllm", prompts="text", **settings)
    same(engines_layer(out, settings["kind"]), out.head)
    assert any("without pictures" in note for note in out.result.notes)
    said = json.loads((tmp_path / "out" / "draftsmith.json").read_text())["export"]
    assert said["prompts"] == "text" and said["engine"] == "vllm" and "transformers" in said["tested_with"]


@pytest.mark.parametrize(("method", "manifest", "says"), [
    (EAGLE, {"method": "eagle", "target": {"kind": "llamagen", "cfg_scale": 3.0}, "condition_dropout": 0.1},
     "row and column(.|\n)*classifier-free guidance"),
    # Medusa's folder holds no EAGLE-1 config; its manifest is enough.
    (MEDUSA, {"method": "medusa", "target": {"kind": "llamagen", "cfg_scale": 3.0}, "condition_dropout": 0.1},
     "no Medusa any more(.|\n)*classifier-free guidance"),
    # LANTERN's name no target.
    (EAGLE, {"method": "eagle", "imported": {"as": "lantern", "source": "jadohu/llamagen_drafter"}}, "row and column"),
])  # fmt: skip
def test_heads_of_image_generators(tmp_path, method, manifest, says):
    method.save(method.build(drawing(llamagen("text"))), tmp_path / "head", manifest)
    for engine in ("vllm", "sglang"):
        caught = fails_with(says, export_drafter, tmp_path / "head", tmp_path / "out", engine)
        assert "no engine" in str(caught)


def test_weights_of_another_shape_name_their_file(tmp_path):
    _, folder, head = made(tmp_path, **READ)
    state = dict(head.state_dict())
    save_file(state | {"fc.weight": state["fc.weight"][:4].clone()}, folder / "model.safetensors")
    caught = fails_with(r"fc\.weight", export_drafter, folder, tmp_path / "out", "vllm")
    assert caught.where == str(folder / "model.safetensors")


def test_a_published_folder_that_was_changed(tmp_path):
    _, folder, _ = made(tmp_path, **READ)
    write_sums(folder)
    export_drafter(folder, tmp_path / "out", "vllm")
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"!")
    fails_with(r"model\.safetensors is not as it was published", export_drafter, folder, tmp_path / "other", "vllm")


def test_folders_that_are_no_drafters(tmp_path):
    fails_with("no directory", export_drafter, tmp_path / "nowhere", tmp_path / "out", "vllm")
    _, folder, _ = made(tmp_path, **READ)
    (folder / "draftsmith.json").unlink()
    fails_with("does not say which drafter", export_drafter, folder, tmp_path / "out", "vllm")
    (tmp_path / "out").mkdir()
    fails_with("the destination exists", export_drafter, folder, tmp_path / "out", "vllm")


# ---- whole drafts


def draft_folder(folder, rows=VOCAB, dtype=torch.bfloat16):
    text = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                       vocab_size=rows, max_position_embeddings=64)  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    torch.manual_seed(3)
    model = assemble(llava_config(text, vision, TokenIds(rows, 40, 0, 2, 1))).to(dtype)
    model.save_pretrained(folder)
    (folder / "draftsmith.json").write_text(json.dumps({"model": "drafter", "target": "inline", "tokenizer_hash": "t"}))
    (folder / "tokenizer.json").write_text("{}")
    return model


def test_a_draft_with_a_tower(tmp_path):
    target = target_folder(tmp_path / "target")
    model = draft_folder(tmp_path / "draft")
    with pytest.raises(UserError, match="draft models read ids alone"):
        export_drafter(tmp_path / "draft", tmp_path / "out", "sglang", target=str(target))
    with pytest.raises(UserError, match="--mode says what a draft LVLM is shown"):
        export_drafter(tmp_path / "draft", tmp_path / "out", "vllm", target=str(target), prompts="text", mode="T")
    fails_with("--target runs/x/target", export_drafter, tmp_path / "draft", tmp_path / "out", "vllm", prompts="text")
    with pytest.raises(UserError, match="layout is for heads"):
        export_drafter(tmp_path / "draft", tmp_path / "out", "speculators", target=str(target))
    exported = export_drafter(tmp_path / "draft", tmp_path / "out", "vllm", target=str(target), prompts="text")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(draft) is LlamaForCausalLM and draft.dtype == torch.bfloat16 and exported.method == "draft_model"
    ids = torch.tensor([[1, 5, 9, 30]])
    assert torch.equal(draft(ids).logits, model(ids).logits)
    assert draft.config.vocab_size == VOCAB and (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", ["llava", "causal"])
def test_a_draft_that_lacks_a_tensor(tmp_path, kind):
    """transformers would draw it at random, and say so in a log alone."""
    target = target_folder(tmp_path / "target")
    model = draft_folder(tmp_path / "draft")
    if kind == "causal":
        shutil.rmtree(tmp_path / "draft")
        LlamaForCausalLM(model.config.text_config).save_pretrained(tmp_path / "draft")
    state = load_file(tmp_path / "draft" / "model.safetensors")
    gone = next(name for name in state if name.endswith("layers.1.mlp.up_proj.weight") and "vision" not in name)
    del state[gone]
    save_file(state, tmp_path / "draft" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        export_drafter(tmp_path / "draft", tmp_path / "out", "vllm", target=str(target), prompts="text")


def test_a_draft_of_fewer_rows_than_its_target(tmp_path):
    """vLLM refuses a draft of another vocabulary: rows are added, and its own ids (JackFram's) are the target's."""
    target = target_folder(tmp_path / "target", "llama")
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                         vocab_size=40, bos_token_id=0, eos_token_id=2, pad_token_id=1)  # fmt: skip
    torch.manual_seed(1)
    small = LlamaForCausalLM(config).eval()
    small.save_pretrained(tmp_path / "draft")
    exported = export_drafter(tmp_path / "draft", tmp_path / "out", "sglang", target=str(target))
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[3, 5, 9]])
    assert draft.config.vocab_size == VOCAB and any("4 rows added" in note for note in exported.notes)
    torch.testing.assert_close(draft(ids).logits[..., :40], small(ids).logits)
    theirs = AutoConfig.from_pretrained(target)
    assert (draft.config.bos_token_id, draft.config.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)
    big = LlamaForCausalLM(LlamaConfig(**config.to_dict() | {"vocab_size": 50}))
    big.save_pretrained(tmp_path / "big")
    with pytest.raises(UserError, match="the draft has 50 rows of vocabulary, and the target 44"):
        export_drafter(tmp_path / "big", tmp_path / "no", "vllm", target=str(target))


# ---- folders of a run


def finished(folder):
    """As the runner marks a stage's folder."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    write_mark(folder / BEGUN, Mark("f", settings={}))
    write_mark(folder / DONE, Mark("f", files=sums_of(folder, names)))


def test_a_folder_that_is_not_as_its_stage_wrote_it_is_not_exported(tmp_path):
    """The list of done.json was compared by the next stage alone; weights of a flipped bit went to the engine."""
    _, folder, _ = made(tmp_path, **READ)
    finished(folder)
    export_drafter(folder, tmp_path / "whole", "vllm")
    file = next(folder.glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    changed = f"{file.name} of stage {folder.name} was changed after it was written"
    caught = fails_with(changed, export_drafter, folder, tmp_path / "out", "vllm")
    assert caught.where == str(file) and f"restart={folder.name}" in caught.hint
    file.write_bytes(whole)
    (folder / "more.safetensors").write_bytes(whole)
    with pytest.raises(UserError, match=r"more\.safetensors of stage .* is not one of its files"):
        export_drafter(folder, tmp_path / "out", "vllm")
    (folder / "more.safetensors").unlink()
    (folder / DONE).unlink()
    fails_with(f"stage {folder.name} has not finished", export_drafter, folder, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


def test_a_target_of_a_run_is_compared_too(tmp_path):
    _, folder, _ = made(tmp_path, **READ)
    target = tmp_path / "trained"
    target.mkdir()
    (target / "config.json").write_text("{}")
    finished(target)
    (target / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"config\.json of stage trained has 23 bytes and was written with 2"):
        export_drafter(folder, tmp_path / "out", "vllm", target=str(target))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_vispec_without_pictures_is_an_eagle_head(tmp_path, engine):
    """Its global vector is zero before the first picture."""
    out = sent(tmp_path, engine, prompts="text", kind="vispec")
    assert not any(name.startswith(("imadpt", "img_fc")) for name in out.state)
    embeds, states = inputs()
    count = embeds.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = out.head(embeds, states, torch.arange(count), mask, image=torch.zeros_like(states))
        other = out.head(embeds, states, torch.arange(count), mask, image=torch.ones_like(states))
    torch.testing.assert_close(engines_layer(out, "eagle"), expected, atol=2e-5, rtol=0)
    assert not torch.allclose(expected, other, atol=1e-2)
    manifest = json.loads((tmp_path / "out" / "draftsmith.json").read_text())
    assert manifest["drafter"]["kind"] == manifest["method"] == "eagle"
    again = ours(back("eagle", tmp_path / "out").head, embeds, states)
    torch.testing.assert_close(again, expected, atol=2e-5, rtol=0)


# ---- what our plugin patches vLLM for


def read_again(folder):
    config = trained_section(folder, hint="")
    return from_export(folder, config, language_shape(target_config().get_text_config()))


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        ({"kind": "sparrow"}, {"drafter": "window", "fc_bias": True, "input_norm": True}),
        ({"kind": "hivis", "input_norm": False}, {"drafter": "window", "fc_bias": True, "input_norm": False}),
        ({"kind": "eagle", "image": "placeholder", "vata": True, "positions": "compact", "fc_bias": False},
         {"drafter": "window", "fc_bias": False, "input_norm": False}),
        ({"kind": "msd", "vata": True, "positions": "compact"},
         {"drafter": "window", "fc_bias": True, "input_norm": False}),
        ({"kind": "vispec", "positions": "compact", "num_queries": 3},
         {"drafter": "vispec", "fc_bias": True, "input_norm": False, "num_queries": 3, "num_held": 2}),
        ({"kind": "vispec", "positions": "compact", "vata": True},
         {"drafter": "vispec", "fc_bias": True, "input_norm": False, "num_queries": 2, "num_held": 0}),
    ],
)  # fmt: skip
def test_heads_that_leave_pictures_out_come_back_from_their_export(tmp_path, settings, section):
    """With all tensors as they are, and the commands ask for the patches."""
    out = sent(tmp_path, "vllm", **settings)
    assert out.values["draftsmith"] == {"format": 1, **section} and out.values["attention_bias"] is False
    command = out.result.command
    assert command.startswith(f"{PATCHES}=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ")
    assert "--no-enable-prefix-caching" in command and '"method": "eagle"' in command
    read = read_again(tmp_path / "out").state_dict()
    assert read.keys() == out.head.state_dict().keys() == out.state.keys()
    same_tensors(out.head, read)


@pytest.mark.parametrize("positions", ["compact", "flat"])
def test_a_sparrow_that_decodes_with_pictures_reads_the_middle_layer_in_vllm(tmp_path, positions):
    """IVSB without VATA: by the EAGLE-3 path, beside a copy of the target's final norm, on whole prompts."""
    target, folder, head = made(tmp_path, weights=True, kind="sparrow", vata=False, positions=positions, middle_layer=2)
    weights = load_file(target / "model.safetensors")
    norm = weights["language_model.model.norm.weight"].uniform_()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    result = export_drafter(folder, tmp_path / "out", "vllm")
    values, state = exported(tmp_path / "out")
    layers = target_config().get_text_config().num_hidden_layers
    assert values["draftsmith"] == {"format": 1, "drafter": "middle", "fc_bias": True, "input_norm": True}
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, layers]
    assert torch.equal(state.pop("target_norm.weight"), norm)
    same_tensors(head, state)
    assert '"method": "eagle3"' in result.command and "--no-enable-chunked-prefill" in result.command
    assert PATCHES not in result.command and result.settings == {"enable_chunked_prefill": False}
    assert read_export(tmp_path / "out")[0].settings == result.settings
    said = json.loads((tmp_path / "out" / "draftsmith.json").read_text())
    del said["export"]["served"]["plugin"]  # as exports were before it was kept
    (tmp_path / "out" / "draftsmith.json").write_text(json.dumps(said))
    assert result.plugin and read_export(tmp_path / "out")[0].plugin
    same_tensors(head, read_again(tmp_path / "out").state_dict())


@pytest.mark.parametrize("kind", ["sparrow", "hivis"])
@pytest.mark.parametrize("fc_bias", [True, False])
def test_an_export_for_text_comes_back_with_its_bias(tmp_path, kind, fc_bias):
    """Verifying one said that published heads of this kind are not read."""
    out = sent(tmp_path, "vllm", prompts="text", kind=kind, fc_bias=fc_bias, input_norm=False)
    read = read_again(tmp_path / "out").state_dict()
    for name, value in out.head.state_dict().items():
        torch.testing.assert_close(read[name], value)


# ---- DFlash and P-EAGLE


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 20, "sliding_window": 8}, {"kv_heads": "mha"}])
def test_dflash_in_both_layouts_and_back(tmp_path, engine, settings, capfd):
    target, folder, _ = made(tmp_path, **DFLASH | settings)
    capfd.readouterr()
    values, state = files_of(engine, read_source(folder, Target(target_config(), "a/b")))
    assert not capfd.readouterr().err, "it said what share of no data its own ids are"
    layer = values if engine == "vllm" else values["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("qwen3", 2)
    window = settings.get("sliding_window")
    assert layer["layer_types"] == ["sliding_attention" if window else "full_attention"] * 2
    assert layer.get("sliding_window") == window
    if engine == "vllm":  # what leaves a layer, and blocks that are causal nowhere
        assert values["dflash_config"] == {"mask_token_id": 41, "target_layer_ids": [1, 4]}
        assert values["is_causal"] is False and values["architectures"] == ["DFlashDraftModel"]
    else:  # what enters one
        assert values["aux_hidden_state_layer_ids"] == [2, 5] and values["mask_token_id"] == 41
        assert values["sliding_window_non_causal"] is True and values["sample_from_anchor"] is False
        assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert values["block_size"] == 4 and values["draft_vocab_size"] == settings.get("draft_vocab_size", VOCAB)
    published = tmp_path / "published"
    write_folder(published, values, state)
    assert main(["import", str(published), str(tmp_path / "in"), "--as", "dflash", "--target", str(target)]) == 0


@pytest.mark.parametrize("more", [{}, {"draft_vocab_size": 20}])
def test_dflash_leaves_its_confidence_head_out(tmp_path, more):
    """The draft alone, which its manifest says, so that it is read back and drafts whole blocks."""
    out = sent(tmp_path, "vllm", **DFLASH, confidence={}, cut_below=0.3, **more)
    assert any("confidence head is left out" in note for note in out.result.notes)
    drafter = json.loads((tmp_path / "out" / "draftsmith.json").read_text())["drafter"]
    assert drafter["confidence"] is None and drafter["cut_below"] is None
    again = read_source(tmp_path / "out", Target(target_config(), "a/b"))
    assert again.config == DflashConfig(**DFLASH | more)
    kept = {name for name in out.head.state_dict() if not name.startswith("confidence_head")}
    assert kept == again.head.state_dict().keys()
    same_tensors(again.head, out.head.state_dict())


def test_a_draft_of_speculators_is_causal_where_it_does_not_say_otherwise(tmp_path):
    """What the package trains by default; a draft that also answers at its anchor is refused."""
    _, folder, _ = made(tmp_path, **DFLASH, sliding_window=8)
    values, state = files_of("speculators", read_source(folder, Target(target_config(), "a/b")))
    text, named = target_config().get_text_config(), "sliding_window_non_causal"
    unsaid = {name: value for name, value in values.items() if name != named}
    for number, theirs in enumerate((values, values | {named: False}, unsaid)):
        write_folder(tmp_path / f"there{number}", theirs, state)
        again = import_head("dflash", str(tmp_path / f"there{number}"), text, embedding=None)
        assert again.config == DflashConfig(**DFLASH, sliding_window=8, causal=number > 0)
        again.config.save(again.head, tmp_path / f"ours{number}", {})
        assert read_beside(again.config, tmp_path / f"ours{number}", text).shape.causal is (number > 0)
    write_folder(tmp_path / "anchored", values | {"sample_from_anchor": True}, state)
    fails_with("anchor", import_head, "dflash", str(tmp_path / "anchored"), text, embedding=None)
    _, folder, _ = made(tmp_path / "whole", **DFLASH, causal=True)
    source = read_source(folder, Target(target_config(), "a/b"))
    fails_with("only those of layers with a window", check_expressible, "speculators", source, "text")
    check_expressible("vllm", source, "text")


def test_peagle_for_vllm_and_speculators(tmp_path):
    out = sent(tmp_path, "vllm", **PEAGLE)
    assert out.values["pard_token"] == 41 and out.values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert out.state["mask_hidden"].shape == (1, 1, 3 * WIDTH)
    assert '"parallel_drafting": true' in out.result.command and '"num_speculative_tokens": 5' in out.result.command
    values, state = files_of("speculators", read_source(out.folder, Target(target_config(), "a/b")))
    assert values["speculators_model_type"] == "peagle" and values["mask_token_id"] == 41
    write_folder(tmp_path / "speculators", values, state)
    assert back("peagle", tmp_path / "speculators").config.parallel_tokens == 5
    fails_with("holds a head of kind peagle", back, "eagle3", tmp_path / "out")


# ---- The target


@pytest.mark.parametrize("family", ["llava", "llama"])
def test_a_target_is_written_under_the_names_that_vllm_reads(tmp_path, family):
    """transformers 5.23 leaves out a name of the tower; nothing else changes."""
    source = target_folder(tmp_path / "target", family, weights=True)
    export_target(source, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    tower = "vision_tower.vision_model."
    named = {name if ".vision_model." in name else name.replace("vision_tower.", tower): name for name in before}
    assert named.keys() == after.keys() and all(torch.equal(before[named[name]], after[name]) for name in after)
    assert any(name.startswith(tower) for name in after) or family == "llama"
    assert (tmp_path / "out" / "config.json").read_text() == (source / "config.json").read_text()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators", "eagle"])
def test_a_target_whose_tower_no_engine_has_is_served_on_text_by_its_language_model(tmp_path, capsys, engine):
    """Export printed `vllm serve` of a folder that vLLM cannot load, and heads for text were made for the same one."""
    target, folder, _ = made(tmp_path, "emoji", weights=True, **READ)
    words = ["export", str(folder), str(tmp_path / "out"), "--to", engine]
    for prompts in ("all", "text"):
        assert main([*words, "--prompts", prompts]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "no engine has the target's tower (efficientnet_lite0)" in said and "--target-to" in said
    if engine != "vllm":
        return
    served = tmp_path / "served"
    assert main([*words, "--target", str(target), "--target-to", str(served)]) == 0
    shown = capsys.readouterr().out
    assert f"{served} (the target's language model alone" in shown
    assert f"vllm serve {served} --speculative-config" in shown
    whole, alone = LlavaForConditionalGeneration.from_pretrained(target), AutoModelForCausalLM.from_pretrained(served)
    assert type(alone) is LlamaForCausalLM and not (served / "processor_config.json").exists()
    ids = torch.arange(3, 15)[None]
    assert torch.equal(alone(ids).logits, whole(ids).logits)
    main(["export", str(folder), str(tmp_path / "sgl"), "--to", "sglang", "--target", str(served)])
    assert read_export(tmp_path / "sgl")[0].engine == "sglang"


@pytest.mark.parametrize("refused_first", [False, True])
def test_a_pair_is_exported_by_one_command(tmp_path, capsys, refused_first):
    """A pair whose head is refused leaves no target: the command that the refusal suggests ended with "the destination
    exists".
    """
    target, folder, _ = made(tmp_path, weights=True, **READ | ({"image": "projected"} if refused_first else {}))
    out, served = tmp_path / "out", tmp_path / "served"
    words = ["export", str(folder), str(out), "--to", "vllm", "--target", str(target), "--target-to", str(served)]
    if refused_first:
        assert main(words) == 2 and not served.exists()
        assert "written" not in capsys.readouterr().out
        words += ["--prompts", "text"]
    assert main(words) == 0 and (served / "model.safetensors").is_file()
    shown = capsys.readouterr().out
    assert f"vllm serve {served}" in shown and f"draftsmith verify-engine {out} --target {served}" in shown
    assert main([*words, "--target-to", str(tmp_path / "x")]) == 2, "what is there is not written over"
    assert not (tmp_path / "x").exists()
    assert main(["export", str(folder), str(tmp_path / "y"), "--to", "sglang", "--target-to", "z"]) == 2
