"""Medusa heads of image generators and of language models: which token each level speaks of, and files."""

import json

import pytest
import torch
from decodings import greedy
from dflash_tiny import rows_of
from draftsmith.core.errors import Refused, UserError
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Static
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.draft_vocabulary import DraftVocabulary, likeliest_ids
from draftsmith.models.drafters.medusa import (
    MedusaConfig,
    MedusaHead,
    MedusaImageTraining,
    MedusaLoss,
    MedusaProposal,
    MedusaShape,
    MedusaTraining,
)
from draftsmith.models.losses import divergence
from draftsmith.models.targets.base import Taps
from fails import fails_with
from family_checks import longer
from heads_tiny import case_for, config_of, tables
from tensors import close, unchanged
from tiny import llava
from tiny import request as spoken_to
from tiny import target as language
from torch import nn
from torch.nn import functional as F
from visual_tiny import MEDUSA, code_batch, llamagen, request, step_of, target, trained, true_features


def setting(condition="text", *, num_heads=3, num_layers=1, seed=0):
    """A target, heads with some weight in them, and a batch with an unconditional row and a filler."""
    model = llamagen(condition, seed)
    codes = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(seed))
    real = torch.tensor([True, True, False])
    batch = code_batch(model, codes, uncond=torch.tensor([False, True, False]), real=real)
    head = MedusaConfig(kind="medusa", num_heads=num_heads, num_layers=num_layers).build(target(model))
    torch.manual_seed(seed)
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.2)
    return model, head, batch


def test_a_vocabulary_of_their_own_is_the_likeliest_ids_with_the_targets_rows(tmp_path):
    """Before a step the heads say what the target's own head does; files keep ids and rows."""
    big, counts = language(llava(0)), torch.arange(64)
    config = MedusaConfig(kind="medusa", num_heads=2, draft_vocab_size=9)
    head = config.build(big, count_tokens=lambda: counts)
    assert head.draft_ids.tolist() == likeliest_ids(counts, 9, big.scores(big.embedding[:1])[0].isneginf()).tolist()
    features = torch.randn(3, 32)
    scores = head.draft_scores(head(features)[1], big.scores, big.embedding.dtype)
    close(scores[:, head.draft_ids], big.scores(features)[:, head.draft_ids], 1e-5)
    assert scores.isneginf().sum() == 3 * (64 - 9) and set(dict(head.named_parameters())) > {"lm_head.weight"}
    nn.init.normal_(head.lm_head.weight)
    config.save(head, tmp_path, config.manifest(big, TargetIdentity({})))
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 9
    read = config.load(tmp_path, big)
    assert torch.equal(read.draft_ids, head.draft_ids) and torch.equal(read.lm_head.weight, head.lm_head.weight)
    fails_with(r"lm_head", MedusaConfig(kind="medusa", num_heads=2).load, tmp_path, big)
    whole, part = (c.empty(big.shape) for c in (MedusaConfig(kind="medusa", num_heads=2), config))
    assert sum(p.numel() for p in part.parameters()) - sum(p.numel() for p in whole.parameters()) == 9 * 32
    fails_with("draft_vocab_size", config.check_settings, draws_images=True, error=Refused)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_fresh_heads_say_what_the_targets_own_head_does(num_layers):
    model = llamagen()
    head = MedusaConfig(kind="medusa", num_heads=4, num_layers=num_layers).build(target(model))
    features = torch.randn(2, 3, 32)
    assert torch.equal(head(features), features.expand(4, -1, -1, -1))
    head(features).sum().backward()
    assert all(weight.grad.any() for weight in head.parameters()), "zero weights learn all the same"


def test_a_block_is_a_residual_with_silu():
    _, head, _ = setting(num_layers=2)
    x = torch.randn(5, 32)
    for level in range(3):
        one, two = head.heads[level]
        y = x + F.silu(x @ one.linear.weight.T + one.linear.bias)
        close(head(x)[level], y + F.silu(y @ two.linear.weight.T + two.linear.bias), 1e-6)


def features_by_hand(model, batch, row):
    """[n,D]: entry j is the state whose own head scores code j."""
    side = int(batch.uncond[row])
    states = true_features(model, batch.conditions[row], 2, batch.codes[row].tolist())[side]
    return states[model.config.num_condition_tokens - 1 : -1]


