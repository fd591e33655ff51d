"""What a `cache` stage would write, or a first epoch that caches: bytes a sample and in all, before anything runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...core.errors import UserError, counted
from ...data.states.storage import DTYPES, Size, check_disk, record_bytes, samples_per_shard, shown
from ...models.hub import rope_of
from ...models.targets.base import language_shape
from ...models.targets.table import language_section
from ..run.stage import Planned
from ..serve.states_builder import StatesStore, wanted_taps
from .data import OnDisk, image_reader_of, on_disk, samples, text_lengths, visual_tokens
from .models import target_shape

_BEGIN = 128  # ids of a prompt before the target's own: a system message and a few words
_WORD = 1.4  # approximate ids of a word: no tokenizer is asked


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
    exact = text_lengths(plan, files, prompt=limit is not None)
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
