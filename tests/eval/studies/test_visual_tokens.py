"""What becomes of visual tokens: removal against a pass without them, shares and cosines by hand."""

from dataclasses import replace
from functools import partial

import pytest
import tiny
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.core.batch import IMAGE, TEXT
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain
from draftsmith.eval.studies import visual_tokens as analysis
from draftsmith.eval.studies.visual_tokens import Question, attention_shares, importance, kinds_of, retention
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.tapped import unseen_from
from draftsmith.models.decoding.tree import chain
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.fast.cuda_graphs import Graphs
from draftsmith.models.targets.base import Taps
from family_checks import longer
from test_head_decoding import loud_head, settings_of

LAYERS = 3


@pytest.fixture(scope="module")
def target():
    return tiny.target(tiny.llava(0, layers=LAYERS))


def plain(length: int) -> Decoding:
    return greedy(Chain(1), length, (tiny.EOS,))


def prompt_states(target, request):
    """Embeddings [1,T,D] and positions [1,T] of a prompt."""
    embeds = target.decoder.embed(request.ids[None], request.modality[None], request.pixels, request.pictures)
    return embeds, torch.arange(len(request.ids))[None]


def causal_mask(length: int) -> torch.Tensor:
    """[1,1,T,T] as every implementation of attention takes it."""
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


@torch.inference_mode()
def by_hand(target, request, layer: int):
    """Scores at the prompt's end where the text goes on alone from `layer` on: the visual inputs are dropped there."""
    model = target.decoder.language_model
    states, positions = prompt_states(target, request)
    text = request.modality == TEXT
    for number, block in enumerate(model.layers):
        if number == layer:
            states, positions = states[:, text], positions[:, text]
        causal = causal_mask(states.shape[1])
        rope = model.rotary_emb(states, positions)
        states = block(states, attention_mask=causal, position_ids=positions, position_embeddings=rope)
        states = states if isinstance(states, torch.Tensor) else states[0]
    return target.decoder.logits(model.norm(states)[0, -1])


