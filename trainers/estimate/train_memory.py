"""Memory of a training on its fullest GPU, in a dry run: weights, gradients and optimizer by ZeRO stage, the frozen
target, and what a micro-batch makes, which is counted on the meta device (`counted.py`).

A recipe's `hardware` says how many ranks there are; without one the ranks of this command count.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core import ranks
from ...core.batch import IMAGE, TEXT, Batch, CodeBatch, StepLoss
from ...core.errors import first_line
from ...core.section import torch_dtype
from ...core.states import Taps, TargetStates, TopLogProbs
from ...data.order import PackingConfig
from ...models.drafters.base import DrafterConfig, HeadObjective
from ...models.drafters.distillation import DistillTraining, Teacher
from ...models.hub import config_value, is_tied, rope_of
from ...models.targets.base import ShapeAlone, TargetShape
from ...models.targets.sizes import config_text, empty_model, once, parameter_counts
from ...models.targets.table import family_of, image_section, language_section, training_of
from ..run.stage import Hardware, WholeRecipe
from ..train.fit import TrainSettings
from ..train.muon import is_hidden, newton_schulz_flops
from ..train.settings import CodesSettings, RecordsSettings, StatesSettings
from .counted import META, along, flops, most_bytes
from .models import drafter_parameters, engine_precision, held_bytes, held_dtype, mirrored_shape, target_shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_GIB = 2**30
# CUDA's context, libraries' workspaces and what the allocator cannot use.
RUNTIME = 2 * _GIB
# Of a process without a GPU: Python with the libraries of a stage (0.42 to 0.53 GiB measured with tiny models).
PROCESS = 0.5 * _GIB
_LAYERS = 12  # of a decoder that are counted at once; more add equal steps
_ROW = 4096  # positions of rows that are counted at once
_RUN = 64  # of a conversation's tokens the last quarter of each so many is supervised


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step on the fullest GPU, or of a process without one, by what takes them."""

    parts: dict[str, float] = field(default_factory=dict)
    # A kind of drafter whose training cannot be counted without weights, and why (`DrafterConfig.empty`).
    uncounted: str | None = None
    # Share of a step's arithmetic that Muon's Newton-Schulz steps are; 0: none.
    newton_schulz: float = 0.0

    @property
    def total(self) -> float:
        """All of it on a GPU, with what CUDA and its libraries take."""
        return sum(self.parts.values()) + RUNTIME

    def fits(self, hardware: Hardware | None) -> bool:
        """Whether it fits a GPU; nobody knows without one."""
        return hardware is None or self.total <= hardware.memory_gb * _GIB

    def lines(self, hardware: Hardware | None, *, is_here: bool = False) -> list[str]:
        """The lines of a dry run; with `is_here` this machine may run it: without a GPU, if it has none."""
        each = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in self.parts.items() if size >= 0.05 * _GIB)
        each = each or "models under 0.1"
        if hardware is None and is_here and not torch.cuda.is_available():
            whole = sum(self.parts.values()) + PROCESS
            line = f"  memory of a process, without a GPU, about {whole / _GIB:.1f} GiB: {each}, Python 0.5"
        else:
            line = f"  memory of the fullest GPU about {self.total / _GIB:.1f} GiB: {each}, CUDA 2.0"
        if self.uncounted:
            line += f"; not counted: activations of {self.uncounted}"
        told = [line]
        if self.newton_schulz:
            told.append(f"  Muon's Newton-Schulz steps are about {self.newton_schulz:.0%} of a step's arithmetic")
        if hardware is None:
            return told
        verdict = "fits" if self.fits(hardware) else "DOES NOT FIT"
        return [*told, f"  {verdict} {hardware.gpus} GPU(s) of {hardware.memory_gb:g} GB each"]


def num_ranks(recipe: WholeRecipe) -> int:
    """Ranks of a training: one for each GPU, but for a target that one rank spreads over all."""
    if recipe.target.draws_images or language_section(recipe.target).device_map in (None, "cpu"):
        return recipe.hardware.gpus if recipe.hardware else ranks.world_size()
    return 1


