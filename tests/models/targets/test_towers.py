"""InternVL, Mistral 3 and Pixtral as targets: as transformers computes, trees as single forwards, heads, refusals."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_qwen
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import PatchGrid, Picture, whole_picture
from draftsmith.core.refused import Refused
from draftsmith.core.states import Taps, feature_places, visual_places
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Product, Static
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.batched import write_answers
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.families.load import build_target, check_kind, load_target
from draftsmith.models.families.memory import cache_bytes, weight_bytes
from draftsmith.models.families.table import training_of
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.source import Source, Target
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.models.targets.internvl.model import see_tiles
from draftsmith.models.targets.internvl.section import InternVLTargetConfig
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.mistral.section import MistralTargetConfig
from draftsmith.trainers.estimate.passes import Pass, moment
from draftsmith.trainers.serve.engine_section import VllmEngine
from drawn_pairs import check_pairs
from heads_tiny import config_of
from live_tensors import Live
from tiny import llava
from tiny_towers import (
    EOS,
    IDS,
    IMAGE_ID,
    KINDS,
    TILE,
    TOKENS,
    VOCAB,
    longer,
    model,
    published,
    reference,
    request,
    target,
    text_values,
    tower_values,
)
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

MODELS = {kind: model(kind) for kind in KINDS}
CASES = [(1,), (4, 1)]  # tiles of each picture, or tokens across
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
HEADS = [
    {"kind": "eagle3", "taps": [1, 2, 3]},
    {"kind": "dflash", "block_size": 4, "num_layers": 1, "taps": [1, 2]},
]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_tower = pytest.mark.parametrize("kind", ["internvl", "mistral3", "pixtral"])


def greedy(policy, max_new_tokens: int = 12) -> Decoding:
    return Decoding(policy, Greedy(), Draw("top-k"), Warp(), max_new_tokens, (EOS,))


def all_logits(own, asked) -> torch.Tensor:
    """[T,V] of a prompt, through our prefill."""
    _, step = own.prefill(asked, Taps(feature=True), capacity=1)
    return own.scores(step.feature[0])


@every_kind
@pytest.mark.parametrize("tiles", [*CASES, ()])
def test_a_prompt_scores_as_in_transformers(kind, tiles):
    asked, llm = request(kind, tiles), MODELS[kind]
    with torch.no_grad():
        expected = llm(**published(asked)).logits[0]
    ours = all_logits(target(llm), asked)
    kept = ~ours[0].isinf()
    assert kept.sum() == TOKENS - 1 and not kept[IMAGE_ID]
    torch.testing.assert_close(ours[:, kept], expected[:, kept], atol=3e-4, rtol=0)
    if tiles:
        blind = copy.copy(asked)
        object.__setattr__(blind, "pixels", -asked.pixels)
        assert (all_logits(target(llm), blind)[-1, kept] - ours[-1, kept]).abs().max() > 1e-2


@pytest.mark.parametrize("layer", [-1, -2])
def test_internvls_tower_is_read_after_its_norm_or_at_the_layer_that_is_named(layer):
    llm = copy.deepcopy(MODELS["internvl"])
    norm = llm.model.vision_tower.layernorm = nn.LayerNorm(llm.config.vision_config.hidden_size)
    nn.init.normal_(norm.weight)
    llm.config.vision_feature_layer, pixels = layer, torch.randn(3, 3, TILE, TILE)
    with torch.no_grad():
        expected = llm.model.get_image_features(pixel_values=pixels, output_hidden_states=True).pooler_output
        torch.testing.assert_close(llm.model.multi_modal_projector(see_tiles(llm, pixels)), expected)


@every_kind
@pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])
def test_a_copy_as_draft_is_always_right_and_changes_nothing(kind, policy):
    own = target(MODELS[kind])
    draft = IndependentProposal(target(copy.deepcopy(MODELS[kind])).decoder, "M", newline_id=7)
    accepted: list[int] = []
    for number, tiles in enumerate([(), CASES[1]]):
        asked = request(kind, tiles, seed=number)
        drafted = generate(own, draft, asked, greedy(policy))
        deepest = [min(c.num_drafted, c.num_emitted) for c in drafted.cycles]
        assert [c.num_accepted for c in drafted.cycles][:-1] == deepest[:-1]
        accepted += deepest[:-1]
        assert drafted.tokens == generate(own, None, asked, greedy(policy)).tokens
        assert drafted.tokens == reference(MODELS[kind], asked, 12)
    assert 3 in accepted


@every_kind
def test_a_tree_is_its_paths_one_by_one_also_after_commits_and_in_chunks(kind):
    asked = request(kind, CASES[1], seed=5)
    own = target(MODELS[kind], prefill_chunk=7)
    session, _ = own.prefill(asked, Taps(), capacity=20)
    tree = Tree(torch.tensor([11, 12, 13, 14, 15]), (-1, -1, 0, 0, 2), (0,) * 5)
    paths = {0: [11], 1: [12], 2: [11, 13], 3: [11, 14], 4: [11, 13, 15]}
    before, whole = [9], target(MODELS[kind])
    for root, path in ((9, [0, 2]), (21, [0, 3])):
        step = own.verify(session, root, tree)
        for node, ids in paths.items():
            alone = all_logits(whole, longer(asked, [*before, *ids]))[-1]
            torch.testing.assert_close(step.logits[node + 1], alone, atol=2e-4, rtol=0)
        own.commit(session, path)
        before += [*[int(tree.tokens[n]) for n in path], 21]


batch_of = partial(tiny_qwen.batch_of, image_size=TILE)


@every_tower
def test_states_are_the_taps_of_a_prefill_and_what_training_sees(kind):
    own = target(MODELS[kind])
    asked = [request(kind, CASES[1], seed=7), request(kind, (), seed=8), request(kind, CASES[0], seed=9)]
    batch = batch_of(*asked)
    states = own.states(batch, Taps(feature=True, text_layers=(1,), visual_layers=(0, 2)))
    text = feature_places(batch.modality, batch.attention_mask, batch.loss_mask)
    visual = visual_places(batch.modality, batch.attention_mask)
    for row, one in enumerate(asked):
        length = len(one.ids)
        _, step = own.prefill(one, Taps(text_layers=(0, 1, 2), feature=True), capacity=1)
        for ours, theirs, kept in (
            (states.feature, step.feature, text), (states.layers[1], step.layers[1], text),
            (states.layers[0], step.layers[0], visual), (states.layers[2], step.layers[2], visual),
        ):  # fmt: skip
            here = kept[row, :length]
            torch.testing.assert_close(ours[row, :length][here], theirs[0][here], atol=2e-4, rtol=0)
            assert ours[row, :length][~here].abs().sum() == 0
    with torch.no_grad():
        module = training_of(MODELS[kind], ("projector",), gradient_checkpointing=False)
        torch.testing.assert_close(module.hidden_states(batch)[text], states.feature[text], atol=2e-4, rtol=0)


@every_tower
def test_answers_in_batches_are_those_of_single_requests(kind):
    asked = [request(kind, CASES[1]), request(kind, (), seed=1), request(kind, CASES[0], seed=2)]
    own = target(MODELS[kind])
    expected = [generate(own, None, one, greedy(Chain(1), 8)).tokens for one in asked]
    written = write_answers(own.decoder, asked, Warp(), limits=[8] * 3, seeds=[0] * 3, eos_ids=(EOS,))
    assert [w.ids for w in written] == expected


@every_tower
@pytest.mark.parametrize("settings", HEADS, ids=lambda settings: settings["kind"])
def test_heads_change_nothing(kind, settings):
    own, config = target(MODELS[kind]), config_of(**settings)
    torch.manual_seed(1)
    head = config.build(own, count_tokens=lambda: torch.arange(VOCAB))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    policies = [Chain(3), Product(8, 3, 3)] if settings["kind"] == "dflash" else [Chain(3), Dynamic(8, 2, 3)]
    asked = request(kind, CASES[1], seed=3)
    plain = generate(own, None, asked, greedy(Chain(1))).tokens
    for policy in policies:
        drafted = generate(own, config.drafter(head, own), asked, greedy(policy))
        assert drafted.tokens == plain and sum(c.num_drafted for c in drafted.cycles) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["internvl", "mistral3"])
@pytest.mark.parametrize("policy", [Chain(2), Static([(0,), (1,), (0, 0)])], ids=["chain", "static"])
def test_a_draw_of_many_is_distributed_as_the_target(kind, policy):
    """Temperature 1, a draft that is often wrong, two tokens of the target's own 5 likeliest: chi-square."""
    own, asked = target(MODELS[kind]), request(kind, (1,), words=2)
    noisy = copy.deepcopy(MODELS[kind])
    noisy.lm_head.weight.data += 0.2 * torch.randn(
        noisy.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)
    )
    draft = IndependentProposal(target(noisy).decoder, "M", newline_id=7)
    check_pairs(own, draft, asked, policy, all_logits, longer)


