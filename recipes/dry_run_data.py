"""What a dry run knows of a stage's data: counted where the files are on disk, declared or generated where not."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.conversations import PromptFormat
from ..data.dataset import ConversationData
from ..data.mixture import Share, are_present, is_mixture
from ..data.selection import Selection, fewest_ids
from ..trainers.run import Planned


@dataclass(frozen=True)
class OnDisk:
    """Columns of the usable records, and a line about their files."""

    words: np.ndarray
    images: np.ndarray
    clips: np.ndarray
    about: str

    def __len__(self) -> int:
        return len(self.words)


def on_disk(data: ConversationData) -> OnDisk | None:
    """The data, indexed, where all of it is on disk."""
    names = _names(data)
    if data.from_stage is not None or not are_present(names):
        return None
    with tempfile.TemporaryDirectory() as cache:
        chosen = Selection(names, cache=Path(cache), seed=data.mixture_seed)
    places = chosen.places()[: data.max_samples]
    columns = (chosen.column(name, places) for name in ("lengths", "images", "clips"))
    words, images, clips = columns
    return OnDisk(abs(words), images, clips, chosen.summary())


def samples(stage: Any, generated: int | None, found: OnDisk | None) -> tuple[int | None, str]:
    """How many, and how that is known."""
    if generated is not None:
        return generated, "the world's"
    if found is not None:
        return len(found), "measured"
    if (expected := getattr(stage, "expected", None)) is not None:
        return expected.samples, "declared"
    return None, ""


def tokens(stage: Any, found: OnDisk | None, patches: int) -> list[str]:
    """Text and visual tokens of one epoch; words are counted where the data is there, for a tokenizer is not."""
    if found is not None:
        visual = int(found.images.sum()) * patches
        clips = f" and {int(found.clips.sum()):,} clips" if found.clips.any() else ""
        lines = [f"  {found.about}"] if found.about else []
        lines.append(
            f"  an epoch has {int(found.words.sum()):,} words of text and {visual:,} visual tokens{clips} (measured)"
        )
        return [*lines, _too_long(stage.data, stage.format, found, patches)]
    if stage.expected is None:
        return []
    text, visual = stage.expected.text_tokens, stage.expected.visual_tokens
    named = [f"{n:,} {kind}" for n, kind in ((text, "text"), (visual, "visual")) if n is not None]
    return [f"  an epoch has {' and '.join(named)} tokens (declared)"] if named else []


def _too_long(data: ConversationData, form: PromptFormat, found: OnDisk, patches: int) -> str:
    # The plain template leaves the question out, and a mark is no word.
    words = 0 * found.words if form.template == "plain" else found.words - found.images - found.clips
    count = int((fewest_ids(words, found.images, tokens_per_image=patches) > data.max_length).sum())
    done = data.over_length or f"on_error {data.on_error}"
    return f"  longer than max_length {data.max_length:,} in words and pictures alone: {count:,} samples ({done})"


def generated(plan: Planned, planned: Sequence[Planned]) -> int | None:
    """Records of the splits and mixtures that an earlier stage will write."""
    maker = plan.inputs.get("data")
    source: Any = next((p.stage for p in planned if p.name == maker), None)
    if source is None:
        return None
    data = plan.stage.data
    counts = {split: sum(kinds.values()) for split, kinds in source.splits.items()}
    total = 0
    for name in _names(data):
        if is_mixture(path := Path(name)):
            parts = source.mixtures[path.stem]
            total += sum(Share(Path(split), strategy).count(counts[split]) for split, strategy in parts.items())
        elif data.kinds is not None:
            total += sum(source.splits[name].get(kind, 0) for kind in data.kinds)
        else:
            total += counts[name]
    return min(total, data.max_samples or total)


def _names(data: ConversationData) -> list[str]:
    return [data.path] if isinstance(data.path, str) else data.path
