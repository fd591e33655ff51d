"""The `cache` stage by two processes side by side: one is killed, one alone meets a picture that is missing."""

import shutil
from pathlib import Path

import pytest
import yaml
from draftsmith.data.shards.shards import shard_path
from ranks_run import run_ranks
from safetensors.torch import load_file
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


@pytest.mark.slow
def test_what_one_rank_alone_comes_upon_is_said_once(tmp_path):
    made = synthetic(tmp_path / "world")
    cached(made, tmp_path / "alone")
    states = tmp_path / "alone" / "states"
    odd = [load_file(path) for path in sorted(states.glob("shard-*"))[1::2]]
    # After those that rank 0 measures.
    columns = [[held[f"index.column.{name}"].tolist() for name in ("number", "visual")] for held in odd]
    number = next(n for held in columns for n, visual in zip(*held, strict=True) if visual and n > 5)
    picture = made.folder / "images" / f"{number}.png"
    shutil.copy(made.folder / "data.json", picture)  # its header is not looked at: LLaVA-1.5 has one tile
    result = run(made, tmp_path / "run")
    assert [code != 0 for code, _ in result] == [True, True] and result[1][0] == 2
    said = "".join(text for _, text in result)
    assert said.count("error: ") == 1 and picture.name in said and f"record {number}" in said, said
    # What all of them come upon, too.
    made.data["max_length"] = 10**6
    result = run(made, tmp_path / "other")
    assert [code for code, _ in result] == [2, 2]
    assert "".join(text for _, text in result).count("the target has 256 positions") == 1