@every_tower
def test_a_dry_runs_memory(kind):
    # The estimate is of nothing but pictures: one that fills the prompt, where they are read whole.
    llm, asked = MODELS[kind], request(kind, (4,) * 6 if kind == "internvl" else (60,), words=2)
    actual = sum(p.numel() * p.element_size() for p in llm.parameters())
    assert sum(weight_bytes(llm.config, "float32").values()) == actual
    positions = len(asked.ids) + 10
    with Live() as live:
        session, _ = target(llm).prefill(asked, Taps(), capacity=10)
    held = sum(p.numel() * p.element_size() for layer in session.cache.own_layers for p in (layer.keys, layer.values))
    assert held == cache_bytes(llm.config, "float32", positions)
    section = SimpleNamespace(kind=llm.config.model_type, target=lambda model, **_: target(model))
    counted = moment(llm.config, section, "float32", Pass(positions))
    assert 0.5 < counted / (live.most - held) < 2, (counted, live.most - held)


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


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_new_target_is_saved_and_read_again(kind, tmp_path):
    torch.manual_seed(0)
    llm = build_target(section(kind), IDS)
    llm.save_pretrained(tmp_path)
    path = SECTIONS[kind][0](kind=kind, path=str(tmp_path))
    read = load_target(path, tmp_path, num_token_ids=TOKENS, image_token_id=IMAGE_ID, device=torch.device("cpu"))
    asked = request(kind, CASES[1])
    assert torch.equal(all_logits(read, asked), all_logits(target(llm.eval()), asked))
    tables = load_target(
        path, tmp_path, num_token_ids=TOKENS, image_token_id=IMAGE_ID, device=torch.device("cpu"), tables_only=True
    )
    assert torch.equal(tables.embedding, read.embedding) and tables.shape.num_layers == 3


