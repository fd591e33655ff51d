"""A target and what drafts for it, opened together: of a recipe's sections, a run's folders, an export or a published
folder.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.files import checked
from ..core.json_types import JsonMapping
from ..core.pretrained import Checkpoint
from ..data.families.processor import Processor
from ..data.processor_files import load_processor
from ..models.drafters import DRAFTER
from ..models.drafters.base import PLAIN, Drafter, DrafterConfig, DraftingOptions, TargetIdentity
from ..models.drafters.manifest import MANIFEST, read_manifest
from ..models.targets.drawing import Generator
from ..models.targets.load import load_target
from ..models.targets.table import AnyTarget


@dataclass(frozen=True)
class Pair:
    """A target, and the drafters that are opened beside it: weights that several share load once."""

    target: Any
    identity: TargetIdentity  # what a drafter's manifest is compared with
    processor: Processor | None = None  # of a target that answers in words
    generator: Generator | None = None  # of a target that draws
    modules: dict[Hashable, nn.Module] = field(default_factory=dict)

    def drafter(
        self,
        trained: DrafterConfig,
        folder: Path | None,
        decoded: DrafterConfig | None = None,
        options: DraftingOptions = PLAIN,
    ) -> Drafter:
        """The proposal with the weights of `module`."""
        return (decoded or trained).drafter(self.module(trained, folder, decoded), self.target, options)

    def module(self, trained: DrafterConfig, folder: Path | None, decoded: DrafterConfig | None = None) -> nn.Module:
        """The trained weights.

        Args:
            trained: the drafter's section as it was trained, which decides whether it fits the target.
            folder: of the stage that trained it, or as published; None: at the section's own path.
            decoded: the section as it decodes. Its settings share weights, but rotary positions of three rows are part
                of a head's module.

        Raises:
            UserError: a file is missing, or the drafter was made for another target.
        """
        decoded = decoded or trained
        positions = {"positions": dict(decoded)["positions"]} if "positions" in decoded.decoding_settings else {}
        section = trained.model_copy(update=positions)
        written = section.model_dump_json(by_alias=True, exclude=set(decoded.decoding_settings))
        key = folder, written, positions.get("positions") == "mrope"
        if key not in self.modules:
            self.modules[key] = section.load(folder, self.target, identity=self.identity)
        return self.modules[key]


def open_pair(
    config: AnyTarget,
    parts: Mapping[str, str | Path],
    *,
    device: torch.device,
    processor: Processor | None = None,
    section: JsonMapping | None = None,
) -> Pair:
    """The target on its device, ready for drafters.

    Args:
        config: its section, of a recipe or a manifest.
        parts: part (target, processor, vq, text) -> folder or Hub id; what is not named lies where the section says.
        processor: opened before; None: that of `parts`.
        section: the target as drafters' manifests may name it; None: as `config` says.

    Raises:
        UserError: weights are missing, or a part does not fit the others.
    """
    section = config.model_dump(mode="json") if section is None else section
    if config.draws_images:
        generator = config.generator({part: Path(place) for part, place in parts.items()}, device=device)
        return Pair(generator.target, TargetIdentity(section), generator=generator)
    source = parts.get("target") or str(config.path)
    if processor is None:
        files = parts.get("processor") or source
        revision = None if Path(files).is_dir() else config.revision
        family = config.picture_family
        processor = load_processor(files, revision=revision, text_only=config.reads_text_alone, family=family)
        if files != source:
            processor = replace(processor, generation_ends=Checkpoint(source, config.revision).generation_ends())
    num_ids, image = processor.num_token_ids, processor.image_token_id
    target = load_target(config, source, num_token_ids=num_ids, image_token_id=image, device=device)
    return Pair(target, TargetIdentity(section, processor.tokenizer_hash), processor=processor)


def trained_section(folder: Path, *, hint: str) -> DrafterConfig | None:
    """The section of the drafter in a folder; None: its manifest has none.

    Raises:
        UserError: it is no drafter's, with `hint`.
    """
    written = read_manifest(folder).get("drafter")
    return None if written is None else checked(written, DRAFTER, where=f"{folder / MANIFEST}, drafter", hint=hint)
