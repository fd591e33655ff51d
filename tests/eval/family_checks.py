"""What every family of targets keeps, said once: the file of a family hands over its own models and requests."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import torch
from decodings import greedy
from draftsmith.core.pictures import TEXT
from draftsmith.core.states import Taps, feature_places, visual_places
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.batched import write_answers
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import draft_vocabulary
from draftsmith.models.drafters.draft_vocabulary import DraftVocabulary
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.targets.sizes import parameter_counts
from draftsmith.trainers.estimate.train_memory import synthetic_batch, target_step
from exact import accepted_of_drafted, chances, check_drawn
from heads_tiny import config_of
from live_tensors import Live
from torch import nn

EOS = (2,)  # of every tiny family


def all_logits(own, asked) -> torch.Tensor:
    """[T,V] of a prompt, through our prefill."""
    _, step = own.prefill(asked, Taps(feature=True), capacity=1)
    return own.scores(step.feature[0])


def longer(asked, extra):
    """The request with these ids after it."""
    kinds = torch.cat([asked.modality, torch.zeros(len(extra), dtype=torch.int8)])
    return replace(asked, ids=torch.cat([asked.ids, torch.tensor(extra, dtype=torch.int64)]), modality=kinds)


def check_scores(own, asked, given, tolerance: float):
    """A prompt scores as `given` does in transformers. Returns our scores, transformers', and which ids are emitted."""
    with torch.no_grad():
        expected = own.decoder.model(**given).logits[0]
    ours = all_logits(own, asked)
    kept = ~ours[0].isinf()
    torch.testing.assert_close(ours[:, kept], expected[:, kept], atol=tolerance, rtol=0)
    return ours, expected, kept


def check_copy(own, copied, asked, policy, expected, limit: int = 12) -> list[int]:
    """A copy as draft is accepted at every depth, and answers stay plain decoding's, which are transformers' own where
    `expected` has any. Returns how many tokens each full cycle accepted.
    """
    draft = IndependentProposal(copied.decoder, "M", newline_id=7)
    drafted = generate(own, draft, asked, greedy(policy, limit, EOS))
    deepest = [min(c.num_drafted, c.num_emitted) for c in drafted.cycles]
    assert [c.num_accepted for c in drafted.cycles][:-1] == deepest[:-1]
    assert drafted.tokens == generate(own, None, asked, greedy(policy, limit, EOS)).tokens
    assert expected is None or drafted.tokens == expected
    return deepest[:-1]


def check_tree(own, whole, session, asked) -> None:
    """Each node of two trees, the second after a commit, scores as its path does in one forward of `whole`."""
    tree = Tree(torch.tensor([11, 12, 13, 14, 15]), (-1, -1, 0, 0, 2), (0,) * 5)
    paths = {0: [11], 1: [12], 2: [11, 13], 3: [11, 14], 4: [11, 13, 15]}
    before = [9]
    for root, path in ((9, [0, 2]), (21, [0, 3])):
        step = own.verify(session, root, tree)
        for node, ids in paths.items():
            alone = all_logits(whole, longer(asked, [*before, *ids]))[-1]
            torch.testing.assert_close(step.logits[node + 1], alone, atol=2e-4, rtol=0)
        own.commit(session, path)
        before += [*[int(tree.tokens[n]) for n in path], 21]


def check_states(own, asked, batch, visual_layers: tuple[int, int], tolerance: float):
    """States of a batch are the taps of each request's prefill, and zero elsewhere. Returns them, the places [B,T] of
    its text and the prefills.
    """
    states = own.states(batch, Taps(feature=True, text_layers=(1,), visual_layers=visual_layers))
    text = feature_places(batch.modality, batch.attention_mask, batch.loss_mask)
    visual, steps = visual_places(batch.modality, batch.attention_mask), []
    layers = {1: text}
    for layer in visual_layers:
        layers[layer] = layers[layer] | visual if layer in layers else visual
    for row, one in enumerate(asked):
        length = len(one.ids)
        _, step = own.prefill(one, Taps(text_layers=tuple(sorted(layers)), feature=True), capacity=1)
        compared = [(states.layers[layer], step.layers[layer], kept) for layer, kept in layers.items()]
        for ours, theirs, kept in [(states.feature, step.feature, text), *compared]:
            here = kept[row, :length]
            assert theirs.shape[-1] == own.config.hidden_size
            torch.testing.assert_close(ours[row, :length][here], theirs[0][here], atol=tolerance, rtol=0)
            assert ours[row, :length][~here].abs().sum() == 0
        steps.append(step)
    return states, text, steps


