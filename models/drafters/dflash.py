"""DFlash: a block of tokens drafted in one pass, beside the target's states (Chen et al. 2026, arXiv 2602.06036).

A cycle runs the draft once. Its queries are the last committed token and K masks; keys and values come from the states
of all tokens before it, joined from several layers of the target, and from the block. Mask i answers for the token i
places on. The target's pictures are states like any other. The module stands in dflash_module.py, the loss in
dflash_training.py, the files in dflash_files.py and the settings in dflash_settings.py.
Letters: N committed states of a cycle, C states held, Q places of a block, K masks, J joined states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ..folders import write_folder
from ..targets.base import Target
from .base import PLAIN, CountTokens, Drafter, DraftingOptions, HeadObjective, TargetIdentity
from .dflash_files import dflash_manifest, holds_dflash, load_dflash
from .dflash_module import DflashHead
from .dflash_proposal import DflashImageProposal, DflashProposal
from .dflash_settings import DflashSettings
from .dflash_training import DflashImageTraining, DflashTraining
from .draft_vocabulary import drafted_ids
from .head_files import head_state
from .manifest import manifest_for, write_manifest

CONFIDENCE = "confidence_head."


class DflashConfig(DflashSettings):
    """A DFlash draft, for a language model or an image generator."""

    head_class: ClassVar[type[DflashHead]] = DflashHead
    starts_outside: ClassVar[bool] = True
    publishes_as_ours: ClassVar[bool] = True

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> DflashHead:
        """An own LM head begins with the target's rows of the ids that the training data has most often, a trained
        mask's vector with the mean of the embedding.
        """
        head = self.head_class(self.shape(target.shape), drafted_ids(self.draft_vocab_size, target, count_tokens))
        head.begin_as(target)
        if head.mask_embedding is not None:
            head.mask_embedding.data.copy_(target.embedding.float().mean(0))
        return head

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> DflashHead:
        return load_dflash(self, self.head_class, folder, target, dtype, identity)

    def grown(self, folder: Path, target: Target, identity: TargetIdentity | None) -> DflashHead:
        """A draft in float32 with the weights of a DFlash draft in `folder`, ours or published, and whatever is this
        kind's own untrained: its first loss is DFlash's. Raises `UserError` as `load`.
        """
        shared = {name: value for name, value in self.model_dump().items() if name in DflashConfig.model_fields}
        state = head_state(folder, torch.device("cpu"))
        of_dflash: JsonObject = {"kind": "dflash", "loss": {}, "cut_below": None}
        of_dflash["confidence"] = {} if any(name.startswith(CONFIDENCE) for name in state) else None
        start = DflashConfig.model_validate(shared | of_dflash).read(folder, target, torch.float32, identity)
        ids = start.draft_ids
        head = self.head_class(self.shape(target.shape), None if ids is None else ids.cpu())
        weights = {name: value for name, value in start.state_dict().items() if not name.startswith(CONFIDENCE)}
        left = head.load_state_dict(weights, strict=False).unexpected_keys  # what is missing is this kind's own
        if left:
            raise UserError(f"{left[0]} of this DFlash draft has no place in these settings", where=str(folder),
                            hint="leave drafter.target_layers out, or train without this start")  # fmt: skip
        return head.to(target.embedding.device)

    def begin_from(self, folder: Path, target: Target, identity: TargetIdentity) -> nn.Module:
        """Also from a DFlash draft, where this is a kind that grew out of it."""
        if self.kind != "dflash" and holds_dflash(folder):
            return self.grown(folder, target, identity)
        return super().begin_from(folder, target, identity)

    def copy_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        head = cast(DflashHead, module)
        copy = self.head_class(head.shape, head.ids_on_host)
        copy.load_state_dict(state)
        return copy

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        head = cast(DflashHead, module)
        ids = head.draft_ids
        values = {
            "model_type": self.kind,
            **head.shape.to_dict(),
            "draft_vocab_size": head.shape.layer.vocab_size if ids is None else len(ids),
        }
        write_folder(folder, values, head.state_dict())
        write_manifest(folder, manifest)

    def manifest(self, target: Target, identity: TargetIdentity, **training: object) -> JsonObject:
        training["drafter"] = self.model_dump(mode="json")
        if target.shape.draws_images:
            return manifest_for(self.kind, identity, **training)
        return dflash_manifest(self, target.shape, identity, **training)

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        training = DflashImageTraining if target.shape.draws_images else DflashTraining
        return training(cast(DflashHead, module), target, self)

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        proposal = DflashImageProposal if target.shape.draws_images else DflashProposal
        return proposal(cast(DflashHead, module), target, self)

    def exports(self, engine: str) -> list[str]:
        return []
