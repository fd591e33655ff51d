"""What a dry run knows of a stage's data: counted where the files are on disk, declared or generated where not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import UserError, counted
from ...core.json_types import listed
from ...core.pictures import TEXT
from ...data.dataset import ConversationData, ConversationDataset
from ...data.families.processor import PictureFamily, Processor, Resizing
from ...data.families.table import USUAL, picture_family_of
from ...data.media import ImageReader
from ...data.processor_files import load_processor
from ...data.records.mixture import JsonFile, Selection, Share, are_present, is_mixture
from ...data.records.records import RecordFile
from ...data.states.storage import DTYPES, Size, check_disk, record_bytes, samples_per_shard, shown
from ...models.hub import config_value, rope_of
from ...models.targets.base import language_shape
from ...models.targets.table import language_section
from ..run.stage import Planned
from ..serve.states_builder import StatesStore, wanted_taps
from ..train.settings import RecordsSettings
from .models import target_shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOOKED_AT = 500  # records whose pictures are opened at most: a head costs little, and a clip is read through
_BEGIN = 128  # ids of a prompt before the target's own: a system message and a few words
_WORD = 1.4  # approximate ids of a word: no tokenizer is asked


@dataclass(frozen=True)
class OnDisk:
    """Columns of the usable records, where they lie, and a line about their files."""

    words: np.ndarray
    images: np.ndarray
    clips: np.ndarray
    files: list[RecordFile]
    places: np.ndarray  # [n,2] file, record
    about: str

    def __len__(self) -> int:
        return len(self.words)


def on_disk(stage: Any) -> OnDisk | None:
    """A stage's data, indexed, where all of it is on disk."""
    data, names = stage.data, listed(stage.data.path)
    if data.from_stage is not None or not are_present(names, opens_fast=True):
        return None
    with tempfile.TemporaryDirectory() as cache:
        chosen = Selection(names, cache=Path(cache), seed=data.mixture_seed, learned=learns_answers(stage))
    places = chosen.places()[: data.max_samples]
    words, images, clips = (chosen.column(name, places) for name in ("lengths", "images", "clips"))
    return OnDisk(abs(words), images.astype(np.int64), clips.astype(np.int64), chosen.files, places, chosen.summary())


def learns_answers(section: object) -> bool:
    """Whether a section with data learns the records' own answers, so that each has to bring one."""
    return getattr(section, "learns_answers", False)


def samples(plan: Planned, files: OnDisk | None) -> tuple[int | None, str]:
    """How many a stage has, and how that is known."""
    if (written := generated(plan)) is not None:
        return written, "generated"
    if files is not None:
        return _usable(plan, files)
    if (expected := dict(plan.stage).get("expected")) is not None:
        return expected.samples, "declared"
    return None, ""


def _usable(plan: Planned, files: OnDisk) -> tuple[int, str]:
    """Records that teach something, where the settings leave the others out and the target's tokenizer is here."""
    data = plan.stage.data
    skips = "skip" in (data.on_error, data.over_length) and learns_answers(plan.stage)
    read = _read(plan, lambda records, index: any(records.counted(index).loss_mask)) if skips else None
    if read is None:
        return len(files), "measured"
    share, known = float(read.mean()), "measured" if len(read) == len(files) else "about: measured on some"
    return round(share * len(files)), known + (f", {1 - share:.1%} of the records are left out" if share < 1 else "")


