"""Chameleon's VQ-GAN: image codes to pictures, which transformers leaves out, and pictures to codes through its class.

Anole draws with Chameleon's tokenizer, unchanged. Meta's `vqgan.ckpt` and leloy/Anole-7b-v0.1-vqvae-hf hold encoder and
decoder under the names of taming-transformers (Esser et al. 2021); the decoder is LlamaGen's, with other names.
Unlike LlamaGen's tokenizer nothing is normalised: codes are looked up by distance to the raw rows.
Letters: B images, S side in pixels, h w codes per side, n = h w, C channels, E code width, V codes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ....core.errors import UserError
from ....core.finite import check_weights
from ....core.pretrained import read_safetensors
from ...folders import WEIGHTS, check_shapes, find_folder, shapes_of
from ..llamagen.published_files import infer_vq_config, read_pickle
from ..llamagen.vq import IMAGES_PER_PASS, Decoder, VqConfig

if TYPE_CHECKING:
    import transformers

_DECODER = ("decoder.", "post_quant_conv.", "quantize.")
_ENCODER = ("encoder.", "quant_conv.", "quantize.", "post_quant_conv.")
_LOSS = "loss."  # the discriminator that it was trained against
_LANDMARK = "decoder.conv_in.weight"
_LEVEL = re.compile(r"decoder\.conv_blocks\.(\d+)\.")  # its number counts from the coarsest


class VqGan(nn.Module):
    """The decoding half, by LlamaGen's decoder without attention in its levels. Frozen: nothing trains it."""

    def __init__(self, config: VqConfig):
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, attends=False)
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(config.codebook_size, config.codebook_dim)})
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    @property
    def codebook(self) -> Tensor:
        """[V,E] rows as they are compared and decoded."""
        return cast(nn.Embedding, self.quantize["embedding"]).weight

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B,n] int64 of square images to images [B,3,S,S] in [-1,1]."""
        side = math.isqrt(codes.shape[1])
        assert codes.shape[1] == side**2, codes.shape
        passes = (self.codebook[part].transpose(1, 2) for part in codes.split(IMAGES_PER_PASS))
        images = [self.decoder(self.post_quant_conv(rows.unflatten(-1, (side, side)))) for rows in passes]
        return torch.cat(images).clamp(-1.0, 1.0)

    def taming_name(self, name: str) -> str:
        """The name of a parameter in published files, whose levels are numbered from the finest."""
        for place, published in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f"decoder.mid.{place}.", f"decoder.mid.{published}.")
        level = _LEVEL.match(name)
        if level is None:
            return name
        rest = name[level.end() :].replace("res.", "block.", 1)
        return f"decoder.up.{len(self.config.ch_mult) - 1 - int(level[1])}.{rest}"


# ---- pictures to codes


@torch.no_grad()
def encode_images(vq: transformers.ChameleonVQVAE, pixels: Tensor) -> Tensor:
    """Images [B,3,S,S] in [-1,1] to codes [B,n] int64, row by row, by the encoder of `load_encoder`."""
    # One by one: the encoder keeps all its states, about 2 GB for a picture of 512 pixels.
    return torch.stack([vq.encode(picture, return_dict=True).image_tokens.flatten() for picture in pixels.split(1)])


# ---- files


def load_vqgan(source: str | Path, *, revision: str | None = None) -> VqGan:
    """The decoding half in eval mode on the CPU. `source`: a Hub id or directory of leloy's layout
    (`model.safetensors`), or a file: `.safetensors`, or Meta's `vqgan.ckpt`, which is read with weights_only. Names may
    stand after a common prefix (model.vqmodel.). Raises `UserError`: a key that is missing, unknown or of another
    shape; an unreadable file; one that asks for code.
    """
    state, where = _read(source, revision)
    model = VqGan(infer_vq_config(state, where=where)).eval().requires_grad_(False)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    mine = {name: tensor for name, tensor in state.items() if name.startswith(_DECODER)}
    check_shapes(shapes_of(mine), {model.taming_name(name): shape for name, shape in shapes.items()}, where=where)
    model.load_state_dict({name: mine[model.taming_name(name)] for name in shapes})
    return model.float()


def load_encoder(source: str | Path, *, revision: str | None = None) -> transformers.ChameleonVQVAE:
    """The encoding half, in transformers' class, from the same files as `load_vqgan`. In float32: distances are
    differences of large squares, and half precision picks other codes.
    """
    import transformers
    from transformers import ChameleonVQVAEConfig

    state, where = _read(source, revision)
    shape = infer_vq_config(state, where=where)
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
        state = read_safetensors(path)
    else:
        try:
            state, _ = read_pickle(path)
        except UserError as error:
            hint = "take leloy/Anole-7b-v0.1-vqvae-hf, which holds the same weights and nothing else (safetensors)"
            raise UserError(error.problem, where=where, hint=hint) from error
    prefix = next((name.removesuffix(_LANDMARK) for name in state if name.endswith(_LANDMARK)), None)
    if prefix is None:
        raise UserError(
            f"no {_LANDMARK} here: this is no VQ-GAN with a decoder; the file begins with {', '.join(list(state)[:3])}",
            where=where, hint="give Meta's vqgan.ckpt or leloy/Anole-7b-v0.1-vqvae-hf",
        )  # fmt: skip
    weights = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    weights = {n: t for n, t in weights.items() if not n.startswith(_LOSS)}
    unknown = [n for n in weights if not n.startswith(_DECODER + _ENCODER)]
    if unknown:
        raise UserError(f"{unknown[0]} is not part of a VQ-GAN", where=where, hint="give the file as published")
    check_weights(weights, where)
    return weights, where
