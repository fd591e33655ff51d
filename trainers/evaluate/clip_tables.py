"""Sparrow's and SAGE's tables and figures, of the papers' kind of sets and of clips at several lengths."""

from __future__ import annotations

from collections.abc import Sequence

from ...eval.measured_rows import Row
from ...eval.studies.video import video_sections
from ...eval.tables import ReportSection
from .benchmarks import SetsBenchmark, of_class
from .measuring import Measuring
from .reporting import infos


def clip_tables(measuring: Measuring, rows: Sequence[Row]) -> list[ReportSection]:
    """Those that were measured; figures go to the stage's folder."""
    stage, drafting = measuring.stage, measuring.drafting
    if not stage.lengths and not of_class(stage.benchmarks, SetsBenchmark):
        return []
    held = {one.name: one.held_visual for one in drafting if one.held_visual is not None}
    return video_sections(measuring.context.folder, rows, infos(drafting), held=held)
