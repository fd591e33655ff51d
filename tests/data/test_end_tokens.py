"""Which tokens end an answer: those of the generation config, the tokenizer's, and the template's."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.data.conversations import PromptFormat, end_ids
from draftsmith.data.families.processor import CAUSAL_LM, Processor
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shapes.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).parent / "chat_templates"
CHAT = PromptFormat(template="chat")
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eot|>", "<|eo")


def processor(template: str | None) -> Processor:
    """Its tokenizer's own end is `</s>`, whatever the template writes."""
    tokenizer = train_tokenizer(["a question an answer user assistant system"] * 3, 400)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    return Processor(tokenizer, None, -1, 1, 1, pad_id=3, bos_id=1, eos_id=tokenizer.eos_token_id, newline_id=5,
                     picture_family=CAUSAL_LM)  # fmt: skip


@pytest.mark.parametrize(("template", "end"), [
    ("qwen2.5", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("llama3.1", "<|eot_id|>"), ("mistral-v3", "</s>"),
    ("llava", None),
])  # fmt: skip
def test_the_targets_own_template_ends_turns_with_a_token_of_its_own(template, end):
    of = processor((TEMPLATES / f"{template}.jinja").read_text())
    own = () if end is None else (of.tokenizer.convert_tokens_to_ids(end),)
    assert end_ids(of, CHAT) == tuple(sorted({of.eos_id, *own}))
    assert end_ids(of, PromptFormat()) == (of.eos_id,), "a template of this project ends with the tokenizer's"


def test_the_longest_token_is_taken_and_a_template_that_refuses_has_none():
    def of(behind: str) -> Processor:
        return processor("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}" + behind + "{% endfor %}")

    two = of("<|eot|>\n<|im_end|>")
    assert end_ids(two, CHAT) == (two.eos_id, two.tokenizer.convert_tokens_to_ids("<|eot|>"))
    for template in (of("\nuser"), processor("{{ raise_exception('no') }}")):
        assert end_ids(template, CHAT) == (template.eos_id,)


def test_those_of_the_generation_config_come_to_them(tmp_path):
    of = processor((TEMPLATES / "qwen3.jinja").read_text())
    im_end = of.tokenizer.convert_tokens_to_ids("<|im_end|>")
    more = replace(of, generation_ends=(9, of.eos_id, 30))
    assert end_ids(more, PromptFormat()) == (of.eos_id, 9, 30)
    assert end_ids(more, CHAT) == (of.eos_id, 9, 30, im_end)
    of.save(tmp_path)
    assert load_processor(tmp_path, text_only=True).generation_ends == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [30, 9]}')
    assert load_processor(tmp_path, text_only=True).generation_ends == (9, 30)


def test_one_place_knows_them():
    """Whatever else looks at the tokenizer's end token alone goes on where the target has ended."""
    folders = ("core", "data", "models", "eval", "trainers", "recipes")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    read = {str(path.relative_to(ROOT)) for path in files if re.search(r"\.eos_id\b", path.read_text())}
    assert len(files) > 300
    # The ids of a target that a run trains from an inline config, and whether a record was begun with others.
    assert read == {"data/conversations.py", "trainers/run/context.py", "trainers/run/precision.py"}
