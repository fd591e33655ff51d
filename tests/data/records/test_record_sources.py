"""Tables and tars give what JSON files give: the same samples in the same order, from anywhere, at flat memory."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import tracemalloc
from dataclasses import fields
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.data.collate import ConversationCollate
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.loader import Loader
from draftsmith.data.pictures.videos import write_clip
from draftsmith.data.records.mixture import are_present, identities
from draftsmith.data.records.records import file_identity
from draftsmith.data.records.table_records import Columns, TableRecords
from draftsmith.data.records.tar_records import TarRecords
from fails import fails_with
from PIL import Image
from record_forms import members, table, write_forms
from small_records import talk, write_tar

FORMS = ("arrow", "parquet", "tar")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """What `datasets` converts lands in the test's folder, and nothing is asked of the Hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def records(count: int = 21) -> list[dict]:
    """Text alone, one picture, two pictures, and a clip, in turn."""
    rows = []
    for number in range(count):
        media = ({}, {"image": f"images/{number % 6}.png"}, {"image": [f"images/{n}.png" for n in (number % 5, 5)]},
                 {"video": "clip.mp4"})[number % 4]  # fmt: skip
        marks = "<image>\n" * (0, 1, 2, 1)[number % 4]
        turns = talk(f"{marks}Which picture?", "It is" + " not" * number + " é.")
        rows.append({"id": f"r{number}", **media, "conversations": turns})
    return rows


@pytest.fixture
def media(folder):
    frames = [Image.fromarray(np.full((32, 32, 3), 20 + 8 * n, np.uint8)) for n in range(9)]
    write_clip(folder / "clip.mp4", frames, fps=5)
    return folder


@pytest.fixture
def forms(media):
    return write_forms(media / "forms", records(), media)


@pytest.fixture
def opened(processor, media):
    def opened(*names, run: str = "run", **settings) -> ConversationDataset:
        video = {"fps": None, "num_frames": 4, "pooling": "none", "newline": "none"}
        config = ConversationData(
            path=[str(n) if isinstance(n, Path) else n for n in names],
            **({"aspect": "square", "video": video, "images": str(media)} | settings),
        )
        return ConversationDataset(config, PromptFormat(system="", image_rule="verbatim"), processor, files=list(names),
                                   skipped_log=media / run / "skipped.jsonl", cache=media / run / "cache")  # fmt: skip

    return opened


def same(left, right) -> bool:
    """Whether two batches are equal in every tensor; samples are called by the place they come from."""
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if field.name == "sample_ids":
            a, b = ([name.rpartition("[")[2] for name in names] for names in (a, b))
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
            return False
    return True


def loader(dataset, **settings) -> Loader:
    return Loader(dataset, **({"seed": 7, "batch_size": 4, "micro_batch_size": 2, "total_steps": 8,
                               "collate": ConversationCollate(3, 24), "grouped": True} | settings))  # fmt: skip


def batches(loaded) -> list:
    return [micro for step in loaded for micro in step.micro]


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_those_of_json_bit_for_bit(forms, opened, form):
    plain, other = opened(forms["json"]), opened(forms[form])
    for name in ("lengths", "images", "clips"):
        assert np.array_equal(plain.column(name), other.column(name)), name
    expected = batches(loader(plain))
    assert len(expected) == 16 and any(batch.pixels.any() for batch in expected)
    for settings in ({}, {"num_workers": 2}):
        assert all(map(same, expected, batches(loader(other, **settings))))
    for rank in range(2):
        of_rank = [batches(loader(d, world_size=2, rank=rank, micro_batch_size=1)) for d in (plain, other)]
        assert all(map(same, *of_rank)) and len(of_rank[0]) == 16
    assert not same(expected[0], expected[1])


# ---- mixtures and fingerprints


