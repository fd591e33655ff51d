"""Qwen-VL targets: what transformers computes, trees and chunks as single forwards, decoding as greedy as without."""

import copy
import gc
import weakref
from dataclasses import replace

import family_checks as family
import pytest
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import TEXT, Picture
from draftsmith.core.states import Taps
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Static
from draftsmith.models.decoding import decoder as decoders
from draftsmith.models.targets.llava.section import LlavaTarget
from fails import fails_with
from live_tensors import Watched
from tiny import llava
from tiny_qwen import KINDS, model, published, reference, request, target

MODELS = {kind: model(kind) for kind in KINDS}
CASES = [((4, 6),), ((4, 4), (2, 8))]
CLIP = (5, 4, 4)  # longer in time than its frames are wide: where the two conventions differ
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize(("images", "clip"), [(CASES[0], None), (CASES[1], None), (CASES[0], CLIP), ((), CLIP)])
def test_a_prompt_scores_as_in_transformers(kind, images, clip):
    asked, llm = request(kind, images, clip), MODELS[kind]
    _, expected, kept = family.check_scores(target(llm, resume="longer_side"), asked, published(kind, asked), 3e-4)
    trained = family.all_logits(target(llm), asked)
    differs = (trained[-1, kept] - expected[-1, kept]).abs().max() > 1e-2
    assert differs == (clip is not None and not kind.startswith("qwen3"))


@pytest.mark.covering
@every_kind
@pytest.mark.parametrize("policy", [Chain(3), Static(TREE)], ids=["chain", "static"])
def test_a_copy_as_draft_is_always_right_and_changes_nothing(kind, policy):
    llm = MODELS[kind]
    for number, (images, clip) in enumerate([((), None), (CASES[1], None), ((), CLIP), (CASES[0], CLIP)]):
        asked = request(kind, images, clip, seed=number)
        # The library's decoding goes on elsewhere than its prompts, after a clip.
        expected = None if clip else reference(llm, kind, asked, 14)
        family.check_copy(target(llm), target(copy.deepcopy(llm)), asked, policy, expected, 14)


@every_kind
def test_decoding_behind_a_clip_is_one_forward_over_everything(kind):
    """The position after the prompt, and each one after it, in both conventions: what the library gets wrong."""
    asked = request(kind, CASES[0], CLIP, seed=3)
    for resume in ("max_plus_one", "longer_side"):
        own = target(MODELS[kind], resume=resume)
        tokens = generate(own, None, asked, greedy(Chain(1), 8, family.EOS)).tokens
        whole = family.all_logits(own, family.longer(asked, tokens[:-1]))[len(asked.ids) - 1 :]
        assert whole.argmax(-1).tolist() == tokens


@every_kind
def test_a_tree_is_its_paths_one_by_one(kind):
    own, asked = target(MODELS[kind]), request(kind, CASES[1], CLIP, seed=5)
    session, _ = own.prefill(asked, Taps(), capacity=20)
    assert (session.rope_delta != 0) == any(p.num_tokens > 1 for p in asked.pictures)
    family.check_tree(own, own, session, asked)


def in_float64(kind, asked):
    """The model and the request in float64. Recurring layers add up in another order in each chunk, which later layers
    make larger: in float32 up to 5e-3 over 25 prompts, dense and with experts alike, here 5e-5. Grouped products of
    experts take no float64.
    """
    llm = copy.deepcopy(MODELS[kind]).double()
    if kind.endswith("moe"):
        llm.set_experts_implementation("eager")
    return llm, replace(asked, pixels=asked.pixels.double())


@every_kind
def test_chunks_are_the_whole_prompt(kind):
    llm, asked = in_float64(kind, request(kind, CASES[1], CLIP, seed=6))
    attending = (3,) if kind.startswith("qwen3_5") else (0, 2)  # the others recur
    taps = Taps(text_layers=(0, 1, 3), feature=True, prefill_attention=attending)
    _, whole = target(llm).prefill(asked, taps, capacity=1)
    for chunk in (1, 7, 1000):
        _, parts = target(llm, prefill_chunk=chunk).prefill(asked, taps, capacity=1)
        torch.testing.assert_close(parts.logits, whole.logits, atol=2e-4, rtol=0)
        torch.testing.assert_close(parts.feature, whole.feature, atol=2e-4, rtol=0)
        for layer in taps.layers:
            torch.testing.assert_close(parts.layers[layer], whole.layers[layer], atol=2e-4, rtol=0)
        for layer in taps.prefill_attention:
            torch.testing.assert_close(parts.attention[layer], whole.attention[layer], atol=1e-5, rtol=0)


def test_in_chunks_nothing_grows_with_places_times_places_and_untapped_states_go():
    """What lets 25k visual tokens fit: no [T,T] in any layer, and states of the tapped layers alone stay."""
    asked, llm = request("qwen2_5_vl", ((4, 4),), (80, 8, 8), words=40), MODELS["qwen2_5_vl"]
    length, made, most = len(asked.ids), [], {}
    hooks = [
        layer.register_forward_hook(lambda module, inputs, out: made.append(weakref.ref(out)))
        for layer in llm.model.language_model.layers
    ]
    for chunk in (None, 64):
        made.clear()
        sizes, taps = [], Taps(text_layers=(2,), feature=True)
        with Watched(lambda _, made, sizes=sizes: sizes.extend(part.numel() for part in made)):
            _, step = target(llm, prefill_chunk=chunk).prefill(asked, taps, capacity=1)
        most[chunk] = max(sizes)
    for hook in hooks:
        hook.remove()
    # The patches of the clip are the most that is left; a whole prompt needs no mask of its places, either.
    assert length**2 > 3 * max(most.values()), (length, most)
    gc.collect()
    assert len(made) > 80 and step.layers.keys() == {2}
    assert not any(reference() is not None for reference in made)


