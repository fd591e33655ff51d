"""Warnings before a run: samples that are too long, and prompts that exceed a draft's positions.

TABED's M collapses on five pictures: 2,880 visual tokens against the 2,048 positions of its drafts, which were not
trained on several pictures either. Neither raises an error, and both silently lower acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ...data.dataset import ConversationDataset
from ...data.lengths import count_long

Say = Callable[[str], None]

_MORE_POSITIONS = "give the draft more positions (drafter.rope_scaling, trained on samples as long)"
_DONE = {
    "skip": "they are left out",
    "drop_images": "their pictures are taken away and their text is kept",
}


def before_training(dataset: ConversationDataset, positions: int, say: Say, *, prompts: bool = False) -> None:
    """Print which files a data section reads, and how many samples are too long.

    Args:
        positions: of the language model.
        prompts: the samples' answers are written by a model, so that their prompts alone are counted.

    Raises:
        UserError: there are such samples, and the data section wants none.
    """
    if summary := dataset.selection.summary():
        say(summary)
    config = dataset.config
    too_long = count_long(dataset, config.max_length, prompts=prompts)
    if too_long.first is None:
        looked = "" if too_long.is_exact else " that was looked at"
        say(f"no sample{looked} is longer than max_length {too_long.limit:,}")
        return
    if not prompts:
        _ = dataset[too_long.first]  # stops where the section says so
    done = _DONE[config.over_length if config.over_length in _DONE else "skip"]
    hint = f"raise max_length (up to {positions:,} positions)" if config.max_length < positions else _MORE_POSITIONS
    say(
        f"longer than max_length {too_long.limit:,}: {too_long}; {done}, skipped.jsonl lists them as they come up. "
        f"To keep them whole: {hint}, tile pictures less (aspect) or take fewer frames (video.num_frames)."
    )


def before_decoding(
    name: str,
    dataset: ConversationDataset,
    positions: Mapping[str, int],
    say: Say,
    *,
    max_new_tokens: int,
    flat: Collection[str] = (),
) -> None:
    """Warn where prompts with their pictures, and what is decoded after them, go beyond a draft's positions.

    Args:
        name: of the benchmark.
        positions: of each draft that sees the pictures, by its name.
        flat: the drafts without a newline, which read one tile of each picture.
    """
    for draft, held in positions.items():
        too_long = count_long(dataset, held - max_new_tokens, prompts=True, flat=draft in flat)
        if too_long.first is not None:
            say(
                f"warning: {name}: prompts that leave less than {max_new_tokens:,} of the {held:,} positions of the "
                f"draft {draft}: {too_long}. In mode M it proposes noise beyond its positions. Hints: mode P (pools "
                f"pictures 2 x 2, a quarter of their tokens); {_MORE_POSITIONS}; train on several pictures (a mixture "
                "with such data)."
            )
