"""Draft heads that read a language model's states: Sparrow, MSD, ViSpec, HiViS, EAGLE and EAGLE-3, as one family."""

from __future__ import annotations

from typing import Any

from .config import (
    EAGLE3_LOSS,
    EAGLE_LOSS,
    READING_KINDS,
    TEXT_STAGE,
    VISUAL_STAGE,
    AnyReading,
    Eagle3Config,
    EagleReadingConfig,
    HivisConfig,
    MsdConfig,
    ReadingConfig,
    ReadingObjective,
    SparrowConfig,
    VispecConfig,
)
from .files import (
    build_reading_head,
    find_reading_head,
    likeliest_ids,
    load_reading_head,
    reading_head_like,
    reading_manifest,
    save_reading_head,
)
from .head import AnyHead, Eagle3Head, ReadingHead
from .proposal import ReadingProposal
from .shape import reading_shape, taps_of, wanted
from .training import ReadingTraining

__all__ = [
    "EAGLE3_LOSS",
    "EAGLE_LOSS",
    "READING_KINDS",
    "TEXT_STAGE",
    "VISUAL_STAGE",
    "AnyHead",
    "AnyReading",
    "Eagle3Config",
    "Eagle3Head",
    "EagleReadingConfig",
    "HivisConfig",
    "MsdConfig",
    "ReadingConfig",
    "ReadingHead",
    "ReadingObjective",
    "ReadingProposal",
    "ReadingTraining",
    "SparrowConfig",
    "VispecConfig",
    "build_reading_head",
    "find_reading_head",
    "likeliest_ids",
    "load_reading_head",
    "reading_head_like",
    "reading_manifest",
    "reading_proposal",
    "reading_shape",
    "reading_training",
    "save_reading_head",
    "taps_of",
    "wanted",
]


def reading_training(
    head: AnyHead, target: Any, config: AnyReading, objective: ReadingObjective | None = None
) -> ReadingTraining:
    """The module that an engine calls with a `StatesBatch`. `objective` is the stage's; None: the config's."""
    return ReadingTraining(head, target, config, objective)


def reading_proposal(head: AnyHead, target: Any, config: AnyReading) -> ReadingProposal:
    """A `Drafter`. Settings of decoding alone (vata, visual_share, positions) may differ from those of training."""
    return ReadingProposal(head, target, config)
