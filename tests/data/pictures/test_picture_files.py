"""One reader for all pictures: right values from every depth, and from any bytes a picture or one kind of error."""

import io
import multiprocessing
import resource
import struct
import subprocess
import warnings
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from draftsmith.data.pictures import picture_files
from draftsmith.data.pictures.media_files import BadMedia, Embedded
from draftsmith.data.pictures.picture_files import FORMATS, image_size, load_image
from draftsmith.data.processor_files import with_own_image_processor
from draftsmith.eval.quality.extractors import crop_bicubic
from fails import fails_with, raising
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin, TiffImagePlugin
from tiled import check_canvas, pixels
from transformers.image_utils import load_image as transformers_image

NOISE = np.random.default_rng(0).integers(0, 256, (14, 20, 3), dtype=np.uint8)
LEVELS = np.arange(280, dtype=np.uint32).reshape(14, 20) * 234  # 0 to 65,286


def file(data: bytes) -> Embedded:
    return Embedded("here", lambda: io.BytesIO(data))


def encoded(image: Image.Image, form: str, **options) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def grey(data: bytes) -> np.ndarray:
    """The values of a grey picture, whose three channels are equal."""
    values = np.asarray(load_image(file(data)))
    assert values.dtype == np.uint8 and (values == values[..., :1]).all()
    return values[..., 0]


def tiff(values: np.ndarray, *, photometric: int = 1, bits: int | None = None) -> bytes:
    """A grey TIFF in the byte order of `values`, as no library need write it."""
    order = ">" if values.dtype.byteorder == ">" else "<"
    data = values.tobytes()
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    entries = {256: (4, values.shape[1]), 257: (4, values.shape[0]), 258: (3, bits or values.dtype.itemsize * 8),
               259: (3, 1), 262: (3, photometric), 273: (4, 8), 277: (3, 1), 278: (4, values.shape[0]),
               279: (4, len(data)), 339: (3, kind)}  # fmt: skip
    table = struct.pack(order + "H", len(entries))
    for tag, (width, value) in entries.items():
        table += struct.pack(order + "HHI", tag, width, 1)
        table += struct.pack(order + ("HH" if width == 3 else "I"), *((value, 0) if width == 3 else (value,)))
    head = (b"MM" if order == ">" else b"II") + struct.pack(order + "HI", 42, 8 + len(data))
    return head + data + table + bytes(4)


# ---- values


def good() -> dict[str, bytes]:
    """Pictures of 8 bits in every format and mode that is written by Pillow."""
    noise = Image.fromarray(NOISE)
    some = Image.fromarray(np.dstack([NOISE, NOISE[..., :1]]))
    palette = noise.quantize(16)
    orientation = Image.Exif()
    orientation[0x0112] = 6
    return {
        **{f"{mode} {form}": encoded(noise.convert(mode), form)
           for form, modes in {"PNG": "1 L LA P RGB RGBA", "TIFF": "1 L LA P RGB RGBA CMYK YCbCr", "JPEG": "L RGB CMYK",
                               "BMP": "1 L P RGB RGBA", "GIF": "1 L P RGB", "PPM": "1 L RGB", "WEBP": "L RGB RGBA",
                               }.items() for mode in modes.split()},
        "transparent palette PNG": encoded(palette, "PNG", transparency=3),
        "palette of alphas PNG": encoded(palette, "PNG", transparency=bytes(range(0, 256, 16))),
        "transparent grey PNG": encoded(noise.convert("L"), "PNG", transparency=7),
        "transparent GIF": encoded(palette, "GIF", transparency=3),
        "alpha PNG": encoded(some, "PNG"),
        "alpha WEBP": encoded(some, "WEBP"),
        "animated GIF": encoded(palette, "GIF", save_all=True, append_images=[palette.rotate(90)]),
        "animated WEBP": encoded(noise, "WEBP", save_all=True, append_images=[noise.rotate(90)]),
        "animated PNG": encoded(noise, "PNG", save_all=True, append_images=[noise.rotate(90)]),
        "pages TIFF": encoded(noise, "TIFF", save_all=True, append_images=[noise.rotate(90)]),
        "progressive JPEG": encoded(noise, "JPEG", progressive=True),
        "turned JPEG": encoded(noise, "JPEG", exif=orientation),
        "turned PNG": encoded(noise, "PNG", exif=orientation),
        "turned WEBP": encoded(noise, "WEBP", exif=orientation),
        **{f"{name} TIFF": encoded(noise, "TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate", "jpeg")},
    }  # fmt: skip


