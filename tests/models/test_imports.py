"""Imports: tiny checkpoints in the layouts of EAGLE, EAGLE-3, MSD, ViSpec, LANTERN and TABED, and their traps."""

import json

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle_images import save_eagle
from draftsmith.models.drafters.head_files import manifest_of
from draftsmith.models.formats import lantern, lvlm
from draftsmith.models.formats.heads import import_head
from draftsmith.models.formats.source import llama_values
from draftsmith.models.layer import written_rope
from draftsmith.models.stored import stored_table
from draftsmith.models.targets.base import language_shape
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from heads_tiny import Tables, config_of
from published_tiny import VOCAB, WIDTH, head_folder, inputs, ours, published, target_config, target_folder
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from visual_tiny import anole, llamagen
from visual_tiny import target as drawing

ROWS = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))
READ = {"kind": "eagle3", "visual_slots": "read", "draft_vocab_size": 20}


def checkpoint(tmp_path, family="llava", **settings):
    """(config.json, weights, head) of somebody's head, in the names of the published modules."""
    target = target_folder(tmp_path / "target", family)
    head = head_folder(tmp_path / "made", target, **settings)
    text = target_config(family).get_text_config()
    values = llama_values(head.shape, text) | {"architectures": ["LlamaForCausalLM"]}
    del values["rope_parameters"]
    return values, dict(head.state_dict()), head


def text_of(family="llava"):
    return target_config(family).get_text_config()


def read(kind, folder, family="llava", embedding=ROWS, **more):
    return import_head(kind, str(folder), text_of(family), embedding=embedding, **more)


def same(found, head):
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in found.head.state_dict().items())


# ---- EAGLE-1/2, MSD, ViSpec


@pytest.mark.parametrize(("kind", "family", "settings", "section"), [
    ("eagle", "llama", {}, {"kind": "eagle"}),
    ("eagle", "llama", {"fc_bias": False}, {"kind": "eagle", "fc_bias": False}),
    ("msd", "llava", {}, {"kind": "msd", "input_norm": False}),
    ("msd", "qwen2_5_vl", {}, {"kind": "msd", "input_norm": True, "qkv_bias": True}),
    ("vispec", "qwen2_5_vl", {}, {"kind": "vispec", "qkv_bias": True, "num_queries": 2}),
    ("vispec", "llava", {"num_queries": 4, "intermediate_size": 60}, {"num_queries": 4, "intermediate_size": 60}),
])  # fmt: skip
def test_settings_are_read_off_the_weights(tmp_path, kind, family, settings, section):
    """A pickle with the target's rows, as they are published; what comes back trains and drafts as the head did."""
    values, state, head = checkpoint(tmp_path, family, kind=kind, **settings)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    torch.save(state | {"embed_tokens.weight": ROWS, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
               folder / "pytorch_model.bin")  # fmt: skip
    result = read(kind, folder, family, sees=family != "llama")
    same(result, head)
    assert section.items() <= (result.config.model_dump() | {"kind": kind}).items()
    out = tmp_path / "ours"
    manifest = manifest_of(result.config, language_shape(text_of(family)), TargetIdentity({}))
    result.config.save(result.head, out, manifest)
    beside = Tables(text_of(family), ROWS, ROWS)
    again = result.config.load(out, beside)
    torch.testing.assert_close(ours(again, *inputs()), ours(head, *inputs())) if kind != "vispec" else same(
        result, again
    )


def test_norms_and_angles_are_the_heads_own(tmp_path):
    """EAGLE's code turns by 10,000 where its config says nothing; its norms have an epsilon of their own."""
    values, state, _ = checkpoint(tmp_path, kind="msd")
    values |= {"rms_norm_eps": 1e-5}
    result = read("msd", published(tmp_path / "a", values, state))
    assert result.config.norm_eps == result.head.shape.norm_eps == 1e-5 and result.config.rope_theta is None
    assert any("1e-05" in n for n in result.notes)
    result = read("msd", published(tmp_path / "b", values | {"rope_theta": 5e5}, state))
    assert result.head.shape.rope_theta == 5e5 and result.settings["rope_theta"] == 5e5
    del values["rope_theta"]
    text = text_of()
    text.rope_parameters["rope_theta"] = 1e6
    result = import_head("msd", str(published(tmp_path / "c", values, state)), text, embedding=None)
    assert result.head.shape.rope_theta == 10000.0
    assert not any("not compared" in n or "stretched" in n for n in result.notes)
    text.rope_parameters |= {"rope_type": "linear", "factor": 2.0}
    result = import_head("msd", str(published(tmp_path / "c", values, state)), text, embedding=None)
    assert result.config.rope == "plain" and any("not stretched as the target's" in n for n in result.notes)


TWO_BASES = r"two rotary bases.*500000.*10000|two rotary bases.*10000.*500000"


@pytest.mark.parametrize(("said", "problem"), [
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, TWO_BASES),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "two rotations"),
    ({"rope_theta": 1e4, "rope_scaling": {"rope_theta": 5e5, "type": "mrope", "mrope_section": [1, 1, 2]}}, TWO_BASES),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}}, TWO_BASES),
    ({"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
     "two rotations"),
    ({"rope_parameters": {"mrope_section": [2, 1, 1]}, "rope_scaling": {"mrope_section": [1, 1, 2]}}, "two rotations"),
    ({"sliding_window": 64}, "sees a window"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 64, "use_sliding_window": True}, "sees a window"),
    ({"partial_rotary_factor": 0.5}, "turns all of each attention head"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "turns all of each attention head"),
])  # fmt: skip
def test_a_layer_that_ours_is_not_is_refused(tmp_path, said, problem):
    values, state, _ = checkpoint(tmp_path, kind="msd")
    values = {key: value for key, value in values.items() if not key.startswith("rope")}
    with pytest.raises(UserError, match=problem) as refusal:
        read("msd", published(tmp_path / "theirs", values | said, state))
    assert problem != TWO_BASES or "config.json" in str(refusal.value)


