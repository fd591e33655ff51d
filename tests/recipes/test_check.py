"""`draftsmith check`: what it says of data that is there, broken or absent, and that it writes nothing."""

import json
import re
import shutil

import pytest
from draftsmith.core.errors import FAULTS, OK
from draftsmith.models.folders import shipped_folder
from draftsmith.recipes.commands.cli import main
from draftsmith.recipes.config import preflight_samples
from draftsmith.recipes.config.checks import stages_findings
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.run.matching import FINGERPRINTS, write_begun, write_done
from draftsmith.trainers.train.checkpoint import MANIFEST
from PIL import Image

FEW = [
    "recipe=demo/lvlm-from-nothing",
    "stages.world.splits.train={name: 1, colors: 1, caption: 2, attribute: 10, conversation: 2, place: 1, probe: 1, "
    "count: 1, word: 1, difference: 1, edit: 1, story: 1, sums: 5, fact: 5, aside: 1}",
    "stages.world.splits.align.caption=1",
    "stages.world.splits.seen={attribute: 1, conversation: 1, place: 1, count: 1, probe: 1, difference: 1}",
    "stages.world.splits.text={sums: 1, fact: 1, aside: 1}",
    "stages.world.splits.binding.attribute=1",
    "stages.world.splits.held_out={caption: 1, attribute: 1, conversation: 1}",
]


