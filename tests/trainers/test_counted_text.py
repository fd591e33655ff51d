"""What a dry run says of a text target's tokens, bytes and memory, beside what the stages then make."""

import re
import shutil

import pytest
from draftsmith.data.shards.shards import ShardReader
from draftsmith.recipes.config.plan import plan
from stages_run import load_spelled
from text_run import QUESTIONS, made, recipe, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("counted"))


def lines(source, output, name, *settings):
    loaded = load_spelled(source, "text", output, *settings)
    (stage,) = (one for one in plan(loaded.recipe, loaded.path) if one.name == name)
    return "\n".join(stage.stage.describe(stage))


def test_the_tokens_of_states_are_bounds_of_prompts_and_answers(folder):
    source, output = recipe(folder), folder / "run"
    said = lines(source, output, "states")
    most = int(re.search(r"at most ([\d,]+) text and 0 visual tokens", said)[1].replace(",", ""))
    assert "by the target's tokenizer; answers of up to 6 each" in said and "disk: at most" in said
    run(source, output, stages=["answers", "states"])
    answers, states = (ShardReader(output / name / name) for name in ("answers", "states"))
    prompts = sum(len(tensors["prompt"]) for _, tensors, _ in answers)
    assert most == prompts + 6 * QUESTIONS
    held = sum(len(tensors["ids"]) for _, tensors, _ in states)
    assert prompts < held <= most
    assert f"at most {6 * QUESTIONS} in all" in lines(source, output, "answers")
    size = sum(shard.bytes for shard in states.shards)
    unit, factor = re.search(r"([\d.]+) (kB|MB) in all", said).groups(), {"kB": 1e3, "MB": 1e6}
    assert 0.7 < size / (float(unit[0]) * factor[unit[1]]) < 1.05


def test_without_the_tokenizer_words_are_counted_and_answers_are_bounds_all_the_same(folder, tmp_path):
    """As before a target is downloaded: its config is here, its tokenizer is not."""
    (tmp_path / "target").mkdir()
    shutil.copy(folder / "target" / "config.json", tmp_path / "target")
    said = lines(recipe(folder), tmp_path, "states", f"target.path={tmp_path / 'target'}", "target.dtype=float32")
    assert "at most" in said and "(about, from words; answers of up to 6 each)" in said
