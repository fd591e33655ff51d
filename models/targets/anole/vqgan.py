"""Chameleon's VQ-GAN: image codes to pictures, which transformers leaves out, and pictures to codes through its class.

Anole draws with Chameleon's tokenizer, unchanged. Parameters carry the names of taming-transformers (Esser et al.
2021), so that Meta's `vqgan.ckpt` and leloy/Anole-7b-v0.1-vqvae-hf load as they are; both hold encoder and decoder.
Unlike LlamaGen's tokenizer nothing is normalised: codes are looked up by distance to the raw rows.
Letters: B images, S side in pixels, h w codes per side, n = h w, C channels, E code width, V codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.errors import UserError
from ....core.finite import check_weights
from ....core.pretrained import read_safetensors
from ...folders import WEIGHTS, check_shapes, find_folder, shapes_of
from ..llamagen.published_files import load_pickle, weights_in
from ..llamagen.vq import IMAGES_PER_PASS, Attention, ResBlock, Upsample, VqConfig, norm

if TYPE_CHECKING:
    import transformers

GROUPS = 32  # of the group norms, here as in transformers' encoder
_DECODER = ("decoder.", "post_quant_conv.", "quantize.")
_ENCODER = ("encoder.", "quant_conv.", "quantize.", "post_quant_conv.")
_LOSS = "loss."  # the discriminator that it was trained against
_LANDMARK = "decoder.conv_in.weight"


class VqGanConfig(VqConfig):
    """The shape of a tokenizer; the defaults are the published one's, which has 16 x 16 pixels to a code."""

    codebook_size: int = Field(8192, ge=2)
    codebook_dim: int = Field(256, ge=1)


