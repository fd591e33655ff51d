"""LlamaGen as a target: recorded guided images, trees against one path at a time, precision, and whole sequences."""

import copy
import random

import pytest
import torch
from draftsmith.core.batch import CodeBatch
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.tree import ROOT, chain, no_tree
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llamagen.target import LlamaGenTarget
from exact import path_to, random_tree
from tensors import close, unchanged
from visual_tiny import arrays, code_batch, greedy, llamagen, plain, published, request, sequence, target, true_features

CASES = [("t2i", "a"), ("t2i", "b"), ("c2i", "a"), ("c2i", "b")]
INTERVAL = {"t2i": "cfg7.5_interval4", "c2i": "cfg4.0_interval2"}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def recorded(request):
    """t2i b holds captions of one and of all 120 tokens."""
    result = published(*request.param)
    result.kind = request.param[0]
    result.greedy = arrays("vectors_heads/llamagen_greedy.npz", "/".join((*request.param, "greedy", "")))
    return result


@pytest.mark.parametrize("setting", ["cfg3.0", "cfg7.5", "interval", "nocfg"])
def test_images_of_the_published_sampler(recorded, setting):
    name = INTERVAL[recorded.kind] if setting == "interval" else setting
    guidance = Guidance(recorded.greedy[f"{name}/cfg_scale"].item(), int(recorded.greedy[f"{name}/cfg_interval"]))
    images = recorded.greedy[f"{name}/tokens"]
    generator = LlamaGenTarget(recorded.model, guidance)
    assert generator.num_codes == images.shape[1] and len(images) == len(recorded.requests)
    for asked, image in zip(recorded.requests, images.tolist(), strict=True):
        result = generate(generator, None, asked, greedy(Chain(1), generator.num_codes))
        assert result.tokens == image
        assert len(result.cycles) == len(image) - 1 and result.stop == "length"
    if setting == "interval":
        assert images.tolist() != recorded.greedy["cfg7.5/tokens"].tolist(), "the interval shows"


@pytest.mark.parametrize("side", ["cond", "uncond"])
def test_sequences_hold_the_recorded_features(recorded, side):
    """The unconditional rows see the unconditional features under the caption's own mask."""
    given, model = recorded.arrays, recorded.model
    codes = given["image_tokens"]
    batch = CodeBatch(
        codes, tuple(asked.condition for asked in recorded.requests), torch.zeros(len(codes)).bool(),
        torch.ones(len(codes)).bool(), tuple(map(str, range(len(codes)))), codes.shape[1] - 1,
    )  # fmt: skip
    result = sequence(target(model), batch, torch.full((len(codes),), side == "uncond"))
    num_condition = model.config.num_condition_tokens
    close(result.feature[:, num_condition - 1 : -1], given[f"feature_{side}"], 1e-4)
    close(target(model).scores(result.feature[:, num_condition - 1 : -1]), given[f"logits_{side}"], 1e-4)
    assert result.num_generated == codes.shape[1] and not result.ids[:, :num_condition].any()
    assert torch.equal(result.ids[:, num_condition:], codes)
    assert result.positions[0].tolist() == [list(range(num_condition + codes.shape[1]))] * len(codes)
    wanted = given["cond_mask"].bool() if recorded.kind == "t2i" else torch.ones(len(codes), 1).bool()
    assert torch.equal(result.mask[:, :num_condition], wanted) and result.mask[:, num_condition:].all()


@pytest.mark.parametrize("condition", ["class", "text"])
@pytest.mark.parametrize(("scale", "interval"), [(1.0, -1), (3.0, -1), (3.0, 4)])
def test_a_tree_is_one_path_at_a_time(condition, scale, interval):
    """Both rows' features and the guided scores of every node, after commits of chosen paths, and layers' states."""
    model = llamagen(condition)
    checked = unguided = 0
    for seed in range(2):
        dice, asked, generator = random.Random(seed), request(model, seed), target(model, scale, interval)
        rows, num_condition = generator.guidance.num_rows, model.config.num_condition_tokens
        session, step = generator.prefill(asked, Taps(text_layers=(0, 1, 2), feature=True), capacity=40)
        close(step.feature, true_features(model, asked.condition, rows, []), 2e-5)
        assert step.prompt.mask.sum() == rows * (1 if condition == "class" else len(asked.condition))
        committed: list[int] = [int(step.logits[-1].argmax())]
        while len(committed) < 13:
            tree = random_tree(dice, dice.randrange(7), 24)
            step = generator.verify(session, committed[-1], tree)
            assert step.prompt is None and sorted(step.layers) == [0, 1, 2]
            for node in range(ROOT, tree.num_nodes):
                codes = [*committed, *(int(tree.tokens[n]) for n in path_to(tree, node))]
                expected = true_features(model, asked.condition, rows, codes)[:, -1]  # [R,D]
                close(step.feature[:, node + 1], expected, 2e-5)
                scores = model.output(expected)
                # The scores after k codes are those of code number k.
                alone = rows == 1 or (interval >= 0 and len(codes) - 1 > interval)
                guided = scores[0] if alone else scores[1] + scale * (scores[0] - scores[1])
                close(step.logits[node + 1], guided, 2e-4)
                close(model.norm(step.layers[2][:, node + 1]), expected, 2e-5)
                checked, unguided = checked + 1, unguided + alone
            kept = path_to(tree, dice.randrange(ROOT, tree.num_nodes))
            generator.commit(session, kept)
            assert session.cache.length == num_condition + len(committed) + len(kept)
            committed += [*(int(tree.tokens[n]) for n in kept), dice.randrange(24)]
    assert checked > 30 and (0 < unguided < checked) == (interval >= 0)


