"""Made-up states and caches of them, for tests of what keeps and reads states."""

from pathlib import Path

import numpy as np
import torch
from draftsmith.core.batch import IMAGE, TEXT, VIDEO, Batch
from draftsmith.core.states import Taps, TargetStates, feature_places, visual_places
from draftsmith.data.shards.shards import claim, finish
from draftsmith.data.states.records import Deal, StatesWriting, state_places
from draftsmith.data.states.samples import Counts

D = 96  # no multiple of 64
COUNT = 23
DEAL = Deal(COUNT, 5)
SPARROW = Taps(feature=True, visual_layers=(2,))
EAGLE3 = Taps(feature=True, text_layers=(1, 2, 3), visual_layers=(2,))
IDENTITY = {"target": {"kind": "llava", "path": "a/b", "revision": "v1"},
            "processor": {"tokenizer": "t", "images": {"size": 24}}, "template": "one", "pictures": {"aspect": "pad"},
            "transformers": "5.23.0", "dtype": "bf16", "image_backend": "pil"}  # fmt: skip


def row(number: int, wanted: Taps, position_rows: int = 3) -> Batch:
    """Sample `number` alone: text around a clip, or text only (every third); what is not kept is zero."""
    draw = torch.Generator().manual_seed(number)
    length = 5 + 3 * (number % 4)
    modality = torch.full((1, length), TEXT, dtype=torch.int8)
    if number % 3:
        modality[0, 1:4] = VIDEO if number % 2 else IMAGE
    mask, loss_mask = torch.ones(1, length, dtype=torch.bool), torch.zeros(1, length, dtype=torch.bool)
    loss_mask[0, 4 + number % 2 :] = True
    states = {name: torch.randn(1, length, D, generator=draw).to(torch.bfloat16) * places.unsqueeze(-1)
              for name, places in state_places(wanted, modality, mask, loss_mask).items()}  # fmt: skip
    ids = torch.randint(9, 99, (1, length), generator=draw)
    positions = torch.randint(0, 50, (position_rows, 1, length), generator=draw)
    result = TargetStates(
        states.pop("feature", None), {int(name[-3:]): held for name, held in states.items()}, positions
    )  # fmt: skip
    return Batch(ids, mask, loss_mask, modality, positions, None, (f"file[{number}]",), states=result)


def padded(rows: list[Batch], pad_id: int = 3) -> Batch:
    """The same rows as one batch, padded by the obvious loop."""
    length = max(r.ids.shape[1] for r in rows)

    def pad(parts, value, axis=1):
        return torch.cat([
            torch.cat([p, p.new_full((*p.shape[:axis], length - p.shape[axis], *p.shape[axis + 1 :]), value)], axis)
            for p in parts
        ], axis - 1)  # fmt: skip

    positions, layers = pad([r.positions for r in rows], 0, axis=2), rows[0].states.layers
    states = TargetStates(
        pad([r.states.feature for r in rows], 0),
        {layer: pad([r.states.layers[layer] for r in rows], 0) for layer in layers}, positions,
    )  # fmt: skip
    return Batch(
        pad([r.ids for r in rows], pad_id), pad([r.attention_mask for r in rows], False),
        pad([r.loss_mask for r in rows], False), pad([r.modality for r in rows], TEXT), positions, None,
        tuple(r.sample_ids[0] for r in rows), states=states,
    )  # fmt: skip


def identity(wanted: Taps, **changes) -> dict:
    states = {
        "feature": wanted.feature, "text_layers": list(wanted.text_layers), "visual_layers": list(wanted.visual_layers),
        "everywhere": wanted.everywhere,
    }  # fmt: skip
    samples = {"computed_in": "bfloat16", "pad_id": 3, "position_rows": 3, "width": D}
    return IDENTITY | {"states": states, "samples": samples, "grouping": {"samples_per_shard": 5}} | changes


def counts(numbers=range(COUNT), wanted=SPARROW) -> Counts:
    rows = [row(number, wanted) for number in numbers]
    texts = [int(feature_places(r.modality, r.attention_mask, r.loss_mask, wanted.everywhere).sum()) for r in rows]
    visuals = [int(visual_places(r.modality, r.attention_mask).sum()) for r in rows]
    supervised = [int(r.loss_mask[:, 1:].sum()) for r in rows]
    return Counts(np.array([r.ids.shape[1] for r in rows]), np.array(texts), np.array(visuals), np.array(supervised))


def write(folder: Path, wanted: Taps = SPARROW, *, deal=DEAL, shards=None, **changes) -> None:
    """Shards of the samples, two rows to a batch where two are left."""
    known = identity(wanted, **changes)
    writing = StatesWriting(folder, wanted, known["dtype"], counts(range(deal.num_samples), wanted))
    claim(folder, known)
    for index in range(len(deal)) if shards is None else shards:
        numbers, samples = deal[index].tolist(), []
        for start in range(0, len(numbers), 2):
            part = numbers[start : start + 2]
            batch = padded([row(n, wanted) for n in part])
            samples += writing.samples(batch, batch.states, part)
        writing.write(index, samples)
    if shards is None:
        finish(folder, known, num_shards=len(deal))
