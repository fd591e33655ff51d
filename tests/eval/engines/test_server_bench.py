"""`draftsmith bench` against servers that stream and count as vLLM does (chat_server_in_place.py): what is asked and
counted, and how it ends where a server fails. vLLM itself is in test_bench_vllm.py.
"""

import base64
import json
import math

import pytest
from chat_server_in_place import PASS_S, Server, passes, words
from draftsmith.core.errors import UserError
from draftsmith.data.records.logged_pictures import Conversation
from draftsmith.eval.engines.server_bench import ChatServer, ServerBench
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from PIL import Image

TOKENS, DRAFTS = 12, 3


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def talk(number, *further):
    turns = [{"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": "an answer of the data"}]
    return Conversation(f"c{number}", {"conversations": turns, "turns": list(further)}, None)


def bench(server, beside=None, at_once=(1,), **changes):
    settings = {"temperature": 0.0, "max_new_tokens": TOKENS, "seed": 0, "say": lambda text: None} | changes
    return ServerBench(ChatServer(server.url), beside and ChatServer(beside.url), at_once, **settings)


TALKS = [talk(0, "and then ?"), talk(1), talk(2), talk(3), talk(4)]


def test_cells_are_of_the_clients_clock_and_the_servers_counters():
    with Server(drafts=DRAFTS) as server, Server() as plain:
        measured = bench(server, plain, at_once=(1, 4))
        cells, answers = measured.measure({"mine": TALKS})
        assert server.most_running == 4 and not measured.notes
    assert [(cell["method"], cell["concurrency"], cell["requests"]) for cell in cells] == [
        (PLAIN, 1, 6), (PLAIN, 4, 6), (server.url, 1, 6), (server.url, 4, 6),
    ]  # fmt: skip
    expected = passes(None, TOKENS, DRAFTS)
    for cell in cells[2:]:
        assert cell["identical"] == 6 and cell["tau"] == (TOKENS - 1) / len(expected)
        assert cell["accepted"] == [sum(a > place for a, _ in expected) / len(expected) for place in range(DRAFTS)]
    for cell in cells[:2]:
        assert cell["identical"] is None and cell["tau"] == 1 and cell["accepted"] == [] and cell["speedup"] == 1
        assert cell["between_p50_s"] >= PASS_S
    assert cells[2]["speedup"] == cells[2]["tokens_per_s"] / cells[0]["tokens_per_s"] > 1.2
    assert cells[2]["between_p50_s"] < 0.75 * cells[0]["between_p50_s"]
    assert len(answers) == 4 * 6 and {answer["tokens"] for answer in answers} == {TOKENS}
    assert {(a["conversation"], a["turn"]) for a in answers} == {(f"c{n}", 1) for n in range(5)} | {("c0", 2)}
    for answer in answers:
        assert answer["began_s"] + PASS_S <= answer["first_s"] < answer["ended_s"]


def test_a_turn_follows_the_servers_own_answers_and_none_of_the_data():
    with Server() as server:
        bench(server).measure({"mine": TALKS[:1]})
        first, last = server.asked[-2]["messages"], server.asked[-1]["messages"]
        assert first == [{"role": "user", "content": "question 0"}]
        answer = " ".join(words(first, TOKENS)) + " "
        assert last == [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then ?"}]
        asked = server.asked[-1]
        assert (asked["model"], asked["temperature"], asked["max_tokens"], asked["seed"]) == ("tiny", 0.0, TOKENS, 0)


def test_the_time_to_the_first_token_is_no_empty_event():
    """vLLM sends the role first, before the prompt was read."""
    with Server(prefill_s=0.05) as server:
        cells, _ = bench(server).measure({"mine": TALKS[:2]})
    assert cells[0]["ttft_p50_s"] >= 0.05 and math.isnan(cells[0]["speedup"])


def test_other_answers_are_counted():
    """The model of the other server is asked for two more tokens, so that its texts go on."""
    with Server(drafts=1) as server, Server() as plain:
        measured = bench(server, plain)
        real = ChatServer.ask

        def ask(self, messages, **settings):
            longer = self.url == plain.url and "question 1" in str(messages)
            return real(self, messages, **settings | {"max_new_tokens": TOKENS + 2 * longer})

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(ChatServer, "ask", ask)
            cells, _ = measured.measure({"mine": TALKS})
    assert cells[1]["identical"] == 5 and cells[1]["requests"] == 6


def test_pictures_are_sent_where_their_marks_stand(tmp_path):
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (8, 6), (200, 30, 40)).save(tmp_path / name)
    turns = [{"from": "system", "value": "be short"}, {"from": "human", "value": "first <image>\nand <image> now"},
             {"from": "gpt", "value": "yes"}, {"from": "human", "value": "why ?"}]  # fmt: skip
    messages = Conversation("c", {"conversations": turns, "image": ["a.png", "b.jpg"]}, tmp_path).messages()
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    parts = messages[1]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "text", "image_url", "text"]
    assert [parts[n]["text"] for n in (0, 2, 4)] == ["first", "and", "now"]
    for part, name, kind in ((parts[1], "a.png", "png"), (parts[3], "b.jpg", "jpeg")):
        head, _, data = part["image_url"]["url"].partition(",")
        assert head == f"data:image/{kind};base64" and base64.b64decode(data) == (tmp_path / name).read_bytes()
    with pytest.raises(UserError, match="leads out of the folder"):
        Conversation("c", {"conversations": turns, "image": ["../a.png", "b.jpg"]}, tmp_path).messages()
    fails_with("has clips", Conversation("c", {"conversations": turns[1:2], "video": "a.mp4"}, tmp_path).messages)


