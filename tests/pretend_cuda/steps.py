"""Training steps of every track on the pretend device, for `scenarios.py`: what the host reads in each."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import heads_tiny
import tiny
import tiny_qwen
import torch
import training as runs
import visual_tiny
from draftsmith.data.loader import StepBatches
from draftsmith.models.drafters.distillation import DistillObjective, DistillTraining, Teacher
from draftsmith.models.parts import PARTS
from draftsmith.models.targets.table import training_of
from draftsmith.trainers.run.context import EngineConfig
from draftsmith.trainers.train import loop
from draftsmith.trainers.train.checkpoint import CheckpointConfig
from draftsmith.trainers.train.engine import init_distributed
from draftsmith.trainers.train.fit import OptimConfig, build_optimizer

from pretend_cuda.device import COUNTS
from pretend_cuda.engine import PlainEngine

HEADS = ("eagle", "eagle3", "sparrow", "sparrow-half-blind", "msd", "vispec", "hivis")
QWEN = ("qwen2_5_vl", "qwen3_vl")
PACKED = ("packed draft LVLM", "packed eagle", "packed qwen3_vl", "packed eagle of qwen3_vl")
STEPS = (
    "draft LVLM", "distillation", *HEADS, "medusa", "dflash", "image eagle", "image eagle guided", "image medusa",
    *QWEN, *PACKED,
)  # fmt: skip
MICRO = 2  # micro-batches of a step


def _case(name, device):
    """Module to train, the target's states for a batch, and the micro-batches of a step; the target on `device`."""
    torch.manual_seed(0)
    if name.startswith("packed "):
        module, source, batch = _case(name.removeprefix("packed "), device)
        return module, source, replace(batch, packed=True)
    if "qwen" in name:
        return _qwen(name, device)
    if name.startswith("image"):
        generator = visual_tiny.llamagen("text", 0)
        batch = visual_tiny.code_batch(generator, torch.randint(24, (4, 16)), real=torch.tensor([True] * 3 + [False]))
        big = visual_tiny.target(generator.to(device))
        config = visual_tiny.MEDUSA if name == "image medusa" else visual_tiny.EAGLE
        if name == "image eagle guided":
            config = config.model_copy(update={"loss": config.loss.model_copy(update={"guided": 1.0})})
        return _head(config, big, batch)
    samples = runs.Samples(8)
    batch = runs.loader(samples, 1, micro=8, batch=8).__iter__().__next__().micro[0]
    batch = replace(batch, seeds=tuple(range(len(batch.ids))))
    if name in ("draft LVLM", "distillation"):
        draft = tiny.llava(0, width=16, layers=1).train()
        if name == "draft LVLM":
            return runs.LlavaTraining(draft, PARTS, gradient_checkpointing=False), lambda batch: None, batch
        banned = torch.zeros(draft.config.text_config.vocab_size, dtype=torch.bool)
        banned[tiny.IMAGE_ID] = True
        teacher = Teacher(tiny.llava(1).to(device).eval())
        module = DistillTraining(
            draft, PARTS, objective=DistillObjective(kind="distill"), teacher=teacher, banned=banned,
            gradient_checkpointing=False,
        )  # fmt: skip
        return module, teacher.states, batch
    big = tiny.target(tiny.llava(0, layers=6).to(device))
    if name == "medusa":
        return _head(heads_tiny.config_of(kind="medusa"), big, batch)
    if name == "dflash":
        settings = {"kind": "dflash", "block_size": 5, "num_layers": 2, "blind_share": 0.5, "loss": {"num_anchors": 4}}
        return _head(heads_tiny.config_of(**settings), big, batch)
    settings = dict(heads_tiny.SETTINGS[name])
    settings |= {"taps": (1, 3, 5), "draft_vocab_size": None} if settings["kind"] == "eagle3" else {}
    return _head(heads_tiny.config_of(**settings), big, batch)


def _qwen(name, device):
    """Pictures of several sizes, a clip and a row of text: a whole model in training, or a head beside its target."""
    kind = name.split()[-1]
    shown = [(((10, 6), (4, 14)), (2, 4, 6)), (((4, 6),), None), ((), None), (((10, 6),), None)]
    asked = [tiny_qwen.request(kind, images, clip, seed=seed) for seed, (images, clip) in enumerate(shown)]
    batch = replace(tiny_qwen.batch_of(*asked), seeds=tuple(range(len(asked))))
    if name == kind:
        module = training_of(tiny_qwen.model(kind), PARTS, gradient_checkpointing=False).train()
        return module, lambda batch: None, batch
    return _head(heads_tiny.config_of(kind="eagle"), tiny_qwen.target(tiny_qwen.model(kind).to(device)), batch)


def _head(config, big, batch):
    torch.manual_seed(0)
    module = config.training_objective(config.build(big), big).train()
    return module, functools.partial(big.states, taps=config.taps_for(big.shape, training=True)), batch


def _trained(name, steps):
    """Totals and places of the counts while `steps` steps run, the last of which is logged; the losses' mean."""
    module, source, batch = _case(name, torch.device("cuda", 1))
    module.to("cuda:1")
    optimizer = build_optimizer(module.parts(), OptimConfig(lr=1e-3))
    engine = PlainEngine(
        module, optimizer, lambda step: 1.0, EngineConfig(), micro_batch_size=8, accumulation=MICRO, clip_norm=None
    )
    batches = [StepBatches(step, 0, [batch] * MICRO) for step in range(steps)]
    loader = type("Loader", (list,), {"batch_size": 8})(batches)
    with tempfile.TemporaryDirectory() as folder:
        COUNTS.clear()
        loop.train(
            engine, loop.Training(module, lambda start: loader, steps, lambda engine: None, source),
            CheckpointConfig(every=None), log_every=1000, folder=Path(folder), fingerprint="f",
            log=lambda values, step: None, rewind=lambda step: None, say=lambda line: None,
        )  # fmt: skip
    return SimpleNamespace(totals=COUNTS.totals(), reads=dict(COUNTS.reads), blocking=dict(COUNTS.blocking))


def training_steps():
    """Case -> launches, reads, uploads and waits of one more optimizer step, and where; the first loss."""
    init_distributed()
    result = {}
    for name in STEPS:
        few, more = _trained(name, 1), _trained(name, 2)
        each = {key: more.totals[key] - few.totals[key] for key in few.totals}
        both = (more.reads | more.blocking, few.reads | few.blocking)
        places = {place: n - both[1].get(place, 0) for place, n in both[0].items()}
        result[name] = each | {"places": {place: n for place, n in places.items() if n}}
        result[name]["losses"] = [_first_loss(name, device) for device in ("cpu", "cuda:1")]
    return result


def _first_loss(name, device):
    module, source, batch = _case(name, torch.device(device))
    batch = batch.to(device)
    return float(module.to(device)(batch, source(batch)).loss_sum.detach())
