"""Hidden-state heads in the decoding loop, beside real tiny targets: identity, exactness, an oracle, the window."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.core.batch import IMAGE, TEXT, VIDEO
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Dynamic, Static
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import head_proposal as proposals
from draftsmith.models.drafters.draft_vocabulary import likeliest_ids
from draftsmith.models.drafters.head_training import layout_of
from draftsmith.models.targets.base import Prompt, Taps, TargetStep
from family_checks import longer
from heads_tiny import SETTINGS, config_of
from heads_tiny import head_of as fresh_head
from tensors import learn, loud
from test_contract import eagerly
from tiny import IMAGE_ID, SIZES, TOKENS, VOCAB, llava, request, target
from torch import nn
from torch.nn import functional as F

POLICIES = {
    "chain": lambda: Chain(4),
    "static": lambda: Static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": lambda: Dynamic(total=16, depth=3, width=4),
}


@pytest.fixture(scope="module")
def big():
    """Six layers, so that three taps are different ones."""
    return target(llava(0, layers=6))


def loud_head(config, model, seed=0):
    torch.manual_seed(seed)
    ids = None
    if config.kind == "eagle3":
        ids = likeliest_ids(torch.arange(model.vocab_size).float(), 50, model.scores(model.embedding[:1])[0].isneginf())
    head = fresh_head(config, model.shape, ids)
    loud(head)
    return head


def settings_of(name, **changes):
    settings = dict(SETTINGS[name])
    if settings["kind"] == "eagle3":
        settings["taps"] = (1, 3, 5)
        settings.pop("draft_vocab_size", None)
    return config_of(**settings | changes)


def drafter_of(name, model, **changes):
    config = settings_of(name, **changes)
    return config.drafter(loud_head(config, model), model)


# ---- an oracle


class Oracle(nn.Module):
    """In a head's place: the target's true next state, found out from what the proposal shows alone.

    Tokens travel in the cache as keys; an input's history is what its mask lets it see. Each state that it is handed
    must be the true one.
    """

    num_queries = num_steps = 0
    takes_rotations = False  # it reads positions
    dtype = torch.float32
    shape = SimpleNamespace(sliding_window=None)
    embed = staticmethod(F.embedding)

    def __init__(self, model, asked, held):
        super().__init__()
        self.model, self.asked, self.held, self.known = model, asked, held, {}

    def fuse(self, states):
        return states

    def draft_scores(self, outputs, scores, dtype):
        return scores(outputs.to(dtype))

    def truth(self, tokens):
        if tokens not in self.known:
            _, step = self.model.prefill(longer(self.asked, tokens), Taps(feature=True), capacity=1)
            self.known[tokens] = step.feature[0, -1]
        return self.known[tokens]

    def forward(self, embeds, states, positions, mask, cache, *, direct=None, image=None, depths=None):
        table = self.model.embedding
        tokens = torch.cdist(embeds[0], table).argmin(-1)[None, None, :, None].float()
        seen, _ = cache.layers[0].update(tokens, tokens)
        answers = torch.zeros_like(states)
        if mask is None:  # one input that sees all, or causal with nothing before
            mask = torch.ones(embeds.shape[1], seen.shape[2]).bool().tril(seen.shape[2] - embeds.shape[1])
        for place in range(embeds.shape[1]):
            history = seen[0, 0, mask[place], 0].long().tolist()
            if len(history) <= len(self.held):
                continue  # inside the prompt
            assert history[: len(self.held)] == self.held
            answer = tuple(history[len(self.held) :])
            assert int(positions[..., place].flatten()[0]) == len(history) - 1
            torch.testing.assert_close(states[0, place], self.truth(answer[:-1]), atol=5e-5, rtol=1e-4)
            answers[0, place] = self.truth(answer)
        return answers


@pytest.mark.covering
@pytest.mark.parametrize("shape", POLICIES)
@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("name", ["sparrow", "msd"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_oracle_is_accepted_to_full_depth(name, images, shape, sizes):
    """True states in, the target's own choice out: anything misplaced by one would show in the first cycle."""
    loud = llava(1, sizes=sizes)
    loud.lm_head.weight.data *= 6  # the likeliest path is then a tree's best path
    model = target(loud)
    asked, config = request(5, images, sizes=sizes), config_of(**SETTINGS[name])
    text = (asked.modality == TEXT) if name == "sparrow" else torch.ones_like(asked.modality).bool()
    # The first token of a prompt has no input; the last input reads the first generated token.
    held = asked.ids[1:][text[1:]].tolist()
    drafter = config.drafter(Oracle(model, asked, held), model)
    result = generate(model, drafter, asked, greedy(POLICIES[shape](), 16))
    assert result.tokens == generate(model, None, asked, greedy(Chain(1), 16)).tokens
    assert all(c.num_accepted == c.num_drafted for c in result.cycles)
    assert max(c.num_drafted for c in result.cycles) >= 3 and len(result.cycles) <= 6


