"""Logs of chat completions as records: every form that servers write, each fault with its cure, nothing fetched."""

import base64
import io
import json

import pytest
from draftsmith.core.errors import UserError
from draftsmith.data import chat_logs
from draftsmith.data.chat_logs import convert
from draftsmith.data.mixture import Selection
from draftsmith.recipes.cli import main
from PIL import Image


def png(color=(200, 30, 30)) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 6), color).save(data, "PNG")
    return data.getvalue()


def url(color=(200, 30, 30)) -> str:
    return "data:image/png;base64," + base64.b64encode(png(color)).decode()


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def shown(text, *urls):
    return [*({"type": "image_url", "image_url": {"url": one}} for one in urls), {"type": "text", "text": text}]


USUAL = {"messages": [said("user", "What is red?"), said("assistant", "A colour.")]}


def written(tmp_path, *lines):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    return path


def records(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_the_forms_that_servers_write(tmp_path):
    asked = [said("user", shown("And this?", url()))]
    answer = [{"index": 0, "message": said("assistant", "A square."), "finish_reason": "stop"}]
    log = written(
        tmp_path, USUAL, {"request": {"model": "m", "messages": asked}, "response": {"choices": answer}},
        {"body": {"messages": asked}, "response": {"status_code": 200, "body": {"choices": answer}}},
        {"messages": asked, "choices": answer},
    )  # fmt: skip
    found = convert(log, tmp_path / "out")
    assert (found.records, found.pictures, found.turns, found.system) == (4, 1, 4, "")
    first, *others = records(tmp_path / "out")
    assert first == {
        "id": "log-1",
        "conversations": [{"from": "human", "value": "What is red?"}, {"from": "gpt", "value": "A colour."}],
    }
    name = others[0]["image"]
    assert (tmp_path / "out" / name).read_bytes() == png() and [one["image"] for one in others] == [name] * 3
    assert others[0]["conversations"][0]["value"] == "<image>\nAnd this?"
    assert not (tmp_path / "out" / "skipped.jsonl").exists()
    chosen = Selection([str(tmp_path / "out" / "records.jsonl")], cache=tmp_path / "cache", seed=0)
    assert len(chosen.places()) == 4, "data.path reads them"


def test_several_turns_and_pictures_in_order(tmp_path):
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "a b.png").write_bytes(png((0, 0, 250)))
    parts = [
        {"type": "text", "text": "First"}, {"type": "image_url", "image_url": url()},
        {"type": "text", "text": "then"}, {"type": "image_url", "image_url": {"url": "a b.png"}},
    ]  # fmt: skip
    again = [{"type": "image_url", "image_url": {"url": f"file://{tmp_path}/up/a%20b.png"}}]
    line = {
        "messages": [said("user", parts), said("assistant", "Red."), said("user", again), said("assistant", "Blue")]
    }
    found = convert(written(tmp_path, line), tmp_path / "out", images=tmp_path / "up")
    (record,) = records(tmp_path / "out")
    assert (found.pictures, found.turns) == (2, 2) and len(record["image"]) == 3
    assert record["image"][1] == record["image"][2] != record["image"][0]
    assert [turn["value"] for turn in record["conversations"]] == [
        "First\n<image>\nthen\n<image>", "Red.", "<image>", "Blue",
    ]  # fmt: skip


def test_one_system_message(tmp_path):
    with_it = {"messages": [said("system", "Be brief."), *USUAL["messages"]]}
    other = {"messages": [said("developer", "Be long."), *USUAL["messages"]]}
    log = written(tmp_path, with_it, USUAL, with_it, other)
    with pytest.raises(UserError, match="another system message than most lines have") as error:
        convert(log, tmp_path / "out")
    assert "line 2" in error.value.where and "--any-system" in error.value.hint
    assert not (tmp_path / "out").exists(), "whole or not at all"
    found = convert(log, tmp_path / "out", skip=True)
    assert (found.records, found.system) == (2, "Be brief.") and sum(found.skipped.values()) == 2
    assert convert(log, tmp_path / "any", any_system=True).records == 4


