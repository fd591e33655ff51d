"""Uploads against a Hub that runs here and speaks HTTP: one commit, private first, tried, no token told."""

import json
import sys
import threading
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
from draftsmith.core.errors import UserError
from draftsmith.core.results import write_sums
from draftsmith.trainers.publish.fresh import try_folder
from draftsmith.trainers.publish.hub_upload import Destination, Hub
from draftsmith.trainers.run.stopping import Stop, Stopped
from fails import fails_with, raising
from hub_server import TOKEN, HubServer, Repository

REPO = "me/llava-draft"
FILES = {"README.md": b"---\nlibrary_name: transformers\n---\n# a draft\n", "config.json": b'{"model_type": "llava"}',
         "draftsmith.json": b'{"published": {}}', "model.safetensors": bytes(range(256)) * 40,
         "report/report.md": b"tau 2.00\n", "report/plot.png": b"\x89PNG" + b"1" * 300}  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    # The plain LFS protocol: what hf_xet speaks is another one, and its server is no part of the Hub's own.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with HubServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "repository"
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    write_sums(place)
    return place


def change(folder, text="{}"):
    (folder / "config.json").write_text(text)
    write_sums(folder)


def upload(server, folder, *, token=TOKEN, try_it=lambda place: None, stop=None, repo=REPO, **to):
    hub = Hub(lambda text: None, token=token, endpoint=server.address, stop=stop)
    fetched = folder.parent / "fetched"
    return hub.publish(folder, Destination(repo, **to), message="a draft", fetched=fetched, try_it=try_it)


def test_one_commit_that_is_private_until_it_has_been_tried(server, folder):
    seen = {}

    def try_it(place):
        repository = server.repositories[REPO]
        seen.update(private=repository.private, files={name: (place / name).read_bytes() for name in FILES})

    done = upload(server, folder, try_it=try_it, public=True)
    repository = server.repositories[REPO]
    assert seen == {"private": True, "files": FILES}
    assert not repository.private and not done.private
    # Everything was written and read while nobody else could see it; only then the door was opened.
    assert all(private for _, private in repository.history[:-1]) and repository.history[-1] == ("settings", False)
    assert [what for what, _ in repository.history].count("commit") == 1
    assert repository.messages == ["initial commit", "a draft"]
    assert repository.commits[done.commit] == FILES | {
        "SHA256SUMS": (folder / "SHA256SUMS").read_bytes(), ".gitattributes": b"*.safetensors filter=lfs",
    }  # fmt: skip
    assert not (folder.parent / "fetched").exists() and not server.told_storage


def test_it_is_private_unless_asked_for_and_the_same_folder_again_is_no_second_commit(server, folder):
    first, again = upload(server, folder), upload(server, folder)
    assert first.private and server.repositories[REPO].private
    assert not any(path.endswith("/settings") for _, path in server.requests)
    assert first.commit == again.commit and len(server.repositories[REPO].messages) == 2


def test_what_the_folder_no_longer_has_goes_in_the_same_commit(server, folder):
    upload(server, folder)
    (folder / "report" / "plot.png").unlink()
    change(folder)
    done = upload(server, folder)
    repository = server.repositories[REPO]
    assert "report/plot.png" not in repository.commits[done.commit]
    assert ".gitattributes" in repository.commits[done.commit] and len(repository.messages) == 3


@pytest.mark.parametrize("pull_request", [False, True])
def test_another_models_files_are_not_removed(pull_request, server, folder):
    """A name mistyped into one of the user's other repositories."""
    other = server.repositories[REPO] = Repository(private=True)
    held = {"README.md": b"mine", "config.json": b"{}", "pytorch_model.bin": b"1" * 9, "adapter/a.bin": b"2"}
    other.commit("main", held, "years of work")
    caught = fails_with(r"adapter/a\.bin, pytorch_model\.bin", upload, server, folder, pull_request=pull_request)
    assert "repository of its own" in caught.hint and other.commits[other.refs["main"]] == held
    assert not any("/storage/" in path for _, path in server.requests)


def test_a_repository_that_could_not_be_made_private(server, folder):
    """Some organisations decide for themselves what a new repository is."""
    server.always_public = True
    fails_with("is public", upload, server, folder)
    assert server.repositories[REPO].messages == ["initial commit"]


def test_a_branch_and_a_pull_request_leave_main_alone(server, folder):
    upload(server, folder)
    change(folder, '{"changed": true}')
    branch = upload(server, folder, revision="second")
    proposed = upload(server, folder, pull_request=True)
    repository = server.repositories[REPO]
    assert repository.commits[repository.refs["main"]]["config.json"] == FILES["config.json"]
    assert repository.refs["second"] == branch.commit and repository.refs["refs/pr/1"] == proposed.commit
    assert proposed.pull_request.endswith("/discussions/1") and branch.pull_request is None
    assert upload(server, folder, revision="second").commit == branch.commit


