"""Moved to `eval/studies/video_figures.py`; this name goes with the evaluate stages that use it."""

from .studies.video_figures import *  # noqa: F403
