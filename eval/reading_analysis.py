"""Moved to `eval/studies/visual_tokens.py`; this name goes with the evaluate stages that use it."""

from .studies.visual_tokens import *  # noqa: F403
