"""A recipe's `hardware` section."""

from __future__ import annotations

from pydantic import Field

from ...core.section import Section


class Hardware(Section):
    """What a recipe is meant to run on: a dry run says whether it fits. Nothing else reads it."""

    # GPUs of the run, all nodes together.
    gpus: int = Field(ge=1)
    # Of each of them, as it is sold: 80 for an H100 of 80 GB.
    memory_gb: float = Field(gt=0)
