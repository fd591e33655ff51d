"""The emoji data: pictures on white, and a split by head noun in which no text of training has a held-out noun."""

import io
import json
import random
import re

import numpy as np
from draftsmith.data import emoji
from draftsmith.data.captioned.items import Captioned
from draftsmith.data.captioned.prompts import PromptSource, read_prompts
from draftsmith.data.captioned.sources import CocoSource, read
from draftsmith.data.emoji import Item, head_noun, holds, items, rendered, split, write_emoji
from draftsmith.data.records.record import check_record
from PIL import Image

HELD, TRAINED = ["candle", "flower", "kite", "taco"], ["apple", "dog", "ring", "hat"]  # by their md5
EVERY = [
    *(Item(f"{n}", f"red {w}", f"{w}s animal", (w, "sweet")) for n, w in enumerate(HELD)),
    *(Item(f"{50 + n}", f"big {w}", "candle thing", ("flowers", "round", "old")) for n, w in enumerate(TRAINED)),
    Item("90", "candle holder", "tool"), Item("91", "man with flower", "person", is_object=False),
    Item("92", "old candle", "person", is_object=False), Item("93", "big lamp", "without a picture"),
]  # fmt: skip


def png():
    """A square, red on the left and blue on the right."""
    page, out = Image.new("RGBA", (20, 20), "blue"), io.BytesIO()
    page.paste("red", (0, 0, 10, 20))
    page.save(out, "PNG")
    return out.getvalue()


PICTURES = {"noto": {item.code: png() for item in EVERY if item.code != "93"}, "fluent": {"0": png(), "50": png()}}


def test_the_head_noun_is_the_thing_and_is_met_in_the_singular_and_the_plural():
    for name, noun in {
        "green apple": "apple", "mug with straw": "mug", "cherries": "cherry", "glasses": "glass", "octopus": "octopus",
        "tennis": "tennis", "boxes": "box", "man facing left": "man", "shoes": "shoe", "blind mice": "mouse",
        "dress": "dress", "on!": "on", "": "",
    }.items():  # fmt: skip
        assert head_noun(name) == noun
    for text, noun in ("a Candle.", "candle"), ("candle-holder", "candle"), ("foxes", "fox"), ("cherries", "cherry"):
        assert holds(text, frozenset({noun}))
    assert not holds("a candlestick", frozenset({"candle"}))


def test_items_are_named_emoji_without_flags_families_and_skin_tones():
    names = {"a\ufe0f": ["red_apple", "fruit", ":D", "red_apple", "Sweet_Thing"], "b": ["flag"], "c": ["six_oclock"],
             "d": ["hand"], "f": ["girl"]}  # fmt: skip
    rows = [("1F34E FE0F", "a\ufe0f", "Food & Drink", "food-fruit"), ("1F34E", "a", "Food & Drink", "food-fruit"),
            ("1", "b", "Flags", "flag"), ("2", "c", "Travel & Places", "time"), ("3 1F3FB", "d", "People", "hand"),
            ("4", "e", "Objects", "tool"), ("5", "f", "People", "person")]  # fmt: skip
    apple = Item("1f34e", "red apple", "food fruit", ("fruit", "sweet thing"))
    groups = [dict(zip(("codes", "char", "group", "subgroup"), row, strict=True)) for row in rows]
    assert items(names, groups) == [apple, Item("5", "girl", "person", (), is_object=False)]


def test_no_text_of_training_holds_a_held_noun():
    training, held, nouns = split(EVERY)
    assert nouns == set(HELD) and [item.name for item in held] == [f"red {word}" for word in HELD]
    assert [item.name for item in training] == [*(f"big {word}" for word in TRAINED), "big lamp"]
    assert {(item.category, item.keywords) for item in training[:-1]} == {("thing", ("round", "old"))}
    assert not split([Item("1", word, "x") for word in emoji._words(emoji._WORDING)])[2], "they stand in each question"