def test_a_public_repository_gets_nothing_untried_on_main(server, folder):
    upload(server, folder, public=True)
    assert "pull_request" in fails_with("is public", upload, server, folder).hint
    change(folder)
    assert upload(server, folder, pull_request=True).pull_request


def test_a_hub_that_fails_is_told_and_nothing_is_public(server, folder):
    server.fail("POST", "/commit/", 500, times=99)
    caught = fails_with(r"uploading.*500", upload, server, folder, public=True)
    assert "run the same command again" in caught.hint and server.repositories[REPO].private


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "SHA256SUMS", "README.md"])
def test_a_file_that_comes_back_changed_stays_private(name, server, folder):
    content = FILES.get(name, b"")
    server.damage[name] = content[:-1] + b"!" if content else b"not what was sent\n"
    fails_with("came back", upload, server, folder, public=True)
    assert server.repositories[REPO].private


def test_a_folder_that_does_not_load_stays_private(server, folder):
    refuses = raising(UserError("does not load", where="model.safetensors"))
    fails_with("does not load", upload, server, folder, try_it=refuses, public=True)
    assert server.repositories[REPO].private and not any("settings" in path for _, path in server.requests)


def test_without_rights_a_login_or_a_network_it_is_said_why(server, folder, monkeypatch):
    assert "may write to you" in fails_with("you/llava-draft", upload, server, folder, repo="you/llava-draft").hint
    server.requests.clear()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "hf auth login" in fails_with("not logged in", upload, server, folder, token=None).hint
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fails_with("HF_HUB_OFFLINE", upload, server, folder)
    assert server.requests == []


def test_a_secret_is_hidden_before_a_message_is_cut(server, monkeypatch):
    """Half of it is no longer found."""
    monkeypatch.setenv("MY_PASSWORD", "correct-horse-battery")
    hub = Hub(print, token=TOKEN, endpoint=server.address)
    told = hub._clean(ValueError("x" * 490 + " correct-horse-battery"))
    assert told.startswith("x" * 490) and "corr" not in told


@pytest.mark.parametrize(("path", "status"), [("/api/repos/create", 400), ("/commit/", 500), ("/objects/batch", 422)])
def test_a_hub_that_echoes_the_token_does_not_make_us_tell_it(path, status, server, folder, caplog, capfd):
    """No message, no chained exception, no log: whatever the server answers with."""
    server.fail("POST", path, status, times=9, message=f"bad request, Authorization: Bearer {TOKEN}")
    caught = fails_with("", upload, server, folder)
    told, seen = [], caught
    while seen is not None:
        told.append(f"{seen} {seen.args} {json.dumps(seen.__dict__, default=str)}")
        seen = seen.__cause__ or seen.__context__
    assert TOKEN not in "".join(told) + caplog.text + "".join(capfd.readouterr())
    assert caught.__cause__ is None and caught.__context__ is None


# ---- stops


def asked_at(server, method: str, path: str) -> Stop:
    """Asked to stop when the Hub gets such a request."""
    stop = Stop()
    server.on(method, path, lambda: setattr(stop, "raised", True))
    return stop


def test_a_stop_leaves_it_untried_and_the_same_command_begins_again(server, folder):
    with pytest.raises(Stopped, match="it is private"):
        upload(server, folder, public=True, stop=asked_at(server, "POST", "/commit/"))
    repository = server.repositories[REPO]
    assert repository.private and not any("/resolve/" in path for _, path in server.requests)
    assert not upload(server, folder, public=True).private
    assert repository.messages == ["initial commit", "a draft"]


@pytest.mark.parametrize("to", [{"pull_request": True}, {"revision": "b"}])
def test_a_stop_in_a_public_repository_does_not_say_that_it_is_private(to, server, folder):
    upload(server, folder, public=True)
    change(folder)
    with pytest.raises(Stopped, match="the main branch is as it was") as stopped:
        upload(server, folder, stop=asked_at(server, "POST", "/commit/"), **to)
    assert "private" not in str(stopped.value)


def child(folder, script: str, monkeypatch) -> None:
    """What stands for Python where a folder is tried."""
    path = folder.parent / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_stop_ends_the_process_that_tries_the_folder(folder, monkeypatch):
    child(folder, f"echo $$ > {folder.parent}/pid; exec sleep 60", monkeypatch)
    stop, start = Stop(), time.monotonic()
    threading.Timer(1, lambda: setattr(stop, "raised", True)).start()
    fails_with("in a fresh process", try_folder, folder, None, [], {}, stop=stop, error=Stopped)
    assert time.monotonic() - start < 30
    assert not Path(f"/proc/{(folder.parent / 'pid').read_text().strip()}").exists()
