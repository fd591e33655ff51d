"""Distillation's objective: chunks change nothing but memory, kept scores stand for the target, the target stays."""

import copy
from dataclasses import replace

import pytest
import torch
from draftsmith.core.batch import IMAGE, TEXT, Batch
from draftsmith.core.states import TargetStates, TopLogProbs
from draftsmith.models.drafters.distillation import DistillObjective, DistillTraining, Teacher, keep_scores, with_rest
from draftsmith.models.losses import ChunkedHead, divergence, divergence_of_logs, log_probs
from draftsmith.models.training import LoraConfig
from live_tensors import Watched
from tensors import learn, unchanged
from tiny import IMAGE_ID, PATCHES, TOKENS, VOCAB, llava, near
from torch.nn import functional as F

NAMES = ["soft_ce", "kl", "reverse_kl", "jsd", "tvd", "tvd_plus", "lk_alpha", "lk_hybrid"]
PARTS = ["projector", "language_model"]


def banned() -> torch.Tensor:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[TOKENS:], mask[IMAGE_ID] = True, True
    return mask


def batch(rows: int = 3, length: int = 20, supervised: int = 8) -> Batch:
    """The first row without a picture, the last one shorter than the others."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(6, 58, (rows, length), generator=generator)
    modality = torch.full((rows, length), TEXT, dtype=torch.int8)
    ids[1:, 2 : 2 + PATCHES], modality[1:, 2 : 2 + PATCHES] = IMAGE_ID, IMAGE
    attention = torch.ones(rows, length, dtype=torch.bool)
    attention[-1, -3:] = False
    loss_mask = torch.zeros(rows, length, dtype=torch.bool)
    loss_mask[:, length - supervised :] = True
    positions = torch.arange(length).expand(1, rows, length)
    pixels = torch.randn(rows - 1, 3, 16, 16, generator=generator)
    names = tuple(f"r{n}" for n in range(rows))
    return Batch(ids, attention, loss_mask & attention, modality, positions, pixels, names)


def training(objective: DistillObjective, *, target=None, draft=None, **settings) -> DistillTraining:
    draft = llava(1, width=16, layers=1) if draft is None else draft
    target = llava(0) if target is None else target
    module = DistillTraining(
        draft, settings.pop("parts", PARTS), objective=objective, teacher=Teacher(target), banned=banned(),
        gradient_checkpointing=settings.pop("gradient_checkpointing", False), **settings,
    )  # fmt: skip
    return module.train()


def objective(name: str = "lk_hybrid", **settings) -> DistillObjective:
    return DistillObjective(kind="distill", divergence=name, **settings)


def scores_of(model, asked: Batch) -> torch.Tensor:
    """[S,V] by transformers' own forward, minus infinity where no token may come."""
    logits = model(
        input_ids=asked.ids, attention_mask=asked.attention_mask.long(), position_ids=asked.positions[0],
        pixel_values=asked.pixels,
    ).logits  # fmt: skip
    return logits[:, :-1][asked.loss_mask[:, 1:]].masked_fill(banned(), float("-inf"))


def step(module: DistillTraining, asked: Batch):
    """One training forward as the loop calls it: the target's states, or what the batch brings of it."""
    return module(asked, asked.states if module.teacher is None else module.teacher.states(asked))


def gradients(module: DistillTraining, asked) -> tuple[float, dict[str, torch.Tensor]]:
    module.zero_grad()
    loss = step(module, asked)
    loss.loss_sum.backward()
    return loss.loss_sum.item(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_divergence_of_the_two_models_scores(name):
    """Values and gradients against both models' own forwards and one plain backward."""
    asked, draft, target = batch(), llava(1, width=16, layers=1), llava(0)
    plain = copy.deepcopy(draft)
    plain.model.vision_tower.requires_grad_(False)
    p, q = scores_of(target, asked).detach(), scores_of(plain, asked)
    wanted = divergence(name, p, q).sum()
    wanted.backward()
    module = training(objective(name, chunk=5), target=target, draft=draft)
    loss, actual = gradients(module, asked)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    expected = {n: w.grad for n, w in plain.named_parameters() if w.grad is not None}
    assert {n.removeprefix("llava.") for n in actual} == set(expected)
    for parameter, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[parameter.removeprefix("llava.")], atol=2e-5, rtol=1e-4)


