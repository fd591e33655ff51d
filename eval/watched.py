"""Moved to `eval/studies/confidence.py`; this name goes with the evaluate stages that use it."""

from .studies.confidence import *  # noqa: F403
