"""Settings of training as the papers print them, in every recipe that says it has them."""

import pytest
from draftsmith.recipes.config.files import recipe_names
from draftsmith.recipes.config.load import load

LLAVA15 = sorted(name for name in recipe_names() if name.startswith("llava15-"))
IMAGE_HEADS = [name for name in recipe_names() if name.startswith(("eagle-llamagen-", "eagle-anole-"))]


def stages(name):
    return load([f"recipe={name}"]).recipe.stages


@pytest.mark.parametrize("name", LLAVA15)
def test_llava15_has_the_numbers_of_tabeds_table_7(name):
    """(a) pretraining and (b) instruction finetuning: epochs, batch, rate, schedule, warm-up, weight decay."""
    found = {}
    for phase in ("pretrain", "finetune"):
        stage, optim = stages(name)[phase], stages(name)[phase].optim
        assert not optim.lr_by_part and not optim.warmup_steps and not optim.final_ratio, "one rate, one warm-up"
        assert stage.steps is None, "whole epochs"
        found[phase] = (
            stage.epochs, stage.batch_size, optim.lr, optim.schedule, optim.warmup_ratio, optim.weight_decay,
        )  # fmt: skip
    assert found == {"pretrain": (1, 256, 1e-3, "cosine", 0.03, 0.0), "finetune": (1, 128, 2e-5, "cosine", 0.03, 0.0)}


@pytest.mark.parametrize("name", LLAVA15)
def test_llava15_trains_in_two_stages_with_a_frozen_vision_encoder(name):
    """TABED, appendix H.1: the projector alone, then the language model too; data of LLaVA-1.5's authors."""
    recipe = load([f"recipe={name}"]).recipe
    pretrain, finetune = (recipe.stages[phase] for phase in ("pretrain", "finetune"))
    assert [*recipe.stages][:2] == ["pretrain", "finetune"]
    assert pretrain.trainable == ["projector"] and finetune.trainable == ["projector", "language_model"]
    served = name == "llava15-68m-served"
    written, aspect = ("chat", "square") if served else ("v1", "pad")  # vLLM's prompt and pictures
    assert (pretrain.format.template, finetune.format.template) == ("plain", written)
    assert (pretrain.data.aspect, finetune.data.aspect) == ("square", aspect) and finetune.group_by_modality
    assert pretrain.data.path.endswith("blip_laion_cc_sbu_558k.json") and pretrain.expected.samples == 558_128
    assert finetune.data.path.endswith("llava_v1_5_mix665k.json") and finetune.expected.samples == 665_298
    assert recipe.drafter.language_model == f"JackFram/llama-{'160m' if '160m' in name else '68m'}"
    own = "target" if name == "llava15-68m-served" else "openai/clip-vit-large-patch14-336"
    assert recipe.drafter.vision_tower == own


@pytest.mark.parametrize("name", IMAGE_HEADS)
def test_image_heads_train_as_lanterns_appendix_b2_says(name):
    """Batch 16, rate 1e-4, betas 0.9 and 0.95, linear with 2,000 steps of warm-up, 20 epochs; the best by top-3."""
    (head,) = (stage for stage in stages(name).values() if stage.kind == "train")
    optim = head.optim
    assert (head.batch_size, head.epochs, head.select, head.data.held_out) == (16, 20, "top3", 0.05)
    assert head.condition_dropout == 0.1
    assert (optim.lr, optim.betas, optim.schedule, optim.warmup_steps) == (1e-4, (0.9, 0.95), "linear", 2000)
