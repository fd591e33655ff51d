"""Base of drafters whose trained part is a plain module: its files, its manifest and its copies need no code.

What such a drafter writes itself is `build`, `training_objective` and `drafter`. See docs/adding-a-drafter.md.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...core.json_types import JsonMapping, JsonObject
from ...core.placement import without_storage
from ..folders import CONFIG, WEIGHTS
from ..targets.base import ShapeAlone, Target
from .base import PublishedDrafter
from .head_files import head_state, take_weights, weights_file
from .manifest import TargetIdentity, check_made_for, manifest_for, write_manifest


class ModuleDrafter(PublishedDrafter):
    """A drafter whose `build` returns all that is trained and saved, and nothing of the target's.

    A folder holds `model.safetensors` (the module's state dict) and the manifest, which has the section.
    """

    trains_on: ClassVar[str | None] = "states"

    def manifest(self, target: Target, identity: TargetIdentity, **training: object) -> JsonObject:
        """The section, the target, and of a target that answers in words its tokenizer's hash."""
        if not target.shape.draws_images:
            training["tokenizer_sha256"] = identity.tokenizer_sha256
        return manifest_for(self.kind, identity, drafter=self.model_dump(mode="json"), **training)

    def sizes(self, module: nn.Module) -> JsonObject:
        """The content of `config.json`, for other programs; empty: there is no such file."""
        return {}

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in module.state_dict().items()}, folder / WEIGHTS)
        if sizes := self.sizes(module):
            (folder / CONFIG).write_text(json.dumps(sizes, indent=1))
        write_manifest(folder, manifest)

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> nn.Module:
        check_made_for(folder, self.kind, identity, target if target.shape.draws_images else None)
        state = head_state(folder, target.device)
        with torch.random.fork_rng(devices=[]), without_storage(target.device):  # whoever loads must not draw
            module = self.build(target, count_tokens=lambda: torch.ones(target.shape.vocab_size, dtype=torch.int64))
        take_weights(module, state, weights_file(folder), target.device, dtype)
        return module

    def copy_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        with torch.no_grad():
            twin = copy.deepcopy(module).float()
        twin.load_state_dict(state)
        return twin

    def empty(self, shape: object) -> nn.Module:
        with torch.device("meta"):
            return self.build(ShapeAlone(shape))  # type: ignore[arg-type]
