"""What one optimizer step computes, and what stops it."""

import copy
import math
import shutil

import pytest
import torch
from draftsmith.core.batch import StepLoss
from draftsmith.core.errors import TrainingError, UserError
from draftsmith.models.parts import PARTS
from draftsmith.models.targets.llava.model import LlavaTraining
from draftsmith.models.training import LoraConfig, add_adapters, merge_adapters
from draftsmith.trainers.run.context import EngineConfig, check_engine
from draftsmith.trainers.run.stopping import Stop
from draftsmith.trainers.train import loop
from draftsmith.trainers.train.engine import Engine
from draftsmith.trainers.train.fit import OptimConfig, rate_multiplier
from draftsmith.trainers.train.validate import target_choice, validate
from ranks_run import run_ranks
from tiny import llava
from torch import nn
from torch.nn import functional
from training import BATCH, Samples, engine, loader, module, run

PLAIN = OptimConfig(lr=1e-2, schedule="constant")


def test_the_loss_is_a_mean_over_supervised_tokens_of_the_whole_batch(tmp_path):
    """However the batch is cut into micro-batches; a mean of their means would differ."""
    results = [
        run(tmp_path / str(micro), steps=3, micro=micro, model=module(noisy=False), optim=PLAIN) for micro in (4, 2, 1)
    ]
    reference = module(noisy=False)
    (step,) = loader(Samples(), 1, micro=BATCH)
    (batch,) = step.micro
    expected = reference(batch)
    mean = expected.loss_sum.item() / expected.num_tokens.item()
    for losses, weights, _ in results:
        assert math.isclose(losses[1], mean, rel_tol=1e-5)
        assert losses == pytest.approx(results[0][0], rel=1e-3)
        for name, value in results[0][1].items():
            if "k_proj.bias" not in name:  # its gradient is zero, and Adam makes steps of rounding
                assert (weights[name] - value).abs().mean() < 1e-4, name
    cut = [reference(b) for b in next(iter(loader(Samples(), 1, micro=1))).micro]
    assert abs(sum(c.loss_sum.item() / c.num_tokens.item() for c in cut) / len(cut) - mean) > 1e-3


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_is_adamw_with_values_clipped(zero, tmp_path):
    """Of the whole batch's gradient, not of each micro-batch's. A large eps keeps Adam from dividing its size away."""
    optim, bound = {"lr": 1e-2, "schedule": "constant", "eps": 0.02}, 5e-3
    reference = module(noisy=False)
    (step,) = loader(Samples(), 1, micro=BATCH)
    loss = reference(step.micro[0])
    (loss.loss_sum / loss.num_tokens).backward()
    sizes = torch.cat([p.grad.abs().flatten() for p in reference.parameters() if p.grad is not None])
    assert 0.01 < float((sizes > bound).float().mean()) < 0.99, "some are clipped and some are not"
    torch.nn.utils.clip_grad_value_(reference.parameters(), bound)
    parameters = [p for p in reference.parameters() if p.grad is not None]
    torch.optim.AdamW(parameters, lr=1e-2, eps=0.02, weight_decay=0.0).step()
    results = {}
    for name, more in {"clipped": {"clip_value": bound}, "free": {}}.items():
        results[name] = run(
            tmp_path / name, steps=1, zero=zero, micro=2, model=module(noisy=False), optim=OptimConfig(**optim, **more)
        )[1]
    for name, value in reference.named_parameters():
        torch.testing.assert_close(results["clipped"][name], value, atol=2e-6, rtol=0)
    assert max(float((results["free"][n] - v.detach()).abs().max()) for n, v in reference.named_parameters()) > 1e-4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "cosine", "warmup_steps": 2}, [0, 0.5, 1, 0.853553, 0.5, 0.146447, 0]),
        ({"schedule": "linear", "warmup_ratio": 1 / 3}, [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "constant"}, [1] * 7),
        ({"schedule": "cosine", "final_ratio": 0.1}, [1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1]),
    ],
)
def test_schedules(settings, expected):
    multiplier = rate_multiplier(OptimConfig(lr=1.0, **settings), 6)
    assert [multiplier(s) for s in range(7)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_loss_that_is_not_finite_stops_before_the_update(zero, tmp_path):
    """With the records named. ZeRO-0 would write it into the weights, the others would skip without a word."""
    broken = 4
    order = [name for s in loader(Samples(), 3) for b in s.micro for name in b.sample_ids]
    before = order.index(f"record-{broken}") // BATCH
    model = module(noisy=False)
    with pytest.raises(TrainingError, match=f"step {before}: a loss or gradient is not finite") as error:
        run(tmp_path, steps=3, zero=zero, samples=Samples(broken=broken), model=model, optim=PLAIN)
    assert f"record-{broken}" in error.value.where
    if zero < 3:
        assert all(p.isfinite().all() for p in model.parameters())


def test_a_gradient_alone_that_is_not_finite_stops_too(tmp_path):
    class Explodes(LlavaTraining):
        def forward(self, batch, states=None, target_choice=None):
            loss = super().forward(batch)
            # sqrt at zero: a finite value with an infinite slope.
            return StepLoss(loss.loss_sum + (loss.loss_sum * 0).sqrt(), loss.num_tokens, loss.metrics)

    model = Explodes(llava(0, width=16, layers=1), ("projector",), gradient_checkpointing=False)
    with pytest.raises(TrainingError, match="gradient is not finite"):
        run(tmp_path, steps=2, model=model, optim=PLAIN)
    assert all(p.isfinite().all() for p in model.parameters())


class Silent(Samples):
    """The samples of `steps` have nothing to learn from (None: of all)."""

    def __init__(self, *steps: int):
        super().__init__()
        batches = [[name for b in s.micro for name in b.sample_ids] for s in loader(Samples(), 3)]
        self.silent = {name for step in steps or range(3) for name in batches[step]}

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if sample.sample_id in self.silent:
            sample.loss_mask[:] = [False] * len(sample.ids)
        return sample


def test_batches_without_supervised_tokens_alone_are_an_error(tmp_path):
    """A run of them names its records, and so few steps that they make no run are an error at the end."""
    with pytest.raises(TrainingError, match=rf"steps 0 to {loop.MOST_SILENT - 1}: no supervised token") as error:
        run(tmp_path / "long", steps=9, samples=Silent())
    assert "record-" in error.value.where
    with pytest.raises(TrainingError, match="no supervised token in any of the 2 steps"):
        run(tmp_path / "short", steps=2, samples=Silent())


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_batch_without_supervised_tokens_changes_nothing_and_is_counted(zero, tmp_path):
    """Under decay and momentum an update by no gradient would move the weights; a resumed run counts it as well."""
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2)
    losses, after, told = run(tmp_path / "a", steps=3, zero=zero, samples=Silent(1), optim=optim, every=1, keep=9)
    assert losses.keys() == {1, 3} and told == ["1 of 3 steps had no supervised token, and changed nothing"]
    for step in (2, 1):
        shutil.rmtree(tmp_path / "a" / f"step-{step + 1:08d}", ignore_errors=True)
        again = run(tmp_path / "a", steps=3, zero=zero, samples=Silent(1), optim=optim)
        assert again[0] == {3: losses[3]} and again[2][-1] == told[0]
        assert all(torch.equal(again[1][name], value) for name, value in after.items())
    half = run(tmp_path / "b", steps=2, zero=zero, samples=Silent(1), optim=optim)[1]
    one = run(tmp_path / "c", steps=1, zero=zero, samples=Silent(1), optim=optim)[1]
    assert all(torch.equal(half[name], value) for name, value in one.items())


