"""Attention of long rows in the training-time test, against the readable form; forward, gradients and memory."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.models import training_passes
from draftsmith.models.fast import pass_attention
from draftsmith.models.training_passes import TrainingPasses
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

PASSES = 4


def drawn(count, dtype=torch.float64, heads=4, groups=2, rows=2, width=8, scale=1.0):
    """Queries, keys and values of all passes, as a layer makes them: heads moved before inputs."""
    generator = torch.Generator().manual_seed(count)
    shapes = [(rows, count, number, width) for _ in range(PASSES) for number in (heads, groups, groups)]
    states = [scale * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [state.transpose(1, 2).requires_grad_() for state in states]


def results(passes, states):
    """Outputs of every pass, and gradients of a random linear function of them."""
    outputs = [passes.attend(*states[3 * step : 3 * step + 3]) for step in range(PASSES)]
    generator = torch.Generator().manual_seed(7)
    loss = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in outputs)
    return outputs, torch.autograd.grad(loss, states, allow_unused=True)


def compared(ours, dense, tolerance):
    for mine, its in zip((*ours[0], *ours[1]), (*dense[0], *dense[1]), strict=True):
        torch.testing.assert_close(mine, its, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def long_rows(monkeypatch):
    """All rows count as long."""
    monkeypatch.setattr(training_passes, "SHORT", 0)


def both(make, states, run=None):
    """`results` of the fast form and of the readable one."""
    run = run or results
    fast = make()
    ours = run(fast, states)
    assert fast.long is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_FAST", "0")
        readable = make()
        theirs = run(readable, states)
    assert readable.long is None
    return ours, theirs


packings = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def numbers(count):
    """Three samples in the first row, one of them of one input; two in the other."""
    entry = torch.arange(count)
    return torch.stack([(entry >= count // 3).int() + (entry >= count // 3 + 1), (entry >= count // 2).int()]).long()


@packings
@pytest.mark.parametrize("kernel", ["cpu", "plain"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("count", [1, 2, PASSES, 33])
def test_it_is_one_softmax_over_all_passes(count, groups, kernel, packed, monkeypatch):
    monkeypatch.setattr(pass_attention, "kernel_of", lambda *_, **__: kernel)
    states, segments = drawn(count, groups=groups), numbers(count) if packed else None
    compared(*both(lambda: TrainingPasses(PASSES, segments), states), 1e-12)


@packings
def test_in_float32_it_is_so_to_the_last_bits(packed):
    states, segments = drawn(200, torch.float32), numbers(200) if packed else None
    (ours, gradients), (readable, theirs) = both(lambda: TrainingPasses(PASSES, segments), states)
    assert max(float((a - b).detach().abs().max()) for a, b in zip(ours, readable, strict=True)) < 1e-6
    for mine, its in zip(gradients, theirs, strict=True):
        assert float((mine - its).norm() / its.norm()) < 1e-6


@pytest.mark.parametrize("fast", ["0", "1"])
def test_bfloat16_stays_as_near_as_its_own_rounding(fast, monkeypatch):
    narrow = [state.detach().to(torch.bfloat16).requires_grad_() for state in drawn(64, scale=1.5)]
    exact = results(TrainingPasses(PASSES), [state.detach().double().requires_grad_() for state in narrow])
    monkeypatch.setenv("DRAFTSMITH_FAST", fast)
    for rounded, whole in zip(results(TrainingPasses(PASSES), narrow)[0], exact[0], strict=True):
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.double(), whole, atol=2**-7, rtol=2**-7)


def test_large_scores_neither_overflow_nor_vanish():
    compared(*both(lambda: TrainingPasses(PASSES, numbers(33)), drawn(33, scale=30.0)), 1e-9)


@pytest.mark.parametrize("fast", ["0", "1"])
def test_a_packed_row_is_its_samples_alone(fast, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_FAST", fast)
    states = [state[:1].detach() for state in drawn(20)]
    together = results(TrainingPasses(PASSES, numbers(20)[:1]), [s.clone().requires_grad_() for s in states])[0]
    for number, (start, end) in enumerate([(0, 6), (6, 7), (7, 20)]):
        assert numbers(20)[0, start:end].unique().tolist() == [number]
        alone = [state[:, :, start:end].clone().requires_grad_() for state in states]
        for whole, part in zip(together, results(TrainingPasses(PASSES), alone)[0], strict=True):
            torch.testing.assert_close(whole[:, :, start:end], part)


def kept_bytes(passes, count):
    """Bytes of the tensors that a backward pass would need, each storage once."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held, outputs = TrainingPasses(passes), []  # outputs stay, or a storage's place is used again
    states = drawn(count, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for step in range(passes):
            outputs.append(held.attend(*states[3 * step : 3 * step + 3]))
    keep(held.long.keys.true)
    keep(held.long.keys.held)
    return sum(storages.values())


def test_what_is_kept_grows_linearly_with_passes_and_inputs():
    one, *more = (kept_bytes(passes, 96) for passes in range(1, PASSES + 1))
    steps = [later - earlier for earlier, later in zip((one, *more), more, strict=False)]
    # Keys of later passes stand in up to PASSES - 2 columns more than there are inputs.
    assert max(steps) <= 1.02 * min(steps) and max(steps) <= 1.1 * one
    assert kept_bytes(PASSES, 192) == pytest.approx(2 * kept_bytes(PASSES, 96), rel=0.02)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flash", torch.bfloat16), ("efficient", torch.float32), ("efficient", torch.bfloat16)]
)
def test_cudas_kernels_take_what_they_are_given(kernel, dtype):
    """Names, arguments and shapes, as torch's own rules for tensors without values know them. Nothing is computed."""
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(2, 33, heads, 64, dtype=dtype, device="cuda").transpose(1, 2) for heads in (4, 2, 2))
        out, lse, rest = pass_attention.attend(q, k, v, kernel)
        assert out.shape == q.shape and lse.shape == (2, 4, 33) and lse.dtype == torch.float32
        gradients = pass_attention.attend_backward(out, q, k, v, out, lse, kernel, rest)
    for state, gradient in zip((q, k, v), gradients, strict=True):
        assert (gradient.shape, gradient.dtype, gradient.device.type) == (state.shape, dtype, "cuda")


