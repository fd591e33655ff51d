"""Prompts that a target writes itself: users' turns that ended, each once, of topics that no other split has."""

import json
import shutil

import pytest
from draftsmith.core import ranks
from draftsmith.core.files import write_whole
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.decoding.batched import Written
from draftsmith.models.parts import TokenIds
from draftsmith.trainers.stages import prompts as stages
from draftsmith.trainers.stages.prompts import Begun, _behind, special_ids
from fails import fails_with
from PIL import Image
from states_run import WORDS
from text_run import FORMAT, run, target
from tiny import with_random_weights
from transformers import GenerationConfig, LlamaForCausalLM

BEGINS = ["About {topic}:", "Which {topic}"]
SPLITS = {"train": {"count": 9, "topics": ["one", "two", "three"]}, "held_out": {"count": 4, "topics": ["four"]}}


def recipe(folder, **settings):
    stage = {
        "kind": "prompts", "format": FORMAT, "begins": BEGINS, "splits": SPLITS, "max_new_tokens": 60,
        "temperature": 1.0, "top_p": 0.7, "batch_size": 4, "samples_per_shard": 5,
    } | settings  # fmt: skip
    return {"target": {"kind": "causal_lm", "path": str(folder / "target")}, "stages": {"prompts": stage}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target that ends at a quarter of its words and seldom says a special token, so that most of its turns end."""
    folder = tmp_path_factory.mktemp("prompts")
    target(folder / "target")
    special = special_ids(load_processor(folder / "target", text_only=True))
    model = LlamaForCausalLM.from_pretrained(folder / "target")
    model.lm_head.weight.data[[*special]] = 0.0  # below the scores that top_p keeps
    model.save_pretrained(folder / "target")
    words = [token for token in range(model.config.vocab_size) if token not in special]
    GenerationConfig(eos_token_id=words[::4]).save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="module")
def made(folder):
    run(recipe(folder), folder / "run")
    return folder / "run"


def records(output, split):
    return json.loads((output / "prompts" / "world" / f"{split}.json").read_text())


def texts(output, split="train"):
    return [record["conversations"][0]["value"] for record in records(output, split)]


def test_each_prompt_is_a_user_turn_about_a_topic_of_its_split(made):
    for split, settings in SPLITS.items():
        assert len(records(made, split)) == settings["count"]
        for record in records(made, split):
            (turn,) = record["conversations"]
            begins = [begin.replace("{topic}", record["topic"]) for begin in BEGINS]
            assert turn["from"] == "human" and record["topic"] in settings["topics"]
            assert any(turn["value"].startswith(f"{begin} ") for begin in begins), turn
    said = [" ".join(text.casefold().split()) for split in SPLITS for text in texts(made, split)]
    assert len({*said}) == len(said)


def test_they_are_what_the_target_says_there(folder, made, monkeypatch):
    """The ids that it was asked with are the template's, up to the turn's first words."""
    asked, seeds = [], []
    write = stages.write_answers

    def noted(decoder, requests, warp, **settings):
        asked.extend(request.ids.tolist() for request in requests)
        seeds.extend(settings["seeds"])
        return write(decoder, requests, warp, **settings)

    monkeypatch.setattr(stages, "write_answers", noted)
    run(recipe(folder), folder / "noted")
    tokenizer = load_processor(folder / "target", text_only=True).tokenizer
    bos = tokenizer.bos_token_id
    for ids in asked:
        text = tokenizer.decode([token for token in ids if token != bos]).rstrip()
        assert text.startswith("<|im_start|>user\n") and text.endswith(("one", "two", "three", "four", ":")), text
    assert texts(folder / "noted") == texts(made)
    assert len(set(seeds)) == len(seeds), "a number of one split has other draws than the same number of another"


def test_a_killed_run_goes_on_behind_its_shards(folder, made, tmp_path, monkeypatch):
    written = []

    def dies(path, data):
        if path.parent.parent.name == stages._TRIED:
            if len(written) == 1:
                raise KeyboardInterrupt
            written.append(path)
        return write_whole(path, data)

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_whole", dies)
        fails_with("", run, recipe(folder), output, error=KeyboardInterrupt)
    kept = written[0].stat().st_mtime_ns
    run(recipe(folder), output)
    assert written[0].stat().st_mtime_ns == kept and texts(output) == texts(made)


def test_two_ranks_try_what_one_does(folder, made, tmp_path, monkeypatch):
    """Each its own shards; the barrier of `together` is where one waits for the other's."""
    source, mine = [], {}
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "rank", lambda rank=rank: rank)
            patch.setattr(ranks, "world_size", lambda: 2)
            mine[rank] = [*ranks.share(5)]
    assert sorted(mine[0] + mine[1]) == [*range(5)]
    # What is tried next is a function of the texts so far alone, so a shard has the same prompts whoever writes it.
    first, second = (tmp_path / name for name in ("first", "second"))
    run(recipe(folder), first)
    shutil.copytree(first, second)
    for path in sorted((second / "prompts" / stages._TRIED / "train").glob("0*.json"))[::2]:
        source.append((path, path.read_bytes()))
        path.unlink()
    (second / "prompts" / "done.json").unlink()
    run(recipe(folder), second)
    assert all(path.read_bytes() == data for path, data in source) and texts(second) == texts(made)


