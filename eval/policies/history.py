"""How the deepest tree follows the drafts accepted lately (SAGE, section 3.3, "adaptive history tracking").

The paper gives the window and the two thresholds; step, bounds and what a change does to the window are ours.
"""

from __future__ import annotations

from collections import deque

from pydantic import Field, model_validator

from ...core.fields import MOST_LEVELS
from ...core.section import Section


class History(Section):
    # Cycles that the mean is taken over.
    window: int = Field(10, ge=1)
    # Mean accepted drafts, without the bonus token, below which trees get one level shallower, and above which one
    # level deeper; between the two nothing changes.
    low: float = Field(2.0, ge=0)
    high: float = Field(3.0, ge=0)
    # The deepest that a tree may get; the shallowest is min_depth.
    max_depth: int = Field(10, ge=1, le=MOST_LEVELS)
    # Whether nothing changes before the window is full.
    full_window: bool = True
    # Whether a change empties the window, so that the next one is judged by trees of the new depth.
    clear: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> History:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class DepthCap:
    """The deepest tree of one request. Without `settings` it stays at `start`."""

    def __init__(self, settings: History | None, *, start: int, least: int):
        self.settings, self.value, self.least = settings, start, least
        self._window: deque[int] = deque(maxlen=settings.window if settings else 1)

    def observe(self, accepted: int) -> None:
        """Move `value` by at most one level after a cycle with `accepted` drafts (without the bonus token)."""
        settings = self.settings
        if settings is None:
            return
        self._window.append(accepted)
        if settings.full_window and len(self._window) < settings.window:
            return
        mean, before = sum(self._window) / len(self._window), self.value
        if mean < settings.low:
            self.value = max(self.least, self.value - 1)
        elif mean > settings.high:
            self.value = min(settings.max_depth, self.value + 1)
        if settings.clear and self.value != before:
            self._window.clear()