# ---- the text-only window


def prefilled(model, visual: int, *, seed=0, before=3, behind=4, kind=IMAGE):
    """A prompt with a run of `visual` tokens whose text has the same states, whatever the run's length."""
    generator = torch.Generator().manual_seed(seed)
    width, count = model.config.hidden_size, before + behind
    text = torch.randn(count + 1, width, generator=generator)
    words = torch.randint(6, 50, (count,), generator=generator)
    # The state of the last visual place is what the first text after it reads.
    feature = torch.cat([text[:before], torch.randn(max(visual - 1, 0), width), text[before : before + (visual > 0)],
                         text[before + 1 :]])  # fmt: skip
    ids = torch.cat([words[:before], torch.full((visual,), IMAGE_ID), words[before:]])
    modality = torch.tensor([TEXT] * before + [kind] * visual + [TEXT] * behind, dtype=torch.int8)
    layers = {layer: feature[None, : len(ids)] * (layer + 1) for layer in range(7)}
    prompt = Prompt(
        ids[None], torch.ones(1, len(ids)).bool(), torch.arange(len(ids))[None], Guidance(), modality[None]
    )  # fmt: skip
    return TargetStep(torch.zeros(1, VOCAB), feature[None, : len(ids)], layers, prompt=prompt)


def drafted(drafter, prefill, cycles=2):
    """Every q of a few cycles with the same tokens and states, and the inputs that the drafter held after each root."""
    drafter.start(None, prefill, Warp(), capacity=30)
    drafter.begin(9)
    generator, result, held = torch.Generator().manual_seed(5), [], []
    for _ in range(cycles):
        result.append(drafter.root())
        held.append(drafter.num_held)
        result += drafter.expand([ROOT, ROOT], torch.tensor([11, 12]))
        result += drafter.expand([0, 1], torch.tensor([13, 14]))
        states = torch.randn(1, 3, drafter.target.config.hidden_size, generator=generator)
        step = TargetStep(torch.zeros(3, VOCAB), states, {layer: states * (layer + 1) for layer in range(7)})
        drafter.accept(SimpleNamespace(step=step, tokens=(11, 13), bonus=15))
    return torch.stack(result), held


WINDOW = {"positions": "compact"}
SWITCHED = WINDOW | {"vata": True}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sparrow", {}), ("hivis", {}), ("msd", SWITCHED), ("eagle", SWITCHED), ("eagle3", WINDOW),
        ("eagle3-read", SWITCHED), ("eagle3-middle", SWITCHED),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [IMAGE, VIDEO])
def test_the_window_does_not_depend_on_the_number_of_visual_tokens(big, name, changes, kind):
    """Same text states, positions counted in the window: the same drafts to the last bit, and the same cache."""
    drafter = drafter_of(name, big, **changes)
    assert not set(drafter.taps.layers) - {1, 3, 5}, "nothing is tapped for visual slots"
    expected, held = drafted(drafter, prefilled(big, 2, kind=kind))
    assert held == [7, 10]
    for visual in (1, 40, 3000):
        actual, again = drafted(drafter, prefilled(big, visual, kind=kind))
        assert again == held and torch.equal(actual, expected)
        assert drafter._cache.layers[0].keys.shape[2] == 7 + 30
    flat = drafter_of(name, big, **changes | {"positions": "flat"})
    assert not torch.allclose(drafted(flat, prefilled(big, 40, kind=kind))[0], expected, atol=1e-4)
    assert drafted(flat, prefilled(big, 40, kind=kind))[1] == held


