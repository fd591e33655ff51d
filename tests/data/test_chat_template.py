"""Records through a target's own chat template: the ids that a server's `apply_chat_template` has, and what is learned.

The templates are those of chat_templates/, in the manner of Qwen2.5's (Hermes' calls), Llama-3.1's, Mistral's v3,
Qwen3's and LLaVA's.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import Picture
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.families.processor import CAUSAL_LM, Processor
from draftsmith.data.families.qwen import QWEN2_5_VL
from draftsmith.data.processor_files import load_processor
from draftsmith.data.records.record import check_record
from draftsmith.data.shapes.tokenizer import train_tokenizer
from fails import fails_with
from PIL import Image
from small_records import talk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
CHAT = PromptFormat(template="chat")
MARKS = {
    "qwen2.5": ("<|im_start|>", "<|im_end|>"), "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama3.1": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral-v3": ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
                   "[/TOOL_RESULTS]"),
    "llava": (),
}  # fmt: skip
ENDS = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3.1": "<|eot_id|>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a town.", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}}}]  # fmt: skip
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Bern"}}}
TURNS = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Is it warm in Bern?"},
    {"from": "gpt", "value": "", "tool_calls": [CALL]},
    {"from": "tool", "value": '{"celsius": 31}', "tool_call_id": "abcdefgh1", "name": "weather"},
    {"from": "gpt", "value": "Yes, 31 degrees."},
    {"from": "human", "value": "And tomorrow?"},
    {"from": "gpt", "value": "Nobody knows."},
]


@pytest.fixture(scope="module")
def base():
    words = [turn["value"] for turn in TURNS] + [json.dumps(TOOLS), "user assistant system ipython tool_call\n"]
    return lambda: train_tokenizer(words * 3, 420)


@pytest.fixture
def of(base):
    """A processor with the template of this name."""

    def of(name: str) -> Processor:
        tokenizer = base()
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS[name])})
        tokenizer.eos_token = ENDS.get(name, "</s>")
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        if name == "llava":
            return LLAVA.new(tokenizer, image_size=32, patch_size=8, image_mean=(0.5,) * 3, image_std=(0.2,) * 3)
        return Processor(
            tokenizer, None, -1, 1, 1, pad_id=3, bos_id=1, eos_id=tokenizer.eos_token_id, newline_id=5,
            picture_family=CAUSAL_LM,
        )  # fmt: skip

    return of


def served(processor, messages, tools=None, **more) -> list[int]:
    """What a server reads of a request."""
    chat = processor.tokenizer.apply_chat_template
    return chat(messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **more)


def message(turn: dict) -> dict:
    role = {"human": "user", "gpt": "assistant"}.get(turn["from"], turn["from"])
    return {"role": role, "content": turn["value"]} | {k: v for k, v in turn.items() if k not in ("from", "value")}


def learned(processor, encoded) -> list[str]:
    """Each run of supervised ids as text."""
    runs, before = [], False
    for token, is_learned in zip(encoded.ids, encoded.loss_mask, strict=True):
        if is_learned:
            runs[-1:] = [[*runs[-1], token]] if before else [*runs[-1:], [token]]
        before = is_learned
    return [processor.tokenizer.decode(run).strip() for run in runs]


CALLED = {
    "qwen2.5": '<tool_call>\n{"name": "weather", "arguments": {"town": "Bern"}}\n</tool_call><|im_end|>',
    "llama3.1": '{"name": "weather", "parameters": {"town": "Bern"}}<|eot_id|>',
    "mistral-v3": '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "Bern"}}]</s>',
}


@pytest.mark.parametrize("name", CALLED)
def test_prompts_of_requests_with_tools_are_the_servers(of, name):
    processor, record = of(name), {"tools": TOOLS, "conversations": TURNS}
    assert check_record(record) is None
    end = processor.tokenizer.eos_token
    for length in (3, 5, 7):  # each request that the server had: up to a call, to an answer, to the next answer
        turns = TURNS[:length]
        asked = served(processor, [message(turn) for turn in turns[:-1]], TOOLS)
        prompt = encode(turns, CHAT, processor, open_ended=True, record=record)
        assert prompt.ids == asked and not any(prompt.loss_mask)
        whole = encode(turns, CHAT, processor, record=record)
        assert whole.ids[: len(asked)] == asked, "training reads the prompt that decoding does"
        runs = learned(processor, whole)
        said = CALLED[name] if length == 3 else f"{turns[-1]['value']}{end}"
        assert runs[-1] == said and any(whole.loss_mask[len(asked) :])
    # Mistral's tools and system message stand before the last question: what came earlier was asked otherwise.
    earlier = [CALLED[name], f"Yes, 31 degrees.{end}"] if name != "mistral-v3" else []
    assert runs == [*earlier, f"Nobody knows.{end}"]


@pytest.mark.parametrize("name", [*CALLED, "qwen3"])
def test_without_a_system_message_the_template_writes_its_own(of, name):
    processor, turns = of(name), talk("Is it?", "Yes.")
    whole = encode(turns, CHAT, processor)
    asked = served(processor, [{"role": "user", "content": "Is it?"}])
    assert whole.ids[: len(asked)] == asked and ("helpful" in whole.text) == (name == "qwen2.5")
    assert learned(processor, whole)[0].endswith("Yes." + processor.tokenizer.eos_token)


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1"])
@pytest.mark.parametrize("answer", ["\nNobody knows.", "\n\n\nNobody knows."])
def test_an_answer_that_begins_with_a_line_break_has_the_ids_behind_the_served_prompt(of, name, answer):
    """Tokenizers of Qwen, Llama 3 and Gemma have an id for two breaks: one of them is the prompt's, which is tokenized
    before there is an answer. What stands in an earlier turn is tokenized as text by a server, too.
    """
    processor = of(name)
    processor.tokenizer.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n", "\n\n\n\n\n"])
    if name == "qwen2.5":  # a template that leaves an answer as it is
        processor.tokenizer.chat_template = (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
    else:
        text = processor.tokenizer.chat_template
        processor.tokenizer.chat_template = text.replace(" | trim", "")
    turns = talk("And tomorrow?", answer, "And then?", answer)
    prompt = served(processor, [message(turn) for turn in turns[:-1]])
    encoded = encode(turns, CHAT, processor)
    assert encoded.ids[: len(prompt)] == prompt and all(encoded.loss_mask[len(prompt) : -1])
    behind = processor.tokenizer.decode(encoded.ids[len(prompt) :])
    assert behind.startswith(answer), behind


def test_thoughts_are_learned_as_the_template_writes_them(of):
    processor = of("qwen3")
    turns = [
        {"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes.", "reasoning": "Bern is warm."},
        {"from": "human", "value": "And tomorrow?"}, {"from": "gpt", "value": "Unknown.", "reasoning": "Tomorrow?"},
    ]  # fmt: skip
    whole = encode(turns, CHAT, processor)
    asked = [message(turn) | {"reasoning_content": turn.get("reasoning")} for turn in turns[:-1]]
    assert whole.ids[: len(served(processor, asked))] == served(processor, asked)
    # The template drops the thoughts of the first answer once it was given: it is read, and not learned from.
    assert learned(processor, whole) == ["<think>\nTomorrow?\n</think>\n\nUnknown.<|im_end|>"]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    prompt = encode(turns[2:], CHAT, processor, open_ended=True, record=off)
    assert prompt.ids == served(processor, [message(turns[2])], enable_thinking=False)
    with pytest.raises(UserError, match="chat_template_kwargs has tokenize"):
        encode(turns, CHAT, processor, record={"chat_template_kwargs": {"tokenize": True}})
    fails_with("leaves out the answer's reasoning", encode, turns, CHAT, of("qwen2.5"))


def test_what_a_template_does_not_write_is_refused_by_name(of):
    calls = TURNS[:3]
    two = [*TURNS[:2], {**TURNS[2], "tool_calls": [CALL, CALL]}]
    fails_with("refuses the record: This model only supports single tool-calls", encode, two, CHAT, of("llama3.1"))
    processor = of("qwen2.5")
    processor.tokenizer.chat_template = (TEMPLATES / "qwen2.5-vl.jinja").read_text()
    fails_with("leaves out the answer's tool calls", encode, calls, CHAT, processor)
    processor.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    fails_with("otherwise than its prompt begins it", encode, TURNS[:2] + TURNS[-1:], CHAT, processor)
    processor.tokenizer.chat_template = None
    fails_with("no chat template", encode, calls, CHAT, processor)
    processor = of("qwen2.5")
    form = PromptFormat(template="qwen")
    for turns, record, what in (
        (calls, {}, "a tool's turn or call"), (TURNS[1:2] + TURNS[-1:], {"tools": TOOLS}, "tools"),
        ([TURNS[1], TURNS[-1] | {"reasoning": "Hm."}], {}, "reasoning"),
    ):  # fmt: skip
        error = fails_with(f"has {what}, and template qwen writes none", encode, turns, form, processor, record=record)
        assert "template: chat" in error.hint
    for wrong in ({"system": "Be kind."}, {"image_rule": "next"}):
        with pytest.raises(ValueError, match="template chat writes what the server wrote"):
            PromptFormat(template="chat", **wrong)


def test_named_templates_write_a_records_own_system_message(of):
    turns = [TURNS[0], TURNS[1], TURNS[-1]]
    for system in (None, "", "Be kind."):
        encoded = encode(turns, PromptFormat(template="qwen", system=system), of("qwen2.5"))
        assert encoded.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs it")


@pytest.fixture
def qwen_vl():
    """With byte-level pieces and nothing that begins a text, as Qwen's own."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces.train_from_iterator(["user assistant system\nYou are a helpful assistant. Is it warm in Bern?"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=False)
    processor = QWEN2_5_VL.new(
        tokenizer, patch_size=4, min_pixels=256, max_pixels=1024, image_mean=(0.5,) * 3,
        image_std=(0.25,) * 3,
    )  # fmt: skip
    tokenizer.chat_template = (TEMPLATES / "qwen2.5-vl.jinja").read_text()
    return processor