def _read(plan: Planned, look: Callable[[ConversationDataset, int], int]) -> np.ndarray | None:
    """[n], what `look` says of up to `LOOKED_AT` records, spread over all; None: no tokenizer here, or a fault that the
    stage itself names.
    """
    stage, target = plan.stage, plan.recipe.target
    path = target.path
    if target.draws_images or path is None or not Path(path).is_dir():
        return None
    section = language_section(target)
    try:
        processor = load_processor(path, text_only=section.reads_text_alone, family=section.picture_family)
        with tempfile.TemporaryDirectory() as cache:
            data = ConversationDataset(
                stage.data, stage.format, processor, files=listed(stage.data.path), skipped_log=None, cache=Path(cache),
                learned=learns_answers(stage),
            )  # fmt: skip
            return np.array([look(data, index) for index in range(0, len(data), -(-len(data) // LOOKED_AT))])
    except UserError:
        return None


@dataclass(frozen=True)
class VisualTokens:
    """Visual tokens [n] of each record."""

    tokens: np.ndarray
    is_exact: bool  # else records that were not opened have the tokens of one that was
    note: str = ""  # the end of a line: how many opened records have pictures that are missing or broken


def image_reader_of(
    data: ConversationData, config: PreTrainedConfig, family: PictureFamily | None = None
) -> ImageReader:
    """How the data section looks at pictures. It only counts: a dry run has neither tokenizer nor pixels.

    Args:
        config: of the model whose tiles these are.
        family: that its section names; None: by the config.
    """
    vision = config.vision_config
    nothing: dict[str, Any] = dict.fromkeys(("pad_id", "bos_id", "eos_id", "newline_id"), 0)
    absent: Any = None
    family = family or picture_family_of(config.model_type, config_value(vision, "model_type")) or USUAL
    side, patch, images = family.counted(config, vision)
    processor = Processor(
        absent, images, 0, patch, side, **nothing, picture_family=family,
        resolutions=tuple((a, b) for a, b in config_value(config, "image_grid_pinpoints") or ()),
    )  # fmt: skip
    return data.image_reader(processor)


def visual_tokens(files: OnDisk, data: ConversationData, image_reader: ImageReader) -> VisualTokens:
    """What pictures and clips become, by their layouts. Files are opened only where their size decides."""
    processor = image_reader.processor
    # Of several pictures, which max_9 does not tile.
    plain = data.aspect == "anyres" or processor.picture_family.sizes_decide
    least = USUAL.layouts([(0, 0)] * 2, processor, Resizing("square" if plain else data.aspect))[0].num_tokens
    if processor.reads_whole:
        pixels = data.min_pixels or processor.image_processor.size.get("shortest_edge", 0)
        least = max(1, pixels // processor.image_size**2)
    counts = files.images * least
    tiled = [n for n in (1, 2) if image_reader.needs_sizes(n)]
    opened = np.flatnonzero(np.isin(np.minimum(files.images, 2), tiled) | (files.clips > 0))
    if not len(opened):
        return VisualTokens(counts, True)
    step, unread = -(-len(opened) // LOOKED_AT), 0
    looked = opened[::step]
    each = counts[looked]
    for place, index in enumerate(looked):
        file, number = files.places[index]
        records = files.files[file]
        images = Path(data.images) if data.images else records.reader.folder
        videos = Path(data.videos) if data.videos else images
        try:
            media = image_reader.media(records.read(int(number)), images, videos)
            each[place] = sum(picture.num_tokens for picture in media.pictures)
        except UserError:  # a tile (or the fewest pixels) for each picture
            unread += 1
    counts[opened] = np.repeat(each, step)[: len(opened)]
    note = f"; pictures of {unread:,} opened records cannot be read: a tile each" if unread else ""
    return VisualTokens(counts, step == 1, note)


def most_patches(data: ConversationData, image_reader: ImageReader) -> int:
    """Patches that a tower reads for one row, roughly and at most: a grid that is shrunk has more than positions."""
    tile = image_reader.processor
    tiles = tile.picture_family.most_tiles(tile, image_reader.resizing)
    if "video" in data.model_fields_set:  # a section that says how clips are read has some
        tiles = max(tiles, data.video.num_frames)
    return max(data.max_length, tiles * tile.num_image_tokens)


def tokens(stage: RecordsSettings, files: OnDisk | None, image_reader: ImageReader) -> list[str]:
    """Text and visual tokens of one epoch; words are counted where the data is there, for a tokenizer is not."""
    if files is None:
        expected = stage.expected
        named = () if expected is None else ((expected.text_tokens, "text"), (expected.visual_tokens, "visual"))
        counts = [f"{n:,} {kind}" for n, kind in named if n is not None]
        return [f"  an epoch has {' and '.join(counts)} tokens (declared)"] if counts else []
    data, visual = stage.data, visual_tokens(files, stage.data, image_reader)
    about = "" if visual.is_exact else "about "
    clips = f", of {int(files.clips.sum()):,} clips among them" if files.clips.any() else ""
    # The plain template leaves the question out, a target's own may drop thoughts, and a mark is no word; no word has
    # less than one id.
    plain = stage.format.template in ("plain", "chat")
    words = 0 * files.words if plain else files.words - files.images - files.clips
    long = int((words + visual.tokens > data.max_length).sum())
    return [
        *([f"  {files.about}"] if files.about else []),
        f"  an epoch has {int(files.words.sum()):,} words of text and {about}{int(visual.tokens.sum()):,} visual "
        f"tokens{clips} (measured{visual.note})",
        f"  longer than max_length {data.max_length:,} in words and pictures alone: {about}{long:,} samples "
        f"({data.over_length or f'on_error {data.on_error}'})",
    ]


def generated(plan: Planned, *, without_pictures: bool = False) -> int | None:
    """Records of the splits and mixtures that an earlier stage will write; None: the data is from elsewhere.

    Args:
        without_pictures: count these alone; about, where a mixture or max_samples takes a part of a split.
    """
    maker = plan.maker("data")
    # Another section of the stage, its validation say, may take data from a stage where `data` names files.
    if maker is None or plan.stage.data.from_stage is None:
        return None
    source, data = maker.stage, plan.stage.data
    counts = {split: sum(kinds.values()) for split, kinds in source.records.items()}
    total = chosen = 0.0
    for name in listed(data.path):
        parts = source.mixtures[path.stem] if is_mixture(path := Path(str(name))) else {str(name): "all"}
        for split, strategy in parts.items():
            taken = Share(JsonFile(Path(split)), strategy).count(counts[split]) / max(1, counts[split])
            kinds = {kind: n for kind, n in source.records[split].items() if data.kinds is None or kind in data.kinds}
            total += taken * sum(kinds.values())
            wanted = source.without_pictures if without_pictures else kinds.keys()
            chosen += taken * sum(kinds[kind] for kind in kinds.keys() & wanted)
    return round(chosen * min(1.0, (data.max_samples or total) / total)) if total else 0


# What a `cache` stage would write, or a first epoch that caches: bytes a sample and in all, before anything runs.


def describe_states(plan: Planned) -> list[str]:
    """The lines of a stage that keeps states; one is a warning where the disk of the run's output cannot hold them."""
    stage, recipe = plan.stage, plan.recipe
    store: StatesStore = stage.states if stage.kind == "cache" else stage.source.states
    target = target_shape(recipe)
    text = target.get_text_config()
    heads = [recipe.drafter, *stage.drafters] if stage.kind == "cache" else [stage.drafter or recipe.drafter]
    keeps = wanted_taps(heads, language_shape(text))
    what = [f"H {'at every token' if keeps.everywhere else 'at text and supervised tokens'}"] * bool(keeps.feature)
    if keeps.text_layers:
        what.append(f"layers {', '.join(map(str, keeps.text_layers))} at the same tokens")
    if keeps.visual_layers:
        what.append(f"layer {', '.join(map(str, keeps.visual_layers))} at visual tokens")
    lines = [f"  keeps {', '.join(what)} in {store.dtype}"]
    files = on_disk(stage)
    number, how = samples(plan, files)
    if number == 0:
        return [*lines, "  size unknown: no record of the data can be used"]
    writer = None if stage.answers is None else plan.maker("answers")
    # Where the target writes the answers its text is a bound: the prompts and the longest answers, within max_length.
    limit = None if writer is None else writer.stage.max_new_tokens
    tokens = None if number is None else _tokens(plan, number, files, limit)
    if number is None or tokens is None:
        missing = "expected.samples" if number is None else "expected.text_tokens"
        return [*lines, f"  size unknown: the data is not on disk and the recipe declares no {missing}"]
    text_tokens, visual, known = tokens
    rows, sizes = 3 if "mrope_section" in rope_of(text) else 1, {}
    for dtype in DTYPES:
        each = record_bytes(keeps, text.hidden_size, dtype, text=text_tokens / number, visual=visual / number,
                            position_rows=rows)  # fmt: skip
        sizes[dtype] = Size(number, number * each)
    size, most = sizes[store.dtype], "at most " if limit and known != "declared" else ""
    per_shard = samples_per_shard(size, store.shard_bytes)
    lines += [
        f"  samples {number:,} ({how}), {most}{text_tokens:,} text and {visual:,} visual tokens ({known})",
        f"  disk: {most}{shown(size.sample_bytes)} a sample, {shown(size.total_bytes)} in all, "
        f"in {counted(-(-size.samples // per_shard), 'shard')} of {counted(per_shard, 'sample')}",
    ]
    try:
        check_disk(Path(recipe.output), size.total_bytes)
    except UserError as error:
        lines.append(f"  warning: {error.problem} under {recipe.output}: the stage stops before it writes anything")
    others = ", ".join(f"{dtype} {shown(size.total_bytes)}" for dtype, size in sizes.items() if dtype != store.dtype)
    return [*lines, f"  with other dtypes: {others}"]


def _tokens(plan: Planned, number: int, files: OnDisk | None, limit: int | None) -> tuple[int, int, str] | None:
    """Text and visual tokens of all samples together, and how they are known; None: not at all.

    Args:
        limit: tokens of an answer at most, where the target writes them; None: the records have theirs.
    """
    stage, target = plan.stage, target_shape(plan.recipe)
    expected = stage.expected
    if expected is not None and expected.text_tokens is not None:
        share = number / expected.samples
        return round(expected.text_tokens * share), round((expected.visual_tokens or 0) * share), "declared"
    if files is None:
        maker = plan.maker("data")
        if maker is None or maker.stage.kind != "prompts" or limit is None:
            return None
        if any(split.pictures is not None for split in maker.stage.splits.values()):
            return None
        written = _BEGIN + maker.stage.max_new_tokens
        each = min(written + limit, stage.data.max_length)
        return number * each, 0, f"about, prompts of {written}; answers of up to {limit} each"

    def length(records: ConversationDataset, index: int) -> int:
        one = records.counted(index) if limit is None else records.request(index, pixels=False)[0]
        return int((np.asarray(one.modality) == TEXT).sum())

    exact = _read(plan, length)
    lengths = _WORD * files.words if exact is None else exact
    how = "about, from words" if exact is None else "by the target's tokenizer"
    if limit is not None:
        lengths = np.minimum(lengths + limit, stage.data.max_length)
        how += f"; answers of up to {limit} each"
    text = round(float(lengths.mean()) * len(files))
    if target.model_type == target.get_text_config().model_type:  # reads text alone
        return text, 0, how
    family = language_section(plan.recipe.target).picture_family
    visual = visual_tokens(files, stage.data, image_reader_of(stage.data, target, family))
    return text, int(visual.tokens.sum()), f"{how} and pictures{visual.note}"