def test_a_mixture_of_all_of_them(forms, opened, media):
    (media / "forms" / "mix.yaml").write_text(f"""
datasets:
- {{json_path: mine.json, sampling_strategy: "first:3"}}
- {{kind: datasets, path: arrow, sampling_strategy: "end:10%", columns: {{image: image}}}}
- {{kind: webdataset, path: "shard-{{000..002}}.tar", sampling_strategy: "random:5"}}
- {{kind: datasets, path: {media / "forms" / "parquet"}}}
""")
    mixed = opened(media / "forms" / "mix.yaml")
    ids = [mixed.record(index)["id"] for index in range(len(mixed))]
    assert (ids[:6] == ["r0", "r1", "r2", "r18", "r19", "r20"] and len(ids) == 32
            and ids[11:] == [f"r{n}" for n in range(21)])  # fmt: skip
    again = opened(media / "forms" / "mix.yaml", run="again")
    assert [again.record(index)["id"] for index in range(len(again))] == ids
    assert mixed.selection.summary() == "4 data files, 3 of them in part: 32 of 84 records"
    batches(loader(mixed))


def test_fingerprints_follow_content(forms, opened, media):
    names = [forms[form] for form in FORMS]
    first = identities(names)
    assert len(set(first)) == 3 and "absent" not in first and are_present(names)
    assert identities([name.model_dump() for name in names]) == first, "a dry run has the settings alone"
    assert not are_present(names, opens_fast=True) and are_present([forms["arrow"], forms["tar"]], opens_fast=True)
    before = [opened(name).identity() for name in names]
    changed = records()
    changed[20]["conversations"][1]["value"] = "It is another."
    write_forms(media / "new", changed, media)
    for name in ("arrow", "parquet", *(f"shard-{n:03d}.tar" for n in range(3))):
        old = media / "forms" / name
        old.rename(media / f"old-{name}")
        (media / "new" / name).rename(old)
    assert not set(identities(names)) & set(first)
    assert not {opened(name).identity() for name in names} & set(before)
    assert [opened(name).record(20)["conversations"][1]["value"] for name in names] == ["It is another."] * 3
    absent = [TableRecords(kind="datasets", path="owner/none"), TarRecords(kind="webdataset", path="none-{0..3}.tar")]
    assert not any(are_present([name]) for name in absent) and identities(absent)[1] == "absent"


@pytest.mark.parametrize("form", ["arrow", "tar"])
def test_memory_does_not_grow_with_the_pictures(media, opened, form, monkeypatch):
    """Peaks of a whole pass, index included, over few and many records of 300 kB each; a row of an index is bytes."""
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (320, 320, 3), np.uint8)).save(media / "noise.png")
    size = (media / "noise.png").stat().st_size
    assert size > 300_000
    turns = talk("<image>\nWhich picture?", "It is picture 1.")
    peaks = {}
    opened(write_forms(media / "warm", records(9), media)[form])[1]  # imports
    for count in (12, 120):
        rows = [{"id": str(n), "image": "noise.png", "conversations": turns} for n in range(count)]
        name = write_forms(media / str(count), rows, media)[form]
        tracemalloc.start()
        data = opened(name, run=f"run-{count}")
        assert sum(len(data[index].ids) > 0 for index in range(count)) == count
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[120] < peaks[12] + size, f"108 more pictures of {size} bytes: {peaks}"


# ---- columns


def saved(folder: Path, rows: list[dict], **settings) -> TableRecords:
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return TableRecords(kind="datasets", path=str(folder), **settings)


TURNS = talk("<image>\nWhich picture?", "It is picture 3.")
TEXT_TURNS = talk("Which?", "It is picture 3.")


