"""One of two ranks is stopped, killed or ends alone: the other says which, and ends with one sentence."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_run import end_ranks, run_ranks, start_ranks
from training import free_port

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests" / "tools" / "attempts" / "lvlm.yaml"
# The rank of the environment sends itself a signal before its third step, or in the midst of a checkpoint.
SCRIPT = """
import os, signal, sys
from draftsmith.core import ranks
from draftsmith.recipes.commands.cli import main
from draftsmith.trainers.train import checkpoint, loop

def disturbed(real):
    seen = []

    def call(*arguments, **named):
        seen.append(1)
        if len(seen) == int(os.environ["AT"]) and ranks.rank() == int(os.environ["WHICH"]):
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return real(*arguments, **named)

    return call

if os.environ["PLACE"] == "step":
    loop._forward_backward = disturbed(loop._forward_backward)
else:
    checkpoint.torch.save = disturbed(checkpoint.torch.save)
sys.exit(main(sys.argv[1:]))
"""


def disturbed(folder: Path, which: int, number: int, *, place: str = "step", at: int = 3, minutes: float = 30):
    """How the other rank ends, and what it says."""
    words = [f"recipe={RECIPE}", f"output={folder / 'run'}", "stages=[world,target]", f"engine.wait_minutes={minutes}"]
    named = {"WHICH": str(which), "SIGNAL": str(int(number)), "PLACE": place, "AT": str(at), "OMP_NUM_THREADS": "1"}
    started = start_ranks(2, SCRIPT, *words, cwd=folder, **named)
    started[1 - which].process.join(120)
    if number == signal.SIGSTOP:
        started[which].process.kill()
    return end_ranks(started)[1 - which]


@pytest.mark.parametrize(
    ("which", "place"), [(0, "step"), pytest.param(1, "step", marks=pytest.mark.slow), (1, "save")]
)
def test_a_stopped_rank_is_named_and_ends_the_other_after_the_bound(tmp_path, which, place):
    code, text = disturbed(tmp_path, which, signal.SIGSTOP, place=place, at=3 if place == "step" else 1, minutes=0.05)
    assert code == 1 and "Traceback" not in text, text
    last = text.splitlines()[-1]
    assert last.startswith(f"error: rank {1 - which} has waited ") and f" for rank {which}, which has given no" in last
    assert "in stage target, step 3 of 4" in last if place == "step" else "in stage target" in last
    assert text.count("error: ") == 1


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_rank_is_named_by_the_other_without_a_traceback(tmp_path, which):
    code, text = disturbed(tmp_path, which, signal.SIGKILL)
    assert code == 1 and "Traceback" not in text, text
    assert text.splitlines()[-1] == f"rank {1 - which} ends in stage target, step 3 of 4: rank {which} has ended"


# Rank 0 publishes, and is stopped or takes several bounds.
PUBLISHES = """
import os, signal, sys, time
from types import SimpleNamespace
from draftsmith.core import ranks
from draftsmith.core.heartbeat import BOUND_S
from draftsmith.recipes.config import launch
from draftsmith.recipes.commands import cli
from draftsmith.trainers.train.engine import init_distributed
from draftsmith.trainers.stages import publish
from draftsmith.trainers.run.stopping import Stop

def work(stage, context):
    if os.environ["HOW"] == "stopped":
        time.sleep(2)  # the other rank has heard of it by then
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(6)

def run(arguments):
    init_distributed(wait_s=2.0)
    ranks.pulse().enter("publish")
    publish._publish = work
    stage = publish.PublishStage(kind="publish", license="mit")
    with Stop() as stop:
        stage.run(SimpleNamespace(stop=stop))
    ranks.leave(said=False)
    return 0

