"""What every stage owns: settings that nothing would read are refused, and not shown."""

import pytest
from draftsmith.core.errors import UserError
from draftsmith.core.section import Section
from draftsmith.trainers.stages.generate import GenerateStage
from draftsmith.trainers.stages.regenerate import RegenerateStage
from fails import fails_with
from pydantic import ValidationError

CONVERSATIONS = {"kind": "generate", "splits": {"train": {"caption": 2}}}
CAPTIONED = {"kind": "generate", "splits": {"train": 2}}
TEXTS = {"kind": "regenerate", "data": {"path": "a.json"}}
PICTURES = {"kind": "regenerate", "prompts": {"path": "a.txt"}}


@pytest.mark.parametrize(("stage", "section", "settings", "told"), [
    (GenerateStage, CONVERSATIONS, {"grain": 3.0}, "grain: nothing reads it: conversations have none"),
    (GenerateStage, CAPTIONED, {"suite": 3}, "suite: nothing reads it: captioned pictures have none"),
    (GenerateStage, CAPTIONED, {"splits": {"a": 1, "b": {"caption": 1}}}, "and not both"),
    (RegenerateStage, TEXTS, {"repeats": 3}, "repeats: nothing reads it: texts have none"),
    (RegenerateStage, PICTURES, {"max_new_tokens": 3}, "max_new_tokens: nothing reads it: pictures have none"),
    (RegenerateStage, TEXTS, {"prompts": {"path": "a.txt"}}, "prompts: nothing reads it: texts have none"),
    (RegenerateStage, {"kind": "regenerate"}, {}, "give data, .*, or prompts"),
])  # fmt: skip
def test_settings_that_nothing_would_read_are_refused(stage, section, settings, told):
    fails_with(told, stage.model_validate, section | settings, error=ValidationError)


@pytest.mark.parametrize("section", [CONVERSATIONS, CAPTIONED, TEXTS, PICTURES])
def test_what_is_shown_can_be_read_again(section):
    stage = (GenerateStage if section["kind"] == "generate" else RegenerateStage).model_validate(section)
    shown = stage.model_dump(mode="json", by_alias=True)
    assert type(stage).model_validate(shown) == stage and not set(stage.unread()) & set(shown)


class Target(Section):
    kind: str
    draws_images: bool
    path: str | None = None

    def provides(self):
        return set()


@pytest.mark.parametrize(("section", "draws_images", "told"), [
    (CONVERSATIONS, True, "splits"), (CAPTIONED, False, "splits"), (TEXTS, True, "data"), (PICTURES, False, "prompts"),
])  # fmt: skip
def test_a_target_that_would_not_read_it_is_named(section, draws_images, told):
    stage = (GenerateStage if section["kind"] == "generate" else RegenerateStage).model_validate(section)
    kind = "llamagen" if draws_images else "llava"
    with pytest.raises((UserError, ValueError), match=kind):
        stage.check(Target(kind=kind, draws_images=draws_images), None)
    stage.check(Target(kind="llava" if draws_images else "llamagen", draws_images=not draws_images), None)


def test_defaults_are_of_what_is_written():
    assert GenerateStage.model_validate(CONVERSATIONS).vocabulary == 640
    assert GenerateStage.model_validate(CAPTIONED).vocabulary == 400
    assert RegenerateStage.model_validate(TEXTS).sampling_temperature == 0
    assert RegenerateStage.model_validate(PICTURES).sampling_temperature == 1