def test_what_does_not_end_is_no_prompt(folder, tmp_path):
    words = r"36 tries gave 0 of 9 prompts: the others did not end within 1 token"
    caught = fails_with(words, run, recipe(folder, max_new_tokens=1), tmp_path / "run")
    assert caught.key == "stages.prompts.splits.train" and "max_new_tokens" in caught.hint


@pytest.mark.parametrize(("changed", "message"), [
    ({"temperature": 0}, "a greedy target writes the same prompt each time"),
    ({"begins": ["Hello"]}, "'Hello' has no {topic}, and splits.train has topics"),
    ({"splits": {"train": {"count": 1}}}, "has a {topic}, and splits.train has none"),
    ({"splits": SPLITS | {"third": {"count": 1, "topics": ["TWO"]}}}, "topic 'two' is of train as well"),
    ({"splits": {"a": {"count": 1, "topics": ["x", "X"]}}}, "topics name one twice"),
    ({"splits": {"a": {"count": 1, "pictures": "p"}}, "begins": [""]}, "the target reads text alone"),
    ({"format": {"template": "plain"}}, "the plain template takes a question with <image>"),
])  # fmt: skip
def test_what_makes_no_prompts_is_refused(folder, tmp_path, changed, message):
    fails_with(message.replace("{", r"\{"), run, recipe(folder, **changed), tmp_path / "run")


@pytest.mark.parametrize("form", [{"template": "chat"}, {"template": "v1"}, {"template": "v1", "system": "Be brief."}])
@pytest.mark.parametrize("begin", ["", "About one:"])
def test_a_turn_is_cut_where_the_target_goes_on(folder, form, begin):
    """Before the first token that differs between two turns, and never inside the head of the turn."""
    processor, form = load_processor(folder / "target", text_only=True), PromptFormat(**form)
    if form.template == "v1":
        processor.tokenizer.eos_token = "</s>"
    count, behind = _behind(begin, form, processor)
    whole = encode([{"from": "human", "value": f"{begin} Q".strip()}], form, processor, open_ended=True)
    text = processor.tokenizer.decode(whole.ids[: len(whole.ids) - count]).rstrip()
    assert text.endswith(begin or ("USER:" if form.template == "v1" else "user"))
    assert behind == ("ASSISTANT:" if form.template == "v1" else "<|im_end|>\n<|im_start|>assistant")


class Said(stages.Prompts):
    """Reads what a target wrote, without one."""

    def __init__(self, processor, behind):
        self.processor, self.ends, self.special = processor, (50,), special_ids(processor)
        self.begun, self.behind = [Begun("Tell me", None, None)], {"Tell me": (1, behind)}


