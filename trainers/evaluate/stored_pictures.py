"""Pictures that a run has drawn, kept by all that their tokens depend on: no table of the run draws one twice.

They lie in `.pictures` of the run, a folder for each setting. What was drawn stays when a stage is restarted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core import ranks
from ...core.fields import PLACES
from ...core.files import write_whole
from ...core.json_types import JsonMapping, JsonObject
from ...data.captioned.prompts import ImagePrompt
from ...eval.measured_rows import Row, grouped
from ...models.decoding.batched import even_batches
from ...models.targets.drawing import Generator
from ..run.context import Context
from ..run.stopping import Stop
from .evaluate_settings import EvaluateSettings
from .resume_log import ResumeLog

FOLDER = ".pictures"
VERSION = 1  # of what identities cover


@dataclass(frozen=True)
class StoredPicture:
    """A picture as it was drawn."""

    tokens: Sequence[int]
    num_cycles: int  # target passes after the prefill


class _Store:
    """The pictures of one setting, by the `identity` that `identity_of` gives."""

    def __init__(self, run: Path, identity: JsonMapping):
        self._identity = json.dumps(identity, sort_keys=True)
        self.folder = run / FOLDER / _hash(self._identity)
        self.log = ResumeLog(self.folder / "tokens")

    def add(self, number: int, prompt: ImagePrompt, picture: StoredPicture) -> None:
        """Keep it, at once."""
        about = self.folder / "setting.json"
        if not about.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(about, self._identity.encode())
        tokens = base64.b64encode(array("I", picture.tokens).tobytes()).decode()
        self.log.add(_key(number, prompt), [tokens, picture.num_cycles])


def drawn_once(
    run: Path,
    identity: JsonMapping,
    prompts: Sequence[ImagePrompt],
    draw: Any,
    stop: Stop,
    *,
    batch_size: int = 1,
) -> list[StoredPicture]:
    """A picture of each prompt: those that were kept, and the others drawn by all ranks, each its share.

    Args:
        draw: numbers of prompts, `batch_size` at most -> their `StoredPicture`s.

    Raises:
        Stopped: on all ranks, where one was asked to stop: after the pictures in hand, which are kept.
    """
    store = _Store(run, identity)
    of_rank = range(ranks.rank(), len(prompts), ranks.world_size())
    left = [number for number in of_rank if _key(number, prompts[number]) not in store.log.values]
    with stop.together():
        for numbers in stop.watch(even_batches(left, batch_size), "while pictures were drawn; those drawn are kept"):
            for number, picture in zip(numbers, draw(numbers), strict=True):
                store.add(number, prompts[number], picture)
    store.log.read()  # those of all ranks
    each = (store.log.values[_key(number, prompt)] for number, prompt in enumerate(prompts))
    return [StoredPicture(array("I", base64.b64decode(tokens)), cycles) for tokens, cycles in each]


def keep(run: Path, identity: JsonMapping, prompts: Sequence[ImagePrompt], pictures: Iterable[StoredPicture]) -> None:
    """Keep pictures that a measurement has drawn, one of each prompt."""
    store = _Store(run, identity)
    for number, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
        if _key(number, prompt) not in store.log.values:
            store.add(number, prompt, picture)


def identity_of(stage: EvaluateSettings, context: Context, temperature: float, drafting: Any | None) -> JsonObject:
    """What the tokens of a setting depend on besides the prompt and its number.

    Args:
        drafting: a method with its drafter (`drafters.Drafting`); None: plain decoding.
    """
    identity = {
        "version": VERSION,
        "target": context.target.model_dump(mode="json", exclude={*PLACES}),
        # The image tokenizer's codebook says which codes are neighbours.
        "weights": {
            thing: _stamp(context.inputs[thing]) for thing in ("target", "text", "vq") if thing in context.inputs
        },
        "seed": context.seed, "temperature": temperature, "top_k": stage.top_k, "top_p": stage.top_p,
    }  # fmt: skip
    if drafting is None:
        return identity
    method = drafting.method.model_dump(mode="json", by_alias=True, include={"tree", "rule", "draw"})
    drafters = sorted({_stamp(folder) for thing, folder in context.inputs.items() if thing.split("/")[0] == "drafter"})
    section = drafting.config.model_dump(mode="json", by_alias=True)
    return identity | {"method": method, "drafter": section, "drafter weights": drafters}


def _stamp(folder: Path) -> str:
    """Names, sizes and times of a stage's weights and manifests, which change with a training."""
    files = sorted(path for pattern in ("*.safetensors", "*.json") for path in folder.glob(pattern))
    return _hash(json.dumps([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]))


def _key(number: int, prompt: ImagePrompt) -> str:
    """The number seeds the draws; the prompt is told by its words, since another set has others under this number."""
    return f"{number}-{_hash(json.dumps([prompt.caption, prompt.label]))[:12]}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