@pytest.mark.parametrize(("value", "parts"), [
    ("Is it warm\n<image>\nin Bern?", ["Is it warm", None, "in Bern?"]),
    ("<image>\n<image>\n\nAnd tomorrow?", [None, None, "\nAnd tomorrow?"]),
])  # fmt: skip
def test_pictures_stand_where_the_request_has_them(qwen_vl, tmp_path, value, parts):
    """Qwen2.5-VL's: the text before the picture, its own system block, and a run where the server puts one."""
    count = parts.count(None)
    for number in range(count):
        Image.new("RGB", (32, 16 + 8 * number)).save(tmp_path / f"{number}.png")
    record = {"image": [f"{number}.png" for number in range(count)],
              "conversations": talk(value, "Yes.")}  # fmt: skip
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    data = ConversationData(path=str(tmp_path / "records.jsonl"))

    def dataset(form):
        return ConversationDataset(
            data, form, qwen_vl, files=[tmp_path / "records.jsonl"], skipped_log=None, cache=tmp_path / "cache"
        )

    chat, named = dataset(CHAT), dataset(PromptFormat(template="qwen_vl", image_rule="verbatim"))
    assert chat.identity() != named.identity()
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    asked = served(qwen_vl, [{"role": "user", "content": content}])
    request, _ = chat.request(0)
    left = [picture.num_tokens for picture in request.pictures]
    expanded = []
    for token in asked:  # as transformers' processor expands the placeholder
        expanded += [token] * (left.pop(0) if token == qwen_vl.image_token_id else 1)
    assert request.ids.tolist() == expanded and not left and chat.num_ids(0, prompt=True) == len(expanded)
    sample = chat[0]
    assert sample.ids[: len(expanded)] == expanded
    assert learned(qwen_vl, sample) == ["Yes.<|im_end|>"]
    if "\n\n" not in value:  # a break of the request's own beside a picture is taken away by the named template
        assert sample.ids == named[0].ids and sample.loss_mask == named[0].loss_mask


