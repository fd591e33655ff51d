"""The quick ways of an index against the slow obvious ones: words, records as most are, records cut at their ends."""

import json
import random

import numpy as np
import pytest
from draftsmith.data.records import records, scan
from draftsmith.data.records.record import check_record, num_learned, num_words, paths, usual_text
from small_records import talk

BLANKS = [character for character in map(chr, range(0x3001)) if character.isspace()]


def test_words_of_many_texts_are_those_of_each():
    """Each blank and each control character that is none, alone and beside characters of one to four bytes."""
    draw = random.Random(0)
    letters = [*"ab", "é", "日", "“", "😀", *map(chr, range(9)), *map(chr, range(14, 28)), "\x7f"]
    assert len(BLANKS) == 29
    for _ in range(400):
        some = draw.sample(BLANKS, 3) + draw.sample(letters, 4)
        texts = ["".join(draw.choices(some, k=draw.randint(0, 9))) for _ in range(draw.randint(0, 6))]
        assert num_words([text.encode() for text in texts]).tolist() == [len(text.split()) for text in texts], texts


TURNS = talk("<image>\nWho?", "It’s Ann.")
USUAL = {"id": "a", "image": "a.png", "conversations": TURNS}
PLAIN = talk("", "no") * 2
# What stands at a key in place of what stands there; (turn, key): in a turn.
CHANGES = [
    *[("image", value) for value in ("", None, [], ["a.png"], ["a.png", "b.png"], 3, "é.png", "\ud83d.png")],
    ("video", "a.mp4"), ("tools", []), ("tools", "none"), ("chat_template_kwargs", 3), ("id", None), ("id", 3),
    *[("conversations", value) for value in ([], None, "no", TURNS[:1], TURNS[1:], PLAIN, PLAIN * 40, [3], [[]])],
    *[((n, "from"), value) for n in (0, 1) for value in ("gpt", "system", "tool", "user", None, [])],
    *[((n, "value"), value) for n in (0, 1) for value in ("", " \n", "<image>", "two\ud83d", None, ["a"])],
    *[((n, key), value) for n in (0, 1) for key, value in (("weight", 0), ("weight", 2), ("tool_calls", 1))],
]  # fmt: skip


@pytest.mark.parametrize("image", [True, False])
def test_a_usual_record_is_one_that_nothing_is_wrong_with(image):
    """Every pair of changes: where `usual_text` answers, so would the slow way, with the same text."""
    usual, refused = 0, 0
    for first in CHANGES:
        for place, value in (first, *CHANGES):
            record = json.loads(json.dumps(USUAL))
            if not image:
                record.pop("image")
                record["conversations"][0]["value"] = "Who?"
            for at, what in (first, (place, value)):
                turn = record["conversations"] if isinstance(at, tuple) else None
                if turn is None:
                    record[at] = what
                elif isinstance(turn, list) and len(turn) > at[0] and isinstance(turn[at[0]], dict):
                    turn[at[0]] = turn[at[0]] | {at[1]: what}
            text, problem = usual_text(record), check_record(record)
            refused += problem is not None
            if text is not None:
                usual += 1
                assert problem is None, record
                assert text.decode() == " ".join(turn["value"] for turn in record["conversations"])
                assert [len(paths(record, key)) for key in ("image", "video")] == [bool(record.get("image")), 0]
                assert num_learned(record) == len(record["conversations"]) // 2
    assert usual > 30 and refused > 500
    assert usual_text("no record") is usual_text([]) is None and usual_text(USUAL) is not None


def lines_of(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


ODD = [
    USUAL | {"id": 5, "note": '}, {"id": '}, {"conversations": TURNS, "id": "other key first"},
    USUAL | {"b": [{"id": 1}, {"id": 2}]}, USUAL | {"half": "\ud83d"}, USUAL | {"nan": float("nan")},
    USUAL | {"deep": json.loads("[" * 300 + "]" * 300)}, USUAL | {"number": 10**30, "x": -0.1e-7}, "text", 3, None, [],
]  # fmt: skip


@pytest.mark.parametrize("separator", [", ", ",", ",\n", " \n,\t"])
@pytest.mark.parametrize("writing", [{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}])
def test_pieces_have_the_records_that_reading_from_end_to_end_has(tmp_path, separator, writing):
    """Whatever stands where among records that begin alike."""
    path = tmp_path / "data.json"
    for place in (0, 2, 6):
        for odd in ODD:
            rows = [USUAL | {"id": str(n)} for n in range(6)]
            rows.insert(place, odd)
            text = separator.join(json.dumps(row, **writing) for row in rows)
            path.write_text(f" [\n{text} ]\n", errors="backslashreplace")
            start, *_, stop = scan.cuts(path)
            expected, found = list(scan.entries(path)), list(scan.piece(path, start, stop))
            assert repr(found) == repr(expected) and len(found) == 7
            with open(path, "rb") as file:
                data = file.read()
            assert [repr(json.loads(data[at : at + size])) for at, size, _ in found] == [repr(row) for row in rows]


def test_most_records_are_read_the_quick_way(tmp_path, monkeypatch):
    """A list of records that begin alike is handed to the slow reader only behind its last but one."""
    path = tmp_path / "data.json"
    path.write_text(json.dumps([USUAL | {"id": str(n)} for n in range(50)]))
    slow, handed = scan._list, []
    monkeypatch.setattr(scan, "_list", lambda path, text, *more: handed.append(len(text)) or slow(path, text, *more))
    monkeypatch.setattr(records, "check_record", lambda record: pytest.fail("a usual record is checked the slow way"))
    index = records.open_records(path, tmp_path / "cache")
    assert len(index) == 50 and handed[0] < 2 * len(json.dumps(USUAL))
    assert np.array_equal(index.columns["lengths"], [4] * 50)