@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("condition", ["text", "class"])
def test_the_loss_by_hand(kind, condition):
    """Level i of state j against code j + i + 1, or the distribution there; level i has i places fewer."""
    model, head, batch = setting(condition)
    training = MedusaImageTraining(head, target(model), MedusaLoss(token_divergence=kind, decay=0.5))
    result = step_of(training, target(model), batch)
    total, ranks, first = 0.0, [], 0.0
    for row in (0, 1):
        states, codes = features_by_hand(model, batch, row), batch.codes[row]
        for level in range(3):
            for place in range(16 - 1 - level):
                scores = model.output(head(states[place])[level])
                there = model.output(states[place + level + 1])
                wanted = codes[place + level + 1]
                far = divergence("kl", there[None], scores[None])[0]
                loss = F.cross_entropy(scores, wanted) if kind == "ce" else far
                total = total + 0.5**level * loss
                if level == 0:
                    first += loss
                    ranks.append(int((scores > scores[there.argmax()]).sum()))
    close(result.loss_sum, total, 1e-3)
    close(result.metrics["token_loss"], first, 1e-3)
    assert int(result.num_tokens) == 2 * 15 == batch.num_supervised == len(ranks)
    assert int(result.metrics["top1"]) == ranks.count(0)
    assert int(result.metrics["top3"]) == sum(rank < 3 for rank in ranks) > 0


class Shifted(DraftVocabulary):
    """Answers level i with the states i + `by` places on."""

    def __init__(self, by: int, levels: int = 3):
        super().__init__()
        self.score_ids(32, 64, None)
        self.by, self.levels, self.unused = by, levels, nn.Parameter(torch.zeros(()))

    def forward(self, features):
        return torch.stack([features.roll(-level - self.by, dims=1) for level in range(self.levels)])


def test_a_perfect_first_level_hits_one_time_less_than_an_answer_has_tokens():
    """Over language `top1` is divided by the supervised tokens, as all sums are: n - 1 of n at best."""
    made_for = tables()
    batch, states = case_for(config_of(kind="eagle"), made_for, everything=True)
    result = MedusaTraining(Shifted(1), made_for, MedusaLoss())(batch, states)
    mask = batch.loss_mask
    assert int(result.num_tokens) == int(mask[:, 1:].sum()) == batch.num_supervised
    assert int(result.metrics["top1"]) == int((mask[:, 1:-1] & mask[:, 2:]).sum()) < int(result.num_tokens)


def test_states_one_place_on_are_right_and_others_are_not():
    model, _, batch = setting()
    losses = []
    for by in (0, 1, 2):
        training = MedusaImageTraining(Shifted(by), target(model), MedusaLoss(token_divergence="kl"))
        result = step_of(training, target(model), batch)
        losses.append(float(result.loss_sum / result.num_tokens))
        if by == 1:
            assert int(result.metrics["top1"]) == int(result.num_tokens)
    assert losses[1] < 1e-6 < 0.1 < min(losses[0], losses[2])


def test_images_shorter_than_the_levels():
    model, head, batch = setting(num_heads=20)
    result = step_of(MedusaImageTraining(head, target(model), MedusaLoss()), target(model), batch)
    short = setting(num_heads=15)
    same = MedusaImageTraining(short[1], target(model), MedusaLoss())
    short[1].load_state_dict({k: v for k, v in head.state_dict().items() if k in short[1].state_dict()})
    assert torch.equal(result.loss_sum, step_of(same, target(model), batch).loss_sum)


def test_only_the_heads_are_trained():
    model, head, batch = setting()
    with unchanged(model):
        training = MedusaImageTraining(head, target(model), MedusaLoss()).train()
        step_of(training, target(model), batch).loss_sum.backward()
        assert all(weight.grad.any() and weight.grad.isfinite().all() for weight in head.parameters())
        assert all(weight.grad is None for weight in model.parameters())
        assert {name for name, _ in training.parts()["heads"]} == set(head.state_dict())
        assert set(training.state_dict()) == {f"head.{name}" for name in head.state_dict()}
        _, losses = trained(target(model), MEDUSA, steps=20)
    assert losses[-1] < 0.7 * losses[0]