def micro_of(stage: TrainSettings, recipe: WholeRecipe) -> int:
    """Rows of one forward on one rank."""
    return stage.micro_batch_size or -(-stage.batch_size // num_ranks(recipe))


def number_type(recipe: WholeRecipe) -> torch.dtype:
    """The type of a weight in a forward of training."""
    return torch.float32 if engine_precision(recipe) == "fp32" else torch.bfloat16


def muon_shapes(stage: TrainSettings, drafter: DrafterConfig, recipe: WholeRecipe) -> list[torch.Size]:
    """Shapes of the weights that Muon trains; none by AdamW, and of a drafter that a dry run cannot build."""
    module = drafter.empty(mirrored_shape(recipe)) if stage.optim.name == "muon" else None
    named = () if module is None else module.named_parameters()
    return [weight.shape for name, weight in named if weight.requires_grad and is_hidden(name, weight)]


def trained_parameters(stage: TrainSettings, drafter: DrafterConfig, recipe: WholeRecipe) -> int:
    """Parameters of a drafter that the stage trains: all, or without its LM head."""
    module = drafter.empty(mirrored_shape(recipe)) if getattr(stage, "lm_head", None) == "frozen" else None
    frozen = getattr(module, "lm_head", None)
    return drafter_parameters(drafter, recipe) - (0 if frozen is None else frozen.weight.numel())


def engine_parts(
    total: int, trained: int, stage: TrainSettings, recipe: WholeRecipe, by_muon: Sequence[torch.Size] = ()
) -> dict[str, float]:
    """Weights, gradients and optimizer of so many parameters on each rank, by the ZeRO paper's table (section 3)."""
    count, zero, width = num_ranks(recipe), recipe.engine.zero_stage, number_type(recipe).itemsize
    several = stage.batch_size > micro_of(stage, recipe) * count
    # Under bf16 micro-batches are summed in float32, by ZeRO's stages or where there are several.
    gradients = trained * (4 if width == 4 or zero or several else width)
    states = trained * (8 if width == 4 else 12)  # Adam's two moments, and float32 weights beside lower ones
    states -= 4 * sum(shape.numel() for shape in by_muon)  # which has one buffer
    return {
        "weights": width * total / (count if zero == 3 else 1),
        "gradients": gradients / (count if zero >= 2 else 1),
        "optimizer": states / (count if zero >= 1 else 1),
    }


def lvlm_parts(
    stage: RecordsSettings, recipe: WholeRecipe, config: PreTrainedConfig, trained: int, patches: int
) -> dict[str, float]:
    """Bytes of a draft LVLM's training, a captioner's or a tiny target's; its tower reads `patches` for a row."""
    parts = engine_parts(sum(parameter_counts(config).values()), trained, stage, recipe)
    rows, length = _rows(stage, recipe, stage.data.max_length)
    held, whole, top = held_dtype(recipe.target), config.get_text_config().num_hidden_layers, 0
    objective = stage.objective if stage.objective is not None and stage.objective.kind == "distill" else None
    teacher_config = target_shape(recipe) if objective is not None and objective.probabilities == "online" else None
    if teacher_config is not None:
        parts["frozen target"] = _frozen_bytes(recipe, sum(parameter_counts(teacher_config).values()))
    elif objective is not None:
        top = max(dict(one).get("keep_logprobs") or 1 for one in recipe.stages.values())

    def count(layers: float) -> float:
        shorter = copy.deepcopy(config)
        text = shorter.get_text_config()
        text.num_hidden_layers = round(layers)
        if config_value(text, "layer_types"):
            text.layer_types = text.layer_types[: round(layers)]
        settings: dict[str, Any] = {"gradient_checkpointing": stage.gradient_checkpointing, "lora": stage.lora}
        with META, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, which the training itself shows
            model: PreTrainedModel = empty_model(shorter)
            if objective is None:
                module = training_of(model, stage.trainable, **settings)
            else:
                banned, teacher = torch.zeros(text.vocab_size, dtype=torch.bool), None
                if teacher_config is not None:
                    teacher = Teacher(empty_model(teacher_config, torch_dtype(held)).requires_grad_(False))
                settings |= {"objective": objective, "teacher": teacher, "banned": banned}
                module = DistillTraining(model, stage.trainable, **settings)
        module = module.to(number_type(recipe)).train()

        def step() -> None:
            # Half of each row's places hold pictures. Tiles beyond that, of a tiled picture or a clip, are dummies.
            batch = synthetic_batch(shorter, rows, length, patches)
            if top:  # what a regenerate stage gives that kept so many tokens' log-probabilities
                ids = torch.ones(int(batch.predicting.sum()), top, dtype=torch.int64)
                states: TargetStates | None = TargetStates(
                    top_log_probs=TopLogProbs(ids, ids.float(), ids[:, 0].float()).to(META)
                )
            else:
                states = module.states(batch)
            _backward(module, module(batch, states))

        return most_bytes(step)

    settings = stage.model_dump(include={"trainable", "gradient_checkpointing", "lora", "objective", "packing"})
    text = f"{config_text(config)} {settings} {recipe.target} {number_type(recipe)} {held}"
    text += f" {rows} {length} {patches} {top}"
    parts["activations"] = once(text, lambda: along(count, whole, _LAYERS // 2))
    return parts


def head_memory(stage: StatesSettings, recipe: WholeRecipe, max_length: int | None) -> Memory:
    """The memory of training a hidden-state head of a language model.

    Args:
        max_length: of its samples; None: nobody knows, and activations are left out.
    """
    config, shape, target = stage.drafter or recipe.drafter, mirrored_shape(recipe), target_shape(recipe)
    assert config is not None
    total, trained = drafter_parameters(config, recipe), trained_parameters(stage, config, recipe)
    text, dtype = target.get_text_config(), held_dtype(recipe.target)
    by_muon = muon_shapes(stage, config, recipe)
    parts = engine_parts(total, trained, stage, recipe, by_muon)
    tables = (1 if is_tied(target) else 2) * text.vocab_size * text.hidden_size
    parts["frozen target"] = _frozen_bytes(recipe, tables if stage.reads_tables else
                                           sum(parameter_counts(target).values()))  # fmt: skip
    if max_length is None and stage.packing is None:
        return Memory(parts)
    rows, length = _rows(stage, recipe, max_length)
    axes = 3 if "mrope_section" in rope_of(text) else 1

    def step(training: nn.Module, taps: Taps, count: int, places: int) -> None:
        batch = _batch(count, places, min(16, places // 4), axes=axes, packed=stage.packing is not None)
        states = _states(taps, shape.hidden_size, dtype, batch.ids, places)
        _backward(training, training(batch, replace(states, positions=batch.positions)))

    memory = _with_step(
        parts, stage, recipe, config, shape, step, (rows, length), by_muon, stage.objective, stage.packing
    )
    if stage.reads_tables or memory.uncounted:
        return memory
    # The target's pass is over when the head begins, and has left its states.
    taps = config.taps_for(shape, training=True)
    passed = target_step(language_section(recipe.target), target, dtype, taps, rows, length)
    return replace(memory, parts={**parts, "activations": max(memory.parts["activations"], passed)})


def image_head_memory(stage: CodesSettings, recipe: WholeRecipe) -> Memory | None:
    """Memory of training an image generator's head; None for its tokenizer, its reader and itself, as in demos."""
    if stage.model != "drafter":
        return None
    config, shape = stage.drafter or recipe.drafter, mirrored_shape(recipe)
    section = image_section(recipe.target)
    assert config is not None
    total, trained = drafter_parameters(config, recipe), trained_parameters(stage, config, recipe)
    by_muon = muon_shapes(stage, config, recipe)
    parts = engine_parts(total, trained, stage, recipe, by_muon)
    parts["frozen target"] = held_bytes(section) * section.count()["transformer"]

    def step(training: nn.Module, taps: Taps, count: int, _: int) -> None:
        sizes = count, section.prompt_places, section.num_codes
        _backward(training, training(*_codes(*sizes, shape, taps, held_dtype(section))))

    return _with_step(parts, stage, recipe, config, shape, step, (micro_of(stage, recipe), 1), by_muon)


def _rows(stage: RecordsSettings | StatesSettings, recipe: WholeRecipe, max_length: int | None) -> tuple[int, int]:
    """Samples of a micro-batch, and the length of each."""
    if stage.packing is None:
        assert max_length is not None
        return micro_of(stage, recipe), max_length
    length = min(max_length or stage.packing.max_tokens, stage.packing.max_tokens)
    return max(1, stage.packing.max_tokens // length), length


def _frozen_bytes(recipe: WholeRecipe, weights: int) -> float:
    """Bytes of the frozen target on a rank."""
    section = language_section(recipe.target)
    spread = recipe.hardware.gpus if recipe.hardware and section.device_map not in (None, "cpu") else 1
    return held_bytes(section) * weights / spread


def _with_step(
    parts: dict[str, float], stage: TrainSettings, recipe: WholeRecipe, config: DrafterConfig, shape: TargetShape,
    step: Callable[[nn.Module, Taps, int, int], None], size: tuple[int, int], by_muon: Sequence[torch.Size],
    objective: HeadObjective | None = None, packing: PackingConfig | None = None,
) -> Memory:  # fmt: skip
    """With the bytes that a head's step makes, from counts of few rows of some length; or why they cannot be counted.

    Args:
        step: of a training, with taps, over rows of a length.
        size: rows and length.
    """
    dtype, held = number_type(recipe), torch_dtype(held_dtype(recipe.target))

    def counted(measure: Callable[[Callable[[], None]], float]) -> float | str:
        try:
            module = config.empty(shape)
            if module is None:
                return "it builds no module without weights"
            alone: Any = ShapeAlone(shape, held)
            training = config.training_objective(module.to(dtype), alone, objective)
            training.eval()  # noise and gaps, which training draws, take generators that the meta device has not
            taps = config.taps_for(shape, training=True)

            def count(rows: float) -> float:
                each = lambda places: measure(lambda: step(training, taps, round(rows), round(places)))  # noqa: E731
                return along(each, size[1], _ROW // 2)

            return along(count, size[0], max(1, _ROW // size[1]))
        except Exception as error:  # a drafter of somebody else's may ask its target for anything
            return f"{type(error).__name__}: {first_line(error)}"

    text = f"{config!r} {objective!r} {shape} {dtype} {held} {packing} {recipe.target} {size}"
    activations = once(text, lambda: counted(most_bytes))
    if isinstance(activations, str):
        return Memory(parts, uncounted=f"{config.kind} ({activations})")
    memory = Memory({**parts, "activations": activations})
    if not by_muon:
        return memory
    forward, update = once(f"flops of {text}", lambda: counted(flops)), newton_schulz_flops(by_muon)
    assert not isinstance(forward, str), forward
    forwards = max(1.0, stage.batch_size / (size[0] * num_ranks(recipe)))
    return replace(memory, newton_schulz=update / (update + forwards * forward))


def target_step(section: Any, config: PreTrainedConfig, dtype: str, taps: Taps, rows: int, length: int) -> float:
    """Bytes that the frozen target makes for a batch's states, its cache among them."""

    def counted() -> float:
        model, ids = empty_model(config, torch_dtype(dtype)), config.get_text_config().vocab_size
        target = section.target(model, num_token_ids=ids, image_token_id=None)
        batch = synthetic_batch(config, rows, length)
        return most_bytes(lambda: target.states(batch, taps))

    return once(f"{config_text(config)} {dtype} {taps} {rows} {length}", counted)


def _backward(module: nn.Module, loss: StepLoss) -> None:
    """Runs the backward pass; gradients go at once, since the engine's own are a part of their own."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)
    loss.loss_sum.backward()


# Batches without values, as long as they may be. Masks have values on the CPU, where the code reads them.


def _batch(rows: int, length: int, shown: int, *, axes: int = 1, **more: Any) -> Batch:
    """Rows of `shown` visual places behind the first one, and of answers between questions."""
    ids = torch.ones(rows, length, dtype=torch.int64)
    answers = (torch.arange(length) % _RUN >= _RUN * 3 // 4).expand(rows, -1).contiguous()
    modality = torch.full((rows, length), TEXT, dtype=torch.int8)
    modality[:, 1 : 1 + shown] = IMAGE
    positions = torch.arange(length).expand(axes, rows, -1).contiguous()
    more = {"pixels": None, "sample_ids": ("",) * rows, "seeds": tuple(range(rows)), **more}
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), answers, modality, positions, **more).to(META)


def synthetic_batch(config: PreTrainedConfig, rows: int, length: int, patches: int = 0) -> Batch:
    """A batch for a model that reads pictures: they fill half of each row.

    Args:
        patches: that the tower reads for a row; tiles beyond the row's own are dummies.
    """
    if config_value(config, "vision_config") is None:
        return _batch(rows, length, 0)
    read = family_of(config).pictures
    assert read is not None, "a tower that no family has"
    pictures, (number, *shape) = read.fill(config, max(1, length // 2))
    dummies = 0
    if pictures[0].whole is None:
        dummies = max(0, rows * (patches // pictures[0].num_tokens - len(pictures)))
    return _batch(
        rows, length, sum(picture.num_tokens for picture in pictures),
        pixels=torch.empty(rows * number + dummies, *shape, device=META), pictures=tuple(pictures) * rows,
        num_dummy_images=dummies,
    )  # fmt: skip


def _states(taps: Taps, width: int, dtype: str, batch: Tensor, length: int) -> TargetStates:
    made = lambda: torch.empty(len(batch), length, width, dtype=torch_dtype(dtype), device=META)  # noqa: E731
    return TargetStates(made() if taps.feature else None, {layer: made() for layer in taps.layers})


def _codes(
    rows: int, places: int, count: int, shape: TargetShape, taps: Taps, dtype: str
) -> tuple[CodeBatch, TargetStates]:
    """Pictures of `count` codes behind `places` of a condition."""
    batch = CodeBatch(
        torch.ones(rows, count, dtype=torch.int64), (), torch.zeros(rows, dtype=torch.bool),
        torch.ones(rows, dtype=torch.bool), ("",) * rows, count, tuple(range(rows)),
    ).to(META)  # fmt: skip
    ids = torch.ones(rows, places + count, dtype=torch.int64, device=META)
    states = replace(
        _states(taps, shape.hidden_size, dtype, ids, places + count), ids=ids, mask=torch.ones_like(ids).bool(),
        positions=torch.arange(places + count, device=META).expand(1, rows, -1), num_generated=count,
        padding=(0,) * rows,
    )  # fmt: skip
    without = _states(taps, shape.hidden_size, dtype, ids, places + count) if taps.without_condition else None
    other = None if without is None else replace(states, feature=without.feature, layers=without.layers)
    return batch, replace(states, unconditional=other)
