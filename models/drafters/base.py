"""The interface of a drafter: a section of a recipe with its verbs, and the proposal that the decoding loop calls.

A new drafter is one file with three things to learn: its config (`DrafterConfig`), its loss
(`training_objective`) and its proposal (`drafter`). See docs/adding-a-drafter.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.errors import Refused, UserError, did_you_mean
from ...core.fields import Place, Revision
from ...core.import_paths import Kinded
from ...core.json_types import JsonMapping, JsonObject
from ...core.section import Section
from ...core.states import Taps
from ..decoding.warp import Warp
from ..folders import CONFIG, WEIGHTS, find_folder
from ..losses import Divergence
from ..targets.base import Target, TargetShape, TargetStep, Verified
from .draft_vocabulary import CountTokens as CountTokens
from .manifest import MANIFEST
from .manifest import TargetIdentity as TargetIdentity

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What is fetched of a trained drafter on the Hub.
FILES = (CONFIG, MANIFEST, WEIGHTS, "pytorch_model.bin")


class Drafter(Protocol):
    """The interface to the decoding loop. Expansions are numbered from 0; ROOT stands for the last committed token.

    Letters: F nodes, V vocabulary. All q are after the temperature and before top-k and top-p.
    """

    taps: Taps
    # Levels that it can propose; None: any; 0: nothing in this cycle, which is then a step of plain decoding (n-grams
    # without a match). Read after `root`, which may set it for the cycle: before any token is drawn.
    max_levels: int | None

    def start(self, request: Any, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Begin a request whose prompt the target has run; at most `capacity` tokens follow."""
        ...

    def begin(self, first: int) -> None:
        """Receive the first token, which the target emitted after the prompt."""
        ...

    def root(self) -> Tensor:
        """q [V] of the token after the last committed one."""
        ...

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [F,V] after each of `tokens` [F], whose parents are earlier expansions or ROOT; they take the next
        numbers.

        A drafter that cannot condition on drafted tokens (Medusa) answers by level. One that looks its tokens up
        answers on the CPU, and with a row of zeros where it found nothing.
        """
        ...

    def accept(self, verified: Verified) -> None:
        """Receive the outcome of the cycle: the accepted path, the bonus token and the target's states along it."""
        ...


@dataclass(frozen=True)
class DraftingOptions:
    """Facts that an evaluation passes to a drafter. The default suits heads and plain drafts."""

    substitutes: Any = None  # `ImageSubstitutes`: what stands for a picture in the text modes of draft LVLMs
    record_weights: bool = False  # keep an ensemble's weights over time in its `trace`


PLAIN = DraftingOptions()


class HeadObjective(Section):
    """The training objective of hidden-state heads: weights of the loss terms at each trained input, which
    `head_training.py` computes; a term of weight 0 is not computed.
    """

    # Of a train stage's `objective`: what is trained with the target's hidden states.
    kind: Literal["head"] = Field("head", exclude=True)

    # SmoothL1 between the predicted and the true state, mean over the width.
    feature: float = Field(0.0, ge=0)
    # Divergence between the two distributions that the LM head makes of them; lk_alpha and lk_hybrid are the LK losses.
    token: float = Field(0.0, ge=0)
    token_divergence: Divergence = "soft_ce"
    # Sum of |Q - P| over the vocabulary, at most 2.
    l1: float = Field(0.0, ge=0)
    # ListMLE over the target's likeliest tokens.
    listmle: float = Field(0.0, ge=0)
    # How many of them.
    top: int = Field(10, ge=1)
    # Weight of pass s is decay^s, as in EAGLE-3 (0.8); null: the mean over passes.
    decay: float | None = Field(None, gt=0, le=1)
    # Passes after the first in this stage; null: the head's mtp_steps. 0 for a stage of plain text.
    mtp_steps: int | None = Field(None, ge=0)
    # Width of the uniform noise on true states at 512 places; shorter samples get more of it (EAGLE: 0.2).
    noise: float = Field(0.2, ge=0)
    # Inputs whose vocabulary is projected at once: about 40 bytes for each input, pass and id.
    chunk: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _some_term(self) -> HeadObjective:
        if not any((self.feature, self.token, self.l1, self.listmle)):
            raise ValueError("no term has a weight; give feature, token, l1 or listmle")
        return self


