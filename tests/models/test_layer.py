"""The decoder layer that heads are made of: its attention's kernels and its rotations."""

from dataclasses import replace

import pytest
import torch
from draftsmith.models.decoding.head_layer import (
    HeadAttention,
    RMSNorm,
    Rotary,
    rotate_halves,
    rotate_pairs,
    rotation,
    turning,
)
from draftsmith.models.layer import LayerShape
from heads_tiny import text_config
from torch.nn import functional as F
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3


@pytest.mark.parametrize(("device", "masked", "grouped"), [
    ("cpu", True, True), ("cpu", False, True), ("meta", True, False), ("meta", False, True),
])  # fmt: skip
def test_grouped_heads_beside_a_mask_are_folded_off_the_cpu(device, masked, grouped, monkeypatch):
    """CUDA's fast kernels do not take both: it would keep [H,N,K] in float32. Keys are never repeated."""
    with torch.device(device):
        attention = HeadAttention(LayerShape(8, 16, 16, num_heads=4, num_kv_heads=2, norm_eps=1e-5))
        states, rope = torch.zeros(1, 3, 16), torch.zeros(3, 2, 2)
        mask = torch.ones(3, 3, dtype=torch.bool) if masked else None
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append((a, k)) or attend(*a, **k))
    assert attention(states, rope, mask, None).shape == (1, 3, 16)
    (((query, key, _), asked),) = calls
    assert asked.get("enable_gqa", False) == grouped and key.shape[1] == 2
    assert query.shape[1:3] == ((4, 3) if grouped else (2, 6))


@pytest.mark.parametrize("width", [16, 96, 300, 2048])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_one_call_of_the_norm_has_the_bits_of_its_operations(width, scale):
    """In float32 on a CPU, values and gradients; goldens and greedy identity with transformers rest on it."""
    norm, generator = RMSNorm(width, 1e-6), torch.Generator().manual_seed(0)
    norm.weight.data.normal_(generator=generator)
    states = (torch.randn(5, width, generator=generator) * scale).requires_grad_()
    expected = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight
    found = [(one, *torch.autograd.grad(one.sin().sum(), [states, norm.weight])) for one in (norm(states), expected)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("rope", ["half", "grid"])
@pytest.mark.parametrize("count", [3, 7])
def test_a_rotation_laid_out_once_turns_the_last_places_as_each_layer_did(rope, count):
    shape = replace(LayerShape(8, 32, 8, 2, 2, 1e-6), rope=rope)
    generator = torch.Generator().manual_seed(0)
    heads, table = torch.randn(2, count, 2, 16, generator=generator), torch.randn(2, 7, 8, 2, generator=generator)
    turn = rotate_pairs if rope == "grid" else rotate_halves
    assert torch.equal(turning(shape, table)(heads), turn(heads, table[:, 7 - count :]))


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_from_a_table_has_the_bits_of_one_that_is_computed(scaling, dtype):
    rotary = Rotary(replace(LayerShape(8, 32, 8, 2, 2, 1e-6), rope_scaling=scaling))
    positions = torch.tensor([[0, 3, 3, 511], [17, 18, 200, 19]])
    heads = torch.randn(2, 4, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = rotation(rotary.table(512, positions.device), positions)(heads)
    assert turned.dtype == dtype and torch.equal(turned, rotate_halves(heads, rotary(positions)))
    assert Rotary(replace(rotary.shape, rope="grid", grid=4, rope_scaling=None)).table(8, positions.device) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 8, 16, 48, 64])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_pairs_are_turned_alike_with_gradients_and_without(num_heads, width, dtype):
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, 7, num_heads + 2, width, generator=generator).to(dtype)
    # As a joined projection cuts them.
    heads, rope = both[:, :, :num_heads], torch.randn(7, width // 2, 2, generator=generator)
    expected = rotate_pairs(heads, rope)
    with torch.inference_mode():
        assert torch.equal(rotate_pairs(heads, rope), expected)


def test_rotations_of_three_rows():
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 50, (3, 2, 5), generator=generator)
    for interleaved, library in ((False, qwen2_5.Qwen2_5_VLRotaryEmbedding), (True, qwen3.Qwen3VLTextRotaryEmbedding)):
        shape = LayerShape(8, 32, 8, 2, 2, 1e-6, mrope_section=(4, 2, 2), mrope_interleaved=interleaved)
        text = text_config(hidden=32, heads=2)
        text.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        text.head_dim = 16
        expected = library(text)(torch.zeros(1), positions)
        actual = Rotary(shape)(positions)
        for part in (0, 1):
            whole = expected[part]
            if whole.dim() == 4:  # Qwen2.5-VL takes its blocks of the three later
                blocks = whole.split([4, 2, 2] * 2, dim=-1)
                whole = torch.cat([block[n % 3] for n, block in enumerate(blocks)], -1)
            torch.testing.assert_close(actual[..., part], whole[..., :8], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("turn", [rotate_halves, rotate_pairs])
def test_queries_and_keys_turned_at_once_are_those_turned_apart(turn):
    """In every bit, gradients too: a layer turns them in one call."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 5, heads, 8, generator=generator).requires_grad_() for heads in (4, 2)]
    rope = torch.randn(2, 5, 4, 2, generator=generator)
    apart = [turn(part, rope) for part in states]
    once = turn(torch.cat(states, dim=2), rope).split([4, 2], dim=2)
    assert all(torch.equal(a, b) for a, b in zip(apart, once, strict=True))
    gradients = [torch.autograd.grad(sum((p * p).sum() for p in parts), states) for parts in (apart, once)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
