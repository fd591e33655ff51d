"""Packed and padded batches: one loss and one gradient, in every family and under every attention."""

from dataclasses import replace

import packed
import pytest
import torch
from draftsmith.data.collate import Sample, collate, empty_sample
from draftsmith.models import training_passes
from draftsmith.models.attention import attend, attend_samples
from draftsmith.models.drafters.distillation import DistillObjective, DistillTraining, Teacher
from draftsmith.models.packed_row import PackedRow
from heads_tiny import SETTINGS, built, case_for, tables
from live_tensors import Watched
from packed import PARTS, compare, of_requests, squares
from tiled import model as tiled_model
from tiled import request as tiled_request
from tiny import IMAGE_ID, TOKENS, VOCAB, llava, target
from tiny_qwen import KINDS as QWEN
from tiny_qwen import model as qwen_model
from tiny_qwen import request as qwen_request
from tiny_qwen import target as qwen_target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from training import Samples
from transformers import LlamaConfig, LlamaForCausalLM


def samples(family: str) -> list[Sample]:
    if family in QWEN:
        clip = qwen_request(family, ((4, 6),), (5, 4, 4))
        return of_requests(clip, qwen_request(family, (), seed=1), qwen_request(family, ((4, 4), (6, 4)), seed=2))
    if family in ("llava_next", "llava_onevision"):
        return of_requests(*(tiled_request(family, sizes) for sizes in ([(24, 40)], [(48, 16), (16, 16)])))
    if family == "llama":
        return of_requests(*(qwen_request("qwen2_vl", (), seed=n, words=3 + 4 * n) for n in range(3)))
    return [Samples()[n] for n in range(5)] + [empty_sample(3)]


def model(family: str):
    if family in QWEN:
        return qwen_model(family)
    if family in ("llava_next", "llava_onevision"):
        return tiled_model(family)
    if family == "llama":
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": VOCAB}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=64, **sizes))
    return llava(0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "llama", *QWEN])
def test_packed_and_padded_are_one_loss(family, attention):
    packed.check_loss(model(family), samples(family), attention, PARTS if family != "llama" else PARTS[2:])


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl", *(kind for kind in QWEN if kind == "qwen3_5")])
def test_a_packed_row_has_the_states_of_its_samples(family, chunk):
    made = (qwen_target if family in QWEN else target)(model(family))
    packed.check_states(made, samples(family), chunk, visual_layers=(3,) if family in QWEN else ())


@pytest.mark.parametrize("parts", [["projector", "language_model"], ["language_model"]])
def test_distillation_and_checkpointing_of_a_packed_row(parts):
    """The teacher reads the packed row as well."""
    banned = torch.zeros(VOCAB, dtype=torch.bool)
    banned[TOKENS:], banned[IMAGE_ID] = True, True
    teacher = Teacher(llava(7, width=24).double())
    module = DistillTraining(
        llava(0, width=16).double(), parts, gradient_checkpointing=True, banned=banned, teacher=teacher,
        objective=DistillObjective(kind="distill", divergence="kl", chunk=3, cross_entropy=0.3),
    ).train()  # fmt: skip
    batch = collate(samples("llava"), pad_id=3, image_size=16)
    batch = replace(batch, pixels=batch.pixels.double())
    padded, packed = (teacher.states(replace(batch, packed=packed)).feature for packed in (False, True))
    kept = batch.attention_mask
    torch.testing.assert_close(packed[kept], padded[kept], atol=1e-9, rtol=0)
    compare(module, batch, teacher.states(replace(batch, packed=True)))


@pytest.mark.parametrize("name", SETTINGS)
def test_packed_heads_learn_what_padded_ones_do(name):
    """Every kind of head, in training with its noise and gaps, over the states of a packed target."""
    config, _, module = built(name)
    made = tables(banned=(0, 1), dtype=torch.float64)
    module = config.training_objective(module.head.double(), made).train()
    batch, states = case_for(config, made, seed=3)
    assert not batch.attention_mask.all()
    layers = {layer: part.double() for layer, part in states.layers.items()}
    compare(module, batch, replace(states, feature=states.feature.double(), layers=layers))


@pytest.mark.parametrize("name", ["sparrow", "msd", "eagle3", "eagle3-read"])
def test_packed_heads_make_no_mask_of_the_row(name, monkeypatch):
    """Of EAGLE-3 in long rows: short ones run the readable attention, which has one."""
    monkeypatch.setattr(training_passes, "SHORT", 0)
    config, made, module = built(name)
    batch, states = case_for(config, made)
    assert len({*map(int, batch.attention_mask.sum(1))}) > 1
    entries = int(module.fill(batch, states)[0].layout.on_host("real").sum())
    with squares(entries) as square:
        module.train()(replace(batch, packed=True), states).loss_sum.backward()
    assert not square.found


@pytest.mark.parametrize("family", ["llava", "llama", "qwen2_5_vl", "qwen3_vl"])
def test_packed_models_make_no_mask_of_the_row(family):
    parts, made = (PARTS, qwen_target if family in QWEN else target) if family != "llama" else (PARTS[2:], None)
    packed.check_no_mask(model(family), samples(family), parts, made)


@pytest.mark.parametrize("bounds", [(0, 1, 20, 33), (0, 33)])
@pytest.mark.parametrize("groups", [1, 4])
def test_attention_of_samples_is_flex_attention_under_their_block_mask(groups, bounds):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 33, 8, generator=generator) for heads in (4, groups, groups))
    numbers = torch.bucketize(torch.arange(33), torch.tensor(bounds[1:]), right=True)
    block_mask = create_block_mask(
        lambda b, h, at, to: (numbers[at] == numbers[to]) & (to <= at), None, None, 33, 33, device="cpu", BLOCK_SIZE=16
    )
    expected = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=groups != 4)
    found = attend(q, k, v, torch.tensor(bounds)[None, None, None])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("width", "capability", "launches"), [(64, (9, 0), 1), (512, (9, 0), 0), (64, (7, 5), 0)])
def test_a_gpu_attends_to_all_samples_in_one_launch(monkeypatch, width, capability, launches):
    """Name, arguments and shapes, as torch's own rules for tensors without values know them. Nothing is computed.
    Wide heads and older GPUs have no such launch: sample by sample.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    names = []
    with FakeTensorMode(), torch.no_grad(), Watched(lambda func, _: names.append(str(func))):
        q, k, v = (torch.empty(1, heads, 33, width, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        mixed = attend_samples(q, k, v, (0, 1, 20, 33))
    assert mixed.shape == q.shape and mixed.dtype == q.dtype and mixed.device.type == "cuda"
    assert names.count("aten._flash_attention_forward.default") == launches


def test_a_row_and_its_batch():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    row, ids = PackedRow.of(mask, mask.device), torch.arange(12).view(3, 4)
    assert row.pack(ids).tolist() == [[0, 1, 2, 4, 8, 9]] and row.segments.tolist() == [0, 0, 0, 1, 2, 2]
    assert row.indices.tolist() == [0, 1, 2, 0, 0, 1]
    assert torch.equal(row.spread(row.pack(ids)), ids * mask)
    assert row.bounds.flatten().tolist() == [0, 3, 4, 6] and row.numbers.tolist() == row.segments.tolist()
    assert row.mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]  # fmt: skip