def test_what_cannot_be_exact_is_refused():
    asked = request("internvl")
    for other in (Picture(4, 1, newline="one_token"), whole_picture(PatchGrid(1, 4, 4))):
        cut = copy.copy(asked)
        object.__setattr__(cut, "pictures", (other,))
        with pytest.raises(UserError, match="cut for another family"):
            target(MODELS["internvl"]).prefill(cut, Taps(), capacity=1)
    windows = model("internvl", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UserError, match="see a window alone"):
        target(windows)
    with pytest.raises(UserError, match="internvl_chat"):
        check_kind(section(), "internvl_chat", "OpenGVLab/InternVL3-8B")
    clip = {"model_type": "clip_vision_model", "hidden_size": 16, "num_attention_heads": 2}
    for kind, (_, _, tower) in SECTIONS.items():
        with pytest.raises(UserError, match=f"is of model_type {tower}"):
            build_target(section(kind, vision_tower=clip), IDS)


def test_what_a_pixtral_or_mistral_3_cannot_be_is_refused():
    asked = request("mistral3")
    with pytest.raises(UserError, match="1 x 1 patches a token"):
        target(MODELS["pixtral"]).prefill(asked, Taps(), capacity=1)
    with pytest.raises(UserError, match="2 x 2 patches a token"):
        target(MODELS["mistral3"]).prefill(request("internvl"), Taps(), capacity=1)
    with pytest.raises(UserError, match="see a window alone"):
        target(model("mistral3", sliding_window=8))
    with pytest.raises(UserError, match="a LLaVA whose tower reads pictures whole"):
        LlavaTargetConfig(kind="llava", path="x/y").target(MODELS["pixtral"], num_token_ids=TOKENS, image_token_id=1)
    with pytest.raises(UserError, match="no Pixtral's"):
        MistralTargetConfig(kind="pixtral", path="x/y").target(llava(0), num_token_ids=60, image_token_id=59)
    for kind, model_type in (("mistral3", "llava"), ("pixtral", "mistral3"), ("pixtral", "qwen2_5_vl")):
        with pytest.raises(UserError, match=f"is of model_type '{model_type}'"):
            check_kind(MistralTargetConfig(kind=kind, path="x/y"), model_type, "x/y")


