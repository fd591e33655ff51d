"""A substitute for a target's tables, small configs of published families, and batches with states for heads.

A case is a pair: a `Batch`, and the `TargetStates` that a target of random weights might have for it.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from decodings import greedy
from draftsmith.core.batch import IMAGE, TEXT, Batch, Request
from draftsmith.core.section import Section
from draftsmith.core.states import Taps, TargetStates, feature_places, visual_places
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import AnyDrafter
from draftsmith.models.targets.base import language_shape
from tensors import loud
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

VECTORS = Path(__file__).parents[1] / "models" / "vectors_state_heads"


SETTINGS = {
    "sparrow": {"kind": "sparrow"},
    "sparrow-ttt": {"kind": "sparrow", "mtp_steps": 2, "mtp_attention": "ttt", "ivsb": False},
    "sparrow-half-blind": {"kind": "sparrow", "blind_share": 0.5},
    "sparrow-second-to-last": {"kind": "sparrow", "state": -2},
    "msd": {"kind": "msd"},
    "vispec": {"kind": "vispec", "num_queries": 3},
    "hivis": {"kind": "hivis", "num_steps": 2},
    "eagle": {"kind": "eagle"},
    "eagle-own": {"kind": "eagle", "draft_vocab_size": 20},
    "eagle-placeholder": {"kind": "eagle", "image": "placeholder"},
    "eagle3": {"kind": "eagle3", "mtp_steps": 2},
    "eagle3-window": {"kind": "eagle3", "mtp_steps": 2, "sliding_window": 2, "norm_before_residual": True},
    "eagle3-middle": {"kind": "eagle3", "mtp_steps": 1, "visual_slots": "middle", "image": "projected"},
    "eagle3-read": {"kind": "eagle3", "mtp_steps": 1, "visual_slots": "read", "draft_vocab_size": 20},
}


class Holder(Section):
    drafter: AnyDrafter


def config_of(**settings):
    return Holder.model_validate({"drafter": settings}).drafter


def arrays(name: str, prefix: str = "") -> dict[str, torch.Tensor]:
    loaded = np.load(VECTORS / f"{name}.npz")
    return {
        n.removeprefix(prefix): torch.from_numpy(np.array(loaded[n]))
        for n in loaded.files
        if n.startswith(prefix) and loaded[n].dtype.kind != "U"
    }


class Tables:
    """A target without its layers: what building, training and proposals of heads ask of it."""

    device = torch.device("cpu")

    def __init__(self, config, embedding, head_weight, banned=()):
        self.config, self.embedding, self.head_weight = config, embedding, head_weight
        self.banned = list(banned)

    @property
    def shape(self):
        return language_shape(self.config)

    def scores(self, feature):
        scores = (feature @ self.head_weight.to(feature).T).to(
            torch.float64 if feature.dtype == torch.float64 else torch.float32
        )
        if self.banned:
            mask = torch.zeros(scores.shape[-1], dtype=torch.bool)
            mask[self.banned] = True
            scores = scores.masked_fill(mask, float("-inf"))
        return scores


def text_config(*, qwen: bool = True, hidden=32, heads=4, kv_heads=2, intermediate=52, vocab=44, layers=8, **more):
    made = Qwen2_5_VLTextConfig if qwen else LlamaConfig
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if qwen:
        rope["mrope_section"] = [2, 1, 1]
    return made(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=intermediate,
        vocab_size=vocab, num_hidden_layers=layers, rms_norm_eps=1e-6, rope_parameters=rope, **more,
    )  # fmt: skip


STRETCHED = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def stretched_text(kind, qwen=False, **more):
    text = text_config(qwen=qwen, hidden=64, heads=2)
    numbers = {"rope_type": kind, "rope_theta": 10000.0, **STRETCHED.get(kind, {}), **more}
    return type(text)(**text.to_dict() | {"rope_parameters": numbers, "max_position_embeddings": 512})


def tables(seed: int = 0, *, dtype=torch.float32, banned=(), **sizes) -> Tables:
    config = text_config(**sizes)
    generator = torch.Generator().manual_seed(seed)
    shape = config.vocab_size, config.hidden_size
    return Tables(config, *(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)), banned=banned)


def states_batch(
    rows, taps: Taps, *, width=32, vocab=44, seed=0, everything=False
) -> tuple[Batch, TargetStates]:  # fmt: skip
    """Rows are strings: t a word of the prompt, v an image token, a a supervised word. States are random.

    Args:
        everything: states at all places, not at those alone that a target keeps.
    """
    generator = torch.Generator().manual_seed(seed)
    length = max(map(len, rows))
    draw = lambda: torch.randn(len(rows), length, width, generator=generator)  # noqa: E731
    codes = torch.tensor([["tva".find(c) if c != " " else -1 for c in row.ljust(length)] for row in rows])
    mask, modality = codes >= 0, torch.where(codes == 1, IMAGE, TEXT).to(torch.int8)
    loss_mask = codes == 2
    ids = torch.randint(4, vocab, codes.shape, generator=generator).masked_fill(codes == 1, 1).masked_fill(~mask, 0)
    feature, layers = draw(), {layer: draw() for layer in taps.layers}
    if not everything:
        text = feature_places(modality, mask, loss_mask, taps.everywhere)
        visual = visual_places(modality, mask)
        feature = feature.masked_fill(~text[..., None], 0)
        for layer in layers:
            kept = (text & (layer in taps.text_layers)) | (visual & (layer in taps.visual_layers))
            layers[layer] = layers[layer].masked_fill(~kept[..., None], 0)
    positions = torch.arange(length).expand(1, len(rows), -1)
    names, seeds = tuple(f"r{i}" for i in range(len(rows))), tuple(range(seed, seed + len(rows)))
    batch = Batch(ids, mask, loss_mask, modality, positions, None, names, seeds=seeds)
    return batch, TargetStates(feature, layers, positions)


def rows_of(batch: Batch, states: TargetStates, rows: slice, length: int | None = None) -> tuple[Batch, TargetStates]:
    """Some rows of a case, cut to `length` tokens."""
    pick, end = rows, slice(length)
    part = replace(
        batch, ids=batch.ids[pick, end], attention_mask=batch.attention_mask[pick, end],
        loss_mask=batch.loss_mask[pick, end], modality=batch.modality[pick, end],
        positions=batch.positions[:, pick, end], sample_ids=batch.sample_ids[pick], seeds=batch.seeds[pick],
    )  # fmt: skip
    layers = {layer: held[pick, end] for layer, held in states.layers.items()}
    return part, TargetStates(states.feature[pick, end], layers, states.positions[:, pick, end])


# A picture between texts, two pictures, text alone; the trained answer at the end. Of unequal lengths.
ROWS = ("ttvvvttaaa", "tvvtvvvtaaaa", "ttttaaa")


def head_of(config, shape, draft_ids=None):
    """A fresh head for a target's shape."""
    return config.module(config.layer(shape), draft_ids)


