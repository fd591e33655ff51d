"""The sweep of published drafts over targets: it loads, is whole, and says at full size what it would do."""

import pytest
from command_line import prints
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan

TARGETS = {"llava15_7b": "llava-hf/llava-1.5-7b-hf", "llava15_13b": "llava-hf/llava-1.5-13b-hf",
           "next_7b": "llava-hf/llava-v1.6-vicuna-7b-hf", "next_13b": "llava-hf/llava-v1.6-vicuna-13b-hf"}  # fmt: skip
BF16 = "1.5-160M"
DRAFTS = {"1.5-68M": "mjbooo/lvlm68m", "1.5-160M": "mjbooo/lvlm160m-bf16", "OV-68M": "mjbooo/lvlm68m-ov"}


@pytest.fixture
def stages():
    return load(["recipe=tabed-sweep"]).recipe.stages


def test_every_pair_is_measured_alike(stages):
    released = {name: path for name, path in DRAFTS.items() if name != BF16}
    assert {name: stage.target.path for name, stage in stages.items()} == TARGETS | {
        f"{name}_bf16": path for name, path in TARGETS.items()
    }
    for stage_name, stage in stages.items():
        drafts = {BF16: DRAFTS[BF16]} if stage_name.endswith("_bf16") else released
        assert {name: draft.path for name, draft in stage.drafters.items()} == drafts
        assert list(stage.methods) == ["M", "T", "C", "P", "MT", "MT*", "MTCP", "MTCP*"]
        for name, method in stage.methods.items():
            assert method.names == [*drafts] and (method.mode is None if name == "M" else method.mode.name == name)
            assert (method.tree.kind, method.tree.gamma, method.rule.kind) == ("chain", 5, "exact")
        assert (stage.max_new_tokens, stage.temperatures) == ([128], [0.0])
        suite = stage.benchmarks["suite"]
        assert suite.data.path == "hub" and suite.turns == 2
        assert (suite.convention, suite.transcript) == ("released", "released")
        # As released: no system sentence, and NeXT without its tiles.
        assert stage.format.system == "" and stage.format.image_join == "hf"
        assert stage.target.anyres is (False if "next" in stage.target.kind else None)
        # Figures 3 and 4: weights over time of the ensembles, on requests of every set.
        assert stage.record_weights == 2
    pairs = {(draft, stage.target.path) for stage in stages.values() for draft in stage.drafters}
    assert pairs == {(draft, target) for draft in DRAFTS for target in TARGETS.values()} and len(pairs) == 12


def test_precisions_are_the_released_ones(stages):
    """float16 for drafts and targets; the 160M draft was released for bfloat16 everywhere."""
    for name, stage in stages.items():
        wanted = "bfloat16" if name.endswith("_bf16") else "float16"
        assert stage.target.dtype == wanted
        assert {draft.dtype for draft in stage.drafters.values()} == ({wanted} if wanted == "bfloat16" else {None})


def test_nothing_is_trained_and_no_stage_is_needed():
    loaded = load(["recipe=tabed-sweep"])
    assert all(planned.inputs == {} for planned in plan(loaded.recipe, loaded.path))


def test_dry_run_at_full_size_without_a_network(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    told = prints(capsys, ["recipe=tabed-sweep", "dry_run=true"])
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