class DrafterConfig(Kinded):
    """A drafter's settings and its verbs. `target` is a loaded `Target` throughout."""

    # Settings that decoding alone reads, which need no other training: a method of an evaluation may change them.
    decoding_settings: ClassVar[frozenset[str]] = frozenset()
    # What a `train` stage trains it on: "states" (the target's, for records or codes) or "records"; None: nothing.
    trains_on: ClassVar[str | None] = None
    # Whether a `train` stage's `objective` (the terms of a head's loss) takes the place of the section's own loss.
    takes_objective: ClassVar[bool] = False
    # A sample needs this many supervised tokens before its loss compares any.
    least_supervised: ClassVar[int] = 1
    # Settings that say nothing of which states it reads in training: a cache serves every value of them.
    beside_states: ClassVar[frozenset[str]] = frozenset({"path", "revision"})
    # Which targets it drafts for: those that answer in words, those that draw images.
    for_language: ClassVar[bool] = True
    for_images: ClassVar[bool] = False
    # Settings that nothing reads for each of these.
    unread_for_language: ClassVar[frozenset[str]] = frozenset()
    unread_for_images: ClassVar[frozenset[str]] = frozenset()
    # Whether a `train` stage can start from weights outside the run, and whether others publish them in our own layout.
    starts_outside: ClassVar[bool] = False
    publishes_as_ours: ClassVar[bool] = False
    # Which layouts of `models/formats/` serving engines read its weights in; None: in none.
    layout: ClassVar[Literal["eagle", "dflash", "medusa"] | None] = None

    @property
    def display_name(self) -> str:
        """Its name in tables, where no stage trained it."""
        return self.kind

    def provides(self) -> set[str]:
        """Things that need no stage: {"drafter"} where published weights, or the target's own, draft."""
        return set()

    def check(self, shape: TargetShape) -> None:
        """Raise `UserError` for a target that it cannot draft for; `check_settings` has looked at what it draws."""

    def taps_for(self, shape: TargetShape, *, training: bool) -> Taps:
        """The states that it reads of the target."""
        return Taps()

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> nn.Module:
        """A fresh module in float32; the global generator draws its weights."""
        raise self._unwritten("build")

    def load(
        self,
        folder: Path | None,
        target: Target,
        *,
        dtype: torch.dtype | None = None,
        identity: TargetIdentity | None = None,
    ) -> nn.Module:
        """The trained module, on the target's device.

        Args:
            folder: of a stage, or a published one; None: the section's own `path` or `model`.
            dtype: None: the target's.

        Raises:
            UserError: a file is missing, or it was made for another target.
        """
        return self._loaded(folder, target, dtype, identity)

    def _loaded(
        self, folder: Path | None, target: Target, dtype: torch.dtype | None, identity: TargetIdentity | None
    ) -> nn.Module:
        raise self._unwritten("load")

    def copy_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        """A module like `module` in float32 with the weights of `state`, sharing none with `module` or the target."""
        raise self._unwritten("copy_of")

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        """Write the module's folder."""
        raise self._unwritten("save")

    def manifest(self, target: Target, identity: TargetIdentity, **training: object) -> JsonObject:
        """The content of `draftsmith.json` for a module that was trained beside `target`."""
        raise self._unwritten("manifest")

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        """The training forward, (batch, states) -> StepLoss. `settings` are the stage's; None: the section's own."""
        raise self._unwritten("training_objective")

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        """The proposal, as the decoding loop calls it."""
        raise self._unwritten("drafter")

    def empty(self, shape: TargetShape) -> nn.Module | None:
        """The module that is trained, on the meta device: a dry run counts its parameters, and runs it without values.
        None: nothing is trained, or nothing that a dry run could build.
        """
        return None

    def count(self, shape: TargetShape) -> dict[str, int]:
        """Part -> number of parameters that are its own, without weights."""
        module = self.empty(shape)
        return {} if module is None else {"trainable": sum(p.numel() for p in module.parameters() if p.requires_grad)}

    def lines(self, shape: TargetShape, config: PreTrainedConfig) -> list[str]:
        """Lines of a dry run about it, beside a target of this shape and model config."""
        count = sum(self.count(shape).values())
        if self.trains_on is None:
            return [f"  {'parameters':<16} {count:>16,}   nothing is trained"]
        trained = f"  {'trainable':<16} {count:>16,}"
        return [
            trained if shape.draws_images else f"{trained}   {self.kind}, without the target's embedding and LM head"
        ]

    def exports(self, engine: str) -> list[str]:
        """Why a serving engine (vllm, sglang, speculators, eagle) cannot run this kind; none: its settings decide.

        `models/formats/expressible.py` asks this first, and then compares layers, taps and what stands at images.
        """
        return [f"no engine drafts with {self.kind}"]

    def check_settings(self, draws_images: bool) -> None:
        """Raise `Refused` for a kind that drafts for other targets, or a setting that nothing reads there."""
        if not (self.for_images if draws_images else self.for_language):
            targets = "draw images" if draws_images else "answer in words"
            raise Refused("kind", f"{self.kind} is no drafter for targets that {targets}")
        unread = self.unread_for_images if draws_images else self.unread_for_language
        for name in sorted(self.model_fields_set & unread):
            known = {*type(self).model_fields} - unread
            other = "language models" if draws_images else "image generators"
            problem = f"nothing reads it: it is of {self.kind} heads for {other}"
            raise Refused(name, problem, did_you_mean(name, known))

    def _unwritten(self, verb: str) -> UserError:
        """Return the error for a verb that a class of another package leaves out, or for a kind that is not trained."""
        if self.trains_on is None and verb not in ("load", "drafter"):
            return UserError(
                f"a drafter of kind {self.kind} is not trained", key="drafter", hint="leave out the train stage"
            )
        return UserError(
            f"{type(self).__name__} does not write {verb}()", where=f"kind {self.kind}",
            hint=f"help(draftsmith.models.drafters.base.DrafterConfig.{verb}) says what it gets and returns",
        )  # fmt: skip


