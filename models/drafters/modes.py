"""Drafting modes: what one draft LVLM is shown in place of each picture (TABED, sections 3 and 6, appendix I.2).

All modes share the draft's weights and the answer's tokens; they differ in the prompt alone.
Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ...core.batch import Request
from ...core.errors import UserError
from ...core.pictures import TEXT
from ..pictures import pictures_of, pooled_view
from .captioners import Captioner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Mode = Literal["M", "P", "C", "T", "T-text", "T-raw"]
# What a draft in this mode does with each picture.
SHOWN: Mapping[Mode, str] = {
    "M": "sees the picture",
    "P": "sees the picture pooled 2 x 2 before the projector",
    "C": "reads a caption in place of the picture",
    "T": "reads a newline in place of the picture",
    "T-text": 'reads the letters of "<image>" in place of the picture',
    "T-raw": "sees the placeholder's own embedding, which no training ever touched, in place of the picture",
}
MODES: tuple[Mode, ...] = tuple(SHOWN)
_POOL = 2


@dataclass(frozen=True)
class View:
    """A request as a mode sees it; `pool` x `pool` patches make one feature. All modes that read pictures read the same
    pixels.
    """

    request: Request
    pool: int = 1

    def to(self, device: torch.device) -> View:
        """Return a copy whose request is on `device`."""
        return View(self.request.to(device), self.pool)


@dataclass(frozen=True)
class ImageSubstitutes:
    """Token ids that the text modes put in place of a picture: `literal_ids` are "<image>" as text, `prefix_ids` what
    stands before a caption, which `encode` makes ids of without special tokens. `of` reads them from a tokenizer.
    """

    newline_id: int
    literal_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    encode: Callable[[str], Sequence[int]] | None = None
    captioner: Captioner | None = None

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, *, newline_id: int, captioner: Captioner | None = None
    ) -> ImageSubstitutes:
        """From a tokenizer of transformers. The prefix and a caption are tokenized apart, as TABED's code does."""

        def encode(text: str) -> list[int]:
            # A caption that says "</s>" or "<image>" must not end or widen the prompt.
            return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

        return cls(newline_id, tuple(encode("<image>")), tuple(encode("image: ")), encode, captioner)

    def check(self, mode: Mode) -> None:
        """Raises `UserError` where a mode's substitute is missing."""
        if mode == "C" and (self.captioner is None or self.encode is None):
            raise UserError("mode C needs a captioner, and none is given", hint="add `captioner`, or leave out C")
        assert mode != "T-text" or self.literal_ids, (
            "the tokenizer's ids of '<image>' are missing: use ImageSubstitutes.of"
        )

    def view(self, request: Request, mode: Mode) -> View:
        """The request as `mode` sees it. Mode C runs the captioner."""
        if mode == "M":
            return View(request)
        if mode == "P":
            return View(pooled_view(request, _POOL), _POOL)
        runs = picture_runs(request)
        if not runs:
            return View(request)
        if mode == "T-raw":
            return View(_replaced(request, [[int(request.ids[start])] for start, _ in runs]))
        if mode == "T-text":
            return View(_replaced(request, [self.literal_ids] * len(runs)))
        if mode == "T":
            return View(without_pictures(request, self.newline_id))
        assert self.captioner is not None and self.encode is not None
        captions = self.captioner.captions(request)
        assert len(captions) == len(runs), f"{len(captions)} captions for {len(runs)} pictures"
        return View(_replaced(request, [[*self.prefix_ids, *self.encode(caption)] for caption in captions]))


def picture_runs(request: Request) -> list[tuple[int, int]]:
    """(start, stop) of each picture's ids. Two adjacent pictures are two runs."""
    if request.pixels is None:
        return []
    places, runs, first = (request.modality != TEXT).nonzero().flatten().tolist(), [], 0
    for picture in pictures_of(request):
        start = places[first]
        runs.append((start, start + picture.num_tokens))
        first += picture.num_tokens
    return runs


def without_pictures(request: Request, newline_id: int) -> Request:
    """Mode T: each picture's run of ids becomes one newline, and the pixels go."""
    return _replaced(request, [[newline_id]] * len(picture_runs(request)))


def _replaced(request: Request, words: Sequence[Sequence[int]]) -> Request:
    pieces, place = [], 0
    for (start, stop), substitute in zip(picture_runs(request), words, strict=True):
        pieces += [request.ids[place:start], request.ids.new_tensor(list(substitute))]
        place = stop
    ids = torch.cat([*pieces, request.ids[place:]])
    return Request(ids, torch.zeros_like(ids, dtype=torch.int8), None, request.name)