cli._dispatch = run
sys.exit(cli.main(["x"]))
"""


def test_a_rank_that_publishes_is_waited_for_and_one_that_is_stopped_there_is_not(tmp_path):
    results = run_ranks(2, PUBLISHES, cwd=tmp_path, HOW="works", OMP_NUM_THREADS="1")
    assert [code for code, _ in results] == [0, 0], results
    assert "for rank 0, which lives and is in stage publish" in results[1][1]
    started = start_ranks(2, PUBLISHES, cwd=tmp_path, HOW="stopped", OMP_NUM_THREADS="1")
    started[1].process.join(60)
    started[0].process.kill()
    code, text = end_ranks(started)[1]
    assert code == 1 and "Traceback" not in text, text
    last = text.splitlines()[-1]
    assert last.startswith("error: rank 1 has waited ") and "for rank 0, which has given" in last, text


# A picture of rank 1's rows is cut on the disk after all ranks have looked at the data.
CUT = """
import os, sys
from pathlib import Path
from draftsmith.core import ranks
from draftsmith.data import media
from draftsmith.recipes.commands.cli import main

real = media.load_image

def load_image(file, *rest, **named):
    if ranks.rank() == 1:
        Path(str(file)).write_bytes(Path(str(file)).read_bytes()[:60])
    return real(file, *rest, **named)

media.load_image = load_image
sys.exit(main(sys.argv[1:]))
"""


def test_a_record_that_one_rank_alone_cannot_read_ends_both_with_one_message(tmp_path):
    """The rank that meets it names the file, and the other that rank."""
    words = [f"recipe={RECIPE}", f"output={tmp_path / 'run'}", "stages=[world,target]"]
    result = run_ranks(2, CUT, *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert [code for code, _ in result] == [1, 2], result
    said = "".join(text for _, text in result)
    assert "Traceback" not in said and said.count("error: ") == 1, said
    assert "corrupt image" in result[1][1] and ".png" in result[1][1]
    last = result[0][1].splitlines()[-1]
    assert last.startswith("rank 0 ends in stage target, ") and last.endswith(": rank 1 has ended"), last


# Rank 1 is killed before its third step, under the launcher that `draftsmith demo` starts.
KILLED = """
import os, signal, sys
from draftsmith.recipes.commands import cli

def run(*words):
    from draftsmith.core import ranks  # only now: torch reads at its import what it may log
    from draftsmith.trainers.train import loop

    real, seen = loop._forward_backward, []

    def forward_backward(*rest):
        seen.append(1)
        if len(seen) == 3 and ranks.rank() == int(os.environ["WHICH"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*rest)

    loop._forward_backward = forward_backward
    return run_recipe(*words)

run_recipe, cli.run_recipe = cli.run_recipe, run
sys.exit(cli.main([word for word in sys.argv[1:] if "=" in word]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("launcher", ["ours", "deepspeed", "torchrun"])
def test_a_dead_rank_under_a_launcher_is_named_without_a_traceback(tmp_path, launcher, which):
    (tmp_path / "killed.py").write_text(KILLED)
    starts = {
        "ours": ["-m", "draftsmith.trainers.run.launcher", "killed"],
        "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", free_port(),
                      "killed.py"],
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(), "killed.py"],
    }  # fmt: skip
    words = [*starts[launcher], f"recipe={RECIPE}", f"output={tmp_path / 'run'}", "stages=[world,target]"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"WHICH": str(which), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"rank {1 - which} ends in stage target, step 3 of 4: rank {which} has ended" in done.stdout, done.stdout
    assert "frame #" not in done.stdout
    if launcher == "ours":
        assert "Traceback" not in done.stdout and done.returncode == 128 + signal.SIGKILL


APART = """
import sys
from draftsmith.recipes.commands import cli

def run(words):
    from draftsmith.trainers.train import engine  # only now: torch reads at its import what it may log

    engine._AFTER_S = 0.0
    engine.init_distributed(wait_s=3.0)

cli._dispatch = run
sys.exit(cli.main([]))
"""


def test_each_rank_says_that_it_could_not_join_the_others(tmp_path):
    """They cannot ask one another who says it."""
    for number, (code, text) in enumerate(end_ranks(start_ranks(2, APART, cwd=tmp_path, WORLD_SIZE="3"))):
        assert code == 2 and f"error: rank {number} could not join the others: " in text, text
        assert "engine.wait_minutes" in text and "Traceback" not in text
