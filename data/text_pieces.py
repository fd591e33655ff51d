"""Text to ids, each with the characters that it came from; of text that is far too long the beginning alone.

Tokenizing two megabytes takes half a minute, and a record of that size is refused anyway.
"""

from __future__ import annotations

import re

from ..core.errors import UserError
from ..core.pictures import IMAGE_MARK
from .families.processor import Processor

_CHARACTERS = 16  # of the beginning that is tokenized, for each id that there is room for; an id has about four


class TooLong(UserError):
    """A sample of more ids than there is room for.

    Args:
        at_least: ids of its beginning, where no more was tokenized; None: all were counted.
    """

    def __init__(self, problem: str, *, hint: str | None = None, at_least: int | None = None):
        super().__init__(problem, hint=hint)
        self.at_least = at_least


def check_length(text: str, processor: Processor, most: int) -> None:
    """Raises `TooLong` where a beginning of the text has more than twice `most` ids.

    Twice, since what follows may join a beginning's last ids. Text of very long words is tokenized in growing parts.
    """
    size = _CHARACTERS * most
    while size < len(text):
        count = len(processor.tokenizer(text[:size], add_special_tokens=False).input_ids)
        if count > 2 * most:
            raise TooLong(f"at least {count} ids (in the first {size:,} of {len(text):,} characters), more than "
                          f"max_length {most}", at_least=count)  # fmt: skip
        size *= 4


Piece = tuple[int | None, int, int]  # id (None for a picture), first and past-last character


def official_pieces(text: str, processor: Processor, marks: re.Pattern[str]) -> list[Piece]:
    """Each chunk between images is tokenized as if it began a text (so it gets the tokenizer's leading blank)."""
    pieces: list[Piece] = []
    start = 0
    for mark in marks.finditer(text):
        pieces += [*_tokenize(text[start : mark.start()], start, processor), (None, mark.start(), mark.end())]
        start = mark.end()
    return pieces + _tokenize(text[start:], start, processor)


def hf_pieces(text: str, processor: Processor, marks: re.Pattern[str]) -> list[Piece]:
    """The text in one pass, with the image token where a mark stands."""
    # A tokenizer need not know <video>, and <image> is as long.
    text = marks.sub(IMAGE_MARK, text)
    return [(None if t == processor.image_token_id else t, a, b) for t, a, b in _tokenize(text, 0, processor)]


def _tokenize(chunk: str, start: int, processor: Processor) -> list[Piece]:
    encoded = processor.tokenizer(chunk, return_offsets_mapping=True, add_special_tokens=False)
    return [(i, start + a, start + b) for i, (a, b) in zip(encoded.input_ids, encoded.offset_mapping, strict=True)]
