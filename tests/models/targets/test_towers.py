"""InternVL, Mistral 3 and Pixtral as targets: as transformers computes, trees as single forwards, heads, refusals."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import family_checks as family
import packed
import pytest
import tiny_gemma
import tiny_qwen
import torch
from draftsmith.core.errors import Refused, UserError
from draftsmith.core.pictures import PatchGrid, Picture, whole_picture
from draftsmith.core.states import Taps
from draftsmith.eval.policies import Chain, Dynamic, Product, Static
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.source import Source, Target
from draftsmith.models.targets.internvl.section import InternVLTargetConfig, see_tiles
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.load import build_target, check_kind, load_target
from draftsmith.models.targets.mistral.section import MistralTargetConfig
from draftsmith.models.targets.table import training_of
from draftsmith.trainers.serve.engine_section import VllmEngine
from heads_tiny import config_of
from tiny import llava
from tiny_towers import (
    IDS,
    IMAGE_ID,
    KINDS,
    TILE,
    TOKENS,
    model,
    published,
    reference,
    request,
    target,
    text_values,
    tower_values,
)
from torch import nn

MODELS = {kind: model(kind) for kind in KINDS} | {shape: tiny_gemma.model(shape) for shape in tiny_gemma.SHAPES}
CASES = [(1,), (4, 1)]  # tiles of each picture, or tokens across
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
every_kind = pytest.mark.parametrize("kind", KINDS)
with_gemma = pytest.mark.parametrize("kind", ["internvl", "mistral3", "pixtral", *tiny_gemma.SHAPES])
every_tower = pytest.mark.parametrize("kind", ["internvl", "mistral3", "pixtral"])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("case", [0, 1, None])
def test_a_prompt_scores_as_in_transformers(kind, case):
    make, ask = made(kind)
    own, asked, is_gemma = make(MODELS[kind]), ask(case), kind in tiny_gemma.SHAPES
    given = tiny_gemma.published(asked) if is_gemma else published(asked)
    ours, _, kept = family.check_scores(own, asked, given, 2e-4 if is_gemma else 3e-4)
    assert kept.sum() == TOKENS - 1 and not kept[IMAGE_ID]
    if case is not None:
        blind = replace(asked, pixels=1 - asked.pixels if is_gemma else -asked.pixels)
        changed = (family.all_logits(own, blind)[-1, kept] - ours[-1, kept]).abs().max()
        assert changed > (1e-3 if is_gemma else 1e-2)


@pytest.mark.parametrize("layer", [-1, -2])
def test_internvls_tower_is_read_after_its_norm_or_at_the_layer_that_is_named(layer):
    llm = copy.deepcopy(MODELS["internvl"])
    norm = llm.model.vision_tower.layernorm = nn.LayerNorm(llm.config.vision_config.hidden_size)
    nn.init.normal_(norm.weight)
    llm.config.vision_feature_layer, pixels = layer, torch.randn(3, 3, TILE, TILE)
    with torch.no_grad():
        expected = llm.model.get_image_features(pixel_values=pixels, output_hidden_states=True).pooler_output
        torch.testing.assert_close(llm.model.multi_modal_projector(see_tiles(llm, pixels)), expected)


def made(kind: str):
    """Target and request of a kind, Gemma's shapes among them; a case is the number of one of `CASES`, None: none."""
    if kind not in tiny_gemma.SHAPES:
        return target, lambda case, **more: request(kind, () if case is None else CASES[case], **more)
    cases = [((2, 3),), ((3, 3), (1, 2))]
    return tiny_gemma.target, lambda case, **more: tiny_gemma.request(() if case is None else cases[case], **more)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])
def test_a_copy_as_draft_is_always_right_and_changes_nothing(kind, policy):
    llm, accepted, (own, ask) = MODELS[kind], [], made(kind)
    for number, case in enumerate([None, 1]):
        asked = ask(case, seed=number)
        expected = reference(llm, asked, 12) if own is target else tiny_gemma.reference(llm, asked, 12)
        accepted += family.check_copy(own(llm), own(copy.deepcopy(llm)), asked, policy, expected)
    assert 3 in accepted


@every_kind
def test_a_tree_is_its_paths_one_by_one_also_after_commits_and_in_chunks(kind):
    own, asked = target(MODELS[kind], prefill_chunk=7), request(kind, CASES[1], seed=5)
    family.check_tree(own, target(MODELS[kind]), own.prefill(asked, Taps(), capacity=20)[0], asked)


