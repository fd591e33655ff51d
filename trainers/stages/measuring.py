"""How an evaluate stage decodes: each request plainly and with every draft in every mode, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core import ranks
from ...core.nouns import Request
from ...data.dataset import ConversationDataset
from ...data.processor import Processor
from ...eval.loop import Decoding, Generation, generate
from ...eval.measure import Row, measure_request
from ...models.targets.llava import LlavaTarget
from ..context import Context
from ..positions import before_decoding


@dataclass(frozen=True)
class Measuring:
    """Everything that a request is decoded with.

    Args:
        stage: the evaluate stage's section.
        drafters: (draft, mode) -> proposals.
    """

    stage: Any
    context: Context
    processor: Processor
    target: LlavaTarget
    drafters: dict[tuple[str, str], Any]
    decoding: Decoding

    def request(self, dataset: ConversationDataset, index: int) -> tuple[Request, str]:
        """A request and the answer that the data has."""
        return dataset.request(index, originals=self.stage.captioner is not None)

    def check(self, name: str, dataset: ConversationDataset) -> None:
        """Warn of requests beyond a draft's positions."""
        if ranks.is_main():
            seeing = {mode.name for mode in self.stage.modes if "M" in mode.members}
            decoders = {draft: d.decoder for (draft, mode), d in self.drafters.items() if mode in seeing}
            before_decoding(
                name,
                dataset,
                {draft: decoder.max_positions for draft, decoder in decoders.items()},
                self.context.say,
                max_new_tokens=self.stage.max_new_tokens,
                flat={draft for draft, decoder in decoders.items() if not decoder.reads_newlines},
            )

    def all(self, dataset: ConversationDataset) -> dict[str, list[Row]]:
        """This rank's share of the requests: rows of each mode."""
        mine = range(ranks.rank(), len(dataset), ranks.world_size())
        rows: dict[str, list[Row]] = {mode: [] for mode in self.stage.mode_names}
        for index in [*mine][: self.stage.warmup]:
            self.warm_up(index, self.request(dataset, index)[0])
        for index in mine:
            found, _ = self.one(index, *self.request(dataset, index))
            for mode, some in found.items():
                rows[mode] += some
        return rows

    def warm_up(self, index: int, asked: Request) -> None:
        for drafter in (None, *self.drafters.values()):
            self._generate(index, drafter, asked)

    def one(self, index: int, asked: Request, answer: str) -> tuple[dict[str, list[Row]], list[int]]:
        """A row for each draft by mode, and the target's own tokens."""
        plain: list[Generation] = []
        drafted: dict[tuple[str, str], list[Generation]] = {key: [] for key in self.drafters}
        for _ in range(self.stage.repeats):  # interleaved, so that a slow minute hits all alike
            plain.append(self._generate(index, None, asked))
            for key, drafter in self.drafters.items():
                drafted[key].append(self._generate(index, drafter, asked))
        said = self.processor.tokenizer.decode(plain[0].tokens, skip_special_tokens=True).strip()
        rows: dict[str, list[Row]] = {mode: [] for mode in self.stage.mode_names}
        for (name, mode), drafter in self.drafters.items():
            row = measure_request(asked.name, name, plain, drafted[name, mode])
            row["plain_is_data"] = said == answer.strip()
            last = drafter.last_position(asked, self.stage.max_new_tokens)
            row["beyond_positions"] = last > drafter.decoder.max_positions
            rows[mode].append(row)
        return rows, plain[0].tokens

    def generator(self, index: int) -> torch.Generator:
        """Of the request, not of the rank: the same report with one rank and with two."""
        return torch.Generator().manual_seed(self.context.seed * 1_000_003 + index)

    def _generate(self, index: int, drafter: Any, asked: Request) -> Generation:
        return generate(self.target, drafter, asked, self.decoding, self.generator(index))