def test_columns_are_mapped_and_pictures_may_be_named(media, opened):
    row = {"talk": TURNS, "shot": "images/3.png", "number": 7, "kind": "place"}
    columns = Columns(conversations="talk", image="shot", id="number")
    data = opened(saved(media / "named", [row], columns=columns), kinds=["place"])
    record = data.record(0)
    assert (record["id"], record["kind"], record["image"]) == (7, "place", ["images/3.png"])
    (media / "plain.json").write_text(json.dumps([{"image": "images/3.png", "conversations": TURNS}]))
    assert torch.equal(data[0].pixels, opened(media / "plain.json")[0].pixels)
    raw = {"conversations": TURNS, "image": (media / "images" / "3.png").read_bytes()}
    assert torch.equal(opened(saved(media / "raw", [raw]))[0].pixels, data[0].pixels), "bytes without a path"
    several = {"conversations": [{"from": "human", "value": "Which?"}, TURNS[1]], "images": None, "videos": []}
    assert opened(saved(media / "texts", [several]))[0].pixels is None, "text-only rows hold null"


def test_decoding_columns_stay_undecoded(media, opened, monkeypatch):
    """The set says Image: `datasets` would decode it with Pillow, whatever it is."""
    row = {"conversations": TURNS, "image": {"bytes": (media / "images" / "3.png").read_bytes(), "path": None}}
    rows = datasets.Dataset.from_list([row]).cast_column("image", datasets.Image())
    rows.save_to_disk(media / "set")
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("decoded"))
    data = opened(TableRecords(kind="datasets", path=str(media / "set")))
    assert data[0].pixels.shape == (1, 3, 24, 24)
    eps = {"conversations": TURNS,
           "image": {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "path": None}}  # fmt: skip
    with pytest.raises(UserError, match=r"corrupt image[\s\S]*row 0, column image"):
        opened(saved(media / "eps", [eps]))[0]


def test_pictures_inside_tables_and_tars_pass_the_one_reader(media, opened):
    """Grey of 16 bits is scaled, too long a picture and a path outside are bad records; the others are read."""
    grey = np.full((20, 30), 0x8000, np.uint16)
    Image.fromarray(grey).save(media / "deep.png")
    Image.fromarray((grey >> 8).astype(np.uint8)).save(media / "plain.png")
    Image.new("L", (60_000, 200)).save(media / "long.jpg")
    names = ["deep.png", "plain.png", "long.jpg"]
    rows = [{"id": name, "image": name, "conversations": TURNS} for name in names]
    for form, source in write_forms(media / "odd", rows, media).items():
        data = opened(source, aspect="pad", on_error="skip", run=form)
        deep, plain, long = (data[index] for index in range(3))
        assert torch.equal(deep.pixels, plain.pixels) and long.pixels is None, form
        notes = [json.loads(line) for line in (media / form / "skipped.jsonl").read_text().splitlines()]
        assert [note["reason"][:69] for note in notes] == [
            "too many pixels: the square around 60,000 x 200 pixels has 60,000 x 6"
        ], form
    named = [{"conversations": TURNS, "image": name} for name in (str(media / "plain.png"), "../plain.png", "deep.png")]
    data = opened(saved(media / "paths", named), on_error="skip", run="paths")
    assert [data[index].pixels is None for index in range(3)] == [True, True, False]
    with pytest.raises(UserError, match="is an absolute path"):
        opened(saved(media / "again", named))[0]


def test_text_that_is_not_utf_8_is_a_bad_record(media, opened):
    """Parquet does not check its texts; the other rows are read."""
    rows = datasets.Dataset.from_list([{"id": str(n), "conversations": TEXT_TURNS} for n in range(3)])
    rows.save_to_disk(media / "texts")
    (arrow,) = (media / "texts").glob("*.arrow")
    data = arrow.read_bytes()
    place = data.index(b"It is picture 3.", data.index(b"It is picture 3.") + 1)  # of row 1
    arrow.write_bytes(data[:place] + b"\xed\xa0\xbd" + data[place + 3 :])
    source = TableRecords(kind="datasets", path=str(media / "texts"))
    fails_with(r"column conversations is not UTF-8[\s\S]*record 1", opened, source)
    assert len(opened(source, on_error="skip", run="skip")) == 2


