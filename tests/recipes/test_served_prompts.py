"""What a server makes of a request, and what training read: said by `check`, the log, the report and the export."""

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from command_line import prints
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.processor_files import load_processor
from draftsmith.data.served_prompt import difference, sample_ids
from draftsmith.models.drafters.manifest import read_manifest, write_manifest
from draftsmith.recipes.commands.cli import main
from states_run import synthetic

LLAVA = (Path(__file__).parents[1] / "data" / "chat_templates" / "llava.jinja").read_text()
RECIPE = """
target: {{kind: llava, path: {target}}}
drafter: {{kind: eagle3, visual_slots: read, image: placeholder, taps: [1, 2, 3]}}
stages:
  head:
    kind: train
    format: &form {{template: v1}}
    data: {{path: {data}, aspect: pad, max_length: 256}}
    source: {{kind: online}}
    steps: 1
    batch_size: 2
    optim: {{lr: 1.0e-3}}
  evaluate:
    kind: evaluate
    format: *form
    benchmarks: {{own: {{data: {{path: {data}, aspect: square, max_length: 256, max_samples: 2}}}}}}
    methods: {{chain: {{drafter: head, tree: {{kind: chain, gamma: 2}}}}}}
    max_new_tokens: 4
output: {output}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target with LLaVA's chat template and a penalty, and a recipe whose stages have not run."""
    world = synthetic(tmp_path_factory.mktemp("world"))
    target = world.folder / "target"
    (target / "chat_template.jinja").write_text(LLAVA)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "repetition_penalty": 1.05}))
    data, output = world.folder / "data.json", world.folder / "run"
    text = RECIPE.format(target=target, data=data, output=output)
    (world.folder / "recipe.yaml").write_text(text)
    return world.folder


@pytest.fixture(scope="module")
def trained(made):
    """The head's folder, beside a file of what the run said."""
    with redirect_stdout(io.StringIO()) as said:
        assert main([f"recipe={made / 'recipe.yaml'}"]) == 0
    (made / "run" / "said").write_text(said.getvalue())
    return made / "run" / "head"


PENALTY = "generation_config.json has repetition_penalty 1.05"


def test_check_compares_the_prompt_and_names_penalties(made, capsys):
    said = prints(capsys, ["check", str(made / "recipe.yaml"), f"output={made / 'other'}"])
    (line,) = re.findall(r"warning +stages\.head\.format .*", said)
    assert re.search(r"prompts part from the target's chat template at id 0 of \d+: '.*' in training, '.*' on a", line)
    assert len(re.findall(rf"warning +target +{re.escape(PENALTY)}", said)) == 1
    assert re.search(r"warning +stages\.head\.data +pictures are cut with aspect: pad", said)
    alike = ["stages.head.data.aspect=square", *(f"stages.{n}.format={{template: chat}}" for n in ("head", "evaluate"))]
    said = prints(capsys, ["check", str(made / "recipe.yaml"), f"output={made / 'other'}", *alike])
    assert "prompts part from" not in said and "pictures are cut with" not in said
    texts = [record for record in json.loads((made / "data.json").read_text()) if "image" not in record]
    (made / "text.json").write_text(json.dumps(texts))
    alone = [f"stages.head.data.path={made / 'text.json'}", f"stages.head.data.images={made}"]
    said = prints(capsys, ["check", str(made / "recipe.yaml"), f"output={made / 'other'}", *alone])
    assert "pictures are cut with" not in said


def test_the_log_and_the_report_name_penalties(trained):
    report = json.loads((trained.parent / "evaluate" / "report.json").read_text())
    assert report["about"]["not applied"].startswith(PENALTY)
    assert PENALTY in (trained.parent / "evaluate" / "report.md").read_text()
    assert f"warning: {PENALTY}" in (trained.parent / "said").read_text()


def test_an_export_brings_the_prompt_of_its_training(trained, tmp_path, capsys):
    said = prints(capsys, ["export", str(trained), str(tmp_path / "out"), "--to", "vllm"])
    assert re.search("note +the prompts of training part from the target's chat template", said) and PENALTY in said
    (serve,) = re.findall(r"serve +(.*)", said)
    prompt = tmp_path / "out" / "prompt.jinja"
    assert f"--chat-template {prompt}" in serve
    assert "--generation-config vllm" in serve
    processor = load_processor(trained.parents[1] / "target")
    ours = sample_ids(PromptFormat(), processor, pictures=True)
    like = PromptFormat(template="chat", chat_template=str(prompt))
    assert sample_ids(like, processor, pictures=True) == ours


def test_a_drafter_of_the_servers_prompt_needs_no_template_and_keeps_its_limits(trained, tmp_path, capsys):
    manifest = read_manifest(trained) | {"format": PromptFormat(template="chat").model_dump(mode="json")}
    copy = tmp_path / "head"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((trained / name).read_bytes())
    write_manifest(copy, manifest | {"pixels": {"min_pixels": 3136, "max_pixels": 9000}})
    said = prints(capsys, ["export", str(copy), str(tmp_path / "out"), "--to", "vllm"])
    assert "--chat-template" not in said and "prompts of training" not in said
    assert "note     pictures were trained with aspect: pad" in said
    assert """--mm-processor-kwargs '{"max_pixels": 9000, "min_pixels": 3136}'""" in said
    write_manifest(copy, manifest | {"format": manifest["format"] | {"image_rule": "llava15"}})
    said = prints(capsys, ["export", str(copy), str(tmp_path / "two"), "--to", "vllm"])
    assert re.search("were not compared with the server's: .*template chat writes what the server wrote", said)


def test_a_target_of_a_run_is_exported_with_a_template(trained, made, tmp_path, capsys):
    own = tmp_path / "target"
    shutil.copytree(made / "target", own)
    (own / "chat_template.jinja").unlink()
    write_manifest(own, {"model": "target", "format": PromptFormat().model_dump(mode="json")})
    words = ["export", str(trained), str(tmp_path / "out"), "--to", "vllm", "--target", str(own)]
    said = prints(capsys, [*words, "--target-to", str(tmp_path / "served")])
    assert "--chat-template" not in said, "the folder has it"
    assert difference(PromptFormat(), load_processor(tmp_path / "served")) is None
    said = prints(capsys, [*words[:2], str(tmp_path / "alone"), *words[3:]])
    assert "chat template (which has none)" in said and "--chat-template" in said
