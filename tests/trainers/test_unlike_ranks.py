"""Two ranks that were not started alike: refused by rank, key and both values, on both, before anything is written."""

import os
from pathlib import Path

import pytest
from ranks_run import run_ranks

# Rank 1 gets other words, and may find itself at another commit or version.
SCRIPT = """
import os, sys
from draftsmith.recipes import alike
from draftsmith.recipes.cli import main

words = sys.argv[1:]
if os.environ["RANK"] == "1":
    words += os.environ["WORDS"].split()
    if commit := os.environ.get("COMMIT"):
        alike.commit = lambda: commit
    if version := os.environ.get("VERSION"):
        alike.packages = lambda: alike.provenance_packages() | {"torch": version}
sys.exit(main(words))
"""
STAGES = "stages=[world,target]"


def unlike(folder: Path, *words: str, output: str = "run", more: tuple[str, ...] = (), **environment: str):
    """What both ranks say and how they end, and what lies in the run's folder."""
    recipe = Path(__file__).parents[2] / "scripts" / "attempts" / "lvlm.yaml"
    arguments = [f"recipe={recipe}", f"output={folder / output}", *more]
    result = run_ranks(2, SCRIPT, *arguments, cwd=folder, WORDS=" ".join(words), OMP_NUM_THREADS="1", **environment)
    files = [path.name for path in (folder / output).rglob("*") if path.is_file() and ".locks" not in path.parts]
    return result, files


CASES = {
    "seed": (["seed=7"], "seed is 0 on rank 0 and 7 on rank 1"),
    "lr": (["stages.target.optim.lr=0.05"], "stages.target.optim.lr is 0.001 on rank 0 and 0.05 on rank 1"),
    "batch": (["stages.target.batch_size=2"], "stages.target.batch_size is 4 on rank 0 and 2 on rank 1"),
    "steps": (["stages.target.steps=3"], "stages.target.steps is 4 on rank 0 and 3 on rank 1"),
    "log_every": (["stages.target.log_every=3"], "stages.target.log_every is 1 on rank 0 and 3 on rank 1"),
    "stages": (["stages=[world]"], 'stages= is ["target", "world"] on rank 0 and ["world"] on rank 1'),
    "restart": (["restart=world"], 'restart= is null on rank 0 and "world" on rank 1'),
}


@pytest.mark.parametrize("case", CASES)
def test_another_word_on_one_rank_is_refused_on_both(tmp_path, case):
    words, said = CASES[case]
    result, files = unlike(tmp_path, *words, more=(STAGES,))
    for code, text in result:
        assert code == 2 and said in text and "Traceback" not in text, text
    assert files == [], "nothing was written"
