"""The sweep of published drafts over targets: it loads, is whole, and says at full size what it would do."""

import itertools

import pytest
from draftsmith.recipes.cli import main
from draftsmith.recipes.load import load
from draftsmith.recipes.plan import plan

TARGETS = {
    "llava15_7b": "llava-hf/llava-1.5-7b-hf",
    "llava15_13b": "llava-hf/llava-1.5-13b-hf",
    "next_7b": "llava-hf/llava-v1.6-vicuna-7b-hf",
    "next_13b": "llava-hf/llava-v1.6-vicuna-13b-hf",
}
DRAFTS = {"1.5-68M": "mjbooo/lvlm68m", "1.5-160M": "mjbooo/lvlm160m-bf16", "OV-68M": "mjbooo/lvlm68m-ov"}


@pytest.fixture
def stages():
    return load(["recipe=tabed-sweep"]).recipe.stages


def test_every_pair_is_measured_alike(stages):
    assert {name: stage.target.path for name, stage in stages.items()} == TARGETS
    for stage in stages.values():
        assert {name: draft.path for name, draft in stage.drafters.items()} == DRAFTS
        assert list(stage.methods) == ["M", "T", "C", "P", "MT", "MT*", "MTCP", "MTCP*"]
        for name, method in stage.methods.items():
            assert method.drafters == list(DRAFTS) and (
                method.mode is None if name == "M" else method.mode.name == name
            )
            assert (method.tree.kind, method.tree.gamma, method.rule.kind) == ("chain", 5, "exact")
        assert (stage.max_new_tokens, stage.temperatures) == ([128], [0.0])
        suite = stage.benchmarks["suite"]
        assert suite.data.path == "hub" and suite.turns == 2
        assert (suite.convention, suite.transcript) == ("released", "released")
        # As released: no system sentence, and NeXT without its tiles.
        assert stage.format.system == "" and stage.format.image_join == "hf"
        assert stage.target.anyres is (False if "next" in stage.target.kind else None)
    pairs = list(itertools.product(DRAFTS, TARGETS))
    assert len(pairs) == 12


def test_nothing_is_trained_and_no_stage_is_needed():
    loaded = load(["recipe=tabed-sweep"])
    assert all(planned.inputs == {} for planned in plan(loaded.recipe, loaded.path))


def test_dry_run_at_full_size_without_a_network(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe=tabed-sweep", "dry_run=true"]) == 0
    told = capsys.readouterr().out
    assert "requests 860 of the first turn and 3,960 of the second" in told
    # 7B and 13B Vicuna with LLaVA's 32,064 rows; NeXT has one newline vector more than 1.5.
    for count in ("7,063,427,072", "13,351,494,656", "7,063,431,168", "13,351,499,776"):
        assert count in told
    assert not list(tmp_path.iterdir())


def test_a_limit_counts(capsys):
    assert main(["recipe=tabed-sweep", "dry_run=true", "stages.next_7b.benchmarks.suite.data.max_samples=5"]) == 0
    # 9 sets, 7 of which have 6 second turns.
    assert "requests 45 of the first turn and 210 of the second" in capsys.readouterr().out


def test_the_header_says_where_the_article_contradicts_itself():
    header = "".join(line for line in load(["recipe=tabed-sweep"]).path.read_text().splitlines() if "#" in line)
    assert "the caption of table 13 names LLaVA-OV 68M" in header and "its cells say LLaVA-1.5 160M" in header
