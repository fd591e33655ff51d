"""Converts a number of visual tokens to a number of frames or pixels, for each family of targets.

Sparrow and SAGE name their inputs by visual tokens (0.5k to 25k); what a clip has is frames. The nearest number of
frames counts, not the largest that fits: LLaVA-OneVision's "25k" are 128 frames of 196 tokens and a newline, 25,089.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import UserError
from .videos import VideoSettings

PRESETS = {
    "0.5k": 500, "1.5k": 1_500, "4.5k": 4_500, "6k": 6_000, "13k": 13_000, "15k": 15_000, "17k": 17_000, "25k": 25_000,
}  # fmt: skip


def visual_tokens(budget: int | str) -> int:
    """Tokens of a budget: any number, or one with k after it. Raises `UserError` for what is neither."""
    text = str(budget).strip().lower()
    try:
        number = float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise UserError(
            f"{budget!r} is no number of visual tokens", hint=f"give a number, or one of {', '.join(PRESETS)}"
        )
    return round(number)


def label(budget: int | str) -> str:
    """How tables name a budget: 0.5k, 25k, 700."""
    tokens = visual_tokens(budget)
    return f"{tokens / 1000:g}k" if tokens % 100 == 0 and tokens >= 500 else str(tokens)


@dataclass(frozen=True)
class FrameTokens:
    """How a family counts a clip.

    Args:
        per_step: tokens of each step in time.
        frames_per_step: Qwen's towers join two frames; an odd last one is doubled.
        per_clip: tokens beyond those of its frames (a newline).
    """

    per_step: int
    frames_per_step: int = 1
    per_clip: int = 0

    def total(self, num_frames: int) -> int:
        """Tokens of a clip with this number of frames."""
        return self.per_step * -(-num_frames // self.frames_per_step) + self.per_clip

    def frames(self, budget: int | str) -> int:
        """The number of frames whose tokens are nearest to the budget; at least one step."""
        steps = (visual_tokens(budget) - self.per_clip) / self.per_step
        return max(1, int(steps + 0.5)) * self.frames_per_step


def tile_frames(settings: VideoSettings, patches: int) -> FrameTokens:
    """How families count whose frames are tiles (LLaVA-OneVision: 196 a frame and one newline).

    Args:
        patches: along a side of a frame.
    """
    one, two = (settings.picture(count, patches).num_tokens for count in (1, 2))
    return FrameTokens(two - one, per_clip=2 * one - two)
