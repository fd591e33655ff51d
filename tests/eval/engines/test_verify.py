"""verify-engine, whole: against an engine that is our own loop, and against one that strays from it."""

import itertools
import json
import shutil
import sys

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.engines import engine_check as verify
from draftsmith.eval.engines.ours import Exported
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.formats.lvlm import language_model_alone
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.models.targets.load import load_lvlm
from draftsmith.recipes.commands.cli import main
from fails import fails_with
from served_heads import save_draft, save_drawn

TOKENS = 8


@pytest.fixture(scope="module")
def drafted(pair, tmp_path_factory):
    """What our own loop answers and drafts, by request: decoded once for all engines."""
    exported = Exported(pair / "eagle3")
    requests = verify.make_requests(exported.processor, tmp_path_factory.mktemp("pictures"), pictures=True)
    return exported.decode(requests, TOKENS)


class Engine:
    """Answers as vLLM's program does, by our own loop; `stray` changes each answer."""

    def __init__(self, drafted, stray=lambda line, drafts: None):
        self.drafted, self.stray, self.asked = drafted, stray, []

    def __call__(self, program, scratch, asked, *, python, timeout_s):
        self.asked.append(asked)
        assert asked["max_new_tokens"] == TOKENS
        shortest = min(self.drafted[request["name"]].prompt_tokens for request in asked["requests"])
        # A pass takes fewer tokens than a batch's prompts have: later ones are read in pieces.
        assert (asked["engine"].get("max_num_batched_tokens", 999) < 3 * shortest) == (len(self.asked) % 3 == 0)
        lines = [{"engine": "vLLM", "version": "0.32.0", "device": "cpu", "runner": "V1"}]
        for together, request in itertools.product(asked["together"], asked["requests"]):
            drafted = self.drafted[request["name"]]
            line = {"name": request["name"], "together": together, "prompt_tokens": drafted.prompt_tokens}
            line["tokens"] = list(drafted.tokens)
            line["chains"] = list(drafted.chains.values()) if asked["speculative"] else None
            self.stray(line, asked["speculative"] is not None)
            lines.append(line)
        return lines


@pytest.fixture
def run(pair, drafted, tmp_path, monkeypatch):
    """run(stray) -> the engine and what verify_engine finds."""

    def verified(stray=lambda line, drafts: None):
        engine = Engine(drafted, stray)
        monkeypatch.setattr(verify, "run_program", engine)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        return engine, verify.verify_engine(pair / "eagle3", scratch, python="python", max_new_tokens=TOKENS)

    return verified


def test_an_engine_that_is_our_loop_agrees_everywhere(pair, run, tmp_path):
    engine, found = run()
    assert not found.faults and [cell.group for cell in found.cells] == [
        "text", "one picture", "two pictures", "resized picture", "three at once", "prompts in pieces",
    ]  # fmt: skip
    assert all(cell.good and cell.chains > 8 and cell.accepted[0] == cell.accepted[1] for cell in found.cells)
    plain, drafted, cut = engine.asked
    assert [asked["together"] for asked in (plain, drafted, cut)] == [[1], [1, 3], [3]]
    # Three requests at once, each with room for its two pictures of four tokens and one token more.
    assert cut["engine"]["enable_chunked_prefill"] and cut["engine"]["max_num_batched_tokens"] == 27
    assert plain["speculative"] is None and drafted["speculative"]["method"] == "eagle3"
    placeholder = Exported(pair / "eagle3").processor.image_token_id
    for request in drafted["requests"]:
        assert request["ids"].count(placeholder) == len(request["pictures"])
        assert all((tmp_path / "scratch" / name).is_file() for name in request["pictures"])


def test_other_chains_and_other_prompts_are_faults(run):
    def stray(line, drafts):
        if line["name"].startswith("one"):
            line["prompt_tokens"] += 3
        if drafts and line["name"].startswith("text"):
            line["chains"] = [[(token + 1) % 300 for token in chain] for chain in line["chains"]]

    _, found = run(stray)
    problems = " | ".join(problem for problem, _ in found.faults)
    assert "one picture: the prompt has" in problems and "text: " in problems and "chains differ" in problems
    assert len(found.faults) == 2


def test_what_goes_wrong_in_a_batch_alone_or_in_pieces_alone_is_named(run):
    def stray(line, drafts):
        if drafts and line["together"] == 3:
            line["chains"] = [[(token + 1) % 300 for token in chain] for chain in line["chains"]]

    _, found = run(stray)
    assert [problem.partition(":")[0] for problem, _ in found.faults] == ["three at once", "prompts in pieces"]
    assert all("mixes up requests" in hint for _, hint in found.faults)


def test_an_export_for_the_plugin_wants_it_installed(pair, tmp_path, monkeypatch):
    save_drawn("msd", pair / "target", tmp_path / "head")
    made = export_drafter(tmp_path / "head", tmp_path / "msd", "vllm")
    assert any("pip install ./serving/draftsmith-vllm" in note for note in made.notes)
    with pytest.raises(UserError, match=r"draftsmith-vllm is not installed(.|\n)*names a class of it"):
        verify.verify_engine(tmp_path / "msd", tmp_path, python=sys.executable, max_new_tokens=TOKENS)
    text = export_drafter(tmp_path / "head", tmp_path / "text", "vllm", prompts="text")
    assert not any("plugin" in note for note in text.notes)
    assert not Exported(tmp_path / "text").made.plugin and Exported(tmp_path / "msd").made.plugin


def test_a_runner_that_shows_no_chains_is_no_agreement(run):
    with pytest.raises(UserError, match=r"does not show what it drafts(.|\n)*VLLM_USE_V2_MODEL_RUNNER=0"):
        run(lambda line, drafts: line.update(chains=None))