def check_pixels_are_seen(own, batch, other, layer: int) -> None:
    """States of two batches that differ in the pixels of their first row: it alone changes, at pictures and behind."""
    taps = Taps(feature=True, visual_layers=(layer,))
    seen, changed = own.states(batch, taps), own.states(other, taps)
    behind, visual = batch.loss_mask[0], batch.modality[0] != TEXT
    assert (seen.feature[0, behind] - changed.feature[0, behind]).abs().max() > 1e-2
    assert (seen.layers[layer][0, visual] - changed.layers[layer][0, visual]).abs().max() > 1e-2
    torch.testing.assert_close(seen.feature[1], changed.feature[1])


def check_batches(own, asked, limit: int = 8, chunk: int | None = None, eos=EOS) -> None:
    """Answers that are written in a batch are those of single requests."""
    expected = [generate(own, None, one, greedy(Chain(1), limit, eos)).tokens for one in asked]
    limits, seeds = [limit] * len(asked), [0] * len(asked)
    written = write_answers(own.decoder, asked, Warp(), limits=limits, seeds=seeds, eos_ids=eos, prefill_chunk=chunk)
    assert [w.ids for w in written] == expected


def check_head(own, settings, policies, asked) -> None:
    """A loud head of these settings changes no answer."""
    config = config_of(**settings)
    torch.manual_seed(1)
    head = config.build(own, count_tokens=lambda: torch.arange(own.vocab_size))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    plain = generate(own, None, asked, greedy(Chain(1), 12, EOS)).tokens
    for policy in policies:
        drafted = generate(own, config.drafter(head, own), asked, greedy(policy, 12, EOS))
        assert drafted.tokens == plain and sum(c.num_drafted for c in drafted.cycles) > 0


def noisy(model, scale: float):
    """A copy whose LM head, tied to nothing, is noisy: a draft that is often wrong."""
    made, weight = copy.deepcopy(model), model.lm_head.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    made.lm_head.weight = nn.Parameter(weight.detach() + scale * noise)
    return made


def check_draws(own, draft, asked, policy, *, draw="sample", tokens=2, top_k=5, count=500) -> None:
    """Temperature 1, `count` draws of some tokens of the target's own `top_k` likeliest: chi-square against its own
    chances of each, where the 99.9% point is not passed.
    """
    warp, generator = Warp(1.0, top_k=top_k), torch.Generator().manual_seed(3)
    expected = chances(lambda ids: warp(all_logits(own, longer(asked, ids))[-1]), tokens)
    decoding = Decoding(policy, Sampling(), Draw(draw), warp, tokens + 1, ())
    results = check_drawn(expected, lambda: generate(own, draft, asked, decoding, generator), count, least=5, z=3.09)
    accepted, drafted = accepted_of_drafted(results)
    assert 0 < accepted < drafted


def check_memory(llm, target, length: int = 64):
    """A dry run's bytes of the target's pass over a batch with pictures are near those of real tensors."""
    assert sum(parameter_counts(llm.config).values()) == sum(p.numel() for p in llm.parameters())
    section, config = SimpleNamespace(target=lambda model, **_: target(model)), copy.deepcopy(llm.config)
    for part in filter(None, (config, config.get_text_config(), getattr(config, "vision_config", None))):
        part._attn_implementation = "sdpa"  # as a recipe's; the target has set its own
    batch = synthetic_batch(config, 2, length)
    pixels = None if batch.pixels is None else torch.zeros(batch.pixels.shape)
    real = replace(batch._source, pixels=pixels)
    own = target(llm)
    with Live() as live:
        own.states(real, Taps(feature=True))
    counted = target_step(section, config, "float32", Taps(feature=True), 2, length)
    assert 0.8 < counted / live.most < 1.25, (counted, live.most)


def check_frozen(llm, target, batch) -> None:
    """A target's weights need no gradient, and stay what they were."""
    own = target(copy.deepcopy(llm))
    own.states(batch, Taps(feature=True))
    after = own.decoder.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in llm.state_dict().items())
    assert not any(p.requires_grad for p in own.decoder.model.parameters())


class Draft(DraftVocabulary):
    """A draft of these ids of a vocabulary."""

    def __init__(self, ids, vocab_size):
        super().__init__()
        self.score_ids(32, vocab_size, ids)


def check_goal_scores(target, rows: int, monkeypatch) -> None:
    """Scores of a draft's ids in parts, with ids that never come in several, and parts of which it has no id."""
    monkeypatch.setattr(draft_vocabulary, "ROWS", rows)
    assert {number // 7 for number in target.decoder.banned} > {9}, "banned ids in parts beside the last"
    ids = torch.cat([torch.arange(0, 20), torch.arange(45, target.vocab_size, 2)])
    states = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    whole = target.scores(states)
    found = draft_vocabulary.GoalScores(target, Draft(ids, target.vocab_size))(states, sums=True)
    torch.testing.assert_close(found.scores, whole[:, ids], rtol=0, atol=1e-6)
    assert torch.equal(found.known, torch.isin(whole.argmax(-1), ids)) and 0 < found.known.sum() < 50
    torch.testing.assert_close(found.log_sum, whole.logsumexp(-1))