class VqGan(nn.Module):
    """The decoding half. Frozen: nothing trains it."""

    def __init__(self, config: VqGanConfig):
        super().__init__()
        self.config = config
        self.decoder = Decoder(config)
        self.quantize = _Codebook(config)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    @property
    def codebook(self) -> Tensor:
        """[V,E] rows as they are compared and decoded."""
        return self.quantize.embedding.weight

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B,n] int64 of square images to images [B,3,S,S] in [-1,1]."""
        side = math.isqrt(codes.shape[1])
        assert codes.shape[1] == side**2, codes.shape
        return torch.cat([self._images(part, side) for part in codes.split(IMAGES_PER_PASS)])

    def _images(self, codes: Tensor, side: int) -> Tensor:
        grid = self.quantize.embedding(codes).transpose(1, 2).unflatten(-1, (side, side))
        return self.decoder(self.post_quant_conv(grid)).clamp(-1.0, 1.0)


class _Codebook(nn.Module):
    def __init__(self, config: VqGanConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)


class Decoder(nn.Module):
    """The mirrored encoder: the middle, then levels from the coarsest to the finest, which has number 0."""

    def __init__(self, config: VqGanConfig):
        super().__init__()
        channels, coarsest = config.channels, len(config.channels) - 1
        self.conv_in = nn.Conv2d(config.z_channels, channels[-1], 3, padding=1)
        self.mid = Middle(channels[-1])
        self.up = nn.ModuleList(
            Level(channels[min(number + 1, coarsest)], width, config.num_res_blocks + 1, upsample=number > 0)
            for number, width in enumerate(channels)
        )
        self.norm_out = norm(channels[0], GROUPS)
        self.conv_out = nn.Conv2d(channels[0], 3, 3, padding=1)

    def forward(self, vectors: Tensor) -> Tensor:
        """[B,z,h,w] -> [B,3,S,S], not clamped."""
        states = self.mid(self.conv_in(vectors))
        for level in reversed(self.up):
            states = level(states)
        return self.conv_out(F.silu(self.norm_out(states)))


class Middle(nn.Module):
    """The blocks at the lowest resolution: residual, attention, residual."""

    def __init__(self, width: int):
        super().__init__()
        self.block_1 = ResBlock(width, width, GROUPS)
        self.attn_1 = Attention(width, GROUPS)
        self.block_2 = ResBlock(width, width, GROUPS)

    def forward(self, states: Tensor) -> Tensor:
        """[B,C,h,w] -> [B,C,h,w]."""
        return self.block_2(self.attn_1(self.block_1(states)))


class Level(nn.Module):
    """The blocks of one resolution and the step to the next finer one. The published levels have no attention."""

    def __init__(self, width_in: int, width: int, num_blocks: int, *, upsample: bool):
        super().__init__()
        self.block = nn.ModuleList(ResBlock(a, b, GROUPS) for a, b in pairwise([width_in, *[width] * num_blocks]))
        self.upsample = Upsample(width) if upsample else None

    def forward(self, states: Tensor) -> Tensor:
        """[B,C,h,w] -> [B,C',h,w], or [B,C',2h,2w] where it upsamples."""
        for block in self.block:
            states = block(states)
        return states if self.upsample is None else self.upsample(states)


# ---- pictures to codes


@torch.no_grad()
def encode_images(vq: transformers.ChameleonVQVAE, pixels: Tensor) -> Tensor:
    """Images [B,3,S,S] in [-1,1] to codes [B,n] int64, row by row, by the encoder of `load_encoder`."""
    # One by one: the encoder keeps all its states, about 2 GB for a picture of 512 pixels.
    return torch.stack([vq.encode(picture, return_dict=True).image_tokens.flatten() for picture in pixels.split(1)])


# ---- files


def load_vqgan(source: str | Path, *, revision: str | None = None) -> VqGan:
    """The decoding half in eval mode on the CPU.

    Args:
        source: a Hub id or directory of leloy's layout (`model.safetensors`), or a file: `.safetensors`, or Meta's
            `vqgan.ckpt`, which is read with weights_only. Names may stand after a common prefix (model.vqmodel.).

    Raises:
        UserError: a key that is missing, unknown or of another shape; an unreadable file; one that asks for code.
    """
    state, where = _read(source, revision)
    model = VqGan(_infer_config(state, where)).eval().requires_grad_(False)
    mine = {name: tensor for name, tensor in state.items() if name.startswith(_DECODER)}
    check_shapes(shapes_of(mine), shapes_of(model.state_dict()), where=where)
    model.load_state_dict(mine)
    return model.float()


def load_encoder(source: str | Path, *, revision: str | None = None) -> transformers.ChameleonVQVAE:
    """The encoding half, in transformers' class, from the same files as `load_vqgan`. In float32: distances are
    differences of large squares, and half precision picks other codes.
    """
    import transformers
    from transformers import ChameleonVQVAEConfig

    state, where = _read(source, revision)
    shape = _infer_config(state, where)
    config = ChameleonVQVAEConfig(
        base_channels=shape.base_channels, channel_multiplier=list(shape.ch_mult), num_res_blocks=shape.num_res_blocks,
        latent_channels=shape.z_channels, embed_dim=shape.codebook_dim, num_embeddings=shape.codebook_size,
    )  # fmt: skip
    model = transformers.ChameleonVQVAE(config).float().eval().requires_grad_(False)
    mine = {name: tensor.float() for name, tensor in state.items() if name.startswith(_ENCODER)}
    check_shapes(shapes_of(mine), shapes_of(model.state_dict()), where=where)
    model.load_state_dict(mine)
    return model


def _read(source: str | Path, revision: str | None) -> tuple[dict[str, Tensor], str]:
    """Weights under taming's names, without the training's discriminator, and where they come from."""
    path = Path(source)
    path = path if path.is_file() else find_folder(source, revision) / WEIGHTS
    where = str(path)
    if path.suffix == ".safetensors":
        state: Mapping[str, Tensor] = read_safetensors(path)
    else:
        state = _checkpoint(path)
    prefix = next((name.removesuffix(_LANDMARK) for name in state if name.endswith(_LANDMARK)), None)
    if prefix is None:
        raise UserError(
            f"no {_LANDMARK} here: this is no VQ-GAN with a decoder; the file begins with {', '.join(list(state)[:3])}",
            where=where, hint="give Meta's vqgan.ckpt or leloy/Anole-7b-v0.1-vqvae-hf",
        )  # fmt: skip
    own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    own = {n: t for n, t in own.items() if not n.startswith(_LOSS)}
    unknown = [n for n in own if not n.startswith(_DECODER + _ENCODER)]
    if unknown:
        raise UserError(f"{unknown[0]} is not part of a VQ-GAN", where=where, hint="give the file as published")
    check_weights(own, where)
    return own, where


def _checkpoint(path: Path) -> dict[str, Tensor]:
    """Lightning keeps the weights under `state_dict`, beside a training state that may hold objects."""
    try:
        return weights_in(load_pickle(path), where=str(path))
    except UserError as error:
        hint = "take leloy/Anole-7b-v0.1-vqvae-hf, which holds the same weights and nothing else (safetensors)"
        raise UserError(error.problem, where=error.where, hint=hint) from error


def _infer_config(state: Mapping[str, Tensor], where: str) -> VqGanConfig:
    """The shape behind a state dict; attention in the levels shows as unknown keys later."""
    levels = sum(f"decoder.up.{number}.block.0.conv1.weight" in state for number in range(16))
    try:
        widths = [state[f"decoder.up.{number}.block.0.conv1.weight"].shape[0] for number in range(levels)]
        base = state["decoder.conv_out.weight"].shape[1]
        blocks = sum(f"decoder.up.0.block.{number}.conv1.weight" in state for number in range(64))
        rows, width = state["quantize.embedding.weight"].shape
        z_channels = state[_LANDMARK].shape[1]
    except KeyError as error:
        raise UserError(f"{error.args[0]} is missing", where=where, hint="fetch the file again") from error
    if base % GROUPS or any(w % base for w in widths) or not widths or blocks < 2:
        raise UserError(f"levels of {widths} channels over {base} are no VQ-GAN of this family", where=where)
    return VqGanConfig(
        base_channels=base, ch_mult=tuple(w // base for w in widths), num_res_blocks=blocks - 1,
        z_channels=z_channels, codebook_size=rows, codebook_dim=width,
    )  # fmt: skip
