"""The weights that the published metrics need: which, from where, and how a recipe names their place.

Nothing is downloaded behind anyone's back: a metric without its weights stops before the first image is made.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...core.errors import UserError
from ...core.files import open_regular
from ...core.finite import check_weights
from ...core.json_types import object_at

Metric = Literal["fid", "clip", "precision_recall", "inception_score", "hpsv2", "aesthetic", "fid_lite0", "name_recall"]
WeightName = Literal["inception", "vgg16", "clip", "hpsv2", "aesthetic", "clip_large", "lite0"]


# Name of weights -> what they are, and where they come from.
SOURCES: dict[WeightName, tuple[str, str]] = {
    "inception": (
        "the file inception-2015-12-05.pt (Inception v3 as TorchScript)",
        "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    ),
    "vgg16": (
        "the file vgg16-397923af.pth (torchvision's VGG16)",
        "https://download.pytorch.org/models/vgg16-397923af.pth",
    ),
    "clip": (
        "the folder of CLIP ViT-B/32 (model.safetensors or pytorch_model.bin, config and tokenizer)",
        "https://huggingface.co/openai/clip-vit-base-patch32",
    ),
    "hpsv2": ("the file HPS_v2.1_compressed.pt", "https://huggingface.co/xswu/HPSv2"),
    "aesthetic": (
        "the file sac+logos+ava1-l14-linearMSE.pth (LAION's aesthetic head)",
        "https://github.com/christophschuhmann/improved-aesthetic-predictor",
    ),
    "clip_large": (
        "the folder of CLIP ViT-L/14 (model.safetensors or pytorch_model.bin, config)",
        "https://huggingface.co/openai/clip-vit-large-patch14",
    ),
    "lite0": ("the folder of EfficientNet-Lite0", "`draftsmith fetch lite0`"),
}

# HPS v2.1 comes without a tokenizer; CLIP's is the one that it was trained with.
NEEDS: dict[Metric, tuple[WeightName, ...]] = {
    "fid": ("inception",),
    "clip": ("clip",),
    "precision_recall": ("vgg16",),
    "inception_score": ("inception",),
    "hpsv2": ("hpsv2", "clip"),
    "aesthetic": ("aesthetic", "clip_large"),
    "fid_lite0": ("lite0",),
    "name_recall": ("lite0",),
}


def find(metric: Metric, name: WeightName, weights: Mapping[WeightName, str]) -> Path:
    """The place of one of a metric's weights. Raises `UserError` that says what is missing and where it comes from."""
    sentence = f"the metric {metric!r} needs {' from '.join(SOURCES[name])}"
    hint = f"download it and set weights: {{{name}: <its path>}}, or leave {metric!r} out of metrics"
    if name not in weights:
        raise UserError(f"{sentence}, and the recipe names no place for it", key=f"weights.{name}", hint=hint)
    path = Path(weights[name]).expanduser()
    if not path.exists():
        raise UserError(f"{sentence}, and there is nothing at {path}", key=f"weights.{name}", hint=hint)
    return path


def read_state(path: Path, name: WeightName) -> dict[str, Tensor]:
    """Tensors by name of a file, perhaps under `state_dict`; no code of it is run. Raises `UserError` for others."""
    try:
        open_regular(path).close()  # neither reader says of a pipe that it is none
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise unfit(path, name, "cannot be read as a file of weights") from error
    state = object_at(state, "state_dict") or object_at(state)
    if state is None or not all(isinstance(value, Tensor) for value in state.values()):
        raise unfit(path, name, "holds something else than tensors by name")
    check_weights(state, path)
    return state


def load_state(network: torch.nn.Module, state: Mapping[str, Tensor], path: Path, name: WeightName) -> None:
    """Fill a network, every tensor of both sides used. Raises `UserError` naming the first that does not fit."""
    try:
        network.load_state_dict(dict(state))
    except RuntimeError as error:
        _, first, *_ = str(error).splitlines()  # the line before it names the network's class
        raise unfit(path, name, f"holds other weights: {first.strip()[:200]}") from error


def unfit(path: Path, name: WeightName, problem: str) -> UserError:
    """The error about a file or folder that is there and is not what the metric asks for."""
    hint = f"use {' from '.join(SOURCES[name])}"
    return UserError(f"{path.name} {problem}", key=f"weights.{name}", where=str(path), hint=hint)
