"""Marks of pictures in conversations: where they stand, and what is written in their place."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...core.pictures import VIDEO, Picture

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
