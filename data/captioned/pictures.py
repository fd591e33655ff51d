"""An item's picture as square RGB pixels, or the reason why it cannot be used."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

from .items import Captioned, Refused, Unusable

MAX_PIXELS = 89_478_485  # above it a picture is taken for a decompression bomb (Pillow's own limit)


def decode_image(item: Captioned, size: int, *, min_side: int = 1) -> Image.Image | Refused:
    """The picture as RGB, size x size, cut by `center_crop`; or why not.

    Args:
        min_side: pictures whose shorter side has fewer pixels are refused.
    """
    try:
        # The formats are listed because others run programs (EPS) or have never been looked at.
        with Image.open(io.BytesIO(item.image), formats=("JPEG", "PNG", "WEBP")) as image:
            short, long = sorted(image.size)
            # The second product is the area once the shorter side has been scaled to `size`.
            if short * long > MAX_PIXELS or size * size * long > MAX_PIXELS * short:
                raise Unusable("too many pixels", f"{image.width} x {image.height}")
            if short < min_side:
                raise Unusable("image too small", f"{image.width} x {image.height}, min_side is {min_side}")
            if image.mode[0] in "IF":
                raise Unusable("unreadable image", f"pixels of more than 8 bits (mode {image.mode})")
            return center_crop(image.convert("RGB"), size)
    except Unusable as error:
        reason, detail = error.args
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason, detail = "too many pixels", str(error)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        reason, detail = (
            ("unreadable image", str(error))
            if item.image
            else ("no image", "no bytes; the source reads captions only, or the file is empty")
        )
    return Refused(item.number, item.key, reason, item.where, detail)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """ADM's crop (Dhariwal and Nichol 2021, as LlamaGen and LANTERN use it): the middle square as size x size pixels.

    Halve with a box filter while the shorter side is at least twice `size`, then scale it to `size` bicubically, so
    that small details neither alias nor blur.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
