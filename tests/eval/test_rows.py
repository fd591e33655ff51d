"""One row of one request: what the loop measured, and its JSON form."""

import dataclasses
import json
import math
import random

import pytest
from draftsmith.eval.loop import Cycle, Generation
from draftsmith.eval.measured_rows import PER_CYCLE, PLAIN, cycles_of, frame, measure, read_rows, time_parts, write_rows
from fails import fails_with

from .rows import a_row, random_rows

CELL = {"benchmark": "b", "method": "M", "request": "r", "temperature": 0.0, "max_new_tokens": 64, "medium": "text"}


def generation(seed: int, tokens=(5, 6, 7, 8), cycles=3) -> Generation:
    rng = random.Random(seed)
    made = [Cycle(4, 9, 2, 3, *(rng.random() for _ in range(3)), rule_s=rng.random()) for _ in range(cycles)]
    return Generation(list(tokens), made, rng.random(), rng.random(), 9.0 + rng.random(), "eos", 0.01, 0.02)


def test_a_row_has_medians_over_repeats_and_the_first_ones_tokens():
    plain, drafted = [generation(n) for n in range(3)], [generation(n) for n in range(3, 6)]
    row = measure(plain, drafted, **CELL, drafter="finetune", mode="M", visual_tokens=576, details={"num_held": 3})
    assert [*row.tokens] == [5, 6, 7, 8] and row.plain_tokens == 4 and row.identical and row.stop == "eos"
    assert [list(getattr(row, name)) for name in PER_CYCLE[1:]] == [[4] * 3, [9] * 3, [2] * 3, [3] * 3]
    assert row.num_cycles == 3 and row.num_emitted == 9
    assert row.total_s == sorted(g.total_s for g in drafted)[1]
    assert row.prefill_s == sorted(g.prefill_s + g.draft_prefill_s for g in drafted)[1]
    assert row.draft_s == pytest.approx(row.draft_cycle_s / 4)
    assert (row.parts_s["token_pruning"], row.parts_s["captioning"]) == (0.01, 0.02) and row.details == {"num_held": 3}
    parts = time_parts(drafted[0])
    assert sum(parts.values()) == pytest.approx(drafted[0].total_s)


def test_one_repeat_with_other_tokens_is_not_identical():
    assert not measure([generation(0)], [generation(1), generation(2, (5, 6, 7, 9))], **CELL).identical


def test_a_request_that_ends_with_its_first_token_has_no_cycle():
    row = measure([generation(0, (2,), 0)], [generation(1, (2,), 0)], **CELL)
    assert row.num_cycles == 0 and row.cycle_s == 0.0 and row.draft_s == 0.0


def test_plain_decoding_is_a_row_too():
    plain = generation(0)
    cycles = [dataclasses.replace(c, num_drafted=0, num_nodes=0, num_accepted=0, num_emitted=1) for c in plain.cycles]
    plain = dataclasses.replace(plain, cycles=cycles)
    row = measure([plain], [plain], **(CELL | {"method": PLAIN}))
    assert [*row.emitted] == [1, 1, 1] and row.draft_s == 0.0 and row.identical


def test_rows_come_back_from_their_file(tmp_path):
    rows = [*random_rows(5), a_row(request="x", details={"sage": [{"entropy": 0.5}]}, parts_s={"drafting": 0.1})]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    write_rows(tmp_path / "rows.jsonl", [a_row(draft_s=math.nan, details={"tau": math.nan})])
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert math.isnan(row.draft_s) and row.details == {"tau": None}


def test_a_row_of_another_version_is_refused_with_its_file(tmp_path):
    line = a_row().to_json()
    for other in (
        line | {"version": 0},
        {k: v for k, v in line.items() if k != "nodes"},
        {"request": "r", "cycles": 3},
    ):
        path = tmp_path / "rows-0.jsonl"
        path.write_text(json.dumps(other) + "\n")
        told = fails_with(r"rows-0\.jsonl", read_rows, path)
        assert "version 2" in str(told) and "restart=" in str(told)


def test_a_frame_has_what_the_rows_say():
    rows = [*random_rows(5), a_row(accepted=(), request="none", temperature=1.0)]
    table = frame(rows)
    assert frame(table) is table and table.request.tolist() == [row.request for row in rows]
    for name in PER_CYCLE:
        assert cycles_of(table)[name].tolist() == [value for row in rows for value in getattr(row, name)]
    assert table.num_cycles.tolist() == [row.num_cycles for row in rows]
    assert table.num_nodes.tolist() == [sum(row.nodes) for row in rows]
    assert table.decode_s.tolist() == [row.total_s - row.prefill_s for row in rows]
