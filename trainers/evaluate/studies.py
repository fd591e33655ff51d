"""The papers' studies that an evaluation makes, which are extras: each adds sections to its report. Named here alone.

A study is asked whatever the recipe says, and has no section where the recipe does not want it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...eval.measured_rows import Row
from ...eval.tables import ReportSection
from ...models.targets.drawing import Generator
from ..run.context import Context
from .drafters import Drafting
from .drawn_analysis import analysis, check_analysis
from .engine_run import run_in_engine
from .evaluate_settings import EvaluateSettings
from .kept_pictures import PicturesOfRows
from .measuring import Measuring
from .probes import clip_tables, probe
from .recorded_weights import recorded_weights
from .requests import ConversationSet

# Of a language target's rows.
OF_ROWS: tuple[Callable[[Measuring, Sequence[Row]], list[ReportSection]], ...] = (clip_tables,)
# Of a language target once the report is written: they decode again, on every rank that holds a part of the target.
OF_TEXT: tuple[Callable[[Measuring, Sequence[ConversationSet], Sequence[Row]], list[ReportSection]], ...] = (
    recorded_weights, probe,
)  # fmt: skip
# Of an image generator's pictures once the report is written, and what refuses such a study before any is drawn.
OF_PICTURES: tuple[Callable[[PicturesOfRows], list[ReportSection]], ...] = (analysis,)
CHECKS_OF_PICTURES: tuple[Callable[[EvaluateSettings, Generator, Sequence[Drafting]], None], ...] = (check_analysis,)
# What measures in the place of our own loop, by the kind of the stage's `engine`.
OF_ENGINES: dict[str, Callable[[EvaluateSettings, Context], None]] = {"vllm": run_in_engine}
