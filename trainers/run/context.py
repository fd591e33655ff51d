"""The context of a stage: the recipe's sections, the stage's folder, and the results of earlier stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from ...core import ranks
from ...core.json_types import JsonObject
from ...core.pretrained import Checkpoint
from ...core.tracking import Tracker, TrackingConfig
from ...data.families.processor import Processor
from ...data.processor_files import load_processor, with_own_image_processor
from ...models.drafters.base import DrafterConfig
from ...models.drafters.lvlm import LvlmConfig
from ...models.hub import ModelSource, read_config
from ...models.parts import TokenIds
from ...models.targets.parallel import check_ranks
from ...models.targets.table import AnyTarget, language_section
from .deepspeed_section import EngineConfig
from .progress import StageLine
from .stopping import Stop


@dataclass(frozen=True)
class Context:
    """One stage of one run.

    Args:
        inputs: thing (data, processor, target, drafter) -> folder of the stage that made it.
    """

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
    line: StageLine | None = None  # that people watch; None: nobody does
    trackers: list[Tracker] = field(default_factory=list)  # that the stage has opened; who runs it closes them
    opened: ExitStack = field(default_factory=ExitStack)  # what else it has opened; who runs it closes it

    @property
    def progress(self) -> StageLine:
        """Where the stage counts what it has done; nobody sees it where nobody watches."""
        return self.line or StageLine(self.name)

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks hold the target together: they run the same requests, and rank 0 alone writes."""
        return self.target.tensor_parallel_size > 1

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What a stage does with a target that all ranks may hold together.

        Raises:
            UserError: the run has another number of ranks.
        """
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

    def token_ids(self, processor: Processor, vocab_size: int) -> TokenIds:
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
