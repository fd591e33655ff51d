"""LM heads a chunk of positions at a time, against all positions at once; losses, sums and gradients."""

import pytest
import torch
from draftsmith.models.losses import ChunkedHead, FrozenHead
from torch import nn

WIDTH, VOCAB, ADDED = 4, 7, 3


def results(kind, added, count, chunk, dtype):
    generator = torch.Generator().manual_seed(count)

    def drawn(*shape):
        return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    linear, more = nn.Linear(WIDTH, VOCAB, bias=False), drawn(VOCAB, ADDED) if added else None
    linear.weight = drawn(VOCAB, WIDTH)
    hidden, labels = drawn(count, WIDTH + ADDED * added), torch.arange(count) % VOCAB
    if kind == "own":
        head, learned = ChunkedHead(linear, chunk, more), [hidden, linear.weight]
    else:
        weight = linear.weight.detach().float()
        head = FrozenHead(lambda states: states.float() @ weight.T, chunk, dtype, more)
        learned = [hidden]

    def compare(piece, scores):
        assert scores.dtype == torch.promote_types(dtype, torch.float32)
        terms = nn.functional.cross_entropy(scores, labels[piece], reduction="none")
        return (terms * (1 + labels[piece])).sum(), (scores.argmax(-1) == labels[piece]).sum().float()[None]

    loss, sums = head(hidden, compare)
    assert not sums.requires_grad
    (loss / 3).backward()
    return loss.detach(), sums, [one.grad for one in learned + ([more] if added else [])]


@pytest.mark.parametrize("count", [0, 1, 8, 9])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("own", torch.float64), ("own", torch.float32), ("own", torch.bfloat16),
                        ("the target's", torch.float32), ("the target's", torch.bfloat16)],
)  # fmt: skip
def test_a_head_in_chunks_is_the_head_at_once(kind, added, count, dtype, monkeypatch):
    fast = results(kind, added, count, 3, dtype)
    monkeypatch.setenv("DRAFTSMITH_FAST", "0")
    readable = results(kind, added, count, 3, dtype)
    narrow = dtype == torch.bfloat16
    torch.testing.assert_close(
        fast, readable, atol=5e-2 if narrow else 1e-5, rtol=5e-2 if narrow else 1e-5, check_dtype=False
    )
