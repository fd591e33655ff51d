"""A tiny LLaVA on a tiny shapes world, trained by the real loop through the real engine on one gloo rank."""

import atexit
import functools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.loader import Loader
from draftsmith.data.processor import Processor, build_processor
from draftsmith.data.shapes.scene import IMAGE_MEAN, IMAGE_STD
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.data.shapes.write import write_world
from draftsmith.models.llava import LlavaTraining, TokenIds, assemble, llava_config
from draftsmith.models.lora import LoraConfig
from draftsmith.trainers.checkpoint import CheckpointConfig
from draftsmith.trainers.engine import Engine, EngineConfig, init_distributed
from draftsmith.trainers.loop import Schedule, train
from draftsmith.trainers.optim import OptimConfig, build_optimizer, rate_multiplier
from transformers import CLIPVisionConfig, LlamaConfig

NUM_SAMPLES, BATCH = 14, 4  # 4 steps an epoch, the last one of 2 rows
FINGERPRINT = "f" * 64
TRAINABLE = ("projector", "language_model")
OPTIM = OptimConfig(lr=0.01, weight_decay=0.1, warmup_steps=2, clip_norm=1.0)


@functools.cache
def world() -> tuple[ConversationDataset, Processor]:
    """14 records of the shapes world (pictures, several turns, text only), written once for each test process."""
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    counts = {"attribute": 5, "conversation": 4, "difference": 2, "fact": 3}
    write_world(folder / "world", seed=0, image_size=24, splits={"train": counts})
    records = json.loads((folder / "world" / "train.json").read_text())
    assert len(records) == NUM_SAMPLES
    texts = [turn["value"].replace("<image>", "") for record in records for turn in record["conversations"]]
    tokenizer = train_tokenizer(["USER: ASSISTANT:", "\n", *texts], 400)
    processor = build_processor(tokenizer, image_size=24, patch_size=8, image_mean=IMAGE_MEAN, image_std=IMAGE_STD)
    dataset = ConversationDataset(
        ConversationData(path="train", aspect="square", max_length=256),
        PromptFormat(system="", image_rule="verbatim"),
        processor,
        files=[folder / "world" / "train.json"],
        skipped_log=None,
        cache=folder / "cache",
    )
    return dataset, processor


class Changed:
    """The world's samples, some of them changed: index -> what to do with the sample."""

    def __init__(self, changes: dict[int, Callable]):
        self.samples, self.changes = world()[0], changes
        self.lengths = self.samples.lengths

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        sample = self.samples[index]
        return self.changes[index](sample) if index in self.changes else sample

    def sample_id(self, index: int) -> str:
        return self.samples.sample_id(index)


def llava(*, dropout: float = 0.0, seed: int = 0):
    """A LLaVA of 30k parameters; with `dropout` its attention draws from the global generator in every step."""
    _, processor = world()
    torch.manual_seed(seed)
    text = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, initializer_range=0.2, attention_dropout=dropout,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=24, patch_size=8
    )
    ids = TokenIds(
        len(processor.tokenizer), processor.image_token_id, processor.bos_id, processor.eos_id, processor.pad_id
    )
    return assemble(llava_config(text, vision, ids))


@dataclass
class Run:
    """One training from `prepare` to its end.

    Args:
        module: what is trained; its own start does not matter when a checkpoint is loaded.
        log: called with (step, loss) after each logged step; where signals and crashes come from.
        on_loader: called when the loader is made, before the first step.
    """

    module: torch.nn.Module
    zero_stage: int = 0
    precision: str = "fp32"
    steps: int = 8
    batch_size: int = BATCH
    micro_batch_size: int = 2
    optim: OptimConfig = OPTIM
    optimizer: torch.optim.Optimizer | None = None  # in place of AdamW
    checkpoints: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=None, keep=100))
    log_every: int = 1
    samples: object = None
    num_workers: int = 0
    log: Callable[[int, float], None] = lambda step, loss: None
    on_loader: Callable[[], None] = lambda: None
    said: list[str] = field(default_factory=list)
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    rewound: list[int] = field(default_factory=list)

    def prepare(self) -> Engine:
        init_distributed()
        accumulation = self._loader(0).accumulation
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.module.parts(), self.optim)
        self.engine = Engine(
            self.module,
            self.optimizer,
            rate_multiplier(self.optim, self.steps),
            EngineConfig(zero_stage=self.zero_stage, precision=self.precision),
            micro_batch_size=self.micro_batch_size,
            accumulation=accumulation,
            clip_norm=self.optim.clip_norm,
        )
        return self.engine

    def train(self, folder: Path, *, fingerprint: str = FINGERPRINT) -> "Run":
        """Build the engine, seed as a stage does, train; returns itself."""
        self.prepare()
        seed_everything(0)
        train(
            self.engine,
            self._make_loader,
            Schedule(self.steps, self.checkpoints, log_every=self.log_every),
            folder=folder,
            fingerprint=fingerprint,
            log=self._log,
            rewind=self.rewound.append,
            say=self.said.append,
        )
        return self

    @property
    def losses(self) -> dict[int, float]:
        return {step: values["loss"] for step, values in self.logged.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole parameters by name, copied."""
        with self.engine.full_weights():
            return copied(self.engine.module)

    def _log(self, values: dict[str, float], step: int) -> None:
        self.logged[step] = values
        self.log(step, values["loss"])

    def _make_loader(self, start_step: int) -> Loader:
        self.on_loader()
        return self._loader(start_step)

    def _loader(self, start_step: int) -> Loader:
        from draftsmith.core import ranks

        dataset, processor = world()
        return Loader(
            self.samples if self.samples is not None else dataset,
            seed=0,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            total_steps=self.steps,
            pad_id=processor.pad_id,
            image_size=processor.image_size,
            rank=ranks.rank(),
            world_size=ranks.world_size(),
            start_step=start_step,
            num_workers=self.num_workers,
        )


def tiny(
    *,
    dropout: float = 0.0,
    trainable: Sequence[str] = TRAINABLE,
    gradient_checkpointing: bool = False,
    lora: LoraConfig | None = None,
) -> LlavaTraining:
    return LlavaTraining(
        llava(dropout=dropout), trainable, gradient_checkpointing=gradient_checkpointing, lora=lora
    )  # fmt: skip


def scrambled(module: LlavaTraining) -> LlavaTraining:
    """The same frozen weights and other trainable ones: what a resumed run must replace."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return module


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def batches_of(run: Run) -> list:
    """The optimizer steps that a run of this shape trains on."""
    return list(run._loader(0))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, and not empty."""
    assert left and left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def main(folder: Path) -> None:
    """One rank of several: a few steps, then rank 0 writes losses and weights."""
    run = Run(tiny(), zero_stage=int(sys.argv[2]), steps=3, micro_batch_size=1)
    run.train(folder / "checkpoints")
    weights = run.weights()
    if torch.distributed.get_rank() == 0:
        torch.save({"losses": run.losses, "weights": weights}, folder / "result.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