def test_a_turn_ends_at_an_end_token_or_where_the_answer_would_begin(folder):
    """And one that opens another turn by a special token is none."""
    processor = load_processor(folder / "target", text_only=True)
    said = Said(processor, "ASSISTANT:")
    words = processor.tokenizer(" which one", add_special_tokens=False).input_ids
    answer = processor.tokenizer(" ASSISTANT: this one", add_special_tokens=False).input_ids
    opens = processor.tokenizer.convert_tokens_to_ids("<|im_start|>")

    def text(ids, stop):
        return said._text(0, Written(ids, stop, None))

    assert text([*words, 50], "eos") == "Tell me which one"
    assert text([*words, *answer], "length") == "Tell me which one"
    assert text(words, "length") is None and text([50], "eos") is None
    assert text([*words, opens, *words, 50], "eos") is None


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A LLaVA that ends at a quarter of its words and seldom says a special token, and two folders of pictures."""
    folder = tmp_path_factory.mktemp("seeing")
    tokenizer = train_tokenizer([f"USER: {word} ASSISTANT: {word}." for word in WORDS] * 3, 400)
    processor = LLAVA.new(tokenizer, image_size=32, patch_size=16, image_mean=(0.5,) * 3, image_std=(0.5,) * 3)
    ids = TokenIds(len(tokenizer), processor.image_token_id, *(
        getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")))  # fmt: skip
    model = with_random_weights((32, 48, 2, 2), (32, 48, 1, 2), ids, side=32, patch=16, initializer_range=0.3)
    processor.save(folder / "target")
    special = special_ids(load_processor(folder / "target"))
    words = [token for token in range(len(tokenizer)) if token not in special]
    model.lm_head.weight.data[words] *= 3
    model.lm_head.weight.data[[*special]] = 0.0
    model.save_pretrained(folder / "target")
    GenerationConfig(eos_token_id=words[::4]).save_pretrained(folder / "target")
    for name, colors in {"train": ["red", "green", "blue"], "held_out": ["white"]}.items():
        (folder / name / "few").mkdir(parents=True)
        for color in colors:
            Image.new("RGB", (40, 30), color).save(folder / name / "few" / f"{color}.png")
    return folder


@pytest.mark.parametrize("begin", ["", "Which one"])
def test_a_vision_target_asks_about_the_pictures_of_a_folder(seeing, tmp_path, monkeypatch, begin):
    """It sees the picture, with the turn begun behind it; what it wrote can be answered with the picture."""
    asked, write = [], stages.write_answers

    def noted(decoder, requests, warp, **settings):
        asked.extend(requests)
        return write(decoder, requests, warp, **settings)

    monkeypatch.setattr(stages, "write_answers", noted)
    splits = {name: {"count": n, "pictures": str(seeing / name)} for name, n in (("train", 4), ("held_out", 2))}
    form = {"template": "v1", "system": "", "image_rule": "verbatim"}
    data = {"from": "prompts", "path": "train", "aspect": "square", "images": str(seeing / "train"), "max_length": 200}
    made = recipe(seeing, splits=splits, begins=[begin], format=form, aspect="square")
    made["target"]["kind"] = "llava"
    made["stages"]["answers"] = {"kind": "regenerate", "format": form, "data": data, "max_new_tokens": 4}
    run(made, tmp_path / "run")
    tokenizer = load_processor(seeing / "target").tokenizer
    for request in asked:
        assert request.pixels.shape[0] == 1 and (request.modality != 0).sum() == 4
        behind = tokenizer.decode(request.ids[(request.modality != 0).nonzero().max() + 1 :])
        assert behind.strip() == begin
    for split, (folder, count) in {"train": ("train", 4), "held_out": ("held_out", 2)}.items():
        assert len(records(tmp_path / "run", split)) == count
        for record in records(tmp_path / "run", split):
            assert (seeing / folder / record["image"]).is_file()
            assert record["conversations"][0]["value"].startswith(f"<image>\n{begin}")
    assert len({record["image"] for record in records(tmp_path / "run", "train")}) >= 2