GOOD = good()


@pytest.mark.parametrize("name", GOOD)
def test_pictures_of_8_bits_are_what_pillow_makes_of_them(tmp_path, name):
    """Bit for bit as transformers' `load_image`, whatever the file is called: the official recipes' `convert("RGB")`,
    upright. The size is known without decoding.
    """
    with Image.open(io.BytesIO(GOOD[name])) as image:
        shown = transformers_image(image)
        size, expected = shown.size, np.asarray(shown)
    path = tmp_path / "a.eps"
    path.write_bytes(GOOD[name])
    for source in (path, file(GOOD[name])):
        assert np.array_equal(np.asarray(load_image(source)), expected) and image_size(source) == size


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_as_their_tag_says(kind, orientation):
    """All eight ways, and two numbers that mean none."""
    tag = Image.Exif()
    tag[0x0112] = orientation
    data = encoded(Image.fromarray(NOISE), kind, exif=tag, **({"lossless": True} if kind == "WEBP" else {}))
    expected = transformers_image(Image.open(io.BytesIO(data)))
    sizes: list[tuple[int, int]] = []
    image = load_image(file(data), check=sizes.append)
    assert np.array_equal(np.asarray(image), np.asarray(expected))
    assert [image.size] == sizes == [image_size(file(data))]
    assert (image.size != (NOISE.shape[1], NOISE.shape[0])) == (orientation in (5, 6, 7, 8))


