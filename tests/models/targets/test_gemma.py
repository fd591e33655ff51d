"""Gemma 4 as a target: as transformers computes, trees as single forwards, heads, memory, refusals."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import family_checks as family
import pytest
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import PatchGrid, Picture, whole_picture
from draftsmith.core.states import Taps
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain
from draftsmith.models.decoding.tapped import unseen_from
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.drafters.draft_vocabulary import lm_head_rows
from draftsmith.models.drafters.pruned import PrunedConfig
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.models.targets.gemma.section import GemmaTargetConfig
from draftsmith.models.targets.load import build_target, check_kind, load_target
from draftsmith.models.targets.sizes import parameter_counts
from draftsmith.models.targets.table import training_of
from draftsmith.trainers.evaluate.text import why_not
from fails import fails_with
from heads_tiny import config_of
from tiny_gemma import (
    IDS,
    IMAGE_ID,
    SHAPES,
    TOKENS,
    VOCAB,
    WINDOW,
    model,
    published,
    request,
    section,
    target,
    text_values,
)
from transformers import Gemma4AudioConfig, Gemma4ForCausalLM, Gemma4TextConfig
from transformers import Gemma4ForConditionalGeneration as Published

MODELS = {shape: model(shape) for shape in SHAPES}
CASES = [((2, 3),), ((3, 3), (1, 2))]  # tokens down and across of each picture; the first is longer than the window
every_shape = pytest.mark.parametrize("shape", SHAPES)


@every_shape
def test_scores_are_capped_and_requests_are_longer_than_the_window(shape):
    """That they are transformers' own is in `test_towers.py`, with what else all families keep."""
    for pictures in (*CASES, ()):
        ours = family.all_logits(target(MODELS[shape]), asked := request(pictures))
        assert len(asked.ids) >= WINDOW
        assert ours[~ours.isinf()].abs().max() < MODELS[shape].config.text_config.final_logit_softcapping


def test_what_only_a_two_way_picture_sees_changes_its_states():
    """The same weights, causal in pictures: the text before them scores alike, and what is after does not."""
    asked, one_way = request(CASES[0]), copy.deepcopy(MODELS["large"])
    one_way.config.text_config.use_bidirectional_attention = None
    both, causal = (family.all_logits(target(one), asked) for one in (MODELS["large"], one_way))
    start = int((asked.ids == IMAGE_ID).nonzero()[0])
    assert torch.equal(both[:start], causal[:start])
    assert not torch.allclose(both[start + 1], causal[start + 1])


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
                alone = llm(**published(family.longer(asked, [*before, *ids]))).logits[0, -1]
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
    torch.testing.assert_close(family.all_logits(own, asked), family.all_logits(target(llm), asked), atol=1e-5, rtol=0)
    assert sum(ran) == len(asked.ids) and 9 <= max(ran) <= 12 and ran[-1] <= 4


batch_of = partial(tiny_qwen.batch_of, image_size=16)


@every_shape
@pytest.mark.parametrize("packed", [False, True])
def test_states_are_the_taps_of_a_prefill_and_what_training_sees(shape, packed):
    own = target(MODELS[shape])
    asked = [request(CASES[1], seed=7), request((), seed=8), request(CASES[0], seed=9)]
    batch = replace(batch_of(*asked), packed=packed)
    states, text, _ = family.check_states(own, asked, batch, (0, 2), 1e-4)
    with torch.no_grad():
        module = training_of(MODELS[shape], ("projector",), gradient_checkpointing=False)
        hidden = module.hidden_states(batch)
        torch.testing.assert_close(hidden[text], states.feature[text], atol=1e-4, rtol=0)
        scores, capped = module.scores(hidden[text]), own.scores(states.feature[text])
        kept = ~capped[0].isinf()
        torch.testing.assert_close(scores[:, kept], capped[:, kept], atol=1e-5, rtol=0)


@every_shape
@pytest.mark.parametrize("positions", ["compact", "target"])
def test_the_target_itself_with_a_pruned_cache_changes_nothing(shape, positions):
    own = target(MODELS[shape])
    config = PrunedConfig.model_validate({"kind": "pruned", "model": "target", "ratio": 0.5, "positions": positions})
    asked = request(CASES[1], seed=4)
    drafted = generate(own, config.drafter(config.load(None, own), own), asked, greedy(Chain(3), 12, family.EOS))
    assert drafted.tokens == generate(own, None, asked, greedy(Chain(1), 12, family.EOS)).tokens
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
    fails_with("6 times as large as words", config_of(kind="eagle").check, own.shape)
    config_of(kind="eagle", image="placeholder").check(own.shape)


