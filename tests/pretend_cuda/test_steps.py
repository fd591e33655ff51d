"""Optimizer steps as rank 1 of a node with two pretend devices: one synchronisation each, and the CPU's losses."""

from pathlib import Path

import pytest
import torch

from . import guard
from .asking import results_of
from .device import PACKAGE, _file_of_the_project

STEPS = (
    "draft LVLM", "distillation", "eagle", "eagle3", "sparrow", "sparrow-half-blind", "msd", "vispec", "hivis",
    "medusa", "dflash", "image eagle", "image eagle guided", "image medusa", "qwen2_5_vl", "qwen3_vl",
    "packed draft LVLM", "packed eagle", "packed qwen3_vl", "packed eagle of qwen3_vl",
)  # fmt: skip


@pytest.fixture(scope="module")
def steps():
    result = results_of("steps.training_steps")["steps.training_steps"]
    assert result.keys() == set(STEPS)
    return result


@pytest.mark.parametrize("name", STEPS)
def test_the_host_waits_once_in_an_optimizer_step(steps, name):
    """For the all-reduce, whatever the number of micro-batches; an upload is handed over, and not waited for."""
    counts = steps[name]
    assert (counts["reads"], counts["blocking"], counts["waits"]) == (1, 0, 0), counts["places"]
    assert [place.split(":")[0] for place in counts["places"]] == ["tolist trainers/train/loop.py"]


# Launches of an optimizer step of two micro-batches, three in a hundred above what they were counted as. Lower them
# with the count.
MOST_LAUNCHES = {
    "draft LVLM": 767, "distillation": 1315, "eagle": 1514, "eagle3": 2755, "sparrow": 2153,
    "sparrow-half-blind": 2153, "msd": 1530, "vispec": 2358, "hivis": 2142, "medusa": 1600, "dflash": 2083,
    "image eagle": 718,
    "image eagle guided": 1516, "image medusa": 646, "qwen2_5_vl": 2470, "qwen3_vl": 2595, "packed draft LVLM": 775,
    "packed eagle": 1534, "packed qwen3_vl": 2589, "packed eagle of qwen3_vl": 1728,
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_step_launches_a_bounded_number_of_kernels(steps, name):
    launches, most = steps[name]["launches"], MOST_LAUNCHES[name]
    assert launches <= most


def test_a_checkout_behind_a_symbolic_link_names_its_files(tmp_path):
    """Places of counts are told by the file that asked."""
    link = tmp_path / "linked"
    link.symlink_to(PACKAGE)
    assert _file_of_the_project(str(link / "eval" / "loop.py")) == Path("eval/loop.py")
    assert _file_of_the_project(str(link / "tests" / "conftest.py")) is None
    assert _file_of_the_project("<string>") is None and _file_of_the_project(torch.__file__) is None


@pytest.mark.parametrize("name", STEPS)
def test_the_device_has_the_cpus_loss(steps, name):
    cpu, device = steps[name]["losses"]
    assert cpu == pytest.approx(device, rel=1e-5) and cpu > 0


def test_without_a_compiler_the_tests_of_the_pretend_device_skip_and_say_why(monkeypatch):
    monkeypatch.setattr(guard, "compiled", lambda: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(pytest.skip.Exception, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        results_of("anything")
