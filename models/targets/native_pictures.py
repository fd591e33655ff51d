"""Families whose tower reads each picture at its native size, one after another (Mistral 3, Pixtral, Gemma 4).

Letters: B samples, T places, P patches, C numbers of a patch, D width, n visual tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...core.batch import TEXT, VIDEO, Batch, Request
from ...core.errors import UserError
from ...core.pictures import PatchGrid, Picture, whole_picture
from ...core.states import places_of, put_at
from ..decoding.decoder import CachedDecoder
from ..hub import config_value
from ..training import ModelTraining
from .family import Pictures
from .language import LanguageTarget

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def merge_of(config: PreTrainedConfig) -> int:
    """Patches along a side of what becomes one token."""
    return int(
        config_value(config.vision_config, "pooling_kernel_size") or config_value(config, "spatial_merge_size", 1)
    )


def no_picture(merge: int, numbers: int, device: torch.device) -> tuple[Tensor, list[Picture]]:
    """Patches [P,C] of a picture of one token that no sample has, C of them `numbers`, and the picture."""
    return torch.zeros(merge**2, numbers, device=device), [whole_picture(PatchGrid(1, merge, merge, merge))]


class NativeSizeDecoder(CachedDecoder):
    """A model of such a family in eval mode."""

    @staticmethod
    def see_picture(model: Any, patches: Tensor, grid: PatchGrid) -> Tensor:
        """[n,D] of the patches [P,C] of one picture, row by row: the tower and what projects its states."""
        raise NotImplementedError

    @classmethod
    def see_whole(cls, model: PreTrainedModel, patches: Tensor, pictures: Sequence[Picture]) -> Tensor:
        """[n,D] of the patches [P,C] of all pictures."""
        weight, counts = next(model.model.vision_tower.parameters()), [picture.num_tiles for picture in pictures]
        assert sum(counts) == len(patches), f"{len(patches)} patches for {pictures}"
        # Under a device map the tower may lie elsewhere than the embedding.
        each, features = patches.to(weight.device, weight.dtype).split(counts), list[Tensor]()
        for part, picture in zip(each, pictures, strict=True):
            assert picture.whole is not None, "pictures in tiles, and the tower reads them whole"
            features.append(cls.see_picture(model, part, picture.whole))
        return torch.cat(features)

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """[n,D] of patches [P,C]."""
        return self.see_whole(self.model, pixels, pictures)

    def _features(self, encoded: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        assert pool == 1, "the patches of a picture that is read whole are merged as they are"
        return encoded


class NativeSizeTraining(ModelTraining):
    """The common loss over states of its own. A family says how its decoder runs."""

    decoder_class: ClassVar[type[NativeSizeDecoder]]  # reads the pictures

    def _embeds(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeddings [B,T,D] with the pictures' features, and which places are visual [B,T], on the host."""
        see, config = self.decoder_class.see_whole, self.model.config
        embeds, visual = self.model.model.get_input_embeddings()(batch.ids), batch.on_host("modality") != TEXT
        # Every rank runs its tower in every step; where no row has a picture, over one that changes nothing.
        if batch.num_dummy_images or batch.pixels is None:
            nothing = no_picture(merge_of(config), 3 * int(config.vision_config.patch_size) ** 2, batch.ids.device)
            return embeds + 0.0 * see(self.model, *nothing).sum().to(embeds), visual
        features = see(self.model, batch.pixels, batch.pictures)
        return put_at(embeds, places_of(visual, embeds.device), features.to(embeds)), visual


class NativeSizeTarget(LanguageTarget):
    """Pictures that the tower reads whole."""

    def view(self, request: Request) -> Request:
        pictures, merge = request.pictures, merge_of(self.decoder.model.config)
        if any(p.whole is None or p.whole.merge != merge or p.modality == VIDEO for p in pictures) or (
            request.pixels is not None and not pictures
        ):
            raise UserError(
                f"the target reads images whole, {merge} x {merge} patches a token, and these are cut for another "
                "family", where=request.name, hint="use its own processor for this target's requests",
            )  # fmt: skip
        return request


class NativeSizePictures(Pictures):
    """One picture, a square."""

    def most_rows(self, config: PreTrainedConfig) -> int:
        """Rows of tokens that a picture has at most."""
        raise NotImplementedError

    def fill(self, config: PreTrainedConfig, positions: int) -> tuple[list[Picture], tuple[int, ...]]:
        merge, rows = merge_of(config), min(isqrt(positions), self.most_rows(config))
        grid = PatchGrid(1, rows * merge, rows * merge, merge)
        return [whole_picture(grid)], (grid.num_patches, 3 * config.vision_config.patch_size**2)
