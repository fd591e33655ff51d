"""What stages ask of their `engine` section, which says where the target runs; and its first kind, our own passes.

Serving engines, which run it in a process of their own, are extras: `engines.py` has the union.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from ...core.batch import Batch, Request
from ...core.import_paths import Kinded
from ...core.json_types import JsonObject
from ...core.section import Section
from ...core.states import Taps, TargetStates
from ...data.families.processor import Processor
from ...data.states.samples import StatesSamples
from ...models.decoding.batched import Written
from ...models.decoding.warp import Warp
from ...models.drafters.base import DrafterConfig
from ...models.targets.generators import AnyTarget
from ...models.targets.language import LanguageTarget
from ..run.context import Context


class DecodedBy(Protocol):
    """What an engine reads of an evaluation's method."""

    @property
    def chain(self) -> int | None: ...
    @property
    def draw(self) -> str: ...
    @property
    def rule(self) -> Kinded: ...
    @property
    def settings(self) -> JsonObject: ...
    @property
    def visual_skip(self) -> float | None: ...
    @property
    def section(self) -> DrafterConfig | None: ...
    @property
    def names(self) -> Sequence[str]: ...


class Evaluated(Protocol):
    """What an engine reads of an evaluate stage's section."""

    @property
    def benchmarks(self) -> Mapping[str, Any]: ...
    @property
    def methods(self) -> Mapping[str, DecodedBy]: ...


class AnswersElsewhere(Protocol):
    """Writes answers outside this process."""

    def begin(
        self, requests: Sequence[Request], limits: Sequence[int], seeds: Sequence[int]
    ) -> Callable[[], Sequence[Written]]:
        """Ask, and return what waits for the answers."""
        ...


class StatesElsewhere(Protocol):
    """Computes the target's hidden states outside this process."""

    @property
    def ahead(self) -> int:
        """Batches that are asked for before the first one is read."""
        ...

    def begin(self, batch: Batch) -> Callable[[], TargetStates]:
        """Ask for the states of a batch on the CPU, and return what waits for them."""
        ...


class TargetEngine(Section):
    """The answers of our own passes, in this process."""

    # Whether the target's layers run in another process: this one then holds its embedding and LM head alone.
    is_served: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Its `kind`."""
        return str(dict(self)["kind"])  # each engine has its own literal

    def check(self, target: AnyTarget, *, states: bool, aspect: str) -> None:
        """Refuse what this engine cannot do as our own passes do it.

        Args:
            target: the recipe's section.
            states: hidden states are wanted.
            aspect: of the data section.

        Raises:
            Refused: names the setting, and what can be used in its place.
        """

    def check_evaluation(self, stage: Evaluated, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuse benchmarks and methods of an evaluation that this engine cannot run.

        Args:
            stage: the evaluate stage's section.
            target, drafter: the recipe's sections.

        Raises:
            Refused: names the setting, and what can be done.
        """

    def check_method(self, key: str, method: DecodedBy, drafter: DrafterConfig | None) -> None:
        """Refuse a method of an evaluation that this engine cannot run.

        Args:
            method: its section.
            drafter: the section of what drafts in it; None: not known yet.

        Raises:
            Refused: names the setting under `key`, and what can be done.
        """

    @property
    def beside_stage(self) -> str | None:
        """The evaluate stage of our own loop whose rows an engine's stand beside; None: none."""
        return None

    def lines(self) -> list[str]:
        """Its lines of an evaluation's dry run."""
        return []

    def installed_identity(self, key: str) -> JsonObject | None:
        """What identifies the engine in what it writes; None: our own passes.

        Args:
            key: that names the section, for errors.

        Raises:
            UserError: it is not installed in the interpreter that the section names.
        """
        return None

    def side_by_side(self, batch_size: int) -> int:
        """Requests that run together, where the stage asks for `batch_size`."""
        return batch_size

    def open_answers(
        self,
        context: Context,
        processor: Processor,
        warp: Warp,
        ends: Sequence[int],
        never: Collection[int],
        *,
        max_length: int,
        most_pictures: int,
    ) -> AnswersElsewhere | None:
        """What writes the stage's answers beside this rank; None: the target in this process.

        Args:
            ends: ids of the end tokens.
            never: ids that no answer has.
            max_length: tokens of a prompt and its answer, at most.
            most_pictures: of a request.
        """
        return None

    def open_states(
        self,
        context: Context,
        samples: StatesSamples,
        target: LanguageTarget,
        processor: Processor,
        wanted: Taps,
        *,
        key: str,
    ) -> StatesElsewhere | None:
        """What computes the target's states beside this rank (all ranks call); None: the target in this process.

        Args:
            target: its tables.
            key: of the section in the stage's own.
        """
        return None


class TransformersEngine(TargetEngine):
    """The target runs in this process, by our own passes."""

    kind: Literal["transformers"] = "transformers"
