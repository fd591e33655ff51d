"""How states are rounded, how large they get, and in which order they are read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.core.states import Taps
from draftsmith.data.order import RisingVisualOrder
from draftsmith.data.shards.shards import ShardReader
from draftsmith.data.states import storage
from draftsmith.data.states.storage import BLOCK, DTYPES, check_disk, decode, encode, loud_channels, record_bytes
from draftsmith.models.losses import divergence
from fails import fails_with
from states_fake import COUNT, EAGLE3, SPARROW, D, counts, write

TB = 1e12
SAMPLES, WIDTH = 68_000, 3584
EVERYWHERE = Taps(feature=True, visual_layers=(14,), everywhere=True)
# Layouts at d = 3584 in bfloat16: text and visual tokens of a sample, and terabytes of 68,000.
TABLE = [
    ("sparrow, text", Taps(feature=True, visual_layers=(14,)), 1328, 0, 0.65),
    ("sparrow, qwen images", Taps(feature=True, visual_layers=(14,)), 960, 280, 0.60),
    ("sparrow, onevision images", Taps(feature=True, visual_layers=(14,)), 960, 1900, 1.39),
    ("sparrow, 17k video", Taps(feature=True, visual_layers=(14,)), 557, 17_000, 8.6),
    ("sparrow, 25k video", Taps(feature=True, visual_layers=(14,)), 557, 25_089, 12.5),
    ("hivis, qwen images", Taps(feature=True), 960, 280, 0.47),
    ("last everywhere, onevision", Taps(feature=True, everywhere=True), 960, 1900, 1.39),
    ("last and mid everywhere, onevision", Taps(feature=True, text_layers=(14,), everywhere=True), 960, 1900, 2.79),
    ("eagle-3 everywhere, text", Taps(feature=True, text_layers=(2, 14, 25), everywhere=True), 1328, 0, 2.59),
    ("eagle-3 everywhere, qwen images", Taps(feature=True, text_layers=(2, 14, 25), everywhere=True), 960, 280, 2.42),
    ("eagle-3 everywhere, onevision", Taps(feature=True, text_layers=(2, 14, 25), everywhere=True), 960, 1900, 5.58),
]


@pytest.mark.parametrize(("name", "wanted", "text", "visual", "terabytes"), TABLE, ids=[r[0] for r in TABLE])
def test_declared_tokens_give_the_known_sizes(name, wanted, text, visual, terabytes):
    size = SAMPLES * record_bytes(wanted, WIDTH, "bf16", text=text, visual=visual)
    assert size / TB == pytest.approx(terabytes, abs=0.005 + 0.01 * terabytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", [SPARROW, EAGLE3, EVERYWHERE], ids=["sparrow", "eagle3", "everywhere"])
def test_the_estimate_is_the_size_on_disk(tmp_path, wanted, dtype):
    if wanted.everywhere:
        wanted = Taps(feature=True, visual_layers=(2,), everywhere=True)
    write(tmp_path / "c", wanted, dtype=dtype)
    seen = counts(wanted=SPARROW)  # what is counted does not depend on the layout
    expected = sum(record_bytes(wanted, D, dtype, text=int(t), visual=int(v), position_rows=3)
                   for t, v in zip(seen.text, seen.visual, strict=True))  # fmt: skip
    kept = sum(shard.bytes for shard in ShardReader(tmp_path / "c").shards)
    # The states themselves are counted to the byte; each of the five shards has a header besides.
    assert abs(kept - expected) < COUNT * 640 + 5 * 4096


def test_a_full_disk_stops_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    check_disk(tmp_path / "not" / "there", 0.5e9)
    refused = fails_with(r"take 2 GB and the disk has 1 GB free", check_disk, tmp_path / "states", 2e9)
    assert "fp8" in str(refused) and not list(Path(tmp_path).iterdir())


# Rounding


def loud_states(count: int = 400, width: int = 512) -> torch.Tensor:
    """Heavy-tailed states with a few channels far above all others, as a final norm leaves them."""
    draw = torch.Generator().manual_seed(0)
    normal, chi = (torch.randn(count, width, generator=draw),
                   torch.randn(4, count, width, generator=draw).square().sum(0))  # fmt: skip
    states = normal / (chi / 4).sqrt()  # Student's t with 4 degrees of freedom
    states[:, [3, 200, 450]] *= 40
    return states


def head_kl(states: torch.Tensor, kept: torch.Tensor) -> float:
    head = torch.randn(1000, states.shape[1], generator=torch.Generator().manual_seed(1)) * 3 / states.shape[1] ** 0.5
    head[:, [3, 200, 450]] /= 40
    return float(divergence("kl", states @ head.T, kept @ head.T).mean())


def test_what_each_dtype_does_to_the_head_s_distribution_is_in_the_known_order():
    states = loud_states()
    kl = {dtype: head_kl(states, decode(encode(states, dtype), dtype, torch.float32)) for dtype in DTYPES}
    scale = states.abs().amax(-1, keepdim=True) / 127
    naive = head_kl(states, (states / scale).round() * scale)  # int8 with one scale for each token
    assert kl["bf16"] < kl["int8"] < kl["fp8"] < naive
    assert kl["bf16"] < 1e-4 and kl["int8"] < 1e-3 and kl["fp8"] < 5e-3 < naive


def test_loud_channels_are_kept_beside_and_help():
    states = loud_states()
    assert loud_channels(states).tolist() == [3, 200, 450]
    blocks = states.unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    plain = ((blocks / scale).round() * scale).flatten(1)
    assert head_kl(states, decode(encode(states, "int8"), "int8", torch.float32)) < 0.5 * head_kl(states, plain)
    assert not len(loud_channels(torch.randn(50, 512, generator=torch.Generator().manual_seed(0))))


@pytest.mark.parametrize("width", [1, 64, 96, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_and_no_places_at_all(dtype, width):
    states = torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    away = (decode(encode(states, dtype), dtype, torch.float32) - states).abs()
    assert (away <= {"bf16": 0.005, "int8": 0.006, "fp8": 0.07}[dtype] * states.abs().amax(-1, keepdim=True)).all()
    assert decode(encode(states[:0], dtype), dtype, torch.float32).shape == (0, width)
    assert not decode(encode(torch.zeros(2, width), dtype), dtype, torch.float32).any()


# Orders


def test_the_share_of_pictures_rises_as_msd_s_does():
    lengths = np.array([-5] * 300 + [7] * 200)
    order = RisingVisualOrder(lengths, 0, 10, text_epochs=20, epochs=40)
    assert len(order) == 300
    assert [order.share(epoch) for epoch in (0, 19, 20, 29, 39)] == [0, 0, 0.05, 0.5, 1]
    shares = [(lengths[order(epoch)] > 0).mean() for epoch in range(40)]
    assert not any(shares[:20]) and shares[39] == 1
    assert all(abs(share - order.share(epoch)) < 0.1 for epoch, share in enumerate(shares))
    assert sorted(order(0).tolist()) == list(range(300)), "text alone has each of its samples once"
    assert np.bincount(order(39), minlength=500)[300:].max() == 2, "fewer pictures than rows begin anew"
