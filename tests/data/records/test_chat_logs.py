"""Logs of chat completions as records: every form that servers write, each fault with its cure, nothing fetched."""

import base64
import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.records import chat_logs, logged_pictures
from draftsmith.data.records.chat_logs import convert
from draftsmith.data.records.mixture import Selection
from fails import fails_with
from PIL import Image
from small_records import talk


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
    assert (found.records, found.pictures, found.answers) == (4, 1, 4) and not any(found.has.values())
    first, *others = records(tmp_path / "out")
    assert first == {"id": "log-1", "conversations": talk("What is red?", "A colour.")}
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
    assert (found.pictures, found.answers) == (2, 2) and len(record["image"]) == 3
    assert record["image"][1] == record["image"][2] != record["image"][0]
    assert [turn["value"] for turn in record["conversations"]] == [
        "First\n<image>\nthen\n<image>", "Red.", "<image>", "Blue",
    ]  # fmt: skip


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}


def test_each_record_keeps_its_own_system_message_and_tools(tmp_path):
    brief = {"messages": [said("system", "Be brief."), *USUAL["messages"]]}
    long = {"messages": [said("developer", [{"type": "text", "text": "Be long."}]), *USUAL["messages"]]}
    called = {
        "request": {
            "messages": [said("user", "Is it warm?"), said("assistant", None, tool_calls=[CALL]),
                         said("tool", "31", tool_call_id="abcdefgh1")],
            "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False},
        },
        "response": {"choices": [{"message": said("assistant", "Yes."), "finish_reason": "stop"}]},
    }  # fmt: skip
    asks = {"request": {"messages": [said("user", "Is it warm?")], "tools": TOOLS},
            "response": {"choices": [{"message": said("assistant", "", tool_calls=[CALL]),
                                      "finish_reason": "tool_calls"}]}}  # fmt: skip
    found = convert(written(tmp_path, brief, USUAL, long, called, asks), tmp_path / "out")
    assert (found.records, found.answers) == (5, 5) and not found.skipped
    assert found.has == {"a system message": 2, "tools": 2, "reasoning": 0}
    first, second, third, fourth, fifth = records(tmp_path / "out")
    assert [one["conversations"][0] for one in (first, second, third)] == [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "What is red?"},
        {"from": "developer", "value": "Be long."},
    ]  # fmt: skip
    parsed = [CALL | {"function": {"name": "weather", "arguments": {"town": "Bern"}}}]
    assert fourth["tools"] == fifth["tools"] == TOOLS
    assert fourth["chat_template_kwargs"] == {"enable_thinking": False}
    assert fourth["conversations"] == [
        {"from": "human", "value": "Is it warm?"},
        {"from": "gpt", "value": "", "tool_calls": parsed, "weight": 0},
        {"from": "tool", "value": "31", "tool_call_id": "abcdefgh1"}, {"from": "gpt", "value": "Yes."},
    ]  # fmt: skip
    assert fifth["conversations"][-1] == {"from": "gpt", "value": "", "tool_calls": parsed}
    chosen = Selection([str(tmp_path / "out" / "records.jsonl")], cache=tmp_path / "cache", seed=0)
    assert len(chosen.places()) == 5, "data.path reads them"


