"""Cluster files as far as one machine goes: two launchers on loopback stand for two nodes, a script for srun."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from stages_run import TINY_DATASET
from training import free_port

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "scripts" / "cluster"
STEPS = 6
SETTINGS = ["recipe=demo/lvlm-from-nothing", *TINY_DATASET, f"stages.target.steps={STEPS}",
            "stages.target.batch_size=8", "stages.target.log_every=1", "engine.zero_stage=1"]  # fmt: skip
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# What a launcher above this test would have set.
LEFT_OUT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE")


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LEFT_OUT} | QUIET | more


def together(commands: list[list[str]], **more: str) -> None:
    """Start all, wait for all; the first that fails is shown."""
    started = [
        subprocess.Popen(c, cwd=ROOT, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True) for c in commands
    ]  # fmt: skip
    for process in started:
        try:
            text, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            raise
        assert process.returncode == 0, text[-4000:]


def losses(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "target" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory) -> list[float]:
    """Two ranks under one launcher."""
    output = tmp_path_factory.mktemp("one_node") / "run"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port",
                free_port()]  # fmt: skip
    together([[*launcher, "trains/train.py", *SETTINGS, f"output={output}"]])
    return losses(output)


def deepspeed(node: int, port: str, folder: Path) -> list[str]:
    """As docs/clusters.md starts it where nodes have no ssh between them, with the example's names."""
    hosts = folder / "hostfile"
    hosts.write_text((FILES / "hostfile").read_text().replace("slots=8", "slots=1"))
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hosts), "--no_ssh", "--node_rank",
            str(node), "--master_addr", "127.0.0.1", "--master_port", port, "trains/train.py"]  # fmt: skip


def torchrun(node: int, port: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank",
            str(node), "--master-addr", "127.0.0.1", "--master-port", port, "trains/train.py"]  # fmt: skip


def torchrun_of_a_wheel(node: int, port: str, folder: Path) -> list[str]:
    """Without a checkout there is no trains/train.py."""
    return [*torchrun(node, port, folder)[:-1], "-m", "draftsmith"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [deepspeed, torchrun, torchrun_of_a_wheel])
def test_two_launchers_train_as_one(launcher, one_node, tmp_path):
    port, output = free_port(), tmp_path / "run"
    together([[*launcher(node, port, tmp_path), *SETTINGS, f"output={output}"] for node in (0, 1)])
    assert losses(output) == one_node, "bit for bit: two gloo ranks, wherever they run"


