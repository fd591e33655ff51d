"""Parts of a language model that may read pictures: their names, the ids that two models share, the vocabulary.

Letters: D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor, nn

from .hub import config_value

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Part = Literal["vision_tower", "projector", "language_model"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class TokenIds:
    """The ids that a model must share with its target (a published draft's own are not to be trusted)."""

    vocab_size: int
    image: int
    bos: int | None  # None: a text begins with nothing (Qwen)
    eos: int
    pad: int
    video: int | None = None  # the placeholder of clips, where it is not the image's
    # What surrounds each run of placeholders (Qwen-VL).
    vision_start: int | None = None
    vision_end: int | None = None

    def put_into(self, text: PreTrainedConfig) -> None:
        """Let a text config have these ids."""
        text.vocab_size = self.vocab_size
        text.bos_token_id, text.eos_token_id, text.pad_token_id = self.bos, self.eos, self.pad


def placeholder_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids that stand for images and clips in a prompt, and are never emitted."""
    names = ("image_token_index", "video_token_index", "image_token_id", "video_token_id", "audio_token_id")
    ids = (config_value(config, name) for name in names)
    return tuple({value for value in ids if value is not None})


def language_model_of(model: PreTrainedModel) -> nn.Module:
    """The decoder of a vision-language model, or of a causal language model, without the LM head."""
    parts = dict(model.model.named_children())
    # As transformers calls it in nearly all of them, and in Idefics' line.
    return parts.get("language_model") or parts.get("text_model") or model.model


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, vocab_size: int, generator: torch.Generator | None) -> None:
    """Add rows drawn from N(mean, 1e-5 cov) of the old ones, as the targets' own conversion to 32064 rows did.

    Embedding and head are resized in place. A draw from that Gaussian is the mean plus a random
    combination of the centred rows, which needs no Cholesky factor.
    """
    tables = _vocabulary_weights(model)
    old_size = len(tables[0])
    fresh = []
    for table in tables:
        mean, mix = table.mean(0), torch.randn(vocab_size - old_size, old_size, generator=generator)
        fresh.append(mean + (1e-5 / old_size) ** 0.5 * mix @ (table - mean))
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for table, rows in zip(_vocabulary_weights(model), fresh, strict=True):
        table[old_size:] = rows


def _vocabulary_weights(model: PreTrainedModel) -> list[Tensor]:
    """Weights [V,D] of the embedding and, where it is not the same matrix, of the LM head."""
    embedding, head = (cast(Tensor, m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    return [embedding] if embedding is head else [embedding, head]


def num_parameters(modules: Sequence[nn.Module]) -> int:
    """Distinct parameters: a tied head counts once."""
    return sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values())
