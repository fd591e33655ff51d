"""The `cache` stage by two processes side by side: one is killed, one alone meets a picture that is missing."""

from pathlib import Path

import yaml
from draftsmith.data.shards.shards import shard_path
from ranks_run import run_ranks
from states_run import cached, synthetic

# Rank 1 ends, as `kill -9` ends it, when it is about to write the shard that the environment names.
SCRIPT = """
import os, signal, sys
from draftsmith.core import ranks
from draftsmith.recipes.commands.cli import main
from draftsmith.trainers.serve import states_builder as build

real = build.Builder.write

def write(builder, index, *rest):
    if ranks.rank() == 1 and str(index) == os.environ.get("DIES_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    real(builder, index, *rest)

build.Builder.write = write
sys.exit(main(sys.argv[1:]))
"""


def run(made, output: Path, **more: str) -> list[tuple[int, str]]:
    """(exit code, what was said) of both ranks."""
    recipe = {
        "target": {"kind": "llava", "path": str(made.folder / "target")},
        "drafter": {"kind": "sparrow"},
        "stages": {
            "cache": {
                "kind": "cache", "data": made.data, "batch_size": 3,
                "states": {"shard_bytes": 20_000, "measured_samples": 4},
            },
        },
        "output": str(output),
    }  # fmt: skip
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe))
    return run_ranks(2, SCRIPT, f"recipe={path}", cwd=output.parent, **more)


def test_two_ranks_one_of_them_killed_write_what_one_does(tmp_path):
    made, output = synthetic(tmp_path / "world"), tmp_path / "run"
    alone = cached(made, tmp_path / "alone").folder / "states"
    count = len(list(alone.glob("shard-*")))
    assert count >= 6
    (waited, _), (killed, _) = run(made, output, DIES_AT="5")
    assert killed == -9 and waited != 0, "rank 0 does not go on without its peer"
    states = output / "cache" / "states"
    before = {path.name: path.stat().st_mtime_ns for path in states.glob("shard-*")}
    assert {shard_path(states, index).name for index in (0, 1, 2, 3, 4)} <= before.keys()
    assert shard_path(states, 5).name not in before and not (states / "manifest.json").exists()
    result = run(made, output)
    assert [code for code, _ in result] == [0, 0], result
    assert {path.name: path.stat().st_mtime_ns for path in states.glob("shard-*")}.items() >= before.items()
    # In the recipe's own words the target's section says more; what was computed is the same.
    mine, theirs = (
        {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))} for folder in (states, alone)
    )
    assert mine == theirs and len(mine) == count
