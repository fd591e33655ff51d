"""The settings of an `evaluate` stage's probes. What they read is in `probes.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from ...core.errors import Refused, did_you_mean
from ...core.fields import MOST_ANSWER
from ...core.section import Section
from ...data.dataset import ConversationData
from ...data.sources import AnswersConfig
from ...eval.studies.drawn_cells import AnalysisConfig
from .benchmarks import Benchmark, SetsBenchmark, of_class


class Importance(Section):
    """Right answers where visual tokens are hidden from a layer on (Sparrow, figures 3a and 5)."""

    # Of the evaluation's sets those whose questions have options and end in a letter: published ones asked so
    # (convention: stock or verbatim), or files of one's own whose records have the right option's `letter`.
    sets: list[str] = Field(min_length=1)
    # Layers from which on visual tokens are hidden, 0 to the target's number of them; null: every other one.
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    # Tokens of an answer: a letter, and what may stand before it.
    max_new_tokens: int = Field(8, ge=1, le=MOST_ANSWER)

    def check(self, benchmarks: Mapping[str, Benchmark]) -> None:
        """Raises `ValueError` where the evaluation does not ask these sets for letters."""
        suites = of_class(benchmarks, SetsBenchmark)
        asked_here = {name: b.set_names(name) for name, b in benchmarks.items() if b.asks_conversations}
        known = [name for names in asked_here.values() for name in names or []]
        # A directory whose sets are not named has those that it has.
        if None not in asked_here.values():
            for name in self.sets:
                if name not in known:
                    raise ValueError(
                        f"probes.importance.sets: {name!r} is not among the evaluation's sets; "
                        + did_you_mean(name, known)
                    )
        for suite in suites:
            others = [name for name in self.sets if name in (suite.names or self.sets) and name not in benchmarks]
            if others and suite.convention == "describe":
                raise ValueError(
                    f"probes.importance.sets: {others[0]} is asked for descriptions; set convention: stock, in an "
                    "evaluation beside the one that measures speed"
                )


class Binding(Section):
    """Questions whose records carry the one-word `answer`: does the target say it, and does it need the picture?"""

    data: ConversationData


class Sight(Section):
    """What a LLaVA's answers owe to pictures: names among candidates, right answers and its own ones."""

    # Title in the table -> records of one picture each, with the `name` of what it shows and an answer that says it.
    names: dict[str, ConversationData] = Field(min_length=1)
    # Questions that it answers, and whose right answers are scored.
    questions: ConversationData
    # The right answers to them, of which those that came to their ends are scored; `shares` names target alone.
    answers: AnswersConfig = AnswersConfig(loops="skip")
    # Names that the right one is among.
    candidates: int = Field(20, ge=2)
    # Tokens of its own answers.
    max_new_tokens: int = Field(40, ge=1, le=MOST_ANSWER)

    @model_validator(mode="after")
    def _written(self) -> Sight:
        if self.answers.share("target") < 1:
            raise Refused("answers.shares", "answers are the target's here", "leave it out")
        return self


class Probes(Section):
    # Requests of each set that are decoded or read once more, of clips at the longest length.
    requests: int = Field(8, ge=1)
    # Where heads attend, which layers of the target attend to visual tokens, and the target's states against their
    # embeddings, layer by layer (Sparrow, figures 2, 3b and 6).
    states: bool = False
    # From which layer on the target can do without visual tokens (Sparrow, figures 3a and 5); null: not asked.
    importance: Importance | None = None
    # Whether the target's answers depend on the picture; null: not asked.
    binding: Binding | None = None
    # Names among candidates, right answers and own ones of a LLaVA; null: not asked.
    sight: Sight | None = Field(None, exclude_if=lambda value: value is None)
    # What a LLaVA's drafters owe to pictures, at temperature 0: they read the right ones, another's or none, while the
    # target reads the right ones.
    swapped: bool = Field(False, exclude_if=lambda value: not value)
    # Of image generators: what target and head make of each cell of the pictures; true: the papers' settings.
    analysis: AnalysisConfig | None = None
    # Of image generators: whether the codes that each method drew above temperature 0 have the target's distribution,
    # and its entropy at each place.
    law: bool = Field(False, exclude_if=lambda value: not value)
