"""scripts/bench.py at a tiny size: a row of each cycle and step beside its floor, and the table in its page."""

import re

from draftsmith.scripts import bench

PAGE = "# A\n\n<!-- bench -->\n\nold\n\n| a |\n\n## B\n\nText.\n"


def test_every_row_is_measured_and_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(bench, "PAGE", page)
    monkeypatch.setattr(bench, "LENGTHS", (16,))
    monkeypatch.setattr(bench, "COMMANDS", (["--help"],))
    bench.main(["--sizes", "tiny", "--count", "2", "--tokens", "6", "--write"])
    head, _, _, *rows = capsys.readouterr().out.splitlines()[:20]
    assert re.match(r"`scripts/bench.py --sizes tiny .*`: .*, \d+ thread\(s\), load .*, 20\d\d-\d\d-\d\d, commit", head)
    cells = [row.strip("| ").split(" | ") for row in rows[1:]]
    assert [row[0].split(",")[0] for row in cells] == [
        "cycle of EAGLE-3", "cycle of EAGLE-3", "cycle of DFlash", *["cycle of EAGLE-3 in a window of 512"] * 2,
        "training step of EAGLE-3", "training step of DFlash", "start of `draftsmith --help`",
    ]  # fmt: skip
    assert all(float(row[1].split()[0]) > 0 for row in cells)
    assert all(0 < float(row[2].split()[0]) < 1 for row in cells[:-1]), "products are a part of the whole"
    written = page.read_text()
    assert "old" not in written and written.endswith("\n\n## B\n\nText.\n") and rows[-1] in written
    assert bench.written(written, ["new"]).count("new") == 1


def test_passes_with_and_without_identical(monkeypatch, capsys):
    """On the CPUs that were tried every row is equal with it."""
    for key, value in {"num_hidden_layers": 2, "vocab_size": 256}.items():
        monkeypatch.setitem(bench.SIZES["SmolLM2's"], key, value)
    monkeypatch.setattr(bench, "PLACES", (150,))
    bench.main(["--identical", "--count", "1"])
    rows = capsys.readouterr().out.splitlines()[4:]
    assert [row.split(" after ")[0].strip("| ") for row in rows] == [*bench.DRAFTED]
    for row, count in zip(rows, (1, 6, 1, 7), strict=True):
        assert re.search(rf"identical: \d+\.\d\d of it, \d and {count} of {count} rows equal", row), row


def test_spread_has_median_and_quartiles():
    assert bench.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == "3.00 [2.00, 4.00]" and bench.spread([0.25]) == "0.25"
