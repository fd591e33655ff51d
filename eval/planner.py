"""Moved to `eval/studies/planner.py`; this name goes with the evaluate stages that use it."""

from .studies.planner import *  # noqa: F403
