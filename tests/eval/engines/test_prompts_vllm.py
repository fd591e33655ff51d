"""A chat request's ids in vLLM's server are those that training reads (scripts/test_engines): LLaVA, Qwen2.5-VL."""

import base64
import io
import json
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from draftsmith.core.pictures import Picture
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.processor import Resizing
from draftsmith.data.processor_files import load_processor
from draftsmith.data.served_prompt import chat_template
from draftsmith.models.formats.target import export_target
from draftsmith.recipes.commands.cli import main
from engine_targets import TARGETS
from PIL import Image
from vllm_server import IN_VLLM, start, wait

pytestmark = IN_VLLM
TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
CHAT, V1 = PromptFormat(template="chat"), PromptFormat()
QWEN_VL = PromptFormat(template="qwen_vl", image_rule="next")
CASES = {"llava": [CHAT], "llava, prompt v1": [V1], "qwen2_5_vl": [CHAT, QWEN_VL]}
SIDE = 48


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A target of one step, in its run."""

    def trained(kind: str) -> Path:
        folder, whole = tmp_path_factory.mktemp(kind), kind.startswith("qwen")
        form = {"template": "qwen_vl" if whole else "v1", "image_rule": "verbatim"}
        data = {"from": "world", "path": "train", "max_length": 256} | ({} if whole else {"aspect": "square"})
        world = {"kind": "generate", "splits": {"train": {"caption": 20}}} | ({"patch_size": 8} if whole else {})
        target = {"kind": "train", "model": "target", "trainable": ["language_model"], "format": form, "data": data,
                  "steps": 1, "batch_size": 2, "optim": {"lr": 1e-3}}  # fmt: skip
        recipe = {"target": TARGETS[kind], "stages": {"world": world, "target": target}, "output": str(folder / "run")}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        assert main([f"recipe={folder / 'recipe.yaml'}"]) == 0
        return folder / "run" / "target"

    return trained


@pytest.mark.parametrize("case", CASES)
def test_a_servers_prompt_has_the_ids_of_training(trained, tmp_path, monkeypatch, case):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    kind = case.partition(",")[0]
    export_target(trained(kind), tmp_path / "target")
    template = (TEMPLATES / {"llava": "llava.jinja", "qwen2_5_vl": "qwen2.5-vl.jinja"}[kind]).read_text()
    processor = load_processor(tmp_path / "target")
    processor.tokenizer.chat_template = template
    if CASES[case] == [V1]:
        template = chat_template(V1, processor)
    (tmp_path / "chat.jinja").write_text(template)
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (200, 40, 40)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    process, address = start(tmp_path, None)
    try:
        wait(process, address)
        for shows in (True, False):
            content = [{"type": "image_url", "image_url": {"url": url}}] * shows + [{"type": "text", "text": "Where?"}]
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1,
                    "return_token_ids": True}  # fmt: skip
            asked = Request(f"{address}/v1/chat/completions", json.dumps(body).encode(),
                            {"Content-Type": "application/json"})  # fmt: skip
            with urlopen(asked, timeout=300) as answer:
                served = json.load(answer)["prompt_token_ids"]
            layout: tuple[Picture, ...] = ()
            if shows:
                layout = processor.picture_family.layouts([(SIDE, SIDE)], processor, Resizing("square"))
            turns = [{"from": "human", "value": "<image>\n" * shows + "Where?"}]
            for form in CASES[case]:
                ours = encode(turns, form, processor, pictures=layout, open_ended=True).ids
                # The world's tokenizer has a token that begins a text, which Qwen's own has not.
                assert ours[form is QWEN_VL :] == served, (shows, form.template)
    finally:
        process.terminate()
        process.wait(300)
