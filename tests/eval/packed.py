"""Packed rows against padded batches, of any model: said once, for the families of the core and the further ones."""

from dataclasses import replace

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import Taps
from draftsmith.data.collate import Sample, collate
from draftsmith.models.targets.table import training_of
from live_tensors import Watched
from tiny_qwen import sample_of

PARTS = ("vision_tower", "projector", "language_model")


def of_requests(*asked) -> list[Sample]:
    """The first token of each sample is supervised, too: a label without anything before it is none."""
    return [sample_of(one, last=4, first=True) for one in asked]


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


def squares(size: int) -> Watched:
    """Keeps tensors that have this size in their last two dimensions in `.found`."""
    watched = Watched(lambda _, made: watched.found.extend(t for t in made if tuple(t.shape[-2:]) == (size, size)))
    watched.found = []
    return watched


def check_loss(llm, samples: list[Sample], attention: str, parts=PARTS) -> None:
    """Packed and padded samples have one loss."""
    llm = llm.double()
    llm.set_attn_implementation(attention)
    if llm.config.model_type.endswith("_moe"):
        llm.set_experts_implementation("eager")  # the grouped product knows no float64
    module = training_of(llm, parts, gradient_checkpointing=False)
    batch = collate(samples, pad_id=3, image_size=16)
    pixels = None if batch.pixels is None else batch.pixels.double()
    assert not batch.attention_mask.all(), "of several lengths"
    compare(module, replace(batch, pixels=pixels))


def check_states(made, samples: list[Sample], chunk: int | None, visual_layers: tuple[int, ...] = ()) -> None:
    """Of a target on a head's batch, at once and in pieces that end inside samples."""
    taps = Taps(feature=True, text_layers=(0, 1), visual_layers=visual_layers)
    made.prefill_chunk = chunk
    batch = collate(samples, pad_id=3, image_size=16)
    padded, packed = (made.states(replace(batch, packed=packed), taps) for packed in (False, True))
    torch.testing.assert_close(packed.feature, padded.feature, atol=1e-4, rtol=0)
    assert torch.equal(packed.positions, padded.positions) and padded.layers.keys() == packed.layers.keys()
    for layer, states in padded.layers.items():
        torch.testing.assert_close(packed.layers[layer], states, atol=1e-4, rtol=0)


def check_no_mask(llm, samples: list[Sample], parts=PARTS, target=None) -> None:
    """Of a draft that learns, with its passes run again, and of a target, which `target` makes of the model."""
    module = training_of(llm, parts, gradient_checkpointing=True).train()
    batch = replace(collate(samples, pad_id=3, image_size=16), packed=True)
    with squares(int(batch.attention_mask.sum())) as square:
        module(batch, None).loss_sum.backward()
        if target is not None:
            target(llm.eval()).states(batch, Taps(feature=True, text_layers=(1,)))
    assert not square.found
