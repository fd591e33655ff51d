"""A head outside the run, as training starts from it: a folder of ours, an export, or a head that others published.

The recipe's `drafter` section says what is trained, so the files must agree with it: kind, layer, layers that are read,
and the target. What no file says (what stood at pictures in training) is what the section says from now on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.pretrained import INDEX
from ..folders import CONFIG, find_folder
from ..targets.base import Target
from .base import DrafterConfig, PublishedDrafter, TargetIdentity
from .manifest import MANIFEST, OtherTarget, read_manifest

# What is fetched of a Hub id. Pickles are read without running anything that is in them.
FILES = (CONFIG, MANIFEST, "*.safetensors", INDEX, "pytorch_model.bin")

# section, folder, target, its identity, its embedding (None: not compared) -> a head in a layout of others
LoadPublished = Callable[[DrafterConfig, Path, Target, TargetIdentity, Tensor | None], nn.Module]


def is_own(folder: Path) -> bool:
    """Whether a folder holds a drafter in our own layout: of a stage, published, or imported. An export has another."""
    return (folder / MANIFEST).is_file() and "export" not in read_manifest(folder)


def find_start(source: str | Path, revision: str | None) -> Path:
    """The folder of the weights; those on the Hub are downloaded. Raises `UserError` where there is none."""
    return find_folder(source, revision, files=FILES)


def load_start(
    config: DrafterConfig, folder: Path, target: Target, identity: TargetIdentity, published: LoadPublished, *,
    other_target: bool = False,
) -> nn.Module:  # fmt: skip
    """The head in float32 on the target's device, ready to be trained on; `published` reads layouts that are not ours.
    Raises `UserError` where a file is missing, or the head is of another kind, making or target than `config` says:
    with `other_target`, a target's name and embedding are not compared.
    """
    embedding: Tensor | None = target.embedding
    if other_target:
        identity, embedding = TargetIdentity({}, identity.tokenizer_sha256), None
    try:
        if is_own(folder) or config.publishes_as_ours:
            if isinstance(config, PublishedDrafter):
                return config.begin_from(folder, target, identity)
            return config.load(folder, target, dtype=torch.float32, identity=identity)
        return published(config, folder, target, identity, embedding)
    except OtherTarget as error:
        if other_target:
            raise
        hint = "if it was trained for a base model of this target: from: {path: ..., other_target: true}"
        raise UserError(error.problem, key=error.key, where=error.where, hint=f"{error.hint}; {hint}") from error
