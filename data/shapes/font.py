"""A 3x5 bitmap alphabet, so that drawn words do not depend on the fonts of a machine."""

from __future__ import annotations

from PIL import Image

# Five rows of three bits for each letter, most significant bit left.
GLYPHS = {
    "a": (2, 5, 7, 5, 5), "b": (6, 5, 6, 5, 6), "c": (3, 4, 4, 4, 3), "d": (6, 5, 5, 5, 6), "e": (7, 4, 6, 4, 7),
    "f": (7, 4, 6, 4, 4), "g": (3, 4, 5, 5, 3), "h": (5, 5, 7, 5, 5), "i": (7, 2, 2, 2, 7), "k": (5, 5, 6, 5, 5),
    "l": (4, 4, 4, 4, 7), "m": (5, 7, 7, 5, 5), "n": (6, 5, 5, 5, 5), "o": (2, 5, 5, 5, 2), "p": (6, 5, 6, 4, 4),
    "r": (6, 5, 6, 5, 5), "s": (3, 4, 2, 1, 6), "t": (7, 2, 2, 2, 2), "u": (5, 5, 5, 5, 7), "w": (5, 5, 7, 7, 5),
}  # fmt: skip


def draw_word(image: Image.Image, word: str) -> None:
    """Write `word` (up to four known letters) in black across the middle of a square image, in place."""
    scale = image.width // (4 * len(word) + 1)
    left = (image.width - (4 * len(word) - 1) * scale) // 2
    top = (image.height - 5 * scale) // 2
    for place, letter in enumerate(word):
        for row, bits in enumerate(GLYPHS[letter]):
            for column in range(3):
                if bits >> (2 - column) & 1:
                    x, y = left + (4 * place + column) * scale, top + row * scale
                    image.paste((0, 0, 0), (x, y, x + scale, y + scale))
