"""What target and EAGLE head give each cell of finished pictures, and where decoding stood when it drew them.

It shows why drafts of pictures are rejected (LANTERN, section 3; ADT-Tree, section III-B), what relaxed acceptance
gains (LANTERN, tables 1, 3 and 9, appendix G), and where in a picture trees go deep (ADT-Tree, figure 2).
"""

from .distributions import Curves, entropy, overlap, ranks, teacher_forced, top_mass
from .maps import accepted_histogram, cell_map, compare, cycle_map, depth_map, length_map, mean_map
from .reading import AnalysisConfig, Reading, encoded_pictures, read_pictures
from .relaxation import BoundCost, Relaxed, bound_cost, relaxed

__all__ = [
    "AnalysisConfig",
    "BoundCost",
    "Curves",
    "Reading",
    "Relaxed",
    "accepted_histogram",
    "bound_cost",
    "cell_map",
    "compare",
    "cycle_map",
    "depth_map",
    "encoded_pictures",
    "entropy",
    "length_map",
    "mean_map",
    "overlap",
    "ranks",
    "read_pictures",
    "relaxed",
    "teacher_forced",
    "top_mass",
]
