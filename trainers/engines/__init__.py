"""Serving engines that write a target's answers and hidden states, beside the ranks."""

from .section import EngineSection, ServedEngine, TransformersEngine

__all__ = ["EngineSection", "ServedEngine", "TransformersEngine"]
