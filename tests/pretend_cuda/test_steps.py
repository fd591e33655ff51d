"""Optimizer steps as rank 1 of a node with two pretend devices: one synchronisation each, and the CPU's losses."""

import pytest

from .asking import results_of

STEPS = (
    "draft LVLM", "distillation", "eagle", "eagle3", "sparrow", "sparrow-half-blind", "msd", "vispec", "hivis",
    "medusa", "image eagle", "image eagle guided", "image medusa", "qwen2_5_vl", "qwen3_vl",
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
    assert [place.split(":")[0] for place in counts["places"]] == ["tolist trainers/loop.py"]


@pytest.mark.parametrize("name", STEPS)
def test_the_device_has_the_cpus_loss(steps, name):
    cpu, device = steps[name]["losses"]
    assert cpu == pytest.approx(device, rel=1e-5) and cpu > 0
