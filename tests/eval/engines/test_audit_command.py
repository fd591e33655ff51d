"""`draftsmith audit` against toy servers with the fields of each engine: what is asked, what the page says, and how it
ends where a server fails. vLLM itself is in test_audit_vllm.py.
"""

import json
import math
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.engines.audit import END
from draftsmith.eval.engines.exact_law import GREEDY, Sampling
from draftsmith.eval.engines.server import Server, WithPictures
from draftsmith.recipes.commands import audit as command
from draftsmith.recipes.commands.cli import main
from engine_in_place import EngineInPlace, ids
from fails import fails_with
from PIL import Image

ENGINES = ("vllm", "llamacpp", "sglang")
TEXT = [{"role": "user", "content": "a question of mine"}]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def audited(tmp_path, drafting, plain, *more):
    code = main(["audit", drafting.url, "--beside", f"{plain.url}/v1/", "--limit", "12", "--tokens", "48",
                 "--output", str(tmp_path / "out"), *more])  # fmt: skip
    return code, json.loads((tmp_path / "out" / "audit.json").read_text())


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_go_in_and_ids_and_laws_come_out(engine):
    with EngineInPlace(engine=engine) as one:
        server = Server(one.url)
        prompt = server.prompt(TEXT)
        assert prompt == tuple(ids(TEXT[0]["content"])) and server.engine == engine
        for sampling in (GREEDY, Sampling(0.7, 5), Sampling(top_p=0.8)):
            expected = one.toy.answer(prompt, (4, 5), 30, sampling, seed=3, shown=20)
            assert server.answer(prompt, (4, 5), 30, sampling, seed=3, shown=20) == expected
            assert server.answer(prompt, (4, 5), 30, sampling, seed=3).laws == ()
        seeds = range(20)
        assert any(server.answer(prompt, (), 30, Sampling(), seed=seed).tokens[-1] == END for seed in seeds)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_right_server_passes_and_a_page_says_so(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-" + "secret")
    prefix = "llamacpp" if engine == "llamacpp" else "vllm"
    with EngineInPlace(None, engine, counters=prefix) as server, EngineInPlace(engine=engine, counters=prefix) as plain:
        code, found = audited(tmp_path, server, plain, "--draws", "400" if engine == "vllm" else "48")
        assert {key for _, key in server.heard} == {"Bearer sk-secret"} and server.most_running > 1
    said = capsys.readouterr().out
    assert found["greedy"]["differences"] == found["faults"] == [] and found["greedy"]["tokens"] == 576
    if engine == "vllm":
        assert code == 0 and found["verdict"] == "no fault" and found["missing"] == [], said
        assert "Verdict: **no fault was seen**" in said and found["drawn"]["draws"] == 400
    assert [cell["drafting"] for cell in found["cells"]] == [False, False, True, True]
    cells = found["cells"]
    assert cells[2]["tau"] == 1.75 and cells[2]["accepted"] == [0.5, 0.25] and cells[0]["tau"] is None
    assert all(cell["requests"] == 12 and cell["request_s"] > 0 and cell["tokens_per_s"] > 0 for cell in cells)
    page = (tmp_path / "out" / "audit.md").read_text()
    assert page in said and "| drafting | 8 |" in page
    assert "accepted at 2" in (tmp_path / "out" / "audit.html").read_text() and "secret" not in said


def test_a_fault_and_too_little_power_have_their_exit_codes(tmp_path, capsys):
    with EngineInPlace("bonus of the draft") as server, EngineInPlace() as plain:
        code, found = audited(tmp_path, server, plain, "--draws", "0")
    faults = [one for one in found["greedy"]["differences"] if one["verdict"] == "fault"]
    assert code == 1 and found["verdict"] == "fault" and f"greedy: {len(faults)} of" in found["faults"][0]
    page = capsys.readouterr().out
    assert "**fault**" in page and faults[0]["gap"] > 0 and {one["at_once"] for one in faults} <= {1, 8}
    assert f"10 of {len(found['greedy']['differences'])}; prompts and places from 0" in page
    assert "12 prompts, answers of at most 48 tokens; 1 and 8 at once" in page
    with EngineInPlace("greedy under sampling") as server, EngineInPlace() as plain:
        code, found = audited(tmp_path, server, plain, "--draws", "200")
    assert code == 1 and found["drawn"]["draws"] < 200 and "drafted tokens depart by" in found["faults"][0]
    with EngineInPlace(None) as server, EngineInPlace() as plain:
        code, found = audited(tmp_path, server, plain, "--draws", "12", "--top-k", "5")
    assert code == 3 and found["verdict"] == "not enough power" and "1 in 5 is asked for" in found["missing"][-1]
    assert "draws: --draws)" in found["missing"][-1] and "too little was tried" in capsys.readouterr().out
    assert found["about"]["sampling"] == "T = 1, top-k 5"
    assert {asked["top_k"] for path, asked in server.asked if asked.get("temperature")} == {5}


def test_a_server_that_drafts_nothing_and_a_plain_one_that_does(tmp_path, capsys):
    with EngineInPlace("plain", counters="vllm") as server, EngineInPlace() as plain:
        code, found = audited(tmp_path, server, plain, "--draws", "12")
        assert code == 3 and "drafted nothing" in found["missing"][0]
        server.toy.fault = None
        before = len(server.asked)
        assert main(["audit", plain.url, "--beside", server.url, "--limit", "20"]) == 2
        assert len(server.asked) < before + 20 + 5, "told by its first answer"
    assert "the server beside drafts itself" in capsys.readouterr().err


def records(folder):
    Image.new("RGB", (8, 8), (9, 9, 9)).save(folder / "p.png")
    turns = [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "x"}]
    rows = [{"id": n, "conversations": turns, "image": "p.png"} for n in range(4)]
    (folder / "data.json").write_text(json.dumps(rows))
    return str(folder / "data.json")


