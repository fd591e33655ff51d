"""LlamaGen on disk: our layout, LANTERN's, published files, what is refused, and the command that converts."""

import argparse
import json
import os
from pathlib import Path

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.models import folders
from draftsmith.models.targets.llamagen import files, published_files
from draftsmith.models.targets.llamagen.transformer import SIZES, LlamaGen, LlamaGenConfig, published
from draftsmith.models.targets.llamagen.vq import VqConfig, VqTokenizer
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from safetensors.torch import load_file, save_file
from tensors import same_weights as same
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"num_layers": 2, "num_heads": 2, "dim": 16, "ffn_hidden": 24, "vocab_size": 32, "grid": 16}
TEXT = LlamaGenConfig(**SHAPE, condition="text", caption_dim=12, caption_slots=5)
CLASS = LlamaGenConfig(**SHAPE, condition="class", num_classes=7)
VQ = VqConfig(base_channels=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=8, codebook_size=32, codebook_dim=4)


def llamagen(config: LlamaGenConfig, seed: int = 0) -> LlamaGen:
    model = LlamaGen(config)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    nn.init.normal_(model.output.weight, std=0.1, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def tokenizer(seed: int = 0) -> VqTokenizer:
    model = VqTokenizer(VQ)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model.eval()


def condition_of(model: LlamaGen) -> torch.Tensor:
    config, generator = model.config, torch.Generator().manual_seed(1)
    shape = (1, config.num_condition_tokens, config.caption_dim)
    asked = torch.tensor([1]) if config.condition == "class" else torch.randn(shape, generator=generator)
    return model.cls_embedding(asked, torch.tensor([False]))


@torch.no_grad()
def scores(model: LlamaGen) -> torch.Tensor:
    return model.output(model.states(condition_of(model), torch.arange(20)[None]).feature)


# ---- directories


@pytest.mark.parametrize("config", [TEXT, CLASS], ids=["text", "class"])
def test_a_saved_model_comes_back(config, tmp_path):
    model, vq = llamagen(config), tokenizer()
    for one, folder, load in ((model, "model", files.load_llamagen), (vq, "vq", files.load_vq)):
        files.save_model(one, tmp_path / folder)
        assert sorted(p.name for p in (tmp_path / folder).iterdir()) == ["config.json", "model.safetensors"]
        again = load(tmp_path / folder)
        assert again.config == one.config and same(one, again) and not again.training
    again = files.load_llamagen(tmp_path / "model")
    assert torch.equal(scores(model), scores(again)) and all(p.requires_grad for p in again.parameters())
    assert json.loads((tmp_path / "vq" / "config.json").read_text())["model_type"] == "llamagen_vq"


def test_weights_take_the_wanted_type(tmp_path):
    files.save_model(llamagen(TEXT), tmp_path)
    model = files.load_llamagen(tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
    assert model.rope(torch.device("cpu")).dtype == torch.float32


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    result = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in result.items() if value is not None}))


