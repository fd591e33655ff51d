"""Sparrow's and SAGE's tables, of the papers' kind of sets and of clips at several lengths."""

from __future__ import annotations

from collections.abc import Sequence

from ...eval.measured_rows import Row
from ...eval.studies.video import video_sections
from ...eval.tables import ReportSection
from .benchmarks import SetsBenchmark, of_class
from .measuring import Measuring
from .reporting import infos


def clip_tables(measuring: Measuring, rows: Sequence[Row]) -> list[ReportSection]:
    """Those that were measured."""
    stage = measuring.stage
    measured = stage.lengths or of_class(stage.benchmarks, SetsBenchmark)
    return video_sections(rows, infos(measuring.drafting)) if measured else []