def test_two_rotations_that_say_the_same_are_one():
    said = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}
    both = {"rope_parameters": said, "rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": 64}
    assert written_rope(both, "config.json") == {"type": "yarn", **said}
    fails_with("two rotations", written_rope, both | {"max_position_embeddings": 32}, "config.json")


@pytest.mark.parametrize("inside", ["rope_parameters", "rope_scaling"])
def test_a_base_inside_the_rotation_is_read(tmp_path, inside):
    values, state, _ = checkpoint(tmp_path, kind="msd")
    values = {key: value for key, value in values.items() if not key.startswith("rope")}
    for name, rope in (("a", {"rope_theta": 5e5}), ("b", {"full_attention": {"rope_theta": 5e5}})):
        result = read("msd", published(tmp_path / name, values | {inside: rope}, state))
        assert result.head.shape.rope_theta == 5e5


def test_rows_that_are_not_the_targets(tmp_path):
    values, state, _ = checkpoint(tmp_path, kind="msd")
    padded = torch.cat([ROWS, torch.randn(8, WIDTH)])  # 32000 rows beside a target of 32064
    read("msd", published(tmp_path / "a", values, state | {"embed_tokens.weight": ROWS}), embedding=padded)
    with pytest.raises(UserError, match="44 of its 44 rows of embedding are not the target's"):
        read("msd", published(tmp_path / "b", values, state | {"embed_tokens.weight": ROWS.flip(0)}))
    with pytest.raises(UserError, match=r"its embeddings are \[44, 32\], the target's \[44, 16\]"):
        read("msd", tmp_path / "a", embedding=ROWS[:, :16])
    result = read("msd", tmp_path / "a", embedding=None)
    assert any("was not compared" in note for note in result.notes)


def test_a_trained_table_of_the_speculators_form_is_the_heads_own(tmp_path):
    """P-EAGLE's is, where no key says otherwise; most of its rows still look as the target's."""
    values, state, _ = checkpoint(tmp_path, "llava", **READ | {"kind": "peagle", "mask_token_id": 41})
    values |= {"speculators_model_type": "peagle", "norm_before_residual": False, "mask_token_id": 41}
    own = torch.cat([ROWS[:41], ROWS[41:] + 1])
    back = read("peagle", published(tmp_path / "a", values, state | {"embed_tokens.weight": own}), image="placeholder")
    assert back.config.own_embedding and torch.equal(back.head.embed_tokens.weight, own)
    for rows, said in ((ROWS.flip(0), {}), (own, {"embed_requires_grad": False})):
        folder = published(tmp_path / f"{len(said)}", values | said, state | {"embed_tokens.weight": rows})
        fails_with("of its 44 rows of embedding are not the target's", read, "peagle", folder, image="placeholder")


