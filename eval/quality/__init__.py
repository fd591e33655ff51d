"""Quality of generated images: FID, CLIP score, precision and recall, inception score, HPS v2.1, aesthetic score."""

from .extractors import Extractor
from .measure import LOWER_IS_BETTER, Measured, QualityConfig, check, measure
from .metric_pictures import Folder, as_is

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
