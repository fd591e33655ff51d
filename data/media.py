"""The images and clips of one record. Their number of tokens is known before any of them is decoded.

For a sample that is too long, or a request that is only counted, only the headers of its files are read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..core.errors import UserError
from ..core.json_types import JsonObject
from ..core.pictures import IMAGE_MARK, MARKS, Picture
from .families.processor import Processor, Resizing
from .pictures.media_files import BadMedia, MediaFile, is_there, located, open_media
from .pictures.picture_files import image_size, load_image
from .pictures.tiles import Size
from .pictures.videos import Clip, VideoSettings
from .records.record import paths
from .records.records import RecordFile


@dataclass(frozen=True)
class ImageReader:
    """Reads the images and clips of a record with the settings of a data section."""

    processor: Processor
    resizing: Resizing
    video: VideoSettings
    allow_outside: bool = False

    def media(self, record: JsonObject, images: Path, videos: Path) -> Media:
        """The record's pictures. Raises `UserError`: one whose size is needed is bad, outside, or without a mark."""
        outside = self.allow_outside
        files = [located(images, name, allow_outside=outside) for name in paths(record, "image")]
        clips = [Clip(located(videos, name, allow_outside=outside), self.video) for name in paths(record, "video")]
        if (files or clips) and not self.processor.reads_pictures:
            raise UserError(
                "the record has pictures and the model reads text alone", hint="use records without pictures"
            )
        family = self.processor.picture_family
        # A file is opened only where its picture's size matters.
        sizes = [image_size(file) if self.needs_sizes(len(files)) else (0, 0) for file in files]
        of_images = family.layouts(sizes, self.processor, self.resizing)
        of_clips = (family.clip_layout(clip, self.video, self.processor) for clip in clips)
        by_file = (*((picture,) for picture in of_images), *of_clips)
        return Media(by_file, _order(record, len(files), len(clips)), tuple(files), tuple(clips), self)

    def needs_sizes(self, num_images: int) -> bool:
        """Whether the layouts of a record's images depend on their sizes."""
        return self.processor.picture_family.needs_sizes(self.resizing.aspect, num_images)


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
        None where there are none. Raises `UserError`: a file is missing, broken or too large.
        """
        if not self._by_file:
            return None
        processor, resizing = self._image_reader.processor, self._image_reader.resizing
        family, count = processor.picture_family, len(self._files)
        fits = functools.partial(family.check_canvas, processor=processor, aspect=resizing.aspect, num_images=count)
        squared = functools.partial(family.check_canvas, processor=processor, aspect="square", num_images=1)
        with self._enough_memory():
            images = [load_image(file, check=fits) for file in self._files]
            clips = [clip.frames(check=squared) for clip in self._clips]
            layouts = [picture for (picture,) in self._by_file[:count]]
            each = family.pixels(images, layouts, processor, resizing) if images else []
            of_clips = zip(clips, self._by_file[count:], strict=True)
            each += [family.clip_pixels(frames, pictures[0], processor) for frames, pictures in of_clips]
            return torch.cat([each[place] for place in self._order])

    def open_files(self) -> None:
        """Raises `UserError`: a file is missing, or may not be read. What is inside is not looked at."""
        for file in self._files:
            open_media(file, "image").close()
        for clip in self._clips:
            open_media(clip.path, "clip").close()

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


def _order(record: JsonObject, num_images: int, num_clips: int) -> tuple[int, ...]:
    """Images and clips (numbered after these) by their marks. <image> stands for a clip once no image is left."""
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
        problem = f"{len(order)} <image> and <video> marks for {num_images} images and {num_clips} clips"
        raise UserError(problem, hint="write one <image> mark for each image and one <video> mark for each clip")
    return tuple(order)


def check_some(
    file: RecordFile, numbers: Sequence[int], folders: tuple[Path, Path], *, allow_outside: bool, of: str
) -> None:
    """Raises `UserError` where none of several pictures and clips of some records is there, in the two folders, or may
    be read: a wrong folder or setting, and no bad record. What lies inside a table or a tar is in no folder.
    """
    named: list[MediaFile] = []
    outside: list[BadMedia] = []
    for number in numbers:
        record = file.read(number)
        try:
            for key, folder in zip(("image", "video"), folders, strict=True):
                named += [located(folder, name, allow_outside=allow_outside) for name in paths(record, key)]
        except BadMedia as error:
            outside.append(error)
    if len(outside) == len(numbers) > 1:
        first = outside[0]
        problem = f"no record of {len(outside)} that were looked at{of} names pictures inside the folder, the first: "
        raise UserError(problem + first.problem, where=first.where, hint=first.hint)
    files = [path for path in named if isinstance(path, Path)]
    if len(set(files)) > 1 and not any(map(is_there, files)):
        hint = "check `images` (and `videos`) of the data section"
        hint += "; where files want folders of their own, write their paths from one that holds them all" if of else ""
        problem = f"{len(files)} of {len(files)} pictures{of} missing in {folders[0]}, first: {files[0].name}"
        raise UserError(problem, where=f"{file}, key images" if of else str(files[0]), hint=hint)
