"""Numbers of a run: a JSONL file that keeps each step once, wandb as it really is, and failures that stop nothing."""

import json
import os
import sys
import time
import types
from pathlib import Path

import pytest
from draftsmith.core.secrets import HIDDEN
from draftsmith.core.tracking import Tracker, TrackingConfig, WandbConfig
from pydantic import ValidationError

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
JSONL_ONLY = TrackingConfig()


def with_wandb(**settings) -> TrackingConfig:
    return TrackingConfig(wandb=WandbConfig(project="drafts", **settings))


def tracker(folder: Path, config: TrackingConfig = JSONL_ONLY, *, say=pytest.fail, recipe=None) -> Tracker:
    return Tracker(config, folder, name="finetune", recipe=recipe or {}, say=say)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _no_wandb_variables(monkeypatch):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)


class FakeWandb(types.ModuleType):
    """Stands where the package would: what it was asked, and what of it fails."""

    def __init__(self, fails: str | None = None):
        super().__init__("wandb")
        self.fails, self.inits, self.lines, self.finished = fails, [], [], 0

    def Settings(self, **values):
        return values

    def init(self, **arguments):
        self._call("init")
        self.inits.append(arguments)
        return self

    def log(self, values, step):
        self._call("log")
        self.lines.append((step, values))

    def finish(self):
        self._call("finish")
        self.finished += 1

    def _call(self, name):
        if name == self.fails:
            raise ConnectionError(f"{name}: no route to https://me:hunter2hunter2@host with {TOKEN}")


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_lines_of_the_file(tmp_path):
    mine = tracker(tmp_path / "new")
    mine.log({"loss": 2.5, "lr": 1e-3}, 10)
    mine.log({"loss": 2.0, "lr": 9e-4}, 20)
    mine.log({"val_loss": 2.1}, 20)
    mine.finish()
    found = rows(tmp_path / "new")
    times = [row.pop("time") for row in found]
    assert found == [
        {"step": 10, "loss": 2.5, "lr": 1e-3},
        {"step": 20, "loss": 2.0, "lr": 9e-4},
        {"step": 20, "val_loss": 2.1},
    ]
    assert times == sorted(times)


