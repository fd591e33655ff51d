"""The prompt of recipes that end in an engine is the chat template's, id for id; another one is named, and written."""

import json
from pathlib import Path

import numpy as np
import pytest
from draftsmith.data.conversations import PromptFormat, encode, end_ids
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.families.processor import Resizing
from draftsmith.data.families.qwen import QWEN2_5_VL
from draftsmith.data.served_prompt import chat_template, difference, other_aspect, sample_ids
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.recipes.config.files import FOLDER
from draftsmith.recipes.config.load import load
from fails import fails_with
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
STATISTICS = {"image_mean": (0.5,) * 3, "image_std": (0.25,) * 3}
WORDS = ["USER: What is this? ASSISTANT: A circle.", "And on its left? You are a helpful assistant."] * 3
SHOWN = np.ones(1)
V1, CHAT = PromptFormat(), PromptFormat(template="chat")


def llava(*, is_legacy: bool = False):
    """`is_legacy`: a blank before each text between special tokens, as llava-1.5-7b-hf's tokenizer.json writes it."""
    tokenizer = train_tokenizer(WORDS, 400)
    if is_legacy:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        pieces = Tokenizer.from_str(json.dumps(backend | {"pre_tokenizer": None}))
        pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=pieces, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        )
    processor = LLAVA.new(tokenizer, image_size=32, patch_size=8, **STATISTICS)
    tokenizer.chat_template = (TEMPLATES / "llava.jinja").read_text()
    return processor


def qwen():
    pieces = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                                  merges=[]))  # fmt: skip
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=False)
    processor = QWEN2_5_VL.new(tokenizer, patch_size=4, min_pixels=256, max_pixels=1024, **STATISTICS)
    tokenizer.chat_template = (TEMPLATES / "qwen2.5-vl.jinja").read_text()
    return processor


def thinking():
    """A server begins each answer with a thought, as Qwen3.5's template says."""
    processor = qwen()
    tokenizer, mark = processor.tokenizer, "assistant\\n' -}}{%- endif"
    tokenizer.chat_template = tokenizer.chat_template.replace(mark, mark.replace("'", "<think>\\n'"))
    return processor


def served(processor, *, pictures: bool) -> list[int]:
    """What `apply_chat_template` makes of the sample's messages, a picture's token as often as its layout has it."""
    content = [{"type": "image"}] * pictures + [{"type": "text", "text": "What is this?"}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "A circle."}]},
        {"role": "user", "content": [{"type": "text", "text": "And on its left?"}]},
    ]
    chat = processor.tokenizer.apply_chat_template
    ids = chat(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    (picture,) = processor.picture_family.layouts([(640, 480)], processor, Resizing())
    return [one for token in ids for one in [token] * (picture.num_tokens if token == processor.image_token_id else 1)]


ENDS_IN_AN_ENGINE = {
    "video/eagle-llava15-7b": llava, "video/eagle3-llava15-7b": llava, "video/dflash-llava15-7b": llava,
    "lvlm/llava15-68m-served": llava, "video/eagle3-qwen2.5-vl-7b": qwen, "video/peagle-qwen2.5-vl-7b": qwen,
    "video/dflash-qwen2.5-vl-7b": qwen, "video/adapt-eagle3-qwen2.5-vl-7b": qwen,
    "video/eagle3-qwen3.5-9b": thinking, "video/mtp-qwen3.5-9b": thinking,
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS_IN_AN_ENGINE)
@pytest.mark.parametrize("pictures", [True, False])
def test_recipes_that_end_in_an_engine_train_on_its_prompt(name, pictures):
    processor = ENDS_IN_AN_ENGINE[name]()
    stages = load([f"recipe={FOLDER / name}.yaml"]).recipe.stages
    forms = {n: s.format for n, s in stages.items() if "format" in dict(s) and s.format.template != "plain"}
    if ENDS_IN_AN_ENGINE[name] is thinking:
        assert forms.pop("text").template == "qwen_vl"  # the data's answers have no thoughts
    assert forms
    # Published recipes name the folder of their pictures; texts have none.
    data = {
        n: other_aspect(s.data, processor, SHOWN * bool(s.data.images))
        for n, s in stages.items() if n in forms and dict(s).get("data")
    }  # fmt: skip
    assert not any(data.values()), "the server's pictures, too"
    for stage, form in forms.items():
        assert sample_ids(form, processor, pictures=pictures) == served(processor, pictures=pictures), stage
        assert difference(form, processor, pictures=pictures) is None


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("form", [V1, PromptFormat(system=""), PromptFormat(image_join="hf")])
def test_a_prompt_of_llavas_code_is_not_the_servers_and_can_be_written_for_it(form, is_legacy):
    processor = llava(is_legacy=is_legacy)
    part = difference(form, processor)
    assert part is not None and part.startswith("at id 0 of ") and "in training" in part
    written = chat_template(form, processor)
    like = PromptFormat(template="chat", chat_template=written)
    assert sample_ids(like, processor, pictures=True) == sample_ids(form, processor, pictures=True)
    processor.tokenizer.chat_template = written  # as a server is started with it
    assert difference(form, processor) is None and difference(like, processor) is None
    assert sample_ids(form, processor, pictures=True) == served(processor, pictures=True)


@pytest.mark.parametrize("system", [None, "", "Be brief."])
@pytest.mark.parametrize("of", [qwen, thinking])
def test_a_template_of_qwens_can_be_written(system, of):
    processor, form = of(), PromptFormat(template="qwen_vl", image_rule="next", system=system)
    assert (difference(form, processor) is None) == (system is None and of is qwen)
    processor.tokenizer.chat_template = chat_template(form, processor)
    assert difference(form, processor) is None


def test_a_file_stands_in_the_place_of_the_targets_template(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }} ->", encoding="utf-8")
    form = PromptFormat(template="chat", chat_template=str(tmp_path / "own.jinja"))
    processor, turns = llava(), [{"from": "human", "value": "What is this?"}]
    assert form.chat_template.startswith("{{ messages") and PromptFormat(**form.model_dump()) == form
    assert encode(turns, form, processor, open_ended=True).text == "What is this? ->"
    bare = llava()
    bare.tokenizer.chat_template = None
    assert encode(turns, form, bare, open_ended=True).ids == encode(turns, form, processor, open_ended=True).ids
    assert difference(form, processor, pictures=False).startswith("at id 0 of ")
    fails_with("have no chat template", difference, form, bare, pictures=False)
    ended = form.model_copy(update={"chat_template": "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"})
    assert end_ids(processor, ended) == (processor.eos_id, processor.pad_id)
    for wrong, problem in (({"template": "chat"}, "none.jinja cannot be read"), ({}, "is of template chat")):
        with pytest.raises(ValueError, match=problem):
            PromptFormat(chat_template="none.jinja" if wrong else "{{ messages }}", **wrong)
    assert "chat_template" not in CHAT.model_dump()