@pytest.mark.parametrize("name", ["sparrow", "msd", "vispec", "eagle3-read"])
def test_a_long_prompt_is_read_in_pieces(big, name, monkeypatch):
    """The same drafts, and no mask as large as the clip squared."""
    drafter, prefill = drafter_of(name, big, **({"vata": False} if name == "sparrow" else {})), prefilled(big, 40)
    expected, held = drafted(drafter, prefill, 1)
    monkeypatch.setattr(proposals, "PIECE", 7)
    seen, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: seen.append(k) or attend(*a, **k))
    actual, again = drafted(drafter, prefill, 1)
    assert again == held
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    masks = [k["attn_mask"] for k in seen if k.get("attn_mask") is not None]
    assert masks and max(mask.shape[-2] for mask in masks) <= 7


def test_without_the_window_visual_slots_are_held(big):
    for name, changes, count in (
        ("sparrow", {"vata": False}, 47), ("msd", {}, 47), ("vispec", {}, 7 + 2), ("vispec", {"vata": True}, 7),
        ("eagle", {}, 47), ("eagle", {"vata": True}, 7), ("msd", {"visual_share": 0.0}, 7),
    ):  # fmt: skip
        assert drafted(drafter_of(name, big, **changes), prefilled(big, 40), 1)[1] == [count]


def test_the_window_on_an_msd_head_is_its_visual_slots_dropped(big):
    """The head of the published form, unchanged: masking the keys of visual inputs gives the same answers."""
    config = config_of(kind="msd", vata=True, positions="flat")
    head = loud_head(config, big)
    windowed = config.drafter(head, big)
    whole = config.model_copy(update={"vata": False}).drafter(head, big)
    prefill = prefilled(big, 6)
    windowed.start(None, prefill, Warp(), capacity=9)
    windowed.begin(9)
    q = windowed.root()
    visual = torch.cat([prefill.prompt.modality[0, 1:] != TEXT, torch.tensor([False])])
    read = whole._read

    def blind(embeds, states, positions, mask, *rest):
        count, past = states.shape[1], whole._cache.length
        seen = torch.ones(count, past + count).bool().tril(past) & ~visual[: past + count]
        return read(embeds, states, positions, seen | torch.eye(past + count).bool()[past:], *rest)

    whole._read = blind
    whole.start(None, prefill, Warp(), capacity=9)
    whole.begin(9)
    torch.testing.assert_close(whole.root(), q, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("by", ["last", "text"])
def test_a_share_of_visual_slots_by_attention(big, by, monkeypatch):
    """Real attention of the target; the kept places are those that get the most of it."""
    asked = request(3, 2)
    drafter = drafter_of("msd", big, visual_share=0.25, share_by=by, share_layer=2)
    _, step = big.prefill(asked, drafter.taps, capacity=9)
    laid = []
    monkeypatch.setattr(proposals, "layout_of", lambda *a, **k: laid.append(layout_of(*a, **k)) or laid[-1])
    drafter.start(asked, step, Warp(), capacity=9)
    drafter.begin(9)
    kept = laid[0].index[0][laid[0].visual[0]] + 1
    assert len(kept) == 2
    with torch.no_grad():
        weights = eagerly(big.decoder.model)(
            input_ids=asked.ids[None], pixel_values=asked.pixels, output_attentions=True
        ).attentions[2][0].mean(0)  # fmt: skip
    scores = weights[-1] if by == "last" else weights[asked.modality == TEXT].mean(0)
    visual = (asked.modality != TEXT).nonzero()[:, 0]
    assert sorted(kept.tolist()) == sorted(visual[scores[visual].topk(2).indices].tolist())
    plain = generate(big, None, asked, greedy(Chain(1), 16)).tokens
    assert generate(big, drafter, asked, greedy(Chain(3), 16)).tokens == plain


def test_a_drafter_keeps_nothing_of_the_last_request(big):
    for name in ("vispec", "eagle3", "hivis"):
        drafter = drafter_of(name, big)
        alone, _ = (generate(big, drafter, request(seed, 1), greedy(Dynamic(12, 2, 3), 6)) for seed in (6, 7))
        again = generate(big, drafter, request(6, 1), greedy(Dynamic(12, 2, 3), 6))
        assert [c.num_accepted for c in again.cycles] == [c.num_accepted for c in alone.cycles]


def test_learned_steps_follow_the_depth(big):
    """HiViS: a true state has step 0 again, once it is true."""
    drafter = drafter_of("hivis", big)
    seen = []
    drafter.head.steps.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].flatten().tolist()))
    drafted(drafter, prefilled(big, 3))
    assert seen == [[0] * 6, [0], [1, 1], [1, 1], [0] * 3, [1, 1], [1, 1]], "two vectors are all there are"


