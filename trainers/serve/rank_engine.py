"""The engine of a rank: its identity, where it works, on which GPU, and how it reads the stage's target."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...core import ranks
from ...core.errors import UserError
from ...core.files import unwritable
from ...core.json_types import JsonMapping
from ...eval.engines.program import find_python
from ...models.formats.target import export_target, vllm_reads
from ..run.context import Context
from .engine_process import EngineProcess
from .engine_settings import ServedSettings

_TARGET = "served-target"
_WHOLE = 8192  # tokens of a pass at least, where prompts are computed in one piece


@contextmanager
def engine_process(
    section: ServedSettings,
    context: Context,
    *,
    key: str,
    layers: Sequence[int] | None,
    max_length: int,
    most_pictures: int,
    worker: str | None = None,
    more: JsonMapping | None = None,
) -> Iterator[EngineProcess]:
    """The engine of this rank, with the stage's target; it is started by whoever first wants something.

    Args:
        key: of the section in the stage's own.
        layers: whose hidden states are wanted; None: answers alone.
        max_length: tokens of a prompt and its answer, at most.
        most_pictures: of a request.
        worker: which of `workers` runs; None: that of answers and states.
        more: further arguments of the engine, that the section does not say.

    Raises:
        UserError: several ranks would each start an engine on all GPUs.
    """
    key = f"stages.{context.name}.{key}"
    if section.tensor_parallel_size > 1 and ranks.world_size() > 1:
        raise UserError(
            f"engine.tensor_parallel_size is {section.tensor_parallel_size}, and each of {ranks.world_size()} ranks "
            "would start an engine on all GPUs", key=f"{key}.tensor_parallel_size",
            hint="start one rank, or leave the key out: each rank then has an engine on its own GPU",
        )  # fmt: skip
    on_gpu = context.device().type == "cuda"
    with _place(section, context, key) as place:
        # A prompt whose states are wanted is answered by one token.
        length = max_length + 1
        settings = section.settings(_model(context, place), context.target.dtype, length, most_pictures, on_gpu=on_gpu)
        if context.target.path is not None and not Path(context.target_source()).is_dir():
            settings["revision"] = context.target.revision
        settings |= {} if layers is None else {"max_num_batched_tokens": max(_WHOLE, length)}
        with EngineProcess(
            place / f"engine-{ranks.rank()}", worker or section.name, settings | section.options | dict(more or {}),
            layers,
            python=find_python(section.python, section.name, key=f"{key}.python"), stop=context.stop, key=key,
            timeout_s=section.timeout_s, say=context.say,
            devices=_own_gpu(context) if on_gpu and section.tensor_parallel_size == 1 else None,
        ) as process:  # fmt: skip
            yield process


@contextmanager
def _place(section: ServedSettings, context: Context, key: str) -> Iterator[Path]:
    """Where this stage's engines work: in its own folder, or in one of `scratch` that is removed at the end."""
    place = context.folder / "cache" if section.scratch is None else _own(Path(section.scratch), context.folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = unwritable(place, error)
        raise UserError(problem.problem, key=f"{key}.scratch", where=str(place), hint=problem.hint) from error
    try:
        yield place
    finally:
        # Unless an engine of another rank works there, or left its logs.
        if section.scratch is not None and not list(place.glob("engine-*")):
            shutil.rmtree(place, ignore_errors=True)


def _own(scratch: Path, folder: Path) -> Path:
    """A stage's place in a folder of many runs: two never share it, whatever they are called."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return scratch / f"{folder.parent.name}-{folder.name}-{digest}"


def _model(context: Context, place: Path) -> str:
    """Where the engine reads the target; one that vLLM would not read is written under its names first."""
    source = Path(context.target_source())
    if not source.is_dir():
        return str(source)
    if vllm_reads(source):
        return str(source.resolve())
    served = place / _TARGET
    if ranks.is_main():
        shutil.rmtree(served, ignore_errors=True)  # of an earlier start
        export_target(source, served)
    ranks.barrier()
    return str(served.resolve())


def _own_gpu(context: Context) -> str:
    """This rank's GPU, as CUDA_VISIBLE_DEVICES names it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = context.device().index or 0
    return visible.split(",")[index] if visible else str(index)