SRUN = """#!/usr/bin/env bash
# As many tasks as the job has, one on each node.
while [ "${1#--}" != "$1" ]; do shift; done
pids=()
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task "$@" & pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo 127.0.0.1; echo other; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


def slurm(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    tools = folder / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    given = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "4711",
             "SLURM_JOB_NODELIST": "worker-[1-2]", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1",
             "SLURM_CPUS_PER_TASK": "1", "SCONTROL_LOG": str(folder / "scontrol.log"),
             "DRAFTSMITH_PYTHON": sys.executable}  # fmt: skip
    # Slurm runs a copy from its spool.
    copy = folder / "slurm_script"
    shutil.copy(FILES / "train.slurm", copy)
    return subprocess.run(
        ["bash", str(copy), *arguments], cwd=folder, env=environment(**(given | more)), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_slurm_script_trains_as_one(one_node, tmp_path):
    done = slurm(tmp_path, *SETTINGS, f"output={tmp_path / 'run'}", MASTER_PORT=free_port())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert losses(tmp_path / "run") == one_node


ECHO = """#!/usr/bin/env bash
shift
place="local $LOCAL_RANK of $LOCAL_SIZE, at $MASTER_ADDR:$MASTER_PORT"
echo "rank $RANK of $WORLD_SIZE, $place, threads $OMP_NUM_THREADS: $*"
exit ${CODE:-0}
"""


@pytest.fixture
def echo(tmp_path) -> str:
    path = tmp_path / "python"
    path.write_text(ECHO)
    path.chmod(0o755)
    return str(path)


def test_what_the_slurm_script_tells_each_rank(tmp_path, echo):
    done = slurm(tmp_path, "recipe=demo/lvlm", "stages.world.splits.train={name: 2}", DRAFTSMITH_PYTHON=echo)
    assert done.returncode == 0, done.stderr
    said = "at 127.0.0.1:24711, threads 1: recipe=demo/lvlm stages.world.splits.train={name: 2}"
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 2, local 0 of 1, {said}" for r in (0, 1)]


@pytest.mark.parametrize(
    ("code", "wish", "requeued"), [("143", "1", True), ("143", "0", False), ("2", "1", False), ("0", "1", False)]
)
def test_only_a_run_that_saved_and_stopped_is_submitted_again(code, wish, requeued, tmp_path, echo):
    done = slurm(tmp_path, "recipe=demo/lvlm-from-nothing", DRAFTSMITH_PYTHON=echo, CODE=code, DRAFTSMITH_REQUEUE=wish)
    assert done.returncode == int(code), "the job's code is the run's"
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 4711\n" if requeued else "")


def test_the_slurm_script_without_an_environment_says_so(tmp_path):
    done = slurm(tmp_path, "recipe=demo/lvlm-from-nothing", DRAFTSMITH_PYTHON="/nowhere/python")
    assert done.returncode == 2 and "DRAFTSMITH_PYTHON" in done.stderr


def test_deepspeed_reads_the_hostfile():
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(FILES / "hostfile"))) == {"worker-1": 8, "worker-2": 8}


def test_the_container_gets_all_that_the_wheel_is_made_of():
    lines = (FILES / "Containerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in shlex.split(line)[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"] if "." in name}
    files = {"__init__.py", "__main__.py", "pyproject.toml", "constraints.txt", project["project"]["readme"],
             *project["project"]["license-files"]}  # fmt: skip
    assert copied == packages | files
    (image,) = re.findall(r"^FROM .*python:(\S+)-slim$", "\n".join(lines), re.MULTILINE)
    assert image in ("3.11", "3.12")


@pytest.mark.slow
def test_a_wheelhouse_installs_without_a_network(tmp_path):
    """draftsmith's own wheel, built, checked and installed offline; its dependencies are this environment's."""
    checkout = tmp_path / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    house, venv = tmp_path / "house", tmp_path / "venv"
    offline = environment(PYTHON=sys.executable, PIP_NO_INDEX="1")
    offline.pop("PYTHONPATH", None)
    build = ["bash", "scripts/wheelhouse", str(house), "--own", "--no-build-isolation"]
    subprocess.run(build, cwd=checkout, env=offline, check=True, timeout=300, capture_output=True)
    assert [path.suffix for path in house.glob("draftsmith-*")] == [".whl"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    (site,) = venv.glob("lib/python*/site-packages")
    theirs = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "theirs.pth").write_text(theirs + "\n")

    def install(**more: str) -> subprocess.CompletedProcess:
        return subprocess.run([str(house / "install"), str(venv)], cwd=tmp_path, env=offline | more,
                              capture_output=True, text=True, timeout=300, check=False)  # fmt: skip

    done = install()
    assert done.returncode == 0, done.stdout + done.stderr
    command = str(venv / "bin" / "draftsmith")
    for arguments, expected in (
        (["recipes"], "  demo/lvlm "),
        (["show", "llava15-160m", "--no-defaults"], "# extended lvlm/llava15-68m.yaml"),
    ):
        run = subprocess.run(
            [command, *arguments], cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=120, check=True
        )
        assert expected in run.stdout
    asked = ("from draftsmith.recipes.config import health; "
             "print(health.ROOT, len(health.pins()), len(health.requirements()))")  # fmt: skip
    actual = subprocess.run([str(venv / "bin" / "python"), "-c", asked], cwd=tmp_path, env=offline, capture_output=True,
                           text=True, timeout=120, check=True).stdout.split()  # fmt: skip
    assert actual[0].startswith(str(venv)) and int(actual[1]) > 50
    assert int(actual[2]) >= 18, "constraints are in the wheel"
    (wheel,) = house.glob("draftsmith-*.whl")
    wheel.write_bytes(wheel.read_bytes() + b"x")
    done = install()
    assert done.returncode == 2 and "damaged" in done.stderr
    done = subprocess.run(["bash", "scripts/wheelhouse"], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "scripts/wheelhouse FOLDER" in done.stdout