# Another width and vocabulary, and as many KV heads as heads, under a Llama.
OTHER_SIZES = {"qwen": False, "hidden": 48, "heads": 6, "kv_heads": 6, "intermediate": 40, "vocab": 61}


def built(name: str, seed: int = 0, *, sizes: dict | None = None, **changes):
    """(config, target, training in evaluation mode) with loud random weights."""
    config, target = config_of(**SETTINGS[name] | changes), tables(banned=(0, 1), **sizes or {})
    torch.manual_seed(seed)
    head = config.build(target, count_tokens=lambda: torch.arange(target.config.vocab_size))
    loud(head)
    return config, target, config.training_objective(head, target).eval()


def case_for(config, target, rows=ROWS, **more):
    """The batch and the states that the config's training asks for."""
    sizes = {"width": target.config.hidden_size, "vocab": target.config.vocab_size}
    return states_batch(rows, config.taps_for(target.shape, training=True), **sizes | more)


@torch.no_grad()
def outputs(training, batch, states):
    """Passes of a case as {(row, entry): [W,D]} over text entries."""
    filled, positions = training.fill(batch, states)
    passes = torch.stack(training.passes(filled, positions, batch), 2)
    layout = filled.layout
    places = (layout.real & ~layout.visual).nonzero().tolist()
    return {(row, int(layout.index[row, n])): passes[row, n] for row, n in places}


def verified(step, tokens, bonus):
    return SimpleNamespace(step=step, tokens=tuple(tokens), bonus=bonus, path=tuple(range(len(tokens))))


def decoding_after(big, head, config, asked):
    """A drafter of the head which begins behind the target's first token, the answer's ids and modality with the
    prompt's, and the target's states of all of them.
    """
    answer = generate(big, None, asked, greedy(Chain(4), 20)).tokens
    ids, modality = torch.cat([asked.ids, torch.tensor(answer)]), F.pad(asked.modality, (0, 20))
    drafter = config.drafter(head, big)
    _, step = big.prefill(Request(ids, modality, asked.pixels), drafter.taps, capacity=1)
    _, prefill = big.prefill(asked, drafter.taps, capacity=40)
    drafter.start(asked, prefill, Warp(1.0), capacity=40)
    drafter.begin(answer[0])
    return drafter, ids, modality, step