def test_metrics():
    """Sums over the supervised tokens, of which 21 are left behind the padding."""
    draft = llava(1, width=16, layers=1)
    target = near(draft)
    asked = batch()
    p, q = scores_of(target, asked), scores_of(draft, asked)
    asked.ids[0, -1] = q[7].argmax()  # one is right: the last of the first row, after which nothing reads it
    labels = asked.ids[:, 1:][asked.loss_mask[:, 1:]]
    module = training(objective(), target=target, draft=draft)
    metrics = step(module, asked).metrics
    assert 0 < metrics["accuracy"] == (q.argmax(-1) == labels).sum()
    assert 0 < metrics["agreement"] == (q.argmax(-1) == p.argmax(-1)).sum() < 21
    alpha = torch.minimum(p.softmax(-1), q.softmax(-1)).sum()
    assert metrics["alpha"].item() == pytest.approx(alpha.item(), rel=1e-5)
    assert step(module, asked).num_tokens == len(labels) == 21


@pytest.mark.parametrize("settings", [{"temperature": 2.0}, {"cross_entropy": 0.3}, {"beta": 0.1}, {"eta": 1.0}])
def test_settings(settings):
    asked, draft, target = batch(), llava(1, width=16, layers=1), llava(0)
    name = "jsd" if "beta" in settings else "lk_hybrid"
    module = training(objective(name, **settings), target=target, draft=draft)
    p, q = scores_of(target, asked), scores_of(draft, asked)
    heat = settings.get("temperature", 1.0)
    form = {key: value for key, value in settings.items() if key in ("beta", "eta")}
    wanted = divergence(name, p / heat, q / heat, **form).sum()
    if share := settings.get("cross_entropy"):
        own = F.cross_entropy(q, asked.ids[:, 1:][asked.loss_mask[:, 1:]], reduction="sum")
        wanted = (1 - share) * wanted + share * own
    assert step(module, asked).loss_sum.item() == pytest.approx(wanted.item(), rel=1e-5)
    default = training(objective(name), target=target, draft=draft)
    assert step(module, asked).loss_sum.item() != pytest.approx(step(default, asked).loss_sum.item(), rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_change_nothing(name):
    asked, draft, target = batch(), llava(1, width=16, layers=1).double(), llava(0).double()
    asked = replace(asked, pixels=asked.pixels.double())
    result = [
        gradients(training(objective(name, chunk=chunk), target=target, draft=copy.deepcopy(draft)), asked)
        for chunk in (1000, 21, 8, 1)
    ]
    for loss, grads in result[1:]:
        assert loss == pytest.approx(result[0][0], rel=1e-12)
        for parameter, gradient in grads.items():
            torch.testing.assert_close(gradient, result[0][1][parameter], atol=1e-11, rtol=1e-9)


def test_gradient_checkpointing_and_adapters_go_with_chunks():
    asked = batch()
    plain = gradients(training(objective(chunk=4)), asked)
    saving = gradients(training(objective(chunk=4), gradient_checkpointing=True), asked)
    assert plain[0] == pytest.approx(saving[0], rel=1e-6)
    for parameter, gradient in plain[1].items():
        torch.testing.assert_close(saving[1][parameter], gradient, atol=1e-6, rtol=1e-5)
    _, adapted = gradients(training(objective(chunk=4), lora=LoraConfig(rank=2)), asked)
    assert adapted and all("lora" in n or "projector" in n for n in adapted)
    _, projector = gradients(training(objective(chunk=4), parts=["projector"]), asked)
    assert projector and all("projector" in n for n in projector)


def test_ids_without_a_token_have_no_say():
    """Whatever the rows 60 to 63 and the placeholder's row of either head hold, loss and gradients stay."""
    asked, draft, target = batch(), llava(1, width=16, layers=1), llava(0)
    loss, grads = gradients(training(objective(), target=target, draft=draft), asked)
    other_draft, other_target = copy.deepcopy(draft), copy.deepcopy(target)
    for model in (other_draft, other_target):
        model.lm_head.weight.data[banned()] = 50.0
    again, other = gradients(training(objective(), target=other_target, draft=other_draft), asked)
    assert again == loss
    for parameter, gradient in grads.items():
        torch.testing.assert_close(other[parameter], gradient, atol=0, rtol=0)
    assert not grads["llava.lm_head.weight"][banned()].any()
    assert grads["llava.lm_head.weight"][~banned()].abs().sum(-1).all()


def test_a_micro_batch_without_supervised_tokens():
    asked = batch()
    module = training(objective())
    loss = step(module, replace(asked, loss_mask=torch.zeros_like(asked.loss_mask)))
    loss.loss_sum.backward()
    assert loss.loss_sum == 0 and loss.num_tokens == 0 and set(loss.metrics) == {"accuracy", "agreement", "alpha"}
    touched = [p for p in module.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in touched)


def test_half_precision_gradients_are_near():
    asked, draft, target = batch(), llava(1, width=16, layers=1), llava(0)
    _, wide = gradients(training(objective("kl"), target=target, draft=copy.deepcopy(draft)), asked)
    module = training(objective("kl", chunk=4), target=target, draft=copy.deepcopy(draft).bfloat16())
    loss = step(module, asked)
    loss.loss_sum.backward()
    assert loss.loss_sum.dtype == torch.float32
    for name in ("llava.lm_head.weight", "llava.model.multi_modal_projector.linear_1.weight"):
        narrow = dict(module.named_parameters())[name].grad
        assert narrow.dtype == torch.bfloat16
        cosine = F.cosine_similarity(narrow.float().flatten(), wide[name].flatten(), dim=0)
        assert cosine > 0.98


def test_the_target_is_no_part_of_the_module_and_stays():
    target = llava(0).train()
    module = training(objective("kl"), target=target)
    ours = {id(p) for p in module.parameters()}
    assert not any(id(p) in ours or p.requires_grad for p in target.parameters())
    assert not any("target" in name for name in module.state_dict())
    learns = {id(p) for named in module.parts().values() for _, p in named}
    assert learns == {id(p) for p in module.parameters() if p.requires_grad}
    assert not target.training
    module.train()
    assert not target.training
    asked = batch()
    with unchanged(target):
        losses = learn(module, asked, module.teacher.states(asked), steps=15, lr=1e-2)
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.grad is None for p in target.parameters())


