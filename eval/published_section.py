"""What `draftsmith.json` of a published folder says under "published": its target, its decoding, and one stored prompt.

The bounds are those of recipes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..core.fields import MOST_ANSWER, Seed, Temperature, TopK, TopP
from ..core.json_types import JsonObject
from ..core.section import Section
from ..data.conversations import PromptFormat
from ..data.families.processor import Processor, Resizing
from ..data.media import ImageReader
from ..data.pictures.tiles import Aspect, Convention
from ..data.pictures.videos import VideoSettings
from ..models.drafters.modes import Mode
from .policies import TreeConfig


class ImageSettings(Section):
    """How pictures become tokens; the keys of a recipe's data section."""

    aspect: Aspect = "pad"
    drafter_aspect: Aspect | None = None
    anyres_convention: Convention = "hf"
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    video: VideoSettings = VideoSettings()

    def image_reader(self, processor: Processor, *, drafter: bool = False) -> ImageReader:
        """A reader of pictures and clips; with `drafter`, in `drafter_aspect` where that is set."""
        aspect = (self.drafter_aspect if drafter else None) or self.aspect
        resizing = Resizing(aspect, self.anyres_convention, (self.min_pixels, self.max_pixels))
        return ImageReader(processor, resizing, self.video)


class PublishedDecoding(Section):
    """One exact way of decoding, of those that were measured."""

    name: str  # in the report's tables
    tree: TreeConfig
    draw: Literal["top-k", "sample"] = "top-k"
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    max_new_tokens: int = Field(64, ge=2, le=MOST_ANSWER)  # of answers; a picture has its own number
    # Ids that end an answer; null: of a picture, or of a folder of before there were several, which has its target's.
    end_ids: list[Annotated[int, Field(ge=0)]] | None = None
    mode: Mode | None = None  # of draft LVLMs
    reading: JsonObject = Field(default_factory=dict)  # of heads: settings that decoding changes


class UserRequest(Section):
    """The stored prompt."""

    text: str
    pictures: list[str] = Field(default_factory=list)  # files of the published folder
    label: int | None = Field(None, ge=0)  # of generators that draw classes


class Expected(Section):
    """The measured outcome of the stored prompt."""

    tokens: list[Annotated[int, Field(ge=0)]]
    accepted: list[Annotated[int, Field(ge=0)]]  # drafted tokens that stood, in each cycle
    emitted: int = Field(ge=0)  # after the prefill, bonus tokens included
    tau: float = Field(ge=0)
    measured: JsonObject  # device, dtype, torch, transformers


class PublishedSection(Section):
    """`draftsmith.json`, key "published"."""

    format_version: Literal[1] = 1
    target: JsonObject
    drafter: JsonObject
    decoding: PublishedDecoding
    prompt_format: PromptFormat = PromptFormat()
    looking: ImageSettings = ImageSettings()
    seed: Seed = 0
    prompt: UserRequest
    expected: Expected | None = None