batch_of = partial(tiny_qwen.batch_of, image_size=TILE)


@every_tower
def test_states_are_the_taps_of_a_prefill_and_what_training_sees(kind):
    asked = [request(kind, CASES[1], seed=7), request(kind, (), seed=8), request(kind, CASES[0], seed=9)]
    batch = batch_of(*asked)
    states, text, _ = family.check_states(target(MODELS[kind]), asked, batch, (0, 2), 2e-4)
    with torch.no_grad():
        module = training_of(MODELS[kind], ("projector",), gradient_checkpointing=False)
        torch.testing.assert_close(module.hidden_states(batch)[text], states.feature[text], atol=2e-4, rtol=0)


@with_gemma
def test_answers_in_batches_are_those_of_single_requests(kind):
    own, ask = made(kind)
    family.check_batches(own(MODELS[kind]), [ask(1), ask(None, seed=1), ask(0, seed=2)])


def packed_samples(kind):
    return packed.of_requests(*(request(kind, tiles, seed=len(tiles)) for tiles in ((4, 1), (), (1,))))


@every_tower
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_padded_are_one_loss(kind, attention):
    packed.check_loss(model(kind), packed_samples(kind), attention)


@every_tower
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_packed_row_has_the_states_of_its_samples(kind, chunk):
    packed.check_states(target(model(kind)), packed_samples(kind), chunk)


def test_a_packed_model_makes_no_mask_of_the_row():
    packed.check_no_mask(model("internvl"), packed_samples("internvl"), target=target)


