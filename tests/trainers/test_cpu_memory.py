"""Memory of a training on a CPU in bf16, whose batches have a length of their own each."""

import os
import subprocess
import sys

import pytest
from draftsmith.trainers.train import engine

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
STEPS = """
import psutil, torch
from draftsmith.trainers.train.engine import init_distributed
init_distributed()
memory = lambda: psutil.Process().memory_info().rss
layer = torch.nn.Sequential(torch.nn.Linear(256, 704), torch.nn.SiLU(), torch.nn.Linear(704, 256)).to(torch.bfloat16)
for step in range(400):
    layer(torch.randn(40 + step, 256, dtype=torch.bfloat16, requires_grad=True)).float().sum().backward()
    if step == 20:
        first = memory()
print(memory() / first)
"""


def test_the_caches_are_bounded_on_a_cpu_where_nobody_set_them(monkeypatch):
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(CACHES[0], "100")
    engine.bound_primitives()
    assert [os.environ[name] for name in CACHES] == ["100", "8"]
    monkeypatch.delenv(CACHES[1])
    monkeypatch.setattr(engine.torch.cuda, "is_available", lambda: True)
    engine.bound_primitives()
    assert CACHES[1] not in os.environ


def growth(**variables: str) -> float:
    """Memory after 400 steps over that after 20, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in CACHES} | variables
    found = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    return float(found.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_stays_flat_over_steps_of_different_lengths():
    """Within a tenth; with the caches as large as they are by default it doubles where bf16 is compiled by shape."""
    assert growth() < 1.1 and growth(**dict.fromkeys(CACHES, "1024")) > 1.3
