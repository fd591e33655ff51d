"""A family of pictures of another package, as its author writes it: Idefics 3 of transformers, whose names are no
LLaVA's. A picture is made larger, cut into tiles, and each tile is written with its row and column.
"""

import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from draftsmith.core.batch import TEXT
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import Picture
from draftsmith.core.states import places_of, put_at
from draftsmith.data.families.processor import PictureFamily, mark_ids, text_processor
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.packed_row import last_states
from draftsmith.models.targets.family import Family, Pictures
from draftsmith.models.targets.language import LanguageTarget
from draftsmith.models.targets.section import TargetSection
from draftsmith.models.training import ModelTraining
from torch import nn

FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class Cut(Picture):
    """Tiles in a grid, and one of the whole picture after them; a grid of 0 x 0: that tile alone."""

    rows: int = 0
    columns: int = 0


class IdeficsFamily(PictureFamily):
    def layouts(self, sizes, processor, resizing):
        side, longest = processor.image_size, processor.image_processor.size["longest_edge"]
        pictures = []
        for width, height in sizes:
            # The longer side first; then each to whole tiles, the shorter one by the longer.
            ratio = width / height
            if ratio >= 1:
                short = int(longest / ratio)
                across, down = math.ceil(longest / side), short + short % 2
                down = math.ceil(int(across * side / (longest / down)) / side)
            else:
                short = int(longest * ratio)
                down, across = math.ceil(longest / side), short + short % 2
                across = math.ceil(int(down * side * (across / longest)) / side)
            grid = (down, across) if across * down > 1 else (0, 0)
            pictures.append(Cut(processor.patches, math.prod(grid) + 1, rows=grid[0], columns=grid[1]))
        return tuple(pictures)

    def pixels(self, images, layouts, processor, resizing):
        made = (processor.image_processor(images=[[image]], return_tensors="np") for image in images)
        return [torch.from_numpy(one["pixel_values"][0]).float() for one in made]

    def clip_layout(self, clip, settings, processor):
        raise UserError("the record has a clip, and Idefics 3 reads images alone", hint="use records without clips")

    def counted(self, config, tower):
        side, patch = tower.image_size, tower.patch_size * config.scale_factor
        return side, patch, SimpleNamespace(size={"longest_edge": 4 * side})

    def most_tiles(self, processor, resizing):
        return (processor.image_processor.size["longest_edge"] // processor.image_size) ** 2 + 1

    def marks(self, pictures):
        return ["".join(self._written(picture)) for picture in pictures]

    def _written(self, picture):
        for row in range(picture.rows):
            for column in range(picture.columns):
                yield f"{FAKE}<row_{row + 1}_col_{column + 1}><image>"
            yield "\n"
        yield ("\n" if picture.rows else "") + f"{FAKE}{WHOLE}<image>{FAKE}"

    def runs(self, picture):
        return [picture.patches**2] * picture.num_tiles

    def read(self, files):
        image, _, _ = mark_ids(files.tokenizer, ("<image>", FAKE, WHOLE), files.key, "an Idefics 3's")
        images = files.images("Idefics3")
        side, across = images.max_image_size["longest_edge"], math.isqrt(files.settings["image_seq_len"])
        return replace(
            text_processor(files.tokenizer, files.key), image_processor=images, image_token_id=image,
            patch_size=side // across, image_size=side, picture_family=self,
        )  # fmt: skip

    def about(self, processor):
        return {"image_seq_len": processor.num_image_tokens}


IDEFICS = IdeficsFamily("idefics3", "Idefics3Processor", sizes_decide=True, written=re.compile("<image>"))


def see(model, pixels):
    """[I,P,D] of tiles [I,3,S,S]."""
    tower = model.model.vision_model
    return model.model.connector(tower(pixels.to(tower.post_layernorm.weight)).last_hidden_state)


class IdeficsDecoder(CachedDecoder):
    def see(self, pixels, pictures=()):
        return see(self.model, pixels)

    def _features(self, seen, pictures, pool):
        assert pool == 1
        return seen.flatten(0, 1)


class IdeficsTraining(ModelTraining):
    @staticmethod
    def parts_of(model):
        core = model.model
        return {
            "vision_tower": core.vision_model,
            "projector": core.connector,
            "language_model": nn.ModuleList([core.text_model, model.lm_head]),
        }

    def hidden_states(self, batch):
        core = self.model.model
        embeds = core.get_input_embeddings()(batch.ids)
        if batch.pixels is not None:
            features = see(self.model, batch.pixels)
            count = len(features) - batch.num_dummy_images
            places = places_of(batch.on_host("modality") != TEXT, embeds.device)
            embeds = put_at(embeds, places, features[:count].flatten(0, 1).to(embeds))
            embeds = embeds + 0.0 * features[count:].sum()
        return last_states(core.text_model, batch, embeds, batch.positions[0])


class IdeficsPictures(Pictures):
    """Tiles, of which a square of patches becomes one token."""

    def unit(self, config):
        return config.vision_config.patch_size * config.scale_factor, config.vision_config.image_size


class IdeficsTarget(LanguageTarget):
    decoder_class = IdeficsDecoder

    def view(self, request):
        if any(type(picture) is not Cut for picture in request.pictures):
            raise UserError("the pictures are cut for another family", where=request.name)
        return super().view(request)


class IdeficsTargetConfig(TargetSection):
    families: ClassVar[dict[str, Family]] = {
        "idefics3": Family("idefics3", "Idefics3ForConditionalGeneration", IdeficsTraining, IdeficsTarget,
                           IdeficsPictures())
    }  # fmt: skip
    picture_family: ClassVar[Any] = IDEFICS

    kind: str
