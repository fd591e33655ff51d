"""Commands that `draftsmith export` prints run as they are printed, and are asked by the `openai` client: text,
pictures, streaming, eight at once. llama_server.py reads llama-server's flags; vLLM is that of scripts/test_engines.
"""

import base64
import io
import json
import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest
from draftsmith.models.drafters.manifest import MANIFEST
from draftsmith.recipes.commands.cli import main
from gguf_files import write_target
from llama_server import IN_LLAMA
from llama_server import start as start_llama
from PIL import Image
from served_heads import save_drawn
from transformers import AutoModelForCausalLM
from vllm_server import IN_VLLM, serve, wait


def printed(pair, tmp_path, capsys, *more):
    """Words of the printed command; its prompts are not the target's own, so that it names a template, too."""
    save_drawn("eagle3", pair / "target", tmp_path / "head")
    manifest = json.loads((tmp_path / "head" / MANIFEST).read_text())
    manifest["format"] = {"template": "v1", "system": "", "image_rule": "verbatim"}
    (tmp_path / "head" / MANIFEST).write_text(json.dumps(manifest))
    assert main(["export", str(tmp_path / "head"), str(tmp_path / "out"), "--target", str(pair / "target"), *more]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("serve ")]
    return shlex.split(line)[1:]


def asked(url, contents, **more):
    """Texts of greedy answers, all asked at once."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id

        def one(content):
            talk = [{"role": "user", "content": content}]
            answer = client.chat.completions.create(model=model, messages=talk, max_tokens=24, temperature=0, **more)
            if more.get("stream"):
                parts = [part.choices[0].delta.content or "" for part in answer if part.choices]
                assert len(parts) > 2
                return "".join(parts)
            assert answer.usage.completion_tokens > 1
            return answer.choices[0].message.content

        with ThreadPoolExecutor(len(contents)) as pool:
            return list(pool.map(one, contents))


def as_printed(url):
    """Text, streamed text, and eight at once."""
    alone = asked(url, ["Where is it?"])
    assert alone[0].strip() and asked(url, ["Where is it?"], stream=True) == alone
    several = asked(url, [f"Count to {number}." for number in range(8)])
    assert all(text.strip() for text in several)
    return alone, several


@IN_LLAMA
@pytest.mark.slow
def test_llama_servers_command(pair, tmp_path, capsys):
    """And a server without the drafter answers the same."""
    file = write_target(tmp_path / "target.gguf", AutoModelForCausalLM.from_pretrained(pair / "twin"))
    program, *words = printed(pair, tmp_path, capsys, "--to", "gguf", "--prompts", "text", "--target-gguf", str(file))
    assert program == "llama-server" and "--chat-template-file" in words
    plain = [*words[:2], *words[words.index("--jinja") : words.index("--jinja") + 3], "--flash-attn", "off"]
    answers = []
    for these in (words, plain):
        process, url = start_llama(these, tmp_path / "log.txt")
        try:
            answers.append(as_printed(url))
        finally:
            process.kill()
            process.wait(60)
    assert answers[0] == answers[1]


def picture(side, color):
    file = io.BytesIO()
    Image.new("RGB", side, color).save(file, "PNG")
    return {"type": "image_url", "image_url": {
        "url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}}  # fmt: skip


class TestInVllm:
    pytestmark = IN_VLLM

    def test_vllms_command(self, pair, tmp_path, capsys):
        words = printed(pair, tmp_path, capsys, "--to", "vllm")
        assert words[:3] == ["vllm", "serve", str(pair / "target")] and "--chat-template" in words
        process, url = serve(tmp_path, [*words[2:], "--enforce-eager"])  # it would compile for minutes
        try:
            wait(process, url)
            as_printed(url)
            text = {"type": "text", "text": "What is in the picture?"}
            wide, square = picture((64, 20), (200, 30, 30)), picture((32, 32), (20, 30, 240))
            assert all(asked(url, [[square, text], [wide, square, text], [square, wide, text]]))
        finally:
            process.terminate()
            process.wait(300)