def test_levels_are_numbered_from_the_token_behind_the_last_committed():
    """Guidance ends after token 5: which numbers each level is scored under, over two cycles."""
    model = llamagen()
    generator, asked = target(model, 3.0, 4), []

    def guided(feature, steps):
        asked.append(list(steps))
        return generator.guided(feature, steps)

    head = MedusaHead(MedusaShape(32, 3, 1), 40)
    proposal = MedusaProposal(head, guided)
    _, step = generator.prefill(request(model), Taps(feature=True), capacity=9)
    proposal.start(request(model), step, Warp(), capacity=9)
    proposal.begin(4)
    first = proposal.root()
    # Fresh heads repeat the target's own scores of the last prompt place.
    close(first, step.logits[0].softmax(-1), 1e-6)
    assert torch.equal(proposal.expand([-1, -1], torch.tensor([1, 2])), proposal._levels[[1, 1]])
    assert torch.equal(proposal.expand([1, 0, 1], torch.tensor([1, 2, 3])), proposal._levels[[2, 2, 2]])
    features = torch.randn(2, 3, 32)

    class Verified:
        tokens, path, bonus = (1, 2), (0, 1), 3
        step = type("Step", (), {"feature": features})

    proposal.accept(Verified)
    second = proposal.root()
    assert asked == [[1, 2, 3], [4, 5, 6]]
    close(second, generator.guided(features[:, -1:], [4])[0].softmax(-1), 1e-6)


def test_heads_travel(tmp_path):
    model, head, _ = setting(num_layers=2)
    MEDUSA.save(head, tmp_path, {"target": "tiny"})
    assert json.loads((tmp_path / "config.json").read_text())["num_heads"] == 3
    assert json.loads((tmp_path / "draftsmith.json").read_text()) == {"target": "tiny"}
    config = MedusaConfig(kind="medusa", num_heads=3, num_layers=2)
    back = config.load(tmp_path, target(model))
    assert all(torch.equal(weight, back.state_dict()[name]) for name, weight in head.state_dict().items())
    assert config.load(tmp_path, target(model), dtype=torch.bfloat16).heads[0][0].linear.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("changes", "dim", "problem"), [
    ({"num_heads": 5}, 32, "heads.3.0.linear.weight"),
    ({"num_heads": 2}, 32, "heads.2.0.linear.weight"),
    ({"num_layers": 2}, 32, "heads.0.1.linear.weight"),
    ({}, 64, "heads.0.0.linear.weight"),
])  # fmt: skip
def test_heads_of_another_shape_are_refused_by_name(tmp_path, changes, dim, problem):
    MEDUSA.save(setting()[1], tmp_path, {})
    other = target(llamagen("text", dim=dim))
    with pytest.raises(UserError) as caught:
        MedusaConfig(kind="medusa", **{"num_heads": 3, **changes}).load(tmp_path, other)
    assert problem in str(caught.value) and str(tmp_path) in str(caught.value)


# ---- language models


def spoken(*rows: str):
    """A target, a batch as `rows_of` makes it, and the target's states of it."""
    big = language(llava(0))
    batch, _ = rows_of(big, *rows)
    return big, batch, big.states(batch, Taps(feature=True))


def loud(levels: int, num_layers: int = 1, ids=None):
    torch.manual_seed(3)
    head = MedusaHead(MedusaShape(32, levels, num_layers), 64, ids)
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.3)
    return head