@pytest.mark.parametrize("prefix", ["module.", "ea_layer.", "draft_model.", "module.ea_layer."])
def test_names_inside_a_trainer(tmp_path, prefix):
    values, state, head = checkpoint(tmp_path, kind="msd")
    same(read("msd", published(tmp_path / "a", values, {prefix + n: v for n, v in state.items()})), head)


def test_shards(tmp_path):
    values, state, head = checkpoint(tmp_path, kind="msd")
    names, folder = sorted(state), tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    where = {}
    for number, part in enumerate((names[:4], names[4:]), 1):
        save_file({n: state[n].contiguous() for n in part}, folder / f"model-{number}.safetensors")
        where |= {n: f"model-{number}.safetensors" for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    same(read("msd", folder), head)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(UserError, match="outside its folder"):
        read("msd", folder)


def test_what_is_no_such_head(tmp_path):
    values, state, _ = checkpoint(tmp_path, kind="vispec")

    def refused(says, kind="vispec", values=values, state=state, **more):
        with pytest.raises(UserError, match=says):
            read(kind, published(tmp_path / "a", values, state), **more)

    refused("holds a head of kind vispec, and msd is asked for", "msd")
    refused("not one Llama layer", values=values | {"num_hidden_layers": 2})
    refused("several layers", state=state | {"layers.1.mlp.up_proj.weight": torch.ones(1)})
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    refused(r"stretches.*linear.*the target's are plain[\s\S]*at export.*once each rope key", values=values | linear)
    refused("holds a head of kind vispec, and eagle3 is asked for", "eagle3", image="placeholder")
    plain = {name: value for name, value in state.items() if not name.startswith(("imadpt", "img_fc"))}
    refused("holds a head of kind eagle, and eagle3 is asked for", "eagle3", state=plain, image="placeholder")
    refused("not a head of kind vispec for this target: imadpt", state=plain)
    refused("3 heads of keys", state=state | {"layers.0.self_attn.k_proj.weight": torch.ones(24, WIDTH)})
    refused("output has a bias of its own", state=state | {"layers.0.self_attn.o_proj.bias": torch.ones(WIDTH)})


# ---- EAGLE-3


def eagle3_checkpoint(tmp_path, **changes):
    values, state, head = checkpoint(tmp_path, "qwen2_5_vl", **READ)
    return values | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20} | changes, state, head


TOP = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
INNER = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}}


def read3(folder, **more):
    return read("eagle3", folder, "qwen2_5_vl", **{"image": "placeholder"} | more)


@pytest.mark.parametrize(
    ("said", "taps"),
    [
        ({}, None),
        (TOP, (1, 4, 6)),
        (INNER, (1, 4, 6)),
        (TOP | INNER, (1, 4, 6)),
        ({"eagle_config": {"layer_ids": [1, 4, 6]}}, (1, 4, 6)),  # vLLM's name for them in there
    ],
)  # fmt: skip
def test_layers_are_counted_in_two_ways(tmp_path, said, taps):
    values, state, head = eagle3_checkpoint(tmp_path, **said)
    result = read3(published(tmp_path / "a", values, state))
    same(result, head)
    assert result.config.taps == taps and result.config.visual_slots == "read" and result.config.image == "placeholder"
    assert any("default of every engine" in note for note in result.notes) is (taps is None)


