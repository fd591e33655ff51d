"""Moved to `eval/studies/weights.py`; this name goes with the evaluate stages that use it."""

from .studies.weights import *  # noqa: F403