@pytest.mark.parametrize("kind", ["ce", "kl", "tvd", "lk_hybrid"])
@pytest.mark.parametrize("size", [None, 25])
def test_the_loss_over_language_by_hand(kind, size):
    """Row by row, level by level and token by token; the second row answers twice, and no level reaches across. With a
    vocabulary of their own the target's distribution is the one over it, and what lies outside counts nothing.
    """
    big, batch, states = spoken("tttaaaaa", "taaattaa", "ttttttta")
    own_ids = None if size is None else torch.arange(5, 5 + 2 * size, 2)
    ids = torch.arange(64) if own_ids is None else own_ids
    head = loud(3, ids=own_ids)
    config = MedusaConfig(kind="medusa", num_heads=3, loss={"token_divergence": kind, "decay": 0.5})
    training = config.training_objective(head, big)
    training.lm.chunk = 2
    actual = training(batch, states)
    actual.loss_sum.backward()
    total, first, ranks, count, left_out = 0.0, 0.0, [], 0, 0
    for row, marks in enumerate(batch.sample_ids):
        for index in range(len(marks) - 1):
            if marks[index + 1] != "a":
                continue  # no cycle's root stands here
            count += 1
            for level in range(3):
                goal = index + 2 + level
                if not set(marks[index + 1 : goal + 1]) <= {"a"} or goal >= len(marks):
                    continue
                outputs = head(states.feature[row, index])[level]
                scores = big.scores(outputs) if size is None else head.lm_head(outputs)
                there = big.scores(states.feature[row, goal - 1])
                word, best = batch.ids[row, goal], there.argmax()
                there, entry = there[ids], {int(token): place for place, token in enumerate(ids)}
                counts = int(word if kind == "ce" else best) in entry
                if kind == "ce":
                    own = F.cross_entropy(scores, torch.tensor(entry[int(word)])) if counts else torch.zeros(())
                else:
                    own = divergence(kind, there[None], scores[None])[0] * counts
                total = total + 0.5**level * own
                left_out += not counts
                if level == 0:
                    first += float(own.detach())
                    ranks.append(int((scores > scores[entry[int(best)]]).sum()) if int(best) in entry else 99)
    expected = torch.autograd.grad(total, [*head.parameters()])
    torch.testing.assert_close(actual.loss_sum, total.detach(), rtol=1e-5, atol=1e-4)
    for weight, gradient in zip(head.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-5)
    assert int(actual.num_tokens) == batch.num_supervised == count == 11
    assert (left_out > 0) == (size is not None)
    assert int(actual.metrics["top1"]) == ranks.count(0) and int(actual.metrics["top3"]) == sum(r < 3 for r in ranks)
    assert float(actual.metrics["token_loss"]) == pytest.approx(first, rel=1e-5)


def test_batches_without_a_level_make_the_same_calls():
    """Ranks whose answers are shorter than the levels, or that supervise nothing, still touch every weight."""
    for rows in (("ta",), ("tt",), ("ttttaaaa", "ttaa")):
        big, batch, states = spoken(*rows)
        head = loud(5)
        called: list[int] = []
        for block in head.heads:
            block.register_forward_hook(lambda *_, called=called: called.append(1))
        loss = MedusaConfig(kind="medusa").training_objective(head, big)(batch, states)
        loss.loss_sum.backward()
        assert len(called) == 5 and all(weight.grad is not None for weight in head.parameters())
        assert (float(loss.loss_sum.detach()) > 0) == (rows[0] == "ttttaaaa") and loss.metrics.keys() == {
            "top1", "top3", "token_loss"
        }  # fmt: skip


class Foresees(DraftVocabulary):
    """In place of heads: level i answers with the target's true feature i + 1 - `late` tokens on, found by decoding
    it.
    """

    def __init__(self, big, asked, answer, levels, late=0):
        super().__init__()
        self.score_ids(32, 64, None)
        self.shape, self.unused, self.late = MedusaShape(32, levels, 1), nn.Parameter(torch.zeros(())), late
        _, step = big.prefill(longer(asked, answer), Taps(feature=True), capacity=1)
        self.truth = step.feature[0]

    def forward(self, features):
        away = (self.truth - features[0, 0]).abs().amax(-1)
        index = int(away.argmin())
        assert away[index] < 1e-4, "the proposal shows a feature of the answer"
        first = index + 1 - self.late
        rows = [min(first + level, len(self.truth) - 1) for level in range(self.shape.num_heads)]
        return self.truth[rows][:, None, None]


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("policy", [Chain(4), Static([(0,), (0, 0), (1,), (0, 0, 0)])], ids=["chain", "static"])
def test_heads_that_are_right_are_accepted_at_every_level(images, policy):
    """Anything misplaced by one would show in the first cycle; heads that answer one token late are not accepted."""
    big, asked = language(llava(1)), spoken_to(5, images)
    answer = generate(big, None, asked, greedy(Chain(1))).tokens
    oracle = Foresees(big, asked, answer, 4)
    result = generate(big, MEDUSA.drafter(oracle, big), asked, greedy(policy, 16))
    assert result.tokens == answer[:16]
    assert all(cycle.num_accepted == cycle.num_drafted for cycle in result.cycles)
    assert max(cycle.num_drafted for cycle in result.cycles) == (4 if policy.name == "chain" else 3)
    late = generate(big, MEDUSA.drafter(Foresees(big, asked, answer, 4, late=1), big), asked, greedy(policy, 16))
    assert late.tokens == answer[:16] and any(cycle.num_accepted < cycle.num_drafted for cycle in late.cycles)
