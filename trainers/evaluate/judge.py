"""How drawn pictures are judged: the recipe's metrics, and for a synthetic dataset of shapes its reader.

Letters: B pictures, S side in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...core.json_types import JsonObject
from ...data.captioned.items import decode_image
from ...data.captioned.prompts import ImagePrompt
from ...data.captioned.sources import TarSource, read, usable
from ...eval.quality.extractors import Extractor, as_is
from ...eval.quality.measure import Measured, QualityConfig, check, measure
from ..readers import Reader, captioned

MOST_REAL = 5000  # pictures of the synthetic dataset that are read, the prompts' own first


class Drawn(Sequence[np.ndarray]):
    """Codes as pictures uint8 [S,S,3], decoded a few at a time when asked for: 30,000 of them fit no memory."""

    def __init__(self, decode: Callable[[Tensor], Tensor], codes: Tensor, at_once: int = 64):
        self.decode, self.codes, self.at_once = decode, codes, at_once
        self._start, self._held = -1, torch.empty(0)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> Any:
        start = index - index % self.at_once
        if start != self._start:
            self._start, self._held = start, self.decode(self.codes[start : start + self.at_once])
        return self._held[index - start].permute(1, 2, 0).numpy()


class Judge:
    """Judges one evaluation: the same prompts, real pictures and networks for every method.

    Args:
        config: published metrics; null: none.
        reader: folder of a synthetic dataset's reader; its features stand where Inception's do, and say so in the
            result.
        real: tar of the synthetic dataset's pictures for these prompts, where the prompts come from one. Pictures
            after the prompts' own are the reference of the FID, which the prompts' own pictures then have, too.
    """

    def __init__(
        self,
        config: QualityConfig | None,
        prompts: Sequence[ImagePrompt],
        *,
        reader: Path | None,
        real: Path | None,
        size: int,
        device: torch.device,
    ):
        self.config, self.prompts, self.device = config, prompts, device
        if config is not None:
            check(config)  # missing weights are told before an hour of decoding
        self.reader = None if reader is None else Reader.load(reader).to(device)
        for prompt in prompts if reader is not None else ():
            captioned(prompt.caption)  # and so are captions that the reader cannot judge
        pictures = real_pictures(real, size, MOST_REAL) if self.reader is not None and real is not None else []
        self.real, others = pictures[: len(prompts)], pictures[len(prompts) :]
        # A handful of others is a worse reference than the prompts' own.
        self.reference = others if len(others) >= len(prompts) else self.real

    def __call__(self, images: Sequence[np.ndarray]) -> dict[str, JsonObject]:
        """Metric -> {value, n, what, spread} for pictures uint8 [S,S,3], one for each prompt."""
        captions = [p.caption for p in self.prompts]
        measured: dict[str, Measured] = {}
        if self.config is not None:
            measured |= measure(self.config, images, captions=captions, device=self.device)
        if self.reader is not None:
            right = as_captioned(self.reader, _stacked(images), captions)
            measured["as_captioned"] = Measured(right, len(images), "colour and shape as captioned, read by the reader")
        if self.real:
            measured["fid_of_reader"] = self._fid(images)
        return {
            name: {"value": m.value, "n": m.n, "what": m.what, "spread": m.spread, "caution": m.caution}
            for name, m in measured.items()
        }

    def score_of_real(self) -> float | None:
        """The reader's own score on real pictures of the prompts: what a perfect generator could reach."""
        if self.reader is None or not self.real:
            return None
        captions = [p.caption for p in self.prompts[: len(self.real)]]
        return as_captioned(self.reader, _stacked([np.asarray(p) for p in self.real]), captions)

    def fid_of_real(self) -> float | None:
        """FID on the reader's features of the prompts' real pictures: what a perfect generator could reach with as many
        pictures. None where the reference is these pictures themselves.
        """
        if self.reader is None or self.reference is self.real:
            return None
        return self._fid([np.asarray(p) for p in self.real]).value

    def _fid(self, images: Sequence[np.ndarray]) -> Measured:
        """Not comparable with published FIDs, and named differently for that reason."""
        features = Extractor("shapes reader", as_is, self._features)
        reference = [np.asarray(picture) for picture in self.reference]
        settings = QualityConfig(metrics=("fid",))
        by_reader = measure(settings, images, reference=reference, extractors={"fid": features}, device=self.device)
        return by_reader["fid"]

    def _features(self, images: Tensor) -> Tensor:
        assert self.reader is not None
        return self.reader.features(images).mean(1)


def _stacked(images: Sequence[np.ndarray]) -> Tensor:
    """uint8 [B,3,S,S]."""
    return torch.from_numpy(np.stack(list(images))).permute(0, 3, 1, 2)


def as_captioned(reader: Reader, pictures: Tensor, captions: Sequence[str]) -> float:
    """Share of pictures in which every captioned figure stands at its place in its colour and shape."""
    with torch.no_grad():
        read_places = reader.read(pictures.to(next(reader.parameters()).device)).cpu()  # [B,4,2]
    truth = torch.stack([captioned(caption) for caption in captions])
    named = truth[..., 0] > 0
    return float(((read_places == truth).all(-1) | ~named).all(-1).float().mean())


def real_pictures(tar: Path, size: int, count: int) -> list[Image.Image]:
    """The first `count` pictures of a synthetic dataset's tar, whose captions are the prompts."""
    pictures = []
    for item in usable(read(TarSource(kind="webdataset", path=str(tar), max_samples=count))):
        picture = decode_image(item, size)
        if isinstance(picture, Image.Image):
            pictures.append(picture)
    return pictures
