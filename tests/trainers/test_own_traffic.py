"""A head goes on with a log of one's own traffic: the log, its records, the recipe that ships, the report.

Only the target, the lengths and the numbers of samples are smaller.
"""

import base64
import io
import json
from pathlib import Path

import pytest
import tiny_qwen
import yaml
from command_line import prints
from draftsmith.recipes.commands.cli import main
from PIL import Image
from states_run import WORDS

KIND = "qwen2_5_vl"
TEMPLATE = Path(__file__).parents[1] / "data" / "chat_templates" / "qwen2.5-vl.jinja"
PIXELS = {"min_pixels": 256, "max_pixels": 256, "max_length": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`target`, a tiny Qwen2.5-VL, and `traffic.jsonl`, what it was asked: every other request shows a picture."""
    folder = tmp_path_factory.mktemp("traffic")
    tiny_qwen.saved(folder, KIND, WORDS, 7, chat_template=TEMPLATE.read_text(), min_pixels=256, max_pixels=256)
    lines = [line(number, url(number) if number % 2 else None) for number in range(20)]
    lines.insert(3, line(99, "https://example.com/a.png"))
    lines[5]["request"]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def url(number: int) -> str:
    data = io.BytesIO()
    Image.new("RGB", (16, 16), (12 * number, 255 - 12 * number, 90)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def line(number: int, picture: str | None) -> dict:
    """A request and its answer, as servers of the OpenAI kind log them; the text stands before the picture."""
    shown = [] if picture is None else [{"type": "image_url", "image_url": {"url": picture}}]
    asked = [{"role": "user", "content": [{"type": "text", "text": "Which?"}, *shown]}]
    answer = " ".join((WORDS * 2)[number % 3 : number % 3 + 6])
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    return {"request": {"model": "mine", "messages": asked}, "response": {"choices": [choice]}}


def adapting(start, printed: dict) -> dict:
    """The recipe that ships, with the sections that `draftsmith logs` printed."""
    data, apart = printed["data"] | PIXELS, printed["benchmarks"]["held-out"]["data"] | PIXELS
    return {
        "extends": "adapt-eagle3-qwen2.5-vl-7b",
        "target": {"path": "target", "dtype": "float32"},
        "drafter": {"draft_vocab_size": 200},
        "stages": {
            "traffic": {
                "from": start, "format": printed["format"], "data": data, "batch_size": 4, "epochs": 3,
                "micro_batch_size": 4, "num_workers": 0, "held_out": 0.2, "validation": {"every": 4},
                "optim": {"lr": 0.002}, "log_every": 1,
            },
            "evaluate": {
                "format": printed["format"], "benchmarks": {"traffic": {"data": apart}},
                "methods": {"as it was": {"drafter": {"path": "runs/base/traffic", "draft_vocab_size": 200}}},
                "max_new_tokens": 8,
            },
        },
        "engine": {"zero_stage": 0, "precision": "fp32"},
        "tracking": {"wandb": None},
    }  # fmt: skip


def test_a_log_becomes_a_head_that_is_measured_beside_the_one_it_was(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    said = prints(capsys, ["logs", "traffic.jsonl", "data/traffic", "--skip", "--held-out", "3"])
    assert "records.jsonl: 17 records" in said and "held-out.jsonl: 3 records" in said and "left out 1:" in said
    assert "20 answers to learn; 1 with a system message" in said
    printed = yaml.safe_load(said[said.index("format:") :])

    def run(name: str, start, *more: str) -> list[float]:
        """Held-out losses of the recipe's training, one after every fourth step."""
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(adapting(start, printed), sort_keys=False))
        assert main([f"recipe={name}.yaml", f"output=runs/{name}", *more]) == 0
        metrics = (folder / "runs" / name / "traffic" / "metrics.jsonl").read_text().splitlines()
        return [row["val_loss"] for row in map(json.loads, metrics) if "val_loss" in row]

    base = run("base", "scratch", "stages=[traffic]")
    adapted = run("adapted", {"path": "runs/base/traffic"})
    assert base[0] > base[-1], "a head learns from the log"
    assert adapted[0] < base[0] and adapted[-1] < base[-1], "and the next training goes on where it was"
    report = json.loads((folder / "runs/adapted/evaluate/report.json").read_text())
    assert {cell["method"]: cell["requests"] for cell in report["cells"]} == {
        "adapted": 3, "as it was": 3, "adapted, chain of 5": 3, "prompt lookup": 3, "suffix lookup": 3,
    }  # fmt: skip
    assert "Greedy outputs are identical to plain decoding" in capsys.readouterr().out
