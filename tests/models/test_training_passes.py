"""Training-time test's attention, against one softmax over the keys of all passes; forward, gradients and memory."""

from types import SimpleNamespace

import pytest
import torch
from dense_passes import Dense
from draftsmith.models import causal_attention, training_passes
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


def attend_by(kernel, monkeypatch):
    """A kernel for any number of inputs; None: all scores of these few at once."""
    if kernel is not None:
        monkeypatch.setattr(training_passes, "kernel_of", lambda *_, **__: kernel)
        monkeypatch.setattr(training_passes, "_SCORES", 0)


packings = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def numbers(count):
    """Three samples in the first row, one of them of one input; two in the other."""
    entry = torch.arange(count)
    return torch.stack([(entry >= count // 3).int() + (entry >= count // 3 + 1), (entry >= count // 2).int()]).long()


@packings
@pytest.mark.parametrize("kernel", ["cpu", "plain", None])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("count", [1, 2, PASSES, 33])
def test_it_is_one_softmax_over_all_passes(count, groups, kernel, packed, monkeypatch):
    attend_by(kernel, monkeypatch)
    states, segments = drawn(count, groups=groups), numbers(count) if packed else None
    compared(results(TrainingPasses(PASSES, segments), states), results(Dense(PASSES, segments), states), 1e-12)


@packings
@pytest.mark.parametrize("few", [True, False])
def test_in_float32_it_is_so_to_the_last_bits(packed, few, monkeypatch):
    monkeypatch.setattr(training_passes, "_SCORES", 1 << 20 if few else 0)
    states, segments = drawn(200, torch.float32), numbers(200) if packed else None
    (ours, gradients), (dense, theirs) = (
        results(TrainingPasses(PASSES, segments), states),
        results(Dense(PASSES, segments), states),
    )
    assert max(float((a - b).detach().abs().max()) for a, b in zip(ours, dense, strict=True)) < 1e-6
    for mine, its in zip(gradients, theirs, strict=True):
        assert float((mine - its).norm() / its.norm()) < 1e-6


def test_bfloat16_stays_as_near_as_its_own_rounding():
    wide = drawn(64, scale=1.5)
    narrow = [state.detach().to(torch.bfloat16).requires_grad_() for state in wide]
    exact = results(Dense(PASSES), [state.detach().double().requires_grad_() for state in narrow])
    for rounded, whole in zip(results(TrainingPasses(PASSES), narrow)[0], exact[0], strict=True):
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.double(), whole, atol=2**-7, rtol=2**-7)


def test_large_scores_neither_overflow_nor_vanish():
    states = drawn(33, scale=30.0)
    compared(results(TrainingPasses(PASSES, numbers(33)), states), results(Dense(PASSES, numbers(33)), states), 1e-9)


def test_a_packed_row_is_its_samples_alone():
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
    keep(held.keys.true)
    keep(held.keys.held)
    return sum(storages.values())


def test_what_is_kept_grows_linearly_with_passes_and_inputs(monkeypatch):
    """Beyond scores that are few."""
    monkeypatch.setattr(training_passes, "_SCORES", 0)
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
        out, lse, rest = causal_attention.attend(q, k, v, kernel)
        assert out.shape == q.shape and lse.shape == (2, 4, 33) and lse.dtype == torch.float32
        gradients = causal_attention.attend_backward(out, q, k, v, out, lse, kernel, rest)
    for state, gradient in zip((q, k, v), gradients, strict=True):
        assert (gradient.shape, gradient.dtype, gradient.device.type) == (state.shape, dtype, "cuda")


def test_an_expanded_gradient_is_taken():
    states = drawn(9)
    ours, dense = (
        torch.autograd.grad(sum(passes.attend(*states[3 * step : 3 * step + 3]).sum() for step in range(2)), states[:6])
        for passes in (TrainingPasses(PASSES), Dense(PASSES))
    )
    for mine, its in zip(ours, dense, strict=True):
        torch.testing.assert_close(mine, its)


def test_a_cpu_has_its_kernel_and_other_devices_products():
    """A dry run counts on the meta device what a fused kernel keeps."""
    q, k, v = (state[:, :, :5] for state in drawn(5)[:3])
    assert causal_attention.kernel_of(q, k, v) == "cpu"
    assert causal_attention.kernel_of(*(state.to("meta") for state in (q, k, v))) == "cpu"
    other = SimpleNamespace(device=torch.device("xpu"), dtype=q.dtype)
    assert causal_attention.kernel_of(other, k, v) == "plain"


def test_a_first_pass_asks_for_the_fused_kernel(monkeypatch):
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or attend(*a, **k))
    results(TrainingPasses(PASSES), drawn(8))
    assert [call.get("attn_mask") for call in calls] == [None] and calls[0]["is_causal"]


@pytest.mark.parametrize("kernel", ["cpu", "plain", None])
@pytest.mark.parametrize("left_out", [1, 2, 3, 9, 18])
def test_later_passes_may_leave_the_first_inputs_out(left_out, kernel, monkeypatch):
    """As dense attention of all inputs, at those whose chains begin with inputs that were run."""
    attend_by(kernel, monkeypatch)
    states = drawn(20)
    cut = [state if number < 3 else state[:, :, left_out:] for number, state in enumerate(states)]
    read = ([], [])  # of dense attention, and of ours
    for passes, given, first, outputs in (
        (Dense(PASSES), states, left_out, read[0]), (TrainingPasses(PASSES), cut, 0, read[1])
    ):  # fmt: skip
        for step in range(PASSES):
            out = passes.attend(*given[3 * step : 3 * step + 3])
            outputs.append(out[:, :, step + (first if step else left_out) :])
    for mine, its in zip(read[1], read[0], strict=True):
        torch.testing.assert_close(mine, its, atol=1e-12, rtol=1e-12)
    ours, dense = (torch.autograd.grad(sum(out.sin().sum() for out in outputs), states) for outputs in read[::-1])
    for mine, its in zip(ours, dense, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-12, rtol=1e-12)