def test_a_damaged_orientation_tag_takes_nothing_away():
    data = encoded(Image.fromarray(NOISE), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert np.array_equal(np.asarray(load_image(file(data))), NOISE)


DEEP = {
    "PNG": lambda v: encoded(Image.fromarray(v.astype(np.uint16)), "PNG"),
    "TIFF": lambda v: encoded(Image.fromarray(v.astype(np.uint16)), "TIFF"),
    "TIFF, big-endian": lambda v: tiff(v.astype(">u2")),
    "TIFF, LZW": lambda v: encoded(Image.fromarray(v.astype(np.uint16)), "TIFF", compression="tiff_lzw"),
    "PGM": lambda v: b"P5 20 14 65535\n" + v.astype(">u2").tobytes(),
    "PGM in digits": lambda v: b"P2 20 14 65535\n" + " ".join(map(str, v.ravel())).encode(),
    "TIFF of 32 bits": lambda v: tiff(v.astype("<u4")),
    "TIFF of 32 bits with a sign": lambda v: tiff(v.astype("<i4")),
    "TIFF of 32 bits, big-endian": lambda v: tiff(v.astype(">i4")),
}


@pytest.mark.parametrize("name", DEEP)
def test_grey_of_16_bits_is_scaled(name):
    """It was clipped: all above 255 was white."""
    assert np.array_equal(grey(DEEP[name](LEVELS)), LEVELS >> 8)


def test_a_dark_picture_of_16_bits_stays_dark():
    """Its depth is declared, so that its largest value says nothing."""
    dark = LEVELS % 256
    for name in ("PNG", "TIFF", "TIFF, big-endian", "PGM"):
        assert not grey(DEEP[name](dark)).any(), name


def test_other_depths():
    halves = (LEVELS >> 1).astype("<i2")
    assert np.array_equal(grey(tiff(halves)), halves >> 8)
    assert np.array_equal(grey(tiff(LEVELS.astype("<u2"), photometric=0)), 255 - (LEVELS >> 8)), "0 is white there"
    assert np.array_equal(grey(tiff((LEVELS % 256).astype("<i4"))), LEVELS % 256), "8 bits in 32, as before"
    assert grey(tiff(np.array([[0, 255]], "<i4"))).tolist() == [[0, 255]]
    assert grey(tiff(np.array([[0, 256]], "<i4"))).tolist() == [[0, 1]]
    packed = bytes([0x12, 0x3F, 0xFF])  # two values of 12 bits: 0x123 and 0xFFF
    of_12 = bytearray(tiff(np.zeros((1, 2), "<u2"), bits=12))
    of_12[8:11] = packed
    assert grey(bytes(of_12)).tolist() == [[0x12, 0xFF]]
    ten = b"P5 2 1 1023\n" + np.array([512, 1023], ">u2").tobytes()
    assert grey(ten).tolist() == [[128, 255]], "other largest values of PGM are scaled, too"


def test_floats_are_from_0_to_1_or_to_255():
    """They were black: 0.5 was cut to 0."""
    unit = np.linspace(0, 1, 280, dtype=np.float32).reshape(14, 20)
    for values in (unit, unit.astype(">f4")):
        assert np.array_equal(grey(tiff(values)), np.floor(values * np.float32(255) + 0.5)), values.dtype
    assert np.array_equal(grey(tiff(unit * 255)), np.floor(unit * 255)), "as before"
    assert np.array_equal(grey(tiff(unit, photometric=0)), 255 - np.floor(unit * np.float32(255) + 0.5))
    pfm = b"Pf\n20 14\n-1.0\n" + unit[::-1].tobytes()
    assert np.array_equal(grey(pfm), np.floor(unit * np.float32(255) + 0.5))
    for bad in (unit - 1, unit * 300, np.full_like(unit, np.nan), np.full_like(unit, np.inf)):
        with pytest.raises(BadMedia, match=r"a grey image of floats from .*; expected 0 to 1, or 0 to 255"):
            load_image(file(tiff(bad)))
    for bad in (LEVELS.astype("<i4") - 1, LEVELS.astype("<i4") * 2):
        with pytest.raises(BadMedia, match=r"a grey image of integers from -?[\d,]+ to [\d,]+; expected 0 to 255, or"):
            load_image(file(tiff(bad)))


def test_color_of_16_bits_keeps_its_upper_byte():
    rows = b"".join(b"\0" + (row.astype(int) * 256 + 77).astype(">u2").tobytes() for row in NOISE)
    head = struct.pack(">IIBBBBB", 20, 14, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in chunks:
        data += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    assert np.array_equal(np.asarray(load_image(file(data))), NOISE)


# ---- limits


def test_formats_off_the_list_are_refused_whatever_the_file_is_called(tmp_path, monkeypatch):
    """EPS would run Ghostscript. A program that is started fails the test."""
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a program was started"))
    for form in ("EPS", "PDF", "ICO", "JPEG2000", "TGA", "PCX", "SGI", "ICNS", "DDS"):
        path = tmp_path / f"{form}.jpg"
        Image.fromarray(NOISE).resize((32, 32)).save(path, form)
        fails_with(f"none of {FORMATS[0]}", load_image, path, error=BadMedia)


def test_sizes_are_refused_before_a_pixel_is_decoded(monkeypatch):
    data = bytearray(GOOD["RGB PNG"])
    data[16:24] = (9_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    monkeypatch.setattr(picture_files, "MAX_PIXELS", 9_000 * 9_000 - 1)
    monkeypatch.setattr(picture_files, "as_rgb", lambda image: pytest.fail("decoded"))
    for read in (load_image, image_size):
        with pytest.raises(BadMedia, match=r"too many pixels: the image has 9,000 x 9,000, and 80,999,999") as caught:
            read(file(bytes(data)))
        assert (caught.value.where, caught.value.reason) == ("here", "too many pixels")
    monkeypatch.setattr(picture_files, "MAX_BYTES", len(data) - 1)
    fails_with("an image file of more than", image_size, file(bytes(data)), error=BadMedia)


def test_a_long_picture_is_refused_where_its_square_is_too_large(processor, monkeypatch):
    """60,000 x 200 pixels on a square: 3.6 billion, which were 10.8 GB."""
    squeezing = with_own_image_processor(processor, None, image_size=24, patch_size=8, family="llava", revision=None)
    squeezing.image_processor.size = {"height": 24, "width": 24}
    monkeypatch.setattr(picture_files, "as_rgb", lambda image: pytest.fail("decoded"))
    wide = file(encoded(Image.new("L", (60_000, 200)), "JPEG"))
    pad, square = (partial(check_canvas, processor=processor, aspect=a) for a in ("pad", "square"))
    with pytest.raises(BadMedia, match=r"the square around 60,000 x 200 pixels has 60,000 x 60,000, and 67,108,864"):
        load_image(wide, check=pad)
    pad((8_192, 200))
    fails_with(r"the image has 10,000 x 8,000, and 67,108,864", square, (10_000, 8_000), error=BadMedia)
    square((60_000, 200))
    with pytest.raises(BadMedia, match=r"60,000,000 x 1 pixels, resized to a shorter side of 24, are 24 x 1,440"):
        square((60_000_000, 1))
    check_canvas((60_000_000, 1), squeezing, "square")
    check_canvas((60_000_000, 1), processor, "anyres")
    check_canvas((60_000_000, 1), processor, "anyres_max_9")
    with pytest.raises(BadMedia, match="the square around"):
        check_canvas((60_000, 200), processor, "anyres_max_9", num_images=2)


def made_within(kilobytes: int, path: Path, aspect: str, processor) -> int | str:
    """What comes of a picture where this process may grow by so much: the number of its crops, or why there is none."""
    lines = Path("/proc/self/status").read_text().splitlines()
    size = next(int(line.split()[1]) for line in lines if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, ((size + kilobytes) * 1024, resource.RLIM_INFINITY))
    try:
        image = load_image(path, check=lambda size: check_canvas(size, processor, aspect))
        return len(pixels([image], processor, aspect))
    except BadMedia as refused:
        return refused.reason
    except MemoryError:
        return "no memory"


def made_under_limits(asked, processor, told) -> None:
    told.put([made_within(*one, processor) for one in asked])


def test_one_picture_takes_a_gigabyte_at_most(tmp_path, processor):
    """In a fork, whose address space is bounded. One picture took up to 4 GB."""
    wide, high, long = [tmp_path / name for name in ("wide.png", "high.png", "long.png")]
    for path, size in ((wide, (60_000, 200)), (high, (9_000, 8_000)), (long, (8_192, 30))):
        Image.new("L", size).save(path)
    pixels([Image.new("RGB", (20, 10))], processor, "pad")
    # The third is there so that the bound is known to bind: it is what the largest picture that is allowed takes.
    asked = [(60_000, wide, "pad"), (60_000, high, "square"), (700_000, long, "pad"), (1_100_000, long, "pad")]
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    process = fork.Process(target=made_under_limits, args=(asked, processor, told))
    process.start()
    assert told.get(timeout=90) == ["too many pixels", "too many pixels", "no memory", 1]
    process.join(30)


def test_the_largest_square_that_is_allowed_is_made(processor, monkeypatch):
    """What is refused is what would be allocated: one side more than the limit's root."""
    monkeypatch.setattr("draftsmith.data.families.llava.MAX_CANVAS", 300 * 300)
    check_canvas((300, 2), processor, "pad")
    assert pixels([Image.new("RGB", (300, 2))], processor, "pad").shape == (1, 3, 24, 24)
    fails_with("the square around 301 x 2", check_canvas, (301, 2), processor, "pad", error=BadMedia)


def test_the_scores_of_quality_have_the_same_limit():
    with pytest.raises(BadMedia, match=r"resized to a shorter side of 224, a picture has 224 x 13,440,000"):
        crop_bicubic(np.zeros((60_000, 1, 3), np.uint8), 224)


def test_no_memory_is_a_bad_picture(monkeypatch):
    monkeypatch.setattr(picture_files, "as_rgb", raising(MemoryError))
    with pytest.raises(BadMedia, match=r"not enough memory for the image\n  where: here\n  hint:  shrink"):
        load_image(file(GOOD["RGB PNG"]))


# ---- damage

SEEDS = [*GOOD.values(), *(make(LEVELS) for make in DEEP.values()), tiff(np.zeros((4, 4), "<f4"))]
DAMAGES = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 7)), min_size=1, max_size=12)


