"""What both sides are asked: texts, one picture, two, and pictures that a processor resizes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from ...core.batch import Request
from ...core.pictures import one_placeholder_each
from ...data.conversations import PromptFormat
from ...data.families.processor import Processor
from ...data.families.table import TEMPLATES
from ..published import read_request
from ..published_section import ImageSettings, UserRequest

TEXTS = (
    "What is in the picture?",
    "Tell me where the red circle is, and what lies beside it.",
    "Count the shapes, one by one.",
    "Write a short story about a lighthouse.",
)
TEXT, ONE, TWO, RESIZED = "text", "one picture", "two pictures", "resized picture"
# All but the resized ones again: three at once, and three at once whose prompts are read in pieces (chunked prefill).
TOGETHER, PIECES = "three at once", "prompts in pieces"
_PER_GROUP = 4


@dataclass(frozen=True)
class Asked:
    """One request, as our loop and as the engine get it.

    Args:
        ours: every picture's placeholders in full.
        ids: one placeholder for a picture, which the engine expands itself: more would be expanded again.
        pictures: files in the folder of the requests.
    """

    name: str
    group: str
    ours: Request
    ids: list[int]
    pictures: list[str]

    @property
    def prompt_tokens(self) -> int:
        """Length of the expanded prompt, which the engine must count, too."""
        return len(self.ours.ids)


def make_requests(processor: Processor, folder: Path, *, pictures: bool, seed: int = 0) -> list[Asked]:
    """Requests of all groups; drawn pictures are written into `folder` as PNG.

    Args:
        pictures: False: texts alone.
    """
    rng, groups = random.Random(seed), {TEXT: 0}
    if pictures and processor.reads_pictures:
        groups |= {ONE: 1, TWO: 2, RESIZED: 1}
    side = processor.image_size * (10 if processor.reads_whole else 1)
    asked = []
    for group, count in groups.items():
        size = (side * 3 // 2 + 5, side + 3) if group == RESIZED else (side, side)
        for number in range(_PER_GROUP):
            names = [f"{group.replace(' ', '-')}-{number}-{index}.png" for index in range(count)]
            for name in names:
                _draw(rng, size).save(folder / name)
            user = UserRequest(text=TEXTS[number], pictures=names)
            reader = ImageSettings(aspect="square").image_reader(processor)
            request = read_request(user, folder, _format(processor), reader)
            ids = one_placeholder_each(request.ids.tolist(), request.modality.tolist(), request.pictures)
            asked.append(Asked(f"{group} {number + 1}", group, request, ids, names))
    return asked


def _format(processor: Processor) -> PromptFormat:
    """A template that fits the tokenizer. Which one does not matter: both sides get the same ids."""
    end = processor.tokenizer.eos_token
    plain = {name: template.end for name, template in TEMPLATES.items() if not template.surrounds}
    fits = [name for name, its_end in plain.items() if its_end == end]
    template = processor.picture_family.template or (fits or [*plain])[0]
    return PromptFormat.model_validate({"template": template, "system": "", "image_rule": "verbatim"})


def _draw(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    """A ground and four rectangles in loud colours, so that pictures are not taken for each other."""
    picture = Image.new("RGB", size, _color(rng))
    draw = ImageDraw.Draw(picture)
    for _ in range(4):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        draw.rectangle((x, y, x + size[0] // 2, y + size[1] // 3), fill=_color(rng))
    return picture


def _color(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)