def test_the_speculators_form(tmp_path):
    values, state, head = eagle3_checkpoint(tmp_path)
    values = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 20,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "transformer_layer_config": values,
    }  # fmt: skip
    state = {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}
    with pytest.raises(UserError, match="vLLM takes it for true, the speculators package for false"):
        read3(published(tmp_path / "a", values, state))
    same(read3(published(tmp_path / "a", values | {"norm_before_residual": False}, state)), head)
    residual = read3(published(tmp_path / "a", values | {"norm_before_residual": True}, state))
    same(residual, head)
    assert residual.config.norm_before_residual and residual.head.midlayer.norm_before_residual
    fails_with("norm_before_residual", residual.config.load, tmp_path / "made", Tables(text_of(), ROWS, ROWS))
    state["verifier_lm_head.weight"], state["embed_tokens.weight"] = torch.ones(20, WIDTH), ROWS
    same(read3(published(tmp_path / "a", values | {"norm_before_residual": False}, state)), head)


def test_a_window_is_read_where_engines_agree_on_it(tmp_path):
    values, state, head = eagle3_checkpoint(tmp_path)
    said = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    narrow = read3(published(tmp_path / "a", values | said, state))
    same(narrow, head)
    assert narrow.config.sliding_window == narrow.head.shape.sliding_window == 16
    unused = {"sliding_window": 16, "use_sliding_window": False}
    for number, full in enumerate((unused | {"layer_types": ["full_attention"]}, unused)):
        assert read3(published(tmp_path / f"b{number}", values | full, state)).config.sliding_window is None
    for unsaid in ({"sliding_window": 16}, {"layer_types": ["sliding_attention"]}):
        with pytest.raises(UserError, match="what its layer sees is not said"):
            read3(published(tmp_path / "d", values | unsaid, state))
    tables, config = Tables(text_of("qwen2_5_vl"), ROWS, ROWS), config_of(**READ)
    fails_with("sliding_window", config.load, tmp_path / "a", tables)
    assert config_of(**READ, sliding_window=16).load(tmp_path / "a", tables).shape.sliding_window == 16


def test_vocabularies(tmp_path):
    """d2t as an offset, as the ids themselves, out of order, and in contradiction to t2d."""
    values, state, head = eagle3_checkpoint(tmp_path)
    ids = head.draft_ids
    result = read3(published(tmp_path / "a", values, state | {"d2t": ids.clone()}))
    same(result, head)
    assert any("ids themselves" in note for note in result.notes)
    turned = {"d2t": ids.flip(0) - torch.arange(20), "lm_head.weight": state["lm_head.weight"].flip(0)}
    same(read3(published(tmp_path / "b", values, state | turned)), head)
    without = {name: value for name, value in state.items() if name not in ("t2d", "d2t")}
    with pytest.raises(UserError, match="20 draft tokens and no d2t"):
        read3(published(tmp_path / "c", values, without))
    with pytest.raises(UserError, match="d2t and t2d name different tokens"):
        read3(published(tmp_path / "d", values, state | {"t2d": state["t2d"].roll(1)}))
    with pytest.raises(UserError, match="leads out of the target's 44 ids"):
        read3(published(tmp_path / "e", values, {n: v for n, v in state.items() if n != "t2d"} | {"d2t": ids + 30}))


@pytest.mark.parametrize("size", [20, VOCAB, None])
def test_a_head_without_its_lm_head_is_told_what_it_may_lack(tmp_path, size):
    """With the target's full vocabulary a file may leave it to the target's, which vLLM then takes."""
    values, state, head = checkpoint(tmp_path, **READ | {"draft_vocab_size": size})
    values |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size}
    lacking = {name: value for name, value in state.items() if name != "lm_head.weight"}
    told = "is this EAGLE-1" if size == 20 else r"target's full vocabulary \(44 tokens\).*copy the target's lm_head"
    for number, names in enumerate(((), ("d2t", "t2d"))):
        rest = {name: value for name, value in lacking.items() if name not in names}
        folder = published(tmp_path / f"theirs{number}", values, rest)
        with pytest.raises(UserError, match=rf"^lm_head\.weight is missing\n.*\n.*{told}"):
            read3(folder)
        with pytest.raises(UserError, match=r"lm_head\.weight is missing") as error:  # as a recipe names it
            config_of(**READ | {"draft_vocab_size": size}).load(folder, Tables(text_of(), ROWS, ROWS))
        is_whole = size != 20 or names  # a file without d2t has the target's ids
        assert ("full vocabulary" in str(error.value)) == bool(is_whole)
    same(read3(published(tmp_path / "whole", values, state)), head)


