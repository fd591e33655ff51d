"""Moved to `eval/studies/drawn`; this name goes with the evaluate stages that use it."""

from .studies.drawn import *  # noqa: F403
