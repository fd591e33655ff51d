"""The context of a stage: the recipe's sections, the stage's folder, and the results of earlier stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import torch
from pydantic import Field, model_validator

from ...core import ranks
from ...core.errors import UserError, first_line
from ...core.files import read_json
from ...core.heartbeat import BOUND_S
from ...core.json_types import JsonObject
from ...core.pretrained import Checkpoint
from ...core.secrets import redact
from ...core.section import Section
from ...core.tracking import Tracker, TrackingConfig
from ...data.families.processor import Processor
from ...data.families.table import PICTURE_FAMILIES
from ...data.processor_files import load_processor, processor_of_halves, with_own_image_processor
from ...eval.run_reports import COLUMNS, cells, readable
from ...models.drafters.base import DrafterConfig
from ...models.drafters.lvlm import LvlmConfig
from ...models.hub import ModelSource, read_config
from ...models.parts import TokenIds
from ...models.stored import computes_in_bfloat16
from ...models.targets.parallel import check_ranks
from ...models.targets.table import AnyTarget, language_section
from .progress import StageLine
from .stopping import Stop

_AGAIN = "run the stage again (restart=STAGE)"
# Of a stage's folder: what makes up the model, and what a reader of the report wants.
# report.md and report.html show example answers, which a tracker is not given, as it is not given sample.txt.
RESULT, REPORT = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"), ("*.json", "*.png")
NOT_RESULT = ("done.json", "fingerprint.json", "score.json", "sample.txt")


class EngineConfig(Section):
    """A recipe's `engine` section: how weights and optimizer states lie on the ranks."""

    # 0 keeps everything on each rank (best for drafts under 1B); 1 and 2 share optimizer states and gradients;
    # 3 shares the weights too.
    zero_stage: Literal[0, 1, 2, 3] = 0
    # bf16 keeps float32 master weights and sums gradients in float32; fp16 needs a GPU. auto: bf16 on a GPU that
    # computes in it, unless the target is held in float32; fp32 on others and on a CPU.
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"

    # ZeRO 3: weights of fewer numbers than this stay whole on every rank, which costs memory and spares messages. null:
    # DeepSpeed's 100,000; 0 shares all of them out.
    persistence_threshold: int | None = Field(None, ge=0, exclude_if=lambda value: value is None)

    # Float32 matrix products of training steps round their factors to TF32 on GPUs that have it, and are several times
    # as fast. Decoding and the target's states stay exact. Unset it stays out of fingerprints.
    tf32: bool = Field(True, exclude_if=lambda value: value is True)

    # Minutes that a rank waits for another one that was stopped, was lost or hangs; then it ends with exit code 1. One
    # that works alone (it builds an index, scores pictures, uploads) has 48 times as long. Not in fingerprints.
    wait_minutes: float = Field(BOUND_S / 60, gt=0, le=100_000, exclude_if=lambda value: value == BOUND_S / 60)

    @model_validator(mode="after")
    def _read(self) -> EngineConfig:
        if self.persistence_threshold is not None and self.zero_stage != 3:
            raise ValueError("persistence_threshold is of zero_stage: 3; leave it out")
        return self

    def on(self, device: torch.device, *, target_dtype: str = "float32") -> EngineConfig:
        """The section with `auto` resolved for a device; the target is held in `target_dtype`, as torch names it."""
        if self.precision != "auto":
            return self
        low = target_dtype != "float32" and computes_in_bfloat16(device)
        return self.model_copy(update={"precision": "bf16" if low else "fp32"})


def check_engine(config: EngineConfig) -> None:
    """Refuse what this machine cannot run, before anything is built."""
    if config.precision == "fp16" and not torch.cuda.is_available():
        raise UserError("engine.precision: fp16 does not run on a CPU", key="engine.precision",
                        hint="use fp32 or bf16, or a machine with CUDA")  # fmt: skip


