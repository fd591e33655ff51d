"""The figures of the visual track: one function writes one file, from tensors and numbers of `analysis`.

They are those of LANTERN and ADT-Tree, for whatever was measured.
"""

from ..style import COLORS
from .methods import TradeOff, acceptance_grid, initialisations, latency_bars, trade_off
from .pictures import MOST_COLUMNS, depth_map, distributions_at, length_map, set_size_grid, top1_map
from .shares import accepted_histogram, accuracy_bars, probability_bars, rank_histogram

__all__ = [
    "COLORS",
    "MOST_COLUMNS",
    "TradeOff",
    "acceptance_grid",
    "accepted_histogram",
    "accuracy_bars",
    "depth_map",
    "distributions_at",
    "initialisations",
    "latency_bars",
    "length_map",
    "probability_bars",
    "rank_histogram",
    "set_size_grid",
    "top1_map",
    "trade_off",
]
