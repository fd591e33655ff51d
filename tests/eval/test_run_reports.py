"""What an evaluation measured, read back from its report."""

import json

import pytest
from draftsmith.eval import tables
from draftsmith.eval.report import build, write
from draftsmith.eval.run_reports import COLUMNS, cells, overview, readable
from draftsmith.eval.summary import summarize

from .rows import random_rows, report_of


@pytest.mark.parametrize(("changes", "where"), [
    ([{}], ["pictures"]),
    ([{"temperature": 0.0}, {"temperature": 1.0}], ["pictures, T = 0", "pictures, T = 1"]),
    ([{"budget": "25k", "max_new_tokens": n} for n in (32, 64)],
     ["pictures at 25k, 32 new", "pictures at 25k, 64 new"]),
    ([{"benchmark": "POPE", "turn": "first"}], ["POPE (first)"]),
])  # fmt: skip
def test_every_targets_report_becomes_the_same_rows(changes, where):
    result = cells(report_of(*changes))
    assert [cell.where for cell in result] == where
    for cell in result:
        assert (cell.method, cell.requests, cell.tau, cell.tau_interval) == ("M", 12, 4.096, [3.9, 4.3])
        assert (cell.DSR, cell.ESR, cell.identical) == (1.446, 1.2, 12)
        assert len(readable(cell)) == len(COLUMNS)


def test_a_real_report_is_read_back(tmp_path):
    rows = random_rows(6)
    write(tmp_path, build(rows, about={}, methods={}), rows)
    report = json.loads((tmp_path / "report.json").read_text())
    (cell,) = cells(report)
    summary = summarize(rows)
    assert (cell.tau, cell.tau_interval, cell.DSR) == (summary.tau, [*summary.tau_interval], summary.DSR)
    assert cell.max_new_tokens == rows[0].max_new_tokens > 0, "by which leaderboards keep cells apart"
    page = "\n".join(tables.markdown(overview(cells(report))))
    assert f"| photos | M | 0 | 6 | {summary.tau:.2f} [" in page and f"| {summary.identical}/6 |" in page


def test_sampled_outputs_need_not_be_plain_decodings():
    assert readable(cells(report_of({"exact": False}))[0])[-1] is None