def test_what_eagle3_files_do_not_say(tmp_path):
    values, state, _ = eagle3_checkpoint(tmp_path)
    folder = published(tmp_path / "a", values, state)
    with pytest.raises(UserError, match="in this head's training is in none of its files"):
        read3(folder, image=None)
    result = read3(folder, image=None, sees=False)
    assert result.config.visual_slots == "read"
    with pytest.raises(UserError, match=r"variant of EAGLE-3 with other norms \(use_aux_norm\)"):
        read3(published(tmp_path / "b", values | {"use_aux_norm": True}, state))
    with pytest.raises(UserError, match=r"input_norm\.weight"):
        read3(published(tmp_path / "b", values | {"norm_before_fc": True}, state))
    with pytest.raises(UserError, match=r"variant of EAGLE-3 with other norms \(input_norm.weight\)"):
        read3(published(tmp_path / "b", values, state | {"input_norm.weight": torch.ones(3 * WIDTH)}))
    with pytest.raises(UserError, match="narrower than its target"):
        read3(published(tmp_path / "c", values | {"target_hidden_size": 64}, state))
    with pytest.raises(UserError, match="joins 4 layers"):
        read3(published(tmp_path / "d", values | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, state))
    with pytest.raises(UserError, match="name different layers"):
        read3(published(tmp_path / "e", values | TOP | {"eagle_config": TOP}, state))
    mrope = {"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}}
    for beside in ({}, {"rope_parameters": {"rope_type": "default"}}):
        turned = read3(published(tmp_path / f"f{len(beside)}", values | mrope | beside, state))
        assert turned.config.positions == "mrope" and turned.head.shape.mrope_section == (2, 1, 1)


# ---- LANTERN


@pytest.mark.parametrize("condition", ["text", "anole"])
def test_lanterns_heads(tmp_path, condition):
    """Their embedding may hold the LM head's rows, and is kept; norms, heads and the grid follow config.json."""
    teacher = anole() if condition == "anole" else drawing(llamagen("text"))
    torch.manual_seed(2)
    head = EagleConfig(kind="eagle").build(teacher)
    state = dict(head.state_dict()) | {"embed_tokens.weight": torch.randn_like(teacher.embedding)}
    folder = tmp_path / "theirs"
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    shape = head.shape
    values = {"num_hidden_layers": 1, "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
              "num_attention_heads": shape.num_heads, "rms_norm_eps": 2e-6}  # fmt: skip
    if condition == "text":
        values |= {"input_type": "t2i", "block_size": 16}
    (folder / "config.json").write_text(json.dumps(values))
    result, settings, notes = lantern.to_ours(str(folder), teacher.shape)
    assert torch.equal(result.embed_tokens.weight, state["embed_tokens.weight"]) and result.has_embedding
    assert settings == {"kind": "eagle", "norm_eps": 2e-6} and result.shape.norm_eps == 2e-6
    assert any("own token" in note for note in notes) is (condition == "anole")
    save_eagle(result, tmp_path / "ours", {"method": "eagle"}, with_embedding=True)
    again = EagleConfig(**settings).load(tmp_path / "ours", teacher)
    assert torch.equal(again.embed_tokens.weight, state["embed_tokens.weight"])
    if condition == "text":
        (folder / "config.json").write_text(json.dumps(values | {"block_size": 64}))
        with pytest.raises(UserError, match="drafts 64 codes"):
            lantern.to_ours(str(folder), teacher.shape)
    torch.save({n: v for n, v in state.items() if n != "embed_tokens.weight"}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="may not have been the target's"):
        lantern.to_ours(str(folder), teacher.shape)


# ---- TABED


def draft(folder, *, rows=VOCAB, side=16):
    """As transformers 4 saved it: older names, JackFram's ids, in bfloat16."""
    text = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                       vocab_size=rows, max_position_embeddings=2048, bos_token_id=0, pad_token_id=1)  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              image_size=side, patch_size=8)  # fmt: skip
    config = LlavaConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_index=39)
    torch.manual_seed(4)
    model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    old = {}
    for name, value in state.items():
        if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
            name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        old[name] = value
    assert any(n.startswith("language_model.model.") for n in old) and "language_model.lm_head.weight" in old
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize("rows", [VOCAB, 40])
def test_tabeds_drafts(tmp_path, rows):
    model, target = draft(tmp_path / "theirs", rows=rows), target_config()
    target.text_config.bos_token_id, target.text_config.pad_token_id = 1, 41
    result, notes = lvlm.to_ours(str(tmp_path / "theirs"), target)
    assert result.dtype == torch.bfloat16 and result.config.text_config.vocab_size == VOCAB
    assert result.config.image_token_id == 40 and result.config.text_config.bos_token_id == 1
    assert result.config.text_config.pad_token_id == 41
    tower = model.model.vision_tower.state_dict()
    assert all(torch.equal(value, tower[name]) for name, value in result.model.vision_tower.state_dict().items())
    assert torch.equal(result.lm_head.weight[:rows], model.lm_head.weight)
    said = " ".join(notes)
    assert "bfloat16" in said and "2048 positions" in said and "image token was 39, the target's is 40" in said
    assert ("4 rows added" in said) is (rows == 40)
    result.save_pretrained(tmp_path / "ours")
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert again.config.text_config.vocab_size == VOCAB == len(again.lm_head.weight)


