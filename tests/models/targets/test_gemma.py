"""Gemma 4 as a target: as transformers computes, trees as single forwards, heads, memory, refusals."""

import copy
from dataclasses import replace
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
from draftsmith.models.decoding.removal import unseen_from
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.draft_vocabulary import lm_head_rows
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.pruned import PrunedConfig
from draftsmith.models.families.load import build_target, check_kind, load_target
from draftsmith.models.families.memory import cache_bytes, weight_bytes
from draftsmith.models.families.table import training_of
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.source import Source, Target
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.models.targets.gemma.section import GemmaTargetConfig
from draftsmith.models.targets.verification import why_not
from draftsmith.trainers.estimate.passes import Pass, moment
from draftsmith.trainers.serve.engine_section import VllmEngine
from drawn_pairs import check_pairs
from heads_tiny import config_of
from live_tensors import Live
from tiny_gemma import (
    EOS,
    IDS,
    IMAGE_ID,
    SHAPES,
    TOKENS,
    VOCAB,
    WINDOW,
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
from transformers import Gemma4AudioConfig, Gemma4ForCausalLM, Gemma4TextConfig
from transformers import Gemma4ForConditionalGeneration as Published

MODELS = {shape: model(shape) for shape in SHAPES}
CASES = [((2, 3),), ((3, 3), (1, 2))]  # tokens down and across of each picture; the first is longer than the window
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
HEADS = [
    {"kind": "eagle3", "taps": [1, 2, 3]},
    {"kind": "dflash", "block_size": 4, "num_layers": 1, "taps": [1, 2]},
    {"kind": "medusa"},
]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def greedy(policy, max_new_tokens: int = 12) -> Decoding:
    return Decoding(policy, Greedy(), Draw("top-k"), Warp(), max_new_tokens, (EOS,))


def all_logits(own, asked) -> torch.Tensor:
    """[T,V] of a prompt, through our prefill."""
    _, step = own.prefill(asked, Taps(feature=True), capacity=1)
    return own.scores(step.feature[0])


@every_shape
@pytest.mark.parametrize("pictures", [*CASES, ()])
def test_a_prompt_scores_as_in_transformers(shape, pictures):
    asked, llm = request(pictures), MODELS[shape]
    with torch.no_grad():
        expected = llm(**published(asked)).logits[0]
    ours = all_logits(target(llm), asked)
    kept = ~ours[0].isinf()
    assert kept.sum() == TOKENS - 1 and not kept[IMAGE_ID] and len(asked.ids) >= WINDOW
    torch.testing.assert_close(ours[:, kept], expected[:, kept], atol=2e-4, rtol=0)
    assert ours[:, kept].abs().max() < llm.config.text_config.final_logit_softcapping
    if pictures:
        blind = copy.copy(asked)
        object.__setattr__(blind, "pixels", 1 - asked.pixels)
        assert (all_logits(target(llm), blind)[-1, kept] - ours[-1, kept]).abs().max() > 1e-3


def test_what_only_a_two_way_picture_sees_changes_its_states():
    """The same weights, causal in pictures: the text before them scores alike, and what is after does not."""
    asked, one_way = request(CASES[0]), copy.deepcopy(MODELS["large"])
    one_way.config.text_config.use_bidirectional_attention = None
    both, causal = (all_logits(target(one), asked) for one in (MODELS["large"], one_way))
    start = int((asked.ids == IMAGE_ID).nonzero()[0])
    assert torch.equal(both[:start], causal[:start])
    assert not torch.allclose(both[start + 1], causal[start + 1])


@every_shape
@pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])
def test_a_copy_as_draft_is_always_right_and_changes_nothing(shape, policy):
    own = target(MODELS[shape])
    draft = IndependentProposal(target(copy.deepcopy(MODELS[shape])).decoder, "M", newline_id=7)
    accepted: list[int] = []
    for number, pictures in enumerate([(), CASES[1]]):
        asked = request(pictures, seed=number)
        drafted = generate(own, draft, asked, greedy(policy))
        deepest = [min(c.num_drafted, c.num_emitted) for c in drafted.cycles]
        assert [c.num_accepted for c in drafted.cycles][:-1] == deepest[:-1]
        accepted += deepest[:-1]
        assert drafted.tokens == generate(own, None, asked, greedy(policy)).tokens
        assert drafted.tokens == reference(MODELS[shape], asked, 12)
    assert 3 in accepted


