"""What a target wrote or drew itself, kept for training: one record for each answer, in shards.

A record holds the request, the generated ids, why it stopped, the seed of its draws and the target's revision, so that
it can be made again. Image generators add their codes (and the features that they were asked by), so that a head trains
on them as on encoded pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Answer:
    """One answer of a target."""

    number: int  # of the request and repeat, from 0
    request: dict[str, Any]  # what was asked, as JSON: caption, label, conversation, ...
    ids: list[int]  # generated, the end token included
    stop: str  # eos or length
    seed: int  # of this answer's draws
    target: str  # name and revision
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def sample(self) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
        """As shards hold it."""
        info = {**self.request, "stop": self.stop, "seed": self.seed, "target": self.target}
        return f"{self.number:09d}", {"ids": torch.tensor(self.ids, dtype=torch.int32), **self.tensors}, info