def test_evaluation_is_cross_entropy():
    asked = batch()
    module = training(objective("kl", temperature=3.0)).eval()
    scores = module.model(
        input_ids=asked.ids, attention_mask=asked.attention_mask.long(), pixel_values=asked.pixels
    ).logits[:, :-1][asked.loss_mask[:, 1:]]
    labels = asked.ids[:, 1:][asked.loss_mask[:, 1:]]
    result = module(asked, None, scores.argmax(-1))
    assert result.loss_sum.item() == pytest.approx(F.cross_entropy(scores, labels, reduction="sum").item(), rel=1e-5)
    assert result.metrics["agreement"] == len(labels)


def largest(head: torch.nn.Module, hidden: torch.Tensor, compare) -> int:
    sizes = []
    with Watched(lambda _, made: sizes.extend(part.numel() for part in made)):
        head(hidden, compare)[0].backward()
    return max(sizes)


def test_no_tensor_grows_with_the_supervised_tokens():
    """Beyond states [S,D], which are the model's own, a chunk of scores [C,V] is the largest thing that is made."""
    vocab, width, chunk = 900, 4, 16
    linear, target = torch.nn.Linear(width, vocab, bias=False), torch.randn(vocab, width)

    def run(count: int, chunk: int) -> int:
        states = torch.randn(count, width)

        def compare(piece, scores):
            value = divergence("lk_hybrid", states[piece] @ target.T, scores).sum()
            return value, torch.zeros(3)

        return largest(ChunkedHead(linear, chunk), torch.randn(count, width, requires_grad=True), compare)

    assert run(64, chunk) == run(512, chunk) == chunk * vocab
    assert run(512, 1000) == 512 * vocab