@pytest.mark.parametrize(
    ("line", "problem", "cure"),
    [
        ("{", "not JSON", "one JSON object"),
        ("[1]", "no JSON object", "one JSON object"),
        ({"prompt": "x"}, "no messages", "a line has `messages`"),
        ({"messages": ["x"]}, "a message is no JSON object", ""),
        ({"messages": USUAL["messages"][:1]}, "no answer", "regenerate"),
        ({"messages": [said("user", "x"), said("assistant", "  ")]}, "an empty answer", ""),
        ({"messages": [said("user", "x"), said("user", "y"), said("assistant", "z")]}, "must alternate", ""),
        ({"messages": [said("assistant", "z")]}, "must alternate", ""),
        ({"messages": [said("user", "x"), said("assistant", None, tool_calls=[{}])]}, "calls tools", "no template"),
        ({"messages": [said("user", "an <image> tag"), said("assistant", "z")]}, "a text says <image>", ""),
        ({"messages": [said("user", [{"type": "input_audio"}]), said("assistant", "z")]}, "type 'input_audio'", "text"),
        ({"messages": [said("user", 3), said("assistant", "z")]}, "a message without text", "a list of parts"),
        ({"messages": [said("user", shown("x", "https://a.b/c.png")), said("assistant", "z")]},
         "on the network, and nothing is fetched", "download it"),
        ({"messages": [said("user", shown("x", "s3://a/c.png")), said("assistant", "z")]}, "scheme s3", "data: URLs"),
        ({"messages": [said("user", shown("x", "../../etc/passwd")), said("assistant", "z")]}, "outside", "--images"),
        ({"messages": [said("user", shown("x", "/etc/hostname")), said("assistant", "z")]}, "outside", "--images"),
        ({"messages": [said("user", shown("x", "none.png")), said("assistant", "z")]}, "not there", "--images"),
        ({"messages": [said("user", shown("x", "log.jsonl")), said("assistant", "z")]}, "cannot be read", ""),
        ({"messages": [said("user", shown("x", "data:image/png,abc")), said("assistant", "z")]}, "not base64", ""),
        ({"messages": [said("user", shown("x", "data:image/png;base64,*")), said("assistant", "z")]}, "not base64", ""),
        ({"messages": [said("user", shown("x", url()[:-40])), said("assistant", "z")]}, "cannot be read", ""),
        ({"messages": [said("user", shown("x", 3)), said("assistant", "z")]}, "without an address", ""),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_used_is_named_or_left_out(tmp_path, line, problem, cure):
    log = written(tmp_path, USUAL, line)
    with pytest.raises(UserError) as error:
        convert(log, tmp_path / "out")
    assert problem in error.value.problem and cure in error.value.hint and error.value.where == f"{log}, line 2"
    assert not (tmp_path / "out").exists()
    found = convert(log, tmp_path / "out", skip=True)
    assert found.records == 1 and sum(found.skipped.values()) == 1
    assert problem in json.loads((tmp_path / "out" / "skipped.jsonl").read_text())["problem"]


def test_large_pictures_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_logs, "_MOST_BYTES", 20)
    (tmp_path / "a.png").write_bytes(png())
    for one in (url(), "a.png"):
        log = written(tmp_path, USUAL, {"messages": [said("user", shown("x", one)), said("assistant", "z")]})
        with pytest.raises(UserError, match="more than 64 MiB"):
            convert(log, tmp_path / "out")


def test_a_log_without_a_usable_line(tmp_path):
    with pytest.raises(UserError, match="no line can be used: no answer"):
        convert(written(tmp_path, {"messages": USUAL["messages"][:1]}), tmp_path / "out", skip=True)
    with pytest.raises(UserError, match="no line can be used: the file has no lines"):
        convert(written(tmp_path), tmp_path / "out")
    with pytest.raises(UserError, match="cannot be read"):
        convert(tmp_path / "nowhere.jsonl", tmp_path / "out")


def test_the_command_prints_the_recipes_sections(tmp_path, capsys):
    line = {"messages": [said("system", "Be brief."), said("user", shown("x", url())), said("assistant", "z")]}
    log = written(tmp_path, line, line, USUAL)
    assert main(["logs", str(log), str(tmp_path / "out"), "--skip"]) == 0
    told = capsys.readouterr().out
    assert f"written  {tmp_path}/out/records.jsonl: 2 records, 2 answers" in told and "1 different pictures" in told
    assert "left out 1: another system message" in told and "skipped.jsonl lists them" in told
    assert "format: {system: Be brief.}" in told and f"path: {tmp_path}/out/records.jsonl" in told
    assert main(["logs", str(log), str(tmp_path / "out")]) == 2, "the folder exists"
