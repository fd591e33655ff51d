"""How one image or clip of a prompt is cut into tiles, and which run of tokens those become.

Data code creates it and models pack features by it, so both count the same tokens. It is part of `Batch` and `Request`.

`MARKS` and what follows say where pictures stand in conversations, and what is written in their place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

TEXT, IMAGE, VIDEO = 0, 1, 2

# Where the learned newline stands: nowhere, once after the picture, or after each row of patches.
Newline = Literal["none", "one_token", "grid"]
# How a clip's patches become fewer after the projector, 2 x 2 to 1: bilinear rounds an odd side up (27 to 14, as
# LLaVA-OneVision), average down (27 to 13).
Pooling = Literal["none", "bilinear", "average"]


@dataclass(frozen=True)
class TileGrid:
    """The grid that the tiles of one picture form, after a first tile that holds all of it (LLaVA-NeXT's anyres)."""

    tiles: tuple[int, int]  # down, across
    unpadded: tuple[int, int]  # patch rows and columns that hold picture; what surrounds them is padding
    final: tuple[int, int]  # the same after the cap on tiles (OneVision); each row ends with a newline

    @property
    def num_tokens(self) -> int:
        """Tokens of the grid; each row of patches ends with a newline."""
        rows, columns = self.final
        return rows * (columns + 1)


@dataclass(frozen=True)
class PatchGrid:
    """A picture that a tower reads whole, in patches of the picture's own number (Qwen-VL): [frames, rows, columns].

    Row by row its patches are the rows of `pixels`; `merge` x `merge` of them become one token.
    """

    frames: int  # of the tower: two of the clip's each
    rows: int
    columns: int
    merge: int = 2
    seconds: float = 1.0  # of the clip between one of its frames and the next
    # Qwen3-VL writes the time before each frame of a clip, so that each of them is a picture of its own: its number in
    # the clip (0 begins one), and its time in seconds. None: nothing is written.
    part: int = 0
    timestamp: float | None = None

    @property
    def num_patches(self) -> int:
        """Patches over all frames."""
        return self.frames * self.rows * self.columns

    @property
    def num_tokens(self) -> int:
        """Tokens over all frames, after merging."""
        return self.num_patches // self.merge**2

    @property
    def of_tokens(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens."""
        return self.frames, self.rows // self.merge, self.columns // self.merge


@dataclass(frozen=True)
class Picture:
    """One image or clip: its tiles (or frames) stand in order in `pixels`, its tokens are one run of the prompt."""

    patches: int  # along a side of a tile
    num_tiles: int = 1
    modality: int = IMAGE
    grid: TileGrid | None = None  # of the tiles after the first; None: there is no grid
    newline: Newline = "none"
    pooling: Pooling = "none"
    whole: PatchGrid | None = None  # read whole: a tile is then one patch

    @property
    def side(self) -> int:
        """Patches along a side of a tile after pooling."""
        return {"none": self.patches, "bilinear": math.ceil(self.patches / 2), "average": self.patches // 2}[
            self.pooling
        ]

    @property
    def num_tokens(self) -> int:
        """Length of the picture's run of tokens in a prompt."""
        if self.whole is not None:
            return self.whole.num_tokens
        if self.grid is not None:
            return self.patches**2 + self.grid.num_tokens
        tile = self.side * (self.side + (self.newline == "grid"))
        return self.num_tiles * tile + (self.newline == "one_token")

    @property
    def flat(self) -> Picture:
        """The picture as a model without a newline reads it: its first tile, which shows the whole picture, or the clip
        without newlines.
        """
        if self.whole is not None:
            return self
        return replace(self, newline="none") if self.modality == VIDEO else Picture(self.patches)

    @property
    def is_plain(self) -> bool:
        """Whether it is only tiles in which every patch is a token: all that LLaVA-1.5 can read."""
        return self.grid is None and self.whole is None and self.newline == "none" and self.pooling == "none"


def whole_picture(grid: PatchGrid, modality: int = IMAGE) -> Picture:
    """A picture that is read whole, with the patches of `grid`."""
    return Picture(1, grid.num_patches, modality, whole=grid)


def one_placeholder_each(ids: Sequence[int], modality: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """`ids` with each picture's run cut to its first id, as a serving engine takes them.

    An engine expands placeholders itself: it would expand a run again, silently.

    Args:
        modality: of each id.
        pictures: of this row, in order; their runs may stand beside each other.
    """
    collapsed, place, left = [], 0, iter(pictures)
    while place < len(ids):
        collapsed.append(ids[place])
        place += 1 if modality[place] == TEXT else next(left).num_tokens
    assert next(left, None) is None, "pictures without a run"
    return collapsed


IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"  # as long as each other: one can stand in for the other's place
# Marks of a record without clips and of one with: elsewhere <video> is a word that somebody wrote (HTML has it).
MARKS = {False: re.compile("<image>"), True: re.compile("<image>|<video>")}


def mark_of(picture: Picture) -> str:
    """What stands for it in a text."""
    return VIDEO_MARK if picture.modality == VIDEO else IMAGE_MARK


def place_marks(text: str, rule: str, *, has_clip: bool = False) -> str:
    """Where the image marks of one turn stand (LLaVA-1.5's `preprocess_multimodal`, and LLaVA-NeXT's)."""
    marks = MARKS[has_clip].findall(text)
    if rule == "verbatim" or not marks:
        return text
    if rule == "next" and (len(marks) > 1 or text.startswith(marks[0])):
        return text
    rest = MARKS[has_clip].sub("", text).strip()
    return f"{marks[0]}\n{rest}".strip()


def write_marks(
    pairs: list[tuple[str, str]], written: Sequence[str], marks: re.Pattern[str], *, keeps_breaks: bool
) -> list[tuple[str, str]]:
    """Each mark as it is written. Marks and texts in unequal numbers are found where they are encoded."""
    left = iter(written)
    pattern = marks if keeps_breaks else re.compile(f"\n?(?:{marks.pattern})\n?")
    return [(role, pattern.sub(lambda match: next(left, match[0]), text)) for role, text in pairs]
