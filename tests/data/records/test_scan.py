"""Each record of a list by the bytes at which it is said to lie."""

import json

import pytest
from draftsmith.data.records import scan
from small_records import talk

TURNS = talk("<image>\nWho?", "It’s Ann.")
USUAL = {"id": "a", "image": "a.png", "conversations": TURNS}


ODD = [
    USUAL | {"id": 5, "note": '}, {"id": '}, {"conversations": TURNS, "id": "other key first"},
    USUAL | {"b": [{"id": 1}, {"id": 2}]}, USUAL | {"half": "\ud83d"},
    USUAL | {"deep": json.loads("[" * 300 + "]" * 300)}, USUAL | {"number": 10**30, "x": -0.1e-7}, "text", 3, None, [],
]  # fmt: skip


@pytest.mark.parametrize("separator", [", ", ",", ",\n", " \n,\t"])
@pytest.mark.parametrize("writing", [{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}])
def test_records_lie_where_they_are_said_to(tmp_path, monkeypatch, separator, writing):
    """Whatever stands where among records that begin alike, and wherever a chunk ends."""
    monkeypatch.setattr(scan, "CHUNK", 97)
    path = tmp_path / "data.json"
    for place in (0, 2, 6):
        for odd in ODD:
            rows = [USUAL | {"id": str(n)} for n in range(6)]
            rows.insert(place, odd)
            text = separator.join(json.dumps(row, **writing) for row in rows)
            path.write_text(f" [\n{text} ]\n", errors="backslashreplace")
            found = list(scan.entries(path))
            assert len(found) == 7
            with open(path, "rb") as file:
                data = file.read()
            assert repr([value for *_, value in found]) == repr(json.loads(data))
            assert [repr(json.loads(data[at : at + size])) for at, size, _ in found] == [repr(row) for row in rows]
