"""What the stages want of a target that an engine runs: answers to requests, and hidden states of batches.

Letters: B rows, T tokens, D width, L layers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...core import ranks
from ...core.batch import Batch, Request
from ...core.errors import UserError
from ...core.pictures import TEXT, Picture
from ...core.positions import place_positions
from ...core.states import Taps, TargetStates
from ...data.processor import Processor
from ...eval.engines.program import find_python, version_of
from ...models.decoding.batched import Written
from ...models.decoding.warp import Warp
from ...models.exports.target import export_target, vllm_reads
from ...models.targets.language import kept_states
from ..context import Context
from .pictures import one_placeholder_each, shown
from .process import EngineProcess
from .section import ServedEngine

_WHOLE = 8192  # tokens of a pass at least, where prompts are computed in one piece


def identity_of_engine(section: Any) -> dict[str, Any] | None:
    """What identifies the engine in what it writes; None: our own passes.

    Raises:
        UserError: it is not installed in the interpreter that the section names.
    """
    if not isinstance(section, ServedEngine):
        return None
    return section.identity | {"version": version_of(section.name, find_python(section.python, section.name))}


@contextmanager
def engine_process(
    section: ServedEngine,
    context: Context,
    *,
    layers: Sequence[int] | None,
    max_length: int,
    most_pictures: int,
) -> Iterator[EngineProcess]:
    """The engine of this rank, with the stage's target.

    Args:
        layers: whose hidden states are wanted; None: answers alone.
        max_length: tokens of a prompt and its answer, at most.
        most_pictures: of a request.

    Raises:
        UserError: several ranks would each start an engine on all GPUs.
    """
    if section.tensor_parallel_size > 1 and ranks.world_size() > 1:
        raise UserError(
            f"engine.tensor_parallel_size is {section.tensor_parallel_size}, and each of {ranks.world_size()} ranks "
            "would start an engine on all GPUs", where=f"key stages.{context.name}.engine.tensor_parallel_size",
            hint="start one rank, or leave the key out: each rank then has an engine on its own GPU",
        )  # fmt: skip
    on_gpu = context.device().type == "cuda"
    base = context.folder / "cache"
    if section.scratch is not None:  # which other runs may use, too
        base = Path(section.scratch) / f"{context.folder.parent.name}-{context.name}-{context.fingerprint[:8]}"
    # A prompt whose states are wanted is answered by one token.
    settings = section.settings(
        _model(context, base), context.target.dtype, max_length + 1, most_pictures, on_gpu=on_gpu
    )
    if context.target.path is not None and not Path(context.target_source()).is_dir():
        settings["revision"] = context.target.revision
    settings |= {} if layers is None else {"max_num_batched_tokens": max(_WHOLE, max_length + 1)}
    own_gpu = _own_gpu(context) if on_gpu and section.tensor_parallel_size == 1 else None
    with EngineProcess(
        base / f"engine-{ranks.rank()}",
        section.name,
        settings | section.options,
        layers,
        python=find_python(section.python, section.name),
        stop=context.stop,
        devices=own_gpu,
    ) as process:
        yield process


def _model(context: Context, base: Path) -> str:
    """Where the engine reads the target; one that vLLM would not read is written under its names first."""
    source = Path(context.target_source())
    if not source.is_dir():
        return str(source)
    if vllm_reads(source):
        return str(source.resolve())
    served = base / "served-target"
    if ranks.is_main():
        shutil.rmtree(served, ignore_errors=True)  # of an earlier start
        served.parent.mkdir(parents=True, exist_ok=True)
        export_target(source, served)
    ranks.barrier()
    return str(served.resolve())


def _own_gpu(context: Context) -> str:
    """This rank's GPU, as CUDA_VISIBLE_DEVICES names it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = context.device().index or 0
    return visible.split(",")[index] if visible else str(index)


class ServedAnswers:
    """Writes answers with an engine."""

    def __init__(
        self, section: ServedEngine, process: EngineProcess, processor: Processor, warp: Warp, never: Collection[int]
    ):
        self.section, self.process, self.processor, self.warp = section, process, processor, warp
        # The strongest that engines take; an id that comes all the same is refused below.
        self._bias = dict.fromkeys(never, -100.0)
        self._never = frozenset(never)

    def begin(
        self, requests: Sequence[Request], limits: Sequence[int], seeds: Sequence[int]
    ) -> Callable[[], list[Written]]:
        """Ask, and return what waits for the answers."""
        asked, pictures = [], dict[str, Tensor]()
        for number, (request, limit, seed) in enumerate(zip(requests, limits, seeds, strict=True)):
            names = [f"{number}-{index}" for index in range(len(request.pictures))]
            pictures |= dict(zip(names, shown(request.pixels, request.pictures, self.processor, request.name),
                                 strict=True))  # fmt: skip
            ids = one_placeholder_each(request.ids, request.modality, request.pictures)
            end = self.processor.eos_id
            sampling = self.section.sampling(self.warp, seed=seed, limit=limit, end=end, never=self._bias)
            asked.append({"ids": ids, "pictures": names, "sampling": sampling})
        return partial(self._finish, list(requests), self.process.submit(asked, pictures))

    def _finish(self, requests: list[Request], job: str) -> list[Written]:
        written = []
        for request, answer in zip(requests, self.process.wait(job), strict=True):
            check_length(answer["prompt_tokens"], len(request.ids), request.name)
            if wrong := self._never & set(answer["tokens"]):
                raise UserError(f"the engine wrote id {min(wrong)}, which has no token", where=request.name,
                                hint="its vocabulary is another: are these the target's own files?")  # fmt: skip
            written.append(Written(answer["tokens"], answer["stop"], None))
        return written