def test_records_with_pictures(tmp_path):
    """Token t5 is written as t1: what follows it cannot be asked, and is left out rather than taken for a fault."""
    with EngineInPlace(None, misread="t5") as server, EngineInPlace(misread="t5") as plain:
        code, found = audited(tmp_path, server, plain, records(tmp_path), "--draws", "24")
        prompt = WithPictures([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
        assert Server(plain.url).answer(prompt, (4, 5), 3, GREEDY) is None
        assert Server(plain.url).answer(prompt, (4, 6), 3, GREEDY).tokens
    assert code == 3 and not found["faults"] and found["about"]["prompts"] == 4
    parts = [asked["messages"][0]["content"] for path, asked in server.asked if path.endswith("chat/completions")]
    assert parts[0][0]["image_url"]["url"].startswith("data:image/png;base64,") and len(parts) > 20
    with EngineInPlace(engine="llamacpp") as llama:
        fails_with("prompts with pictures are not audited at llamacpp", Server(llama.url).prompt, prompt.messages)


def test_records_that_cannot_be_read(tmp_path, capsys):
    file = Path(records(tmp_path))
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([rows[0], *(row | {"image": "gone.png"} for row in rows[1:])]))
    with EngineInPlace(None) as server, EngineInPlace() as plain:
        assert main(["audit", server.url, str(file), "--beside", plain.url]) == 2
        assert "gone.png" in capsys.readouterr().err
        found = audited(tmp_path, server, plain, str(file), "--draws", "0", "--on-error", "skip")[1]
    assert found["about"]["prompts"] == 1 and "left out" in capsys.readouterr().out


FAILS = {
    "a refused request": ({"fails": 400}, r'answers 400 to /tokenize: the "prompt" is too long'),
    "a fault of the server": ({"fails": 500}, "answers 500"),
    "several models": ({"models": ["a", "b"]}, r"has the models a, b(.|\n)*--model"),
    "no such model": ({"models": []}, "has the models"),
}


@pytest.mark.parametrize("which", FAILS)
def test_a_server_that_fails_is_one_sentence(which):
    settings, sentence = FAILS[which]
    with EngineInPlace(**settings) as one, pytest.raises(UserError, match=sentence) as caught:
        Server(one.url).prompt(TEXT)
    assert caught.value.where == one.url and caught.value.hint


def test_a_server_that_died_or_is_none():
    with EngineInPlace() as one:
        server = Server(one.url)
        assert server.model == "tiny" and Server(one.url, "tiny").model == "tiny"
    fails_with(r"does not answer: .*refused", server.prompt, TEXT)
    fails_with("no address", Server("file:///etc/passwd").prompt, TEXT)


CHOICE = {"token_ids": [1], "finish_reason": "length", "logprobs": {"top_logprobs": [{"token_id:1": -0.1}]}}
ODD = (
    "{", "[]", "3", "null", '{"choices": 3}', '{"choices": [3]}', "\ud800", "[" * 9999,
    *(json.dumps({"choices": [CHOICE | change]}) for change in (
        {"token_ids": None}, {"token_ids": ["x"]}, {"token_ids": [-1]}, {"token_ids": [True]},
        {"token_ids": [1] * 3, "logprobs": {"top_logprobs": [{"token_id:1": -0.1}] * 3}},
        {"token_ids": []}, {"logprobs": None}, {"logprobs": {"top_logprobs": [{}]}},
        {"logprobs": {"top_logprobs": [{"word": -0.1}]}}, {"logprobs": {"top_logprobs": [{"token_id:1": None}]}},
        {"logprobs": {"top_logprobs": [{"token_id:1": 3.0}]}}, {"logprobs": {"top_logprobs": [{"token_id:1": "x"}]}},
    )),
)  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_odd_answers_of_a_server_are_one_sentence(text):
    """Counters that nobody understands count as none."""
    paths = ("/v1/completions", "/metrics") + (("/v1/models",) if "choices" not in text else ())
    with EngineInPlace(pages=dict.fromkeys(paths, text)) as one:
        with pytest.raises(UserError, match=r"no answer of an OpenAI-style server|an answer of \d tokens"):
            Server(one.url).answer((1, 2), (), 2, GREEDY, shown=20)
        assert not Server(one.url).counters()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_no_key_goes_to_another_server(monkeypatch, path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-" + "secret")
    with EngineInPlace() as other, EngineInPlace(redirects=(path, other.url)) as one:
        fails_with(f"sends requests on to {other.url}", Server(one.url).answer, (1, 2), (), 2, GREEDY)
        assert not other.heard
        one.settings["redirects"] = ("/v1/models", one.url + "/moved")
        assert Server(one.url).model == "tiny", "its own paths are followed"


def test_what_a_user_can_get_wrong(tmp_path, capsys):
    url, file = "http://127.0.0.1:9", records(tmp_path)
    for words, sentence in (
        ([url], "--beside"),
        ([url, "--beside", url, "--limit", "0"], "--limit and --tokens are numbers"),
        ([url, "--beside", url, "--draws", "-1"], "--draws and --top-k from 0"),
        ([url, "--beside", url, "--top-k", "20"], "no draws with T = 1, top-k 20"),
        ([url, "--beside", url, "--top-p", "1.5"], "no draws with"),
        ([url, "--beside", url, "--temperature", "0.5"], "do not tell the law at T = 0.5"),
        ([url, str(tmp_path / "gone.json"), "--beside", url], "gone.json"),
        ([url, file, "--beside", url], "does not answer"),
        ([url, "--beside", url], "does not answer"),
    ):
        assert main(["audit", *words]) == 2, words
        assert sentence in capsys.readouterr().err
    assert main(["bench", url]) == 2 and "draftsmith audit" in capsys.readouterr().err
    with EngineInPlace() as one, EngineInPlace(pages={"/tokenize": '{"tokens": [1]}'}) as other:
        assert main(["audit", other.url, "--beside", one.url]) == 2
    assert "not of one target" in capsys.readouterr().err
    assert not (tmp_path / "audit").exists() and command.COMMAND.name == "audit"


def test_times_that_cannot_be_are_told():
    plain = {"drafting": False, "at once": 1, "tokens_per_s": 10.0}
    for rate, told in ((10.0, False), (21.0, True)):
        drafting = {"drafting": True, "at once": 1, "tokens_per_s": rate, "tau": 1.5}
        assert bool(command._disturbed([plain, drafting])) is told
    assert command._disturbed([plain, drafting | {"tau": math.nan}]) == [], "nothing was drafted"
    assert command._disturbed([plain | {"tokens_per_s": 0.0}, drafting]) == [], "it ended each answer at once"
