"""Stage kind `generate`: a synthetic dataset of drawn shapes, and the tokenizer and processor that belong to it.

Language models get conversations about pictures and clips; image generators get captioned pictures. `splits` tells
which: numbers of records of each scenario, or numbers of pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ...core import ranks
from ...core.errors import Refused, did_you_mean
from ...core.fields import FileName
from ...core.files import LOG_BYTES, read_json
from ...core.json_types import JsonObject, object_at
from ...core.results import DATASET_FOLDER, TOKENIZER
from ...data.captioned.sources import TarSource, read, usable
from ...data.families.processor import PictureFamily
from ...data.families.prompt_templates import SYSTEM
from ...data.families.table import USUAL, picture_family_of
from ...data.records.mixture import STRATEGIES, is_strategy
from ...data.shapes.captioned import HELD_OUT, Textures, write_captioned
from ...data.shapes.scenarios import KINDS, WITHOUT_PICTURES
from ...data.shapes.scene import IMAGE_MEAN, IMAGE_STD, Wordings
from ...data.shapes.suites import CLIPS, SETS, num_suite_records, num_video_suite_records
from ...data.shapes.tokenizer import train_tokenizer
from ...data.shapes.write import write_dataset
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget
from ..run.context import Context
from ..run.stage import Planned, Stage

CONVERSATIONS = {"patch_size", "mixtures", "suite", "clip_frames", "video_suite", "clip_lengths", "clip_kinds",
                 "wordings", "unseen"}  # fmt: skip
CAPTIONED = {"grain", "pairs", "textures"}


# Names of the dataset's files and folders that no split or mixture can have.
_OWN_NAMES = ("manifest", "images", "videos", "suite", "video_suite")
# A picture takes a millisecond to draw: ten million take hours.
Records = Annotated[int, Field(ge=0, le=10**7)]
Pictures = Annotated[int, Field(ge=1, le=10**7)]
Frames = Annotated[int, Field(ge=2, le=10**5)]


class GenerateStage(Stage):
    holds_models: ClassVar[bool] = False
    reads_of_target: ClassVar[set[str]] = {"kind", "path", "revision"}  # they decide the processor
    reads_drafter: ClassVar[bool] = False
    usual_purpose: ClassVar[str] = "draws the synthetic dataset"
    # Kinds of scenario whose records have no picture.
    without_pictures: ClassVar[frozenset[str]] = WITHOUT_PICTURES

    kind: Literal["generate"]
    # Side of the pictures in pixels.
    image_size: int = Field(48, ge=16, le=4096)
    # Ids of the tokenizer, which is trained on the first split where no target.path brings one; null: 640 for
    # conversations, 400 for captions.
    vocab_size: int | None = Field(None, ge=300, le=1 << 20)
    # Conversations: split -> kind of scenario -> number of records. Captioned pictures: split -> number of pictures;
    # `held_out` then has figures that no other split has.
    splits: dict[FileName, Pictures | dict[str, Records]] = Field(min_length=1)

    # Conversations: side of a vision patch, which should hold one of the board's nine places.
    patch_size: int = Field(16, ge=4, le=4096)
    # mixture -> split -> how much of it (all, first:10%, end:5, random:20%): OneVision's YAML files, named NAME.yaml.
    mixtures: dict[FileName, dict[str, str]] = Field(default_factory=dict)
    # Records of each set of a small benchmark suite (evaluate reads it as suite.data.path: suite); 0: none.
    suite: Records = 0
    # split -> frames of its clips, where they are not four: as many visual tokens as a longer clip has.
    clip_frames: dict[str, Frames] = Field(default_factory=dict)
    # Records of each set of videos, pictures and texts (evaluate reads them as suite.data.path: video_suite); 0: none.
    video_suite: Records = 0
    # Frames of that suite's clips, one set of clips for each.
    clip_lengths: list[Frames] = Field([4, 16, 64], min_length=1)
    # Scenarios of its clips: clip (sets clips-N; answers begin with facts) and clip_late (sets late-N; they come after
    # an introduction that never changes).
    clip_kinds: list[Literal["clip", "clip_late"]] = Field(
        ["clip"], min_length=1, exclude_if=lambda kinds: kinds == ["clip"]
    )
    # usual: answers of a kind are written alike, and a target learns them word for word. several: each is drawn among
    # right wordings, so that what the target says differs from the data (to see what its answers are worth to a draft).
    wordings: Wordings = Field("usual", exclude_if=lambda value: value == "usual")
    # Pairs of a shape and a colour (of 48) that the split `held_out` alone shows, one at least in each of its records
    # with pictures: what the target and the drafters never saw together. 0: every split shows all pairs.
    unseen: int = Field(0, ge=0, le=24, exclude_if=lambda value: value == 0)

    # Captioned pictures: noise of the paper, a standard deviation of 0 to 255: what makes its codes uncertain.
    grain: float = Field(10.0, ge=0, le=128)
    # Share of pictures with two figures.
    pairs: float = Field(0.25, ge=0, le=1)
    # Textures of the ground; null: plain paper. Unset it stays out of fingerprints.
    textures: Textures | None = Field(None, exclude_if=lambda value: value is None)

    @property
    def writes_conversations(self) -> bool:
        """Whether the splits are of conversations; else they are of captioned pictures."""
        return bool(self.records)

    @property
    def records(self) -> dict[str, dict[str, int]]:
        """Split -> scenario -> records, of conversations."""
        return {split: counts for split, counts in self.splits.items() if isinstance(counts, dict)}

    @property
    def pictures(self) -> dict[str, int]:
        """Split -> captioned pictures."""
        return {split: count for split, count in self.splits.items() if isinstance(count, int)}

    @property
    def num_records(self) -> int:
        """Records that it writes: of the splits and of the suites, or pictures."""
        if not self.writes_conversations:
            return sum(self.pictures.values())
        return (
            sum(sum(counts.values()) for counts in self.records.values())
            + num_suite_records(self.suite)
            + num_video_suite_records(self.video_suite, self.clip_lengths, self.clip_kinds)
        )

    def written(self, is_suite: bool) -> list[str]:
        if is_suite:
            return [name for name, count in (("suite", self.suite), ("video_suite", self.video_suite)) if count]
        if not self.writes_conversations:
            return [f"{split}-00000.tar" for split in self.splits]
        return [*self.splits, *(f"{name}.yaml" for name in self.mixtures)]

    @property
    def vocabulary(self) -> int:
        """Ids of the tokenizer."""
        return self.vocab_size or (640 if self.writes_conversations else 400)

    @model_validator(mode="after")
    def _consistent(self) -> GenerateStage:
        if self.records and self.pictures:
            raise ValueError("splits are numbers of pictures, or records of each scenario, and not both")
        self._check_names()
        if not self.writes_conversations:
            return self
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size {self.patch_size} is more than image_size, {self.image_size}")
        if self.image_size < 24 or self.vocabulary < 400:
            raise ValueError("conversations need image_size 24 and vocab_size 400, or more")
        self._check_splits()
        self._check_clips()
        return self

    def _check_names(self) -> None:
        for key, names in (("splits", self.splits), ("mixtures", self.mixtures)):
            for name in names:
                if name in _OWN_NAMES or name.endswith((".yaml", ".yml", ".json")):
                    raise ValueError(f"{key}.{name}: the dataset has a file or folder of this name; give it another")
                if "." in name and not self.writes_conversations:
                    raise ValueError(f"{key}.{name}: a tar's keys end at the first dot; write it without")
            if len({name.casefold() for name in names}) < len(names):
                raise ValueError(f"{key} have names that differ by their case alone: {', '.join(names)}")
        if self.writes_conversations and not any(sum(counts.values()) for counts in self.records.values()):
            raise ValueError("splits hold no record")

    def _check_splits(self) -> None:
        for split, counts in self.records.items():
            for kind in counts:
                if kind not in KINDS:
                    raise Refused("", f"splits.{split} names scenario {kind!r}", did_you_mean(kind, KINDS))
            if (split == CLIPS and self.video_suite) or (split.startswith(SETS) and (self.suite or self.video_suite)):
                raise ValueError(f"splits.{split} would hold the very records that the suite asks; name it otherwise")
        if self.unseen and HELD_OUT not in self.splits:
            raise ValueError(f"unseen is of the split {HELD_OUT}, and there is none")
        for mixture, parts in self.mixtures.items():
            for split, strategy in parts.items():
                if split not in self.splits:
                    raise Refused("", f"mixtures.{mixture} names split {split!r}", did_you_mean(split, self.splits))
                if not is_strategy(strategy):
                    raise ValueError(f"mixtures.{mixture}.{split} is {strategy!r}; {STRATEGIES}")

    def _check_clips(self) -> None:
        for split in self.clip_frames:
            if split not in self.splits:
                raise Refused("", f"clip_frames names split {split!r}", did_you_mean(split, self.splits))
        for key, values in (("clip_lengths", self.clip_lengths), ("clip_kinds", self.clip_kinds)):
            if len({*values}) < len(values):
                raise ValueError(f"{key} name one twice: {values}")

    def unread(self) -> dict[str, str]:
        if self.writes_conversations:
            return dict.fromkeys(CAPTIONED, "conversations have none")
        return dict.fromkeys(CONVERSATIONS, "captioned pictures have none")

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses splits of pictures for a target that writes text, and of conversations for one that draws."""
        if target.draws_images == self.writes_conversations:
            wanted = "numbers of pictures" if target.draws_images else "records of each kind of scenario"
            raise Refused("splits", f"target {target.kind} does not read what they say", f"give {wanted}")
        given = [key for key in ("patch_size", "vocab_size") if dict(self)[key] != type(self).model_fields[key].default]
        brought = given if "processor" in target.provides() else []
        if self.writes_conversations and brought:
            raise Refused(
                brought[0], "nothing reads it: the weights at target.path bring their processor", "leave it out"
            )
        if self.writes_conversations and (tower := object_at(dict(target), "vision_tower")) is not None:
            # A Qwen-VL, Pixtral, Mistral 3 or Gemma 4 reads pictures of any size.
            any_size = _family(target).reads_whole
            for key in ("patch_size",) if any_size else ("patch_size", "image_size"):
                if key in tower and tower[key] != dict(self)[key]:
                    problem = f"pictures have {dict(self)[key]}, and target.vision_tower reads {tower[key]}"
                    raise Refused(key, problem, "write the same in both")

    def makes(self) -> set[str]:
        return {"data", "processor" if self.writes_conversations else "tokenizer"}

    def needs(self) -> dict[str, str | None]:
        return {}

    def run(self, context: Context) -> None:
        """Rank 0 writes."""
        with context.stop.together():
            if ranks.is_main():
                write = _write_conversations if self.writes_conversations else _write_captioned
                context.progress.count("record" if self.writes_conversations else "picture", self.num_records)
                write(self, context, context.folder / DATASET_FOLDER)

    def describe(self, plan: Planned) -> list[str]:
        if self.writes_conversations:
            return [f"  {split}: {sum(counts.values())} records" for split, counts in self.records.items()]
        return [f"  {split}: {count} pictures" for split, count in self.pictures.items()]