@pytest.mark.parametrize("layer", range(LAYERS + 1))
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_removal_is_a_pass_that_goes_on_without_the_visual_slots(target, layer, implementation):
    model = target.decoder.language_model
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        request = tiny.request(1, images=2)
        with unseen_from(target.decoder, request.modality != TEXT, layer):
            _, step = target.prefill(request, Taps(), capacity=4)
        torch.testing.assert_close(step.logits[-1], by_hand(target, request, layer), atol=2e-5, rtol=1e-5)
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def test_a_prompt_that_begins_with_a_picture_has_no_row_that_sees_nothing(target):
    request = tiny.request(2)
    first = replace(request, ids=request.ids[2:], modality=request.modality[2:])
    assert int(first.modality[0]) == IMAGE
    for layer in range(LAYERS):
        with unseen_from(target.decoder, first.modality != TEXT, layer):
            _, step = target.prefill(first, Taps(feature=True), capacity=1)
        assert step.feature.isfinite().all()
        torch.testing.assert_close(step.logits[-1], by_hand(target, first, layer), atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_what_is_decoded_behind_the_prompt_does_not_see_them_either(target):
    """A chain after the prompt, against the same tokens as part of it."""
    request, places = tiny.request(3), tiny.request(3).modality != TEXT
    root, drafted = 11, [12, 13]
    for layer in (0, 1):
        with unseen_from(target.decoder, places, layer):
            session, _ = target.prefill(request, Taps(), capacity=8)
            step = target.verify(session, root, chain(torch.tensor(drafted)))
        torch.testing.assert_close(
            step.logits[-1], by_hand(target, longer(request, [root, *drafted]), layer), atol=2e-5, rtol=1e-5
        )


def test_afterwards_everything_is_seen_again(target):
    request = tiny.request(4)
    before = generate(target, None, request, plain(6)).tokens
    with pytest.raises(RuntimeError), unseen_from(target.decoder, request.modality != TEXT, 0):
        raise RuntimeError
    assert generate(target, None, request, plain(6)).tokens == before
    assert not any(layer._forward_pre_hooks for layer in target.decoder.language_model.layers)


def test_importance_falls_where_answers_need_the_picture(target):
    """Questions that seeing answers right by definition: at the last layer all are, and blind ones are not."""
    questions = []
    for seed in range(4):
        request = tiny.request(seed)
        with unseen_from(target.decoder, request.modality != TEXT, 0):
            blind = generate(target, None, request, plain(3)).tokens
        seeing = generate(target, None, request, plain(3)).tokens
        if seeing != blind:
            questions.append(Question(request, lambda ids, right=seeing: ids == right))
    assert len(questions) > 1
    result = importance(target, questions, (0, 1, LAYERS), plain(3))
    assert result[LAYERS] == 1.0 and result[0] == 0.0 and 0 <= result[1] <= 1
    with pytest.raises(AssertionError, match="temperature 0"):
        importance(target, questions, [0], replace(plain(3), warp=Warp(1.0)))


def test_letters_of_answers():
    def right(text: str, letter: str) -> bool:
        return analysis.says_letter(lambda ids: text, letter)([])

    for text in ("B", "(B)", "B. a dog", "The answer is B.", "a B, not A"):
        assert right(text, "B") and not right(text, "A"), text
    assert not right("Because", "B") and not right("", "A") and not right("b", "B")


def test_kinds_and_shares_of_attention():
    modality = torch.tensor([TEXT, TEXT, IMAGE, IMAGE, TEXT, IMAGE, TEXT, TEXT])
    kinds = [analysis.KINDS[k] for k in kinds_of(modality).tolist()]
    assert kinds == ["text", "text", "visual", "visual", "text", "visual", "instruction", "instruction"]
    assert kinds_of(torch.zeros(3)).tolist() == [0, 0, 0], "without pictures all is instruction"
    weights = torch.tensor([0.05, 0.15, 0.1, 0.2, 0.1, 0.1, 0.1, 0.2])
    shares = attention_shares(weights.expand(2, 8), kinds_of(modality))
    assert {k: v.tolist() for k, v in shares.items()} == {
        "instruction": pytest.approx([0.3, 0.3]), "visual": pytest.approx([0.4, 0.4]), "text": pytest.approx([0.3, 0.3])
    }  # fmt: skip


def test_observed_attention_is_that_of_the_eager_computation(target):
    """Observed from outside, against the weights that transformers' eager attention returns."""
    request = tiny.request(5, images=2)
    drafter: IndependentProposal = tiny.proposal(tiny.llava(7))
    _, step = target.prefill(request, drafter.taps, capacity=8)
    with analysis._Observer() as observer:
        drafter.start(request, step, Warp(0.0), capacity=8)
    own = tiny.target(tiny.llava(7))
    _, step = own.prefill(request, Taps(prefill_attention=(0, 1), attention_queries="last"), capacity=1)
    for layer, seen in enumerate(observer.calls[-2:]):
        torch.testing.assert_close(seen[0], step.attention[layer][0], atol=1e-5, rtol=1e-5)


def test_visual_attention_by_layer_and_head(target):
    request = tiny.request(6)
    result = analysis.target_visual_attention(target, request)
    assert result.shape == (LAYERS, 2) and bool(((result > 0) & (result < 1)).all())
    assert not analysis.target_visual_attention(target, tiny.request(6, images=0)).any()


def test_retention_by_hand(target):
    requests = [tiny.request(8), tiny.request(9, images=2, words=3)]
    result = retention(target, requests)
    assert {kind: len(values) for kind, values in result.items()} == {"visual": LAYERS + 1, "text": LAYERS + 1}
    assert result["visual"][0] == pytest.approx(1.0) == result["text"][0]
    sums, count = 0.0, 0
    with torch.inference_mode():
        for request in requests:
            embeds, positions = prompt_states(target, request)
            model = target.decoder.language_model
            causal = causal_mask(embeds.shape[1])
            states = model.layers[0](
                embeds, attention_mask=causal, position_ids=positions,
                position_embeddings=model.rotary_emb(embeds, positions),
            )  # fmt: skip
            states = states if isinstance(states, torch.Tensor) else states[0]
            visual = request.modality != TEXT
            sums += float(torch.nn.functional.cosine_similarity(states[0, visual], embeds[0, visual], dim=-1).sum())
            count += int(visual.sum())
    assert result["visual"][1] == pytest.approx(sums / count, abs=1e-5)
    assert "visual" not in retention(target, [tiny.request(8, images=0)])


def test_where_retention_stays_below_the_threshold():
    assert analysis.fused_from([1.0, 0.5, 0.2, 0.3, 0.1, 0.05]) == 4
    assert analysis.fused_from([1.0, 0.5]) is None


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_recurrent_layers_cannot_hide_what_they_have_read(kind):
    decoder = tiny_qwen.target(tiny_qwen.model(kind)).decoder
    with pytest.raises(UserError, match="a recurrent state cannot forget"), unseen_from(decoder, torch.ones(3) > 0, 0):
        pass


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@torch.inference_mode()
def test_qwens_text_is_blind_where_visual_places_are_unseen_from_the_first_layer(kind):
    """In chunks, too; Qwen3-VL adds visual states after its first layers, which nobody sees there."""
    target = tiny_qwen.target(tiny_qwen.model(kind))
    asked = tiny_qwen.request(kind, ((4, 6),), (2, 4, 4))
    other = replace(asked, pixels=-asked.pixels)

    def scores(request, layer):
        with unseen_from(target.decoder, request.modality != TEXT, layer):
            return target.prefill(request, Taps(), capacity=1)[1].logits[-1]

    whole = scores(asked, 0)
    torch.testing.assert_close(whole, scores(other, 0), atol=1e-5, rtol=0)
    kept = whole.isfinite()
    assert (scores(asked, 1) - scores(other, 1))[kept].abs().max() > 1e-3
    target.prefill_chunk = 5
    torch.testing.assert_close(scores(asked, 0), whole, atol=1e-4, rtol=0)
    assert len(retention(target, [asked])["visual"]) == target.decoder.num_layers + 1


@pytest.mark.parametrize("kind", ["eagle3", "sparrow"])
def test_where_a_head_looks_is_read_of_eager_passes(kind):
    """Graphs that decoding had captured call no attention that can be observed, and read padded inputs."""
    big = tiny.target(tiny.llava(0, layers=6))
    config = settings_of(kind)
    drafter = config.drafter(loud_head(config, big), big)
    asked = tiny.request(0, images=1)
    expected = analysis.head_shares(big, drafter, asked)
    drafter.graphs = graphs = Graphs(torch.device("cpu"), 100, partial(Cache, 1))
    assert analysis.head_shares(big, drafter, asked) == expected
    assert drafter.graphs is graphs and graphs.num_replayed == 0
