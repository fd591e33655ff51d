"""The pictures of an evaluation's rows, as tokens and as codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.captioned.prompts import ImagePrompt
from ...eval.measured_rows import Row, grouped
from ...models.targets.generators import Generator
from .measuring import Measuring


@dataclass(frozen=True)
class PicturesOfRows:
    """What an evaluation drew."""

    measuring: Measuring
    generator: Generator
    prompts: Sequence[ImagePrompt]
    rows: Sequence[Row]


def drawn_tokens(rows: Sequence[Row]) -> dict[float, dict[str, list[tuple[int, ...]]]]:
    """temperature -> method (plain decoding first) -> the tokens of each picture, in the order of the prompts.

    Of a method with several drafters those of the first one by name: a picture for each prompt is judged.
    """
    tokens_by: dict[float, dict[str, list[tuple[int, ...]]]] = {}
    first = {method: min(row.drafter for row in its) for (method,), its in grouped(rows, "method").items()}
    for row in rows:
        if row.drafter == first[row.method]:
            tokens_by.setdefault(row.temperature, {}).setdefault(row.method, []).append(tuple(row.tokens))
    return tokens_by


def codes_of(generator: Generator, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Pictures' tokens as codes [B,n] of the image tokenizer."""
    return torch.stack([generator.target.codes(list(row)) for row in tokens])