def test_an_expanded_gradient_is_taken():
    def sums(passes, states):
        outputs = [passes.attend(*states[3 * step : 3 * step + 3]) for step in range(2)]
        return outputs, torch.autograd.grad(sum(out.sum() for out in outputs), states[:6])

    compared(*both(lambda: TrainingPasses(PASSES), drawn(9), sums), 1e-12)


def test_a_cpu_has_its_kernel_and_other_devices_products():
    """A dry run counts on the meta device what a fused kernel keeps."""
    q, k, v = (state[:, :, :5] for state in drawn(5)[:3])
    assert pass_attention.kernel_of(q, k, v) == "cpu"
    assert pass_attention.kernel_of(*(state.to("meta") for state in (q, k, v))) == "cpu"
    other = SimpleNamespace(device=torch.device("xpu"), dtype=q.dtype)
    assert pass_attention.kernel_of(other, k, v) == "plain"


@pytest.mark.parametrize("fast", ["0", "1"])
def test_a_first_pass_asks_for_the_fused_kernel(fast, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_FAST", fast)
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or attend(*a, **k))
    results(TrainingPasses(PASSES), drawn(8))
    assert [call.get("attn_mask") for call in calls] == [None] and calls[0]["is_causal"]


@pytest.mark.parametrize("fast", ["0", "1"])
@pytest.mark.parametrize("left_out", [1, 2, 3, 9, 18])
def test_later_passes_may_leave_the_first_inputs_out(left_out, fast, monkeypatch):
    """As attention of all inputs, at those whose chains begin with inputs that were run."""
    states, read = drawn(20), ([], [])
    for skipped, outputs in zip((0, left_out), read, strict=True):
        passes = TrainingPasses(PASSES, skipped=skipped)
        for step in range(PASSES):
            given = states[3 * step : 3 * step + 3]
            out = passes.attend(*(given if step == 0 else [state[:, :, skipped:] for state in given]))
            outputs.append(out[:, :, left_out - skipped + step :])
        monkeypatch.setenv("DRAFTSMITH_FAST", fast)
    for whole, part in zip(*read, strict=True):
        torch.testing.assert_close(whole, part, atol=1e-12, rtol=1e-12)
    whole, part = (torch.autograd.grad(sum(out.sin().sum() for out in outputs), states) for outputs in read)
    for mine, its in zip(whole, part, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-12, rtol=1e-12)


def test_short_rows_of_few_scores_run_the_readable_form(monkeypatch):
    monkeypatch.setattr(training_passes, "SHORT", 9)
    for rows, count, long in ((2, 9, False), (2, 10, True), (2, 9, True)):
        passes = TrainingPasses(PASSES)
        results(passes, drawn(count, rows=rows))
        assert (passes.long is not None) == long
        if count == 10:
            monkeypatch.setattr(training_passes, "FEW_SCORES", 2 * 4 * 9 * 9 - 1)
