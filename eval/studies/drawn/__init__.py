"""What target and EAGLE head give each cell of finished pictures, and where decoding stood when it drew them.

It shows why drafts of pictures are rejected (LANTERN, section 3; ADT-Tree, section III-B), what relaxed acceptance
gains (LANTERN, tables 1, 3 and 9, appendix G), and where in a picture trees go deep (ADT-Tree, figure 2).
"""

from .drawn_cells import AnalysisConfig, CellStatistics, encoded_pictures, read_pictures

__all__ = ["AnalysisConfig", "CellStatistics", "encoded_pictures", "read_pictures"]