def test_a_set_with_indices_and_splits(media, opened):
    rows = table(records(), media)
    picked = rows.select([20, 3, 4])
    datasets.DatasetDict({"train": rows.select(range(4)), "mine": picked}).save_to_disk(media / "dict")
    source = TableRecords(kind="datasets", path=str(media / "dict"))
    assert len(opened(source)) == 4
    mine = opened(source.model_copy(update={"split": "mine"}))
    assert [mine.record(index)["id"] for index in range(3)] == ["r20", "r3", "r4"]
    assert [sample_id.rpartition("/")[2]
            for sample_id in (mine.sample_id(0), mine.sample_id(2))] == ["mine[0]", "mine[2]"]  # fmt: skip


def test_a_folder_of_one_configuration(media, opened):
    """As `hf download` leaves LLaVA-OneVision-Data: a folder for each configuration."""
    (media / "ov" / "ai2d(internvl)").mkdir(parents=True)
    table(records(), media).to_parquet(media / "ov" / "ai2d(internvl)" / "train-00000-of-00001.parquet")
    source = TableRecords(kind="datasets", path=str(media / "ov"), name="ai2d(internvl)", split="train")
    data = opened(source)
    assert len(data) == 21 and data.sample_id(3) == "ov/ai2d(internvl)/train[3]"
    fails_with(r"no such folder[\s\S]*ai2d2", opened, source.model_copy(update={"name": "ai2d2"}))


def cached(rows: datasets.Dataset, media: Path, commit: str) -> None:
    """As `load_dataset("owner/MiniSet")` leaves it where there is a network."""
    rows.to_parquet(media / f"{commit}.parquet")
    datasets.load_dataset("parquet", data_files=str(media / f"{commit}.parquet"), cache_dir=str(media / commit))
    converted = next((media / commit).rglob("dataset_info.json")).parent
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "owner___mini_set" / "default" / "0.0.0" / commit
    shutil.copytree(converted, folder)
    (folder / "parquet-train.arrow").rename(folder / "mini_set-train.arrow")
    about = json.loads((folder / "dataset_info.json").read_text()) | {"dataset_name": "mini_set"}
    (folder / "dataset_info.json").write_text(json.dumps(about))


def test_a_set_of_the_hub_without_a_network(media, opened, forms):
    source = TableRecords(kind="datasets", path="owner/MiniSet")
    assert not are_present([source])
    rows = table(records(), media)
    cached(rows, media, "a" * 16)
    assert are_present([source]) and not are_present([source], opens_fast=True)
    first = opened(source)
    assert all(map(same, batches(loader(opened(forms["json"]))), batches(loader(first))))
    assert opened(source).identity() == first.identity() and first.sample_id(3) == "MiniSet[3]"
    fails_with(r"no split 'test'; it has train", opened, source.model_copy(update={"split": "test"}))
    fails_with(r"cannot load the set[\s\S]*other", opened, source.model_copy(update={"name": "other"}))
    shutil.rmtree(datasets.config.HF_DATASETS_CACHE)
    cached(rows.select([*range(1, 21), 0]), media, "b" * 16)
    fails_with(r"has changed on the Hub[\s\S]*owner/MiniSet[\s\S]*revision", opened, source)
    assert opened(source, run="another").identity() != first.identity()


