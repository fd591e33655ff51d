"""A target section of another package: its own records are found wherever ours are."""

from dataclasses import replace
from typing import ClassVar

from draftsmith.core.errors import Refused
from draftsmith.models.targets.causal.section import CausalTraining
from draftsmith.models.targets.family import Family, Pictures, Text
from draftsmith.models.targets.language import LanguageTarget
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.load import check_kind
from draftsmith.models.targets.section import TargetSection
from draftsmith.models.targets.table import family_of, text_of
from draftsmith.trainers.serve.engine_section import VllmEngine
from fails import fails_with
from transformers import CLIPVisionConfig, GraniteConfig, LlamaConfig, LlavaConfig

TEXT = Text(norms_heads=True)
GRANITE = Family(
    "granite", "GraniteForCausalLM", CausalTraining, LanguageTarget, texts={"granite": TEXT},
    engines={"vllm": ("eagle3",)},
)  # fmt: skip
OWN_TOWER = Family("own", "LlavaForConditionalGeneration", CausalTraining, LanguageTarget, tower="own_tower")


class Granite(TargetSection):
    families: ClassVar[dict[str, Family]] = {"granite": GRANITE}

    kind: str


class OwnTower(LlavaTargetConfig):
    families: ClassVar[dict[str, Family]] = {"llava": OWN_TOWER}
    base_kind: ClassVar[str] = "llava"

    kind: str


class Bare(TargetSection):
    kind: str


def test_its_records_are_found():
    section = Granite(path="a/b")
    assert section.family is GRANITE and family_of(GraniteConfig()) is GRANITE
    assert text_of(GraniteConfig()) is TEXT
    assert Bare(path="a/b").family is None
    assert OwnTower(path="a/b").family is OWN_TOWER, "its own records go before those of the section it derives from"


def test_a_tower_makes_another_family_of_a_model_type_as_among_ours():
    vision, text = CLIPVisionConfig(), LlamaConfig()
    config = LlavaConfig(vision_config=vision, text_config=text)
    assert family_of(config).kind == "llava"
    config.vision_config.model_type = "own_tower"
    assert family_of(config) is OWN_TOWER


def test_weights_of_another_model_type_are_refused():
    check_kind(Granite(path="a/b"), "granite", "a/b")
    fails_with(r"'a/b' is of model_type 'llama', expected granite", check_kind, Granite(path="a/b"), "llama", "a/b")


def test_an_engine_hands_it_the_states_that_its_record_names():
    engine = VllmEngine(kind="vllm")
    engine.check(Granite(path="a/b"), states=True, aspect="pad")
    fails_with("hands out no hidden states", engine.check, Bare(path="a/b"), states=True, aspect="pad", error=Refused)


def test_pictures_of_a_new_family_are_compared_before_an_engine_gets_them():
    def check(**settings):
        class Seeing(TargetSection):
            families: ClassVar[dict[str, Family]] = {"seeing": replace(GRANITE, **settings)}

            kind: str

        VllmEngine(kind="vllm").check(Seeing(path="a/b"), states=False, aspect="pad")

    assert not Family("new", "NewModel", CausalTraining, LanguageTarget, Pictures()).is_compared
    fails_with("nobody has compared here how vllm expands the pictures", check, pictures=Pictures(), error=Refused)
    check(pictures=Pictures(), is_compared=True)
    check()  # it reads text alone, and there is nothing to compare