FAILS = {
    "a refused request": ({"fails": 400}, r'answers 400 to /v1/chat/completions: the "prompt" is too long'),
    "a fault of the server": ({"fails": 500}, "answers 500"),
    "an answer that is cut": ({"fails": "cut"}, "ends within an answer"),
    "an error within an answer": ({"fails": "error"}, "ends an answer: EngineCore encountered an issue"),
    "no count of tokens": ({"counts": False}, "without a count"),
    "several models": ({"models": ["a", "b"]}, r"has the models a, b(.|\n)*--model"),
    "no such model": ({"models": []}, "has the models"),
}


@pytest.mark.parametrize("which", FAILS)
def test_a_server_that_fails_is_one_sentence(which):
    settings, sentence = FAILS[which]
    with Server(**settings) as server, pytest.raises(UserError, match=sentence) as caught:
        bench(server, at_once=(4,)).measure({"mine": TALKS})
    assert caught.value.where == server.url and caught.value.hint


def test_a_server_that_died_or_is_none():
    with Server() as server:
        measured = bench(server)
        assert measured.server.model == "tiny"
    fails_with(r"does not answer: .*refused", measured.measure, {"mine": TALKS})
    with pytest.raises(UserError, match="no address"):
        _ = ChatServer("file:///etc/passwd").model


ODD = ("{", "[]", "3", "null", '{"data": 3}', '{"data": [3]}', "\ud800", "[" * 9999)


@pytest.mark.parametrize("text", ODD)
def test_odd_pages_of_a_server_are_one_sentence(text):
    """Of its models; a version or counters that nobody understands count as none."""
    with Server(page=text) as server:
        with pytest.raises(UserError, match="no answer of an OpenAI-style server"):
            _ = ChatServer(server.url).model
        assert ChatServer(server.url).engine == "server" and not ChatServer(server.url).counters()


ODD_EVENTS = (
    {"choices": 3}, {"choices": [3]}, {"choices": [{}, {}]}, {"choices": [{"delta": 3}]}, {"usage": 3},
    {"choices": [{"delta": {"content": 3}}]}, {"usage": {"completion_tokens": "x"}, "choices": [{"a": 1}]},
)  # fmt: skip


@pytest.mark.parametrize("event", ODD_EVENTS)
def test_odd_events_of_a_server_are_one_sentence(event):
    with Server(event=event) as server, pytest.raises(UserError, match="no answer of an OpenAI-style server"):
        bench(server).measure({"mine": TALKS[:1]})