def test_an_unexpected_skipped_step_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "num_skipped", property(lambda self: self._engine.global_steps))
    with pytest.raises(TrainingError, match="the engine skipped the update"):
        run(tmp_path, steps=2)


def test_bf16_learns(tmp_path):
    losses, _, _ = run(
        tmp_path, steps=30, precision="bf16", model=module(noisy=False), optim=OptimConfig(lr=1e-2, warmup_steps=3)
    )
    assert losses[30] < 0.7 * losses[1]


def test_fp16_is_refused_where_it_does_not_run():
    if torch.cuda.is_available():
        check_engine(EngineConfig(precision="fp16"))
    else:
        with pytest.raises(UserError, match="fp16 does not run on a CPU"):
            check_engine(EngineConfig(precision="fp16"))


@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_parts_do_not_change(zero, tmp_path):
    model = module(parts=("projector",), noisy=False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    _, after, _ = run(tmp_path, steps=3, zero=zero, model=model, optim=OptimConfig(lr=1e-2, weight_decay=0.1))
    changed = {name.split(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"multi_modal_projector"}


@pytest.mark.parametrize("zero", [0, 3])
def test_torchs_linear_layer_is_replaced_in_an_engines_steps_alone(zero, tmp_path):
    """ZeRO-3's own stays otherwise: a decoding that is timed after the training would be slower for it."""
    plain, within, between = torch._C._nn.linear, [], []
    model = module(noisy=False, gradient_checkpointing=True)
    layer = model.model.model.language_model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: within.append(functional.linear))
    run(tmp_path, steps=1, zero=zero, model=model, log=lambda step: between.append(functional.linear))
    assert functional.linear is plain and between == [plain]
    assert len(within) == 4  # two micro-batches, each forward and again in the backward
    assert all((function is plain) == (zero == 0) for function in within)


def test_lora_trains_adapters_and_merges_them(tmp_path):
    llava_model = llava(0, width=16, layers=1)
    before = copy.deepcopy(llava_model)
    model = LlavaTraining(
        llava_model, ("projector", "language_model"), gradient_checkpointing=False, lora=LoraConfig(rank=2, alpha=8)
    )
    names = [name for name, _ in model.parts()["language_model"]]
    assert names and all("lora_" in name for name in names)
    run(tmp_path, steps=4, model=model, optim=OptimConfig(lr=5e-2))
    (step,) = loader(Samples(), 1, micro=BATCH)
    with torch.no_grad():
        adapted = model.eval().hidden_states(step.micro[0])
    assert merge_adapters(llava_model) < 1e-5
    assert llava_model.state_dict().keys() == before.state_dict().keys()
    with torch.no_grad():
        merged = model.hidden_states(step.micro[0])
    assert torch.allclose(adapted, merged, atol=1e-5)
    changed = {n for n, p in llava_model.named_parameters() if not torch.equal(p, dict(before.named_parameters())[n])}
    assert any("q_proj" in n for n in changed)
    assert not any(part in n for n in changed for part in ("embed_tokens", "lm_head", "vision_tower", "norm"))


def test_merging_says_how_far_rounding_moves_the_weights():
    """By as much as the merged forward is from that of the adapters, over inputs of no direction."""
    layers = nn.ModuleList(nn.Linear(64, 48, bias=False) for _ in range(3)).to(torch.bfloat16)
    add_adapters(layers, LoraConfig(rank=4, layers=("0", "2")))
    draw = torch.Generator().manual_seed(0)
    for name, value in layers.named_parameters():
        value.data = torch.randn(value.shape, generator=draw).to(value) * (0.02 if "lora_" in name else 0.1)
    exact, inputs = copy.deepcopy(layers).double(), torch.randn(4000, 64, generator=draw).double()
    share = merge_adapters(layers)
    merged = layers.double()
    moved = sum((exact[n](inputs) - merged[n](inputs)).square().sum() for n in (0, 2))
    added = sum((exact[n](inputs) - exact[n].get_base_layer()(inputs)).square().sum() for n in (0, 2))
    assert share == pytest.approx((moved / added).sqrt().item(), rel=0.05) and share > 0.02
    assert merge_adapters(layers) == 0.0, "there is none left"


def test_validation_counts_agreement_with_the_target():
    """Against the model's own forward; a copy of the target agrees everywhere, and nothing of training moves."""
    target = llava(0, width=16, layers=1).eval()
    model = module(noisy=False)
    built = engine(model, PLAIN, steps=1, micro=2, accumulation=2)
    steps = loader(Samples(), 3)
    before = torch.get_rng_state()
    same = validate(built, steps, target, Stop())
    assert same["val_agreement"] == 1.0
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    other = llava(5, width=16, layers=1).eval()
    result = validate(built, steps, other, Stop())
    assert result["val_loss"] == pytest.approx(same["val_loss"])
    agreed = tokens = loss = 0.0
    for step in steps:
        for batch in step.micro:
            with torch.no_grad():
                logits = target.lm_head(model.hidden_states(batch))[:, :-1][batch.loss_mask[:, 1:]]
            labels = batch.ids[:, 1:][batch.loss_mask[:, 1:]]
            agreed += float((logits.argmax(-1) == target_choice(other, batch)).sum())
            loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            tokens += len(labels)
    assert result["val_agreement"] == pytest.approx(agreed / tokens)
    assert 0 < result["val_agreement"] < 0.9
    assert result["val_loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert "val_agreement" not in validate(built, steps, None, Stop())


def test_only_one_wait_in_a_step(tmp_path, monkeypatch):
    """One all-reduce for each optimizer step: next step's tokens, the stop flag, and what was finite."""
    calls = []
    before = loop._all_reduce
    monkeypatch.setattr(loop, "_all_reduce", lambda *a: calls.append(len(a)) or before(*a))
    run(tmp_path, steps=5)
    assert len(calls) == 1 + 5  # and one before the first step


@pytest.mark.parametrize(("zero", "precision"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (2, "bf16")])
def test_before_a_broken_step_the_weights_are_those_of_the_step_before(zero, precision, tmp_path):
    """Bit for bit, wherever the engine keeps them."""
    order = [name for s in loader(Samples(), 3) for b in s.micro for name in b.sample_ids]
    broken = int(order[2 * BATCH].removeprefix("record-"))  # the first record of step 2 (from 0), not earlier
    assert broken % 3, "a record with a picture"
    settings = {"zero": zero, "precision": precision, "optim": PLAIN}
    kept: list[dict] = []

    class Watched(LlavaTraining):
        built = None

        def forward(self, batch, states=None, target_choice=None):
            if any(f"record-{broken}" == name for name in batch.sample_ids):
                kept.append({name: p.detach().clone() for name, p in self.named_parameters()})
            return super().forward(batch)

    model = Watched(llava(0, width=16, layers=1).train(), PARTS, gradient_checkpointing=False)
    with pytest.raises(TrainingError, match="step 2: a loss or gradient is not finite"):
        run(tmp_path / "a", steps=3, samples=Samples(broken=broken), model=model, **settings)
    assert len(kept) == 1
    after = {name: p.detach() for name, p in model.named_parameters()}
    whole = [name for name, value in after.items() if value.numel()]
    assert all(torch.equal(after[name], kept[0][name]) for name in whole)
    if zero == 3:  # each rank holds its part outside the parameter
        parts = torch.cat([p.ds_tensor.flatten().float() for p in model.parameters()])
        assert parts.isfinite().all()
    else:
        assert len(whole) == len(after)
        start = dict(llava(0, width=16, layers=1).named_parameters())
        assert any(not torch.equal(after[f"llava.{name}"].float(), value) for name, value in start.items())


class Huge(nn.Module):
    """A gradient that is finite in each micro-batch, and infinite as their sum."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, batch, states):
        tokens = sum(b.num_supervised for b in next(iter(loader(Samples(), 1))).micro)
        value = (self.weight[0] * 1e20) * (2e18 * tokens)
        return StepLoss(value, batch.loss_mask[:, 1:].sum())

    def parts(self):
        return {"projector": [("weight", self.weight)]}


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_that_overflow_when_they_are_added_stop_too(zero, tmp_path):
    """ZeRO-0 would write them into the weights and say nothing until the next step, if there is one."""
    model = Huge()
    with pytest.raises(TrainingError, match="step 0: a loss or gradient is not finite"):
        run(tmp_path, steps=1, zero=zero, model=model, optim=PLAIN)
    assert torch.equal(model.weight, torch.zeros(4))


@pytest.mark.parametrize("zero", [2])
def test_each_part_moves_by_its_own_rate(zero, tmp_path):
    """Adam's first step is the rate in size, whatever the gradient."""
    optim = OptimConfig(lr=1e-3, lr_by_part={"projector": 4e-3}, schedule="constant", eps=1e-30)
    before = {name: p.detach() for name, p in module(noisy=False).named_parameters()}
    _, after, _ = run(tmp_path, steps=1, zero=zero, model=module(noisy=False), optim=optim)
    for part, rate in (("multi_modal_projector", 4e-3), ("language_model", 1e-3), ("vision_tower", 1e-3)):
        moves = [float((after[n] - before[n]).abs().max()) for n in before if part in n and n.endswith("proj.weight")]
        moves += [float((after[n] - before[n]).abs().max()) for n in before if part in n and "linear_" in n]
        assert moves and max(moves) == pytest.approx(rate, rel=1e-3), part


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_loaded_weights_are_trained_in_training_mode(zero, tmp_path):
    """`from_pretrained` gives evaluation mode: dropout would be off until the first validation turned it on."""
    first, _, _ = run(tmp_path / "a", steps=2, zero=zero, model=module())
    second, _, _ = run(tmp_path / "b", steps=2, zero=zero, model=module().eval())
    quiet, _, _ = run(tmp_path / "c", steps=2, zero=zero, model=module(noisy=False))
    assert first == second
    assert all(first[step] != quiet[step] for step in first)


def test_gradient_checkpointing_computes_layers_again(tmp_path):
    """Also for loaded weights; transformers leaves it out, silently, in evaluation mode."""
    counts = {}
    for checkpointing in (False, True):
        model = module(noisy=False, gradient_checkpointing=checkpointing).eval()
        calls = []
        model.model.model.language_model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        run(tmp_path / str(checkpointing), steps=2, model=model, optim=PLAIN)
        counts[checkpointing] = len(calls)
    assert counts == {False: 2 * 2, True: 2 * 2 * 2}  # steps times micro-batches, twice


TWO_RANKS = """
import torch
from pathlib import Path
from draftsmith.core import ranks
from draftsmith.trainers.train.engine import init_distributed
from draftsmith.trainers.train.fit import OptimConfig
from training import module, run

init_distributed()
for zero in (0, 2, 3):
    free = OptimConfig(lr=0.1, eps=1.0)
    losses, weights, _ = run(Path("none"), steps=3, zero=zero, micro=1, model=module(noisy=False), optim=free)
    if ranks.is_main():
        torch.save((losses, weights), f"zero{zero}.pt")
"""


# So large an eps moves weights by their gradients: a small one would hide a wrong factor.
FREE = OptimConfig(lr=0.1, eps=1.0)


@pytest.fixture(scope="module")
def by_hand():
    """Losses and weights of three steps by torch alone: whole batches, each divided by its own supervised tokens."""
    model = module(noisy=False)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1.0, weight_decay=0.0)
    losses, tokens = {}, []
    # The cosine from 0.1 to 0 in three steps.
    for number, (step, rate) in enumerate(zip(loader(Samples(), 3, micro=BATCH), (0.1, 0.075, 0.025), strict=True), 1):
        optimizer.param_groups[0]["lr"] = rate
        loss = model(step.micro[0])
        mean = loss.loss_sum / loss.num_tokens
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[number] = mean.item()
        tokens.append(int(loss.num_tokens))
    assert len(set(tokens)) == 3 and tokens[2] < 0.6 * tokens[0], "guards these tests: other steps have other sizes"
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro", [4, 2, 1])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_three_steps_are_those_of_a_loop_by_hand(zero, micro, by_hand, tmp_path):
    """Each step's own tokens, rate and gradients, whatever the accumulation; the last step has half a batch."""
    losses, expected = by_hand
    found, actual, _ = run(tmp_path, steps=3, zero=zero, micro=micro, model=module(noisy=False), optim=FREE)
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=0)


def test_three_steps_by_two_ranks_are_those_of_a_loop_by_hand(by_hand, tmp_path):
    losses, expected = by_hand
    for code, text in run_ranks(2, TWO_RANKS, cwd=tmp_path):
        assert code == 0, text[-3000:]
    for zero in (0, 2, 3):
        found, actual = torch.load(tmp_path / f"zero{zero}.pt", weights_only=True)
        assert found == pytest.approx(losses, rel=1e-5), zero
        for name, value in expected.items():
            assert torch.allclose(actual[name], value, atol=1e-5), (zero, name)
