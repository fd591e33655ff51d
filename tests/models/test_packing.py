"""Packed and padded batches: one loss and one gradient, in every family and under every attention."""

from dataclasses import replace

import pytest
import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import Taps
from draftsmith.data.collate import Sample, collate, empty_sample
from draftsmith.models.attention import attend, attend_samples
from draftsmith.models.drafters.distillation import DistillObjective, DistillTraining, Teacher
from draftsmith.models.families.table import training_of
from draftsmith.models.packed_row import PackedRow
from heads_tiny import SETTINGS, built, case_for, tables
from live_tensors import Watched
from tiled import model as tiled_model
from tiled import request as tiled_request
from tiny import IMAGE_ID, TOKENS, VOCAB, llava, target
from tiny_qwen import model as qwen_model
from tiny_qwen import request as qwen_request
from tiny_qwen import sample_of
from tiny_qwen import target as qwen_target
from tiny_towers import model as tower_model
from tiny_towers import request as tower_request
from tiny_towers import target as tower_target
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from training import Samples
from transformers import LlamaConfig, LlamaForCausalLM

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
TOWERS = ("internvl", "mistral3", "pixtral")
PARTS = ("vision_tower", "projector", "language_model")


def of_requests(*asked) -> list[Sample]:
    """The first token of each sample is supervised, too: a label without anything before it is none."""
    return [sample_of(one, last=4, first=True) for one in asked]


def samples(family: str) -> list[Sample]:
    if family in QWEN:
        clip = qwen_request(family, ((4, 6),), (5, 4, 4))
        return of_requests(clip, qwen_request(family, (), seed=1), qwen_request(family, ((4, 4), (6, 4)), seed=2))
    if family in TOWERS:
        return of_requests(*(tower_request(family, tiles, seed=len(tiles)) for tiles in ((4, 1), (), (1,))))
    if family in ("llava_next", "llava_onevision"):
        return of_requests(*(tiled_request(family, sizes) for sizes in ([(24, 40)], [(48, 16), (16, 16)])))
    if family == "llama":
        return of_requests(*(qwen_request("qwen2_vl", (), seed=n, words=3 + 4 * n) for n in range(3)))
    return [Samples()[n] for n in range(5)] + [empty_sample(3)]


def model(family: str):
    if family in QWEN:
        return qwen_model(family)
    if family in TOWERS:
        return tower_model(family)
    if family in ("llava_next", "llava_onevision"):
        return tiled_model(family)
    if family == "llama":
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": VOCAB}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=64, **sizes))
    return llava(0)


def compare(module, batch: Batch, states=None) -> None:
    """Loss, metrics and every gradient of the packed batch are those of the padded one."""
    losses, gradients = [], []
    for packed in (False, True):
        module.zero_grad()
        loss = module(replace(batch, packed=packed), states)
        loss.loss_sum.backward()
        losses.append(loss)
        gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
    padded, packed = losses
    assert int(padded.num_tokens) == int(packed.num_tokens) == batch.num_supervised > 0
    torch.testing.assert_close(packed.loss_sum, padded.loss_sum, atol=0, rtol=1e-6)
    for name, value in padded.metrics.items():
        torch.testing.assert_close(packed.metrics[name].double(), value.double(), atol=1e-4, rtol=1e-6)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 5
    # Some are zero but for rounding (a bias of keys): the bound is that of the largest.
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-6 * largest, rtol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "llama", *TOWERS, *QWEN])
def test_packed_and_padded_are_one_loss(family, attention):
    llm = model(family).double()
    llm.set_attn_implementation(attention)
    if family.endswith("_moe"):
        llm.set_experts_implementation("eager")  # the grouped product knows no float64
    module = training_of(llm, PARTS if family != "llama" else PARTS[2:], gradient_checkpointing=False)
    batch = collate(samples(family), pad_id=3, image_size=16)
    pixels = None if batch.pixels is None else batch.pixels.double()
    assert not batch.attention_mask.all(), "of several lengths"
    compare(module, replace(batch, pixels=pixels))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("family", ["llava", *TOWERS, "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_packed_row_has_the_states_of_its_samples(family, chunk):
    """Of the target on a head's batch, at once and in pieces that end inside samples."""
    llm, taps = model(family), Taps(feature=True, text_layers=(0, 1), visual_layers=(3,) if family in QWEN else ())
    made = (qwen_target if family in QWEN else tower_target if family in TOWERS else target)(llm)
    made.prefill_chunk = chunk
    batch = collate(samples(family), pad_id=3, image_size=16)
    padded, packed = (made.states(replace(batch, packed=packed), taps) for packed in (False, True))
    torch.testing.assert_close(packed.feature, padded.feature, atol=1e-4, rtol=0)
    assert torch.equal(packed.positions, padded.positions) and padded.layers.keys() == packed.layers.keys()
    for layer, states in padded.layers.items():
        torch.testing.assert_close(packed.layers[layer], states, atol=1e-4, rtol=0)


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


def squares(size: int) -> Watched:
    """Keeps tensors that have this size in their last two dimensions in `.found`."""
    watched = Watched(lambda _, made: watched.found.extend(t for t in made if tuple(t.shape[-2:]) == (size, size)))
    watched.found = []
    return watched


@pytest.mark.parametrize("name", ["sparrow", "msd", "eagle3", "eagle3-read"])
def test_packed_heads_make_no_mask_of_the_row(name):
    config, made, module = built(name)
    batch, states = case_for(config, made)
    assert len({*map(int, batch.attention_mask.sum(1))}) > 1
    entries = int(module.fill(batch, states)[0].layout.on_host("real").sum())
    with squares(entries) as square:
        module.train()(replace(batch, packed=True), states).loss_sum.backward()
    assert not square.found


@pytest.mark.parametrize("family", ["llava", "llama", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_packed_models_make_no_mask_of_the_row(family):
    """Of a draft that learns, with its passes run again, and of a target."""
    llm = model(family)
    module = training_of(llm, PARTS if family != "llama" else PARTS[2:], gradient_checkpointing=True).train()
    batch = replace(collate(samples(family), pad_id=3, image_size=16), packed=True)
    with squares(int(batch.attention_mask.sum())) as square:
        module(batch, None).loss_sum.backward()
        if family != "llama":
            made = (qwen_target if family in QWEN else tower_target if family in TOWERS else target)(llm.eval())
            made.states(batch, Taps(feature=True, text_layers=(1,)))
    assert not square.found


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
