"""Whatever loads weights refuses those that hold NaN or infinity, with the file and the tensor."""

import json
import math

import pytest
import torch
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.eval.quality.clip import _load_clip
from draftsmith.eval.quality.metric_weights import read_state
from draftsmith.models.drafters.head_files import head_state
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.formats.source import read_published
from draftsmith.models.hub import load_pretrained
from draftsmith.models.shapes_reader import ShapesReader
from draftsmith.models.stored import stored_table
from draftsmith.models.targets.anole.section import load_anole
from draftsmith.models.targets.anole.vqgan import VqGan, load_vqgan
from draftsmith.models.targets.llamagen.captions import TextFeatures
from draftsmith.models.targets.llamagen.files import load_llamagen, load_vq, save_model
from draftsmith.models.targets.llamagen.vq import VqConfig, VqTokenizer
from draftsmith.models.targets.load import load_lvlm, load_weights
from fails import fails_with
from published_tiny import load_captioner
from safetensors.torch import load_file, save_file
from tiny import llava
from transformers import (
    AutoModelForCausalLM,
    ChameleonVQVAE,
    ChameleonVQVAEConfig,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
)
from visual_run import TEXT
from visual_tiny import anole, llamagen
from visual_tiny import target as image_target


def causal(folder):
    LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    ).save_pretrained(folder)


def tokenizer(folder):
    config = VqConfig(base_channels=8, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, codebook_size=12, groups=4)
    save_model(VqTokenizer(config), folder)


def vq_gan(folder):
    sizes = {"base_channels": 32, "num_res_blocks": 1}
    encoder = ChameleonVQVAE(
        ChameleonVQVAEConfig(channel_multiplier=[1, 2], latent_channels=8, num_embeddings=24, embed_dim=6, **sizes)
    )
    decoder = VqGan(VqConfig(ch_mult=(1, 2), z_channels=8, codebook_size=24, codebook_dim=6, **sizes))
    named = {decoder.taming_name(name): weight for name, weight in decoder.state_dict().items()}
    save_file(encoder.state_dict() | named, folder / "model.safetensors")


def text_encoder(folder):
    T5EncoderModel(T5Config(vocab_size=300, **TEXT)).save_pretrained(folder)
    train_tokenizer(["a picture with many words in it", "a short one"] * 4, 300).save_pretrained(folder)


def clip(folder):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=sizes | {"vocab_size": 20}, vision_config=sizes | {"image_size": 16, "patch_size": 8}
    )
    CLIPModel(config).save_pretrained(folder)


def language(folder):
    return load_pretrained(AutoModelForCausalLM.from_pretrained, str(folder), key="k")


MEDUSA, OF_CODES = MedusaConfig(kind="medusa", num_heads=2), image_target(llamagen())
# What is loaded -> how a folder of it is written, and how it is read.
DOORS = {
    "target": (lambda f: llava(4).save_pretrained(f),
               lambda f: load_lvlm(f, revision=None, dtype=torch.float32, key="target.path")),
    "text-only target": (causal,
                         lambda f: load_weights(LlamaForCausalLM, f, revision=None, dtype=torch.float16, key="k")),
    "anole": (lambda f: anole().model.save_pretrained(f), load_anole),
    "llamagen": (lambda f: save_model(llamagen(), f), load_llamagen),
    "image tokenizer": (tokenizer, load_vq),
    "language model of a draft": (causal, language),
    "a target's embedding": (causal, lambda f: stored_table("token embedding", str(f), where="key target")),
    "head": (causal, head_state),
    "published head": (causal, lambda f: read_published(str(f), None)),
    "medusa": (lambda f: MEDUSA.save(MEDUSA.build(OF_CODES), f, {}), lambda f: MEDUSA.load(f, OF_CODES)),
    "VQ-GAN": (vq_gan, load_vqgan),
    "text encoder": (text_encoder, TextFeatures),
    "CLIP": (clip, lambda f: _load_clip(f, "clip", "cpu")),
    "captioner": (causal, load_captioner),
    "reader of shapes": (lambda f: ShapesReader(3, 3).save(f), ShapesReader.load),
    "quality": (causal, lambda f: read_state(f / "model.safetensors", "inception")),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_weights_that_are_not_finite_are_refused_by_tensor_and_file(tmp_path, name):
    write, read = DOORS[name]
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    read(tmp_path)
    state = load_file(path)
    names = [key for key in sorted(state) if "." in key and state[key].is_floating_point()]
    spoilt = next((key for key in names if "embed_tokens" in key), names[0])
    state[spoilt].view(-1)[-1] = math.inf if name == "head" else math.nan
    save_file(state, path, metadata={"format": "pt"})
    caught = fails_with(r"weight .* holds NaN or infinity", read, tmp_path)
    assert caught.where == str(path)
    assert spoilt.rpartition(".")[0].rpartition(".")[2] in caught.problem


def test_a_language_model_that_lacks_a_layer_is_refused(tmp_path):
    """transformers would draw it at random."""
    causal(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    caught = fails_with(r"model.layers.1\S+ is missing", language, tmp_path)
    assert caught.where == str(tmp_path)
