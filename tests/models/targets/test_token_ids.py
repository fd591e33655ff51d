"""How many ids a target has: its tokenizer says so, and a recipe that says another number is refused.

The target's tables are padded, as LLaVA-1.5's are: its tokenizer has fewer ids than they have rows.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.data.processor_files import load_processor
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.lvlm import save_lvlm
from draftsmith.models.targets.llava.section import LlavaTarget, LlavaTargetConfig
from draftsmith.models.targets.load import load_target
from draftsmith.trainers.run.context import Context
from fails import fails_with
from tiled import VOCAB as ROWS
from tiled import model as made_model
from tiled import processor
from tiny import request

MADE = processor("llava")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return made_model("llava")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Weights and processor as they are published."""
    path = tmp_path_factory.mktemp("target")
    save_lvlm(model, path, {})
    MADE.save(path)
    return path


def context(target, folder):
    result = Context.__new__(Context)
    for name, value in (("target", target), ("inputs", {"processor": folder})):
        object.__setattr__(result, name, value)
    return result


def section(folder, **settings):
    return LlavaTargetConfig(kind="llava", path=str(folder), **settings)


def greedy(target, asked):
    return generate(target, None, asked, Decoding(Chain(1), Greedy(), Draw("top-k"), Warp(), 24, ())).tokens


def test_the_number_is_the_tokenizers_and_the_padding_rows_never_come(folder, model):
    """Added tokens count, and a hole in the ids cuts nothing off."""
    number = load_processor(folder).num_token_ids
    assert number == MADE.num_token_ids < ROWS
    assert number > max(MADE.image_token_id, MADE.eos_id, MADE.pad_id)
    holes = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 7})
    assert replace(MADE, tokenizer=holes).num_token_ids == 8
    loaded = load_target(section(folder), folder, num_token_ids=number, image_token_id=None, device=CPU)
    scores = loaded.scores(torch.randn(1, 32))
    possible = torch.arange(ROWS) < number
    possible[MADE.image_token_id] = False
    assert torch.equal(scores[0].isfinite(), possible)


@pytest.mark.parametrize("number", [1, MADE.num_token_ids - 1, MADE.num_token_ids + 1, ROWS, 10 * ROWS])
def test_another_number_in_a_recipe_is_refused_with_both(folder, number):
    """Below, it would be another target whose reports say "identical", as plain decoding is cut, too."""
    named = section(folder, num_token_ids=number)
    told = (
        rf"num_token_ids is {number}, .*{re.escape(str(folder))} has {MADE.num_token_ids} ids\n.*target\.num_token_ids"
    )
    fails_with(told, context(named, folder).processor)
    fails_with(told, load_target, named, folder, num_token_ids=MADE.num_token_ids, image_token_id=None, device=CPU)
    same = section(folder, num_token_ids=MADE.num_token_ids)
    assert context(same, folder).processor().num_token_ids == MADE.num_token_ids


def test_greedy_tokens_are_the_models_own(folder, model):
    """Of a target whose padding rows are quiet, as published ones are: transformers' own decoding bans nothing."""
    with torch.no_grad():
        model.lm_head.weight[MADE.num_token_ids :] = 0
        model.lm_head.weight[MADE.image_token_id] = 0
    asked = [request(seed, 0) for seed in range(5)]
    model.generation_config.eos_token_id = None
    own = [
        model.generate(input_ids=one.ids[None], max_new_tokens=24, do_sample=False)[0, len(one.ids) :].tolist()
        for one in asked
    ]
    whole = LlavaTarget(model, num_token_ids=MADE.num_token_ids, image_token_id=MADE.image_token_id)
    assert [greedy(whole, one) for one in asked] == own
    cut = LlavaTarget(model, num_token_ids=MADE.num_token_ids // 2, image_token_id=MADE.image_token_id)
    assert sum(greedy(cut, one) != greedy(whole, one) for one in asked) >= 4, "what a wrong number did"
