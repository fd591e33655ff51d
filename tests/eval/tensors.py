"""How tests compare tensors and weights, and weights of which none is without effect."""

from contextlib import contextmanager

import torch


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