@pytest.mark.parametrize("queries", ["suffix", "text", "last"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_attention_is_averaged_as_it_is_seen(queries, chunk, monkeypatch):
    """Visual places never look at anybody, and nothing that grows with queries times places is kept."""
    asked, llm = request("qwen2_5_vl", CASES[0], CLIP, words=6), MODELS["qwen2_5_vl"]
    own, passes = target(llm, prefill_chunk=chunk), []
    monkeypatch.setattr(decoders, "_ATTENTION_CHUNK", 3)
    forward = own.decoder.forward
    monkeypatch.setattr(
        own.decoder, "forward", lambda *a, attention=(), **k: passes.append((a[0].shape[1], bool(attention)))
        or forward(*a, attention=attention, **k),
    )  # fmt: skip
    _, step = own.prefill(asked, Taps(prefill_attention=(1,), attention_queries=queries), capacity=1)
    looking = sum(count for count, looks in passes if looks)
    text = asked.modality == TEXT
    behind = len(text) - 1 - int((~text).nonzero()[-1])
    assert looking == {"suffix": behind, "text": int(text.sum()), "last": 1}[queries]
    assert sum(count for count, _ in passes) == len(text) and max(count for count, _ in passes) <= (chunk or 99)
    assert max(count for count, looks in passes if looks) <= 3
    weights = step.attention[1]
    assert weights.shape == (1, weights.shape[1], len(text))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5, rtol=0)
    torch.testing.assert_close(step.logits, target(llm).prefill(asked, Taps(), capacity=1)[1].logits, atol=2e-4, rtol=0)


def batch_of(kind, louder=1.0):
    asked = [request(kind, CASES[0], CLIP, seed=7), request(kind, (), seed=8), request(kind, CASES[1], seed=9)]
    loud = [r if r.pixels is None else replace(r, pixels=r.pixels * louder) for r in asked]
    return tiny_qwen.batch_of(*loud), asked


@every_kind
def test_states_are_the_taps_of_a_prefill(kind):
    own, (batch, asked) = target(MODELS[kind], prefill_chunk=6), batch_of(kind)
    states, _, steps = family.check_states(own, asked, batch, (0, 3), 2e-4)
    assert states.positions.shape == (3, *batch.ids.shape)
    for row, (one, step) in enumerate(zip(asked, steps, strict=True)):
        assert torch.equal(states.positions[:, row, : len(one.ids)], step.prompt.positions[:, 0])
        assert torch.equal(step.prompt.modality[0], one.modality)


@every_kind
def test_states_see_the_pixels(kind):
    family.check_pixels_are_seen(target(MODELS[kind]), batch_of(kind)[0], batch_of(kind, -1.0)[0], 3)


def test_early_visual_taps_of_deepstack_are_refused():
    batch, _ = batch_of("qwen3_vl")
    own = target(MODELS["qwen3_vl"])
    for layer in (1, 2):
        fails_with("first 2 layers", own.states, batch, Taps(feature=True, visual_layers=(layer,)))
    own.states(batch, Taps(feature=True, text_layers=(1, 2), visual_layers=(0, 3)))
    target(MODELS["qwen2_5_vl"]).states(batch_of("qwen2_5_vl")[0], Taps(feature=True, visual_layers=(1,)))
    fails_with("the target has 4", own.states, batch, Taps(feature=True, text_layers=(5,)))


def test_the_refusal_names_what_is_so():
    """A tap after a layer of deepstack is not the next layer's input; after the last of them it is."""
    asked, taken = request("qwen3_vl"), {}
    llm = MODELS["qwen3_vl"]
    hooks = [
        llm.model.language_model.layers[n].register_forward_pre_hook(lambda m, args, n=n: taken.__setitem__(n, args[0]))
        for n in range(4)
    ]
    _, step = target(llm).prefill(asked, Taps(text_layers=(1, 2, 3)), capacity=1)
    for hook in hooks:
        hook.remove()
    visual = asked.modality != TEXT
    differs = [bool((step.layers[n] - taken[n])[0, visual].abs().max() > 1e-3) for n in (1, 2, 3)]
    assert differs == [True, True, False]
    for n in (1, 2):
        torch.testing.assert_close(step.layers[n][0, ~visual], taken[n][0, ~visual])


def test_tiles_are_refused():
    asked = request("qwen2_5_vl")
    tiled = type(asked)(asked.ids, asked.modality, torch.zeros(1, 3, 8, 8), "r", (Picture(2),))
    fails_with("reads pictures whole", target(MODELS["qwen2_5_vl"]).prefill, tiled, Taps(), capacity=1)


@every_kind
def test_answers_in_batches_are_those_of_single_requests(kind):
    asked = [request(kind, CASES[0], CLIP), request(kind, (), seed=1), request(kind, CASES[1], seed=2)]
    for chunk in (None, 5):
        family.check_batches(target(MODELS[kind]), asked, 9, chunk)


def test_other_families_say_so():
    with pytest.raises(UserError, match="cut for a Qwen-VL"):
        LlavaTarget(llava(0), num_token_ids=60, image_token_id=59).prefill(request("qwen2_vl"), Taps(), capacity=1)