@every_shape
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tree_is_its_paths_one_by_one_also_after_commits_and_in_chunks(shape, attention):
    """In float64: nodes of a depth share a position, windows are cut within the tree, rejected nodes leave nothing."""
    asked, llm = request(CASES[1], seed=5), copy.deepcopy(MODELS[shape]).double()
    llm.set_attn_implementation(attention)
    session, _ = target(llm, prefill_chunk=5).prefill(asked, Taps(), capacity=40)
    # A chain that is deeper than the window, with two leaves beside it: its nodes' places are not their positions.
    tree = Tree(torch.arange(11, 22), (-1, -1, 0, 0, 2, 4, 5, 6, 7, 8, 9), (0,) * 11)
    paths = {0: [11]} | {node: [] for node in range(1, 11)}
    for node in range(1, 11):
        parent = tree.parents[node]
        paths[node] = [*(paths[parent] if parent >= 0 else []), 11 + node]
    assert len(paths[10]) == 9 > WINDOW
    own, before = target(llm), [9]
    for root, path in ((9, [0, 2, 4, 5]), (21, [0, 3]), (22, [1])):
        step = own.verify(session, root, tree)
        for node, ids in paths.items():
            with torch.no_grad():
                alone = llm(**published(longer(asked, [*before, *ids]))).logits[0, -1]
            kept = ~step.logits[0].isinf()
            torch.testing.assert_close(step.logits[node + 1, kept], alone[kept].float(), atol=1e-5, rtol=0)
        own.commit(session, path)
        before += [*[int(tree.tokens[n]) for n in path], root + 1 if root > 9 else 21]


def test_chunks_never_cut_a_two_way_picture():
    asked, llm = request(CASES[1], seed=6), MODELS["large"]
    ran = []
    own = target(llm, prefill_chunk=4)
    forward = own.decoder.forward
    own.decoder.forward = lambda embeds, *more, **named: ran.append(embeds.shape[1]) or forward(embeds, *more, **named)
    torch.testing.assert_close(all_logits(own, asked), all_logits(target(llm), asked), atol=1e-5, rtol=0)
    assert sum(ran) == len(asked.ids) and 9 <= max(ran) <= 12 and ran[-1] <= 4


batch_of = partial(tiny_qwen.batch_of, image_size=16)


@every_shape
@pytest.mark.parametrize("packed", [False, True])
def test_states_are_the_taps_of_a_prefill_and_what_training_sees(shape, packed):
    own = target(MODELS[shape])
    asked = [request(CASES[1], seed=7), request((), seed=8), request(CASES[0], seed=9)]
    batch = batch_of(*asked)
    batch = replace(batch, packed=packed)
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
            assert theirs.shape[-1] == 32
            here = kept[row, :length]
            torch.testing.assert_close(ours[row, :length][here], theirs[0][here], atol=1e-4, rtol=0)
            assert ours[row, :length][~here].abs().sum() == 0
    with torch.no_grad():
        module = training_of(MODELS[shape], ("projector",), gradient_checkpointing=False)
        hidden = module.hidden_states(batch)
        torch.testing.assert_close(hidden[text], states.feature[text], atol=1e-4, rtol=0)
        scores, capped = module.scores(hidden[text]), own.scores(states.feature[text])
        kept = ~capped[0].isinf()
        torch.testing.assert_close(scores[:, kept], capped[:, kept], atol=1e-5, rtol=0)


