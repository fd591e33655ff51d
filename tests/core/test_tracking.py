"""Numbers of a run: a JSONL file that keeps each step once, wandb as it really is, and failures that stop nothing."""

import json
import os
import sys
from pathlib import Path

import pytest
from draftsmith.core import tracking
from draftsmith.core.errors import UserError
from draftsmith.core.secrets import HIDDEN
from draftsmith.core.tracking import Tracker, TrackingConfig, WandbConfig
from fails import raising
from fake_wandb import TOKEN, FakeWandb

JSONL_ONLY = TrackingConfig()


def with_wandb(**settings) -> TrackingConfig:
    return TrackingConfig(wandb=WandbConfig(project="drafts", **settings))


def tracker(folder: Path, config: TrackingConfig = JSONL_ONLY, *, say=pytest.fail, recipe=None, group=None) -> Tracker:
    return Tracker(config, folder, name="finetune", recipe=recipe or {}, say=say, group=group)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _no_wandb_variables(monkeypatch):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", "/nowhere/netrc")


def test_lines_of_the_file(tmp_path):
    mine = tracker(tmp_path / "new")
    mine.log({"loss": 2.5, "lr": 1e-3}, 10)
    mine.log({"loss": 2.0, "lr": 9e-4}, 20)
    mine.log({"val_loss": float("nan")}, 20)
    mine.finish()
    result = rows(tmp_path / "new")
    times = [row.pop("time") for row in result]
    assert result == [{"step": 10, "loss": 2.5, "lr": 1e-3}, {"step": 20, "loss": 2.0, "lr": 9e-4},
                      {"step": 20, "val_loss": None}]  # fmt: skip
    assert times == sorted(times)


def test_rewind_drops_later_lines_and_a_torn_one(tmp_path):
    mine = tracker(tmp_path)
    mine.rewind(0)  # nothing is there yet
    assert not (tmp_path / "metrics.jsonl").exists()
    for step in range(1, 7):
        mine.log({"loss": float(step)}, step)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1')  # half a number is not a number, though the step is kept
    again = tracker(tmp_path)
    again.rewind(4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    again.log({"loss": 50.0}, 5)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)][-2:] == [(4, 4.0), (5, 50.0)]
    again.rewind(0)
    assert rows(tmp_path) == [] and [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tags_reach_wandb_as_they_are_written(tmp_path, wandb):
    """A variable's value stands in no file of ours either; the recipe that is handed on is the written one."""
    recipe = {"tracking": {"wandb": {"project": "drafts", "tags": ["sweep", "${oc.env:WHERE}"]}}}
    tracker(tmp_path, with_wandb(mode="offline", tags=["sweep", "the private place"]), recipe=recipe)
    assert wandb.inits[0]["tags"] == ["sweep", "${oc.env:WHERE}"]


def test_what_wandb_is_started_with(tmp_path, wandb):
    recipe = {"seed": 0, "stages": {"a": {"lr": 1e-3, "api_key": "hunter2"}}, "note": f"with {TOKEN}"}
    mine = tracker(tmp_path, with_wandb(entity="lab", mode="offline", tags=["sweep"]), recipe=recipe, group="run")
    (arguments,) = wandb.inits
    settings = arguments.pop("settings")
    assert arguments == {
        "project": "drafts", "entity": "lab", "mode": "offline", "name": "finetune", "dir": str(tmp_path),
        "config": {"seed": 0, "stages": {"a": {"lr": 1e-3, "api_key": HIDDEN}}, "note": f"with {HIDDEN}"},
        "group": "run", "tags": ["sweep"], "id": (tmp_path / "wandb-id").read_text(), "resume": "allow",
    }  # fmt: skip
    # A server that does not answer holds the run no longer than this.
    assert (settings["init_timeout"], settings["finish_timeout"], settings["finish_timeout_raises"]) == (30, 60, True)
    # Neither the command line as typed nor what libraries print, nor the address of a checkout's remote.
    assert settings["x_disable_meta"] is True and settings["console"] == "off" and settings["git_remote"] == ""
    assert recipe["stages"]["a"]["api_key"] == "hunter2", "the recipe itself is not touched"
    mine.log({"loss": 1.0}, 10)
    mine.log({"val_loss": 2.0}, 10)
    mine.log({"loss": 0.5}, 20)
    assert wandb.lines == [(10, {"loss": 1.0}), (10, {"val_loss": 2.0}), (20, {"loss": 0.5})]
    assert wandb.codes == []
    mine.finish()
    assert wandb.codes == [0] and [row["step"] for row in rows(tmp_path)] == [10, 10, 20]


@pytest.mark.parametrize(("mode", "variables", "expected"), [
    (None, {}, "offline"),
    (None, {"WANDB_API_KEY": "k" * 40}, "online"),
    (None, {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
    ("offline", {"WANDB_API_KEY": "k" * 40}, "offline"),
    ("online", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "online"),
    (None, {"WANDB_IDENTITY_TOKEN_FILE": "/run/token"}, "online"),
])  # fmt: skip
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


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_dead_network_is_said_once_and_the_file_goes_on(tmp_path, monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails))
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    said: list[str] = []
    mine = tracker(tmp_path, with_wandb(mode="online"), say=said.append)  # where init fails, offline too
    for step in range(1, 5):
        mine.log({"loss": 1.0}, step)
    mine.finish()
    assert said == [
        f"tracking failed, and the run continues without it: {fails}: no route to https://{HIDDEN}@host with {HIDDEN}"
    ]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("harm", "says"), [
    (Path.mkdir, "metrics.jsonl"), (lambda path: path.symlink_to("/dev/full"), "No space left"),
], ids=["a folder", "a full disk"])  # fmt: skip
def test_a_file_that_cannot_be_written_is_said_once_and_wandb_goes_on(tmp_path, wandb, harm, says):
    """The full disk is a real ENOSPC, at the write that the operating system refuses."""
    harm(tmp_path / "metrics.jsonl")
    said: list[str] = []
    mine = tracker(tmp_path, with_wandb(), say=said.append)
    for step in range(1, 4):
        mine.log({"loss": 1.0}, step)
    assert len(said) == 1 and says in said[0]
    assert [step for step, _ in wandb.lines] == [1, 2, 3]


def test_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path, monkeypatch, wandb):
    wandb.dead = True
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    said: list[str] = []
    mine = tracker(tmp_path, with_wandb(), say=said.append)
    mine.log({"loss": 1.0}, 1)
    mine.finish()
    assert [arguments["mode"] for arguments in wandb.inits] == ["online", "offline"]
    first, second = [arguments["id"] for arguments in wandb.inits]
    assert first != second == (tmp_path / "wandb-id").read_text(), "the first is held by wandb's own process"
    assert wandb.lines == [(1, {"loss": 1.0})]
    assert len(said) == 1 and "does not answer (no route to host)" in said[0]
    assert said[0].endswith(f"wandb sync {tmp_path}/wandb/*run-*-{second}")


