"""What a stage's runner is given: the recipe's parts, its folder, and the results of earlier stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.ranks import local_rank
from ..core.tracking import TrackingConfig
from ..data.processor import Processor, load_processor
from ..models.llava import TokenIds
from .engine import EngineConfig


@dataclass(frozen=True)
class Context:
    """One stage of one run.

    Args:
        inputs: thing (data, processor, target, drafter) -> folder of the stage that made it.
    """

    name: str
    folder: Path
    seed: int
    fingerprint: str
    target: Any  # the recipe's section, of whichever track
    drafter: Any
    engine: EngineConfig
    tracking: TrackingConfig
    inputs: dict[str, Path]
    say: Callable[[str], None]
    recipe: dict[str, Any] = field(default_factory=dict)  # the resolved recipe, for trackers
    command: str = ""

    def processor(self) -> Processor:
        """The target's: of the world that a stage generated, or of the published target."""
        made = self.inputs.get("processor")
        return load_processor(made if made is not None else str(self.target.path), revision=self.target.revision)

    def target_source(self) -> str | Path:
        return self.inputs.get("target") or str(self.target.path)

    def token_ids(self, processor: Processor, vocab_size: int) -> TokenIds:
        return TokenIds(vocab_size, processor.image_token_id, processor.bos_id, processor.eos_id, processor.pad_id)

    def device(self) -> torch.device:
        return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
