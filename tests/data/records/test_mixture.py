"""Mixtures keep the records that the published code keeps, the same ones at every start, and scale by their numbers."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from braceexpand import braceexpand
from draftsmith.data.records.mixture import JsonFile, Share, are_present, expand, identities
from draftsmith.data.records.patterns import _count
from draftsmith.data.records.tars import expand_paths
from fails import fails_with
from small_records import talk

RECORDED = json.loads((Path(__file__).parents[1] / "vectors" / "lvlm" / "sampler.json").read_text())
CASES = RECORDED["yaml_mixture"]


def rows(count: int, start: int = 0) -> list[dict]:
    turns = talk("Which?", "It is picture 1.")
    return [{"id": f"t{start + n}", "conversations": turns} for n in range(count)]


def write(path: Path, count: int, start: int = 0) -> Path:
    records = rows(count, start)
    lines = "".join(json.dumps(row) + "\n" for row in records)
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(records))
    return path


def mixture(folder: Path, *entries: str, name: str = "mix.yaml") -> Path:
    path = folder / name
    path.write_text("datasets:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries))
    return path


def used(dataset) -> list[str]:
    return [dataset.record(index)["id"] for index in range(len(dataset))]


def test_patterns_are_matched_in_order_and_without_a_match_named(tmp_path):
    for name in ("part-2.json", "part-1.json", "whole[1].json"):
        write(tmp_path / name, 1)
    assert [s.source.path.name for s in expand([tmp_path / "part-*.json"])] == ["part-1.json", "part-2.json"]
    assert [s.source.path.name for s in expand([tmp_path / "whole[1].json"])] == ["whole[1].json"], "a file by its name"
    assert not are_present([tmp_path / "x-*.json"]) and identities([tmp_path / "x-*.json"]) == ["absent"]
    for pattern, told in (("x-*.json", f"'x-*.json' in {tmp_path}"), ("gone/*.json", "gone, which is no folder")):
        fails_with(re.escape(told), expand, [tmp_path / pattern])


def test_counts_of_the_published_code():
    """Except for `end:0` and `end:0%`, which keep everything there (a slice from -0) and nothing here."""
    assert len(CASES) > 100
    zero_ends = 0
    for case in CASES:
        share = Share(JsonFile(Path("a.json")), case["strategy"] or "all")
        picked = share.pick(case["rows"], seed=0)
        if case["strategy"] in ("end:0", "end:0%"):
            assert case["count"] == case["rows"] and not len(picked)
            zero_ends += 1
            continue
        assert len(picked) == share.count(case["rows"]) == case["count"], case
        assert len(set(picked.tolist())) == len(picked) and all(0 <= n < case["rows"] for n in picked)
        if "first_id" in case:
            assert (picked[0], picked[-1]) == (case["first_id"], case["last_id"])
            assert np.array_equal(picked, np.arange(case["first_id"], case["last_id"] + 1))
    assert zero_ends > 5


def test_random_is_reproducible_and_independent_of_the_global_generators():
    share = Share(JsonFile(Path("a.json")), "random:30%")
    random.seed(1), np.random.seed(1)
    first = share.pick(1000, seed=0)
    random.seed(2), np.random.seed(2)
    state = random.getstate(), np.random.get_state()[1].tolist()
    assert np.array_equal(share.pick(1000, seed=0), first)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state, "nothing was drawn from them"
    others = [
        share.pick(1000, seed=1),
        Share(JsonFile(Path("b.json")), "random:30%").pick(1000, seed=0),
        Share(JsonFile(Path("a.json")), "random:30%", repeat=1).pick(1000, seed=0),
    ]
    for other in others:
        assert len(other) == 300 and not np.array_equal(other, first)
    moved = Share(JsonFile(Path("elsewhere/a.json")), "random:300")
    assert np.array_equal(moved.pick(1000, seed=0), first), "folders may move"
    # Pinned: whatever changes these numbers changes every mixture that was ever trained on.
    assert share.pick(20, seed=0).tolist() == [5, 9, 12, 15, 17, 18]


def test_random_draws_evenly():
    counts = Counter(
        n for seed in range(200) for n in Share(JsonFile(Path("a.json")), "random:5").pick(50, seed=seed).tolist()
    )
    assert len(counts) == 50 and max(counts.values()) < 45


def test_several_files_json_and_jsonl(folder, open_data):
    write(folder / "a.json", 10)
    write(folder / "b.jsonl", 10, 10)
    (folder / "sub").mkdir()
    write(folder / "sub" / "a.json", 10, 20)
    path = mixture(folder, 'json_path: a.json, sampling_strategy: "first:2"',
                   'json_path: b.jsonl, sampling_strategy: "end:15%"', "json_path: sub/a.json, sampling_strategy: null",
                   'json_path: a.json, sampling_strategy: "end:0"',
                   f'json_path: {folder / "a.json"}, sampling_strategy: "end:1"')  # fmt: skip
    dataset = open_data(path)
    assert used(dataset) == ["t0", "t1", "t18", "t19", *(f"t{n}" for n in range(20, 30)), "t9"]
    assert dataset.lengths.tolist() == [-5] * 15
    assert used(open_data(path, folder / "b.jsonl"))[15:] == [f"t{n}" for n in range(10, 20)], "beside plain files"
    assert used(open_data(path, max_samples=3)) == ["t0", "t1", "t18"]


def test_lengths_are_the_published_ones(folder, open_data):
    """Words of all turns, however they are separated; negative without a picture."""
    cases = RECORDED["modality_word_lengths"]
    written = [{"id": str(n)} | case["sample"] for n, case in enumerate(cases)]
    (folder / "words.json").write_text(json.dumps(written))
    assert open_data(folder / "words.json").lengths.tolist() == [case["length"] for case in cases] == [8, -3, 8]


def test_a_drawn_mixture_is_the_same_at_every_start_and_has_its_own_seed(folder, open_data):
    write(folder / "a.json", 60)
    path = mixture(folder, 'json_path: a.json, sampling_strategy: "random:20"',
                   'json_path: a.json, sampling_strategy: "random:20"')  # fmt: skip
    first = used(open_data(path))
    random.seed(3)
    assert used(open_data(path)) == first
    assert set(first[:20]) != set(first[20:]), "a file that stands twice is drawn from twice"
    assert used(open_data(path, mixture_seed=1)) != first


def test_brace_patterns(folder, open_data):
    for number, name in enumerate(("a", "b", "x{y}")):
        write(folder / f"{name}.json", 2, 10 * number)
    assert used(open_data(folder / "{a,b}.json")) == ["t0", "t1", "t10", "t11"]
    assert used(open_data(folder / "x{y}.json")) == ["t20", "t21"], "a file of that very name"
    path = mixture(folder, '"json_path": "{b,a}.json", sampling_strategy: "first:1"')
    assert used(open_data(path)) == ["t10", "t0"], "the strategy is each file's"
    fails_with(r"braces that do not expand", expand, [folder / "{a,b.json"])


def test_a_broken_record_that_takes_no_part_is_no_error(folder, open_data):
    records = rows(10)
    records[7]["conversations"] = []
    (folder / "a.json").write_text(json.dumps(records))
    assert len(open_data(mixture(folder, 'json_path: a.json, sampling_strategy: "first:5"'))) == 5
    fails_with(r"no conversations", open_data, mixture(folder, 'json_path: a.json, sampling_strategy: "end:5"'))
    kept = open_data(mixture(folder, 'json_path: a.json, sampling_strategy: "end:5"'), on_error="skip")
    assert used(kept) == ["t5", "t6", "t8", "t9"], "a share counts records, not usable ones, as in the published code"


BAD = {
    "no file": ("json_path: none.json", "entry 2.*none.json", "never released"),
    "typing mistake": ("json_path: a.json, sampling_stratgy: all", "entry 2", "sampling_strategy"),
    "unknown strategy": ('json_path: a.json, sampling_strategy: "last:5"', "entry 2.*a.json", "first:500"),
    "half a record": ('json_path: a.json, sampling_strategy: "first:0.5%"', "entry 2", "whole|count or a percentage"),
    "more than all": ('json_path: a.json, sampling_strategy: "first:150%"', "entry 2", "0 to 100"),
    "negative": ('json_path: a.json, sampling_strategy: "end:-3"', "entry 2", "count"),
    "a blank behind the colon": ("json_path: a.json, sampling_strategy: {first: 5}", "entry 2", "first:500"),
    **{
        f"strategy {no}": (f"json_path: a.json, sampling_strategy: {no}", "entry 2.*a.json", "first:500")
        for no in ("0", '""', "false", "[]", "{}")
    },
    "no path": ("sampling_strategy: all", "entry 2", "json_path"),
}


@pytest.mark.parametrize(("entry", "where", "hint"), BAD.values(), ids=BAD)
def test_a_bad_entry_is_named_with_its_file_and_hint(folder, entry, where, hint):
    write(folder / "a.json", 3)
    path = mixture(folder, "json_path: a.json", entry)
    caught = fails_with("", expand, [path])
    assert re.search(rf"{re.escape(str(path))}, {where}", caught.where), caught.where
    assert re.search(hint, caught.hint), caught.hint


def test_all_missing_files_are_named_at_once(folder):
    write(folder / "a.json", 3)
    path = mixture(folder, "json_path: b.json", "json_path: a.json", "json_path: c.json")
    caught = fails_with(r"2 of 3 data files.*missing", expand, [path])
    assert "entry 1" in caught.where and "entry 3" in caught.where and "entry 2" not in caught.where


@pytest.mark.parametrize("text", ["", "[]", "datasets: []", "datasets: 3", "a: 1", "datasets:\n- json_path: [", "x"])
def test_what_is_no_mixture(folder, text):
    path = folder / "mix.yaml"
    path.write_text(text)
    caught = fails_with("", expand, [path])
    assert str(path) in caught.where and caught.hint


def test_identities_cover_the_mixture_and_its_files(folder, open_data):
    write(folder / "a.json", 3), write(folder / "b.json", 3)
    path = mixture(folder, "json_path: a.json", "json_path: b.json")
    first = identities([path])
    assert identities([path]) == first and open_data(path).identity() == open_data(path).identity()
    whole = open_data(path).identity()
    write(folder / "b.json", 4)
    second = identities([path])
    mixture(folder, "json_path: a.json", 'json_path: b.json, sampling_strategy: "end:2"')
    third = identities([path])
    assert len({tuple(result) for result in (first, second, third)}) == 3
    assert open_data(path).identity() != whole
    (folder / "b.json").unlink()
    assert "absent" in identities([path]) and identities([folder / "none.yaml"]) == ["absent"]
    assert are_present([folder / "a.json"]) and not are_present([path]) and not are_present([folder / "none.yaml"])


def test_millions_of_records_by_their_numbers():
    """8 bytes for each record that is drawn, and no record read."""
    picked = Share(JsonFile(Path("a.json")), "random:50%").pick(2_000_000, seed=0)
    assert picked.nbytes == 8_000_000 and np.all(np.diff(picked) > 0)


@pytest.mark.parametrize("name", ["{000..999999999}", "{0..9}" * 12, "{a,b}" * 30, "{{a,b},{0..999999}}"])
def test_braces_are_bounded(tmp_path, name):
    """Counted before they are made: the names of a short line would fill the memory."""
    for names in (lambda: expand([tmp_path / f"{name}.json"]), lambda: expand_paths(str(tmp_path / f"{name}.tar"))):
        fails_with(r"braces that do not expand.* names, and at most 200,000 are read", names)


def test_files_of_several_names_are_bounded_together(tmp_path):
    fails_with(r"more than 200,000 files", expand, [tmp_path / f"{n}{{0..99999}}.json" for n in range(3)])


@pytest.mark.parametrize(
    "name", ["a{0..9}", "{a,b{0..3}}x", "{00..41}-{a..c}", "{a}", "{a,{b,c},d}{1..10..3}", "{}", "{a,}", "{-3..3}"]
)
def test_braces_are_counted_as_they_expand(name):
    assert _count(name) == len([*braceexpand(name)])
