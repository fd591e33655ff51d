"""Several drafts side by side: each draft's own numbers, and contrasts paired by request."""

from draftsmith.eval import by_drafter
from draftsmith.eval.measure import paired_difference, summarize

TIMES = {"plain_prefill_s": 0.1, "plain_total_s": 1.0, "plain_cycle_s": 0.02, "prefill_s": 0.1, "total_s": 0.8,
         "draft_s": 0.005, "verify_s": 0.02, "cycle_s": 0.03}  # fmt: skip


def rows(draft: str, emitted: int, beyond: bool = False) -> list[dict]:
    return [
        {"request": f"r{n}", "drafter": draft, "identical": True, "emitted": emitted + n, "cycles": 10,
         "plain_tokens": emitted + n + 1,
         "drafted": [5] * 10, "accepted": [1] * 10, "beyond_positions": beyond, **TIMES}
        for n in range(4)
    ]  # fmt: skip


RESULTS = {
    "one": {"M": rows("few", 30) + rows("many", 32), "T": rows("few", 25) + rows("many", 25)},
    "five": {"M": rows("few", 12, beyond=True) + rows("many", 30), "T": rows("few", 24) + rows("many", 25)},
}


def test_each_draft_has_its_own_numbers():
    tables = by_drafter.side_by_side(RESULTS, gamma=5)
    assert {b: {m: list(d) for m, d in modes.items()} for b, modes in tables.items()} == {
        b: {m: ["few", "many"] for m in ("M", "T")} for b in ("one", "five")
    }
    assert tables["five"]["M"]["few"] == summarize(rows("few", 12, beyond=True), gamma=5)
    assert tables["five"]["M"]["few"]["beyond_positions"] == 4 and tables["one"]["M"]["few"]["beyond_positions"] == 0
    alone = {
        b: {m: [r for r in found if r["drafter"] == "few"] for m, found in ms.items()} for b, ms in RESULTS.items()
    }
    assert by_drafter.side_by_side(alone, gamma=5) is None


def test_a_contrast_is_the_first_less_the_second_on_the_same_requests():
    found = by_drafter.contrasted(RESULTS, {"more positions": ("many", "few")})["more positions"]
    assert round(found["five"]["M"]["difference"], 6) == 1.8 and found["five"]["M"]["verdict"] == "above 0"
    assert round(found["one"]["T"]["difference"], 6) == 0 and found["one"]["T"]["verdict"] == "includes 0"
    assert found["five"]["M"]["requests"] == 4
    same = paired_difference(*([r | {"drafter": "d"} for r in rows(d, e)] for d, e in (("many", 30), ("few", 12))))
    assert found["five"]["M"]["interval"] == same["interval"]


def test_the_tables_say_what_goes_beyond_positions():
    tables = by_drafter.side_by_side(RESULTS, gamma=5)
    contrasts = by_drafter.contrasted(RESULTS, {"more positions": ("many", "few")})
    text = "\n".join(by_drafter.markdown(tables, contrasts))
    assert "| draft | mode | one | five |" in text and "| few | M | 3.15 [" in text and "(b 4/4)" in text
    assert text.count("(b ") == 1 and "| more positions | M |" in text and "+1.80 [" in text
    assert "what it changes" not in "\n".join(by_drafter.markdown(tables, {}))
