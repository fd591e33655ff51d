"""The records of a stage's `data` section: which files they are in, and whether the target can read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.errors import UserError
from ...core.json_types import listed
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.families.processor import Processor
from ...data.records.mixture import Name, is_mixture
from ...models.decoding.decoder import CachedDecoder
from ...models.targets.table import language_section
from .context import Context


def data_files(data: ConversationData, context: Context) -> list[Name]:
    """Files on disk, tables and tars, or splits and mixtures of the dataset that an earlier stage generated."""
    names: list[Name] = listed(data.path)
    if data.from_stage is None:
        return names
    folder = context.inputs["data"] / "world"
    return [folder / (name if is_mixture(Path(name)) else f"{name}.json") for name in map(str, names)]


def open_records(
    data: ConversationData,
    form: PromptFormat,
    context: Context,
    processor: Processor,
    *,
    log: str = "skipped",
    files: Sequence[Name] | None = None,
    drafter_processor: Processor | None = None,
    learned: bool = True,
) -> ConversationDataset:
    """The records of a data section, from its own or other `files`; what is left out is listed in the stage's folder,
    in `log`. Where their answers are not `learned`, records may be questions alone.
    """
    return ConversationDataset(
        data,
        form,
        processor,
        files=data_files(data, context) if files is None else files,
        skipped_log=context.folder / f"{log}.jsonl",
        cache=context.folder / "cache",
        drafter_processor=drafter_processor,
        learned=learned,
    )


def check_fit(
    context: Context, dataset: ConversationDataset, decoder: CachedDecoder, *, as_cut: bool, section: str = "data"
) -> None:
    """That the target can read the data: past its positions it says noise, and in decoding it wants its own tiles.

    Pictures are read as the data cuts them (`as_cut`), or as requests, whose further tiles are taken away for a target
    of single ones. `section` of the stage has the keys; empty: they are the stage's own.
    """
    data, key = dataset.config, ".".join(filter(None, ("stages", context.name, section)))
    if decoder.max_positions is not None and data.max_length > decoder.max_positions:
        raise UserError(
            f"max_length is {data.max_length} and the target has {decoder.max_positions} positions", key=key,
            hint=f"set max_length to {decoder.max_positions} or less",
        )  # fmt: skip
    in_tiles = language_section(context.target).reads_tiles
    if in_tiles in (None, data.aspect.startswith("anyres")) or not dataset.column("images").any():
        return
    if not in_tiles and not as_cut:
        return
    raise UserError(
        f"aspect is {data.aspect} and the target reads pictures in {'tiles' if in_tiles else 'single tiles'}",
        key=key,
        hint="set aspect: anyres (LLaVA-NeXT) or anyres_max_9 (LLaVA-OneVision), or target.anyres: false"
        if in_tiles
        else "set aspect: square or pad, or leave target.anyres out",
    )