@pytest.mark.parametrize("kind", SECTIONS)
def test_engines_that_were_not_compared_are_refused(kind):
    with pytest.raises(Refused, match=f"expands the pictures of a {kind}"):
        VllmEngine(kind="vllm").check(section(kind), states=False, aspect="square")


def test_rotations_that_follow_the_length_are_fixed_up_to_the_trained_one_and_refused_beyond():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = model("internvl", rope_parameters=rope, max_position_embeddings=32)
    plain = model("internvl", max_position_embeddings=32)
    asked = request("internvl", (1,), words=5)
    assert len(asked.ids) == 14
    within = [all_logits(target(one), longer(asked, [9] * 17)) for one in (dynamic, plain)]
    assert torch.equal(*within)
    with pytest.raises(UserError, match=r"rotations \(dynamic\) change with the length of the text beyond 32"):
        target(dynamic).prefill(asked, Taps(), capacity=19)
    with pytest.raises(UserError, match=r"rotations \(dynamic\)"):
        target(dynamic).states(batch_of(longer(asked, [9] * 20)), Taps(feature=True))
    target(plain).prefill(asked, Taps(), capacity=19)


def test_weights_do_not_move():
    own, before = target(copy.deepcopy(MODELS["internvl"])), MODELS["internvl"].state_dict()
    own.states(batch_of(request("internvl")), Taps(feature=True))
    after = own.decoder.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(p.requires_grad for p in own.decoder.model.parameters())


def exporting(kind: str, settings: dict) -> Source:
    """A new head beside a target of this kind, with a layer more: engines tap what enters one."""
    config, deep = config_of(**settings), target(model(kind, num_hidden_layers=4))
    head = config.build(deep, count_tokens=None)
    return Source(Path(kind), config, head, Target(deep.decoder.model.config, None), {})


@pytest.mark.parametrize(
    ("kind", "engine", "prompts", "why"),
    [
        ("mistral3", "vllm", "text", None),
        ("mistral3", "speculators", "text", None),
        ("mistral3", "vllm", "all", "were not compared"),
        ("mistral3", "sglang", "text", "nobody has read here how its class of mistral3"),
        ("pixtral", "vllm", "text", None),
        ("pixtral", "vllm", "all", "were not compared"),
        ("pixtral", "sglang", "text", "nobody has read here how its class of pixtral"),
        ("internvl", "vllm", "text", "its class of internvl hands no states to a head of EAGLE-3"),
        ("internvl", "sglang", "text", "nobody has read here how its class of internvl"),
    ],
)
def test_exports_say_what_is_known_of_engines(kind, engine, prompts, why):
    source = exporting(kind, {"kind": "eagle3", "visual_slots": "read", "image": "placeholder", "taps": [1, 2, 3]})
    if why is None:
        check_expressible(engine, source, prompts)
        return
    with pytest.raises(UserError, match=why):
        check_expressible(engine, source, prompts)


def test_gemma_4_is_refused_by_the_reason():
    """Five of six of its layers see a window: its text model is no causal_lm target."""
    config = Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=0, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(UserError, match="some layers of gemma4_text see a window alone"):
        CausalTarget(Gemma4ForCausalLM(config), num_token_ids=TOKENS)
