"""Chameleon's VQ-GAN: its blocks against transformers' encoder, the names of published files, and hostile ones."""

import re

import pytest
import torch
from draftsmith.models.targets.anole.vqgan import VqGan, encode_images, load_encoder, load_vqgan
from draftsmith.models.targets.llamagen.vq import VqConfig
from fails import fails_with
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, ChameleonVQVAE, ChameleonVQVAEConfig
from transformers.models.chameleon.modeling_chameleon import (
    ChameleonVQVAEEncoderAttnBlock,
    ChameleonVQVAEEncoderResnetBlock,
)

TINY = VqConfig(base_channels=32, ch_mult=(1, 2, 2), num_res_blocks=1, z_channels=8, codebook_size=24, codebook_dim=6)
VQVAE = ChameleonVQVAEConfig(
    base_channels=32, channel_multiplier=[1, 2, 2], num_res_blocks=1, latent_channels=8, embed_dim=6,
    num_embeddings=24, resolution=32,
)  # fmt: skip


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random everywhere: norms and biases begin at one and zero, which would hide that they are mixed up."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    return module.eval().requires_grad_(False)


def published_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """A tiny VQ-GAN under the names of the published files, both halves."""
    torch.manual_seed(seed)
    encoder = shaken(ChameleonVQVAE(VQVAE), seed)
    decoder = shaken(VqGan(TINY), seed + 1)
    # Random codebooks lie far from random encoders: as many codes as there are come near.
    cells = encoder.quant_conv(encoder.encoder(pictures(4))).permute(0, 2, 3, 1).flatten(0, 2)
    encoder.quantize.embedding.weight.data.copy_(cells[torch.randperm(len(cells))[:24]])
    return {**published_names(decoder), **encoder.state_dict()}


def published_names(decoder: VqGan) -> dict[str, torch.Tensor]:
    return {decoder.taming_name(name): weight for name, weight in decoder.state_dict().items()}


def pictures(count: int, side: int = 32) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(count)) * 2 - 1


def mirrored(state: dict[str, torch.Tensor], codes: torch.Tensor, side: int) -> torch.Tensor:
    """The decoder written out with transformers' blocks, from the weights by name."""

    def part(name: str) -> dict[str, torch.Tensor]:
        return {n.removeprefix(f"{name}."): w for n, w in state.items() if n.startswith(f"{name}.")}

    def conv(name: str, states: torch.Tensor) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(states, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def residual(name: str, states: torch.Tensor) -> torch.Tensor:
        width, width_in = state[f"{name}.conv1.weight"].shape[:2]
        block = ChameleonVQVAEEncoderResnetBlock(VQVAE, width_in, width).eval()
        block.load_state_dict(part(name))
        return block(states)

    states = state["quantize.embedding.weight"][codes].view(len(codes), side, side, -1).permute(0, 3, 1, 2)
    states = conv("decoder.conv_in", conv("post_quant_conv", states))
    attention = ChameleonVQVAEEncoderAttnBlock(states.shape[1]).eval()
    attention.load_state_dict(part("decoder.mid.attn_1"))
    states = residual("decoder.mid.block_2", attention(residual("decoder.mid.block_1", states)))
    for level in reversed(range(3)):
        for block in range(2):
            states = residual(f"decoder.up.{level}.block.{block}", states)
        if level > 0:
            states = F.interpolate(states, scale_factor=2.0, mode="nearest")
            states = conv(f"decoder.up.{level}.upsample.conv", states)
    states = F.group_norm(states, 32, state["decoder.norm_out.weight"], state["decoder.norm_out.bias"], eps=1e-6)
    return conv("decoder.conv_out", states * torch.sigmoid(states)).clamp(-1, 1)


@torch.no_grad()
def test_decoding_equals_the_mirrored_encoder(tmp_path):
    state = published_state()
    save_file(state, tmp_path / "model.safetensors")
    codes = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(1))
    images, expected = load_vqgan(tmp_path).decode(codes), mirrored(state, codes, 4)
    assert images.shape == (3, 3, 16, 16) and 0 < images.abs().max() <= 1
    assert (expected.abs() < 1).float().mean() > 0.3, "all clamped: the comparison would say nothing"
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)


# ---- shapes and names


def test_the_published_names_and_size():
    """Taming's names, spelt out, and the 275 MB of the published file."""
    with torch.device("meta"):
        model, encoder = VqGan(VqConfig(codebook_size=8192, codebook_dim=256)), ChameleonVQVAE(ChameleonVQVAEConfig())
    assert model.config.factor == 16
    decoder = published_names(model)
    names = {"quantize.embedding.weight"}
    convs = ["post_quant_conv", "decoder.conv_in", "decoder.norm_out", "decoder.conv_out"]
    convs += [f"decoder.mid.attn_1.{part}" for part in ("norm", "q", "k", "v", "proj_out")]
    blocks = ["decoder.mid.block_1", "decoder.mid.block_2"]
    blocks += [f"decoder.up.{level}.block.{block}" for level in range(5) for block in range(3)]
    convs += [f"{block}.{part}" for block in blocks for part in ("norm1", "conv1", "norm2", "conv2")]
    convs += [f"decoder.up.{level}.upsample.conv" for level in range(1, 5)]
    # Widths change from 512 to 256 and from 256 to 128.
    convs += [f"decoder.up.{level}.block.0.nin_shortcut" for level in (1, 3)]
    names |= {f"{conv}.{kind}" for conv in convs for kind in ("weight", "bias")}
    assert set(decoder) == names
    whole = {**decoder, **encoder.state_dict()}
    assert round(sum(w.numel() for w in whole.values()) * 4 / 1e6) == 275
    shared = [n for n in decoder if n in encoder.state_dict()]
    assert shared and all(decoder[n].shape == encoder.state_dict()[n].shape for n in shared)


