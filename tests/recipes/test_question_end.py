"""A shipped `question_end` asks a published set's questions as a paper does; nobody's own questions are asked so."""

import pytest
import yaml
from draftsmith.recipes.config.load import load

ASKS = "Please answer with at least 1000 words."
STAGES = {"eagle3-qwen2.5-vl-7b": "answers", "sparrow-qwen3-vl-8b": "picture_states", "eagle-llava15-7b": "answers",
          "peagle-qwen2.5-vl-7b": "pictures"}  # fmt: skip


def ends(*arguments: str, stage: str) -> str:
    return load(list(arguments)).recipe.stages[stage].data.question_end


@pytest.mark.parametrize(("recipe", "stage"), STAGES.items())
def test_another_path_takes_it_away(recipe, stage, tmp_path):
    key = f"stages.{stage}.data"
    name = f"recipe={recipe}"
    assert ends(name, stage=stage) == ASKS, "of the published set"
    shipped = load([name]).recipe.stages[stage].data.path
    assert ends(name, f"{key}.path={shipped}", f"{key}.max_length=512", stage=stage) == ASKS
    assert ends(name, f"{key}.path=mine.jsonl", stage=stage) == ""
    assert ends(name, f"{key}.from=text", stage=stage) == "", "another stage's files are others, too"
    assert ends(name, f"{key}={{path: mine.jsonl}}", stage=stage) == ""
    both = [f"{key}.path=mine.jsonl", f"{key}.question_end=Why?"]
    assert ends(name, *both, stage=stage) == ends(name, *reversed(both), stage=stage) == "Why?", "one's own stays"
    for none in ("null", '""'):
        assert ends(name, f"{key}.question_end={none}", stage=stage) == ""
    for data, end in (({"path": "mine.jsonl"}, ""), ({"max_length": 512}, ASKS), ({"question_end": None}, ""),
                      ({"path": "mine.jsonl", "question_end": "Why?"}, "Why?")):  # fmt: skip
        mine = {"extends": recipe, "stages": {stage: {"data": data}}}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
        assert ends(f"recipe={tmp_path / 'mine.yaml'}", stage=stage) == end