def test_rewind_drops_later_lines_and_a_torn_one(tmp_path):
    mine = tracker(tmp_path)
    mine.rewind(0)  # nothing is there yet
    assert not (tmp_path / "metrics.jsonl").exists()
    for step in range(1, 7):
        mine.log({"loss": float(step)}, step)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    again = tracker(tmp_path)
    again.rewind(4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    again.log({"loss": 50.0}, 5)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)][-2:] == [(4, 4.0), (5, 50.0)]
    again.rewind(0)
    assert rows(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_of_a_step_that_is_kept_goes_too(tmp_path):
    """Its head may look whole: half a number is not a number."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 1')
    tracker(tmp_path).rewind(5)
    assert rows(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_what_wandb_is_started_with(tmp_path, wandb):
    recipe = {"seed": 0, "stages": {"a": {"lr": 1e-3, "api_key": "hunter2"}}, "note": f"with {TOKEN}"}
    mine = tracker(tmp_path, with_wandb(entity="lab", mode="offline"), recipe=recipe)
    (arguments,) = wandb.inits
    settings = arguments.pop("settings")
    assert arguments == {
        "project": "drafts",
        "entity": "lab",
        "mode": "offline",
        "name": "finetune",
        "dir": str(tmp_path),
        "config": {"seed": 0, "stages": {"a": {"lr": 1e-3, "api_key": HIDDEN}}, "note": f"with {HIDDEN}"},
    }
    # Neither the command line as typed nor what libraries print.
    assert settings["x_disable_meta"] is True and settings["console"] == "off"
    assert recipe["stages"]["a"]["api_key"] == "hunter2", "the recipe itself is not touched"
    mine.log({"loss": 1.0}, 10)
    mine.log({"val_loss": 2.0}, 10)
    mine.log({"loss": 0.5}, 20)
    assert wandb.lines == [(10, {"loss": 1.0}), (10, {"val_loss": 2.0}), (20, {"loss": 0.5})]
    assert wandb.finished == 0
    mine.finish()
    assert wandb.finished == 1
    assert [row["step"] for row in rows(tmp_path)] == [10, 10, 20]


@pytest.mark.parametrize(
    ("mode", "variables", "expected"),
    [
        (None, {}, "offline"),
        (None, {"WANDB_API_KEY": "k" * 40}, "online"),
        (None, {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
        ("offline", {"WANDB_API_KEY": "k" * 40}, "offline"),
        ("online", {"WANDB_MODE": "offline"}, "online"),
    ],
)
def test_online_where_a_key_is_set(tmp_path, wandb, monkeypatch, mode, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracker(tmp_path, with_wandb(mode=mode))
    assert [arguments["mode"] for arguments in wandb.inits] == [expected]


@pytest.mark.parametrize("how", ["recipe", "variable", "no section"])
def test_disabled_does_not_even_import_it(tmp_path, monkeypatch, how):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise, and be said
    if how == "variable":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    configs = {"recipe": with_wandb(mode="disabled"), "variable": with_wandb(), "no section": JSONL_ONLY}
    mine = tracker(tmp_path, configs[how])
    mine.log({"loss": 1.0}, 1)
    mine.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_missing_package_is_said_and_survived(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    mine = tracker(tmp_path, with_wandb(), say=said.append)
    mine.log({"loss": 1.0}, 1)
    mine.finish()
    assert len(said) == 1 and "tracking failed" in said[0]
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_dead_network_is_said_once_and_the_file_goes_on(tmp_path, monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails))
    said: list[str] = []
    mine = tracker(tmp_path, with_wandb(mode="online"), say=said.append)
    for step in range(1, 5):
        mine.log({"loss": 1.0}, step)
    mine.finish()
    assert said == [f"tracking failed and goes on without: {fails}: no route to https://{HIDDEN}@host with {HIDDEN}"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_file_that_cannot_be_written_is_said_once_and_wandb_goes_on(tmp_path, wandb):
    (tmp_path / "metrics.jsonl").mkdir()
    said: list[str] = []
    mine = tracker(tmp_path, with_wandb(), say=said.append)
    for step in range(1, 4):
        mine.log({"loss": 1.0}, step)
    assert len(said) == 1 and "metrics.jsonl" in said[0]
    assert [step for step, _ in wandb.lines] == [1, 2, 3]


def test_a_rewind_that_cannot_be_written_stops_nothing(tmp_path):
    mine = tracker(tmp_path)
    mine.log({"loss": 1.0}, 1)
    (tmp_path / "metrics.partial").mkdir()
    said: list[str] = []
    again = tracker(tmp_path, say=said.append)
    again.rewind(0)
    assert len(said) == 1 and "metrics.partial" in said[0]
    again.log({"loss": 2.0}, 1)
    assert [row["loss"] for row in rows(tmp_path)] == [1.0, 2.0]


def test_an_unknown_mode_is_refused_when_the_recipe_loads():
    with pytest.raises(ValidationError, match="mode"):
        with_wandb(mode="onlin")


def test_the_real_package_offline(tmp_path, monkeypatch):
    """Read back from wandb's own file: the settings, the steps, and no command line as it was typed."""
    monkeypatch.setattr(sys, "argv", ["train.py", f"a.api_key={TOKEN}"])
    recipe = {"seed": 7, "stages": {"a": {"api_key": "hunter2hunter2"}}}
    mine = tracker(tmp_path, with_wandb(mode="offline"), recipe=recipe)
    print(f"a library prints {TOKEN}")
    for step in (5, 10):
        mine.log({"loss": step / 2, "lr": 0.1}, step)
    mine.finish()
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    config, history = written(path)
    assert config["seed"] == 7
    assert config["stages"] == {"a": {"api_key": HIDDEN}}
    assert history == [{"_step": 5, "loss": 2.5, "lr": 0.1}, {"_step": 10, "loss": 5.0, "lr": 0.1}]
    for file in tmp_path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert TOKEN.encode() not in data and b"hunter2" not in data, file


def written(path: Path, patience_s: float = 20.0) -> tuple[dict, list[dict]]:
    """Config and history of an offline run; wandb's own process may still be writing when `finish` returns."""
    from wandb.proto import wandb_internal_pb2

    deadline, kinds = time.monotonic() + patience_s, {}
    while "exit" not in kinds:
        assert time.monotonic() < deadline, f"the run's end was never written: {kinds.keys()}"
        time.sleep(0.02)
        kinds = {}
        for data in leveldb_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kinds.setdefault(record.WhichOneof("record_type"), []).append(record)
    found = {kind: len(records) for kind, records in kinds.items()}
    assert found["run"] == 1, found
    config = {item.key: json.loads(item.value_json) for record in kinds["run"] for item in record.run.config.update}
    history = []
    for record in kinds["history"]:
        items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        history.append({name: items[name] for name in ("_step", "loss", "lr")})
    return config, history


def leveldb_records(data: bytes) -> list[bytes]:
    """Whole records of a LevelDB log of one block: checksum (4 bytes), length (2), type (1: whole), content."""
    found, place = [], 0
    while place + 7 <= len(data):
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        assert kind == 1, "more than one block"
        if place + 7 + length <= len(data):
            found.append(data[place + 7 : place + 7 + length])
        place += 7 + length
    return found