@torch.no_grad()
def test_pictures_to_codes_and_back(tmp_path):
    save_file(published_state(), tmp_path / "model.safetensors")
    encoder, decoder = load_encoder(tmp_path), load_vqgan(tmp_path)
    images = pictures(5)
    codes = encode_images(encoder, images)
    assert codes.shape == (5, 64) and codes.dtype == torch.int64 and len(codes.unique()) > 8
    cells = encoder.quant_conv(encoder.encoder(images)).permute(0, 2, 3, 1)
    assert torch.equal(codes, torch.cdist(cells.flatten(1, 2), decoder.codebook).argmin(-1))
    assert decoder.decode(codes).shape == images.shape
    # One by one.
    torch.testing.assert_close(decoder.decode(codes)[3:4], decoder.decode(codes[3:4]), atol=1e-4, rtol=0)
    fails_with("", decoder.decode, codes[:, :60], error=AssertionError)


def test_the_models_own_encoder(tmp_path):
    """Through a Chameleon: ids less four; half precision, in which none is loaded, does pick other codes."""
    names = {"IMGIMG" + "".join("ABCDEFGHIJ"[int(d)] for d in str(code)) + "Z": code + 4 for code in range(24)}
    config = ChameleonConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vq_config=VQVAE, vocabulary_map={**names, "<image>": 30},
    )  # fmt: skip
    model = ChameleonForConditionalGeneration(config).eval()
    state = published_state()
    own = model.model.vqmodel.state_dict()
    model.model.vqmodel.load_state_dict({name: state[name] for name in own})
    images = pictures(3)
    codes = encode_images(model.model.vqmodel, images)
    assert torch.equal(codes, model.get_image_tokens(images) - 4)
    half = model.model.vqmodel.bfloat16().encode(images.bfloat16(), return_dict=True).image_tokens
    assert (half.view_as(codes) != codes).any()


# ---- files


def lightning(state: dict[str, torch.Tensor]) -> dict:
    """What Meta's vqgan.ckpt is made like: the weights beside a training state, with a discriminator among them."""
    return {
        "epoch": 3, "global_step": 10, "pytorch-lightning_version": "1.0.8", "optimizer_states": [],
        "state_dict": {**state, "loss.discriminator.main.0.weight": torch.zeros(2)},
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "model.vqmodel."])
def test_both_published_layouts_load(tmp_path, prefix):
    state = published_state()
    stored = {f"{prefix}{name}": weight for name, weight in state.items()}
    torch.save(lightning(stored) if not prefix else {"state_dict": stored}, tmp_path / "vqgan.ckpt")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    for source in (tmp_path / "vqgan.ckpt", tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        decoder = load_vqgan(source)
        assert decoder.config == TINY and not decoder.training
        assert all(torch.equal(weight, state[name]) for name, weight in published_names(decoder).items())
        encoder = load_encoder(source)
        assert all(torch.equal(weight, state[name]) for name, weight in encoder.state_dict().items())


@pytest.mark.parametrize(("harm", "problem"), [
    (lambda s: s.pop("decoder.mid.attn_1.k.bias"), "decoder.mid.attn_1.k.bias is missing"),
    (lambda s: s.pop("quantize.embedding.weight"), "quantize.embedding.weight is missing"),
    (lambda s: s.pop("decoder.conv_in.weight"), "no decoder.conv_in.weight here"),
    (lambda s: s.update({"decoder.up.0.attn.0.q.bias": torch.zeros(32)}), "decoder.up.0.attn.0.q.bias is not part"),
    (lambda s: s.update({"ema.decay": torch.zeros(1)}), "ema.decay is not part of a VQ-GAN"),
    (lambda s: s.update({"post_quant_conv.bias": torch.zeros(9)}), "post_quant_conv.bias is [9], expected [8]"),
    (lambda s: s.update({"decoder.conv_out.weight": torch.zeros(3, 48, 3, 3)}), "48, 3, 3], expected [3, 32, 3, 3]"),
])  # fmt: skip
def test_files_that_do_not_fit_are_refused(tmp_path, harm, problem):
    state = published_state()
    harm(state)
    save_file(state, tmp_path / "model.safetensors")
    fails_with(re.escape(problem), load_vqgan, tmp_path)


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "vqgan.ckpt").write_bytes(b"nothing")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    for source in (tmp_path / "vqgan.ckpt", tmp_path):
        fails_with(r"more than tensors|cannot be read", load_vqgan, source)
    (tmp_path / "empty").mkdir()
    fails_with("file not found", load_vqgan, tmp_path / "empty")
