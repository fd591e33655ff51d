"""The page "Your chat log to vLLM": its `logs` command on a log of 20 requests of every kind that servers write."""

import base64
import io
import json
from pathlib import Path

import pytest
import yaml
from draftsmith.data.records.mixture import Selection
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config.load import load
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorials" / "chat-log-to-vllm.md"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}


def user(text, *pictures):
    """The text stands before its pictures."""
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return {"role": "user", "content": [{"type": "text", "text": text}, *shown] if shown else text}


def line(*messages, choices=("Yes.",), reason="stop", **request):
    """A request, and an answer for each of `choices`: a text, or a whole message."""
    answers = [{"role": "assistant", "content": one} if isinstance(one, str) else one for one in choices]
    return {
        "request": {"model": "mine", "messages": list(messages), **request},
        "response": {
            "choices": [{"index": i, "message": one, "finish_reason": reason} for i, one in enumerate(answers)]
        },
    }


def url(shade: int) -> str:
    data = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 0, 0)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def a_log() -> list[dict]:
    """Twenty answers that can be used, of 19 requests, and two that cannot."""
    called = [user("Is it warm?"), {"role": "assistant", "content": None, "tool_calls": [CALL]},
              {"role": "tool", "tool_call_id": CALL["id"], "content": "31"}]  # fmt: skip
    said = [user("Hello."), {"role": "assistant", "content": "Hello."}, user("And?")]
    return [
        *(line(user(f"What is {n}?")) for n in range(4)),
        *(line(user(f"What shade is {n}?", url(n))) for n in range(4)),
        line(user("Which is darker?", url(50), url(51))),
        *(line({"role": role, "content": text}, user(f"Why {text}?"))
          for role, text in (("system", "Be brief."), ("system", "Be kind."), ("developer", "Be long."))),
        line(user("Is it warm?"), tools=TOOLS, choices=[{"role": "assistant", "content": None, "tool_calls": [CALL]}],
             reason="tool_calls"),
        line(*called, tools=TOOLS),
        line(*said),
        {"messages": [*said, {"role": "assistant", "content": "And so on."}]},
        line(user("Think."), choices=[{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]),
        line(user("Think again."), choices=[{"role": "assistant", "content": "Yes.", "reasoning": "Hm, hm."}],
             chat_template_kwargs={"enable_thinking": True}),
        line(user("Choose."), choices=["This.", "That."]),
        line(user("Tell me all."), choices=["It begins with"], reason="length"),
        line(user("And this?", "https://example.com/a.png")),
    ]  # fmt: skip


@pytest.mark.parametrize("held_out", [0, 5])
def test_all_of_twenty_usable_answers_become_records(tmp_path, monkeypatch, capsys, held_out):
    monkeypatch.chdir(tmp_path)
    Path("traffic.jsonl").write_text("\n".join(map(json.dumps, a_log())) + "\n")
    (command,) = [row for row in PAGE.read_text().splitlines() if row.startswith("draftsmith logs ")]
    *words, number = command.split()[1:]
    assert words[-1] == "--held-out" and int(number) == 1
    assert main([*words, str(held_out)]) == 0
    said = capsys.readouterr().out
    assert "left out 1: the server cut the answer (finish_reason: length)" in said
    assert "left out 1: a picture on the network, and nothing is fetched" in said
    names = ["records.jsonl", "held-out.jsonl"] if held_out else ["records.jsonl"]
    files = [f"data/traffic/{name}" for name in names]
    sizes = [len(Selection([name], cache=tmp_path / "cache", seed=0).places()) for name in files]
    assert sum(sizes) == 20 and (not held_out or 3 <= sizes[1] <= held_out), "every record can be read"
    assert yaml.safe_load(said[said.index("format:") :])["format"]["template"] == "chat"


READERS = {"adapt-eagle3-qwen2.5-vl-7b": "evaluate", "eagle3-qwen2.5-vl-7b": "chains", "eagle3-gemma-4-e4b": "chains"}


@pytest.mark.parametrize(("recipe", "stage"), READERS.items())
def test_recipes_read_what_the_page_writes(tmp_path, monkeypatch, capsys, recipe, stage):
    monkeypatch.chdir(tmp_path)
    Path("traffic.jsonl").write_text("\n".join(map(json.dumps, a_log())))
    assert main(["logs", "traffic.jsonl", "data/traffic", "--skip", "--held-out", "2"]) == 0
    section = load([f"recipe={recipe}"]).recipe.stages[stage]
    (benchmark,) = section.benchmarks.values()
    assert Path(benchmark.data.path).is_file() and benchmark.data.path.endswith("held-out.jsonl")
    assert (Path(benchmark.data.images) / "pictures").is_dir()
    assert (section.format.template, section.format.image_rule) == ("chat", "verbatim")


def test_the_adapt_recipe_trains_on_what_the_page_writes():
    data = load(["recipe=adapt-eagle3-qwen2.5-vl-7b"]).recipe.stages["traffic"].data
    assert (data.path, data.images) == ("data/traffic/records.jsonl", "data/traffic")