@dataclass(frozen=True)
class Context:
    """One stage of one run. `inputs`: thing (data, processor, target, drafter) -> folder of the stage that made it."""

    name: str
    folder: Path
    seed: int
    fingerprint: str
    target: AnyTarget  # the recipe's
    drafter: DrafterConfig | None
    engine: EngineConfig
    tracking: TrackingConfig
    inputs: dict[str, Path]
    say: Callable[[str], None]
    recipe: JsonObject = field(default_factory=dict)  # the recipe's tree, secrets and values of variables included
    command: str = ""
    stop: Stop = field(default_factory=Stop)  # the run's: whether it was asked to stop
    resolved: dict[str, str] = field(default_factory=dict)  # setting that is `auto` -> what it is in this stage
    progress: StageLine = field(default_factory=lambda: StageLine(""))  # where the stage counts what it has done
    trackers: list[Tracker] = field(default_factory=list)  # that the stage has opened; who runs it closes them
    opened: ExitStack = field(default_factory=ExitStack)  # what else it has opened; who runs it closes it

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks hold the target together: they run the same requests, and rank 0 alone writes."""
        return self.target.tensor_parallel_size > 1

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around work with a target that all ranks may hold together; `UserError` for another number of ranks."""
        check_ranks(self.target.tensor_parallel_size)
        self.stop.in_step = self.is_in_step
        try:
            yield
        finally:
            self.stop.in_step = False

    def tracker(self) -> Tracker:
        """The stage's tracker, opened when it is first asked for."""
        if not self.trackers:
            group = self.folder.parent.name
            self.trackers.append(
                Tracker(self.tracking, self.folder, name=self.name, recipe=self.recipe, say=self.say, group=group)
            )
        return self.trackers[0]

    def processor(self) -> Processor:
        """The target's: of the synthetic dataset that a stage generated, or of the published target."""
        source = self.inputs.get("processor") or str(self.target.path)
        target = language_section(self.target)
        if target.halves is not None and "processor" not in self.inputs:
            source = self.inputs.get("target") or target.halves[0]  # a stage writes the chat template that it learned
        if target.halves is not None and not (Path(source) / "processor_config.json").is_file():
            processor = processor_of_halves(*target.halves, PICTURE_FAMILIES[target.base_kind])
        else:
            processor = load_processor(
                source, revision=target.revision, text_only=target.reads_text_alone, family=target.picture_family
            )
        if "target" in self.inputs or (self.target.path is not None and "processor" in self.inputs):
            # The processor lies elsewhere, and the ends are the model's; of one that its stage has yet to make, `check`
            # needs none.
            whose = self.target_source()
            waits = isinstance(whose, Path) and not whose.is_dir()
            ends = () if waits else Checkpoint(whose, self.target.revision).generation_ends()
            processor = replace(processor, generation_ends=ends)
        target.check_token_ids(processor.num_token_ids, str(source))
        return processor

    @property
    def drafter_has_own_image_processor(self) -> bool:
        """Whether the draft has its own image processor, so that it gets its own tiles."""
        return isinstance(self.drafter, LvlmConfig) and self.drafter.pictures == "own"

    def processor_of(self, model: str) -> Processor:
        """The processor of a `train` stage's model: the target's, or the draft's own if it has one.

        A captioner is assembled like the draft and uses the draft's image processor.
        """
        return self.processor() if model == "target" else self.own_image_processor() or self.processor()

    def own_image_processor(self) -> Processor | None:
        """The target's tokenizer and the image processor of the draft's tower; None: it shares the target's tiles."""
        if not self.drafter_has_own_image_processor:
            return None
        draft = cast(LvlmConfig, self.drafter)
        tower = cast(ModelSource, draft.vision_tower)
        vision = read_config(tower, key="drafter.vision_tower")
        vision = getattr(vision, "vision_config", vision)  # CLIP's Hub config holds a text half, too
        return with_own_image_processor(
            self.processor(),
            tower if isinstance(tower, str) else None,
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            family=draft.family,
            revision=None,
        )

    def target_source(self) -> str | Path:
        """The target's weights: the folder of the stage that made them, else the path in the target's section."""
        return self.inputs.get("target") or str(self.target.path)

    def penalties(self) -> str:
        """What the target's generation config does to scores that no stage does, as a sentence; "": nothing."""
        whose = self.target_source()
        if self.target.draws_images or (isinstance(whose, Path) and not whose.is_dir()) or whose == str(None):
            return ""
        return Checkpoint(whose, self.target.revision).penalties()

    @staticmethod
    def token_ids(processor: Processor, vocab_size: int) -> TokenIds:
        """The vocabulary's size and the processor's ids of special tokens."""
        return TokenIds(
            vocab_size,
            processor.image_token_id,
            processor.bos_id,
            processor.eos_id,
            processor.pad_id,
            processor.video_token_id,
            processor.vision_start_id,
            processor.vision_end_id,
        )

    def device(self) -> torch.device:
        """This rank's GPU; the CPU where there is no CUDA."""
        return ranks.device()


@contextmanager
def tracked(context: Context) -> Iterator[Context]:
    """A stage's context; afterwards trackers get what the stage has left."""
    failed = True
    try:
        yield context
        failed = False
        if context.tracking.wandb is not None:
            try:
                _hand_on(context)
            except Exception as error:  # the stage has its results: a tracker is not worth them
                context.say(f"tracking failed, and the run continues without it: {redact(first_line(error))}")
    finally:
        for tracker in context.trackers:
            tracker.finish(int(failed))


def _hand_on(context: Context) -> None:
    report = context.folder / "report.json"
    if report.is_file():
        tracker = context.tracker()
        if rows := cells(read_json(report, JsonObject, hint=_AGAIN)):
            tracker.table("report", COLUMNS, [readable(row) for row in rows])
        tracker.pictures(sorted(context.folder.glob("*.png")))
        tracker.artifact("report", _files(context.folder, REPORT, ("done.json", "fingerprint.json")), None)
    elif (context.folder / "model.safetensors").is_file():
        context.tracker().artifact("result", _files(context.folder, RESULT, NOT_RESULT), None)


def _files(folder: Path, patterns: tuple[str, ...], without: tuple[str, ...]) -> list[Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in paths if path.name not in without)
