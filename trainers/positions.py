"""Said before a run: which samples are too long for it, and which prompts go beyond a draft's positions.

TABED's M collapses on five pictures: 2,880 visual tokens against the 2,048 positions of its drafts, which were not
trained on several pictures either. Neither is an error anywhere; both cost acceptance, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..data.dataset import ConversationDataset
from ..data.lengths import count_long

Say = Callable[[str], None]

_MORE_POSITIONS = "give the draft more positions (drafter.rope_scaling, trained on samples as long)"
_DONE = {
    "skip": "they are left out",
    "drop_images": "their pictures are taken away and their text is kept",
}


def before_training(dataset: ConversationDataset, positions: int, say: Say, *, prompts: bool = False) -> None:
    """Say what the data section takes from which files, and how many samples are too long.

    Args:
        positions: of the language model.
        prompts: the samples' answers are written by a model, so that their prompts alone are counted.

    Raises:
        UserError: there are such samples, and the data section wants none.
    """
    if summary := dataset.selection.summary():
        say(summary)
    config = dataset.config
    found = count_long(dataset, config.max_length, prompts=prompts)
    if found.first is None:
        say(f"no sample is longer than max_length {found.limit:,}" + ("" if found.is_exact else ", of those looked at"))
        return
    if not prompts:
        _ = dataset[found.first]  # stops where the section says so
    done = _DONE[config.over_length if config.over_length in _DONE else "skip"]
    cure = f"raise max_length (up to {positions:,} positions)" if config.max_length < positions else _MORE_POSITIONS
    say(
        f"longer than max_length {found.limit:,}: {found}; {done}, skipped.jsonl lists them as they come up. "
        f"To keep them whole: {cure}, tile pictures less (aspect) or take fewer frames (video.num_frames)."
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
    """Warn where prompts with their pictures, and what is decoded behind them, go beyond a draft's positions.

    Args:
        name: of the benchmark.
        positions: of each draft that sees the pictures, by its name.
        flat: the drafts without a newline, which read one tile of each picture.
    """
    for draft, held in positions.items():
        found = count_long(dataset, held - max_new_tokens, prompts=True, flat=draft in flat)
        if found.first is not None:
            say(
                f"warning: {name}: prompts that leave less than {max_new_tokens:,} of the {held:,} positions of the "
                f"draft {draft}: {found}. In mode M it proposes noise behind its positions. Cures: mode P (pools "
                f"pictures 2 x 2, a quarter of their tokens); {_MORE_POSITIONS}; train on several pictures (a mixture "
                "with such data)."
            )
