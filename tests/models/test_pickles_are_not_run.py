"""Whatever reads a .bin, .pt or .ckpt refuses one that would run code, and runs none of it."""

import pickle
from pathlib import Path

import pytest
import torch
from draftsmith.eval.quality.clip import _load_clip
from draftsmith.eval.quality.convolutional import load_inception
from draftsmith.eval.quality.metric_weights import read_state
from draftsmith.models.drafters.head_files import head_state
from draftsmith.models.formats import lvlm
from draftsmith.models.formats.source import read_published
from draftsmith.models.hub import load_pretrained
from draftsmith.models.stored import stored_table
from draftsmith.models.targets.anole.section import load_anole
from draftsmith.models.targets.anole.vqgan import load_vqgan
from draftsmith.models.targets.llamagen.captions import TextFeatures
from draftsmith.models.targets.llamagen.files import load_llamagen, load_vq
from draftsmith.models.targets.llamagen.published_files import convert
from draftsmith.models.targets.load import load_lvlm, load_weights
from fails import fails_with
from published_tiny import load_captioner
from tiny import llava
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)
from visual_tiny import anole

TEXT = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
VISION = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                          image_size=16, patch_size=8)  # fmt: skip
T5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
CLIP = CLIPConfig(text_config=TEXT.to_dict() | {"model_type": "clip_text_model"}, vision_config=VISION.to_dict())
LLAVA, ANOLE = llava(4).config, anole().model.config
BIN = "pytorch_model.bin"


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return Path.mkdir, (self.folder,)


def converted(path):
    convert(str(path), path.parent / "converted")


# What is loaded -> its file's name, the config beside it, and how the folder is read.
DOORS = {
    "head": (BIN, TEXT, head_state),
    "published head": (BIN, TEXT, lambda f: read_published(str(f), None)),
    "published draft": (BIN, LLAVA, lambda f: lvlm.to_ours(str(f), LLAVA)),
    "target": (BIN, LLAVA, lambda f: load_lvlm(f, revision=None, dtype=torch.float32, key="target.path")),
    "text-only target": (BIN, TEXT, lambda f: load_weights(LlamaForCausalLM, f, revision=None, dtype="auto", key="k")),
    "anole": (BIN, ANOLE, load_anole),
    "language model of a draft": (
        BIN, TEXT, lambda f: load_pretrained(AutoModelForCausalLM.from_pretrained, str(f), key="k")),
    "vision tower of a draft": (
        BIN, VISION, lambda f: load_pretrained(CLIPVisionModel.from_pretrained, str(f), key="k")),
    "a target's embedding": (BIN, TEXT, lambda f: stored_table("token embedding", str(f), where="key target")),
    "captioner": (BIN, TEXT, load_captioner),
    "text encoder": (BIN, T5, TextFeatures),
    "CLIP": (BIN, CLIP, lambda f: _load_clip(f, "clip", "cpu")),
    "llamagen": (BIN, None, load_llamagen),
    "image tokenizer": (BIN, None, load_vq),
    "LlamaGen's transformer": ("t2i_XL_256.pt", None, lambda f: converted(f / "t2i_XL_256.pt")),
    "VQ-GAN": ("vqgan.ckpt", None, lambda f: load_vqgan(f / "vqgan.ckpt")),
    "weights of a metric": ("vgg16.pth", None, lambda f: read_state(f / "vgg16.pth", "vgg16")),
    "Inception": ("inception.pt", None, lambda f: load_inception(f / "inception.pt", "cpu")),
}  # fmt: skip


# What the message says of an archive and of a pickle, where it is not the same everywhere.
SAID = {
    "VQ-GAN": (r"asks for (.|\n)*safetensors", "cannot be read"),
    "LlamaGen's transformer": ("asks for ", "cannot be read"),
    "published head": ("unreadable weights",) * 2,
}


@pytest.mark.parametrize("is_archive", [True, False], ids=["torch.save", "pickle"])
@pytest.mark.parametrize("name", DOORS)
def test_a_crafted_pickle_is_refused_and_runs_nothing(tmp_path, name, is_archive):
    file, config, read = DOORS[name]
    path, sprung = tmp_path / file, tmp_path / "sprung"
    if config is not None:
        config.save_pretrained(tmp_path)
    crafted = {"state_dict": {"model.norm.weight": torch.ones(16)}, "fc.weight": Trap(sprung)}
    if is_archive:
        torch.save(crafted, path)
        torch.load(path, weights_only=False)
    else:
        path.write_bytes(pickle.dumps(crafted, protocol=2))
        pickle.loads(path.read_bytes())
    sprung.rmdir()  # it would have worked
    refused = fails_with(SAID.get(name, (None, None))[not is_archive], read, tmp_path)
    assert not sprung.exists()
    assert str(tmp_path) in str(refused) and refused.hint
    assert "weights_only" not in str(refused).lower()  # torch's advice is to switch the guard off
