"""A `train` stage on image codes: heads of image generators, and the models of a synthetic dataset of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...core.refused import Refused
from ...data.shards.codes import ShardData
from ..estimate.evaluation_memory import Memory
from ..estimate.train_memory import image_head_memory
from ..estimate.train_stage import describe_image_model
from ..run.stage import Planned
from ..train.drafter import PicturesCheck
from ..train.on_codes import lacking, open_codes
from .train import TrainHead


class TrainCodes(TrainHead):
    """Heads of image generators, and the synthetic dataset's image tokenizer (vq), reader and generator."""

    way: ClassVar[str] = "codes"
    opens: ClassVar[Any] = open_codes
    held_out_key: ClassVar[str] = "data.held_out"

    # Whose weights are trained; everything else is frozen.
    model: Literal["drafter", "target", "vq", "reader"] = "drafter"
    data: ShardData
    decoding: PicturesCheck | None = None
    # Share of samples that lose their condition, drawn anew in each epoch; guidance needs both sides. Null: 0.1.
    condition_dropout: float | None = Field(None, ge=0, lt=1)
    # vq: forwards between two revivals of codes that no picture chooses, in the first 60% of the training; small
    # tokenizers keep a handful of codes otherwise. Writes weights in place: zero_stage 0 and fp32 only.
    revive_every: int | None = Field(None, ge=1)

    @property
    def trained(self) -> str:
        return "image tokenizer" if self.model == "vq" else self.model

    @property
    def share_held_out(self) -> float:
        return self.data.held_out

    @model_validator(mode="after")
    def _of_its_model(self) -> TrainCodes:
        if self.revive_every and self.model != "vq":
            raise ValueError("revive_every is for image tokenizers (model: vq)")
        if self.model != "drafter" and self.outside is not None:
            raise Refused("from.path", f"is a head's, and this stage trains the {self.model}", "give target.path")
        return self

    def makes(self) -> set[str]:
        return {"target", "text"} if self.model == "target" else {self.model}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {} if self.data.path else {"codes": self.data.from_stage}
        if self.model == "drafter":
            wanted["target"] = None
        if self.model == "target":
            wanted["tokenizer"] = None
        if self.decoding is not None:
            wanted |= {"vq": None, "text": None}
            if self.decoding.from_stage is not None:
                wanted["data"] = self.decoding.from_stage
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
