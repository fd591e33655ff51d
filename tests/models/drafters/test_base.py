"""A drafter's section: what decoding may change, what nothing reads beside a target, and which kinds there are."""

from typing import Literal, get_args

import pytest
from draftsmith.core.errors import Refused
from draftsmith.models.drafters import AnyDrafter
from draftsmith.models.drafters.base import DrafterConfig, for_decoding
from draftsmith.models.drafters.head_config import FusedHeadConfig
from draftsmith.models.targets.base import language_shape
from fails import fails_with
from heads_tiny import config_of, text_config
from pydantic import TypeAdapter, ValidationError
from visual_tiny import llamagen, target

ALONE = ("eagle", "eagle3", "sparrow", "msd", "vispec", "hivis", "medusa", "dflash", "dspark", "dflash2", "peagle",
         "mtp", "pruned", "ngram", "suffix", "jacobi")  # fmt: skip
SECTIONS = {kind: {"kind": kind} for kind in ALONE} | {
    "lvlm": {"kind": "lvlm", "path": "somewhere"},
    "llamagen": {"kind": "llamagen", "path": "somewhere", "size": "B"},
    "ensemble": {"kind": "ensemble", "members": ["a", "b"]},
    "head_tail": {"kind": "head_tail", "members": ["a"]},
}
# Settings that a method may change, with another value.
CHANGES = {
    "lvlm": {"mode": "MT"},
    "eagle": {"vata": True, "positions": "compact"},
    "sparrow": {"vata": False, "positions": "flat", "visual_share": 0.5, "share_by": "text", "share_layer": 1},
    "hivis": {"positions": "flat"},
    **{kind: {"vata": True} for kind in ("eagle3", "msd", "vispec", "peagle")},
    **{kind: {"positions": "compact", "vata": True} for kind in ("dflash", "dspark", "dflash2")},
    "pruned": {"ratio": 0.5, "attention_share": 0.2, "positions": "target"},
    "llamagen": {"cfg_scale": 3.0},
}


def section(kind: str) -> DrafterConfig:
    return TypeAdapter(AnyDrafter).validate_python(SECTIONS[kind])


class Joined(FusedHeadConfig):
    """A variant that somebody writes beside EAGLE, with inputs that no engine's class joins."""

    kind: Literal["joined"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators", "eagle"])
def test_no_engine_runs_a_head_that_does_not_say_so(engine):
    assert Joined(kind="joined").exports(engine) == ["no engine drafts with joined"]


def test_the_union_has_every_kind():
    union = get_args(get_args(AnyDrafter)[0])
    assert {type(section(kind)) for kind in SECTIONS} == {*union} and len(union) == len(SECTIONS)


@pytest.mark.parametrize("kind", SECTIONS)
def test_decoding_changes_what_decoding_alone_reads(kind):
    before, changes = section(kind), CHANGES.get(kind, {})
    after = for_decoding(before, **changes)
    assert set(changes) <= before.decoding_settings and type(after) is type(before)
    different = {n for n in type(before).model_fields if getattr(after, n) != getattr(before, n)}
    assert different == set(changes)
    assert before == section(kind), "the trained section stays as it was"


@pytest.mark.parametrize(("kind", "settings", "says"), [
    ("sparrow", {"visual_shares": 0.5}, "did you mean 'visual_share'"),
    ("sparrow", {"ivsb": False}, "ivsb is no decoding setting of this drafter"),
    ("hivis", {"vata": True}, "kind hivis has positions"),
    ("medusa", {"num_heads": 2}, "kind medusa has none"),
    ("lvlm", {"modes": "T"}, "did you mean 'mode'"),
    ("ensemble", {"weights": {"kind": "grid"}}, "weights is no decoding setting"),
])  # fmt: skip
def test_other_settings_are_refused_with_the_nearest(kind, settings, says):
    fails_with(says, for_decoding, section(kind), error=ValueError, **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sparrow", {"visual_share": 2.0}), ("lvlm", {"mode": "X"}), ("llamagen", {"cfg_scale": 0.5})],
)
def test_values_are_checked_as_in_a_recipe(kind, settings):
    with pytest.raises((ValidationError, ValueError)):
        for_decoding(section(kind), **settings)


@pytest.mark.parametrize(("settings", "draws_images", "says"), [
    ({"vata": True}, True, "vata: nothing reads it: it is of eagle heads for language models"),
    ({"mtp_steps": 2}, True, "mtp_steps: nothing reads it"),
    ({"num_heads": 2}, False, "num_heads: nothing reads it: it is of eagle heads for image generators"),
    ({"loss": {"guided": 1.0}}, False, "loss: nothing reads it"),
    ({"intermediate_size": 8}, True, None),
    ({"intermediate_size": 8, "image": "placeholder"}, False, None),
])  # fmt: skip
def test_settings_of_eagle_that_nothing_reads_beside_a_target(settings, draws_images, says):
    config = config_of(kind="eagle", **settings)
    if says is None:
        config.check_settings(draws_images)
        return
    fails_with(says, config.check_settings, draws_images, error=Refused)
    config.check_settings(not draws_images)


@pytest.mark.parametrize("kind", SECTIONS)
def test_kinds_that_draft_for_other_targets_are_refused(kind):
    config = section(kind)
    for draws_images, drafts in ((False, config.for_language), (True, config.for_images)):
        if drafts:
            config.check_settings(draws_images)
        else:
            with pytest.raises(Refused, match=f"kind: {kind} is no drafter for targets that"):
                config.check_settings(draws_images)


def test_shapes_of_both_kinds_of_targets_fit():
    drawn, text = target(llamagen()).shape, language_shape(text_config())
    for kind, shape in (("eagle", drawn), ("medusa", drawn), ("eagle", text), ("sparrow", text), ("medusa", text)):
        section(kind).check(shape)


@pytest.mark.parametrize("kind", ["pruned", "llamagen", "ensemble", "head_tail"])
def test_what_is_not_trained_says_so(kind):
    config = section(kind)
    assert config.trains_on is None and config.provides() == {"drafter"}
    fails_with(f"a drafter of kind {kind} is not trained", config.training_objective, None, None)
