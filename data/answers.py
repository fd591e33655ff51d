"""What a target wrote or drew itself, kept for training: one record for each answer, in shards.

A record holds the request, the generated ids, why it stopped, the seed of its draws and the target's revision, so that
it can be made again. Image generators add their codes (and the features that they were asked by), so that a head trains
on them as on encoded pictures; language models their prompt and, where asked for, the likeliest tokens at each place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..core.batch import TEXT, Request
from ..core.errors import UserError
from ..core.json_types import JsonObject
from ..core.states import KeptScores
from .dataset import ConversationDataset
from .shards.shards import ShardReader

SHARDS = "answers"  # folder of them inside a stage's
SKIPPED = "skipped"  # why an unusable record has no answer


@dataclass(frozen=True)
class Answer:
    """One answer of a target."""

    number: int  # of the request and repeat, from 0
    request: JsonObject  # what was asked, as JSON: caption, label, conversation, ...
    ids: list[int]  # generated, the end token included
    stop: str  # eos or length
    seed: int  # of this answer's draws
    target: str  # name and revision
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def sample(self) -> tuple[str, dict[str, Tensor], JsonObject]:
        """Return the answer as shards hold it: key, tensors, info."""
        info = {**self.request, "stop": self.stop, "seed": self.seed, "target": self.target}
        return f"{self.number:09d}", {"ids": torch.tensor(self.ids, dtype=torch.int32), **self.tensors}, info


def text_ids(request: Request) -> Tensor:
    """[n] int32: the prompt without its runs of image tokens, which depend on the image processor."""
    return request.ids[request.modality == TEXT].to(torch.int32)


def kept_tensors(kept: KeptScores | None) -> dict[str, Tensor]:
    """Return the tensors of an answer's record, [n,K], [n,K] and [n] for its n tokens; none without kept scores."""
    if kept is None:
        return {}
    return {"top_ids": kept.ids.to(torch.int32), "top_log_probs": kept.log_probs, "log_rest": kept.log_rest}


class Answers:
    """The answers of a `regenerate` stage, one for each record of the data that they were written for, in its order.
    Raises `UserError`: they were written for other data.
    """

    def __init__(self, folder: Path, dataset: ConversationDataset):
        self.folder, self.dataset, self.reader = folder, dataset, ShardReader(folder)
        if len(self.reader) != len(dataset):
            raise self._other(f"{len(self.reader)} answers for {len(dataset)} records")

    @property
    def num_kept(self) -> int:
        """Tokens kept at each place; 0: none."""
        return int(self.reader.identity["kept"])

    def read(self, index: int, request: Request) -> tuple[list[int], KeptScores | None]:
        """The target's answer to `request`, which is record `index` of the data. Empty if the record was skipped.
        Raises `UserError`: the stored request differs from `request`.
        """
        _, tensors, info = self.reader[index]
        if info["name"] != request.name:
            raise self._other(f"answer {index} is to {info['name']}, the data has {request.name} there")
        if info["stop"] == SKIPPED:
            return [], None
        if not torch.equal(tensors["prompt"], text_ids(request)):
            raise self._other(f"the prompt of {request.name} is rendered otherwise than when the target answered it")
        kept = None
        if self.num_kept:
            kept = KeptScores(tensors["top_ids"].long(), tensors["top_log_probs"], tensors["log_rest"])
        return tensors["ids"].tolist(), kept

    def _other(self, problem: str) -> UserError:
        return UserError(
            problem, where=str(self.folder),
            hint="give the stage the data and format of the regenerate stage, or write the answers anew",
        )  # fmt: skip
