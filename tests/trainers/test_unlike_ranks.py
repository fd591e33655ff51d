"""Two ranks that were not started alike: refused by rank, key and both values, on both, before anything is written."""

import json
import os
from pathlib import Path

import pytest
from draftsmith.recipes.config import alike
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from fails import fails_with
from ranks_run import run_ranks

# Rank 1 gets other words, and may find itself at another commit or version.
SCRIPT = """
import json, os, sys
from draftsmith.recipes.config import alike
from draftsmith.recipes.commands.cli import main

words = sys.argv[1:]
if os.environ["RANK"] == "1":
    words += os.environ.get("words", "").split()
    for name in ("commit", "packages"):
        if name in os.environ:
            setattr(alike, name, lambda name=name: json.loads(os.environ[name]))
sys.exit(main(words))
"""


CASES = {
    "seed": ({"words": "seed=7"}, "seed is 0 on rank 0 and 7 on rank 1"),
    # Of keys that no fingerprint has: ranks would wait for one another for ever.
    "saved": ({"words": "stages.target.checkpoints.every=3"}, "stages.target.checkpoints.every is 2 on rank 0 and 3"),
    "stages": ({"words": "stages=[world]"}, 'stages= is ["target", "world"] on rank 0 and ["world"] on rank 1'),
    "restart": ({"words": "restart=world"}, 'restart= is null on rank 0 and "world" on rank 1'),
    "commit": ({"commit": json.dumps("e" * 40)}, f'on rank 0 and "{"e" * 12}" on rank 1'),
}


@pytest.mark.parametrize(("more", "said"), CASES.values(), ids=CASES)
def test_what_one_rank_has_otherwise_is_refused_on_both_before_anything_is_written(tmp_path, more, said):
    recipe = Path(__file__).parents[2] / "tests" / "tools" / "attempts" / "lvlm.yaml"
    arguments = [f"recipe={recipe}", f"output={tmp_path / 'run'}", "stages=[world,target]"]
    result = run_ranks(2, SCRIPT, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1", **more)
    for code, text in result:
        assert code == 2 and "\nerror: the ranks of this run were not started alike: " in f"\n{text}", text
        assert said in text and "Traceback" not in text and text.count("error: ") == 1, text
    left = [path for path in tmp_path.rglob("*") if path.is_file() and ".locks" not in path.parts]
    assert left == [], "nothing was written"


def values(**more):
    return {key: (json.dumps(value), str(hash(str(value)))) for key, value in ({"seed": 0} | more).items()}


def refusal(*every, unfinished=("target",)):
    caught = fails_with("", alike._compare, every, unfinished, error=alike.Unlike)
    return caught.problem.partition(": ")[2]


def test_data_that_only_finished_stages_read_may_lie_on_one_node():
    here, there = values(**{"stage target: data file 1": "a"}), values(**{"stage target: data file 1": "absent"})
    assert refusal(here, there, here) == 'stage target: data file 1 is "a" on rank 0 and 1 more, and "absent" on rank 1'
    alike._compare([here, there], unfinished=["another"])


def test_a_damaged_record_of_a_restarted_stage_stops_no_rank(tmp_path, monkeypatch):
    for name, answer in {"world_size": lambda: 2, "gather": lambda value: [value] * 2}.items():
        monkeypatch.setattr(alike.ranks, name, answer)
    monkeypatch.setattr(alike.ranks, "on_main", lambda work, *arguments: work(*arguments))
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "done.json").write_text("{")

    def check(*words):
        loaded = load(["recipe=demo/lvlm", f"output={tmp_path}", *words])
        alike.check_alike(loaded, plan(loaded.recipe, loaded.path))

    check("restart=world")
    fails_with("not valid JSON", check)


def test_copies_of_a_large_file_on_each_node_are_alike(tmp_path):
    """Of more than 64 MiB an identity has the time of writing, which `rsync` and downloads give each copy anew."""
    file = tmp_path / "large.json"
    loaded = load(["recipe=llava15-68m", f"stages.pretrain.data.path={file}"])

    def facts(size: int, time: int):
        with file.open("wb") as content:
            content.truncate(size)
        os.utime(file, (time, time))
        return alike.started_with(loaded), {one.name: one.fingerprint for one in plan(loaded.recipe, loaded.path)}

    size = (64 << 20) + 1
    (first, prints), (copy, later), (other, _) = facts(size, 1), facts(size, 2), facts(size + 1, 2)
    assert first == copy and prints != later, "a run that goes on still sees the time"
    assert "stage pretrain: data file 1 is" in refusal(first, other, unfinished=("pretrain",))


def test_a_fingerprint_is_told_where_no_key_says_what_differs():
    one, other = (values(**{"stage target: its fingerprint": text}) for text in "ab")
    assert refusal(one, other).startswith("stage target: its fingerprint is")
    assert refusal(one, other | values(seed=3)) == "seed is 0 on rank 0 and 3 on rank 1"


def test_a_node_where_git_does_not_answer_is_like_the_others():
    known = values(**{alike._COMMIT: "a"})
    alike._compare([known, values(), known], unfinished=[])
    assert "the commit" in refusal(known, values(), values(**{alike._COMMIT: "b"}))
    assert refusal(values(), values(extra=1)) == "extra is not set on rank 0 and 1 on rank 1"


def test_two_secrets_that_are_shown_alike_are_not_alike(tmp_path):
    def started(path):
        loaded = load(["recipe=demo/lvlm", f"target.revision={path}", f"output={tmp_path}"])
        return alike.facts(loaded, [])

    one, other = started("hf_" + "a" * 34), started("hf_" + "b" * 34)
    assert "aaaaaa" not in str(one) and one["target.revision"] != other["target.revision"]
    assert refusal(one, other).count("<hidden>") == 2


def test_trackers_and_readers_of_data_are_a_ranks_own(tmp_path):
    def started(*words):
        return alike.facts(load(["recipe=demo/lvlm", f"output={tmp_path}", *words]), [])

    alike._compare([started(), started("stages.finetune.num_workers=3", "tracking.wandb.project=x")], [])
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    alike._compare([started(), started(f"output={link}")], [])