def a_picture_or_one_error(data: bytes) -> None:
    """Any other exception fails the test."""
    refused = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = load_image(file(data))
        except BadMedia as error:
            refused = error
    if refused is None:
        assert image.mode == "RGB" and image.size == image_size(file(data))
    else:
        assert refused.where == "here" and refused.hint and refused.reason, refused


@settings(max_examples=400, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(seed=st.sampled_from(SEEDS), flips=DAMAGES, cut=st.none() | st.integers(0, 4000))
def test_damaged_pictures_end_in_a_picture_or_one_kind_of_error(seed, flips, cut):
    """Of every format: bits turned over, most of them in the head, and the end cut off."""
    data = bytearray(seed)
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    a_picture_or_one_error(bytes(data if cut is None else data[: cut % len(data)]))


HEADS = [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"P5 ", b"P6 ", b"Pf\n", b"P2 4 4 99 ",
         b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08", b"II+\0", b"RIFF\x40\0\0\0WEBPVP8 ", b"%!PS-Adobe"]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(head=st.sampled_from(HEADS), data=st.binary(max_size=300))
def test_random_bytes_end_in_a_picture_or_one_kind_of_error(head, data):
    a_picture_or_one_error(head + data)


def test_whatever_pillow_raises_is_a_bad_picture(monkeypatch):
    """Its parsers raise what damaged bytes make of them; what they have been seen to raise, and what not."""
    for error in (SyntaxError("x"), struct.error("x"), zlib.error("x"), EOFError(), OSError("truncated"),
                  KeyError(1), IndexError("x"), TypeError("x"), OverflowError("x"), RecursionError(), AssertionError(),
                  NotImplementedError(), Image.DecompressionBombError("x"),
                  Image.DecompressionBombWarning("x")):  # fmt: skip

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "_open", fail)
        fails_with("corrupt image", load_image, file(GOOD["RGB TIFF"]), error=BadMedia)


@pytest.mark.parametrize("size", [3 << 20, 65 << 20], ids=["is read", "is refused by name"])
def test_a_png_with_a_large_note_or_colour_profile(size):
    """Image generators write their workflow into a picture, and editors a profile: it is not corrupt."""
    notes, parts = PngImagePlugin.PngInfo(), PngImagePlugin.PngInfo()
    notes.add_text("workflow", "x" * size, zip=True)
    for name in "ab":
        parts.add_text(name, "x" * (size // 2), zip=True)
    for options in ({"pnginfo": notes}, {"pnginfo": parts}, {"icc_profile": b"z" * size}):
        data = encoded(Image.fromarray(NOISE), "PNG", **options)
        if size < picture_files.MAX_METADATA:
            assert (np.asarray(load_image(file(data))) == NOISE).all()
        else:
            fails_with("a PNG with over 67,108,864 bytes of text", load_image, file(data), error=BadMedia)
