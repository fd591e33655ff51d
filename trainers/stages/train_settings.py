"""The settings of stage kind `train`, and which of them go together. What the stage does is in `train.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ...core.refused import Refused
from ...core.section import Section
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...data.packing import PackingConfig
from ...data.shards.codes import ShardData
from ...data.sources import AnswersConfig
from ...models.distillation import CrossEntropyObjective, DistillObjective
from ...models.drafters import AnyDrafter
from ...models.drafters.base import DrafterConfig
from ...models.drafters.head_objective import HeadObjective
from ...models.formats.start import starts
from ...models.llava import Part
from ...models.lora import LoraConfig
from ..engine import EngineConfig
from ..engines import ServedEngine
from ..fit import FitSettings
from ..training.drafter import DecodingCheck
from ..training.packing import check_packing
from ..training.sources import CachedStates, OnlineStates, StatesSource
from ..training.states import check_answers
from ..training.validate import ValidationSettings


def kind(section: Any) -> str:
    """The kind of a section that need not say it; pydantic names the key after this function."""
    given = section if isinstance(section, dict) else dict(section) if isinstance(section, Section) else {}
    return str(given.get("kind", ""))


def _objective(section: Any) -> str:
    return kind(section) or "head"


def _data(section: Any) -> str:
    return kind(section) or "conversations"


Objective = Annotated[
    Annotated[CrossEntropyObjective, Tag("cross_entropy")]
    | Annotated[DistillObjective, Tag("distill")]
    | Annotated[HeadObjective, Tag("head")],
    Discriminator(_objective),
]
Data = Annotated[
    Annotated[ConversationData, Tag("conversations")] | Annotated[ShardData, Tag("codes")], Discriminator(_data)
]

_COMMON = {*FitSettings.model_fields, "kind", "model", "data", "validation"}
_LEARNS_STATES = {"objective", "decoding", "select"}
# What each way of training reads; a key that the recipe gives beside these is refused.
READS: dict[str, set[str]] = {
    "records": _COMMON
    | {"format", "answers", "objective", "trainable", "positions", "group_by_modality", "window", "packing"}
    | {"gradient_checkpointing", "lora"},
    "states": _COMMON
    | _LEARNS_STATES
    | {"drafter", "format", "answers", "source", "held_out", "visual_share", "text_epochs", "window", "packing"},
    "codes": _COMMON | {"decoding", "select", "condition_dropout", "revive_every", "drafter"},
}


class TrainSettings(FitSettings):
    """A `train` stage as a recipe describes it."""

    kind: Literal["train"]
    # Whose weights are trained; everything else is frozen. A captioner is a model like a draft LVLM, for mode C; vq and
    # reader are the image tokenizer and the reader of a synthetic dataset.
    model: Literal["drafter", "target", "captioner", "vq", "reader"] = "drafter"
    # Another drafter than the recipe's, so that two can be trained beside each other; it then needs `from` (a stage
    # that trained such a one, or scratch), since the latest stage trained another.
    drafter: AnyDrafter | None = None
    # Null with source: cached, whose shards hold the samples.
    data: Data | None = None
    # Of the records, and of the prompts that `decoding` measures; a cache must have been made with it.
    format: PromptFormat = PromptFormat()
    # Whose answers to these records are learned; null: the records' own.
    answers: AnswersConfig | None = None
    # Draft LVLMs: cross_entropy (null) or distill. Heads: terms of the loss; null: the drafter's own.
    objective: Objective | None = None
    validation: ValidationSettings | None = None
    # Batches that are sorted by length together, so that little is padded; 1: no sorting. Null: 50 of a head; none of
    # a draft LVLM, whose order is then LLaVA's. With group_by_modality each batch has one modality, too. Samples are
    # counted first, which costs their texts and the heads of picture files, once.
    window: int | None = Field(None, ge=1)
    # Samples of a step one after another in rows without padding, in place of micro_batch_size padded ones; null: none.
    # Loss and gradients are those of padded batches. Samples are counted first.
    packing: PackingConfig | None = None

    # ---- LLaVA-like models: draft LVLMs, a tiny target, a captioner
    trainable: list[Part] | None = None
    # Positions of the language model from this stage on; null: as it has them. Rotary positions need no new weights:
    # more of them are learned from samples that are as long.
    positions: int | None = Field(None, ge=8)
    # Batches of one modality (LLaVA's finetuning): faster, and ranks stay even.
    group_by_modality: bool = False
    gradient_checkpointing: bool = False
    # Train low-rank adapters in place of the language model's own weights.
    lora: LoraConfig | None = None

    # ---- heads
    # Where the target's states come from.
    source: StatesSource = OnlineStates()
    # Share of the samples that is kept for validation, by a hash of their names.
    held_out: float = Field(0.0, ge=0, lt=1)
    # A small decoding run with the head as it is.
    decoding: DecodingCheck | None = None
    # Which weights become the stage's result: the last, or those with the best held-out accuracy or measured tau. Each
    # best one is kept beside it as well.
    select: Literal["last", "top1", "top3", "tau"] = "last"
    # linear: text alone first, then a share with pictures that rises to all of them (MSD); null: as they come.
    visual_share: Literal["linear"] | None = None
    # Epochs of text alone before that; null: half of them.
    text_epochs: int | None = Field(None, ge=0)

    # ---- image codes
    # Share of samples that lose their condition, drawn anew in each epoch; guidance needs both sides. Null: 0.1.
    condition_dropout: float | None = Field(None, ge=0, lt=1)
    # vq: forwards between two revivals of codes that no picture chooses, in the first 60% of the training; small
    # tokenizers keep a handful of codes otherwise. Writes weights in place: zero_stage 0 and fp32 only.
    revive_every: int | None = Field(None, ge=1)

    @property
    def purpose(self) -> str:
        """What it is for: the recipe's words, or whose weights are trained."""
        model = {"vq": "image tokenizer"}.get(self.model, self.model)
        parts = f": {', '.join(self.trainable)}" if self.trainable else ""
        return self.about or f"trains the {model}{parts}"

    # ---- checks that need nothing else

    @model_validator(mode="after")
    def _known_parts(self) -> TrainSettings:
        trainable = self.trainable or []
        if self.lora is not None and "language_model" not in trainable:
            raise ValueError("lora is given, and trainable does not name language_model")
        if self.trainable is not None and (unknown := set(self.optim.lr_by_part) - set(trainable)):
            raise ValueError(f"optim.lr_by_part names {sorted(unknown)}, which trainable does not")
        if self.revive_every and self.model != "vq":
            raise ValueError("revive_every is for image tokenizers (model: vq)")
        if self.drafter is not None and self.from_stage is None:
            raise ValueError("a drafter of its own starts from: scratch, or from a stage that trained such a head")
        if self.model != "drafter" and self.outside is not None:
            raise ValueError(f"from: {{path}} is a head's, and this stage trains the {self.model}: give target.path")
        return self

    @model_validator(mode="after")
    def _fitting_answers(self) -> TrainSettings:
        objective, answers = self.objective, self.answers or AnswersConfig(shares={"data": 1.0})
        distills = isinstance(objective, DistillObjective)
        if self.model != "drafter" and (distills or self.answers is not None):
            raise ValueError("objective: distill and answers are for a drafter's stage")
        if answers.share("draft") and (not isinstance(objective, DistillObjective) or objective.cross_entropy):
            raise ValueError(
                "answers that the draft writes need objective: distill without cross_entropy, which would teach it "
                "only to repeat itself"
            )
        if isinstance(objective, DistillObjective) and objective.probabilities == "kept":
            if answers.share("target") < 1:
                raise ValueError("probabilities: kept are of the target's answers: set answers.shares to {target: 1}")
            if objective.temperature != 1:
                raise ValueError("probabilities: kept were taken at temperature 1: set objective.temperature to 1")
        return self

    @model_validator(mode="after")
    def _whole(self) -> TrainSettings:
        if (self.data is None) != (self.source.kind == "cached"):
            raise ValueError("give data, or source: cached, whose shards hold the samples")
        if self.answers is not None and self.data is None:
            raise ValueError("answers belong to data; those of cached states are the cache stage's")
        if self.visual_share is not None:
            if self.epochs is None or self.epochs <= self.num_text_epochs:
                raise ValueError("visual_share: linear needs epochs, more of them than text_epochs")
            if self.source.kind == "cached_on_first_epoch":
                raise ValueError(
                    "visual_share: linear does not see every sample in its first epoch; use source: cached"
                )
        return self

    @model_validator(mode="after")
    def _measured(self) -> TrainSettings:
        if self.model != "drafter" and (self.decoding or self.select != "last"):
            raise ValueError("decoding and select are for heads (model: drafter)")
        if self.select in ("top1", "top3") and self.validation is None:
            raise ValueError(f"select: {self.select} needs validation")
        if self.select == "tau" and self.decoding is None:
            raise ValueError("select: tau needs decoding")
        if self.decoding and self.validation and self.decoding.every % self.validation.every:
            raise ValueError("decoding.every must be a multiple of validation.every")
        return self

    # ---- what it is

    @property
    def num_text_epochs(self) -> int:
        """`text_epochs`; unset, half of the epochs, rounded down."""
        return (self.epochs or 0) // 2 if self.text_epochs is None else self.text_epochs

    @property
    def reads_tables(self) -> bool:
        """Of the target its embedding and LM head alone: it does not run in this process."""
        return (isinstance(self.source, CachedStates) or self.is_served) and self.decoding is None

    @property
    def is_served(self) -> bool:
        """Whether an engine computes the target's states in each step."""
        return isinstance(self.source, OnlineStates) and isinstance(self.source.engine, ServedEngine)

    @property
    def checked_every(self) -> int | None:
        """Optimizer steps between two validations or decoding checks."""
        settings = self.validation or self.decoding
        return None if settings is None else settings.every

    def way(self, target: Any, drafter: DrafterConfig | None) -> str:
        """What it trains on: records, records with the target's states, or codes."""
        if self.model != "drafter" and target.draws_images:
            return "codes"
        if self.model == "captioner" and (drafter is None or drafter.trains_on != "records"):
            raise Refused("model", "'captioner' is no model here: it is built as a draft LVLM is", "leave it out")
        if self.model != "drafter":
            return "records"
        config = self.drafter or drafter
        if config is None or config.trains_on is None:
            what = "names none" if config is None else f"is of kind {config.kind}, which is not trained"
            raise Refused("model", f"a drafter is trained and the recipe {what}", "name one")
        return "codes" if target.draws_images else config.trains_on

    def unread_with(self, target: Any, drafter: DrafterConfig | None) -> dict[str, str]:
        way = self.way(target, drafter)
        return dict.fromkeys(sorted(set(type(self).model_fields) - READS[way]), f"this stage trains on {way}")

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse drafts that write answers while ZeRO 3 shares their weights out: ranks would wait for each other."""
        if self.answers is not None and self.answers.share("draft") and engine.zero_stage == 3:
            raise Refused(
                "answers",
                "the draft writes answers itself, and engine.zero_stage 3 shares its weights out: ranks whose answers "
                "differ in length would wait for each other for ever",
                "use engine.zero_stage 0 to 2: a draft is small",
            )

    def check(self, target: Any, drafter: DrafterConfig | None) -> None:
        """Refuse settings that this training would not read.

        Args:
            target: the recipe's section.
        """
        way = self.way(target, drafter)
        check_packing(self)
        if self.drafter is not None:
            try:
                self.drafter.check_settings(target.draws_images)
            except Refused as refused:
                raise refused.under("drafter") from None
        super().check(target, drafter)
        if isinstance(self.source, OnlineStates) and isinstance(self.source.engine, ServedEngine):
            assert isinstance(self.data, ConversationData)
            try:
                self.source.engine.check(target, states=True, aspect=self.data.aspect)
            except Refused as refused:
                raise refused.under("source") from None
        if self.outside is not None:
            self._check_outside(target, self.drafter or drafter)
        if way == "records":
            self._check_records()
        elif way == "states":
            self._check_states(self.drafter or drafter)
        else:
            self._check_codes()

    def _check_outside(self, target: Any, drafter: DrafterConfig | None) -> None:
        assert drafter is not None
        if not starts(drafter, target.draws_images):
            problem = f"names a head, and this stage trains a drafter of kind {drafter.kind}"
            raise Refused("from.path", problem, "start a draft LVLM from drafter.path")
        if drafter.provides():
            problem = f"stands beside drafter.path, {drafter.model_dump()['path']}, which nothing reads then"
            raise Refused("from.path", problem, "leave one of them out")

    def _check_records(self) -> None:
        if self.trainable is None:
            raise Refused("trainable", "trainable is missing", "name parts: [vision_tower, projector, language_model]")
        if self.model in ("vq", "reader"):
            raise Refused("model", f"{self.model} is of image generators", "use drafter, target or captioner")
        if isinstance(self.objective, HeadObjective):
            raise Refused("objective", "these are terms of a head's loss", "give kind: cross_entropy or distill")
        if self.validation is not None and self.validation.data is None:
            raise Refused("validation.data", "validation.data is missing", "name held-out records")

    def _check_states(self, drafter: DrafterConfig | None) -> None:
        check_answers(self.answers)
        if isinstance(self.objective, CrossEntropyObjective | DistillObjective):
            raise Refused("objective", f"{self.objective.kind} is of draft LVLMs", "give terms of a head's loss")
        if self.objective is not None and not (drafter is not None and drafter.takes_objective):
            what = "none" if drafter is None else drafter.kind
            raise Refused("objective", f"a {what} drafter has its loss in its own section", "set drafter.loss")
        self._check_held_out()
        if self.validation is not None and not self.held_out:
            raise Refused("validation", "validation needs held_out", "hold out a share of the samples: held_out: 0.05")
        if self.decoding is None:
            return
        if self.decoding.prompts is not None or self.decoding.data is None:
            raise Refused("decoding.data", "records are decoded, and none are named", "name a few: decoding.data.path")
        if not self.decoding.tree.for_text:
            problem = f"tree: {self.decoding.tree.kind} follows the rows of an image, and this target writes text"
            raise Refused("decoding.tree", problem, "use a chain, static, dynamic or sage tree")

    def _check_held_out(self) -> None:
        """Heads are scored on a share of their own samples."""
        for name in ("data", "against_target"):
            if self.validation is not None and getattr(self.validation, name) is not None:
                raise Refused(f"validation.{name}", "nothing reads it: heads hold out a share of their samples")

    def _check_codes(self) -> None:
        if self.model == "captioner":
            raise Refused("model", "captioner is of draft LVLMs", "use drafter, target, vq or reader")
        assert isinstance(self.data, ShardData)
        if self.validation is not None and not self.data.held_out:
            raise Refused("validation", "validation needs data.held_out", "hold out a share of the samples")
        if self.model != "drafter" and self.validation:
            raise Refused("validation", "validation is for heads (model: drafter)", "leave it out")
        self._check_held_out()
        if self.decoding is not None and self.decoding.prompts is None:
            raise Refused("decoding.prompts", "decoding.prompts is missing", "name the captions to draw")
        for name in ("data", "max_new_tokens"):
            if self.decoding is not None and getattr(self.decoding, name) is not None:
                raise Refused(f"decoding.{name}", "nothing reads it: an image has its own number of codes")