@pytest.mark.parametrize("name", NAMES)
def test_kept_scores_are_a_lower_bound_that_reaches_the_whole(name):
    """Merging outcomes only makes two distributions more alike; with all tokens but one kept nothing is merged."""
    generator = torch.Generator().manual_seed(2)
    p, q = (3 * torch.randn(9, 24, generator=generator, dtype=torch.float64) for _ in range(2))
    p[:, 20:], q[:, 20:] = float("-inf"), float("-inf")
    q.requires_grad_()
    whole = divergence(name, p, q)
    (wanted,) = torch.autograd.grad(whole.sum(), q)
    values, gradient = [], None
    for count in (1, 4, 12, 19):
        kept = keep_scores(p, count)
        assert (kept.log_probs.diff(dim=-1) <= 0).all()
        log_p = torch.cat([kept.log_probs, kept.log_rest[:, None]], dim=-1)
        torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(9, dtype=torch.float64))
        result = divergence_of_logs(name, log_p, with_rest(log_probs(q), kept.ids))
        values.append(result.detach())
        (gradient,) = torch.autograd.grad(result.sum(), q)
        assert gradient.isfinite().all()
    torch.testing.assert_close(values[-1], whole.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=1e-9)
    if name not in ("soft_ce", "lk_hybrid"):  # an entropy is in the one, the other's weights change with alpha
        for fewer, more in zip(values, [*values[1:], whole.detach()], strict=True):
            assert (fewer <= more + 1e-12).all()
    assert (values[0] - whole.detach()).abs().max() > 1e-3


def kept_batch(asked: Batch, target, count: int) -> Batch:
    kept = keep_scores(scores_of(target, asked).detach(), count)
    scores = TopLogProbs(kept.ids, kept.log_probs.float(), kept.log_rest.float())
    return replace(asked, states=TargetStates(top_log_probs=scores))


@pytest.mark.parametrize("name", ["kl", "tvd_plus", "lk_hybrid"])
def test_training_from_kept_scores(name):
    """With all tokens but one it is training with the target itself; with few it is near, and needs no target."""
    asked, draft, target = batch(), llava(1, width=16, layers=1), llava(0)
    online = gradients(training(objective(name, chunk=6), target=target, draft=copy.deepcopy(draft)), asked)

    def kept(count: int):
        module = DistillTraining(
            copy.deepcopy(draft), PARTS, objective=objective(name, chunk=6, probabilities="kept"), teacher=None,
            banned=banned(), gradient_checkpointing=False,
        )  # fmt: skip
        return gradients(module.train(), kept_batch(asked, target, count).to("cpu"))

    all_but_one, few = kept(TOKENS - 2), kept(8)
    assert all_but_one[0] == pytest.approx(online[0], rel=1e-5)
    for parameter, gradient in online[1].items():
        torch.testing.assert_close(all_but_one[1][parameter], gradient, atol=2e-5, rtol=1e-4)
    near_by, exact = (g["llava.lm_head.weight"].flatten() for _, g in (few, online))
    cosine = F.cosine_similarity(near_by, exact, dim=0)
    assert 0.7 < cosine < 0.99999


def test_scored_batches_count_as_their_batch():
    scored = kept_batch(batch(), llava(0), 4)
    assert scored.num_supervised == 21 and scored.sample_ids == ("r0", "r1", "r2")