def test_a_resumed_stage_comes_back_to_its_run_after_an_outage(tmp_path, monkeypatch, wandb):
    """What was measured meanwhile lies apart, and is sent into the same run."""
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    said: list[str] = []
    for wandb.dead in (False, True, False):
        tracker(tmp_path, with_wandb(), say=said.append)
    first, again, aside, back = [arguments["id"] for arguments in wandb.inits]
    assert first == again == back != aside
    assert len(said) == 1 and f"wandb sync --id {first} {tmp_path}/wandb/*run-*-{aside}" in said[0]


def test_without_a_key_nothing_asks_for_one(tmp_path, wandb):
    """In a terminal wandb would, and hold the run until somebody comes."""
    said: list[str] = []
    tracker(tmp_path, with_wandb(mode="online"), say=said.append)
    assert [arguments["mode"] for arguments in wandb.inits] == ["offline"]
    assert len(said) == 1 and "wandb login" in said[0]


def test_a_resumed_stage_goes_on_in_the_same_wandb_run(tmp_path, wandb):
    tracker(tmp_path / "a", with_wandb())
    tracker(tmp_path / "a", with_wandb())
    tracker(tmp_path / "b", with_wandb())  # another stage
    (tmp_path / "a" / "wandb-id").write_text("cut")  # by a full disk
    tracker(tmp_path / "a", with_wandb())
    first, again, other, fixed = [arguments["id"] for arguments in wandb.inits]
    assert first == again and len({first, other, fixed}) == 3
    assert (tmp_path / "a" / "wandb-id").read_text() == fixed


@pytest.mark.parametrize(("artifacts", "sent"), [
    ("none", ["report"]), ("results", ["result", "report"]), ("checkpoints", ["checkpoint", "result", "report"]),
])  # fmt: skip
def test_which_weights_are_kept_is_the_recipes_word(tmp_path, wandb, artifacts, sent):
    (tmp_path / "step-00000005").mkdir()
    mine = tracker(tmp_path, with_wandb(artifacts=artifacts), group="my run")
    mine.artifact("checkpoint", [tmp_path / "step-00000005"], 5)
    mine.artifact("result", [tmp_path / "model.safetensors"], None)
    mine.artifact("report", [tmp_path / "report.md"], None)
    assert [artifact.type for artifact, _ in wandb.artifacts] == sent
    assert wandb.inits[0]["settings"]["finish_timeout"] == (60 if artifacts == "none" else 600), "weights take a while"
    assert [artifact.name for artifact, _ in wandb.artifacts] == [f"my-run-finetune-{kind}" for kind in sent]
    if artifacts == "checkpoints":
        artifact, aliases = wandb.artifacts[0]
        assert artifact.files == ["step-00000005"] and aliases == ["latest", "step-5"]
        assert artifact.metadata == {"step": 5}


def test_lines_that_a_full_disk_had_no_room_for_are_written_later(tmp_path, monkeypatch):
    """They were lost, though the training went on."""
    said: list[str] = []
    mine = tracker(tmp_path, say=said.append)
    mine.log({"loss": 1.0}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "append_lines", raising(UserError("cannot be written: No space left on device")))
        mine.log({"loss": 2.0}, 2)
        mine.log({"loss": 3.0}, 3)
    mine.log({"loss": 4.0}, 4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert len(said) == 1 and "No space left" in said[0]
