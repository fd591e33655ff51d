"""Quality of generated images: FID, CLIP score, precision and recall, inception score, HPS v2.1, aesthetic score."""

from .extractors import Extractor, Folder, as_is
from .measure import LOWER_IS_BETTER, Measured, QualityConfig, check, measure

__all__ = [
    "LOWER_IS_BETTER",
    "Extractor",
    "Folder",
    "Measured",
    "QualityConfig",
    "as_is",
    "check",
    "measure",
]