@every_shape
def test_answers_in_batches_are_those_of_single_requests(shape):
    asked = [request(CASES[1]), request((), seed=1), request(CASES[0], seed=2)]
    own = target(MODELS[shape])
    expected = [generate(own, None, one, greedy(Chain(1), 8)).tokens for one in asked]
    written = write_answers(own.decoder, asked, Warp(), limits=[8] * 3, seeds=[0] * 3, eos_ids=(EOS,))
    assert [w.ids for w in written] == expected


@every_shape
@pytest.mark.parametrize("settings", HEADS, ids=lambda settings: settings["kind"])
def test_heads_change_nothing(shape, settings):
    own, config = target(MODELS[shape]), config_of(**settings)
    torch.manual_seed(1)
    head = config.build(own, count_tokens=lambda: torch.arange(VOCAB))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    trees = {"dflash": Product(8, 3, 3), "eagle3": Dynamic(8, 2, 3), "medusa": Static([(0,), (1,), (0, 0)])}
    asked = request(CASES[1], seed=3)
    plain = generate(own, None, asked, greedy(Chain(1))).tokens
    for policy in (Chain(3), trees[settings["kind"]]):
        drafted = generate(own, config.drafter(head, own), asked, greedy(policy))
        assert drafted.tokens == plain and sum(c.num_drafted for c in drafted.cycles) > 0


@every_shape
@pytest.mark.parametrize("positions", ["compact", "target"])
def test_the_target_itself_with_a_pruned_cache_changes_nothing(shape, positions):
    own = target(MODELS[shape])
    config = PrunedConfig.model_validate({"kind": "pruned", "model": "target", "ratio": 0.5, "positions": positions})
    asked = request(CASES[1], seed=4)
    drafted = generate(own, config.drafter(config.load(None, own), own), asked, greedy(Chain(3)))
    assert drafted.tokens == generate(own, None, asked, greedy(Chain(1))).tokens
    assert sum(c.num_drafted for c in drafted.cycles) > 0


@every_shape
def test_what_a_head_mirrors(shape):
    """Most layers' heads, the base of the layers that see all, without their part of a rotation; rows as stored."""
    own = target(MODELS[shape])
    layer = config_of(kind="eagle3", taps=[1, 2, 3]).layer(own.shape)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) in {(4, 2, 8), (4, 2, 16), (4, 1, 16)}
    assert layer.rope_theta == 1_000_000.0 and layer.rope_scaling is None
    assert not layer.qk_rms_norm and not layer.qkv_bias
    assert torch.equal(own.embedding, own.decoder.language_model.embed_tokens.weight)
    rows = lm_head_rows(own, torch.tensor([4, 9]))
    torch.testing.assert_close(rows, own.decoder.model.lm_head.weight[[4, 9]], atol=1e-6, rtol=0)
    with pytest.raises(UserError, match="6 times as large as words"):
        config_of(kind="eagle").check(own.shape)
    config_of(kind="eagle", image="placeholder").check(own.shape)


@pytest.mark.slow
@every_shape
@pytest.mark.parametrize("policy", [Chain(2), Static([(0,), (1,), (0, 0)])], ids=["chain", "static"])
def test_a_draw_of_many_is_distributed_as_the_target(shape, policy):
    """Temperature 1, a draft that is often wrong, two tokens of the target's own 5 likeliest: chi-square."""
    own, asked = target(MODELS[shape]), request(((1, 2),), words=2)
    noisy = copy.deepcopy(MODELS[shape])
    noisy.lm_head.weight = nn.Parameter(
        noisy.lm_head.weight + 0.1 * torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(1))
    )
    draft = IndependentProposal(target(noisy).decoder, "M", newline_id=7)
    check_pairs(own, draft, asked, policy, all_logits, longer)


