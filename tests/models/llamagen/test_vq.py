"""The VQ tokenizer: recorded numbers of the published modules, its size, and that a tiny one can be trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.models.targets.llamagen import vq
from draftsmith.models.targets.llamagen.vq import VqConfig, VqTokenizer, nearest, revive_dead_codes, unit_cells
from fails import fails_with
from pydantic import ValidationError
from torch.nn import functional as F

VECTORS = np.load(Path(__file__).parents[1] / "vectors_llamagen" / "vq.npz", allow_pickle=False)
TINY = VqConfig(
    base_channels=8, ch_mult=(1, 2), num_res_blocks=1, z_channels=8, codebook_size=32, codebook_dim=4, groups=4
)


def tensor(name: str) -> torch.Tensor:
    return torch.from_numpy(VECTORS[name])


@pytest.fixture(scope="module")
def recorded() -> VqTokenizer:
    names = {name: name for name in ("base_channels", "num_res_blocks", "z_channels", "codebook_size")}
    names |= {"codebook_dim": "codebook_embed_dim", "groups": "groupnorm_groups"}
    sizes = {ours: int(VECTORS[f"cfg/{theirs}"]) for ours, theirs in names.items()}
    config = VqConfig(ch_mult=VECTORS["cfg/ch_mult"].tolist(), **sizes)
    model = VqTokenizer(config).eval()
    weights = {n.removeprefix("weights/"): tensor(n) for n in VECTORS.files if n.startswith("weights/")}
    assert weights.keys() == model.state_dict().keys()
    model.load_state_dict(weights)
    return model


def tiny(seed: int = 0) -> VqTokenizer:
    model = VqTokenizer(TINY)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def pictures(count: int, seed: int) -> torch.Tensor:
    """[count,3,16,16]: a square of one of seven colours somewhere on white."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.full((count, 3, 16, 16), 0.9)
    colours = torch.randint(0, 7, (count,), generator=generator)
    places = torch.randint(0, 5, (count, 2), generator=generator) * 2
    for image, colour, (row, column) in zip(images, colours.tolist(), places.tolist(), strict=True):
        shade = torch.tensor([colour >> bit & 1 for bit in range(3)]) * 1.8 - 0.9
        image[:, row : row + 8, column : column + 8] = shade[:, None, None]
    return images


@torch.no_grad()
def test_encoding_gives_the_recorded_codes(recorded):
    images = tensor("image")
    torch.testing.assert_close(recorded.pre_quant(images), tensor("pre_quant"), atol=1e-4, rtol=0)
    codes = recorded.encode(images)
    assert codes.dtype == torch.int64 and torch.equal(codes, tensor("encode_indices"))


@torch.no_grad()
def test_the_codebook_is_normalised_where_the_stored_rows_are_not(recorded):
    torch.testing.assert_close(recorded.codebook, tensor("normalised_codebook"), atol=1e-6, rtol=0)
    cases = (("encode_indices", "encode_quantized", 1e-5), ("given_indices", "given_lookup", 1e-6))
    for codes, rows, tolerance in cases:
        result = recorded.codebook[tensor(codes)].transpose(1, 2).reshape(tensor(rows).shape)
        torch.testing.assert_close(result, tensor(rows), atol=tolerance, rtol=0)
    cells = recorded.pre_quant(tensor("image")).flatten(2).transpose(1, 2)
    raw = torch.cdist(cells, recorded.quantize.embedding.weight)
    assert not torch.equal(raw.argmin(-1), tensor("encode_indices")), "the vectors would not tell the two apart"


@pytest.mark.parametrize(("codes", "image"), [("encode_indices", "reconstruction"), ("given_indices", "given_decoded")])
def test_decoding_gives_the_recorded_images(recorded, codes, image):
    expected = tensor(image)
    side = expected.shape[-1] // recorded.config.factor
    torch.testing.assert_close(recorded.decode(tensor(codes), (side, side)), expected, atol=1e-4, rtol=0)


def test_forward_reconstructs_as_encode_and_decode_do(recorded):
    reconstruction, _ = recorded(tensor("image"))
    torch.testing.assert_close(reconstruction, tensor("reconstruction"), atol=1e-4, rtol=0)