@dataclass(frozen=True)
class ServedStates:
    """A target's hidden states by an engine, in place of its own teacher-forced pass.

    Args:
        target: its embedding, final norm and LM head, without layers.
        ahead: batches that are asked for before the first one is read.
    """

    process: EngineProcess
    target: Any
    processor: Processor
    taps: Taps
    layers: tuple[int, ...]  # as the engine was started with
    ahead: int

    def begin(self, batch: Batch) -> Callable[[], TargetStates]:
        """Ask for the states of a batch on the CPU, and return what waits for them."""
        asked, pictures, rows = [], dict[str, Tensor](), _rows(batch)
        for number, (ids, modality, pixels, shapes) in enumerate(rows):
            name = batch.sample_ids[number]
            names = [f"{number}-{index}" for index in range(len(shapes))]
            pictures |= dict(zip(names, shown(pixels, shapes, self.processor, name), strict=True))
            asked.append({
                "ids": one_placeholder_each(ids, modality, shapes), "pictures": names,
                "sampling": {"temperature": 0.0, "max_tokens": 1},
            })  # fmt: skip
        return partial(self._finish, batch, self.process.submit(asked, pictures))

    @torch.no_grad()
    def _finish(self, batch: Batch, job: str) -> TargetStates:
        decoder, mask = self.target.decoder, batch.attention_mask
        dtype, device = self.target.embedding.dtype, self.target.device
        states = torch.zeros(*batch.ids.shape, len(self.layers), self.target.config.hidden_size, dtype=dtype)
        for row, answer in enumerate(self.process.wait(job)):
            length, name = int(mask[row].sum()), batch.sample_ids[row]
            file = self.process.folder / "done" / answer["states"]
            held = load_file(file)
            file.unlink()
            check_length(answer["prompt_tokens"], length, name)
            if not torch.equal(held["token_ids"], batch.ids[row, :length]):
                raise UserError("the engine's states are of other ids than this sample's", where=name,
                                hint="its processor files are others: give the engine the target's own")  # fmt: skip
            states[row, :length] = held["hidden_states"].to(dtype)
        by_layer = dict(zip(self.layers, states.to(device).unbind(2), strict=True))
        feature = decoder.language_model.norm(by_layer[decoder.num_layers])
        positions, _ = place_positions(batch.modality, mask, _pictures(batch), decoder.scheme)
        layers = {layer: by_layer[layer] for layer in self.taps.layers}
        return kept_states(batch.to(device), self.taps, feature, layers, positions.to(device))


def layers_for(taps: Taps, num_layers: int) -> tuple[int, ...]:
    """The layers that an engine must hand out for these taps; the last one is the feature before its norm."""
    return tuple(sorted({*taps.layers, num_layers}))


def check_length(theirs: int, ours: int, name: str) -> None:
    """Raises `UserError` where the engine's prompt has another number of tokens: its pictures are other runs."""
    if theirs != ours:
        raise UserError(
            f"the engine's prompt has {theirs} tokens, and ours {ours}: it makes another number of tokens of a "
            "picture", where=name,
            hint="the processor files that it reads must be those of this recipe; pixel limits of the data section "
            "beyond the processor's own are cut there",
        )  # fmt: skip


def _pictures(batch: Batch) -> tuple[Picture, ...]:
    """Of all rows; tiles without a description are plain pictures."""
    count = 0 if batch.pixels is None else len(batch.pixels) - batch.num_dummy_images
    if batch.pictures or not count:
        return batch.pictures
    patches = round((int((batch.modality != TEXT).sum()) / count) ** 0.5)
    return (Picture(patches),) * count


def _rows(batch: Batch) -> list[tuple[Tensor, Tensor, Tensor | None, list[Picture]]]:
    """ids [T], modality [T], tiles or patches and pictures of each row, without padding."""
    rows, pictures, place = [], iter(_pictures(batch)), 0
    for ids, modality, mask in zip(batch.ids, batch.modality, batch.attention_mask, strict=True):
        own, visual, start = [], int((modality[mask] != TEXT).sum()), place
        while visual > 0:
            own.append(next(pictures))
            visual -= own[-1].num_tokens
            place += own[-1].num_tiles
        rows.append((ids[mask], modality[mask], None if batch.pixels is None else batch.pixels[start:place], own))
    return rows