@every_shape
def test_a_dry_runs_memory(shape):
    llm, asked = MODELS[shape], request(((8, 20),), words=2)
    actual = sum(p.numel() * p.element_size() for p in llm.parameters())
    assert sum(weight_bytes(llm.config, "float32").values()) == actual
    positions = len(asked.ids) + 10
    with Live() as live:
        session, _ = target(llm).prefill(asked, Taps(), capacity=10)
    layers = session.cache.own_layers
    held = sum(p.numel() * p.element_size() for layer in layers for p in (layer.keys, layer.values))
    assert len(layers) == (2 if shape == "small" else 4)
    assert held + 8 * positions == cache_bytes(llm.config, "float32", positions)
    section = SimpleNamespace(kind=llm.config.model_type, target=lambda model, **_: target(model))
    counted = moment(llm.config, section, "float32", Pass(positions))
    assert 0.5 < counted / (live.most - held) < 2, (counted, live.most - held)


# ---- sections, files, and what is refused with the reason


def section(shape: str = "large", **settings):
    values = {"kind": "gemma4", "language_model": {"model_type": "gemma4_text", **text_values(shape)}}
    values |= {"vision_tower": {"model_type": "gemma4_vision", **tower_values()}} | settings
    return GemmaTargetConfig.model_validate(values)


@every_shape
def test_a_new_target_is_saved_and_read_again(shape, tmp_path):
    torch.manual_seed(0)
    llm = build_target(section(shape), IDS)
    llm.save_pretrained(tmp_path)
    path = GemmaTargetConfig(kind="gemma4", path=str(tmp_path))
    how = {"num_token_ids": TOKENS, "image_token_id": IMAGE_ID, "device": torch.device("cpu")}
    read = load_target(path, tmp_path, **how)
    asked = request(CASES[1])
    assert torch.equal(all_logits(read, asked), all_logits(target(llm.eval()), asked))
    tables = load_target(path, tmp_path, **how, tables_only=True)
    assert torch.equal(tables.embedding, read.embedding) and tables.shape.num_layers == 4
    some = torch.randn(3, 32)
    assert torch.equal(tables.scores(some), read.scores(some))
    assert Published.from_pretrained(tmp_path).config.architectures == ["Gemma4ForConditionalGeneration"]


def test_the_tower_of_sounds_is_left_out(tmp_path):
    llm = copy.deepcopy(MODELS["small"])
    config = copy.deepcopy(llm.config)
    config.audio_config = Gemma4AudioConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=8, subsampling_conv_channels=[4, 4]
    )
    torch.manual_seed(0)
    sounding = Published(config)
    sounding.load_state_dict(llm.state_dict(), strict=False)
    sounding.save_pretrained(tmp_path)
    path = GemmaTargetConfig(kind="gemma4", path=str(tmp_path))
    how = {"num_token_ids": TOKENS, "image_token_id": IMAGE_ID, "device": torch.device("cpu")}
    read, asked = load_target(path, tmp_path, **how), request(CASES[0])
    assert torch.equal(all_logits(read, asked), all_logits(target(llm), asked))
    assert read.decoder.model.model.audio_tower is None
    assert sum(weight_bytes(config, "float32").values()) == 4 * sum(p.numel() for p in llm.parameters())


def test_what_cannot_be_exact_is_refused():
    asked = request(CASES[0])
    for other in (Picture(4, 1, newline="one_token"), whole_picture(PatchGrid(1, 4, 4))):
        cut = copy.copy(asked)
        object.__setattr__(cut, "pictures", (other,))
        with pytest.raises(UserError, match="3 x 3 patches a token"):
            target(MODELS["large"]).prefill(cut, Taps(), capacity=1)
    experts = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
    with pytest.raises(UserError, match="mixture of experts"):
        build_target(section(language_model={"model_type": "gemma4_text", **text_values("large"), **experts}), IDS)
    with pytest.raises(UserError, match="see each other: it writes no text"):
        model("large", use_bidirectional_attention="all")
    with pytest.raises(UserError, match="transformers' own forward fails"):
        model("small", hidden_size_per_layer_input=0)
    with pytest.raises(UserError, match="it has no tower"):
        check_kind(section(), "gemma4_unified", "google/gemma-4-12B-it")
    with pytest.raises(UserError, match="is of model_type 'gemma3'"):
        check_kind(section(), "gemma3", "google/gemma-3-4b-it")
    clip = {"model_type": "clip_vision_model", "hidden_size": 16, "num_attention_heads": 2}
    with pytest.raises(UserError, match="is of model_type gemma4_vision, and is a clip_vision_model"):
        build_target(section(vision_tower=clip), IDS)
    with pytest.raises(ValueError, match="never cut here"):
        section(tensor_parallel_size=2)
    with pytest.raises(Refused, match="expands the pictures of a gemma4"):
        VllmEngine(kind="vllm").check(section(), states=False, aspect="square")