def test_codes_do_not_depend_on_how_the_work_is_cut(recorded, monkeypatch):
    monkeypatch.setattr(vq, "IMAGES_PER_PASS", 1)
    monkeypatch.setattr(vq, "CELLS_PER_PASS", 7)
    assert torch.equal(recorded.encode(tensor("image")), tensor("encode_indices"))


def test_pictures_need_not_be_square():
    model = tiny().eval()
    images = torch.rand(1, 3, 8, 12) * 2 - 1
    codes = model.encode(images)
    assert codes.shape == (1, 4 * 6)
    assert model.decode(codes, (4, 6)).shape == images.shape


def test_published_sizes():
    """VQ-16 has 71.9M parameters; the record of used codes is a buffer of 65536 besides."""
    with torch.device("meta"):
        sixteen, eight = VqTokenizer(VqConfig()), VqTokenizer(VqConfig(ch_mult=(1, 2, 2, 4)))
    assert sixteen.config.factor == 16 and eight.config.factor == 8
    count = sum(p.numel() for p in sixteen.parameters())
    assert count == 71_883_403 and round(count / 1e6, 1) == 71.9
    assert {n: b.numel() for n, b in sixteen.named_buffers()} == {"quantize.codebook_used": 65536}


def test_groups_must_divide_every_level():
    fails_with("groups", VqConfig, base_channels=8, error=ValidationError)
    assert VqConfig(base_channels=8, groups=4).channels == (8, 8, 16, 16, 32)


def test_weights_come_from_the_generator():
    first, again, other = tiny(0), tiny(0), tiny(1)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.codebook, other.codebook)
    torch.testing.assert_close(first.quantize.embedding.weight.norm(dim=-1), torch.ones(32))


def test_the_loss_is_codebook_plus_commitment():
    model, images = tiny(), pictures(2, 0)
    cells = unit_cells(model.pre_quant(images))
    rows = F.normalize(model.quantize.embedding.weight, dim=-1)
    distances = (cells[..., None, :] - rows).pow(2).sum(-1)
    assert torch.equal(nearest(cells, rows), distances.argmin(-1))
    _, loss = model(images)
    torch.testing.assert_close(loss, 1.25 * distances.min(-1).values.mean() / 4)


def test_gradients_pass_the_look_up_straight_through():
    """The pixel loss reaches the encoder as if the look-up were not there, and the codebook not at all."""
    model, images = tiny(), pictures(2, 0)
    reconstruction, loss = model(images)
    (reconstruction - images).abs().mean().backward(retain_graph=True)
    assert model.quantize.embedding.weight.grad is None
    assert model.encoder.conv_in.weight.grad.abs().sum() > 0
    model.zero_grad()
    loss.backward()
    assert model.quantize.embedding.weight.grad.abs().sum() > 0
    assert model.encoder.conv_in.weight.grad.abs().sum() > 0
    assert model.decoder.conv_out.weight.grad is None


def test_a_tiny_tokenizer_learns_and_keeps_its_codes_alive():
    model, held_out = tiny(), pictures(16, 99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for step in range(31):
        images = pictures(8, step)
        if step % 10 == 0:
            codes = model.encode(held_out)
            errors.append((model.decode(codes, (8, 8)) - held_out).abs().mean().item())
            revive_dead_codes(model, images, generator)
        reconstruction, loss = model(images)
        ((reconstruction - images).abs().mean() + loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert errors[-1] < 0.5 * errors[0]
    assert len(codes.unique()) >= 24


def test_dead_codes_move_onto_cells():
    model, images = tiny(), pictures(4, 0)
    with torch.no_grad():
        # All codes in one place but the first: the others are never the nearest.
        model.quantize.embedding.weight[1:] = -model.quantize.embedding.weight[0]
    chosen = model.encode(images).unique().tolist()
    kept = model.quantize.embedding.weight[chosen].clone()
    moved = revive_dead_codes(model, images, torch.Generator().manual_seed(0))
    assert moved == 32 - len(chosen)
    assert torch.equal(model.quantize.embedding.weight[chosen], kept)
    assert len(model.encode(images).unique()) > len(chosen)
    fails_with("", revive_dead_codes, model, images[:1, :, :4, :4], torch.Generator(), error=AssertionError)