def test_placeholders_are_never_drafted(big):
    """Ids that cannot come have no chance, in the target's vocabulary and in the draft's own."""
    for name in SETTINGS:
        drafter = drafter_of(name, big)
        _, step = big.prefill(request(1, 1), drafter.taps, capacity=9)
        drafter.start(None, step, Warp(1.0), capacity=9)
        drafter.begin(9)
        for q in (drafter.root(), *drafter.expand([ROOT], torch.tensor([4]))):
            assert float(q[TOKENS:].sum()) == 0 and float(q[IMAGE_ID]) == 0
            assert float(q.sum()) == pytest.approx(1, abs=1e-5)


# ---- beside other targets, and after training


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("settings", [
    {"kind": "sparrow", "positions": "mrope"},
    {"kind": "sparrow", "positions": "mrope", "vata": False, "middle_layer": 3},
    {"kind": "vispec", "positions": "mrope"},
    {"kind": "eagle3", "taps": [1, 2, 4]},
], ids=["window", "whole", "vispec", "eagle3"])  # fmt: skip
def test_positions_of_three_rows(kind, settings):
    """A clip in the prompt; drafts go on where the target's own positions do."""
    model = tiny_qwen.target(tiny_qwen.model(kind))
    asked = tiny_qwen.request(kind, clip=(4, 8, 8))
    if kind == "qwen3_5" and "positions" in settings:  # turns a part of each head, which a head's layer does not know
        settings = settings | {"positions": "flat"}
    config = config_of(**settings)
    drafter = config.drafter(loud_head(config, model), model)
    plain = generate(model, None, asked, greedy(Chain(1), 8)).tokens
    assert generate(model, drafter, asked, greedy(Dynamic(10, 2, 3), 8)).tokens == plain
    if config.kind == "sparrow" and config.positions == "mrope":
        session, step = model.prefill(asked, drafter.taps, capacity=20)
        drafter.start(asked, step, Warp(), capacity=20)
        drafter.begin(9)
        drafter.root()
        assert int(drafter._next) == len(asked.ids) + session.rope_delta
        assert int(drafter._next) < len(asked.ids)
        texts = int((asked.modality[1:] == TEXT).sum()) + 1
        assert drafter.num_held == (texts if config.vata else len(asked.ids))


@pytest.mark.parametrize("name", ["sparrow", "eagle3"])
def test_a_head_that_has_learned_is_accepted(big, name):
    """States of the real target, training, decoding: the parts agree on what stands where."""
    drafter = drafter_of(name, big, positions="flat")
    asked = [request(seed, 1) for seed in range(2)]
    answers = [generate(big, None, one, greedy(Chain(1), 12)).tokens for one in asked]
    batch = tiny_qwen.batch_of(*map(longer, asked, answers), image_size=16, last=12)
    states = big.states(batch, drafter.config.taps_for(big.shape, training=True))

    def accepted():
        drafter.head.eval()
        results = [generate(big, drafter, one, greedy(Chain(3), 12)) for one in asked]
        assert [r.tokens for r in results] == answers
        return sum(c.num_accepted for r in results for c in r.cycles)

    before = accepted()
    training = drafter.config.training_objective(drafter.head, big).train()
    training.objective = training.objective.model_copy(update={"noise": 0.0})
    learn(training, replace(batch, seeds=(0, 1)), states, steps=50, lr=5e-3)
    assert accepted() >= max(7, 2 * before)
    assert all(p.grad is None for p in big.decoder.model.parameters()), "the target learns nothing"
