"""What stages ask of their `engine` section, which says where the target runs; and its first kind, our own passes.

Serving engines, which run it in a process of their own, are extras: `engines.py` has the union.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.batch import Batch, Request
from ...core.json_types import JsonObject
from ...core.section import Section
from ...core.states import Taps, TargetStates
from ...data.dataset import ConversationDataset
from ...data.states.samples import StatesSamples
from ...models.decoding.batched import Written
from ...models.decoding.warp import Warp
from ...models.drafters.base import DrafterConfig
from ...models.targets.language import LanguageTarget
from ...models.targets.table import AnyTarget
from ..run.context import Context

# Asks another process for answers: requests, limits and seeds -> what waits for the answers.
BeginAnswers = Callable[[Sequence[Request], Sequence[int], Sequence[int]], Callable[[], Sequence[Written]]]


@dataclass(frozen=True)
class StatesElsewhere:
    """Computes the target's hidden states in another process.

    Args:
        begin: asks for the states of a batch on the CPU, and returns what waits for them.
    """

    ahead: int  # batches that are asked for before the first one is read
    begin: Callable[[Batch], Callable[[], TargetStates]]


class TargetEngine(Section):
    """The target in this process, by our own passes."""

    # Whether the target's layers run in another process: this one then holds its embedding and LM head alone.
    is_served: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Its `kind`."""
        return str(dict(self)["kind"])  # each engine has its own literal

    def check(self, target: AnyTarget, *, states: bool, aspect: str) -> None:
        """Raise `Refused` for what this engine cannot do as our own passes do it. `states`: hidden states are wanted.
        `aspect`: of the data section.
        """

    def check_evaluation(self, stage: Any, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Raise `Refused` for benchmarks and methods of an evaluation that this engine cannot run. `stage`:
        `EvaluateSettings`.
        """

    def check_method(self, key: str, method: Any, drafter: DrafterConfig | None) -> None:
        """Raise `Refused`, under `key`, for a method of an evaluation that this engine cannot run. `drafter`: the
        section of what drafts in it; None: not known yet.
        """

    @property
    def beside_stage(self) -> str | None:
        """The evaluate stage of our own loop whose rows an engine's stand beside; None: none."""
        return None

    def lines(self) -> list[str]:
        """Its lines of an evaluation's dry run."""
        return []

    def installed_identity(self, key: str) -> JsonObject | None:
        """What identifies the engine in what it writes; None: our own passes. `key`: that names the section, for
        errors. Raises `UserError`: it is not installed in the interpreter that the section names.
        """
        return None

    def open_answers(
        self, context: Context, dataset: ConversationDataset, target: LanguageTarget, warp: Warp, ends: Sequence[int]
    ) -> BeginAnswers | None:
        """What writes the stage's answers to records of `dataset` beside this rank; None: the target in this process.
        `target`: its tables. `ends`: ids of the end tokens.
        """
        return None

    def open_states(
        self, context: Context, samples: StatesSamples, target: LanguageTarget, wanted: Taps, *, key: str
    ) -> StatesElsewhere | None:
        """What computes the target's states beside this rank (all ranks call); None: the target in this process.
        `target`: its tables. `key`: of the section in the stage's own.
        """
        return None


class TransformersEngine(TargetEngine):
    """The target runs in this process, by our own passes."""

    kind: Literal["transformers"] = "transformers"