@with_gemma
@pytest.mark.parametrize(("settings", "tree"), [
    ({"kind": "eagle3", "taps": [1, 2, 3]}, Dynamic(8, 2, 3)),
    ({"kind": "dflash", "block_size": 4, "num_layers": 1, "taps": [1, 2]}, Product(8, 3, 3)),
    ({"kind": "medusa"}, Static([(0,), (1,), (0, 0)])),
], ids=["eagle3", "dflash", "medusa"])  # fmt: skip
def test_heads_change_nothing(kind, settings, tree):
    own, ask = made(kind)
    family.check_head(own(MODELS[kind]), settings, (Chain(3), tree), ask(1, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["internvl", "mistral3", *tiny_gemma.SHAPES])
@pytest.mark.parametrize("policy", [Chain(2), Static([(0,), (1,), (0, 0)])], ids=["chain", "static"])
def test_a_draw_of_many_is_distributed_as_the_target(kind, policy):
    own, _ = made(kind)
    asked = request(kind, (1,), words=2) if own is target else tiny_gemma.request(((1, 2),), words=2)
    noise = 0.2 if own is target else 0.1
    draft = IndependentProposal(own(family.noisy(MODELS[kind], noise)).decoder, "M", newline_id=7)
    family.check_draws(own(MODELS[kind]), draft, asked, policy)


@with_gemma
def test_a_dry_runs_memory(kind):
    family.check_memory(MODELS[kind], made(kind)[0])


# ---- sections, files, and what is refused with the reason


SECTIONS = {
    "internvl": (InternVLTargetConfig, "qwen2", "internvl_vision"),
    "mistral3": (MistralTargetConfig, "mistral", "pixtral"),
    "pixtral": (MistralTargetConfig, "mistral", "pixtral"),
}


def section(kind: str = "internvl", **settings):
    config, text, tower = SECTIONS[kind]
    values = {"kind": kind, "language_model": {"model_type": text, **text_values()}}
    values["language_model"] |= {"sliding_window": None, "head_dim": 8} if text == "mistral" else {}
    values |= {"vision_tower": {"model_type": tower, **tower_values(kind)}} | settings
    return config.model_validate(values)


@with_gemma
def test_a_new_target_is_saved_and_read_again(kind, tmp_path):
    torch.manual_seed(0)
    new, (own, ask) = tiny_gemma.section(kind) if kind in tiny_gemma.SHAPES else section(kind), made(kind)
    llm = build_target(new, IDS)
    llm.save_pretrained(tmp_path)
    path = type(new)(kind=new.kind, path=str(tmp_path))
    how = {"num_token_ids": TOKENS, "image_token_id": IMAGE_ID, "device": torch.device("cpu")}
    read, asked = load_target(path, tmp_path, **how), ask(1)
    assert torch.equal(family.all_logits(read, asked), family.all_logits(own(llm.eval()), asked))
    tables, some = load_target(path, tmp_path, **how, tables_only=True), torch.randn(3, 32)
    assert torch.equal(tables.embedding, read.embedding) and torch.equal(tables.scores(some), read.scores(some))
    assert tables.shape.num_layers == llm.config.get_text_config().num_hidden_layers


def prefilled(kind: str, asked, **text):
    return target(model(kind, **text)).prefill(asked, Taps(), capacity=1)


CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize(("refused", "why"), [
    (lambda: prefilled("internvl", replace(request("internvl"), pictures=(Picture(4, 1, newline="one_token"),))),
     "cut for another family"),
    (lambda: prefilled("internvl", replace(request("internvl"), pictures=(whole_picture(PatchGrid(1, 4, 4)),))),
     "cut for another family"),
    (lambda: prefilled("pixtral", request("mistral3")), "1 x 1 patches a token"),
    (lambda: prefilled("mistral3", request("internvl")), "2 x 2 patches a token"),
    (lambda: target(model("internvl", use_sliding_window=True, sliding_window=8, max_window_layers=0)),
     "see a window alone"),
    (lambda: target(model("mistral3", sliding_window=8)), "see a window alone"),
    (lambda: LlavaTargetConfig(kind="llava", path="x/y").target(MODELS["pixtral"], num_token_ids=70, image_token_id=1),
     "a LLaVA whose tower reads pictures whole"),
    (lambda: MistralTargetConfig(kind="pixtral", path="x/y").target(llava(0), num_token_ids=60, image_token_id=59),
     "no Pixtral's"),
    *((lambda kind=kind: build_target(section(kind, vision_tower=CLIP), IDS), f"is of model_type {tower}")
      for kind, (_, _, tower) in SECTIONS.items()),
    *((lambda kind=kind, name=name: check_kind(section(kind), name, "x/y"), why) for kind, name, why in [
        ("internvl", "internvl_chat", "internvl_chat"), ("mistral3", "llava", "is of model_type 'llava'"),
        ("pixtral", "mistral3", "is of model_type 'mistral3'"), ("pixtral", "qwen2_5_vl", "is of model_type 'qwen2_5"),
    ]),
])  # fmt: skip
def test_what_cannot_be_exact_is_refused(refused, why):
    with pytest.raises(UserError, match=why):
        refused()


@pytest.mark.parametrize("new", [*map(section, SECTIONS), tiny_gemma.section("large")], ids=lambda new: new.kind)
def test_engines_that_were_not_compared_are_refused(new):
    with pytest.raises(Refused, match=f"expands the pictures of a {new.kind}"):
        VllmEngine(kind="vllm").check(new, states=False, aspect="square")


@pytest.mark.parametrize("kind", ["internvl", "small"])
def test_weights_do_not_move(kind):
    own, ask = made(kind)
    family.check_frozen(MODELS[kind], own, batch_of(ask(0)))


@pytest.mark.parametrize(("kind", "engine", "prompts", "why"), [
    ("mistral3", "vllm", "text", None),
    ("mistral3", "speculators", "text", None),
    ("mistral3", "vllm", "all", "were not compared"),
    ("mistral3", "sglang", "text", "nobody has read here how its class of mistral3"),
    ("pixtral", "vllm", "text", None),
    ("pixtral", "vllm", "all", "were not compared"),
    ("pixtral", "sglang", "text", "nobody has read here how its class of pixtral"),
    ("internvl", "vllm", "text", "its class of internvl hands no states to a head of EAGLE-3"),
    ("internvl", "sglang", "text", "nobody has read here how its class of internvl"),
    *(("large", engine, "text", "nobody has read here how its class of gemma4")
      for engine in ("vllm", "sglang", "speculators")),
])  # fmt: skip
def test_exports_say_what_is_known_of_engines(kind, engine, prompts, why):
    """Of a head beside a target with a layer more: engines tap what enters one."""
    config = config_of(kind="eagle3", visual_slots="read", image="placeholder", taps=[1, 2, 3])
    own, _ = made(kind)
    deep = own(MODELS[kind] if kind in tiny_gemma.SHAPES else model(kind, num_hidden_layers=4))
    beside = Target(deep.decoder.model.config, None)
    source = Source(Path(kind), config, config.build(deep, count_tokens=None), beside, {})
    with nullcontext() if why is None else pytest.raises(UserError, match=why):
        check_expressible(engine, source, prompts)