def edit_weights(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def edit_lantern(folder: Path, **values) -> None:
    """LANTERN's layout in place of ours."""
    state, config = files.to_lantern(llamagen(TEXT).state_dict(), TEXT)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    edit_config(folder, **values)


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config cut off": (lambda f: (f / "config.json").write_text('{"model'), "not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "expected a valid dictionary"),
    "other model": (lambda f: edit_config(f, model_type="gpt2"), "key model_type"),
    "plain llama": (lambda f: edit_config(f, model_type="llama"), "key model_type"),
    "unknown key": (lambda f: edit_config(f, num_layer=2), "'num_layers'"),
    "no layers": (lambda f: edit_config(f, num_layers=None), "num_layers: Field required"),
    "value out of range": (lambda f: edit_config(f, grid=0), "grid: expected|grid: .*greater"),
    "odd heads": (lambda f: edit_config(f, num_heads=3), "num_heads"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "weights cut off": (lambda f: os.truncate(f / "model.safetensors", 2000), "cannot be read"),
    "weights are text": (lambda f: (f / "model.safetensors").write_text("version https://git-lfs"), "cannot be read"),
    "key missing": (lambda f: edit_weights(f, lambda s: s.pop("norm.weight")), "norm.weight is missing"),
    "key too many": (lambda f: edit_weights(f, lambda s: s.update(extra=torch.ones(1))), "extra is not part"),
    "other shape": (
        lambda f: edit_weights(f, lambda s: s.update({"layers.1.attention.wo.weight": torch.ones(16, 8)})),
        "layers.1.attention.wo.weight is \\[16, 8\\], expected \\[16, 16\\]",
    ),
    "other width": (lambda f: edit_config(f, dim=32), "tok_embeddings.weight is \\[32, 16\\], expected \\[32, 32\\]"),
    # As in a drafter's config.
    "lantern, no size": (lambda f: edit_lantern(f, block_size=None), "block_size is missing"),
    "lantern, no square": (lambda f: edit_lantern(f, block_size=250), "not a square"),
    "lantern, other input": (lambda f: edit_lantern(f, input_type="t2v"), "key input_type"),
    "lantern, odd width": (lambda f: edit_lantern(f, hidden_size=18), "multiple of 4"),
    "lantern, other width": (
        lambda f: edit_lantern(f, hidden_size=32),
        "model.embed_tokens.weight is \\[32, 16\\], expected \\[32, 32\\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_with_file_and_key(damage, tmp_path):
    files.save_model(llamagen(TEXT), tmp_path)
    change, told = DAMAGES[damage]
    change(tmp_path)
    caught = fails_with(told, files.load_llamagen, tmp_path)
    assert str(tmp_path) in str(caught) and "hint:" in str(caught)


def test_transformer_and_tokenizer_are_told_apart(tmp_path):
    files.save_model(tokenizer(), tmp_path / "vq")
    files.save_model(llamagen(TEXT), tmp_path / "model")
    fails_with("give the other directory", files.load_llamagen, tmp_path / "vq")
    fails_with("give the other directory", files.load_vq, tmp_path / "model")
    edit_weights(tmp_path / "vq", lambda s: s.pop("quantize.embedding.weight"))
    fails_with(r"quantize\.embedding\.weight is missing", files.load_vq, tmp_path / "vq")


def test_a_write_that_fails_leaves_the_old_file_and_no_new_one(tmp_path, monkeypatch, capsys):
    model, folder = llamagen(TEXT), tmp_path / "a"
    files.save_model(model, folder)

    def full_disk(state, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(folders, "save_file", full_disk)
    fails_with("no space", files.save_model, llamagen(TEXT, seed=1), folder, error=OSError)
    assert same(files.load_llamagen(folder), model)
    assert convert(folder, tmp_path / "b") == 1
    assert "no space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_hub_id_fetches_its_files_and_their_sums(tmp_path, monkeypatch):
    files.save_model(llamagen(CLASS), tmp_path)
    asked = {}

    def download(source, **options):
        asked.update(options, source=source)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert files.load_llamagen("someone/llamagen", revision="abc").config == CLASS
    patterns = ["config.json", "model.safetensors", "SHA256SUMS"]
    assert asked == {"source": "someone/llamagen", "revision": "abc", "allow_patterns": patterns}


@pytest.mark.parametrize("source", ["no/such/folder", "/no/such/folder"])
def test_a_source_that_is_neither(source):
    fails_with("is no directory", files.load_llamagen, source)


# ---- LANTERN's layout


class OurRope(nn.Module):
    """LlamaGen's table in the shape that transformers' Llama wants: half a head of cosines, twice."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.table = table

    def forward(self, states, position_ids):
        angles = self.table[position_ids]  # [B,T,E/2,2]
        return torch.cat([angles[..., 0]] * 2, -1), torch.cat([angles[..., 1]] * 2, -1)


@pytest.mark.parametrize("config", [TEXT, CLASS], ids=["text", "class"])
@torch.no_grad()
def test_lantern_names_mean_what_llama_means_by_them(config):
    """The renamed weights in transformers' own Llama give our scores.

    It turns half against half where LlamaGen turns neighbours, so rows of q and k are put in its order here; LANTERN's
    class turns neighbours and needs no such thing.
    """
    model = llamagen(config)
    state, values = files.to_lantern(model.state_dict(), config)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "rms_norm_eps", "hidden_act", "tie_word_embeddings")  # fmt: skip
    llama = LlamaForCausalLM(LlamaConfig(**{name: values[name] for name in names}, attn_implementation="eager")).eval()
    own = {name: tensor for name, tensor in state.items() if "cls_embedding" not in name}
    assert own.keys() == llama.state_dict().keys()
    for name in own:
        if "q_proj" in name or "k_proj" in name:
            rows = own[name].view(config.num_heads, config.head_dim // 2, 2, config.dim)
            own[name] = rows.transpose(1, 2).reshape(own[name].shape)
    llama.load_state_dict(own)
    llama.model.rotary_emb = OurRope(model.rope(torch.device("cpu")))
    condition, codes = condition_of(model), torch.arange(20)[None]
    embeds = torch.cat([condition, llama.model.embed_tokens(codes)], 1)
    expected = model.output(model.states(condition, codes).feature)
    assert expected.std() > 0.1
    torch.testing.assert_close(llama(inputs_embeds=embeds).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", [TEXT, CLASS], ids=["text", "class"])
def test_lantern_and_back(config, tmp_path):
    model = llamagen(config)
    state, values = files.to_lantern(model.state_dict(), config)
    back, again = files.from_lantern(state, config), files.lantern_config(values, where="")
    slots = 120 if config is CLASS else config.caption_slots
    assert again == config.model_copy(update={"num_classes": values["num_classes"], "caption_slots": slots})
    assert same(back, model)
    folders.write_folder(tmp_path, values, state)
    loaded = files.load_llamagen(tmp_path)
    assert same(loaded, model) and torch.equal(scores(loaded), scores(model))


def test_lantern_config_has_their_fields():
    _, values = files.to_lantern({}, published("XL", grid=32))
    expected = {
        "model_type": "llama", "hidden_size": 1280, "intermediate_size": 3584, "num_hidden_layers": 36,
        "num_attention_heads": 20, "vocab_size": 16384, "rms_norm_eps": 1e-5, "block_size": 1024, "cls_token_num": 120,
        "input_type": "t2i", "rope_base": 10000.0, "caption_dim": 2048, "token_dropout_p": 0.1, "resid_dropout_p": 0.1,
        "ffn_dropout_p": 0.1, "class_dropout_p": 0.1,
    }  # fmt: skip
    assert values.items() >= expected.items()
    assert files.is_lantern(values) and not files.is_lantern({"model_type": "llama"})
    # Fields that only transformers reads make no difference.
    read = files.lantern_config(values | {"transformers_version": "4.32.0", "bos_token_id": 1}, where="")
    assert read.model_dump(exclude={"ffn_hidden"}) == published("XL", grid=32).model_dump(exclude={"ffn_hidden"})
    assert read.hidden == published("XL").hidden


# ---- published files


@pytest.mark.parametrize(
    "wrap", [lambda s: {"model": s, "optimizer": {"state": {}}, "steps": 5, "args": argparse.Namespace(image_size=256)},
             lambda s: {"module": s}, lambda s: {"state_dict": s}, lambda s: s],
    ids=["ddp", "deepspeed", "other", "fsdp"],
)  # fmt: skip
def test_official_files_are_read_wherever_the_weights_lie(wrap, tmp_path):
    state = llamagen(TEXT).state_dict()
    torch.save(wrap(dict(state)), tmp_path / "x.pt")
    assert same(read_official(tmp_path / "x.pt"), dict(state))


def read_official(path: Path):
    return published_files.read_pickle(path)[0]


@pytest.mark.parametrize(("content", "told"), [
    ([1, 2], "holds a list"), ({"optimizer": {}, "steps": 3}, "no weights found; the file holds optimizer, steps"),
    ("version https://git-lfs.github.com/spec/v1", "cannot be read"), (None, "cannot be read"),
])  # fmt: skip
def test_files_without_weights(content, told, tmp_path):
    if isinstance(content, str):
        (tmp_path / "x.pt").write_text(content)
    elif content is not None:
        torch.save(content, tmp_path / "x.pt")
    fails_with(told, read_official, tmp_path / "x.pt")


def meta_state(config: LlamaGenConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return LlamaGen(config).state_dict()


@pytest.mark.parametrize("condition", ["class", "text"])
@pytest.mark.parametrize("size", SIZES)
def test_the_config_follows_from_the_shapes(size, condition):
    config = published(size, condition=condition, grid=24)
    assert published_files.infer_config(meta_state(config), grid=24) == config


def test_shapes_beside_the_published_ones():
    config = published("B", condition="class", num_classes=10, vocab_size=64, ffn_hidden=100)
    assert published_files.infer_config(meta_state(config), grid=16) == config
    tiny = TEXT.model_copy(update={"dropout": 0.1})
    assert published_files.infer_config(meta_state(tiny), grid=16, num_heads=2) == tiny


@pytest.mark.parametrize(("state", "options", "told"), [
    (meta_state(TEXT), {}, "give --heads"),
    (meta_state(TEXT), {"num_heads": 3}, "multiple of 4"),
    ({"encoder.conv_in.weight": torch.ones(1)}, {}, "--vq"),
])  # fmt: skip
def test_shapes_that_do_not_tell(state, options, told):
    fails_with(told, published_files.infer_config, state, grid=16, **options)


@pytest.mark.parametrize("config", [VqConfig(), VqConfig(ch_mult=(1, 2, 2, 4)), VQ], ids=["vq-16", "vq-8", "tiny"])
def test_the_tokenizers_config_follows_from_the_shapes(config):
    with torch.device("meta"):
        state = VqTokenizer(config).state_dict()
    assert published_files.infer_vq_config(state) == config


def test_a_tokenizer_with_other_groups_is_not_guessed_at():
    with torch.device("meta"), pytest.raises(UserError, match="groups"):
        published_files.infer_vq_config(VqTokenizer(VqConfig(base_channels=8, groups=4)).state_dict())


def test_the_grid_is_in_the_name_or_given():
    names = {"c2i_B_384.pt": 24, "t2i_XL_stage1_256.pt": 16, "t2i_XL_stage2_512.pt": 32, "c2i_3B_384.pt": 24}
    assert {name: published_files.grid_of(name) for name in names} == names
    assert published_files.grid_of("c2i_B_384.pt", 256) == 16
    for name, size in (("model.pt", None), ("step_2560000.pt", None), ("model.pt", 250)):
        fails_with("image size", published_files.grid_of, name, size)


# ---- the command


def convert(*words):
    return main(["convert", *map(str, words)])


def test_an_official_file_with_a_nan_is_refused(tmp_path, capsys):
    """Of what the model is made of; what is left out may hold anything."""
    state = llamagen(CLASS).state_dict() | {"freqs": torch.full((2,), torch.nan)}
    path, kept = tmp_path / "c2i_256.pt", tmp_path / "kept"
    torch.save({"model": state}, path)
    assert convert(path, kept, "--heads", 2) == 0
    state["output.weight"][0, 0] = torch.inf
    torch.save({"model": state}, path)
    assert convert(path, tmp_path / "new", "--heads", 2) == 2
    assert f"weight output.weight holds NaN or infinity\n  where: {path}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_official_file_through_all_layouts(tmp_path, capsys):
    state = llamagen(CLASS).state_dict()
    torch.save({"model": {**state, "freqs": torch.ones(2)}, "optimizer": {}, "steps": 3}, tmp_path / "c2i_384.pt")
    ours, theirs, back = tmp_path / "ours", tmp_path / "theirs", tmp_path / "back"
    assert convert(tmp_path / "c2i_384.pt", ours, "--heads", 2) == 0
    told = capsys.readouterr().out
    assert "of no published size, class-conditional, 2 layers, 2 heads, width 16, 24x24 codes" in told
    assert f"{sum(t.numel() for t in state.values()):,} parameters" in told and "float32" in told
    assert "left out  optimizer, steps, freqs" in told
    assert files.load_llamagen(ours).config == CLASS.model_copy(update={"grid": 24})
    assert convert(ours, theirs, "--to", "lantern", "--dtype", "bfloat16") == 0
    assert "left out  nothing" in capsys.readouterr().out
    assert files.is_lantern(json.loads((theirs / "config.json").read_text()))
    assert convert(theirs, back) == 0
    expected = {name: value.bfloat16() for name, value in state.items()}
    assert same(load_file(back / "model.safetensors"), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "c2i_384.pt", "ours", "theirs"]


@pytest.mark.parametrize("name", ["layers.0.attention.q_norm.weight", "layers.1.attention.wqkv.bias"])
def test_a_weight_of_another_architecture_is_not_left_out(tmp_path, capsys, name):
    torch.save({"model": {**llamagen(CLASS).state_dict(), name: torch.ones(8)}}, tmp_path / "c2i_384.pt")
    assert convert(tmp_path / "c2i_384.pt", tmp_path / "ours", "--heads", 2) == 2
    assert f"{name} is no part of this model" in capsys.readouterr().err and not (tmp_path / "ours").exists()


def test_a_tokenizer_file(tmp_path, capsys):
    model = tokenizer()
    torch.save({"model": {**model.state_dict(), "loss.weight": torch.ones(2)}}, tmp_path / "vq.pt")
    assert convert("--vq", tmp_path / "vq.pt", tmp_path / "vq") == 0
    told = capsys.readouterr().out
    assert "VQ tokenizer, 2 pixels per code" in told and "left out  loss.weight" in told
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in told, "buffers are not counted"
    assert same(files.load_vq(tmp_path / "vq"), model)


def test_a_tiny_file_needs_its_heads_and_size(tmp_path, capsys):
    torch.save(dict(llamagen(TEXT).state_dict()), tmp_path / "x.pt")
    assert convert(tmp_path / "x.pt", tmp_path / "a") == 2
    assert "--image-size" in capsys.readouterr().err
    assert convert(tmp_path / "x.pt", tmp_path / "a", "--image-size", 256) == 2
    assert "--heads" in capsys.readouterr().err
    assert convert(tmp_path / "x.pt", tmp_path / "a", "--image-size", 256, "--heads", 2) == 0
    assert same(files.load_llamagen(tmp_path / "a"), llamagen(TEXT))


@pytest.mark.parametrize(("arguments", "told"), [
    (["--vq"], "--vq is for .pt files"),
    (["--image-size", "256"], "--image-size is for .pt files"),
    (["--vq", "--to", "lantern"], "LANTERN's layout is for the transformer"),
    ([], "the destination exists"),
])  # fmt: skip
def test_options_that_would_not_be_honoured(arguments, told, tmp_path, capsys):
    files.save_model(llamagen(TEXT), tmp_path / "a")
    if not arguments:
        (tmp_path / "b").mkdir()
    assert convert(tmp_path / "a", tmp_path / "b", *arguments) == 2
    assert told in capsys.readouterr().err
    assert not [*tmp_path.glob("b/*")]
