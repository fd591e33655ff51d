"""Sources give the same items in the same order wherever a pass begins, and nothing hostile in them is run."""

import io
import json
import os
import pickle
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from draftsmith.data.captioned.items import Captioned, Refused, center_crop, decode_image
from draftsmith.data.captioned.sources import CaptionedSource, num_items, read, repeated, write_digests
from draftsmith.data.records import tars
from fails import fails_with
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from small_records import peak, write_tar

FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "JPEG": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP",
           "tiff": "TIFF", "tif": "TIFF", "jfif": "JPEG", "jpe": "JPEG", "apng": "PNG",
           **dict.fromkeys(("ppm", "pgm", "pbm", "pnm", "pfm"), "PPM")}  # fmt: skip


def source(**settings):
    return TypeAdapter(CaptionedSource).validate_python(settings)


def picture(shade: int, suffix: str = "png", mode: str = "RGB", side=(20, 30)) -> bytes:
    data = io.BytesIO()
    Image.new("L", side, shade).convert(mode).save(data, FORMATS[suffix])
    return data.getvalue()


def caption_tar(path: Path, first: int, count: int) -> Path:
    """Samples `first` and on: jpg, json and txt, as img2dataset writes them."""
    members = []
    for n in range(first, first + count):
        meta = json.dumps({"caption": f"url text {n}", "top_caption": f"picture {n}", "key": f"{n:05d}"})
        members += [(f"{n:05d}.jpg", picture(n)), (f"{n:05d}.json", meta.encode()), (f"{n:05d}.txt", b"line %d\n" % n)]
    return write_tar(path, members)


