"""Logs of chat completions as records: every form that servers write, each fault with its cure, nothing fetched."""

import base64
import gzip
import io
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.records import chat_logs, logged_pictures
from draftsmith.data.records.mixture import Selection
from fails import fails_with
from PIL import Image
from small_records import talk


def convert(log, destination, *more, **settings):
    return chat_logs.convert([log, *more], destination, **settings)


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
        fails_with(r"not a regular file|no log in this folder", convert, Path(device), tmp_path / "out")
    monkeypatch.setattr(chat_logs, "MOST_BYTES", 4096)
    endless = b'{"messages": "' + b"x" * (3 << 20)
    (tmp_path / "log.jsonl").write_bytes(ONE + b"\n" + endless + b"\n" + ONE + b"\n" + endless)
    tracemalloc.start()
    found = convert(tmp_path / "log.jsonl", tmp_path / "out", skip=True)
    assert tracemalloc.get_traced_memory()[1] < 3 << 20
    tracemalloc.stop()
    assert found.records == 2 and found.skipped == {"a line of more than 0 MiB": 2}


@pytest.mark.parametrize(("line", "problem", "cure"), [
    ("{", "not JSON", "one JSON object"), ('{"messages": [], "logprob": NaN}', "not JSON", "one JSON object"),
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
    ({"messages": USUAL["messages"][:1], "choices": [{"delta": {"content": "A"}}]}, "streamed", "as a list"),
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


def asked_with(**fields):
    return {"request": {"messages": [said("user", "Tell me.")], **fields}, "response": {"choices": [choice("Yes.")]}}


@pytest.mark.parametrize("fields", [
    {"reasoning_effort": "low"}, {"truncate_prompt_tokens": 8}, {"add_generation_prompt": False}, {"echo": True},
    {"mm_processor_kwargs": {"max_pixels": 9}}, {"include_reasoning": False}, {"skip_special_tokens": False},
    {"unheard_of": 0}, {"tools": TOOLS, "tool_choice": "none"}, {"documents": [{"text": "a"}]},
    {"extra_body": {"reasoning_effort": "low"}},
])  # fmt: skip
def test_a_field_that_may_have_changed_the_prompt_is_refused(tmp_path, fields):
    """No list of harmful ones: tomorrow's server has another. A line with messages is its own request."""
    (name,) = [key for key in {**fields, **fields.get("extra_body", {})} if key not in ("tools", "extra_body")]
    whole = {"messages": USUAL["messages"], **fields}
    for line in (asked_with(**fields), whole):
        log = written(tmp_path, USUAL, line)
        error = fails_with(f"a request with {name}", convert, log, tmp_path / "out")
        assert f"--ignore {name}" in error.hint
        found = convert(log, tmp_path / "out", skip=True)
        assert found.records == 1 and found.skipped == {f"a request with {name}": 1}
        assert convert(log, tmp_path / "all", ignored=[name]).records == 2
        for made in ("out", "all"):
            shutil.rmtree(tmp_path / made)


def test_fields_that_change_nothing_and_those_at_their_default_pass(tmp_path):
    harmless = {
        "temperature": 0.2, "top_p": 1, "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
        "n": 1, "response_format": {"type": "text"}, "tool_choice": "auto", "reasoning_effort": None, "user": "u",
        "add_generation_prompt": True, "echo": False, "documents": [], "chat_template": "", "seed": 3,
    }  # fmt: skip
    assert convert(written(tmp_path, asked_with(**harmless)), tmp_path / "out").records == 1


@pytest.mark.parametrize(("stop", "end", "learned"), [
    (None, {"matched_stop": 151645}, True), (None, {"matched_stop": "ix"}, False), ("ix", {}, False),
    (["ix"], {"stop_reason": None}, True), (None, {"stop_reason": 151645}, True), ([], {}, True),
])  # fmt: skip
def test_what_ended_an_answer(tmp_path, stop, end, learned):
    """SGLang's field and vLLM's; where the request has stops and the answer neither, nobody knows."""
    line = {"request": {"messages": [said("user", "a")], "stop": stop},
            "response": {"choices": [choice("b", "stop", **end)]}}  # fmt: skip
    assert convert(written(tmp_path, USUAL, line), tmp_path / "out").records == 1 + learned


def test_a_token_that_the_request_stops_at_is_no_end(tmp_path):
    line = {"request": {"messages": [said("user", "a")], "stop_token_ids": [7]},
            "response": {"choices": [choice("b", stop_reason=7), choice("c", stop_reason=8)]}}  # fmt: skip
    found = convert(written(tmp_path, line), tmp_path / "out")
    assert [one["conversations"][-1]["value"] for one in records(tmp_path / "out")] == ["c"] and found.answers == 1


def piece(delta, reason=None, index=0, **more):
    return {"object": "chat.completion.chunk", "model": "m",
            "choices": [{"index": index, "delta": delta, "finish_reason": reason, **more}]}  # fmt: skip


CALLED = [{"index": 0, "id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"to'}},
          {"index": 0, "function": {"arguments": 'wn": "Bern"}'}}]  # fmt: skip
PIECES = [
    piece({"role": "assistant", "content": ""}), piece({"reasoning": "H"}), piece({"reasoning": "m."}),
    piece({"content": "Y"}), piece({"content": "No"}, index=1), piece({"content": "es."}),
    piece({"tool_calls": CALLED[:1]}, index=1), piece({"tool_calls": CALLED[1:]}, index=1),
    piece({}, "stop", stop_reason=None), piece({}, "tool_calls", index=1, stop_reason=None),
    {"object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 9}},
]  # fmt: skip


def events(pieces):
    return "".join(f"data: {json.dumps(one)}\n\n" for one in pieces) + "data: [DONE]\n\n"


@pytest.mark.parametrize("form", ["pieces", "events", "text of pieces", "body"])
def test_streamed_answers_are_joined(tmp_path, form):
    response = {"pieces": PIECES, "events": events(PIECES), "text of pieces": json.dumps(PIECES),
                "body": {"status_code": 200, "body": events(PIECES)}}[form]  # fmt: skip
    request = {"messages": [said("user", "a")], "stream": True, "stop": "ix", "tools": TOOLS}
    broken = {"request": request, "response": events(PIECES[:6])}
    found = convert(written(tmp_path, {"request": request, "response": response}, broken), tmp_path / "out")
    first, second = [one["conversations"][-1] for one in records(tmp_path / "out")]
    assert first == {"from": "gpt", "value": "Yes.", "reasoning": "Hm."}
    assert second["value"] == "No" and second["tool_calls"][0]["function"]["arguments"] == {"town": "Bern"}
    assert found.questions == 0 and found.models == {"m": 2}
    assert found.skipped == {"the server cut the answer (finish_reason: the stream breaks off)": 2}


def test_an_answer_that_cannot_be_read_is_no_question(tmp_path):
    for response in ("half of {", 3, [3], {"text": "redacted-by-litellm"}, {"chunks": PIECES}):
        log = written(tmp_path, USUAL, {"request": {"messages": [said("user", "a")]}, "response": response})
        fails_with("an answer of no known form", convert, log, tmp_path / "out")


def replaced(tree, value):
    """The tree once for each of its parts, with the value in its place."""
    yield value
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        for other in replaced(part, value):
            copy = tree.copy()
            copy[key] = other
            yield copy


@pytest.mark.parametrize("form", range(4))
def test_whatever_stands_in_a_line_is_one_sentence(tmp_path, form):
    asked, answer = (
        [said("user", "a")],
        [choice("b", stop_reason=None) | {"message": said("assistant", "b", tool_calls=[CALL])}],
    )
    line = [
        {"request": {"messages": asked, "tools": TOOLS, "stop": ["x"], "max_tokens": 9, "extra_body": {"n": 1}},
         "response": {"model": "m", "choices": answer, "usage": {"completion_tokens": 3}}},
        {"messages": asked, "model_parameters": {"tools": TOOLS}, "response": PIECES[-5:], "status": "success"},
        {"input": asked, "output": answer[0]["message"], "modelParameters": {"max_tokens": 9}, "usage": {"output": 3}},
        {"body": {"messages": asked}, "response": {"status_code": 200, "body": {"choices": answer}}},
    ][form]  # fmt: skip
    odd = (None, 0, 1e9, True, "", "{", "[1]", "data: 3", "data: {", [], [None], [[]], {}, {"a": 1}, "\ud800")
    lines = [one for value in odd for one in replaced(line, value)]
    found = convert(written(tmp_path, USUAL, *map(json.dumps, lines)), tmp_path / "out", skip=True, models=["m"])
    assert found.records + sum(found.skipped.values()) >= len(lines) - 3  # an empty list of choices, of messages, ...


def test_lines_of_litellm_and_langfuse(tmp_path):
    asked = [said("user", "Is it warm?")]
    lite = {"id": "1", "call_type": "acompletion", "status": "success", "model": "m", "messages": asked,
            "model_parameters": {"tools": TOOLS, "temperature": 0, "extra_body": {"top_k": 1}}, "error_str": None,
            "response": {"model": "m", "choices": [choice("Yes.")]}, "response_cost": 0.1}  # fmt: skip
    fuse = {"id": "2", "traceId": "3", "type": "GENERATION", "level": "DEFAULT", "model": "m", "input": asked,
            "output": said("assistant", "Yes."), "modelParameters": {"max_tokens": "256"}}  # fmt: skip
    more = [fuse | {"input": json.dumps({"messages": asked, "tools": TOOLS}), "output": json.dumps(fuse["output"])},
            fuse | {"output": "Yes."}]  # fmt: skip
    cut = fuse | {"modelParameters": {"max_tokens": 9}, "usage": {"output": 9}}
    found = convert(written(tmp_path, lite, fuse, *more, cut), tmp_path / "out")
    made = records(tmp_path / "out")
    assert [one.get("tools") for one in made] == [TOOLS, None, TOOLS, None] and found.models == {"m": 4}
    assert {one["conversations"][-1]["value"] for one in made} == {"Yes."} and found.repeated == 2
    assert found.skipped == {"the server cut the answer (finish_reason: length)": 1}


def test_answers_of_other_models_errors_and_redacted_ones_are_left_out(tmp_path):
    def of(model, text="Yes."):
        return {"request": {"model": "any", "messages": [said("user", text)]},
                "response": {"model": model, "choices": [choice(text)]}}  # fmt: skip

    error = {"request": {"messages": [said("user", "a")]}, "response": {"error": {"message": "full"}}}
    status = {"body": {"messages": [said("user", "a")]}, "response": {"status_code": 500, "body": {"message": "x"}}}
    failed = {"messages": [said("user", "a")], "status": "failure", "response": {}}
    hidden = [of("m", text) for text in ("redacted-by-litellm", "[REDACTED]", "<hidden>")]
    log = written(tmp_path, of("m"), of("m"), of("n"), error, status, failed, *hidden, of("m", "Hidden."))
    refused = fails_with(r"answers of 2 models: m \(3\), n \(1\)", convert, log, tmp_path / "out")
    assert "--model" in refused.hint and not (tmp_path / "out").exists()
    found = convert(log, tmp_path / "out", models=["m"])  # without --skip: nobody's mistake
    assert (found.records, found.repeated, found.models) == (3, 1, {"m": 3})
    assert found.skipped == {"the server answered with an error": 3, "a redacted text": 3, "an answer of model n": 1}
    assert convert(log, tmp_path / "both", models=["m", "n"]).models == {"m": 3, "n": 1}


def test_several_files_and_folders(tmp_path):
    for name in ("a/log.jsonl", "a/deep/log.jsonl", "b/log.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        line = {"messages": [said("user", shown("x", "c.png")), said("assistant", name)]}
        (tmp_path / name).write_text(json.dumps(line))
    for folder in ("a", "b"):
        (tmp_path / folder / "c.png").write_bytes(png())
    found = convert(tmp_path / "a", tmp_path / "a" / "out", tmp_path / "b" / "log.jsonl")
    assert [one["id"] for one in records(tmp_path / "a" / "out")] == ["deep/log-1", "log-1", "log.2-1"]
    assert (found.records, found.pictures) == (3, 1)


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