def test_both_rows_and_the_condition_would_show():
    """Guards the test above."""
    model = llamagen("text")
    one, two = (true_features(model, request(model, seed).condition, 2, [3, 5]) for seed in (0, 1))
    assert (one[0, -1] - one[1, -1]).abs().max() > 0.1 and (one[0, -1] - two[0, -1]).abs().max() > 0.1
    swapped = true_features(model, request(model, 0).condition, 2, [5, 3])
    assert (one[0, -1] - swapped[0, -1]).abs().max() > 0.1


def test_only_what_was_asked_for_is_served():
    generator = target(llamagen(), 2.0)
    session, step = generator.prefill(request(generator.model), Taps(), capacity=8)
    assert step.feature is None and not step.layers and step.logits.shape == (1, 24)
    step = generator.verify(session, 3, chain(torch.tensor([1, 2])))
    assert step.feature is None and not step.layers and step.logits.shape == (3, 24)
    assert step.logits.dtype == torch.float32


@pytest.mark.parametrize("condition", ["class", "text"])
def test_sequences_equal_prefill_and_verification(condition):
    """What a head learns from is what it reads while decoding, in rows of different captions in one batch."""
    model = llamagen(condition)
    generator, codes = target(model, 3.0), torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0))
    batch = code_batch(model, codes)
    for without in (False, True):
        result = sequence(generator, batch, torch.full((3,), without))
        for row in range(3):
            session, step = generator.prefill(request(model, row), Taps(feature=True), capacity=40)
            states = [step.feature[int(without)]]
            prompt = step.prompt
            step = generator.verify(session, int(codes[row, 0]), chain(codes[row, 1:]))
            states = torch.cat([*states, step.feature[int(without)]])
            close(result.feature[row], states, 2e-5)
            places = model.config.num_condition_tokens
            assert torch.equal(result.ids[row, :places], prompt.ids[int(without)])
            assert torch.equal(result.mask[row, :places], prompt.mask[int(without)])
            assert torch.equal(result.positions[0][row, :places], prompt.positions[int(without)])


def test_dropped_rows_are_mixed_in_one_batch():
    model = llamagen("text")
    generator, codes = target(model), torch.zeros(3, 16, dtype=torch.int64)
    batch = code_batch(model, codes)
    sides = [sequence(generator, batch, torch.full((3,), without)).feature for without in (False, True)]
    mixed = sequence(generator, batch, torch.tensor([False, True, False]))
    close(mixed.feature, torch.stack([sides[0][0], sides[1][1], sides[0][2]]), 1e-5)
    assert (sides[0] - sides[1])[:, -1].abs().amax(-1).min() > 0.1
    assert not mixed.feature.requires_grad


def test_guidance_of_one_or_less_runs_one_row():
    model = llamagen()
    asked = request(model, 1)
    for scale in (0.0, 1.0):
        _, step = target(model, scale).prefill(asked, Taps(feature=True), capacity=1)
        assert len(step.feature) == 1
    images = [plain(target(model, scale), asked) for scale in (0.0, 1.0, 4.0)]
    assert images[0] == images[1] != images[2] and len(set(images[2])) > 4


def test_a_bfloat16_model_keeps_its_rotation_in_float32():
    """Rounded angles would move every cell; near the end of a 16 x 16 grid most of all."""
    model = llamagen("text", grid=16)
    exact = model.rope(torch.device("cpu")).clone()
    half = copy.deepcopy(model).bfloat16()
    assert half.rope(torch.device("cpu")).dtype == torch.float32
    assert torch.equal(half.rope(torch.device("cpu")), exact)
    generator = target(half, 3.0)
    session, step = generator.prefill(request(model), Taps(feature=True), capacity=4)
    assert step.feature.dtype == torch.bfloat16 and step.logits.dtype == torch.float32
    step = generator.verify(session, 3, no_tree())
    wanted = true_features(model, request(model).condition, 2, [3])[:, -1:]
    assert (step.feature.float() - wanted).abs().max() < 0.25 * wanted.abs().max()


def test_the_targets_weights_do_not_move():
    model = llamagen("text")
    with unchanged(model):
        generator = target(model.train(), 3.0)
        plain(generator, request(model))
        sequence(generator, code_batch(model, torch.zeros(1, 16, dtype=torch.int64)), torch.zeros(1).bool())
    assert not any(weight.requires_grad for weight in model.parameters()) and not model.training
    assert generator.embedding is model.tok_embeddings.weight