def _write_conversations(stage: GenerateStage, context: Context, folder: Path) -> None:
    manifest = write_dataset(
        folder, seed=context.seed, image_size=stage.image_size, splits=stage.records, mixtures=stage.mixtures,
        suite=stage.suite, clip_frames=stage.clip_frames, video_suite=stage.video_suite, lengths=stage.clip_lengths,
        clip_kinds=stage.clip_kinds, wordings=stage.wordings, unseen=stage.unseen, before_each=_counting(context),
    )  # fmt: skip
    if "processor" in context.target.provides():
        processor = context.processor()
    else:
        first = next(iter(stage.splits))
        texts, again = [SYSTEM, "USER: ASSISTANT:", "\n"], "run the stage again"
        for record in read_json(folder / f"{first}.json", list[JsonObject], hint=again, max_bytes=LOG_BYTES):
            for question, answer in zip(record["conversations"][::2], record["conversations"][1::2], strict=True):
                texts.append(f"USER: {question['value'].replace('<image>', '')} ASSISTANT: {answer['value']}")
        tokenizer = train_tokenizer(texts, stage.vocabulary)
        processor = _family(context.target).new(
            tokenizer, context.target.base_kind, image_size=stage.image_size, patch_size=stage.patch_size,
            image_mean=IMAGE_MEAN, image_std=IMAGE_STD,
        )  # fmt: skip
    processor.save(context.folder)
    total = sum(sum(counts.values()) for counts in manifest["splits"].values())
    context.say(f"wrote {total} records in {len(stage.splits)} splits, {processor.num_token_ids} token ids")


def _write_captioned(stage: GenerateStage, context: Context, folder: Path) -> None:
    splits = stage.pictures
    write_captioned(
        folder, seed=context.seed, image_size=stage.image_size, grain=stage.grain, pairs=stage.pairs, splits=splits,
        textures=stage.textures, before_each=_counting(context),
    )  # fmt: skip
    source = TarSource(kind="webdataset", path=str(folder / f"{next(iter(splits))}-00000.tar"))
    captions = [item.caption for item in usable(read(source))]
    train_tokenizer(captions, stage.vocabulary).save_pretrained(context.folder / TOKENIZER)
    context.say(f"wrote {sum(splits.values())} pictures in {len(splits)} splits")


def _counting(context: Context) -> Callable[[], None]:
    """Called before each record: counts it, and ends a run that was asked to stop."""

    def before_each() -> None:
        context.stop.check(f"in stage {context.name}")
        context.progress.advance()

    return before_each


def _family(target: AnyTarget) -> PictureFamily:
    """How a target reads pictures. A text-only one ignores what is written for them."""
    named: PictureFamily | None = None if target.draws_images else target.picture_family
    return named or picture_family_of(target.base_kind) or USUAL