# ---- sections, files, and what is refused with the reason


def loaded(folder: Path, **more):
    how = {"num_token_ids": TOKENS, "image_token_id": IMAGE_ID, "device": torch.device("cpu")}
    return load_target(GemmaTargetConfig(kind="gemma4", path=str(folder)), folder, **how, **more)


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
    read, asked = loaded(tmp_path), request(CASES[0])
    assert torch.equal(family.all_logits(read, asked), family.all_logits(target(llm), asked))
    assert read.decoder.model.model.audio_tower is None
    assert sum(parameter_counts(config).values()) == sum(p.numel() for p in llm.parameters())


TEXT = {"model_type": "gemma4_text", **text_values("large")}
EXPERTS = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "num_attention_heads": 2}


def shown(picture):
    return target(MODELS["large"]).prefill(replace(request(CASES[0]), pictures=(picture,)), Taps(), capacity=1)


@pytest.mark.parametrize(("error", "refused", "why"), [
    (UserError, lambda: build_target(section(language_model=TEXT | EXPERTS), IDS), "mixture of experts"),
    (UserError, lambda: model("large", use_bidirectional_attention="all"), "see each other: it writes no text"),
    (UserError, lambda: model("small", hidden_size_per_layer_input=0), "transformers' own forward fails"),
    (UserError, lambda: check_kind(section(), "gemma4_unified", "google/gemma-4-12B-it"), "it has no tower"),
    (UserError, lambda: check_kind(section(), "gemma3", "google/gemma-3-4b-it"), "is of model_type 'gemma3'"),
    (UserError, lambda: build_target(section(vision_tower=CLIP), IDS),
     "is of model_type gemma4_vision, and this one is a clip_vision_model"),
    (UserError, lambda: shown(Picture(4, 1, newline="one_token")), "3 x 3 patches a token"),
    (UserError, lambda: shown(whole_picture(PatchGrid(1, 4, 4))), "3 x 3 patches a token"),
    (UserError, lambda: target(MODELS["small"]).watched(Taps()), r"no attention over all places[\s\S]*visual_skip"),
    (ValueError, lambda: section(tensor_parallel_size=2), "never cut here"),
    # Five of six of its layers see a window: the text model alone is no causal_lm target.
    (UserError, lambda: CausalTarget(Gemma4ForCausalLM(Gemma4TextConfig(vocab_size=VOCAB, **text_values("large"))),
                                     num_token_ids=TOKENS), "some layers of gemma4_text see a window alone"),
])  # fmt: skip
def test_what_cannot_be_exact_is_refused(error, refused, why):
    with pytest.raises(error, match=why):
        refused()


def test_saved_experts_are_refused(tmp_path):
    values = MODELS["large"].config.to_dict()
    values["text_config"] |= EXPERTS
    Published(type(MODELS["large"].config)(**values)).save_pretrained(tmp_path)
    fails_with("mixture of experts", loaded, tmp_path)


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
    other = replace(asked, pixels=1 - asked.pixels)
    places = asked.modality != 0
    with unseen_from(own.decoder, places, 0):
        hidden = [family.all_logits(own, one)[-1] for one in (asked, other)]
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=0)
    seen = family.all_logits(own, asked)
    with unseen_from(own.decoder, places, 4):
        torch.testing.assert_close(family.all_logits(own, asked), seen, atol=1e-5, rtol=0)
    assert not torch.allclose(seen[-1], family.all_logits(own, other)[-1], atol=1e-3)


def test_graphs_are_not_captured():
    decoder = target(MODELS["small"]).decoder
    decoder.__class__ = type("OnGpu", (decoder.__class__,), {"device": torch.device("cuda")})
    assert "a window of positions" in why_not(decoder)


@pytest.mark.parametrize("rows", [7, 64, 1000])
def test_a_draft_vocabularys_scores_are_those_of_the_whole_behind_the_cap(rows, monkeypatch):
    family.check_goal_scores(target(MODELS["small"]), rows, monkeypatch)