class WeightlessDrafter(DrafterConfig):
    """Drafters without weights, which need no stage."""

    def provides(self) -> set[str]:
        return {"drafter"}

    def _loaded(self, *_: object) -> nn.Module:
        return nn.Module()


class PublishedDrafter(DrafterConfig):
    """Drafters that are trained, and published as folders."""

    # Directory or Hub id of a trained drafter, which a train stage starts from unless it says `from: scratch`; null: a
    # stage trains it from random weights.
    path: Place | None = None
    revision: Revision | None = None

    # Fields of what is assembled where no `path` is given.
    assembled_of: ClassVar[tuple[str, ...]] = ()

    @property
    def display_name(self) -> str:
        return self.path or self.kind

    def _loaded(
        self, folder: Path | None, target: Target, dtype: torch.dtype | None, identity: TargetIdentity | None
    ) -> nn.Module:
        return self.read(folder or self.fetched(), target, dtype or target.embedding.dtype, identity)

    def fetched(self) -> Path:
        """The folder at `path`; one on the Hub is downloaded."""
        return find_folder(str(self.path), self.revision, files=FILES)

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> nn.Module:
        """The trained module in a folder, on the target's device. Raises `UserError` as `load`."""
        raise self._unwritten("read")

    def begin_from(self, folder: Path, target: Target, identity: TargetIdentity) -> nn.Module:
        """The module in float32 as training starts from `folder`, whose layout is ours. Raises as `load`."""
        return self.load(folder, target, dtype=torch.float32, identity=identity)

    def beside_path(self) -> list[str]:
        """Fields that are set beside a path of trained weights, and that nothing reads where these are loaded."""
        return [name for name in self.assembled_of if self.path is not None and dict(self)[name] is not None]

    def provides(self) -> set[str]:
        """Return {"drafter"} where `path` names trained weights, else an empty set."""
        return set() if self.path is None else {"drafter"}


def for_decoding(config: DrafterConfig, **settings: Any) -> DrafterConfig:
    """Copy a section with other decoding settings. Raises `ValueError` for one that its kind does not read there."""
    for name in settings:
        if name not in config.decoding_settings:
            known = f"kind {config.kind} has {', '.join(sorted(config.decoding_settings)) or 'none'}"
            raise ValueError(
                f"{name} is no decoding setting of this drafter ({known}); "
                f"{did_you_mean(name, config.decoding_settings)}"
            )
    checked = type(config).model_validate(config.model_dump() | settings)
    return config.model_copy(update={name: value for name, value in checked if name in settings})


def check_alike(pairs: Mapping[str, tuple[object, object]], *, key: str, hint: str) -> None:
    """Raise `UserError` for the first of `pairs` that differ: name -> the drafter's value, and the target's."""
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UserError(f"the drafter's {name} is {ours}, the target's {theirs}", key=key, hint=hint)


def states_settings(drafter: DrafterConfig) -> JsonObject:
    """Return a drafter's settings as plain values, without those that change nothing of the states which it reads."""
    return {key: value for key, value in drafter.model_dump(mode="json").items() if key not in drafter.beside_states}
