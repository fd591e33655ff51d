"""Moved to `eval/studies/confidence_figures.py`; this name goes with the evaluate stages that use it."""

from .studies.confidence_figures import *  # noqa: F403