def test_an_answer_that_does_not_end_is_left():
    endless = Server(event={"choices": [{"delta": {"content": "x"}}]}, endless=True)
    with endless, pytest.raises(UserError, match=f"does not end after {TOKENS} tokens"):
        bench(endless).measure({"mine": TALKS[:1]})


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_no_key_goes_to_another_server(monkeypatch, path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-" + "secret")
    with Server() as other, Server(redirects=(path, other.url)) as server:
        fails_with(f"sends requests on to {other.url}", bench(server).measure, {"mine": TALKS[:1]})
        assert not other.heard
        server.settings["redirects"] = ("/v1/models", server.url + "/moved")
        assert ChatServer(server.url).model == "tiny", "its own paths are followed"


def test_a_server_without_metrics_has_no_tau():
    with Server(metrics=False) as server:
        cells, _ = bench(server).measure({"mine": TALKS[:2]})
    assert math.isnan(cells[0]["tau"]) and cells[0]["accepted"] == [] and cells[0]["tokens_per_s"] > 0


def mmspec(folder):
    """A file of another name, as its rows tell what it is."""
    (folder / "images").mkdir(parents=True)
    rows = [{"id": f"m{n}", "image": f"m{n}.png", "turns": ["what is red ?", "and blue ?"][: n + 1], "category": "x",
             "topic": "charts"} for n in range(2)]  # fmt: skip
    for row in rows:
        Image.new("RGB", (24, 24), (200, 60, 90)).save(folder / "images" / row["image"])
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "mine.jsonl"


def test_the_command_writes_its_pages(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with Server(drafts=2, version="0.32.0") as server, Server() as plain:
        command = ["bench", f"{server.url}/v1/", str(mmspec(tmp_path / "set")), "--beside", plain.url]
        assert main([*command, "--at-once", "1,2", "--tokens", "6", "--output", str(tmp_path / "out")]) == 0
        assert len(server.asked) == 1 + 3 + 2 + 3, "first turns warm up, then all"
        assert any(part["type"] == "image_url" for part in server.asked[0]["messages"][0]["content"])
    said = capsys.readouterr().out
    assert "Served by vLLM 0.32.0" in said and "| MMSpec | plain decoding | 1 | 3 |" in said and "3/3" in said
    assert (tmp_path / "out" / "bench.md").read_text() in said and "secret" not in said
    values = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [cell["identical"] for cell in values["cells"]] == [None, None, 3, 3] and values["notes"] == []
    assert values["about"]["model"] == "tiny" and "--at-once 1,2" in values["about"]["command"]
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 4 * 3
    assert (tmp_path / "out" / "served.png").stat().st_size > 10_000
    assert "served.png" in said and "data:image/png" in (tmp_path / "out" / "bench.html").read_text()


def records(folder):
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8), (9, 9, 9)).save(folder / "p.png")
    rows = [{"id": n, "conversations": [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "x"}],
             "image": "p.png"} for n in range(4)]  # fmt: skip
    (folder / "data.json").write_text(json.dumps(rows))
    return folder / "data.json"


def test_a_recipes_benchmarks_and_records_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = records(tmp_path / "data")
    benchmarks = {"mine": {"data": {"path": str(file), "question_end": "Be short."}}}
    stage = {"kind": "evaluate", "benchmarks": benchmarks, "methods": {"m": {"drafter": {"kind": "ngram"}}}}
    recipe = {"target": {"kind": "llava", "path": "nowhere"}, "stages": {"e": stage}, "output": str(tmp_path / "run")}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    with Server() as server:
        assert main(["bench", server.url, "r.yaml", "--at-once", "1", "--tokens", "3", "--limit", "2"]) == 0
        assert len(server.asked) == 3
        assert server.asked[0]["messages"][0]["content"][1]["text"] == "what ? Be short."
        server.asked.clear()
        assert main(["bench", server.url, str(file), "--at-once", "1", "--tokens", "3"]) == 0
        assert len(server.asked) == 5 and not (tmp_path / "run").exists()
    cells = json.loads((tmp_path / "bench" / "bench.json").read_text())["cells"]
    assert cells[0]["place"] == "data" and cells[0]["speedup"] is None


def test_what_a_user_can_get_wrong(tmp_path, capsys):
    file, url = str(records(tmp_path)), "http://127.0.0.1:9"
    for command, sentence in (
        ([url, file, "--at-once", "1,x"], "is no list of numbers"),
        ([url, file, "--limit", "0"], "above 0"),
        ([url, file, "beside=http://localhost:1"], "settings are of a recipe"),
        ([url, "lvlm/llava15-69m"], "llava15-68m"),
        ([url, str(tmp_path / "gone.json")], "gone.json"),
        ([url, file], "does not answer"),
    ):
        assert main(["bench", *command]) == 2, command
        assert sentence in capsys.readouterr().err
    with Server() as server:
        (tmp_path / "p.png").write_bytes(b"<html>")
        assert main(["bench", server.url, file, "--output", str(tmp_path / "out")]) == 2
        assert "corrupt image" in capsys.readouterr().err and not (tmp_path / "out").exists() and not server.asked
