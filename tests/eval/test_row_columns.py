"""Rows held as columns against lists of rows: the same rows, groups and orders, in a sixth of the memory."""

import random
import tracemalloc

import pytest
from draftsmith.eval.measured_rows import grouped
from draftsmith.eval.report import build
from draftsmith.eval.row_columns import KEY, PER_CYCLE, Rows, read_rows, write_rows
from draftsmith.eval.summary import frames
from draftsmith.tests.eval.rows import METHODS, a_row, measured_rows

# Tokens that need 1, 2, 4 and 8 bytes, whichever come first; no cycle at all; parts of other names, or none.
ODD = [
    a_row(request="none", accepted=(), tokens=(3,)),
    a_row(request="wide", tokens=(5, 70_000, 200), parts_s={"drafting": 0.25, "others": 0.5}),
    a_row(
        request="wider", tokens=(2**40,), parts_s={"others": 0.125}, details={"sage": [{"entropy": 0.5}], "rule": "x"}
    ),
    a_row(request="small", tokens=(300, 1), identical=False, details={"beyond_positions": True}),
    a_row(request="ann", temperature=1.0, turn="first", budget="3k", drafter="b", details={"beyond_positions": 1}),
]


@pytest.fixture(scope="module")
def rows():
    some = [*measured_rows(), *ODD, *measured_rows(temperature=1.0, turn="second", drafter="few"), *ODD[::-1]]
    random.Random(0).shuffle(some)
    return some


def test_rows_read_as_a_list_of_them(rows):
    held = Rows(rows)
    assert list(held) == rows and len(held) == len(rows) and held == rows and not Rows()
    assert held[3] == rows[3] and held[-1] == rows[-1] and list(held[2:9:3]) == rows[2:9:3]
    assert [type(row.identical) for row in held] == [bool] * len(rows)
    assert [[*row.parts_s] for row in held] == [[*row.parts_s] for row in rows], "parts keep their order"
    assert held.details() == [row.details for row in rows]
    with pytest.raises(IndexError):
        held[len(rows)]


def test_rows_come_back_from_their_file_one_by_one(rows, tmp_path):
    write_rows(tmp_path / "rows.jsonl", Rows(rows))
    assert read_rows(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize("names", [("method",), ("drafter", "request"), KEY, ("temperature", "turn", "stop")])
def test_groups_are_those_of_a_list(rows, names):
    expected, found = grouped(rows, *names), Rows(rows).grouped(*names)
    assert list(found) == list(expected) and all(list(found[key]) == its for key, its in expected.items())
    assert Rows(rows).distinct(names[0]) == list(dict.fromkeys(getattr(row, names[0]) for row in rows))


def test_rows_by_a_key_keep_their_order(rows):
    """Also where a key joins several settings."""
    label = lambda row: row.benchmark + row.turn  # noqa: E731
    expected = {}
    for row in rows:
        expected.setdefault(label(row), []).append(row)
    found = Rows(rows).by(label)
    assert list(found) == list(expected) and all(list(found[key]) == its for key, its in expected.items())


def test_order_and_parts_are_those_of_a_list(rows):
    held = Rows(rows).ordered()
    in_order = sorted(rows, key=lambda row: [str(getattr(row, name)) for name in KEY])
    assert list(held) == in_order
    clips = held.where(held.has("benchmark", "clips"))
    assert list(clips) == [row for row in in_order if row.benchmark == "clips"] and not held.has("method", "none").any()
    assert list(clips.joined(held[:2])) == [*clips, *in_order[:2]]
    names = {name for row in rows for name in row.parts_s}
    assert {name: values.tolist() for name, values in held.parts().items()} == {
        name: [row.parts_s.get(name, 0.0) for row in in_order] for name in names
    }


def test_frames_have_what_the_rows_say(rows):
    requests, cycles = frames(Rows(rows))
    for name in PER_CYCLE:
        assert cycles[name].tolist() == [value for row in rows for value in getattr(row, name)]
        assert Rows(rows).sums(name).tolist() == [sum(getattr(row, name)) for row in rows]
    assert requests.num_cycles.tolist() == [row.num_cycles for row in rows]
    assert requests.decode_s.tolist() == [row.total_s - row.prefill_s for row in rows]
    assert requests.identical.dtype == bool and requests.verify_s.tolist() == [row.verify_s for row in rows]


def test_a_report_of_columns_equals_one_of_rows(rows):
    """To the last digit, whatever part of larger columns the rows are."""
    mine = [row for row in rows if row.request not in ("none", "ann")]
    held = Rows([*ODD, *mine])[len(ODD) :]
    expected, found = (build(some, about={}, methods=METHODS) for some in (mine, held))
    assert found == expected and found.to_json() == expected.to_json()


def some(count):
    """Rows of 40 cycles, made one by one."""
    draw = random.Random(0)
    for number in range(count):
        accepted = draw.choices(range(6), k=40)
        times = {"total_s": draw.random(), "prefill_s": draw.random(), "details": {"plain_is_data": number % 2 == 0}}
        yield a_row(request=f"r{number // 3}", method="MTE"[number % 3], accepted=accepted, **times)


def test_memory_of_many_rows():
    """As columns rows take less than a fifth of what they take as objects."""
    used = {}
    for kind in (list, Rows):
        tracemalloc.start()
        held = kind(some(600))
        used[kind] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(held) == 600
    assert used[Rows] < used[list] / 5, used
