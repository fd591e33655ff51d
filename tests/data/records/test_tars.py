"""Passes that begin in the middle of a tar: the same items as a whole pass, and few headers read to get there."""

import io
import itertools
import random
import tarfile
from pathlib import Path

import pytest
from draftsmith.data.captioned.sources import TarSource, num_items, read
from draftsmith.data.records import tars
from fails import fails_with
from small_records import write_tar


def pairs(count: int) -> list[tuple[str, bytes]]:
    return [member for n in range(count) for member in ((f"{n:05d}.jpg", b"x"), (f"{n:05d}.txt", b"line %d" % n))]


def source(*paths: Path) -> TarSource:
    return TarSource(kind="webdataset", path=[str(path) for path in paths])


@pytest.fixture
def headers(monkeypatch):
    """A list that grows by one with each header that is parsed."""
    parsed: list[int] = []
    real = tarfile.TarInfo.frombuf

    def counting(*arguments):
        parsed.append(1)
        return real(*arguments)

    monkeypatch.setattr(tarfile.TarInfo, "frombuf", counting)
    return parsed


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("seed", range(4))
def test_a_pass_may_begin_at_any_item(tmp_path, monkeypatch, form, seed):
    """Refused members before, in and after samples, a member twice, folders, names that take headers of their own."""
    monkeypatch.setattr(tars, "EVERY", 12)
    dice, members = random.Random(seed), []
    for n in range(40):
        stem = f"{n:03d}" + "long" * 40 * dice.randrange(2)
        result = [(f"{stem}.jpg", b"x" * dice.randrange(1200)), (f"{stem}.txt", b"line %d" % n)]
        extra = [(f"{n}.pkl", b"x"), (f"folder{n}/", b""), (f"{stem}.txt", b"again"), (f"../{n}.jpg", b"x")]
        for member in dice.sample(extra, dice.randrange(3)):
            result.insert(dice.randrange(3), member)
        members += result
    path = write_tar(tmp_path / "mixed.tar", members, form)
    index, items = tars.tar_index(path), list(tars.samples(path))
    assert index.num_items == len(items) > 40 and 2 <= len(index.places) <= 8
    for number, offset in index.places:
        assert list(tars.samples(path, start=offset)) == items[number:]
    given = source(path, write_tar(tmp_path / "behind.tar", pairs(2)))
    whole = list(read(given))
    for start in range(len(whole) + 2):
        assert list(read(given, start)) == whole[start:]


def test_shards_do_not_read_a_tars_headers_again_and_again(tmp_path, headers):
    """As `encode` goes through a source: counting, then one pass for each output shard."""
    first, second = write_tar(tmp_path / "a.tar", pairs(2000)), write_tar(tmp_path / "b.tar", pairs(500))
    given, size = source(first, second), 25
    total = num_items(given)
    assert total == 2500 and len(headers) == 2 * total + 2, "each header once, and each end"
    headers.clear()
    keys = [item.key for start in range(0, total, size) for item in itertools.islice(read(given, start), size)]
    assert keys == [f"{n:05d}" for n in (*range(2000), *range(500))]
    # Beside its own 25 samples and the header after them, a pass reads those after the place it begins at.
    assert len(headers) <= total // size * (2 * size + 1 + 2 * tars.EVERY)
    assert len(headers) < 14 * total, "from the beginning each time it would be about 70 times"


def test_a_tar_that_was_written_anew_is_scanned_anew(tmp_path):
    path = write_tar(tmp_path / "a.tar", pairs(30))
    assert next(read(source(path), 20)).key == "00020"
    write_tar(path, pairs(60)[40:])
    assert next(read(source(path), 20)).key == "00040"


def test_a_member_of_a_kind_that_nobody_knows_is_passed_with_its_data(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name, data in [*pairs(1), ("volume", b"!" * 700), *pairs(2)[2:]]:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), b"Z" if name == "volume" else tarfile.REGTYPE
            file.addfile(info, io.BytesIO(data))
    assert {item.key for item in read(source(path))} == {"00000", "volume", "00001"}, "and told as refused"


def test_an_empty_tar_is_passed_over(tmp_path):
    paths = [write_tar(tmp_path / f"{n}.tar", pairs(count)) for n, count in enumerate((3, 0, 4))]
    whole = list(read(source(*paths)))
    assert len(whole) == 7
    assert all(list(read(source(*paths), start)) == whole[start:] for start in range(9))


def pax(kind: bytes, data: bytes) -> bytes:
    """An extended header with these records."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = kind, len(data)
    return info.tobuf() + data + bytes(-len(data) % tarfile.BLOCKSIZE)


BAD_RECORDS = {
    "no length": b"path=other.jpg\n",
    "too short": b"10 path=other.jpg\n",
    "too long": b"40 path=other.jpg\n",
    "of nothing": b"0 path=other.jpg\n",
    "no newline": b"18 path=other.jpg ",
    "no keyword": b"13 other.jpg\n",
    "after a good one": b"18 path=other.jpg\nx",
    "a length that only Python reads": b"1_8 path=other.jpg\n",
}


@pytest.mark.parametrize("before", [b"", pax(tarfile.DIRTYPE, b"")], ids=["first", "later"])
@pytest.mark.parametrize("records", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_records_that_do_not_parse_whole_are_damage(tmp_path, records, before):
    path = write_tar(tmp_path / "a.tar", pairs(1))
    path.write_bytes(before + pax(tarfile.XHDTYPE, records) + path.read_bytes())
    fails_with(r"damaged tar: pax record", list, tars.samples(path))


@pytest.mark.parametrize("records", [b"18 path=other.jpg\n", b"9 size=0\n", b"nothing of pax"])
def test_a_global_header_says_nothing_of_members(tmp_path, records):
    path = write_tar(tmp_path / "a.tar", pairs(2), tarfile.PAX_FORMAT)
    plain = list(read(source(path)))
    path.write_bytes(pax(tarfile.XGLTYPE, records) + path.read_bytes())
    items = list(tars.samples(path))
    assert [(item.key, item.caption) for item in read(source(path))] == [(item.key, item.caption) for item in plain]
    for number, item in enumerate(items):
        assert list(tars.samples(path, start=item.offset)) == items[number:]


def test_a_tar_may_end_behind_a_global_header(tmp_path):
    """As `git archive` writes one of nothing; cut short it is told."""
    path, header = tmp_path / "a.tar", pax(tarfile.XGLTYPE, b"18 path=other.jpg\n")
    for before in (b"", pax(tarfile.DIRTYPE, b"")):
        path.write_bytes(before + header + bytes(1024))
        assert list(tars.samples(path)) == []
        path.write_bytes(before + header[:-1])
        fails_with("truncated tar", list, tars.samples(path))
