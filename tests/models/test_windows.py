"""A Qwen-VL's tower attends once for all windows of a length: transformers' own numbers and gradients, in few calls."""

import copy

import pytest
import tiny_qwen
import torch
from draftsmith.core.batch import IMAGE
from draftsmith.core.pictures import PatchGrid, whole_picture
from draftsmith.models.attention import as_interface
from draftsmith.models.targets.qwen import model as qwen
from draftsmith.models.targets.qwen.model import see_patches
from draftsmith.models.targets.qwen.windows import WINDOWS, attend_in_windows, use_windows
from draftsmith.models.targets.table import training_of
from tensors import close_by_largest as close
from torch.nn import functional as F

PARTS = ("vision_tower", "projector", "language_model")
KINDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
every_kind = pytest.mark.parametrize("kind", KINDS)
PICTURES = {
    "one": [PatchGrid(1, 8, 8)],
    "uneven": [PatchGrid(1, 10, 6), PatchGrid(1, 4, 14), PatchGrid(1, 10, 6)],
    "clip": [PatchGrid(3, 8, 6, seconds=0.5)],
}


@pytest.fixture
def calls(monkeypatch):
    """Lengths of the queries of each call of torch's attention without a mask."""
    seen, real = [], F.scaled_dot_product_attention

    def watched(query, *args, attn_mask=None, **named):
        if attn_mask is None and not named.get("is_causal"):
            seen.append(query.shape[2])
        return real(query, *args, attn_mask=attn_mask, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("shown", PICTURES)
@every_kind
@torch.no_grad()
def test_a_tower_runs_all_windows_of_a_length_at_once(kind, shown, calls):
    model, grids = tiny_qwen.model(kind), PICTURES[shown]
    sizes = torch.tensor([[g.frames, g.rows, g.columns] for g in grids])
    patches = torch.randn(int(sizes.prod(1).sum()), tiny_qwen.NUMBERS, generator=torch.Generator().manual_seed(1))
    expected = model.model.visual(patches, grid_thw=sizes, return_dict=True)
    one_by_one = len(calls)
    use_windows(model.config.vision_config)
    calls.clear()
    found = see_patches(model, patches, [whole_picture(grid, IMAGE) for grid in grids])
    close(found.features, expected.pooler_output)
    for ours, theirs in zip(found.deepstack, expected.get("deepstack_features") or (), strict=True):
        close(ours, theirs)
    # A picture, or the frames of a clip, are as long as each other; a window of 2.5 is cut at the edges.
    lengths = {"one": 1, "uneven": 2, "clip": 1}[shown]
    windows = {"one": 1, "uneven": 3, "clip": 2}[shown] if kind == "qwen2_5_vl" else lengths
    assert len(calls) == lengths + windows < one_by_one + (shown == "one")


@torch.no_grad()
def test_calls_for_a_picture_of_448_pixels(calls):
    """16 windows of 64 patches in 28 of Qwen2.5-VL's 32 layers: 452 calls one by one, 32 so."""
    model = tiny_qwen.model("qwen2_5_vl")
    assert model.config.vision_config.window_size == 16
    counts = {}
    for name in ("sdpa", "windows"):
        if name == "windows":
            use_windows(model.config.vision_config)
        calls.clear()
        see_patches(model, torch.randn(32 * 32, tiny_qwen.NUMBERS), [whole_picture(PatchGrid(1, 32, 32), IMAGE)])
        counts[name] = len(calls)
    # Two layers here, the second of them over the whole picture: 64 windows of 16 patches, and 1.
    assert counts == {"sdpa": 65, "windows": 2}


def trained(monkeypatch, model, batch, *, ours, checkpointing):
    """Loss, and gradient by parameter, of a training step; the tower as it is, or transformers' own."""
    module = training_of(model, PARTS, gradient_checkpointing=checkpointing).train()
    vision = module.model.config.vision_config
    assert vision._attn_implementation == WINDOWS
    with monkeypatch.context() as patched:
        if not ours:
            vision._attn_implementation = "sdpa"
            patched.setattr(qwen, "tower_inputs", lambda tower, sizes, device: {"grid_thw": sizes})
        loss = module(batch).loss_sum
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@every_kind
def test_training_has_transformers_loss_and_gradients(monkeypatch, calls, kind, checkpointing):
    """Pictures of several sizes, a clip and a row of text, against transformers' own tower, window by window."""
    model = tiny_qwen.model(kind)
    rows = [(((10, 6), (4, 14)), (3, 4, 6), 0), (((10, 6),), None, 1), ((), None, 2)]
    batch = tiny_qwen.batch_of(*(tiny_qwen.request(kind, images, clip, seed=seed) for images, clip, seed in rows))
    results, counts = {}, {}
    for ours in (True, False):
        calls.clear()
        results[ours] = trained(monkeypatch, copy.deepcopy(model), batch, ours=ours, checkpointing=checkpointing)
        counts[ours] = len(calls)
    (loss, gradients), (expected, theirs) = results[True], results[False]
    close(loss, expected)
    assert gradients.keys() == theirs.keys() and len(gradients) > 30
    for name, gradient in gradients.items():
        close(gradient, theirs[name], 1e-5)
    # Two layers of the tower, three lengths; the language model's attention has a mask.
    assert counts == {True: 6, False: {"qwen2_5_vl": 28}.get(kind, 12)}


def test_windows_out_of_order_go_back_to_their_places():
    """Lengths that alternate, one of them empty: each patch attends to its own window, and gradients flow back."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 17, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    ends = torch.tensor([0, 4, 6, 6, 10, 12, 17], dtype=torch.int32)
    found, none = as_interface(attend_in_windows, "cu_seq_lens_q")(None, q, k, v, None, cu_seq_lens_q=ends)
    each = [
        F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b])
        for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False)
    ]
    expected = torch.cat(each, dim=2).transpose(1, 2)
    assert none is None
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected))
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other)
