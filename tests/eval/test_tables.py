"""Tables as data: formats, marks, and the one writer."""

import json

import pytest
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.eval.tables import Column, Table, best, markdown, text

TABLE = Table(
    "Sets",
    (text("method"), Column("tau", kind="interval", group="POPE"), Column("DSR", unit="x", group="POPE"),
     Column("identical", kind="count")),
    ((PLAIN, None, 9.0, None), ("M", (2.5, 2.0, 3.0), 1.5, (3, 4)), ("T", (2.0, 1.5, 2.5), 1.504, (4, 4))),
    source="Sparrow, table 2", note="Of two sets.", compared=(), footnotes=("a note",),
)  # fmt: skip


def test_markdown():
    assert markdown(TABLE) == [
        "## Sets", "",
        "| method | POPE tau | POPE DSR | identical |",
        "| --- | ---: | ---: | ---: |",
        "| plain decoding | - | 9.00x | - |",
        "| M | **2.50 [2.00, 3.00]** | 1.50x | 3/4 |",
        "| T | <u>2.00 [1.50, 2.50]</u> | 1.50x | 4/4 |",
        "", 
        "Of two sets. Bold is the best value of a column, underlined the second best. "
        f"{TABLE.on_tau()} Layout as in Sparrow, table 2.", "", "- a note", "",
    ]  # fmt: skip


def test_json_has_columns_with_formats_and_plain_values():
    data = json.loads(json.dumps(TABLE.to_json()))
    assert data["columns"][2] == {"name": "DSR", "format": ".2f", "unit": "x", "kind": "number", "group": "POPE",
                                   "ranked": True}  # fmt: skip
    assert data["rows"][1] == ["M", [2.5, 2.0, 3.0], 1.5, [3, 4]] and data["source"] == "Sparrow, table 2"
    assert TABLE.column("POPE DSR") == [9.0, 1.5, 1.504]


@pytest.mark.parametrize(("column", "value", "printed"), [
    (Column("a", ".0%"), 0.256, "26%"),
    (Column("a", "+.2f", kind="interval"), (0.5, -0.1, 1.1), "+0.50 [-0.10, 1.10]"),
    (Column("a", ",.0f"), 25089.0, "25,089"),
    (Column("a", "d"), 12, "12"),
    (Column("a"), None, "-"),
    (text("a"), "b", "b"),
])  # fmt: skip
def test_formats(column, value, printed):
    assert column.shown(value) == printed


def test_best_and_second_best():
    # 2.00 and 2.004 print alike; so do the two seconds.
    assert best([2.0, 2.004, 1.9, 1.0]) == ["best", "best", "second", ""]
    assert best([None, 1.0, 2.0, 2.0]) == ["", "second", "best", "best"]
    assert best([1.0, 1.0]) == ["", ""] and best([(2.0, 1, 3), (3.0, 1, 3)]) == ["second", "best"]


def test_lines_are_compared_within_a_column():
    rows = (("68M", "M", 2.0), ("68M", "T", 1.5), ("160M", "M", 3.0), ("160M", "T", 4.0))
    table = Table("", (text("draft"), text("method"), Column("POPE")), rows, compared=("draft",))
    assert [marks[2] for marks in table.marks()] == ["best", "second", "second", "best"]
    cost = Table("", (text("draft"), Column("T_q/T_p", ranked=False)), (("a", 1.0), ("b", 2.0)), compared=())
    assert cost.marks() == [["", ""], ["", ""]]
    assert markdown(table)[0].startswith("| draft")