def test_a_template_of_parts_without_an_end(of):
    """LLaVA's: it reads lists of parts alone, writes pictures first, and no end token."""
    processor = of("llava")
    turns = talk("Is it warm\n<image>\nin Bern?", "Yes.")
    encoded = encode(turns, CHAT, processor, pictures=[Picture(4)])
    parts = [{"type": "text", "text": "Is it warm"}, {"type": "image"}, {"type": "text", "text": "in Bern?"}]
    asked = served(processor, [{"role": "user", "content": parts}])
    expanded = [token for one in asked for token in [one] * (16 if one == processor.image_token_id else 1)]
    prompt = encode(turns, CHAT, processor, pictures=[Picture(4)], open_ended=True)
    assert prompt.ids == expanded == encoded.ids[: len(expanded)]
    assert learned(processor, encoded) == ["Yes.</s>"]
    with pytest.raises(UserError, match="writes no pictures"):
        encode(turns, CHAT, replace(processor, tokenizer=of("qwen2.5").tokenizer), pictures=[Picture(4)])


def test_the_template_travels_with_the_processors_files(qwen_vl, of, tmp_path):
    for name, processor in {"qwen": qwen_vl, "llava": of("llava")}.items():
        processor.save(tmp_path / name)
        assert load_processor(tmp_path / name).tokenizer.chat_template == processor.tokenizer.chat_template
    # Older repositories have it in a file of the processor's alone.
    (tmp_path / "qwen" / "chat_template.jinja").rename(tmp_path / "moved")
    (tmp_path / "qwen" / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_processor(tmp_path / "qwen").tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize(("turns", "problem"), [
    ([TURNS[1], TURNS[3], TURNS[4]], "do not alternate"),
    ([TURNS[1], TURNS[2] | {"tool_calls": []}], "empty answer"),
    ([TURNS[3], TURNS[4]], "do not alternate"),
    ([TURNS[1], TURNS[0], TURNS[4]], "do not alternate"),
    ([TURNS[0], TURNS[4]], "do not alternate"),
    ([*TURNS[:4], TURNS[3], TURNS[4]], None),
    ([TURNS[1], TURNS[2] | {"tool_calls": [{"function": "weather"}]}], "each with a function's name"),
    ([TURNS[1], TURNS[2] | {"tool_calls": CALL}], "each with a function's name"),
    ([TURNS[1], TURNS[4] | {"reasoning": 3}], "reasoning is no text"),
])  # fmt: skip
def test_roles_of_records(turns, problem):
    found = check_record({"conversations": turns})
    assert found is None if problem is None else problem in found
