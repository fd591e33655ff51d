"""LlamaGen's image tokenizer (VQGAN with a small L2-normalised codebook): images to codes and back.

Parameters carry the official names, so that the published files load as they are. Two things a reader would not
expect: encoder outputs *and* codebook rows are normalised at use, while the stored rows need not be of unit length; and
down-sampling pads on the right and at the bottom only.
Letters: B images, S side in pixels, h w codes per side, n = h w, C channels, E code width, V codes, M cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.section import Section

# Weight of the term that pulls the encoder to its code (van den Oord et al. 2017, eq. 3); LlamaGen's value.
COMMITMENT = 0.25
# Images per pass of encode and decode: at 512 pixels one image's widest activation takes 134 MB in float32.
IMAGES_PER_PASS = 4
# Cells compared with the codebook at once: 2048 x 16384 float32 scores take 134 MB.
CELLS_PER_PASS = 2048


class VqConfig(Section):
    """The shape of a tokenizer. Defaults are the published VQ-16; VQ-8 has `ch_mult: [1, 2, 2, 4]`."""

    # Channels of the first level.
    base_channels: int = Field(128, ge=1)
    # Channels per level over base_channels; each level but the last halves the side.
    ch_mult: tuple[int, ...] = Field((1, 1, 2, 2, 4), min_length=1)
    # Residual blocks per level of the encoder; the decoder has one more.
    num_res_blocks: int = Field(2, ge=1)
    # Channels of the encoder's output.
    z_channels: int = Field(256, ge=1)
    # Number of codes: the target's vocabulary.
    codebook_size: int = Field(16384, ge=2)
    # Width of a code's vector.
    codebook_dim: int = Field(8, ge=1)
    # Of the group norms. Must divide the channels of every level: tiny tokenizers need fewer than the published 32.
    groups: int = Field(32, ge=1)

    @model_validator(mode="after")
    def _divisible(self) -> VqConfig:
        odd = [c for c in self.channels if c < 1 or c % self.groups]
        if odd:
            raise ValueError(
                f"groups ({self.groups}) must divide the channels of every level; it does not divide {odd}"
            )
        return self

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of each level, finest first."""
        return tuple(self.base_channels * m for m in self.ch_mult)

    @property
    def factor(self) -> int:
        """Pixels along a side of one code."""
        return 2 ** (len(self.ch_mult) - 1)


