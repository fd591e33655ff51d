"""Stage kind `generate`: captioned pictures of the shapes world, and a tokenizer for their captions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ....core import ranks
from ....core.section import Section
from ....data.captioned import Captioned, TarSource, read
from ....data.shapes.captioned import write_captioned
from ....data.shapes.tokenizer import train_tokenizer
from ...context import Context

WORLD = "world"
TOKENIZER = "tokenizer"


class GenerateCaptionedStage(Section):
    """`held_out` is a split like others, but for its figures, which no other split has."""

    kind: Literal["generate"]
    image_size: int = Field(48, ge=16)
    # Noise of the paper, a standard deviation of 0 to 255: what makes its codes uncertain.
    grain: float = Field(10.0, ge=0, le=128)
    # Share of pictures with two figures.
    pairs: float = Field(0.25, ge=0, le=1)
    vocab_size: int = Field(400, ge=300)
    # split -> number of pictures; the tokenizer is trained on the captions of the first.
    splits: dict[str, int] = Field(min_length=1)

    @model_validator(mode="after")
    def _positive(self) -> GenerateCaptionedStage:
        empty = [split for split, count in self.splits.items() if count < 1]
        if empty:
            raise ValueError(f"splits {empty} hold no picture")
        return self

    def makes(self) -> set[str]:
        return {"data", "tokenizer"}

    def needs(self) -> dict[str, str | None]:
        return {}


def run(stage: GenerateCaptionedStage, context: Context) -> None:
    if ranks.is_main():
        world = context.folder / WORLD
        write_captioned(
            world,
            seed=context.seed,
            image_size=stage.image_size,
            grain=stage.grain,
            pairs=stage.pairs,
            splits=stage.splits,
        )
        first = next(iter(stage.splits))
        source = TarSource(kind="webdataset", path=str(world / f"{first}-00000.tar"))
        captions = [item.caption for item in read(source) if isinstance(item, Captioned)]
        tokenizer = train_tokenizer(captions, stage.vocab_size)
        tokenizer.save_pretrained(context.folder / TOKENIZER)
        context.say(f"wrote {sum(stage.splits.values())} pictures in {len(stage.splits)} splits")
    ranks.barrier()