def files(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A run whose first stage has finished."""
    output = tmp_path_factory.mktemp("check") / "run"
    assert main([*FEW, f"output={output}", "stages=[world]"]) == OK
    return output


def check(capsys, *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["check", *arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    return code, printed.out


def line(text: str, subject: str) -> str:
    (result,) = [part for part in text.splitlines() if re.match(rf"(ok|warning|fault) +{re.escape(subject)} ", part)]
    return result


def test_a_synthetic_dataset_that_is_there_is_read_as_training_would(generated, capsys):
    before = files(generated)
    code, text = check(capsys, *FEW, f"output={generated}")
    assert code == OK and files(generated) == before
    assert "skipped" in line(text, "stages.world")
    assert "34 usable records, 34 read" in line(text, "stages.target.data")
    assert "<image x 9>" in text and "[[" in text, "a sample with its supervised text"
    assert "3 kinds of record, ids up to" in line(text, "forward of stages.target.data")
    assert "1 usable record, 1 read" in line(text, "stages.evaluate.probes.binding.data")
    assert text.endswith("0 fault(s), 0 warning(s)\n")


def test_a_wrong_folder_under_skip_is_a_fault_that_names_it(generated, capsys, tmp_path):
    data = ["stages=[seeing,target]", "stages.target.data.on_error=skip", f"stages.target.data.images={tmp_path}"]
    code, text = check(capsys, *FEW, f"output={generated}", *data)
    told = line(text, "stages.target.data")
    assert (
        code == FAULTS and told.startswith("fault") and re.search(rf"(\d+) of \1 pictures missing in {tmp_path}", told)
    )


def test_everything_that_was_read_is_reported(generated, capsys):
    """What is too long is found by encoding: the reason stands there, and how often."""
    data = ["stages=[seeing,target]", "stages.target.data.on_error=skip", "stages.target.data.max_length=60"]
    code, text = check(capsys, *FEW, f"output={generated}", *data)
    told = line(text, "stages.target.data")
    assert code == OK and told.startswith("warning") and "34 usable records, 34 read, usable share" in told
    assert re.search(r"record\(s\) were left out \(\d+ times \d+ ids, more than max_length 60", told)
    assert "usable share 100%" not in told


def test_settings_that_changed_are_a_fault_with_the_hint(generated, capsys):
    changed = ["stages=[world]", "stages.world.splits.text={sums: 2}"]
    code, text = check(capsys, *FEW, f"output={generated}", *changed)
    assert code == FAULTS
    assert line(text, "stages.world").startswith("fault") and "restart=world" in text


def record(number: int, picture: str | None = None, answer: str = "a cat") -> dict:
    mark = "<image>\n" if picture else ""
    turns = [{"from": "human", "value": f"{mark}what is it?"}, {"from": "gpt", "value": answer}]
    return {"id": str(number), "conversations": turns} | ({"image": picture} if picture else {})


@pytest.fixture
def own_data(generated, tmp_path):
    """One's own records in the place of those that a finished stage wrote."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    path = tmp_path / "data.json"

    def write(*records, output=generated):
        path.write_text(json.dumps(records))
        own = [f"stages.target.data.path={path}", "stages.target.data.from=null"]
        return [*FEW, f"output={output}", "stages=[world,seeing,target]", *own]

    return write


def test_without_a_processor_records_are_not_read(own_data, capsys, tmp_path):
    code, text = check(capsys, *own_data(record(0, "gone.png"), record(1), output=tmp_path / "new"))
    assert code == OK and "not read: the stage that makes the processor has not run" in line(text, "stages.target.data")
    assert "samples 2 (measured)" in text, "the dry run counts them by their index"


def test_small_files_of_a_target_are_fetched_or_named(tmp_path, capsys, monkeypatch):
    """A first look comes before gigabytes: tokenizer and configs say how records are encoded."""
    path, patterns = tmp_path / "data.json", []
    path.write_text(json.dumps([record(0)]))

    def fetch(name, *, revision, allow_patterns):
        patterns.append((name, allow_patterns))
        raise ConnectionError("no network")

    monkeypatch.setattr(preflight_samples, "snapshot_download", fetch)
    preflight_samples.fetched.cache_clear()
    settings = [f"stages.finetune.data.path={path}", "stages.finetune.data.images=null", "stages=[finetune]"]
    _, text = check(capsys, "llava15-68m", *settings, f"output={tmp_path / 'run'}")
    assert patterns == [("llava-hf/llava-1.5-7b-hf", preflight_samples.SMALL)], "once"
    told = line(text, "stages.finetune.data")
    assert "hf download llava-hf/llava-1.5-7b-hf --include '*.json'" in told and "(no network)" in told


@pytest.mark.parametrize(
    ("settings", "records", "level", "expected"),
    [
        ([], [record(0, "gone.png")], "fault", "missing image"),
        ([], [record(0, "a.png"), record(1, "../a.png")], "fault", "leads out of the folder"),
        ([], [record(0), {"id": "1"}], "fault", "no conversations"),
        ([], [{"id": "1"}], "fault", ""),
        (["stages.target.data.on_error=skip"], [record(0), record(1, answer=""), {"id": "1"}], "warning",
         "usable share 33%"),
    ],
    ids=["a picture that is gone", "a picture outside", "a broken record", "nothing to use", "a broken one is skipped"],
)  # fmt: skip
def test_broken_data_is_found(settings, records, level, expected, own_data, capsys):
    code, text = check(capsys, *own_data(*records), *settings)
    told = line(text, "stages.target.data")
    assert code == (FAULTS if level == "fault" else OK) and told.startswith(level) and expected in told, told


@pytest.mark.parametrize(
    ("changed", "file", "expected"),
    [
        ({}, None, None),
        ({"text_config": {"vocab_size": 300}}, None, "and the model's tables have 300 rows"),
        ({"vision_config": {"patch_size": 8}}, "patch_size", None),
        ({"vision_config": {"patch_size": 8}}, None, "the vision tower gives"),
        ({"vision_feature_layer": [-2, -1]}, None, "vision_feature_layer is [-2, -1]"),
        ({"text_config": {"num_key_value_heads": 3}}, None, "8 attention heads are no multiple of 3"),
        ({"vision_config": {"patch_size": 64}}, None, "a patch of 64 pixels is larger than the picture of 48"),
    ],
    ids=[
        "whole",
        "more ids than rows",
        "no patch size in the processor's files",
        "another patch size",
        "a list of layers",
        "heads that do not divide",
        "a patch",
    ],
)
def test_what_would_end_a_training_of_a_published_target_is_found(changed, file, expected, capsys, tmp_path):
    """Its config and processor alone are here. Each of these passed `check`, and ended the first step."""
    folder = tmp_path / "target"
    shutil.copytree(shipped_folder("shipped:shapes-llava"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    for key, value in changed.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "processor_config.json").read_text())
    settings.pop(file, None)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    Image.new("RGB", (48, 48)).save(tmp_path / "a.png")
    (tmp_path / "data.json").write_text(json.dumps([record(0, "a.png"), record(1)]))
    recipe = {
        "target": {"kind": "llava", "path": str(folder)},
        "drafter": {"kind": "eagle"},
        "stages": {"head": {
            "kind": "train", "data": {"path": str(tmp_path / "data.json"), "max_length": 256}, "steps": 1,
            "batch_size": 2, "source": {"kind": "online"}, "optim": {"lr": 0.001},
        }},
        "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(json.dumps(recipe))
    code, text = check(capsys, str(tmp_path / "own.yaml"))
    if expected is None:
        assert code == OK and "2 kinds of record, ids up to" in line(text, "forward of stages.head.data")
    else:
        assert code == FAULTS and expected in text, text


def captioned(folder, side=32) -> None:
    """Nine pictures: one damaged, one too small, one twice, one without a caption, one of another format."""
    folder.mkdir()
    for number in range(9):
        size = 8 if number == 2 else side
        Image.new("RGB", (size, size), (20 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("red")
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:60])
    (folder / "3.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "4.txt").unlink()
    (folder / "5.png").rename(folder / "5.heic")


PICTURES = ["demo/visual-ar", "stages=[codes]", "stages.codes.from=null"]  # with labels that the target has


def test_captioned_pictures_are_decoded_as_the_stage_does_it(tmp_path, capsys):
    captioned(tmp_path / "in")
    source = f"stages.codes.source={{kind: folder, folder: {tmp_path / 'in'}}}"
    _, text = check(capsys, *PICTURES, source, f"output={tmp_path / 'run'}")
    told = line(text, "stages.codes.source")
    assert told.startswith("warning") and "4 of the first 9 items can be used" in told
    assert "needs the vq of stage vq" in line(text, "stages.codes")
    for reason in ("unreadable image", "image too small", "duplicate", "no caption", "suffix not allowed"):
        assert f"1 {reason}" in told
    assert f"the first: {tmp_path / 'in' / '1.png'}" in told
    code, text = check(capsys, *PICTURES, source, "stages.codes.on_error=strict", f"output={tmp_path / 'run'}")
    assert code == FAULTS and line(text, "stages.codes.source").startswith("fault")


CLASSES = ["eagle-llamagen-c2i-xl", "stages=[evaluate]"]


def test_prompts_that_the_target_cannot_be_asked_by_are_told(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    setting = f"stages.evaluate.benchmarks.classes.prompts={{path: {prompts}, classes: null, max_samples: null}}"
    subject = "stages.evaluate.benchmarks.classes.prompts"
    for text, problem in (
        ('{"label": 999}\n{"label": 1000}\n', "label 1000, and the target has classes 0 to 999"),
        ('{"caption": "a cat"}\n', "a class-conditional model was asked without a label"),
        ("[1]", "not an object with a caption or prompt"),
    ):
        prompts.write_text(text)
        code, told = check(capsys, *CLASSES, setting, f"output={tmp_path / 'run'}")
        assert code == FAULTS and problem in line(told, subject)
    prompts.write_text('{"label": 999}\n')
    _, told = check(capsys, *CLASSES, setting, f"output={tmp_path / 'run'}")
    assert "1 prompts" in line(told, subject)


def test_a_model_that_cannot_be_fetched_is_a_fault(monkeypatch, capsys, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    code, text = check(capsys, "llava15-68m")
    assert code == FAULTS and "hf download JackFram/llama-68m" in text
    assert list(tmp_path.iterdir()) == []


def test_what_fetch_writes_is_named_with_its_command(monkeypatch, capsys, tmp_path):
    """And the Hub, which has no weights/smollm2, is asked for nothing: by check, a dry run and the run itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight_samples, "snapshot_download", None)
    code, text = check(capsys, "emoji_vlm/target")
    for key, name in (
        ("target.language_model", "smollm2"),
        ("target.vision_tower", "lite0"),
        ("stages.learn.data", "emoji --pictures all"),
    ):
        here = text.index(line(text, key))
        assert code == FAULTS and f"draftsmith fetch {name}\n" in text[here : here + 300]
    assert main(["recipe=emoji_vlm/target", "dry_run=true"]) == OK
    assert "\nnot on this machine: draftsmith fetch smollm2; draftsmith fetch lite0; draft" in capsys.readouterr().out
    assert main(["recipe=smollm2/eagle3"]) == 2 and not (tmp_path / "runs/smollm2-eagle3/prompts").exists()
    assert "where: key target.path\n  hint:  draftsmith fetch smollm2" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_a_fault(capsys, tmp_path, monkeypatch):
    import os

    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    code, text = check(capsys, *FEW, f"output={tmp_path / 'run'}")
    assert code == FAULTS and line(text, "output").startswith("fault")


def test_states_that_do_not_fit_and_sets_that_are_fetched(capsys, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - 2**36, 2**36))
    mine = tmp_path / "sets"
    settings = [f"output={tmp_path / 'run'}", f"stages.images.benchmarks.sets.data.path={mine}"]
    code, text = check(capsys, "sparrow-qwen2.5-vl-7b", *settings, "stages=[text_states,evaluate,images]")
    assert code == FAULTS and line(text, "stages.text_states").startswith("fault")
    assert "fetched from the Hub" in line(text, "stages.evaluate.benchmarks.sets.data")
    assert "suite.json" in line(text, "stages.images.benchmarks.sets.data")
    mine.mkdir()
    (mine / "suite.json").write_text('{"sets": {"POPE": {"file": "POPE.json"}}}')
    _, text = check(capsys, "sparrow-qwen2.5-vl-7b", *settings, "stages=[images]")
    assert "1 sets: POPE" in line(text, "stages.images.benchmarks.sets.data") and "stages.text_states" not in text


def test_results_that_are_not_as_they_were_written_are_a_fault(generated, tmp_path, capsys):
    output = shutil.copytree(generated, tmp_path / "run")
    path = output / "world" / "world" / "train.json"
    path.write_bytes(path.read_bytes().replace(b"circle", b"square", 1))
    code, text = check(capsys, *FEW, f"output={output}", "stages=[seeing,target]")
    assert code == FAULTS and "world/train.json was changed after it was written" in line(text, "results")


def test_a_finished_stage_whose_files_or_record_are_damaged(generated, tmp_path, capsys):
    output = shutil.copytree(generated, tmp_path / "run")
    (output / "world" / "world" / "train.json").write_text("[]")
    code, text = check(capsys, *FEW, f"output={output}", "stages=[world]")
    assert code == OK and line(text, "stages.world").startswith("warning")
    assert "files are not as written: world/train.json" in line(text, "stages.world")
    (output / "world" / "done.json").write_text("{")
    code, text = check(capsys, *FEW, f"output={output}", "stages=[world,seeing]")
    assert code == FAULTS and "not valid JSON" in line(text, "stages.world") + line(text, "stages.seeing")


def test_missing_data_is_a_fault_where_nothing_brings_it(tmp_path, capsys):
    """A run is refused for it before its first stage (tests/recipes/test_cli.py)."""
    missing = f"{{path: {tmp_path / 'absent.json'}, from: null}}"
    code, text = check(capsys, "demo/lvlm", f"output={tmp_path / 'run'}", f"stages.finetune.data={missing}")
    assert code == FAULTS and line(text, "stages.finetune.data").startswith("fault")
    assert "stages.finetune.data.path=..." in text
    # What the run itself writes is there in time.
    ours = f"{{path: {tmp_path / 'run' / 'world' / 'world' / 'train.json'}, from: null}}"
    code, text = check(capsys, "demo/lvlm", f"output={tmp_path / 'run'}", f"stages.finetune.data={ours}")
    assert code == OK and line(text, "stages.finetune.data").startswith("warning")


def test_a_start_that_is_no_folder_and_no_name_of_the_hub_is_a_fault(tmp_path, capsys, monkeypatch):
    """Before the target is loaded: in the run, too."""
    monkeypatch.chdir(tmp_path)
    recipe = ["adapt-eagle3-qwen2.5-vl-7b", "stages=[traffic,evaluate]", f"output={tmp_path / 'run'}"]
    code, text = check(capsys, *recipe)
    for key in ("stages.traffic.from.path", "stages.evaluate.methods.as it was.drafter.path"):
        assert line(text, key).startswith("fault") and str(tmp_path / "runs/eagle3-qwen2.5-vl-7b/pictures") in line(
            text, key
        )
    assert code == FAULTS
    code, text = check(capsys, *recipe, "stages.traffic.from.path=somebody/head")
    assert "will be downloaded" in line(text, "stages.traffic.from.path") or "HF_HUB_OFFLINE" in text


# Stages that have begun and have not finished


@pytest.fixture
def begun(tmp_path):
    """Makes a run that has finished all stages up to one that it has begun; returns what the findings say of it."""

    def make(name: str):
        loaded = load(["recipe=demo/lvlm", f"output={tmp_path}"])
        planned = plan(loaded.recipe, loaded.path)
        for stage in planned:
            (tmp_path / stage.name).mkdir()
            write_begun(stage, tmp_path / stage.name)
            if stage.name == name:
                break
            write_done(stage, tmp_path / stage.name, FINGERPRINTS, 1.0)

        def told() -> list[tuple[str, str]]:
            found = stages_findings(loaded, planned, (name,), 8, "")
            return [(f.level, f.what) for f in found if f.subject == f"stages.{name}"]

        return tmp_path / name, told

    return make


def saved(folder, step: int, ranks: int = 1) -> None:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    manifest = {"state": {"step": step, "fingerprint": "", "world_size": ranks}, "files": {}}
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_a_training_that_stopped_says_where_it_continues(begun):
    """It said nothing: docs/reliability.md promises it."""
    folder, told = begun("language")
    assert told() == [], "nothing was written yet"
    (folder / "metrics.jsonl").write_text("{}")
    assert told() == [("ok", "begun before, without a checkpoint: begins at step 0")]
    checkpoints = folder / "checkpoints"
    saved(checkpoints, 990)
    saved(checkpoints, 1040)
    assert told() == [("ok", "continues from step 1040, with 1 rank as before")]
    saved(checkpoints, 1050, ranks=2)
    assert told() == [("ok", "continues from step 1050, with 2 ranks as before")]
    (checkpoints / "step-00001050" / "manifest.json").write_text("{")
    assert told() == [("ok", "continues from step 1040, with 1 rank as before")]


def test_a_training_of_which_no_checkpoint_can_be_read_is_a_fault(begun):
    """Its run says so as well."""
    folder, told = begun("language")
    saved(folder / "checkpoints", 990)
    (folder / "checkpoints" / "step-00000990" / "manifest.json").write_text("{")
    (folder / "metrics.jsonl").write_text("{}")
    assert told() == [("fault", "begun before, and no checkpoint of it can be read")]
