"""The images and clips of one record. Their number of tokens is known before any of them is decoded.

For a sample that is too long, or a request that is only counted, only the headers of its files are read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..core.errors import UserError
from ..core.pictures import VIDEO, PatchGrid, Picture
from .families.llava import Aspect, Limits, check_canvas, is_tiled, layouts, own_layouts, own_pixels, pixels
from .families.processor import Processor
from .families.whole import clip_pictures, image_picture, patches
from .pictures.media_files import MediaFile, located
from .pictures.picture_files import image_size, load_image
from .pictures.picture_marks import IMAGE_MARK, MARKS
from .pictures.tiles import Convention, Size
from .pictures.videos import Clip, VideoSettings
from .record import paths


@dataclass(frozen=True)
class ImageReader:
    """Reads the images and clips of a record with the settings of a data section.

    Args:
        aspect: what is done to images that are not square; nothing where they are read whole or in InternVL's tiles.
        convention: of tiled images.
        pixel_limits: the fewest and the most pixels of an image whose size decides; None: the processor's.
        allow_outside: names of files may lead out of the data section's folders.
    """

    processor: Processor
    aspect: Aspect
    convention: Convention
    video: VideoSettings
    pixel_limits: Limits = (None, None)
    allow_outside: bool = False

    def media(self, record: dict[str, Any], images: Path, videos: Path) -> Media:
        """The record's pictures; relative names start at the folders `images` and `videos`.

        Raises:
            UserError: a clip, or a picture whose size is needed, is missing or broken, a name leads out of its folder,
                or the marks are too few.
        """
        outside = self.allow_outside
        files = [located(images, name, allow_outside=outside) for name in paths(record, "image")]
        clips = [Clip(located(videos, name, allow_outside=outside), self.video) for name in paths(record, "video")]
        if (files or clips) and not self.processor.reads_pictures:
            raise UserError(
                "the record has pictures and the model reads text alone", hint="use records without pictures"
            )
        if self.processor.reads_whole:
            whole = self._whole(files, clips)
            return Media(whole, _order(record, len(files), len(clips)), tuple(files), tuple(clips), self)
        # A single tile does not depend on the image's size, so no file is opened for it.
        sized = self.processor.sizes_decide or is_tiled(self.aspect, len(files))
        sizes = [image_size(file) if sized else (0, 0) for file in files]
        of_clips = tuple(self.video.picture(len(clip.numbers), self.processor.patches) for clip in clips)
        if self.processor.sizes_decide:
            of_images = own_layouts(sizes, self.processor, self.pixel_limits)
            # Each frame is a tile, whose tokens are neither pooled nor end with a newline.
            of_clips = tuple(Picture(self.processor.patches, len(clip.numbers), VIDEO) for clip in clips)
        else:
            of_images = layouts(sizes, self.processor, self.aspect, self.convention)
        by_file = tuple((picture,) for picture in of_images + of_clips)
        return Media(by_file, _order(record, len(files), len(clips)), tuple(files), tuple(clips), self)

    def _whole(self, files: Sequence[MediaFile], clips: Sequence[Clip]) -> tuple[tuple[Picture, ...], ...]:
        least, most = self.pixel_limits
        of_images = (
            image_picture(image_size(file), self.processor, min_pixels=least, max_pixels=most) for file in files
        )
        of_clips = (clip_pictures(clip, self.video, self.processor) for clip in clips)
        return (*((picture,) for picture in of_images), *of_clips)


@dataclass(frozen=True)
class Media:
    """What `ImageReader.media` has found."""

    _by_file: tuple[tuple[Picture, ...], ...]  # of the images, then of the clips; of a clip there may be several
    _order: tuple[int, ...]  # of them by their marks
    _files: tuple[MediaFile, ...]
    _clips: tuple[Clip, ...]
    _image_reader: ImageReader

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """In the order of their marks."""
        return tuple(picture for place in self._order for picture in self._by_file[place])

    @property
    def clip_sizes(self) -> list[Size]:
        """Width and height of each clip's frames, as its file has them."""
        return [clip.size for clip in self._clips]

    def pixels(self) -> Tensor | None:
        """[I,3,S,S] float32: tiles and frames, in the order of the marks (patches [P,C] where pictures are read whole);
        None where there are none.

        Raises:
            UserError: a file is missing, broken or too large.
        """
        if not self._by_file:
            return None
        with self._enough_memory():
            return self._pixels()

    def _pixels(self) -> Tensor:
        image_reader = self._image_reader
        processor, aspect = image_reader.processor, image_reader.aspect
        fits = functools.partial(check_canvas, processor=processor, aspect=aspect, num_images=len(self._files))
        images = [load_image(file, check=fits) for file in self._files]
        squared = functools.partial(check_canvas, processor=processor, aspect="square")
        clips = [clip.frames(check=squared) for clip in self._clips]
        if processor.reads_whole:
            shown = zip([*([image] for image in images), *clips], self._by_file, strict=True)
            each = [patches(frames, _grid(pictures), processor) for frames, pictures in shown]
        else:
            tiles = torch.empty(0)
            if images and processor.sizes_decide:
                tiles = own_pixels(images, processor, image_reader.pixel_limits)
            elif images:
                tiles = pixels(images, processor, aspect, image_reader.convention)
            each = list(tiles.split([picture.num_tiles for (picture,) in self._by_file[: len(images)]]))
            # Each frame is one tile, as the tower's own image processor makes it.
            each += [pixels(frames, processor, "square") for frames in clips]
        return torch.cat([each[place] for place in self._order])

    def originals(self) -> tuple[Image.Image, ...]:
        """RGB, in the order of the marks; of a clip its middle frame. Raises as `pixels`."""
        with self._enough_memory():
            frames = [clip.frames() for clip in self._clips]
            each = [load_image(file) for file in self._files] + [taken[len(taken) // 2] for taken in frames]
            return tuple(each[place] for place in self._order)

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        """Pictures that fit no memory are a bad record, like those that are damaged."""
        try:
            yield
        except MemoryError as error:
            files = ", ".join(map(str, (*self._files, *(clip.path for clip in self._clips))))
            hint = "shrink the pictures, take fewer frames, or use fewer workers"
            raise UserError("not enough memory for the record's pictures", where=files, hint=hint) from error


def _grid(pictures: Sequence[Picture]) -> PatchGrid:
    """Of one image or clip that is read whole."""
    assert pictures[0].whole is not None
    return pictures[0].whole


def _order(record: dict[str, Any], num_images: int, num_clips: int) -> tuple[int, ...]:
    """Order of images and clips by their marks; clips are numbered after the images. <image> stands for a clip once no
    image is left.
    """
    if not num_clips:
        return tuple(range(num_images))
    text = "".join(turn["value"] for turn in record["conversations"])
    image, clip, order = 0, num_images, []
    for mark in MARKS[True].findall(text):
        if mark == IMAGE_MARK and image < num_images:
            order.append(image)
            image += 1
        else:
            order.append(clip)
            clip += 1
    if (image, clip) != (num_images, num_images + num_clips):
        raise UserError(
            f"{len(order)} <image> and <video> marks for {num_images} images and {num_clips} clips",
            hint="write one <image> mark for each image and one <video> mark for each clip",
        )
    return tuple(order)
