"""Serving engines that write a target's answers and hidden states, beside the ranks."""

from .section import EngineSection, TransformersEngine, VllmEngine

__all__ = ["EngineSection", "TransformersEngine", "VllmEngine"]
