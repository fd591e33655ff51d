"""verify-engine, whole: against an engine that is our own loop, and against one that strays from it."""

import json
import shutil

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.engines import verify
from draftsmith.eval.engines.ours import Exported
from draftsmith.recipes.cli import main
from served_pair import build


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    build(folder, steps=8)
    return folder


class Engine:
    """Answers as vLLM's program does, by our own loop; `stray` changes each answer."""

    def __init__(self, folder, stray=lambda line, drafts: None):
        self.folder, self.stray, self.asked = folder, stray, []

    def __call__(self, program, scratch, asked, *, python):
        self.asked.append(asked)
        exported, requests = Exported(self.folder), verify.make_requests(Exported(self.folder).processor, scratch,
                                                                         pictures=True)  # fmt: skip
        ours = exported.decode(requests, asked["max_new_tokens"])
        lines = [{"vllm": "0.32.0", "torch": "2.13.0", "device": "cpu", "runner": "V1"}]
        for request in requests:
            drafted = ours[request.name]
            line = {"name": request.name, "prompt_tokens": drafted.prompt_tokens, "tokens": drafted.tokens}
            line["chains"] = list(drafted.chains.values()) if asked["speculative"] else None
            self.stray(line, asked["speculative"] is not None)
            lines.append(line)
        return lines


def run(pair, tmp_path, monkeypatch, stray=lambda line, drafts: None):
    engine = Engine(pair / "eagle3", stray)
    monkeypatch.setattr(verify, "run_program", engine)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return engine, verify.verify_engine(pair / "eagle3", scratch, python="python", max_new_tokens=12)


def test_an_engine_that_is_our_loop_agrees_everywhere(pair, tmp_path, monkeypatch):
    engine, found = run(pair, tmp_path, monkeypatch)
    assert not found.faults and [cell.group for cell in found.cells] == [
        "text", "one picture", "two pictures", "resized picture",
    ]  # fmt: skip
    assert all(cell.good and cell.chains > 8 and cell.accepted[0] == cell.accepted[1] for cell in found.cells)
    plain, drafted = engine.asked
    assert plain["speculative"] is None and drafted["speculative"]["method"] == "eagle3"
    placeholder = Exported(pair / "eagle3").processor.image_token_id
    for request in drafted["requests"]:
        assert request["ids"].count(placeholder) == len(request["pictures"])
        assert all((tmp_path / "scratch" / name).is_file() for name in request["pictures"])


def test_other_chains_and_other_prompts_are_faults(pair, tmp_path, monkeypatch):
    def stray(line, drafts):
        if line["name"].startswith("one"):
            line["prompt_tokens"] += 3
        if drafts and line["name"].startswith("text"):
            line["chains"] = [[(token + 1) % 300 for token in chain] for chain in line["chains"]]

    _, found = run(pair, tmp_path, monkeypatch, stray)
    problems = " | ".join(problem for problem, _ in found.faults)
    assert "one picture: the prompt has" in problems and "text: " in problems and "chains differ" in problems
    assert len(found.faults) == 2


def test_a_runner_that_shows_no_chains_is_no_agreement(pair, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"does not show what it drafts(.|\n)*VLLM_USE_V2_MODEL_RUNNER=0"):
        run(pair, tmp_path, monkeypatch, lambda line, drafts: line.update(chains=None))


def test_an_unanswered_request_is_named(pair, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="left 4 requests unanswered: text 1"):
        run(pair, tmp_path, monkeypatch, lambda line, drafts: line.update(name=line["name"].replace("text", "x")))


def test_what_is_no_export_for_vllm_is_refused(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftsmith.eval.engines.program.find_python", lambda asked: "python")
    assert main(["verify-engine", str(pair / "head")]) == 2
    assert "draftsmith export FOLDER OUT --to vllm" in capsys.readouterr().err
    lost = tmp_path / "lost"
    shutil.copytree(pair / "eagle3", lost)
    manifest = json.loads((lost / "draftsmith.json").read_text())
    (lost / "draftsmith.json").write_text(json.dumps(manifest | {"target": {"kind": "llava", "path": "inline"}}))
    assert main(["verify-engine", str(lost)]) == 2
    assert "--target runs/x/target" in capsys.readouterr().err


def test_the_command_prints_the_table_and_exits_with_3_for_a_fault(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftsmith.eval.engines.program.find_python", lambda asked: "python")
    words = ["verify-engine", str(pair / "eagle3"), "--tokens", "10"]
    monkeypatch.setattr(verify, "run_program", Engine(pair / "eagle3"))
    assert main([*words, "--keep", str(tmp_path / "kept")]) == 0
    shown = capsys.readouterr().out
    assert "vLLM 0.32.0 on cpu, runner V1" in shown and "resized picture  4/4" in shown and "0 fault(s)" in shown
    assert (tmp_path / "kept" / "two-pictures-0-1.png").is_file()
    assert main([*words, "--keep", str(tmp_path / "kept")]) == 2, "what is kept is not written over"
    monkeypatch.setattr(verify, "run_program", Engine(pair / "eagle3", lambda line, drafts: line["tokens"].reverse()))
    assert main(words) == 3
    assert "DIFFERS" in capsys.readouterr().out
