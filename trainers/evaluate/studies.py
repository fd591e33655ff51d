"""The papers' studies that an evaluation makes, which are extras: each adds sections to its report. Named here alone.

A study is asked whatever the recipe says, and has no section where the recipe does not want it.
"""

from .engine_run import run_in_engine
from .probes import analysis, check_analysis, clip_tables, law, probe, recorded_weights, sight_section, swapped_section

# Of a language target's rows.
OF_ROWS = (clip_tables,)
# Of a language target once the report is written: they decode again, on every rank that holds a part of the target.
OF_TEXT = (recorded_weights, probe, sight_section, swapped_section)
# Of an image generator's pictures once the report is written, and what refuses such a study before any is drawn.
OF_PICTURES = (analysis, law)
CHECKS_OF_PICTURES = (check_analysis,)
# What measures in the place of our own loop, by the kind of the stage's `engine`.
OF_ENGINES = {"vllm": run_in_engine}
