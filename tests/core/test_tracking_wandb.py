"""The real wandb without a network, and with a server that goes away in the middle of a run."""

import http.server
import json
import os
import threading
import time

import pytest
import wandb
from draftsmith.core import tracking
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


class Server(http.server.BaseHTTPRequestHandler):
    """As much of wandb's server as lets a run begin."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            asked = json.loads(body)
            query, variables = asked.get("query", ""), asked.get("variables", {})
        except ValueError:
            query, variables = "", {}
        if "upsertBucket" in query:
            project = {"id": "1", "name": "p", "entity": {"id": "2", "name": "e"}}
            bucket = {"id": "x", "name": "abc", "displayName": "d", "description": "", "config": "{}",
                      "sweepName": None, "project": project, "historyLineCount": 0}  # fmt: skip
            result = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        elif "CreateRunFiles" in query:
            address = f"http://127.0.0.1:{self.server.server_port}/put"
            files = [{"name": name, "uploadUrl": address} for name in variables["files"]]
            result = {"createRunFiles": {"runID": "abc", "uploadHeaders": [], "files": files}}
        else:
            result = {"viewer": {"id": "1", "username": "u", "entity": "e", "flags": "{}", "teams": {"edges": []}}}
        data = json.dumps({"data": result}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST

    def log_message(self, *words):
        pass


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_holds_the_end_for_a_while_and_no_longer(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(tracking, "FINISH_S", 4)
    said = []
    mine = tracker(tmp_path, say=said.append)
    assert mine._run is not None and not said, "the run began online"
    assert list((tmp_path / "wandb").glob("run-*")) and not list((tmp_path / "wandb").glob("offline-run-*"))
    mine.log({"loss": 2.0}, 1)
    server.shutdown()
    server.server_close()
    start = time.monotonic()
    for step in range(2, 50):
        mine.log({"loss": 1.0}, step)
    assert time.monotonic() - start < 5, "a step waited for the network"
    mine.finish()
    assert time.monotonic() - start < 30
    assert len(said) == 1 and "wandb sync" in said[0], "what was not sent is told"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 49
