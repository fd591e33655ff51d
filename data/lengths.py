"""Counts the samples that are longer than a model's context without encoding all of them.

Words and pictures alone prove a sample too long, and bytes alone prove one short enough; of those between, all are
encoded where they are few, and some at equal distances where they are many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import UserError
from .dataset import ConversationDataset
from .families.prompt_templates import SYSTEM
from .text_pieces import TooLong

LOOKED_AT = 2000  # samples that are encoded at most
_COUNTED = 4096  # ids of a sample that are counted in any case; of one that has far more and beyond the limit no more
_TOPS = 16  # samples among which the longest is looked for
_ROOM = 64  # ids of a template that a record's own punctuation may not cover


@dataclass(frozen=True)
class LongSamples:
    """Result of the count. `count` is an estimate if not all uncertain samples were encoded."""

    samples: int
    limit: int  # ids that there is room for
    count: int  # samples of more
    longest: int  # ids of the longest that was encoded
    is_exact: bool
    is_longest: bool  # of all samples
    first: int | None  # one of them

    def __str__(self) -> str:
        about = "" if self.is_exact else "about "
        least = "" if self.is_longest else "at least "
        return f"{about}{self.count:,} of {self.samples:,} (the longest has {least}{self.longest:,} ids)"


def count_long(dataset: ConversationDataset, limit: int, *, prompts: bool = False, flat: bool = False) -> LongSamples:
    """Samples of more than `limit` ids with all their pictures.

    Args:
        prompts: count each up to its last answer, as it is decoded.
        flat: of prompts, as a draft without a newline reads them: of a tiled picture the first tile.
    """
    numbers = np.arange(len(dataset))
    least, most = _bounds(dataset, prompts)
    # A bound on the whole sample does not hold for its prompt.
    certain = np.zeros(len(dataset), dtype=bool) if prompts else least > limit
    doubtful = numbers[~certain & (most > limit)]
    looked_at = doubtful[:: max(1, -(-len(doubtful) // LOOKED_AT))]
    # The longest is looked for among those with the most words and pictures, and those that may have the most ids.
    tops = np.concatenate([np.argsort(bound, kind="stable")[-_TOPS:] for bound in (least, most)])
    counted = {i: _num_ids(dataset, i, prompts, flat, limit) for i in {*looked_at.tolist(), *tops.tolist()}}
    lengths = {index: count for index, (count, _) in counted.items()}
    long = [index for index in looked_at.tolist() if lengths[index] > limit]
    share = len(long) / len(looked_at) if len(looked_at) else 0.0
    is_exact = len(looked_at) == len(doubtful)
    first = next(iter([*numbers[certain][:1].tolist(), *long]), None)
    return LongSamples(
        samples=len(dataset),
        limit=limit,
        count=int(certain.sum()) + round(share * len(doubtful)),
        longest=max(lengths.values()),
        is_exact=is_exact,
        is_longest=is_exact and not certain.any() and all(whole for _, whole in counted.values()),
        first=first,
    )


def _bounds(dataset: ConversationDataset, prompts: bool) -> tuple[np.ndarray, np.ndarray]:
    """[n] and [n] ids that each sample has at least and at most; its prompt has no more, and may have less."""
    image_reader = dataset.image_reader(prompt=prompts)
    images, clips, sizes = (dataset.column(name).astype(np.int64) for name in ("images", "clips", "sizes"))
    per_image = image_reader.processor.num_image_tokens
    # The plain template leaves the question out, a target's own may drop thoughts, and a mark is no word.
    template = dataset.form.template
    words = 0 * dataset.lengths if template in ("plain", "chat") else abs(dataset.lengths) - images - clips
    least = words.astype(np.int64) + images * per_image  # no word has less than one, whatever the tokenizer
    # No id has less than a byte of its own, and a record's quotation marks and names outweigh a template's words.
    most = sizes + images * (per_image + 3) + len(dataset.form.system or SYSTEM) + _ROOM
    most = most + len(dataset.config.question_end)
    unknown = (clips > 0) | (template == "chat")  # which may write much beside a record's tools
    if image_reader.needs_sizes(1):
        unknown |= images > 0
    return least, np.where(unknown, np.iinfo(np.int64).max, most)


def _num_ids(dataset: ConversationDataset, index: int, prompts: bool, flat: bool, limit: int) -> tuple[int, bool]:
    """Ids, and whether all were counted: of far more than `limit` they are not. (0, True) for a record that cannot be
    read; the error is reported when the record is used.
    """
    try:
        return dataset.num_ids(index, prompt=prompts, flat=flat, most=max(limit, _COUNTED)), True
    except TooLong as error:
        return error.at_least or 0, False
    except UserError:
        return 0, True
