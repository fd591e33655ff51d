"""A stand-in for a target's tables, small configs of published families, and batches of states for heads that read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from draftsmith.core.nouns import IMAGE, TEXT
from draftsmith.core.section import Section
from draftsmith.core.states import StatesBatch, StatesWanted, feature_places, visual_places
from draftsmith.models.drafters.reading import ReadingConfig
from transformers import LlamaConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

VECTORS = Path(__file__).parents[1] / "models" / "vectors_reading"


SETTINGS = {
    "sparrow": {"kind": "sparrow"},
    "sparrow-ttt": {"kind": "sparrow", "mtp_steps": 2, "mtp_attention": "ttt", "ivsb": False},
    "sparrow-second-to-last": {"kind": "sparrow", "state": -2},
    "msd": {"kind": "msd"},
    "vispec": {"kind": "vispec", "num_queries": 3},
    "hivis": {"kind": "hivis", "num_steps": 2},
    "eagle": {"kind": "eagle"},
    "eagle-placeholder": {"kind": "eagle", "image": "placeholder"},
    "eagle3": {"kind": "eagle3", "mtp_steps": 2},
    "eagle3-middle": {"kind": "eagle3", "mtp_steps": 1, "visual_slots": "middle", "image": "projected"},
    "eagle3-read": {"kind": "eagle3", "mtp_steps": 1, "visual_slots": "read", "draft_vocab_size": 20},
}


class Holder(Section):
    drafter: ReadingConfig


def config_of(**settings):
    return Holder.model_validate({"drafter": settings}).drafter


def arrays(name: str, prefix: str = "") -> dict[str, torch.Tensor]:
    found = np.load(VECTORS / f"{name}.npz")
    return {
        n.removeprefix(prefix): torch.from_numpy(np.array(found[n]))
        for n in found.files
        if n.startswith(prefix) and found[n].dtype.kind != "U"
    }


class Tables:
    """`ReadTarget` without a model: what training and proposals ask of it."""

    def __init__(self, config, embedding, head_weight, banned=()):
        self.config, self.embedding, self.head_weight = config, embedding, head_weight
        self.banned = list(banned)

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


def tables(seed: int = 0, *, dtype=torch.float32, banned=(), **sizes) -> Tables:
    config = text_config(**sizes)
    generator = torch.Generator().manual_seed(seed)
    shape = config.vocab_size, config.hidden_size
    return Tables(config, *(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)), banned=banned)


def states_batch(rows, wanted: StatesWanted, *, width=32, vocab=44, seed=0, everything=False) -> StatesBatch:
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
    feature, layers = draw(), {layer: draw() for layer in wanted.layers}
    if not everything:
        text = feature_places(modality, mask, loss_mask, wanted.everywhere)
        visual = visual_places(modality, mask)
        feature = feature.masked_fill(~text[..., None], 0)
        for layer in layers:
            kept = (text & (layer in wanted.text_layers)) | (visual & (layer in wanted.visual_layers))
            layers[layer] = layers[layer].masked_fill(~kept[..., None], 0)
    positions = torch.arange(length).expand(1, len(rows), -1)
    return StatesBatch(
        ids, mask, loss_mask, modality, positions, feature, tuple(f"r{i}" for i in range(len(rows))), layers,
        tuple(range(seed, seed + len(rows))),
    )  # fmt: skip


def verified(step, tokens, bonus):
    return SimpleNamespace(step=step, tokens=tuple(tokens), bonus=bonus, path=tuple(range(len(tokens))))