def test_records_are_strict_well_formed_and_the_same_for_a_seed(tmp_path):
    folders, manifests = [tmp_path / name for name in ("one", "same", "other")], []
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        folder.mkdir()
        manifests += [write_emoji(folder, EVERY, PICTURES, seed=seed, num_questions=60, num_evaluated=12)]
    files = [{p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders]
    assert files[0] == files[1] and manifests[0] == manifests[1]
    changed = {name for name in files[0] if files[0][name] != files[2][name]}
    assert {"captions.json", "questions.json", "pictures/noto-50-1.jpg"} <= changed
    assert "pictures/noto-50.jpg" not in changed
    sets = {name: json.loads(files[0][f"{name}.json"]) for name in manifests[0]["records"]}
    lengths = {"captions": 15, "questions": 60, "held_out": 12, "trained": 12}
    lengths |= {"held_out_names": 5, "trained_names": 5}
    assert {name: len(rows) for name, rows in sets.items()} == manifests[0]["records"] == lengths
    assert len({row["id"] for row in sets["captions"]}) == 15 == 3 * manifests[0]["training"]["pictures"]
    for name, row in ((name, row) for name, rows in sets.items() for row in rows):
        assert check_record(row) is None and len(row["told"]) == 1 + (row["kind"] == "comparing")
        paths = row["image"] if isinstance(row["image"], list) else [row["image"]]
        assert files[0].keys() >= {*paths}
        if name.startswith(("held_out", "trained")):
            assert all(path.count("-") == 1 for path in paths), "plain ones"
        assert bool(re.search(rf"\b({'|'.join(HELD)})(s|es)?\b", json.dumps(row).lower())) == ("held_out" in name)
    assert (
        {row["kind"] for row in sets["questions"]} == {row["kind"] for row in sets["held_out"]} == set(emoji.QUESTIONS)
    )
    assert all(row["words"][:3] == [row["name"], row["name"].split()[-1], "thing"] for row in sets["captions"][:3])
    naming = next(row for row in sets["captions"] if row["kind"] == "naming")["conversations"]
    assert naming[0]["value"].endswith("Picture: <image>") and naming[1]["value"] == "A big apple."


def test_drawings_have_a_caption_and_a_class_each_and_held_out_ones_no_class(tmp_path):
    pictures = PICTURES | {"fluent": next(iter(PICTURES.values()))}
    write_emoji(tmp_path, EVERY, pictures, num_questions=6, num_evaluated=6)
    read_all = {name: [*read(CocoSource(kind="coco", annotations=str(tmp_path / f"{name}.json"), images=str(tmp_path)))]
                for name in ("drawn", "drawn_plain", "drawn_names", "drawn_held_out")}  # fmt: skip
    assert len(read_all["drawn"]) == 3 * len(read_all["drawn_plain"]) == 3 * len(read_all["drawn_names"])
    assert all(isinstance(item, Captioned) and item.image for of in read_all.values() for item in of)
    by_name = {(item.caption.split(", ")[0], item.label) for item in read_all["drawn"]}
    assert sorted(label for _, label in by_name) == [*range(len(by_name))], "a class is a name, of every set"
    assert {item.caption.split(", ")[1] for item in read_all["drawn_plain"]} == {"flat", "3d"}
    assert {item.label for item in read_all["drawn_held_out"]} == {None}
    assert {item.caption for item in read_all["drawn_held_out"]} >= {f"a red {HELD[0]}, flat"}
    assert not any(holds(item.caption, frozenset(HELD)) for item in read_all["drawn"])
    prompts = read_prompts(PromptSource(path=str(tmp_path / "drawn_plain.json")))
    assert [(p.caption, p.label) for p in prompts] == [(i.caption, i.label) for i in read_all["drawn_plain"]]


def test_a_picture_lies_on_white_and_is_flipped_only_where_that_shows_the_same_thing():
    def has_red_left(draw, **settings):
        page = Image.open(io.BytesIO(rendered(png(), draw, **settings)))
        assert page.size == (224, 224) and (draw or min(page.getpixel((2, 2))) > 200)
        row = np.asarray(page)[112].astype(int)
        return np.argmax(row[:, 0] - row[:, 2] > 150) < np.argmax(row[:, 2] - row[:, 0] > 150)

    assert has_red_left(None) and {bool(has_red_left(random.Random(n))) for n in range(9)} == {True, False}
    assert all(has_red_left(random.Random(n), flips=False) for n in range(9))
    assert all(emoji._ONE_WAY.search(name) for name in ("hand pointing left", "stop sign", "leftwards hand"))
    assert not emoji._ONE_WAY.search("bright owl")
