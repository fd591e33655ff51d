"""What a `cache` stage would write, or a first epoch that caches: bytes a sample and in all, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import UserError, counted
from ...core.states import Taps
from ...data.states.dtypes import DTYPES
from ...data.states.estimate import Size, check_disk, record_bytes, samples_per_shard, shown
from ...models.drafters.base import DrafterConfig
from ...models.hub import rope_of
from ...models.targets.base import language_shape
from ...models.targets.table import language_section
from ..run.stage import Planned
from ..serve.states_builder import StatesStore, wanted_taps
from .data import OnDisk, image_reader_of, on_disk, samples, text_lengths, visual_tokens
from .models import target_shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BEGIN = 128  # ids of a prompt before the target's own: a system message and a few words
_WORD = 1.4  # approximate ids of a word: no tokenizer is asked


def describe_states(plan: Planned) -> list[str]:
    """The lines of a recipe's stage that keeps states."""
    recipe = plan.recipe
    return caching(plan, recipe.drafter, target_shape(recipe), recipe.output)


def caching(plan: Planned, drafter: DrafterConfig | None, target: PreTrainedConfig, output: str | Path) -> list[str]:
    """The same for one drafter and target.

    Args:
        drafter: the section whose states are kept; None: `drafters` alone say what is.
        target: its whole config.
        output: the run's folder, whose disk is looked at.
    """
    stage = plan.stage
    store: StatesStore = stage.states if stage.kind == "cache" else stage.source.states
    text = target.get_text_config()
    heads = [drafter, *stage.drafters] if stage.kind == "cache" else [stage.drafter or drafter]
    keeps = wanted_taps(heads, language_shape(text))
    files = on_disk(stage)
    number, how = samples(plan, files)
    counted = None if number is None else token_counts(plan, number, files, target)
    lines = [f"  keeps {described(keeps)} in {store.dtype}"]
    if number is None or counted is None:
        missing = "expected.samples" if number is None else "expected.text_tokens"
        return [*lines, f"  size unknown: the data is not on disk and the recipe declares no {missing}"]
    if not number:
        return [*lines, "  size unknown: no record of the data can be used"]
    text_tokens, visual_tokens, known = counted
    rows = 3 if "mrope_section" in rope_of(text) else 1
    mean_text, mean_visual = text_tokens / number, visual_tokens / number
    sizes = {
        dtype: Size(number, number * record_bytes(
            keeps, text.hidden_size, dtype, text=mean_text, visual=mean_visual, position_rows=rows
        ))
        for dtype in DTYPES
    }  # fmt: skip
    most = "at most " if answer_limit(plan) and known != "declared" else ""
    lines.append(
        f"  samples {number:,} ({how}), {most}{text_tokens:,} text and {visual_tokens:,} visual tokens ({known})"
    )
    lines.append(f"  disk: {most}{summary(sizes[store.dtype], store)}")
    try:
        check_disk(Path(output), sizes[store.dtype].total_bytes)
    except UserError as error:
        lines.append(f"  warning: {error.problem} under {output}: the stage stops before it writes anything")
    others = ", ".join(f"{dtype} {shown(size.total_bytes)}" for dtype, size in sizes.items() if dtype != store.dtype)
    return [*lines, f"  with other dtypes: {others}"]


def summary(size: Size, store: StatesStore) -> str:
    """A cache in words: bytes a sample, in all, and shards."""
    per_shard = samples_per_shard(size, store.shard_bytes)
    return (
        f"{shown(size.sample_bytes)} a sample, {shown(size.total_bytes)} in all, "
        f"in {counted(-(-size.samples // per_shard), 'shard')} of {counted(per_shard, 'sample')}"
    )


def described(keeps: Taps) -> str:
    """For people."""
    parts = [f"H {'at every token' if keeps.everywhere else 'at text and supervised tokens'}"] if keeps.feature else []
    if keeps.text_layers:
        parts.append(f"layers {', '.join(map(str, keeps.text_layers))} at the same tokens")
    if keeps.visual_layers:
        parts.append(f"layer {', '.join(map(str, keeps.visual_layers))} at visual tokens")
    return ", ".join(parts)


def answer_limit(plan: Planned) -> int | None:
    """Tokens of an answer at most, where an earlier stage has the target write them; None: the records have theirs."""
    answers, maker = plan.stage.answers, plan.maker("answers")
    return maker.stage.max_new_tokens if answers is not None and maker is not None else None


def token_counts(
    plan: Planned, number: int, files: OnDisk | None, target: PreTrainedConfig
) -> tuple[int, int, str] | None:
    """Text and visual tokens of all samples together, and how they are known; None: not at all.

    Where the target writes the answers its text is a bound: the prompts and the longest answers, within max_length.
    """
    stage = plan.stage
    expected = stage.expected
    if expected is not None and expected.text_tokens is not None:
        share = number / expected.samples
        return round(expected.text_tokens * share), round((expected.visual_tokens or 0) * share), "declared"
    limit = answer_limit(plan)
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
    text = round(float(lengths.mean()) * len(files)) if len(files) else 0
    if target.model_type == target.get_text_config().model_type:  # reads text alone
        return text, 0, how
    family = language_section(plan.recipe.target).picture_family
    visual = visual_tokens(files, stage.data, image_reader_of(stage.data, target, family))
    return text, int(visual.tokens.sum()), f"{how} and pictures{visual.note()}"
