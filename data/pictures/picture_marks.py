"""Marks of pictures in conversations, and what a family writes in their place: its own tokens around placeholders."""

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


def written_marks(pictures: Sequence[Picture], family: str) -> list[str]:
    """What each image's and clip's mark becomes: a mark for each of its runs (`runs_of`), between tokens of the family.

    Qwen3-VL writes times before the frames of a clip, InternVL their numbers; Pixtral ends rows with a token.
    """
    if family == "gemma4":
        return [f"<|image>{IMAGE_MARK}<image|>" for _ in pictures]
    if family == "pixtral":
        rows = [len(runs_of(picture, family)) for picture in pictures]
        return [f"{IMAGE_MARK}[IMG_BREAK]" * (count - 1) + f"{IMAGE_MARK}[IMG_END]" for count in rows]
    if family == "internvl":
        return ["\n".join(_internvl_runs(picture)) for picture in pictures]
    texts: list[str] = []
    for picture in pictures:
        mark = VIDEO_MARK if picture.modality == VIDEO else IMAGE_MARK
        assert picture.whole is not None, "template qwen_vl is of pictures that are read whole"
        time = picture.whole.timestamp
        shown = f"<|vision_start|>{mark}<|vision_end|>"
        shown = shown if time is None else f"<{time:.1f} seconds>{shown}"
        if picture.whole.part:
            texts[-1] += shown
        else:
            texts.append(shown)
    return texts


def _internvl_runs(picture: Picture) -> list[str]:
    """An image's run, or one of each frame of a clip."""
    if picture.modality != VIDEO:
        return [f"<img>{IMAGE_MARK}</img>"]
    return [f"Frame{number}: <img>{VIDEO_MARK}</img>" for number in range(1, picture.num_tiles + 1)]


def runs_of(picture: Picture, family: str) -> list[int]:
    """Lengths of the runs of placeholders that a picture becomes, as `written_marks` writes them."""
    if family == "internvl" and picture.modality == VIDEO:
        return [picture.patches**2] * picture.num_tiles
    if family == "pixtral":
        assert picture.whole is not None, "Pixtral's pictures are read whole"
        _, rows, columns = picture.whole.of_tokens
        return [columns] * rows
    return [picture.num_tokens]


def write_marks(
    pairs: list[tuple[str, str]], written: Sequence[str], marks: re.Pattern[str], *, keeps_breaks: bool
) -> list[tuple[str, str]]:
    """Each mark as it is written. Marks and texts in unequal numbers are found where they are encoded."""
    left = iter(written)
    pattern = marks if keeps_breaks else re.compile(f"\n?(?:{marks.pattern})\n?")
    return [(role, pattern.sub(lambda match: next(left, match[0]), text)) for role, text in pairs]