BAD_TABLES = {
    "no conversations": ([{"turns": TEXT_TURNS}], {}, "no column 'conversations'; it has turns",
                         "columns.conversations", ""),
    "a mistyped column": ([{"conversations": TEXT_TURNS, "picture": "a"}], {"image": "pictur"}, "'pictur'",
                          "columns.image", "'picture'"),
    "turns as text": ([{"conversations": "hello"}], {}, "holds string", "columns.conversations", "convert"),
    "turns of others": ([{"conversations": [{"role": "user", "content": "a"}]}], {}, "`from` and `value`",
                        "columns.conversations", ""),
    "pictures as numbers": ([{"conversations": TEXT_TURNS, "image": 3}], {}, "holds int64", "columns.image", "convert"),
    "ids as lists": ([{"conversations": TEXT_TURNS, "id": [1]}], {}, "column 'id'", "columns.id", ""),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "problem", "where", "hint"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_column_that_is_missing_or_of_another_type(media, opened, rows, columns, problem, where, hint):
    error = fails_with("", opened, saved(media / "bad", rows, columns=Columns(**columns)))
    assert problem in error.problem and str(media / "bad") in error.where and where in error.where
    assert hint in error.hint
    assert error.hint


def test_sets_that_are_not_there(media, opened, tmp_path):
    def refused(match: str, **settings) -> None:
        caught = fails_with(match, opened, TableRecords(kind="datasets", **settings))
        assert caught.where and caught.hint

    refused(r"cannot load the set[\s\S]*owner/none[\s\S]*hf download", path="owner/none")
    refused(r"no such folder[\s\S]*no/such/folder", path="no/such/folder")
    table(records(4), media).save_to_disk(media / "one")
    refused(r"no split 'test'[\s\S]*key split", path=str(media / "one"), split="test")
    table(records(4), media).to_parquet(media / "sub.parquet")
    refused(r"no split 'test'; it has train[\s\S]*key split", path=str(media / "sub.parquet"), split="test")
    (media / "empty").mkdir()
    refused(r"no table files[\s\S]*parquet", path=str(media / "empty"))
    write_tar(media / "empty" / "a.tar", [("a.json", b"{}")])
    refused(r"no table files[\s\S]*kind: webdataset", path=str(media / "empty"))
    (media / "mixed.json").write_text(
        json.dumps([{"id": 1, "conversations": TEXT_TURNS}, {"id": "b", "conversations": 3}])
    )
    refused(r"(cannot load the set|holds extension)[\s\S]*without kind", path=str(media / "mixed.json"))


def test_a_record_of_a_table_that_cannot_be_used(media, opened):
    rows = [{"id": str(n), "conversations": TURNS, "image": b"no picture" if n == 2 else None} for n in range(4)]
    source = saved(media / "set", rows)
    fails_with(r"1 <image> marks for 0 images[\s\S]*set, record 0 \(id '0'\)[\s\S]*hint", opened, source)
    data = opened(source, on_error="skip")
    assert len(data) == 1 and not any(data[0].loss_mask)
    listed = [json.loads(line) for line in (media / "run" / "skipped.jsonl").read_text().splitlines()]
    assert sorted(note["record"] for note in listed) == [0, 1, 2, 3]
    assert any("corrupt image" in note["reason"] for note in listed)
    unnamed = [{"id": float("nan"), "conversations": TURNS}, {"id": 1.0, "conversations": TEXT_TURNS}]
    assert opened(saved(media / "nan", unnamed), on_error="skip", run="nan").log.listed().left_out == 1


def test_a_wrong_folder_beside_embedded_pictures(media, opened, forms):
    """Pictures inside tables and tars are in no folder, so that a wrong one is told of those of the JSON file alone."""
    for form in ("arrow", "tar"):
        assert any(opened(forms[form], on_error="skip", images=str(media / "elsewhere"))[1].loss_mask)
        with pytest.raises(UserError, match=r"(\d+) of \1 pictures of mine\.json missing in \S*elsewhere, first: "):
            opened(forms["json"], forms[form], on_error="skip", images=str(media / "elsewhere"))


# ---- tars


def tar(folder: Path, *samples: list[tuple[str, bytes]]) -> TarRecords:
    write_tar(folder / "one.tar", [member for sample in samples for member in sample])
    return TarRecords(kind="webdataset", path=str(folder / "one.tar"))


def record_bytes(**changes) -> bytes:
    return json.dumps({"conversations": TURNS} | changes).encode()


def picture_bytes(folder: Path, number: int) -> bytes:
    return (folder / "images" / f"{number}.png").read_bytes()


def test_pictures_of_a_key_in_their_order(media, opened):
    two = [{"from": "human", "value": "<image>\n<image>\nWhich?"}, TURNS[1]]
    shots = [(f"k.{label}.png", picture_bytes(media, n)) for label, n in (("10", 1), ("9", 2))]
    by_number = opened(tar(media, [("k.json", record_bytes(conversations=two)), *shots]))[0].pixels
    named = record_bytes(conversations=two, image=["k.10.png", "k.9.png"])
    by_name = opened(tar(media, [("k.json", named), *shots]))[0].pixels
    assert torch.equal(by_number, by_name.flip(0)) and not torch.equal(by_number, by_name)
    (media / "plain.json").write_text(json.dumps([{"image": ["images/2.png", "images/1.png"], "conversations": two}]))
    assert torch.equal(opened(media / "plain.json")[0].pixels, by_number), "9 comes before 10"
    text = opened(tar(media, [("k.json", record_bytes(image="images/2.png"))]))
    assert text.record(0)["image"] == "images/2.png" and text[0].pixels is not None, "a file of the images folder"
    extra = [("v1.0/k.json", record_bytes()), ("v1.0/k.seg.npz", b"x"), ("v1.0/k.jpg.pkl", b"x"),
             ("v1.0/k.png", picture_bytes(media, 2))]  # fmt: skip
    data = opened(tar(media, extra))
    assert len(data) == 1 and data.record(0)["id"] == "v1.0/k", "members of other suffixes are never read"


BAD_SAMPLES = {
    "NaN": ([("k.json", b'{"id": NaN}')], "bad json: NaN is no JSON"),
    "bad json": ([("k.json", b'{"id": '), ("k.png", b"x")], "key 'k': bad json"),
    "a list": ([("k.json", b"[]")], "not an object with conversations"),
    "no json": ([("k.png", b"x")], "no json member \\(members: png\\)"),
    "dots in the name": ([("k.05.json", b"{}"), ("k.05.png", b"x")], "no json member; a key ends at the first dot"),
    "no picture": ([("k.json", record_bytes())], "1 <image> marks for 0 images"),
    "too many pictures": ([("k.json", record_bytes()), ("k.0.png", b"x"), ("k.1.png", b"x")], "1 <image> marks for 2"),
    "another number": ([("k.json", record_bytes(image=["a", "b"])), ("k.png", b"x")], "another number than its 1"),
    "a member twice": ([("k.json", record_bytes()), ("k.png", b"x"), ("k.png", b"y")], "second member of one name"),
    "a link out": ([("../k.json", record_bytes())], "unsafe name"),
}


@pytest.mark.parametrize(("sample", "says"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_a_sample_that_cannot_be_used(media, opened, sample, says):
    good = members(records()[1], media, "good")
    fails_with(rf"{says}[\s\S]*one\.tar, record [012][\s\S]*hint", opened, tar(media, good, sample))
    data = opened(tar(media, good, sample), on_error="skip")
    assert data.record(0)["id"] == "r1" and data[0].pixels is not None
    assert any(says.split("\\")[0] in line for line in (media / "run" / "skipped.jsonl").read_text().splitlines())


def test_a_key_that_comes_twice(media, opened):
    """In one tar its members may lie apart, and which picture belongs to which text nobody knows. Keys, and ids after
    them, begin anew in each tar.
    """
    first, other = members(records()[1], media, "a"), members(records()[0], media, "b")
    named = members(records()[1] | {"id": "a"}, media, "a")
    for name, samples in (("one", [*first, *other, *first]), ("two", named), ("three", named), ("copy", first)):
        write_tar(media / f"{name}.tar", samples)
    with pytest.raises(UserError, match=r"key comes a second time[\s\S]*one\.tar, record 2[\s\S]*hint"):
        opened(TarRecords(kind="webdataset", path=str(media / "one.tar")))
    one, *others = (str(media / f"{name}.tar") for name in ("one", "two", "three"))
    assert len(opened(TarRecords(kind="webdataset", path=tuple(others)))) == 2
    both = TarRecords(kind="webdataset", path=(one, str(media / "copy.tar")))
    kept = opened(both, on_error="skip")
    assert [kept.record(index)["id"] for index in range(len(kept))] == ["r1", "r0", "r1"]
    notes = [json.loads(line) for line in (media / "run" / "skipped.jsonl").read_text().splitlines()]
    assert [(Path(n["file"]).name, n["record"]) for n in notes if n["record"] is not None] == [("one.tar", 2)]
    assert "2 records repeat the id" in notes[-1]["reason"], "one of them in a true copy"


def test_tars_that_are_damaged_or_not_there(media, opened, forms):
    whole = (media / "forms" / "shard-001.tar").read_bytes()
    (media / "forms" / "shard-001.tar").write_bytes(whole[: len(whole) // 2])
    fails_with(r"truncated tar[\s\S]*shard-001\.tar[\s\S]*hint", opened, forms["tar"])
    (media / "forms" / "shard-001.tar").write_bytes(b"x" * 512 + whole[512:])
    fails_with(r"not a tar file[\s\S]*shard-001\.tar[\s\S]*hint", opened, forms["tar"], on_error="skip")
    for packed, kind, cure in (
        (gzip.compress(whole), "gzip", "gunzip"),
        (bz2.compress(whole), "bzip2", "bzip2 -d"),
        (lzma.compress(whole), "xz", "xz -d"),
        (b"\x28\xb5\x2f\xfd..", "zstd", "zstd -d"),
    ):
        (media / "forms" / "shard-001.tar").write_bytes(packed)
        caught = fails_with(f"not a tar file: compressed with {kind}\n", opened, forms["tar"], on_error="skip")
        assert caught.where.endswith("shard-001.tar") and cure in caught.hint
    for path in ("none-{000..003}.tar", "pipe:cat x", "https://example.com/a.tar"):
        caught = fails_with("", opened, TarRecords(kind="webdataset", path=path))
        assert caught.where and caught.hint
    (media / "forms" / "shard-001.tar").write_bytes(picture_bytes(media, 1))
    assert fails_with("not a tar file: a picture", opened, forms["tar"]).hint == "give plain .tar files"
    write_tar(media / "empty.tar", [("readme.md", b"x")])
    with pytest.raises(UserError, match=r"no records[\s\S]*empty\.tar[\s\S]*KEY\.json"):
        opened(TarRecords(kind="webdataset", path=str(media / "empty.tar")))


def test_a_large_file_counts_by_its_ends_and_when_it_was_written(tmp_path):
    """Of up to 64 MiB every byte counts. Reading hundreds of gigabytes at each start would take hours."""
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    for path, size in ((small, 3 << 20), (large, (64 << 20) + 1)):
        with open(path, "wb") as file:
            file.truncate(size)  # takes no disk
        for place in (0, size // 2, size - 1):
            before, stamp = file_identity(path), path.stat().st_mtime_ns
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(b"x")
            os.utime(path, ns=(stamp, stamp + 10**9 * (path == large and place == size // 2)))
            assert file_identity(path) != before, (path.name, place)
    assert file_identity(small) == file_identity(small)
    assert file_identity(small.rename(tmp_path / "other.json")) != file_identity(large)


@pytest.mark.parametrize("name", ["x.parquet", "x.json", "x.arrow"])
def test_a_folder_that_is_called_like_a_table_is_none(tmp_path, name):
    (tmp_path / "set" / name).mkdir(parents=True)
    source = TableRecords(kind="datasets", path=str(tmp_path / "set"))
    fails_with("no table files", source.open, tmp_path / "cache")
    (tmp_path / "set" / "y.jsonl").write_text(json.dumps({"id": "a", "conversations": talk("a", "b")}))
    assert len(source.open(tmp_path / "cache")) == 1