def test_a_checkpoint_that_lacks_a_tensor(tmp_path):
    """transformers would draw it at random; tables that follow from the config are of no matter."""
    draft(tmp_path / "theirs")
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    state["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    lvlm.to_ours(str(tmp_path / "theirs"), target_config())
    del state["language_model.model.layers.0.mlp.up_proj.weight"]
    save_file(state, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"mlp\.up_proj\.weight is missing"):
        lvlm.to_ours(str(tmp_path / "theirs"), target_config())


def test_as_many_words_are_not_the_same_words(tmp_path, capsys):
    """The manifest gets the target's tokenizer hash: another one of the same size would pass ever after."""
    texts = ["USER: what is in the picture? ASSISTANT: a red circle."] * 4
    tokenizer = train_tokenizer(texts, 300)
    config = target_config()
    target_folder(tmp_path / "target")
    LLAVA.new(tokenizer, image_size=16, patch_size=8, image_mean=(0.5,) * 3, image_std=(0.5,) * 3).save(
        tmp_path / "target"
    )
    draft(tmp_path / "theirs", rows=config.text_config.vocab_size)

    def run(name):
        places = (tmp_path / "theirs", tmp_path / name, "--target", tmp_path / "target")
        return main(["import", *map(str, places), "--as", "lvlm"])

    assert run("without") == 0
    assert "was not compared" in capsys.readouterr().out
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert run("same") == 0
    said = capsys.readouterr().out
    assert "compared" not in said and "drafters:" in said
    train_tokenizer([text[::-1] for text in texts], 300).save_pretrained(tmp_path / "theirs")
    assert run("other") == 2
    assert "have other ids in the target's tokenizer" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_a_draft_with_another_image_processor(tmp_path):
    draft(tmp_path / "theirs", side=32)
    with pytest.raises(UserError, match="its tower reads 32 pixels along a side, the target's 16"):
        lvlm.to_ours(str(tmp_path / "theirs"), target_config())


# ---- a target's embedding, without the target


def test_one_table_of_a_target(tmp_path):
    target_folder(tmp_path / "a", weights=True)
    rows = load_file(tmp_path / "a" / "model.safetensors")
    (name,) = [n for n in rows if n.endswith("embed_tokens.weight")]
    assert torch.equal(stored_table("token embedding", str(tmp_path / "a"), where="x"), rows[name])
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "one.safetensors")
    index = {"weight_map": {n: "one.safetensors" for n in rows}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(stored_table("token embedding", str(tmp_path / "a"), where="x"), rows[name])
    with pytest.raises(UserError, match="give the target's folder"):
        stored_table("token embedding", None, where="x")
    with pytest.raises(UserError, match="is missing"):
        stored_table("token embedding", str(tmp_path), where="x")
