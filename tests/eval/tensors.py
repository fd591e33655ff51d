"""How tests compare tensors and weights, and weights of which none is without effect."""

from contextlib import contextmanager

import torch
from draftsmith.models.drafters.base import TargetIdentity


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def close_by_largest(found, expected, tolerance=1e-6):
    """To this share of the largest value."""
    scale = expected.abs().max().clamp(min=1e-30)
    torch.testing.assert_close(found / scale, expected / scale, atol=tolerance, rtol=tolerance)


def same_weights(one, other) -> bool:
    """Whether two modules, or states of modules, have the same names and the same bits."""
    one, other = (each if isinstance(each, dict) else each.state_dict() for each in (one, other))
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@contextmanager
def unchanged(module):
    """The weights of a module are afterwards what they were."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    yield
    assert same_weights(before, module)


def loud(module, norms: float | None = None):
    """Random weights of a size that lets everything through; `norms`: the noise on what has one dimension."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
        elif norms is not None:
            parameter.data += norms * torch.randn_like(parameter)
    return module


def learn(training, batch, states, *, steps: int, lr: float, mean: bool = False) -> list[float]:
    """Adam on everything of a training that learns, from the same batch; its losses.

    Args:
        states: None where the training asks for none.
        mean: steps on the loss of a token, not on the batch's sum.
    """
    optimizer = torch.optim.Adam([p for named in training.parts().values() for _, p in named], lr=lr)
    losses = []
    for _ in range(steps):
        step = training(batch) if states is None else training(batch, states)
        loss = step.loss_sum / step.num_tokens if mean else step.loss_sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def gradients_of(loss, head) -> dict[str, torch.Tensor]:
    """By name; the head has none afterwards."""
    head.zero_grad()
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    return found


def check_gradients(found, total, head) -> None:
    """The gradients of a sum that was written out, none of which is zero."""
    for name, gradient in zip(found, torch.autograd.grad(total, [*head.parameters()], allow_unused=True), strict=True):
        torch.testing.assert_close(
            found[name], gradient, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert gradient.any(), name


def check_travels(config, head, target, folder, kind: str = "llava", **more) -> None:
    """A head is read as it was saved, in the precision that is asked for, copied whole, and counted without weights."""
    identity = TargetIdentity({"kind": kind, "path": "some/model"}, "abc")
    config.save(head, folder, config.manifest(target, identity, **more))
    assert same_weights(config.load(folder, target, identity=identity), head)
    assert config.load(folder, target, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16
    assert same_weights(config.copy_of(head, head.state_dict()), head)
    assert config.count(target.shape) == {"trainable": sum(p.numel() for p in head.parameters())}
