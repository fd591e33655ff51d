"""SIGTERM to a process inside each kind of stage that works item by item: the same command ends with equal results."""

import json
import shutil
import signal
from pathlib import Path

import heads_run
import pytest
import visual_run
from ranks_run import MAIN, run_ranks

ROOT = Path(__file__).resolve().parents[2]
# The process gets SIGTERM at the first item after what the stage has kept, as if someone had typed `kill`.
ASKED = """
import os, signal, sys
from pathlib import Path
from draftsmith.recipes.commands.cli import main
from draftsmith.trainers.run.stopping import Stop

real, folder = Stop.check, Path(os.environ["FOLDER"])

def check(self, place):
    if not self.raised and [*folder.rglob("shard-*"), *folder.rglob("rows/**/*.jsonl")]:
        os.kill(os.getpid(), signal.SIGTERM)
    real(self, place)

Stop.check = check
sys.exit(main(sys.argv[1:]))
"""
FEW = ["stages.answers.samples_per_shard=2", "stages.states.batch_size=2", "stages.states.states.shard_bytes=60000"]


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> tuple[Path, list[str]]:
    """A run that nobody disturbs, and its command."""
    output = tmp_path_factory.mktemp("heads")
    heads_run.run(output, *FEW)
    return output, [f"recipe={output / 'reading-test.yaml'}", *FEW]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, list[str]]:
    output = tmp_path_factory.mktemp("drawn") / "run"
    visual_run.run(output, stages=["world", "pictures"])
    return output, ["recipe=demo/visual-ar", *visual_run.FEW]


def results(folder: Path) -> dict[str, object]:
    """Tokens of the rows, and every shard's bytes."""
    rows = folder / "rows.jsonl"
    tokens = [json.loads(line)["tokens"] for line in rows.read_text().splitlines()] if rows.is_file() else []
    return {"tokens": tokens} | {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("shard-*")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "run"),
    [("answers", "heads"), ("states", "heads"), ("evaluate", "heads"), ("pictures", "drawn")],
    ids=["regenerate", "cache", "evaluate", "encode"],
)
def test_the_same_command_goes_on_to_equal_results(stage, run, request, tmp_path):
    alone, command = request.getfixturevalue(run)
    output = Path(shutil.copytree(alone, tmp_path / "run"))
    shutil.rmtree(output / stage)
    arguments = [*command, f"output={output}", f"stages=[{stage}]"]
    ((code, text),) = run_ranks(1, ASKED, *arguments, cwd=ROOT, FOLDER=str(output / stage))
    assert code == 128 + signal.SIGTERM and "the same command continues" in text, text[-3000:]
    assert not (output / stage / "done.json").exists()
    kept = [path for pattern in ("shard-*", "rows/**/*.jsonl") for path in (output / stage).rglob(pattern)]
    times = {path: path.stat().st_mtime_ns for path in kept if path.suffix == ".safetensors"}
    ((code, text),) = run_ranks(1, MAIN, *arguments, cwd=ROOT)
    assert code == 0, text[-3000:]
    assert {path: path.stat().st_mtime_ns for path in times} == times, "finished shards are not written again"
    assert results(output / stage) == results(alone / stage)