def test_saved_experts_are_refused(tmp_path):
    values = MODELS["large"].config.to_dict()
    values["text_config"] |= {
        "enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8,
    }  # fmt: skip
    Published(type(MODELS["large"].config)(**values)).save_pretrained(tmp_path)
    path = GemmaTargetConfig(kind="gemma4", path=str(tmp_path))
    with pytest.raises(UserError, match="mixture of experts"):
        load_target(path, tmp_path, num_token_ids=TOKENS, image_token_id=IMAGE_ID, device=torch.device("cpu"))


@every_shape
def test_checkpointing_changes_no_gradient(shape):
    """Layers that read another's keys and values are run again with the same ones."""
    batch, found = batch_of(request(CASES[1], seed=7), request((), seed=8)), []
    for checkpointing in (False, True):
        parts = ("vision_tower", "projector", "language_model")
        module = training_of(copy.deepcopy(MODELS[shape]), parts, gradient_checkpointing=checkpointing).train()
        loss = module(batch)
        loss.loss_sum.backward()
        named = {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}
        assert "model.language_model.layers.3.self_attn.q_proj.weight" in named
        assert "model.embed_vision.embedding_projection.weight" in named
        found.append((loss.loss_sum.detach(), named))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], atol=1e-5, rtol=1e-4, msg=name)


@every_shape
def test_visual_tokens_are_hidden_from_some_layers(shape):
    """Hidden from all layers, pictures change nothing of the text after them; from none, everything is as ever."""
    own, asked = target(MODELS[shape]), request(CASES[1], seed=9)
    other = copy.copy(asked)
    object.__setattr__(other, "pixels", 1 - asked.pixels)
    places = asked.modality != 0
    with unseen_from(own.decoder, places, 0):
        hidden = [all_logits(own, one)[-1] for one in (asked, other)]
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=0)
    seen = all_logits(own, asked)
    with unseen_from(own.decoder, places, 4):
        torch.testing.assert_close(all_logits(own, asked), seen, atol=1e-5, rtol=0)
    assert not torch.allclose(seen[-1], all_logits(own, other)[-1], atol=1e-3)


def test_its_text_model_alone_is_refused_by_the_reason():
    """Five of six of its layers see a window: it is no causal_lm target."""
    config = Gemma4TextConfig(vocab_size=VOCAB, **text_values("large"))
    with pytest.raises(UserError, match="some layers of gemma4_text see a window alone"):
        CausalTarget(Gemma4ForCausalLM(config), num_token_ids=TOKENS)


def test_graphs_are_not_captured(monkeypatch):
    monkeypatch.setattr("draftsmith.models.targets.verification.why_nowhere", lambda *_: None)
    assert "a window of positions" in why_not(target(MODELS["small"]).decoder)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_exports_say_what_is_known_of_engines(engine):
    config, own = config_of(kind="eagle3", taps=[1, 2, 3]), target(MODELS["large"])
    head = config.build(own, count_tokens=None)
    source = Source(Path("head"), config, head, Target(own.decoder.model.config, None), {})
    with pytest.raises(UserError, match="nobody has read here how its class of gemma4"):
        check_expressible(engine, source, "text")


def test_weights_do_not_move():
    own, before = target(copy.deepcopy(MODELS["small"])), MODELS["small"].state_dict()
    own.states(batch_of(request()), Taps(feature=True))
    after = own.decoder.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(p.requires_grad for p in own.decoder.model.parameters())
