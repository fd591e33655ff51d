"""The real wandb without a network, and with a server that goes away in the middle of a run."""

import json
import os
import time

import pytest
import wandb
from draftsmith.core.secrets import HIDDEN
from draftsmith.core.tracking import Tracker, TrackingConfig, WandbConfig
from PIL import Image

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"


@pytest.fixture(autouse=True)
def _own_wandb(monkeypatch, tmp_path):
    wandb.teardown()  # its session keeps the variables that it was begun with
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", "/nowhere/netrc")
    for folder in ("DATA", "CACHE", "CONFIG", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{folder}_DIR", str(tmp_path / "home" / folder.lower()))


def tracker(folder, say=pytest.fail, **settings) -> Tracker:
    config = TrackingConfig(wandb=WandbConfig(project="drafts", **settings))
    return Tracker(config, folder, name="finetune", recipe={"seed": 7}, say=say, group="run")


def test_tables_pictures_and_artifacts_offline(tmp_path):
    stage = tmp_path / "stage"
    mine = tracker(stage, mode="offline", artifacts="checkpoints")
    (stage / "model.safetensors").write_bytes(b"weights")
    (stage / "checkpoints" / "step-00000002").mkdir(parents=True)
    (stage / "checkpoints" / "step-00000002" / "engine.pt").write_bytes(b"state")
    Image.new("RGB", (4, 4), "red").save(stage / "speedup.png")
    mine.log({"loss": 1.0}, 1)
    mine.table("sample", ["text", "n"], [[f"USER: my key is {TOKEN}", 1], ["USER: hi", None]])
    mine.pictures([stage / "speedup.png"])
    mine.artifact("checkpoint", [stage / "checkpoints" / "step-00000002"], 2)
    mine.artifact("result", [stage / "model.safetensors"], None)
    mine.finish()
    (run,) = (stage / "wandb").glob("offline-run-*")
    (table,) = (run / "files" / "media" / "table").glob("sample*.table.json")
    assert json.loads(table.read_text())["data"] == [[f"USER: my key is {HIDDEN}", 1], ["USER: hi", None]]
    assert len(list((run / "files" / "media" / "images").glob("speedup*.png"))) == 1
    staged = [p.read_bytes() for p in (tmp_path / "home").rglob("*") if p.is_file()]
    assert b"weights" in staged and b"state" in staged, "copied: the run's own files may be rotated away"
    (log,) = run.glob("run-*.wandb")
    deadline = time.monotonic() + 20
    while b"run-finetune-result" not in log.read_bytes():
        assert time.monotonic() < deadline, "the artifact was never written"
        time.sleep(0.05)
    assert b"run-finetune-checkpoint" in log.read_bytes() and TOKEN.encode() not in log.read_bytes()
