"""What a stage of a recipe is: its settings, what it needs and makes, how it runs, and how a dry run describes it.

One class for each kind of stage. A new kind is one file here and its name in the union of `recipes/config/schema.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ...core.errors import Refused, did_you_mean
from ...core.fields import Sentence
from ...core.json_types import JsonMapping, JsonObject
from ...core.section import Section
from ...data.conversations import PromptFormat
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget, TargetConfig
from .context import Context, EngineConfig


class Stage(Section):
    """A stage's section. Every subclass has a `kind`, by which recipes tell stages apart."""

    # The word after `draftsmith` that runs stages of its kind.
    command: ClassVar[str] = "train"
    # Whether the recipe's `engine` section changes what it writes.
    trains: ClassVar[bool] = False
    # Whether every rank loads the whole target, independent of the settings.
    loads_target: ClassVar[bool] = False
    # Whether it holds models whose type may be `auto`.
    holds_models: ClassVar[bool] = True
    # Whether data that changed since its inputs were made does not matter.
    takes_any_data: ClassVar[bool] = False
    # Names in its folder that are no results: they may change or go once it has finished.
    working: ClassVar[tuple[str, ...]] = ("checkpoints", "cache", "wandb*")
    # Keys of the recipe's target that its results depend on; None: all.
    reads_of_target: ClassVar[set[str] | None] = None
    # Whether its results may depend on the recipe's drafter.
    reads_drafter: ClassVar[bool] = True
    # What it is for, where the recipe does not say it.
    usual_purpose: ClassVar[str] = ""

    # What the stage is for, in one line: shown while it runs, and by a dry run. null: what its kind says.
    about: Sentence | None = None

    @property
    def shards(self) -> str | None:
        """Folder of the shards that are its result; None: it writes none."""
        return None

    def makes(self) -> set[str]:
        """Things that later stages may take: data, processor, target, drafter, answers, states, codes, ..."""
        raise NotImplementedError

    def written(self, is_suite: bool) -> list[str]:
        """Names that other stages can take from its `data` by `path`: directories of benchmark sets (`is_suite`), or
        splits and mixtures, or tars of captioned pictures.
        """
        return []

    def needs(self) -> dict[str, str | None]:
        """Thing -> the stage that it must come from; None: the latest stage that makes it, or published weights.

        Raises `Refused` where its sections take one thing from two stages.
        """
        raise NotImplementedError

    def uses(self) -> set[str]:
        """Things that are taken from the latest stage that makes them, and that may be missing."""
        return set()

    def misfits(self, thing: str, makers: Sequence[Planned], inputs: Mapping[str, Planned]) -> dict[str, str]:
        """Stages that make a `thing` which this one cannot mean -> why, after "which"; `inputs` are settled by now."""
        return {}

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Raises `Refused` for settings that do not go with the recipe's target and drafter, both as sections."""

    @property
    def answer_format(self) -> PromptFormat | None:
        """The form of the requests that it lets models answer up to an end token; None: it lets none."""
        return None

    @classmethod
    def unsuited(cls, target: AnyTarget, drafter: DrafterConfig | None) -> str | None:
        """Why this kind of stage has no place beside these sections; None where it has one."""
        return None

    def run(self, context: Context) -> None:
        """Does the stage's work on this rank and leaves its results in `context.folder`."""
        raise NotImplementedError

    def describe(self, plan: Planned) -> list[str]:
        """The stage's lines of a dry run, without its title."""
        raise NotImplementedError

    def unread(self) -> Mapping[str, str]:
        """Field -> why nothing reads it beside the other settings. Such fields cannot be set, and are not shown."""
        return {}

    def reads_of_drafter(self, drafter: DrafterConfig | None) -> JsonObject | None:
        """Return what the results depend on of the recipe's drafter, a section or None; None: nothing."""
        return drafter.model_dump(mode="json") if drafter is not None and self.reads_drafter else None

    @model_validator(mode="after")
    def _all_read(self) -> Self:
        unread = self.unread()
        names = {name: info.alias or name for name, info in type(self).model_fields.items()}
        known = [key for name, key in names.items() if name not in unread]
        for name in sorted(self.model_fields_set & set(unread)):
            hint = did_you_mean(names[name], known)
            raise Refused(names[name], f"nothing reads it: {unread[name]}", hint)
        return self

    @model_serializer(mode="wrap")
    def _as_read(self, write: SerializerFunctionWrapHandler) -> JsonObject:
        hidden = {key for name in self.unread() for key in (name, type(self).model_fields[name].alias)}
        return {key: value for key, value in write(self).items() if key not in hidden}


class Hardware(Section):
    """What a recipe is meant to run on: a dry run says whether its trainings fit. Nothing else reads it."""

    # GPUs of the run, all nodes together.
    gpus: int = Field(ge=1)
    # Of each of them, as it is sold: 80 for an H100 of 80 GB.
    memory_gb: float = Field(gt=0)


class WholeRecipe(Protocol):
    """What a stage reads of the recipe around it, in dry runs: `recipes/config/schema.py` has it."""

    @property
    def target(self) -> AnyTarget: ...
    @property
    def drafter(self) -> DrafterConfig | None: ...
    @property
    def stages(self) -> Mapping[str, Stage]: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def hardware(self) -> Hardware | None: ...
    @property
    def output(self) -> str: ...
    @property
    def vocabulary(self) -> int | None: ...


@dataclass(frozen=True)
class Planned:
    """A stage in its recipe, with the stages that make what it takes."""

    name: str
    stage: Any  # its `Stage`, whose kind who reads it knows
    inputs: dict[str, str]  # thing -> name of the stage that makes it
    fingerprint: str
    recipe: WholeRecipe  # for dry runs
    earlier: Mapping[str, Planned] = field(default_factory=dict)  # every earlier stage by its name
    settings: JsonMapping = field(default_factory=dict)  # what the fingerprint covers, secrets hidden
    purpose: str = ""  # in a line: the recipe's words or its kind's
    own_target: TargetConfig | None = None  # that it measures in place of the recipe's
    is_small_net: bool = False  # trains a small net of our own, beside no target: in float32 alone

    def maker(self, thing: str) -> Planned | None:
        """The stage that makes a thing which this one takes; None: it comes from elsewhere."""
        return self.earlier.get(self.inputs.get(thing, ""))
