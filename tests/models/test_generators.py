"""What a recipe's target makes of labels and guidance: values that would silently mean something else are refused."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.drafters.eagle_images import EagleLoss, ImageEagleTraining
from draftsmith.models.drafters.llamagen import SiblingConfig
from draftsmith.models.targets.anole.section import AnoleTargetConfig
from draftsmith.models.targets.llamagen.files import values_of
from draftsmith.models.targets.llamagen.section import LlamaGenTargetConfig
from draftsmith.models.targets.llamagen.transformer import LlamaGenConfig
from draftsmith.models.targets.table import mirrored_in
from fails import fails_with
from pydantic import ValidationError
from visual_tiny import EAGLE, code_batch, llamagen, step_of, target

SHAPE = {"num_layers": 1, "num_heads": 2, "dim": 16, "num_classes": 3}
CLASSES = LlamaGenTargetConfig(kind="llamagen", shape=SHAPE, condition="class", image_size=64, vq="vq")


@pytest.mark.parametrize("label", [-1, 3, 4, 1000])
def test_labels_outside_the_classes_are_refused(label):
    """Label 3 of 3 classes would draw without any, and -1 as well."""
    sample = SimpleNamespace(info={"caption": "a dog", "label": label})
    source = CLASSES.conditions({}, device=torch.device("cpu"))
    for ask in (
        lambda: source("a dog", label),
        lambda: CLASSES.sample_condition()(sample),
        lambda: CLASSES.check_labels([("a cat", 0), ("a dog", label)]),
    ):
        caught = fails_with(f"label {label}, and the target has classes 0 to 2", ask)
        assert "'a dog'" in str(caught)


def test_labels_of_the_classes_are_taken():
    source = CLASSES.conditions({}, device=torch.device("cpu"))
    of_sample = pickle.loads(pickle.dumps(CLASSES.sample_condition()))  # as a reading process gets it
    for label in range(3):
        sample = SimpleNamespace(info={"caption": "", "label": label})
        assert source("", label).tolist() == of_sample(sample).tolist() == label
    CLASSES.check_labels([("", label) for label in range(3)])
    fails_with("without a label", source, "a dog", None)
    published = LlamaGenTargetConfig(kind="llamagen", size="B", condition="class", image_size=256, vq="vq")
    assert published.conditions({}, device=torch.device("cpu"))("", 999).item() == 999
    # Captions need no label, and whatever stands there is not read.
    text = LlamaGenTargetConfig(kind="llamagen", size="B", condition="text", image_size=256, vq="vq", text_encoder="t5")
    for config in (text, AnoleTargetConfig(kind="anole")):
        config.check_labels([("a dog", None), ("a dog", 5000)])


def test_guidance_is_by_default_the_published_samplers():
    text = LlamaGenTargetConfig(kind="llamagen", size="B", condition="text", vq="vq", text_encoder="t5")
    given = LlamaGenTargetConfig(kind="llamagen", size="B", condition="class", vq="vq", cfg_scale=1.5)
    scales = [config.cfg_scale for config in (text, CLASSES, given, AnoleTargetConfig(kind="anole"))]
    assert scales == [7.5, 4.0, 1.5, 3.0]


def sections(scale: float):
    llamagen = {"kind": "llamagen", "size": "B", "condition": "class", "vq": "vq"}
    yield lambda: LlamaGenTargetConfig(**llamagen, cfg_scale=scale)
    yield lambda: AnoleTargetConfig(kind="anole", cfg_scale=scale)
    yield lambda: SiblingConfig(kind="llamagen", path="small", size="B", cfg_scale=scale)


@pytest.mark.parametrize("scale", [0.01, 0.5, 0.999])
def test_scales_between_0_and_1_are_refused_with_the_hint(scale):
    """Decoding would leave them out, where losses over pairs of rows would apply them."""
    for make in sections(scale):
        fails_with(r"use 1 \(or 0\) for no guidance, or a scale above 1", make, error=ValidationError)
    fails_with("", Guidance, scale, error=AssertionError)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.001, 7.5])
def test_other_scales_are_taken(scale):
    assert all(make().cfg_scale == scale for make in sections(scale))
    fails_with("", AnoleTargetConfig, kind="anole", cfg_scale=-0.1, error=ValidationError)


@pytest.mark.parametrize("scale", [0.0, 1.0])
@torch.no_grad()
def test_no_guidance_means_the_condition_alone_in_losses_too(scale):
    scores = torch.randn(2, 3, 5)
    assert Guidance(scale).num_rows == 1
    assert torch.equal(Guidance(scale)(scores, range(3)), scores[0])
    # The guided term of a loss is then that of the conditional rows, whatever the unconditional ones say.
    model = llamagen()
    teacher = target(model, scale)
    torch.manual_seed(0)
    head = EAGLE.build(teacher)
    batch = code_batch(model, torch.randint(0, 24, (2, 16), generator=torch.Generator().manual_seed(0)))
    plain = step_of(ImageEagleTraining(head, teacher, EagleLoss(noise=0, token_divergence="kl")), teacher, batch)
    paired = step_of(
        ImageEagleTraining(head, teacher, EagleLoss(noise=0, guided=1.0, guided_divergence="kl")), teacher, batch
    )
    torch.testing.assert_close(paired.metrics["guided_loss"], plain.metrics["token_loss"])


def test_published_weights_say_which_image_generator_they_are(tmp_path):
    """By `config.json`; a language model's say that they are none."""
    kind, shape = mirrored_in(tmp_path, values_of(LlamaGenConfig(num_layers=1, num_heads=2, dim=8, grid=4)))
    assert kind == "llamagen" and (shape.grid, shape.hidden_size, shape.draws_images) == (4, 8, True)
    fails_with("'llama' is no image generator's", mirrored_in, tmp_path, {"model_type": "llama"})