class VqTokenizer(nn.Module):
    """`encode` and `decode` serve frozen tokenizers, `forward` trains one."""

    def __init__(self, config: VqConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = Codebook(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Random weights: convolutions uniform within 1/sqrt(fan-in), norms one, codes on the unit sphere."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)
                nn.init.uniform_(cast(Tensor, module.bias), -bound, bound, generator=generator)
            elif isinstance(module, nn.GroupNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        rows = self.quantize.embedding.weight
        nn.init.normal_(rows, generator=generator)
        rows.data.copy_(F.normalize(rows.data, dim=-1))

    @property
    def codebook(self) -> Tensor:
        """Rows as they are compared and decoded: [V,E] float32 of unit length. The stored ones are
        `quantize.embedding.weight`."""
        return F.normalize(self.quantize.embedding.weight.float(), dim=-1)

    def pre_quant(self, images: Tensor) -> Tensor:
        """Vectors before normalisation and look-up: images [B,3,S,S] in [-1,1] -> [B,E,h,w]."""
        side = self.config.factor
        assert images.shape[-2] % side == 0 and images.shape[-1] % side == 0, (images.shape, side)
        return self.quant_conv(self.encoder(images))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images [B,3,S,S] in [-1,1] to codes [B,n] int64, row by row."""
        passes = images.split(IMAGES_PER_PASS)
        return torch.cat([nearest(unit_cells(self.pre_quant(part)), self.codebook) for part in passes])

    @torch.no_grad()
    def decode(self, codes: Tensor, shape: tuple[int, int]) -> Tensor:
        """Codes [B,n] int64 with n = h w to images [B,3,S,S], about [-1,1] and not clamped. `shape`: (h, w)."""
        assert codes.shape[1] == shape[0] * shape[1], (codes.shape, shape)
        passes = [self._images(self.codebook[part], shape) for part in codes.split(IMAGES_PER_PASS)]
        return torch.cat(passes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """For training: the reconstruction [B,3,S,S] and the quantisation loss (a scalar), LlamaGen's for its codebook:
        squared distance of code and cell, both of unit length, once with the cell held still and `COMMITMENT` times
        with the code held still. Gradients pass the look-up straight through (van den Oord et al. 2017, section 3.2).
        """
        vectors = self.pre_quant(images)
        cells, codebook = unit_cells(vectors), self.codebook
        quantised = codebook[nearest(cells.detach(), codebook.detach())]
        loss = F.mse_loss(quantised, cells.detach()) + COMMITMENT * F.mse_loss(quantised.detach(), cells)
        straight = cells + (quantised - cells).detach()
        return self._images(straight, (vectors.shape[-2], vectors.shape[-1])), loss

    def _images(self, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        """Codebook rows [B,n,E] to images."""
        grid = rows.transpose(1, 2).unflatten(-1, shape)
        return self.decoder(self.post_quant_conv(grid.to(self.post_quant_conv.weight.dtype)))


def unit_cells(vectors: Tensor) -> Tensor:
    """[B,E,h,w] to cells [B,n,E] float32 of unit length."""
    return F.normalize(vectors.flatten(2).transpose(1, 2).float(), dim=-1)


def nearest(cells: Tensor, codebook: Tensor) -> Tensor:
    """Number of the nearest row [B,n] int64: between unit vectors the one with the greatest product."""
    flat = cells.flatten(0, 1).split(CELLS_PER_PASS)
    return torch.cat([(part @ codebook.T).argmax(-1) for part in flat]).view(cells.shape[:2])


@torch.no_grad()
def revive_dead_codes(tokenizer: VqTokenizer, images: Tensor, generator: torch.Generator) -> int:
    """Move every code that no cell of `images` [B,3,S,S] chooses onto one of these cells, drawn by its error; returns
    how many. A code that is never chosen gets no gradient, so that a tokenizer trained from scratch is left with a
    handful of living codes. There must be as many cells as codes, else living codes would count as dead. Weights are
    written in place: every rank must hand in the same images and generator.
    """
    cells = torch.cat([unit_cells(tokenizer.pre_quant(part)) for part in images.split(IMAGES_PER_PASS)])
    codebook = tokenizer.codebook
    codes, flat = nearest(cells, codebook).flatten(), cells.flatten(0, 1)
    size = tokenizer.config.codebook_size
    assert len(flat) >= size, (len(flat), size)
    dead = (torch.bincount(codes, minlength=size) == 0).nonzero().flatten()
    # Badly served cells are likelier to get a code of their own (as k-means++ seeds): pictures are mostly background.
    distances = (flat - codebook[codes]).pow(2).sum(-1).clamp(min=1e-12).cpu()
    chosen = torch.multinomial(distances, len(dead), generator=generator).to(flat.device) if len(dead) else dead
    rows = tokenizer.quantize.embedding.weight
    rows[dead] = flat[chosen].to(rows.dtype)
    return len(dead)


class Codebook(nn.Module):
    """Holds the rows under their official names. `codebook_used` is the published training's record of the last
    65536 chosen codes: it is in the files, so it is here, and nothing reads it."""

    codebook_used: Tensor

    def __init__(self, config: VqConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.register_buffer("codebook_used", torch.zeros(65536))


class Encoder(nn.Module):
    """Images to vectors, by convolutions; each level but the last halves the resolution."""

    def __init__(self, config: VqConfig):
        super().__init__()
        channels, last = config.channels, len(config.channels) - 1
        self.conv_in = nn.Conv2d(3, config.base_channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList(
            Level([before, *[width] * config.num_res_blocks], config.groups, number == last, downsample=number < last)
            for number, (before, width) in enumerate(pairwise((config.base_channels, *channels)))
        )
        self.mid = middle(channels[-1], config.groups)
        self.norm_out = norm(channels[-1], config.groups)
        self.conv_out = nn.Conv2d(channels[-1], config.z_channels, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,S,S] -> [B,z,h,w]."""
        states = self.conv_in(images)
        for block in (*self.conv_blocks, *self.mid):
            states = block(states)
        return self.conv_out(F.silu(self.norm_out(states)))


class Decoder(nn.Module):
    """Vectors to images: the encoder's mirror, with one more block in each level.

    Args:
        attends: the coarsest level has attention (Chameleon's has none).
    """

    def __init__(self, config: VqConfig, *, attends: bool = True):
        super().__init__()
        channels, last, count = config.channels, len(config.channels) - 1, config.num_res_blocks + 1
        self.conv_in = nn.Conv2d(config.z_channels, channels[-1], 3, padding=1)
        self.mid = middle(channels[-1], config.groups)
        self.conv_blocks = nn.ModuleList(
            Level([before, *[width] * count], config.groups, attends and number == 0, upsample=number < last)
            for number, (before, width) in enumerate(pairwise((channels[-1], *reversed(channels))))
        )
        self.norm_out = norm(channels[0], config.groups)
        self.conv_out = nn.Conv2d(channels[0], 3, 3, padding=1)

    def forward(self, vectors: Tensor) -> Tensor:
        """[B,z,h,w] -> [B,3,S,S], not clamped."""
        states = self.conv_in(vectors)
        for block in (*self.mid, *self.conv_blocks):
            states = block(states)
        return self.conv_out(F.silu(self.norm_out(states)))


class Level(nn.Module):
    """The blocks of one resolution, from each of `widths` channels to the next, each followed by attention where it
    `attends` (at the lowest one), then a change of resolution.
    """

    def __init__(
        self, widths: Sequence[int], groups: int, attends: bool, *, downsample: bool = False, upsample: bool = False
    ):
        super().__init__()
        self.res = nn.ModuleList(ResBlock(a, b, groups) for a, b in pairwise(widths))
        self.attn = nn.ModuleList(Attention(width, groups) for width in widths[1:] if attends)
        self.downsample = Downsample(widths[-1]) if downsample else None
        self.upsample = Upsample(widths[-1]) if upsample else None

    def forward(self, states: Tensor) -> Tensor:
        """[B,C,h,w] -> [B,C',h',w']."""
        for number, block in enumerate(self.res):
            states = block(states)
            if len(self.attn):
                states = self.attn[number](states)
        for change in (self.downsample, self.upsample):
            if change is not None:
                states = change(states)
        return states


def middle(width: int, groups: int) -> nn.ModuleList:
    """The blocks at the lowest resolution: residual, attention, residual."""
    return nn.ModuleList([ResBlock(width, width, groups), Attention(width, groups), ResBlock(width, width, groups)])


def norm(width: int, groups: int) -> nn.GroupNorm:
    """Group normalization as published."""
    return nn.GroupNorm(groups, width, eps=1e-6)


class ResBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width_in: int, width: int, groups: int):
        super().__init__()
        self.norm1 = norm(width_in, groups)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.norm2 = norm(width, groups)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else None

    def forward(self, states: Tensor) -> Tensor:
        """[B,C,h,w] -> [B,C',h,w]."""
        change = self.conv1(F.silu(self.norm1(states)))
        change = self.conv2(F.silu(self.norm2(change)))
        return change + (states if self.nin_shortcut is None else self.nin_shortcut(states))


class Attention(nn.Module):
    """One head over all cells."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.norm = norm(width, groups)
        self.q = nn.Conv2d(width, width, 1)
        self.k = nn.Conv2d(width, width, 1)
        self.v = nn.Conv2d(width, width, 1)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """[B,C,h,w] -> [B,C,h,w]."""
        normed = self.norm(states)
        q, k, v = (part(normed).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))  # [B,n,C]
        mixed = F.scaled_dot_product_attention(q, k, v)
        return states + self.proj_out(mixed.transpose(1, 2).unflatten(-1, states.shape[-2:]))


class Downsample(nn.Module):
    """Halves the resolution by a convolution with stride 2."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, states: Tensor) -> Tensor:
        """[B,C,h,w] -> [B,C,h/2,w/2]."""
        return self.conv(F.pad(states, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Doubles the resolution: nearest neighbours, then a convolution."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, states: Tensor) -> Tensor:
        """[B,C,h,w] -> [B,C,2h,2w]."""
        return self.conv(F.interpolate(states, scale_factor=2.0, mode="nearest"))
