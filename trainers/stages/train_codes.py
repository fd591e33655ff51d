"""A `train` stage on image codes: heads of image generators, and the models of a synthetic dataset of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..estimate.train_memory import Memory, image_head_memory
from ..estimate.train_stage import describe_image_model
from ..run.context import Context
from ..run.stage import Planned
from ..train.loop import Training
from ..train.on_codes import lacking, open_codes
from ..train.settings import CodesSettings
from .train import TrainHead


class TrainCodes(CodesSettings, TrainHead):
    """Heads of image generators, and the synthetic dataset's image tokenizer (vq), reader and generator."""

    way: ClassVar[str] = "codes"

    def makes(self) -> set[str]:
        return {"target", "text"} if self.model == "target" else {self.model}

    def open(self, context: Context, seed: int) -> Training:
        return open_codes(self, context, seed)

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {} if self.data.path else {"codes": self.data.from_stage}
        if self.model == "drafter":
            wanted["target"] = None
        if self.model == "target":
            wanted["tokenizer"] = None
        if self.decoding is not None:
            wanted |= {"vq": None, "text": None}
            if self.decoding.prompts.from_stage is not None:
                wanted["data"] = self.decoding.prompts.from_stage
        return wanted if self.earlier is None else wanted | {self.model: self.earlier}

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Also shards without what this model reads."""
        return lacking(makers, self.model) if thing == "codes" else super().misfits(thing, makers, inputs)

    def mend(self, thing: str) -> str:
        return "add it to `write` of an encode stage before this one" if thing == "codes" else super().mend(thing)

    def memory(self, plan: Planned) -> Memory | None:
        """The memory of its fullest GPU; None for an image tokenizer or a reader, which demos train."""
        return image_head_memory(self, plan.recipe)

    def lines(self, plan: Planned) -> list[str]:
        return describe_image_model(plan)