def test_an_unanswered_request_is_named(run):
    with pytest.raises(UserError, match="left 4 requests unanswered: text 1"):
        run(lambda line, drafts: line.update(name=line["name"].replace("text", "x")))


WRONG = {
    "a float": ({"tokens": [1.5] * TOKENS}, "tokens.0: .*integer, found 1.5"),
    "text": ({"tokens": "7"}, "tokens"),
    "negative": ({"tokens": [-1] * TOKENS}, "tokens.0: .*found -1"),
    "a negative count": ({"prompt_tokens": -4}, "prompt_tokens"),
    "flat chains": ({"chains": [5, 6]}, "chains.0"),
    "a chain of floats": ({"chains": [[5.5]]}, "chains.0.0"),
    "a name twice": ({"name": "text 2"}, "answered 'text 2' twice"),
    "a batch that nobody asked for": ({"together": 7}, "or was not asked it so"),
    "a key too many": ({"logprobs": []}, "logprobs"),
}


@pytest.fixture(scope="module")
def side(pair, tmp_path_factory):
    scratch, exported = tmp_path_factory.mktemp("side"), Exported(pair / "eagle3")
    requests = verify.make_requests(exported.processor, scratch, pictures=False)
    return verify._Side(exported, requests, scratch, "python", TOKENS, 60.0, False)


@pytest.mark.parametrize("damage", WRONG)
def test_a_wrong_answer_is_refused_by_its_file_and_line(side, drafted, monkeypatch, damage):
    changes, words = WRONG[damage]
    engine = Engine(drafted, lambda line, drafts: line.update(changes) if line["name"] == "text 3" else None)
    monkeypatch.setattr(verify, "run_program", engine)
    caught = fails_with(words, side.answers, {"method": "eagle3"})
    assert "answers.jsonl, line 4" in caught.where and "log.txt" in caught.hint


@pytest.mark.parametrize(
    "lines", [[], [{"engine": "vLLM"}], [{"engine": 1, "version": "", "device": "", "runner": ""}]]
)
def test_an_engine_that_does_not_say_what_it_is_is_refused(side, monkeypatch, lines):
    monkeypatch.setattr(verify, "run_program", lambda *arguments, **named: lines)
    caught = fails_with(r"wrote no line|version: Field required|engine: ", side.answers, None)
    assert "answers.jsonl" in caught.where


def test_what_is_no_export_for_vllm_is_refused(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftsmith.eval.engines.program.find_python", lambda asked: "python")
    assert main(["verify-engine", str(pair / "head")]) == 2
    assert "draftsmith export FOLDER OUT --to vllm" in capsys.readouterr().err
    assert main(["verify-engine", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["verify-engine", str(pair / "eagle3"), "--target", str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err
    lost = tmp_path / "lost"
    shutil.copytree(pair / "eagle3", lost)
    manifest = json.loads((lost / "draftsmith.json").read_text())
    (lost / "draftsmith.json").write_text(json.dumps(manifest | {"target": {"kind": "llava", "path": "inline"}}))
    assert main(["verify-engine", str(lost)]) == 2
    assert "--target runs/x/target" in capsys.readouterr().err
    for wrong in ({"drafter": {"kind": "eagle3", "of_nobody": 1}}, {"drafter": 7}, {"export": []}, {"target": 7}):
        (lost / "draftsmith.json").write_text(json.dumps(manifest | wrong))
        assert main(["verify-engine", str(lost)]) == 2
        said = capsys.readouterr().err
        assert "draftsmith.json" in said and next(iter(wrong)) in said and "hint" in said


def test_the_command_prints_the_table_and_exits_with_3_for_a_fault(pair, drafted, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftsmith.eval.engines.program.find_python", lambda asked: "python")
    words = ["verify-engine", str(pair / "eagle3"), "--tokens", str(TOKENS)]
    monkeypatch.setattr(verify, "run_program", Engine(drafted))
    assert main([*words, "--keep", str(tmp_path / "kept")]) == 0
    shown = capsys.readouterr().out
    assert "vLLM 0.32.0 on cpu, runner V1" in shown and "resized picture    4/4" in shown and "0 fault(s)" in shown
    assert (tmp_path / "kept" / "two-pictures-0-1.png").is_file()
    assert main([*words, "--keep", str(tmp_path / "kept")]) == 2, "what is kept is not written over"
    monkeypatch.setattr(verify, "run_program", Engine(drafted, lambda line, drafts: line["tokens"].reverse()))
    assert main(words) == 3
    assert "DIFFERS" in capsys.readouterr().out


def test_a_target_without_a_section_is_of_the_kind_that_its_config_names(pair, tmp_path):
    """The manifest of a draft LVLM names a folder alone, and that of a published text model nothing. A head of a target
    that sees may be served beside its language model: verify-engine asked that for pictures.
    """
    save_draft(pair / "target", tmp_path / "draft")
    export_drafter(tmp_path / "draft", tmp_path / "lvlm", "vllm")
    words, alone = tmp_path / "words", tmp_path / "alone"
    shutil.copytree(pair / "twin", words)
    whole = load_lvlm(pair / "target", revision=None, key="target", dtype="auto", whole=True)
    language_model_alone(whole).save_pretrained(alone)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair / "target" / name, words)
        shutil.copy(pair / "target" / name, alone)
    export_drafter(pair / "twin", tmp_path / "text", "vllm", target=str(words))
    of_text = ("text", str(words), CausalTarget), (pair / "eagle3", str(alone), CausalTarget)
    for folder, target, kind in (("lvlm", None, LlavaTarget), *of_text):
        exported = Exported(tmp_path / folder, target)
        assert type(exported.target) is kind
        assert exported.processor.reads_pictures == (kind is LlavaTarget)