def test_texts_that_follow_each_other_are_one_and_breaks_are_kept(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\nb"}, *shown("", url()), *shown("\nc", url())]
    convert(written(tmp_path, {"messages": [said("user", parts), said("assistant", "z")]}), tmp_path / "out")
    (record,) = records(tmp_path / "out")
    assert record["conversations"][0]["value"] == "a\nb\n<image>\n<image>\n\nc"


def answered(*choices):
    return {"request": {"messages": [said("user", "Tell me.")]}, "response": {"choices": list(choices)}}


def choice(text, reason="stop", **more):
    return {"message": said("assistant", text), "finish_reason": reason, **more}


def test_each_choice_is_a_record_and_cut_answers_are_left_out_and_counted(tmp_path):
    """The last line's answer, too: its own reason stands beside the messages."""
    log = written(
        tmp_path, answered(choice("One."), choice("Tw", "length"), choice("Three.")), answered(choice("F", "length")),
        answered(choice("Fi", "content_filter")), answered(choice("S", "stop", stop_reason="ix")),
        answered(choice("Seven", "stop", stop_reason=None)), USUAL | {"finish_reason": "length"},
    )  # fmt: skip
    found = convert(log, tmp_path / "out")  # without --skip: a cut answer is nobody's mistake
    assert [one["id"] for one in records(tmp_path / "out")] == ["log-1", "log-1.3", "log-5"]
    assert found.skipped == {
        "the server cut the answer (finish_reason: length)": 3, "a stop string cut the answer": 1,
        "the server cut the answer (finish_reason: content_filter)": 1,
    }  # fmt: skip
    listed = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [one["line"] for one in listed] == [1, 2, 3, 4, 6] and "regenerate" in listed[0]["cure"]


def test_an_answer_is_learned_where_it_was_logged_and_not_in_later_requests(tmp_path):
    """A chat of two turns is two lines of a gateway's log; a line without `choices` is a whole conversation."""
    turns = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    second = {"request": {"messages": turns}, "response": {"choices": [choice("d")]}}
    whole = {"messages": [*turns, said("assistant", "d")]}
    found = convert(written(tmp_path, second, whole), tmp_path / "out")
    weights = [[turn.get("weight") for turn in one["conversations"]] for one in records(tmp_path / "out")]
    assert weights == [[None, 0, None, None], [None] * 4] and found.answers == 3


@pytest.mark.parametrize("names", [("request", "response"), ("request_body", "response_body")])
def test_halves_that_are_strings_of_json_are_read(tmp_path, names):
    halves = {"messages": [said("user", "a")]}, {"choices": [choice("b")]}
    line = {name: json.dumps(half) for name, half in zip(names, halves, strict=True)}
    assert convert(written(tmp_path, line), tmp_path / "out").records == 1


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept(tmp_path, key):
    line = answered({"message": said("assistant", "Yes.", **{key: "Hm."}), "finish_reason": "stop"})
    found = convert(written(tmp_path, line), tmp_path / "out")
    (record,) = records(tmp_path / "out")
    assert record["conversations"][-1] == {"from": "gpt", "value": "Yes.", "reasoning": "Hm."}
    assert found.has["reasoning"] == 1


def test_what_is_held_out_shares_no_picture_and_no_conversation(tmp_path):
    def asked(text, *colors, before=()):
        return {"messages": [*before, said("user", shown(text, *(url((c, 0, 0)) for c in colors))),
                             said("assistant", "z")]}  # fmt: skip

    lines = [asked(f"How? {n}", n // 3) for n in range(30)]  # ten pictures, of three questions each
    lines += [asked("Both?", 1, 2)]  # joins two of them
    for n in range(8):  # conversations that a log has twice: up to the first answer, and up to the second
        first = asked(f"Why? {n}")
        lines += [first, asked("And?", 100 + n, before=first["messages"])]
    found = convert(written(tmp_path, *lines), tmp_path / "out", held_out=12)
    assert found.records + found.held_out == len(lines) and 10 <= found.held_out <= 12
    kept = records(tmp_path / "out")
    apart = [json.loads(line) for line in (tmp_path / "out" / "held-out.jsonl").read_text().splitlines()]
    assert (len(kept), len(apart)) == (found.records, found.held_out)

    def of(rows, what):
        return {value for row in rows for value in what(row)}

    def pictures(row):
        return [row["image"]] if isinstance(row.get("image"), str) else row.get("image", [])

    def questions(row):
        return [row["conversations"][0]["value"]] if "image" not in row or len(row["conversations"]) > 2 else []

    assert not of(kept, pictures) & of(apart, pictures) and not of(kept, questions) & of(apart, questions)
    convert(tmp_path / "log.jsonl", tmp_path / "again", held_out=12)
    assert (tmp_path / "again/held-out.jsonl").read_text() == (tmp_path / "out/held-out.jsonl").read_text()
    chosen = Selection([str(tmp_path / "out" / "held-out.jsonl")], cache=tmp_path / "cache", seed=0)
    assert len(chosen.places()) == found.held_out, "data.path reads them"
    same = written(tmp_path, *[asked(f"How? {n}", 1) for n in range(4)])
    fails_with(r"cannot be kept apart: the smallest group .* has 4 of 4", convert, same, tmp_path / "none", held_out=2)
    assert not (tmp_path / "none").exists()


ONE = json.dumps(USUAL).encode()


@pytest.mark.parametrize(("data", "kind", "cure"), [
    (b"[" + ONE + b", " + ONE + b"]", "a JSON array", "jq -c '.[]'"),
    (b"[\n" + ONE + b"]", "a JSON array", "jq -c '.[]'"),
    (json.dumps(USUAL, indent=1).encode(), "not JSON", "jq -c"),
    (b"data: " + ONE + b"\n\ndata: [DONE]\n", "not JSON", "one JSON object on each line"),
    (ONE.decode().encode("utf-16"), "UTF-16", "iconv"),
    (ONE.decode().encode("utf-16-le"), "UTF-16", "iconv"),
    (b"SQL" + ONE + b"\0", "binary data", "fetch it again"),
    (b"\x28\xb5\x2f\xfd123", "zstd", "zstd -d"),
    (b"PAR1123", "a Parquet table", "JSON lines"),
    (gzip.compress(b"[" + ONE + b"]", mtime=0), "a JSON array", "jq -c"),
    (gzip.compress(ONE, mtime=0)[:-12], "a damaged gzip file", "again"),
])  # fmt: skip
def test_another_kind_of_file_is_named(tmp_path, data, kind, cure):
    (tmp_path / "log.jsonl").write_bytes(data)
    error = fails_with(kind, convert, tmp_path / "log.jsonl", tmp_path / "out")
    assert cure in str(error.hint) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [gzip.compress(ONE + b"\n" + ONE, mtime=0), b"\xef\xbb\xbf" + ONE + b"\r\n" + ONE])
def test_packed_and_marked_files_are_read(tmp_path, data):
    (tmp_path / "log.jsonl.gz").write_bytes(data)
    assert convert(tmp_path / "log.jsonl.gz", tmp_path / "out").records == 2


def test_nothing_is_read_until_memory_ends(tmp_path, monkeypatch):
    for device in ("/dev/zero", tmp_path):
        fails_with("not a regular file", convert, Path(device), tmp_path / "out")
    monkeypatch.setattr(chat_logs, "MOST_BYTES", 4096)
    endless = b'{"messages": "' + b"x" * (3 << 20)
    (tmp_path / "log.jsonl").write_bytes(ONE + b"\n" + endless + b"\n" + ONE + b"\n" + endless)
    tracemalloc.start()
    found = convert(tmp_path / "log.jsonl", tmp_path / "out", skip=True)
    assert tracemalloc.get_traced_memory()[1] < 3 << 20
    tracemalloc.stop()
    assert found.records == 2 and found.skipped == {"a line of more than 0 MiB": 2}


@pytest.mark.parametrize(("line", "problem", "cure"), [
    ("{", "not JSON", "one JSON object"),
    ("[1]", "no JSON object", "one JSON object"),
    ({"prompt": "x"}, "no messages", "a line has `messages`"),
    ({"messages": ["x"]}, "a message is no JSON object", ""),
    ({"messages": [said("user", "x"), said("assistant", "  ")]}, "an empty answer", ""),
    ({"messages": [said("user", "x"), said("user", "y"), said("assistant", "z")]}, "do not alternate", ""),
    ({"messages": [said("assistant", "z")]}, "no question", ""),
    ({"messages": [said("user", "x"), said("assistant", None, tool_calls=[{}])]}, "a tool call without", ""),
    ({"messages": [said("user", "x"), said("tool", "3"), said("assistant", "z")]}, "do not alternate", ""),
    ({"messages": [said("user", "x"), said("system", "y"), said("assistant", "z")]}, "must alternate", ""),
    (USUAL | {"functions": [{}]}, "a request with functions", "no record"),
    (USUAL | {"tools": [{"type": "<image>"}]}, "a text says <image>", ""),
    (USUAL | {"tools": {"a": 1}}, "tools", ""),
    ({"messages": [said("user", "\ud83d"), said("assistant", "z")]}, "half a character", ""),
    ({"messages": USUAL["messages"][:1], "choices": [{"delta": {"content": "A"}}]}, "streamed", "one `message`"),
    ({"messages": USUAL["messages"][:1], "choices": [{"text": "A"}]}, "no answer", "regenerate"),
    ({"messages": USUAL["messages"][:1], "choices": [1]}, "a choice is no JSON object", ""),
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
    *(({"messages": [said("user", shown("x", name)), said("assistant", "z")]}, "that no file can have", "mend or")
      for name in ("y" * 300, "a\0b", "\ud800.png", "http://[::1")),
])  # fmt: skip
def test_a_line_that_cannot_be_used_is_named_or_left_out(tmp_path, line, problem, cure):
    log = written(tmp_path, USUAL, line)
    error = fails_with("", convert, log, tmp_path / "out")
    assert problem in error.problem and cure in error.hint and error.where == f"{log}, line 2"
    assert not (tmp_path / "out").exists()
    found = convert(log, tmp_path / "out", skip=True)
    assert found.records == 1 and sum(found.skipped.values()) == 1
    assert problem in json.loads((tmp_path / "out" / "skipped.jsonl").read_text())["problem"]


def test_a_request_without_an_answer_is_a_question(tmp_path):
    """Of the answers before it each was logged with a request of its own."""
    before = [said("user", "What is red?"), said("assistant", "A colour.")]
    log = written(tmp_path, USUAL, {"request": {"messages": [*before, said("user", "And blue?")]}},
                  {"messages": USUAL["messages"][:1], "choices": []})  # fmt: skip
    found = convert(log, tmp_path / "out")
    assert (found.records, found.answers, found.questions) == (3, 1, 2) and not found.skipped
    assert [turn.get("weight") for turn in records(tmp_path / "out")[1]["conversations"]] == [None, 0, None]
    named = [str(tmp_path / "out" / "records.jsonl")]
    sizes = [len(Selection(named, cache=tmp_path / "cache", seed=0, learned=learned).places()) for learned in (0, 1)]
    assert sizes == [3, 1], "a stage that learns the log's own answers takes those with one"


def test_large_pictures_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(logged_pictures, "MOST_BYTES", 20)
    (tmp_path / "a.png").write_bytes(png())
    for one in (url(), "a.png"):
        log = written(tmp_path, USUAL, {"messages": [said("user", shown("x", one)), said("assistant", "z")]})
        fails_with("more than 64 MiB", convert, log, tmp_path / "out")


def test_a_log_without_a_usable_line(tmp_path):
    with pytest.raises(UserError, match="no line can be used: no question"):
        convert(written(tmp_path, {"messages": [said("assistant", "z")]}), tmp_path / "out", skip=True)
    fails_with("no line can be used: the file has no lines", convert, written(tmp_path), tmp_path / "out")
    fails_with("file not found", convert, tmp_path / "nowhere.jsonl", tmp_path / "out")
