"""The section of every target of the language tracks: where its weights come from and how they are held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ...core.errors import Refused, UserError
from ...core.fields import AttentionName, DeviceMap, Dtype, Revision
from ...core.import_paths import Kinded
from ..folders import TargetPlace
from ..inline import InlineModel, inline_config
from ..parts import TokenIds
from .family import Family
from .language import LanguageTarget

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class TargetSection(Kinded):
    """Published weights by their path, or inline configs of a tiny one that a recipe trains itself."""

    # model_type of transformers -> record, of all kinds that the section has.
    families: ClassVar[Mapping[str, Family]] = {}
    # model_type that is close to the family's and cannot be read -> what to use in its place.
    lookalikes: ClassVar[Mapping[str, str]] = {}
    # data's PictureFamily that reads its pictures and its processor's files; None: the one that the files name.
    picture_family: ClassVar[Any] = None
    draws_images: ClassVar[Literal[False]] = False
    reads_text_alone: ClassVar[bool] = False  # no pictures

    # Hub id or directory of the weights and the processor; shipped:NAME is one that comes with the package.
    path: TargetPlace | None = None
    revision: Revision | None = None
    # auto: on a GPU as the weights are stored (mixed ones: the larger part's type), on a CPU float32; a target that is
    # spelt out: float32. Quantised weights want a type to compute in.
    dtype: Dtype = "auto"
    # Attention of language model and tower: sdpa (torch's kernels: flash attention where a pass needs no mask), or
    # eager, which is slow and keeps all scores; auto: what transformers chooses, sdpa where the model has it. The last
    # bits differ. Kernels that take no mask (flash_attention_2) cannot verify trees. Unset it is in no fingerprint.
    attn_implementation: AttentionName = Field("auto", exclude_if=lambda value: value == "auto")
    # accelerate's device map for targets larger than one GPU (auto, balanced, ...), in runs of one rank; null: this
    # rank's device.
    device_map: DeviceMap | None = None
    # cpu: weights that do not fit on the GPUs of a device map stay in the host's memory, and every token waits for
    # them; null: such a target is refused.
    offload: Literal["cpu"] | None = None
    # Ranks that hold the target together, each a part of every layer (transformers' tensor parallel plan), and decode
    # in step: as many as the run has. 1: each rank holds the whole. For targets larger than one GPU: all GPUs work at
    # once, where under a device map one works at a time.
    tensor_parallel_size: int = Field(1, ge=1)
    # Vocabulary ids that have a token. The tokenizer says how many: a number here is held against it, and changes
    # nothing.
    num_token_ids: int | None = Field(None, ge=1)
    # Tokens of a prompt that are run at once: memory for speed. null runs it whole, which 25k visual tokens of a 7B
    # target do not allow beside much else; 4096 is a good size there.
    prefill_chunk: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_way_to_spread(self) -> Self:
        if self.tensor_parallel_size > 1 and self.device_map is not None:
            problem = f"nothing reads it beside tensor_parallel_size: {self.tensor_parallel_size}"
            raise Refused("device_map", problem, "leave one of them out: both spread the target")
        if self.offload is not None and self.device_map in (None, "cpu"):
            raise Refused("offload", "nothing reads it without a device_map that spreads", "set device_map: auto")
        return self

    @property
    def family(self) -> Family | None:
        """The record of its kind; None: a section of another package that brings none."""
        return next(iter(self.families_of_kind.values()), None)

    @property
    def families_of_kind(self) -> Mapping[str, Family]:
        """model_type -> record, of its kind; all of a section of another package, whose kind is its import path."""
        families = {name: family for name, family in self.families.items() if family.kind == self.base_kind}
        return families or self.families

    @property
    def halves(self) -> tuple[str, str] | None:
        """Folders of a pretrained language model and a tower that it is made of; None: it is not."""
        return None

    @property
    def reads_tiles(self) -> bool | None:
        """Whether pictures must be cut into tiles for it; None: there is nothing to choose."""
        return None

    def provides(self) -> set[str]:
        """Things that need no stage: they come with the published weights."""
        return set() if self.path is None else {"target", "processor"}

    def check_token_ids(self, number: int, tokenizer: str) -> None:
        """Raises `UserError` where `num_token_ids` is not the `number` of the tokenizer, read at `tokenizer`: a target
        without its last ids, or with ids that have no token, is another target.
        """
        if self.num_token_ids not in (None, number):
            raise UserError(
                f"num_token_ids is {self.num_token_ids}, and the tokenizer of {tokenizer} has {number} ids",
                key="target.num_token_ids", hint="leave the key out: the number follows from the tokenizer",
            )  # fmt: skip

    # ---- verbs of a family

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        """The model config of a target that the recipe spells out."""
        raise NotImplementedError

    def new(self, config: PreTrainedConfig) -> PreTrainedModel:
        """A model with random weights in float32 (the global generator draws them)."""
        return self.record_of(config).new(config).float()

    def record_of(self, config: PreTrainedConfig) -> Family:
        """The record of a model by its own config; of a model_type that has none, that of the kind."""
        record = self.families.get(config.model_type) or self.family
        assert record is not None, "the section names no family"
        return record

    def target(self, model: PreTrainedModel, *, num_token_ids: int, image_token_id: int | None) -> LanguageTarget:
        """The loaded model as the decoding loop and training see it."""
        return self.record_of(model.config).target(model, num_token_ids=num_token_ids, prefill_chunk=self.prefill_chunk)


class SeeingSection(TargetSection):
    """A family with a tower, whose tiny target a recipe may spell out in two halves."""

    # Inline configs of a target that a `train` stage with `model: target` makes from scratch.
    language_model: InlineModel | None = None
    vision_tower: InlineModel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("language_model", "vision_tower") if getattr(self, name) is not None]
        if self.path is not None and given:
            problem = f"nothing reads {' and '.join(given)} beside path, whose weights bring their own config"
            raise Refused("", problem, f"leave path out, or set {' and '.join(given)} to null")
        if self.path is None and len(given) < 2:
            raise ValueError("give path, or both language_model and vision_tower")
        return self

    def inline_config(self, ids: TokenIds) -> PreTrainedConfig:
        assert self.language_model is not None and self.vision_tower is not None
        vision = inline_config(self.vision_tower, "target.vision_tower")
        text = inline_config(self.language_model, "target.language_model", uneven=True)  # as the key's type allows
        return self.joined(text, vision, ids)

    def joined(self, text: PreTrainedConfig, vision: PreTrainedConfig, ids: TokenIds) -> PreTrainedConfig:
        """The config of a model of two halves. Raises `UserError` where one is another family's."""
        raise NotImplementedError


def check_half(half: PreTrainedConfig, wanted: str, key: str = "vision_tower") -> None:
    """Raises `UserError` for an inline half of another `model_type` than the family's."""
    if half.model_type != wanted:
        raise UserError(f"this family's {key} is of model_type {wanted}, and this one is a {half.model_type}",
                        key=f"target.{key}.model_type", hint=f"write {wanted}")  # fmt: skip