@pytest.fixture
def sources(tmp_path):
    """One of each kind, each with something that is refused; and how many items it has."""
    for n in range(3):
        caption_tar(tmp_path / "tars" / f"{n:05d}.tar", 4 * n, 4)
    write_tar(tmp_path / "tars" / "00003.tar", [("a.jpg", b"x"), ("a.pkl", b"x"), ("b.txt", b"x"), ("c.jpg", b"x")])

    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for n, suffix in enumerate(["png", "jpg", "webp"] * 3):
        (pairs / f"{n}.{suffix}").write_bytes(picture(10 * n, suffix))
        (pairs / f"{n}.txt").write_text(f"picture {n}")
    (pairs / "4.txt").write_text(" \n")
    (pairs / "5.txt").unlink()
    (pairs / "._3.png").write_bytes(b"what macOS leaves")

    for n, name in enumerate(["n02", "n01", "n03"]):
        (tmp_path / "classes" / name).mkdir(parents=True)
        for shade in range(n + 1):
            (tmp_path / "classes" / name / f"{name}_{shade}.JPEG").write_bytes(picture(shade, "JPEG"))

    (tmp_path / "coco").mkdir()
    images = [{"id": i, "file_name": f"COCO_{i:012d}.jpg"} for i in (7, 3, 5, 9)] + [{"id": 8, "file_name": "../x.jpg"}]
    captions = [(40, 7, "seven"), (12, 3, "short"), (11, 3, "first of three"), (13, 3, "a long one of three")]
    captions += [(50, 5, "five"), (51, 8, "eight")]
    annotations = [{"id": a, "image_id": i, "caption": c} for a, i, c in captions]
    (tmp_path / "captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    for i in (7, 3, 9):
        (tmp_path / "coco" / f"COCO_{i:012d}.jpg").write_bytes(picture(i, "jpg"))
    coco = {"kind": "coco", "annotations": str(tmp_path / "captions.json"), "images": str(tmp_path / "coco")}
    return {
        "webdataset": (source(kind="webdataset", path=str(tmp_path / "tars" / "{00000..00003}.tar")), 16),
        "folder": (source(kind="folder", folder=str(pairs)), 9),
        "classes": (source(kind="classes", folder=str(tmp_path / "classes")), 6),
        "coco": (source(**coco), 5),
        "coco all": (source(**coco, which="all"), 7),
        "coco longest": (source(**coco, which="longest"), 5),
        "prompts": (source(kind="coco", annotations=coco["annotations"], which="longest"), 5),
    }


KINDS = ["webdataset", "folder", "classes", "coco", "coco all", "coco longest", "prompts"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_is_a_slice_of_the_whole_pass(sources, kind):
    given, count = sources[kind]
    whole = list(read(given))
    assert [item.number for item in whole] == list(range(count)) and num_items(given) == count
    for start in range(count + 3):
        assert list(read(given, start)) == whole[start:]
        cut = given.model_copy(update={"max_samples": 4})
        assert list(read(cut, start)) == whole[start:4] and num_items(cut) == 4


def good(items) -> list[Captioned]:
    return [item for item in items if isinstance(item, Captioned)]


def reasons(items) -> Counter:
    return Counter(item.reason for item in items if isinstance(item, Refused))


def test_tars_with_txt_or_json_captions(sources, tmp_path):
    given, _ = sources["webdataset"]
    items = list(read(given))
    assert [(i.key, i.caption) for i in good(items)] == [(f"{n:05d}", f"line {n}") for n in range(12)]
    assert good(items)[5].image == picture(5) and "00001.tar" in good(items)[5].where
    assert reasons(items) == {"suffix not allowed": 1, "no caption": 2, "no image": 1}
    captioned = given.model_copy(update={"caption_key": "top_caption"})
    assert [i.caption for i in good(read(captioned))] == [f"picture {n}" for n in range(12)]
    odd = [("0.jpg", b"x"), ("0.json", b'{"caption": null}'), ("1.jpg", b"x"), ("1.json", b"[" * 10**5)]
    odd += [("2.jpg", b"x"), ("2.json", b'{"caption": " "}'), ("3.jpg", b"x"), ("3.txt", b"\xff")]
    path = str(write_tar(tmp_path / "odd.tar", odd))
    keyed = read(source(kind="webdataset", path=path, caption_key="caption"))
    assert reasons(keyed) == {"no caption": 2, "bad json": 1, "empty caption": 1}
    assert reasons(read(source(kind="webdataset", path=path)))["caption not UTF-8"] == 1


def test_a_folder_is_listed_again_only_when_it_has_changed(tmp_path, monkeypatch):
    """`encode` makes a pass for each output shard."""
    for n in range(3):
        (tmp_path / f"{n}.jpg").write_bytes(b"x")
    os.utime(tmp_path, ns=(1, 1))
    listed, real = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or real(path))
    given = source(kind="folder", folder=str(tmp_path))
    assert [item.key for start in range(3) for item in read(given, start)] == [*"012", *"12", *"2"]
    assert listed == [tmp_path]
    (tmp_path / "3.jpg").write_bytes(b"x")
    assert [item.key for item in read(given, 2)] == [*"23"] and len(listed) == 2


def test_folders_and_classes(sources, tmp_path):
    items = list(read(sources["folder"][0]))
    assert [i.caption for i in good(items)] == [f"picture {n}" for n in (0, 1, 2, 3, 6, 7, 8)]
    assert reasons(items) == {"empty caption": 1, "no caption": 1}
    given, _ = sources["classes"]
    assert [(i.key, i.label, i.caption) for i in read(given)] == [
        *((f"n01/n01_{n}", 0, "n01") for n in range(2)),
        ("n02/n02_0", 1, "n02"),
        *((f"n03/n03_{n}", 2, "n03") for n in range(3)),
    ]
    few = given.model_copy(update={"max_per_class": 1})
    assert [i.key for i in read(few)] == ["n01/n01_0", "n02/n02_0", "n03/n03_0"] and num_items(few) == 3
    assert [(i.number, i.label) for i in read(few, 2)] == [(2, 2)]
    index = tmp_path / "index.json"
    index.write_text(
        json.dumps({"7": ["n01", "tench"], "0": ["n02", "shark"], "3": ["n03", "ray"], "1": ["n9", "hen"]})
    )
    named = given.model_copy(update={"class_index": str(index)})
    assert [(i.label, i.caption) for i in read(named)][1:4] == [(7, "tench"), (0, "shark"), (3, "ray")]
    index.write_text(json.dumps({"7": ["n01", "tench"]}))
    fails_with("2 class folders without a label, first 'n02'", read, named)
    index.write_text(json.dumps({"7": ["n01", "tench"], "8": ["n01", "carp"]}))
    fails_with("not a class index: two labels for 'n01'", read, named)


@pytest.mark.parametrize("name", ["__MACOSX", "lost+found", "@eaDir", "n04"])
def test_a_class_folder_without_pictures_shifts_no_label(sources, tmp_path, name):
    (tmp_path / "classes" / name / "a.jpg").mkdir(parents=True)  # a Synology disk's, of a picture's thumbnails
    (tmp_path / "classes" / name / "._a.jpg").write_bytes(b"what macOS leaves")
    given, _ = sources["classes"]
    for reading in (lambda: read(given), given.class_labels):
        assert fails_with("a class folder without pictures", reading).where == str(tmp_path / "classes" / name)


def test_class_folders_named_by_numbers_have_these_labels(sources, tmp_path):
    (tmp_path / "numbers").mkdir()
    for name, number in {"n01": "2", "n02": "10", "n03": "9"}.items():
        (tmp_path / "classes" / name).rename(tmp_path / "numbers" / number)
    assert source(kind="classes", folder=str(tmp_path / "numbers")).class_labels() == [("10", 10), ("2", 2), ("9", 9)]


def test_coco_captions_in_the_order_of_ids(sources):
    first, every, longest, prompts = (list(read(sources[k][0])) for k in KINDS[3:])
    assert [(i.key, i.caption) for i in good(first)] == [("3", "first of three"), ("7", "seven")]
    assert reasons(first) == {"missing image": 1, "unsafe name": 1, "no caption": 1}
    assert [i.key for i in good(every)] == ["3-11", "3-12", "3-13", "7-40"]
    assert good(longest)[0].caption == "a long one of three" and good(longest)[0].image == picture(3, "jpg")
    assert [(i.caption, i.image) for i in good(prompts)[:2]] == [("a long one of three", b""), ("five", b"")]
    assert decode_image(good(prompts)[0], 8).reason == "no image"


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def link(name: str, target: str, kind=tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_a_hostile_tar_runs_nothing_and_each_refusal_is_counted(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    marker = tmp_path / "ran"
    payload = pickle.dumps(Payload(marker))
    pickle.loads(payload)
    assert marker.is_dir(), "the payload is live"
    marker.rmdir()
    objects = io.BytesIO()
    np.save(objects, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    hostile = [
        ("0.jpg", picture(1)),
        *((f"0.{suffix}", payload) for suffix in ("pkl", "pyd", "pickle", "py", "pt", "pth", "safetensors", "gz")),
        ("0.npy", objects.getvalue()), ("0.txt", b"a good one"), link("1.txt", str(secret)),
        link("1.json", "../secret.txt", tarfile.LNKTYPE), link("dev.jpg", "", tarfile.CHRTYPE),
        link("fifo.jpg", "", tarfile.FIFOTYPE), ("../evil.txt", b"x"), ("a/../../evil.txt", b"x"),
        (str(tmp_path / "evil.txt"), b"x"), ("C:\\evil.txt", b"x"), ("pipe:touch evil.txt", b"x"), ("bell\a.txt", b"x"),
        ("2.jpg", picture(2)), ("2.jpg", picture(3)), ("2.txt", b"another good one"), ("3.jpg", bytes(1000)),
        ("3.txt", b"x"),
    ]  # fmt: skip
    path = write_tar(tmp_path / "hostile.tar", hostile)
    before = sorted(tmp_path.rglob("*"))
    items = list(read(source(kind="webdataset", path=str(path))))
    assert [(i.key, i.caption, i.image) for i in good(items)] == [
        ("0", "a good one", picture(1)), ("2", "another good one", picture(2)), ("3", "x", bytes(1000)),
    ]  # fmt: skip
    assert reasons(items) == {"suffix not allowed": 9, "not a plain file": 4, "unsafe name": 6,
                              "second member of one name": 1}  # fmt: skip
    assert len(items) == len(good(items)) + 20, "each has a number of its own"
    assert decode_image(good(items)[2], 8).reason == "unreadable image"
    large = Counter(m.reason for m in tars.samples(path, max_bytes=500) if isinstance(m, tars.RefusedMember))
    assert large["member too large"] == 1
    assert sorted(tmp_path.rglob("*")) == before and not marker.exists()


def test_huge_sizes_are_believed_neither_in_headers_nor_in_long_headers(tmp_path):
    good_tar = write_tar(tmp_path / "good.tar", [("0.jpg", b"x"), ("0.txt", b"x")]).read_bytes()
    bomb = tarfile.TarInfo("bomb.jpg")
    bomb.size = 1 << 40
    path = tmp_path / "bomb.tar"
    path.write_bytes(good_tar[: 4 * 512] + bomb.tobuf(tarfile.GNU_FORMAT))
    stream = read(source(kind="webdataset", path=str(path)))
    assert next(stream).reason == "member too large"
    fails_with(r"truncated tar(.|\n)*bomb.tar", list, stream)
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        bomb.type, bomb.size = kind, 1 << 40
        path.write_bytes(bomb.tobuf(tarfile.GNU_FORMAT) + good_tar)
        fails_with("extended header", list, read(source(kind="webdataset", path=str(path))))
    for size in ("1" + "0" * 30, "-1", "1" * 5000):
        stranger = tarfile.TarInfo("0.jpg")
        stranger.pax_headers = {"size": size}
        path.write_bytes(stranger.tobuf(tarfile.PAX_FORMAT) + good_tar)
        fails_with(r"bomb\.tar", list, read(source(kind="webdataset", path=str(path))))
    sparse = tmp_path / "sparse.tar"  # a content that is really there, without filling the disk
    bomb.type, bomb.size = tarfile.REGTYPE, 1 << 30
    with open(sparse, "wb") as file:
        file.write(bomb.tobuf(tarfile.GNU_FORMAT))
        file.seek(1 << 30, os.SEEK_CUR)
        file.write(good_tar)
    items = list(read(source(kind="webdataset", path=str(sparse))))
    assert reasons(items) == {"member too large": 1} and good(items)[0].key == "0"


@pytest.mark.parametrize(
    "address", ["pipe:mkdir ran", "http://x/{0..1}.tar", "file:0.tar", " PIPE:mkdir ran", "s3://x"]
)
def test_addresses_are_refused_and_not_run(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    for path in (address, [address]):
        fails_with("an address where local tar files are expected", read, source(kind="webdataset", path=path))
    assert not list(tmp_path.iterdir())


def test_truncated_and_damaged_tars_are_told_by_name(tmp_path):
    whole = caption_tar(tmp_path / "whole.tar", 0, 3).read_bytes()
    members = [m for sample in tars.samples(tmp_path / "whole.tar") for m in sample.members.values()]
    end = max(m.offset + -(-m.size // 512) * 512 for m in members)
    cut = tmp_path / "cut.tar"
    given = source(kind="webdataset", path=str(cut))
    for length in (end, end - 1, end - 512, end - 513, 1536, 1400, 600):
        cut.write_bytes(whole[:length])
        fails_with(r"truncated tar(.|\n)*cut\.tar", list, read(given))
    header = next(m for m in members if m.name == "00001.jpg").offset - 512
    cut.write_bytes(whole[:header] + b"\1" + whole[header + 1 :])  # `tarfile` takes that for the end
    fails_with(rf"damaged tar(.|\n)*cut\.tar, byte {header}", list, read(given))
    cut.write_bytes(b"hello" * 200)
    fails_with("not a tar file", list, read(given))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_folders_inside_tars(tmp_path, form):
    folder = tarfile.TarInfo("./sub")
    folder.type = tarfile.DIRTYPE
    long = "./sub/" + "é" * 150
    path = write_tar(tmp_path / "long.tar", [folder, (long + ".JPG", b"x"), (long + ".txt", b"x")], form)
    assert [i.key for i in read(source(kind="webdataset", path=str(path)))] == [long[2:]]


def test_paths_expand_in_a_fixed_order(tmp_path):
    for name in ("b0", "b1", "a0"):
        write_tar(tmp_path / f"{name}.tar", [])
    expanded = tars.expand_paths([str(tmp_path / "b{0..1}.tar"), str(tmp_path / "a*.tar")])
    assert [p.stem for p in expanded] == ["b0", "b1", "a0"]
    for path, problem in [("c{0..1}.tar", "not found"), ("c*.tar", "no file matches"), ("{a,b", "braces")]:
        fails_with(problem, tars.expand_paths, str(tmp_path / path))
    fails_with("named twice", tars.expand_paths, [str(tmp_path / "a0.tar"), str(tmp_path / "*.tar")])
    fails_with("shards", source, kind="webdataset", shards="x.tar", error=ValidationError)


def test_missing_and_broken_files_are_told_at_once(tmp_path):
    (tmp_path / "bad.json").write_text('{"images": [], "annotations": [{"id": 1, "image_id": 2, "caption": "x"}]}')
    for settings, problem in [
        ({"kind": "folder", "folder": "nowhere"}, "folder not found"),
        ({"kind": "folder", "folder": str(tmp_path)}, "no pictures .jpg, jpeg"),
        ({"kind": "classes", "folder": str(tmp_path)}, "no class folders"),
        ({"kind": "coco", "annotations": "nowhere.json"}, "file not found"),
        ({"kind": "coco", "annotations": str(tmp_path / "bad.json")}, "not MS-COCO captions"),
    ]:
        fails_with(problem, read, source(**settings))


def item(data: bytes) -> Captioned:
    return Captioned(3, "k", data, "c", None, "here")


def claiming(side: int) -> bytes:
    """A PNG of few bytes whose header says that it is side x side."""
    data = bytearray(picture(9))
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_are_rgb_of_one_size_or_refused():
    for mode, suffix in [("RGB", "webp"), ("L", "png"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpg"), ("1", "png")]:
        image = decode_image(item(picture(255, suffix, mode, (50, 30))), 24)
        assert image.mode == "RGB" and image.size == (24, 24) and image.getpixel((12, 12)) == (255, 255, 255), mode
    wide = picture(9, "png", "L", (60_000, 60))
    huge, large = claiming(60_000), claiming(10_000)  # Pillow refuses the first and lets the second pass
    program = io.BytesIO()
    Image.new("L", (30, 30)).save(program, "EPS")
    for data, size, reason in [
        (huge, 8, "too many pixels"),
        (large, 8, "too many pixels"),
        (wide, 512, "too many pixels"),  # scaled to 512 x 512,000
        (picture(9, "png", "L", (40, 7)), 8, "image too small"),
        (picture(9, "jpg")[:-20], 8, "unreadable image"),
        (program.getvalue(), 8, "unreadable image"),
        (b"not a picture", 8, "unreadable image"),
    ]:
        refused = decode_image(item(data), size, min_side=8)
        assert (refused.number, refused.key, refused.where, refused.reason) == (3, "k", "here", reason)


def test_center_crop_halves_by_boxes_then_scales_and_takes_the_middle():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    # 48 is at least 2 x 16, 24 is not: one halving, then 24 -> 16 and 32 -> 21, of which 2 on the left are cut off.
    rows = np.floor(np.asarray(noise, dtype=np.float64).reshape(48, 32, 2, 3).mean(axis=2) + 0.5)
    halved = np.floor(rows.reshape(24, 2, 32, 3).mean(axis=1) + 0.5).astype(np.uint8)  # Pillow rounds after each side
    expected = np.asarray(Image.fromarray(halved).resize((21, 16), Image.Resampling.BICUBIC))[:, 2:18]
    assert np.array_equal(np.asarray(center_crop(noise, 16)), expected)
    assert np.array_equal(np.asarray(center_crop(noise, 24)), halved[:, 4:28]), "exactly twice is halved too"
    exact = np.asarray(noise.crop((8, 0, 56, 48)))
    assert np.array_equal(np.asarray(center_crop(noise, 48)), exact), "the right size is only cut"
    assert center_crop(noise, 100).size == (100, 100)
    tall = Image.new("RGB", (16, 64))
    tall.paste((255, 255, 255), (0, 24, 16, 40))
    assert np.asarray(center_crop(tall, 16)).min() == 255


def test_memory_does_not_grow_with_the_number_of_items(tmp_path):
    few, peaks = caption_tar(tmp_path / "few.tar", 0, 3), []
    for count in (1000, 8000):
        members = [m for n in range(count) for m in ((f"{n}.jpg", b"x"), (f"{n}.txt", b"x"))]
        many = write_tar(tmp_path / "many.tar", members)
        given = source(kind="webdataset", path=[str(many), str(few)])
        peaks.append(peak(lambda given=given, start=count: sum(1 for _ in read(given, start))))
        assert next(read(given, count)).caption == "line 0"
    assert peaks[1] < peaks[0] + 10_000, peaks


def test_of_equal_pictures_the_first_one_stays(tmp_path):
    """Every third picture is a copy; two that cannot be used are no copies of each other."""
    images = [b"picture %d" % (n // 6 if n % 3 == 0 else n) for n in range(50)]
    items = [Captioned(n, str(n), image, "", None, "") for n, image in enumerate(images)]
    items += [Refused(n, str(n), "no caption", "", "") for n in (50, 51)]
    for shard in range(6):
        write_digests(items[shard * 9 : shard * 9 + 9], tmp_path / "d" / str(shard))
    first: dict[bytes, int] = {}
    copies = {n: first[image] for n, image in enumerate(images) if first.setdefault(image, n) != n}
    assert repeated([tmp_path / "d" / str(shard) for shard in range(6)]) == copies and len(copies) > 9
