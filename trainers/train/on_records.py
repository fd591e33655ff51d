"""LLaVA-like models on conversations: a draft LVLM, a tiny target, or a captioner. One path for all three.

Beside its data a stage needs an objective, for which the frozen target may run, and knows whose answers are learned.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ...core import ranks
from ...core.batch import Request
from ...core.errors import UserError
from ...core.pictures import IMAGE_MARK
from ...core.section import torch_dtype
from ...data.collate import ConversationCollate
from ...data.conversations import PromptFormat, end_ids
from ...data.dataset import ConversationData, ConversationDataset
from ...data.families.processor import Processor
from ...data.families.table import PICTURE_FAMILIES, TEMPLATES
from ...data.loader import Collate, Samples, StepBatches, Subset
from ...data.order import BucketedOrder
from ...data.served_prompt import other_aspect
from ...data.sources import SHARDS, AnswerCollate, AnsweredSamples, Answers
from ...data.states.samples import StatesSamples
from ...models.decoding.batched import write_answers
from ...models.decoding.decoder import CachedDecoder
from ...models.decoding.warp import Warp
from ...models.drafters.distillation import CrossEntropyObjective, DistillObjective, DistillTraining, Teacher
from ...models.drafters.lvlm import LvlmConfig, build_drafter, load_drafter, save_lvlm
from ...models.drafters.manifest import tested_with
from ...models.folders import shipped_name
from ...models.hub import read_config
from ...models.parts import language_model_of, placeholder_ids
from ...models.stored import resolved_dtype
from ...models.targets.load import build_target, target_config, target_weights
from ...models.targets.table import family_of, language_section, training_of
from ...models.training import ModelTraining, merge_adapters
from ..run import stage_records as records
from ..run.context import Context
from ..serve.states_builder import count_samples
from .engine import Engine
from .fit import held_out_loader, training_loader
from .loop import Training, Validate
from .preflight import before_training, preflight
from .settings import RecordsSettings, row_tokens
from .validate import RecordsValidation, validate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUNDING = 0.01  # of what adapters add: less is no news
# Of target and draft that read one batch.
_SHARED = ("text_config.vocab_size", "vision_config.image_size", "vision_config.patch_size")


def open_records(stage: RecordsSettings, context: Context, seed: int) -> Training:
    """A draft LVLM, a tiny target or a captioner on conversations: next tokens, or distillation."""
    processor = context.processor_of(stage.model)
    dataset = records.open_records(stage.data, stage.format, context, processor, learned=stage.learns_answers)
    model = start_weights(stage.model, context, processor, seed)
    text = model.config.get_text_config()
    if stage.positions is not None:
        assert language_model_of(model).config is text, "one config, so that what is saved is what was trained"
        text.max_position_embeddings = stage.positions
    positions: int = text.max_position_embeddings
    check_positions(positions, stage)
    module = training_module(stage, context, model, processor)
    samples, collate, writer = training_data(stage, context, dataset, processor, seed)
    first_epoch = StatesSamples(dataset, samples if isinstance(samples, AnsweredSamples) else None)
    counts = count_samples(first_epoch, context) if stage.counts_samples else None
    usable = np.arange(len(dataset)) if counts is None or stage.mixes_answers else np.flatnonzero(counts.supervised)
    if not len(usable):
        raise UserError("no sample to train on", where=dataset.log.summary(), hint="fix the records")
    total = stage.num_steps(len(usable))
    if ranks.is_main():
        before_training(dataset, positions, context.say, prompts=stage.answers is not None)
    lengths = samples.lengths[usable]
    preflight(Subset(first_epoch, usable, lengths), module, processor, folder=context.folder, say=context.say)
    make_loader = functools.partial(
        training_loader, stage, Subset(samples, usable, lengths), collate, seed=seed, total=total,
        **_batches(stage, context, None if counts is None else counts.signed[usable], seed),
    )  # fmt: skip
    validation = stage.validation

    def finish(engine: Engine) -> None:
        shown = dataset.column("images") + dataset.column("clips")
        _save(stage, context, engine, processor, total, seed, other_aspect(stage.data, processor, shown))

    return Training(
        module,
        make_loader,
        total,
        finish,
        source=module.states,
        validate=_validation(validation, stage, context, processor, module) if validation else None,
        validate_every=validation.every if validation else None,
        write=writer,
        left_out=dataset.log.summary,
    )


def _batches(stage: RecordsSettings, context: Context, lengths: np.ndarray | None, seed: int) -> dict[str, Any]:
    """How the loader orders samples and shares them out: by words, as LLaVA does, or by tokens, which are counted."""
    if stage.window is None and stage.packing is None:
        return {"grouped": stage.group_by_modality}
    assert lengths is not None
    counted: dict[str, object] = {"lengths": lengths, "max_tokens": row_tokens(stage, context.name, lengths)}
    if stage.window is None:
        return counted | {"grouped": stage.group_by_modality}
    return counted | {
        "order": BucketedOrder(lengths, seed, stage.batch_size, stage.window, apart=stage.group_by_modality)
    }


def _validation(
    settings: RecordsValidation, stage: RecordsSettings, context: Context, processor: Processor, module: ModelTraining
) -> Validate:
    """What the loop calls to score held-out records; the frozen target is loaded once, and only here."""
    dataset = records.open_records(settings.data, stage.format, context, processor, log="skipped-validation")
    target: PreTrainedModel | None = None
    if stage.model == "drafter" and settings.against_target is not False:
        if (difference := other_pictures(context, settings.data)) is not None:
            raise UserError(
                f"validation runs the target on the draft's batches, and {difference}",
                key=f"stages.{context.name}.validation",
                hint="set validation.against_target: false",
            )
        target = module.target_beside or frozen_target(context)
    collate = ConversationCollate(processor.pad_id, processor.image_size)
    loader = held_out_loader(dataset, collate, settings.rows(8))
    return lambda engine, step: validate(engine, loader, target, context.stop)


def frozen_target(context: Context) -> PreTrainedModel:
    """The target's model, whole on this rank (or spread by its device map), in evaluation, without gradients."""
    config = language_section(context.target)
    target = target_weights(
        config,
        context.target_source(),
        dtype=torch_dtype(resolved_dtype(config, context.target_source(), context.device(), key="target")),
        device=context.device(),
        device_map=config.device_map,
        offload=config.offload,
        attn_implementation=config.attn_implementation,
        key="target.path",
    )
    return target.requires_grad_(False).eval()


def training_module(
    stage: RecordsSettings, context: Context, model: PreTrainedModel, processor: Processor
) -> ModelTraining:
    """The module that the engine trains, with the target beside it where the objective asks for one."""
    settings = {"gradient_checkpointing": stage.gradient_checkpointing, "lora": stage.lora}
    objective: CrossEntropyObjective | DistillObjective = stage.objective or CrossEntropyObjective()
    if isinstance(objective, CrossEntropyObjective):
        resume = dict(context.target).get("resume", "max_plus_one")
        return training_of(model, stage.trainable, resume=resume, **settings)
    if stage.model == "target" and not family_of(model.config).shares_pictures:
        problem = f"objective: distill trains a {model.config.model_type} as a draft alone, not as a target"
        raise UserError(problem, key=f"stages.{context.name}.objective", hint="use cross_entropy, or a LLaVA")
    teacher = None
    if objective.probabilities == "online":
        if (difference := other_pictures(context, stage.data)) is None:
            teacher = Teacher(frozen_target(context))
            for name in _SHARED:
                if (ours := attrgetter(name)(model.config)) != (theirs := attrgetter(name)(teacher.model.config)):
                    difference = f"the drafter's {name} is {ours}, the target's {theirs}"
        if difference is not None:
            raise UserError(
                f"{difference}: it cannot read one batch with the target", key="objective",
                hint="distill a draft of the target's vocabulary and pictures; or let it learn the target's answers by "
                "cross-entropy, or from kept log-probabilities",
            )  # fmt: skip
    banned = torch.zeros(model.config.text_config.vocab_size, dtype=torch.bool)
    banned[processor.num_token_ids :] = True
    banned[[processor.image_token_id, *placeholder_ids(model.config)]] = True
    return DistillTraining(model, stage.trainable, objective=objective, teacher=teacher, banned=banned, **settings)


def other_pictures(context: Context, data: ConversationData) -> str | None:
    """Why target and draft cannot read one batch of `data`, as far as pictures are concerned; None: they can."""
    if context.drafter_has_own_image_processor:
        return "the drafter has an image processor of its own"
    in_tiles = language_section(context.target).reads_tiles
    if in_tiles not in (None, data.aspect.startswith("anyres")):
        shown = "tiles" if in_tiles else "single tiles"
        return f"the target reads pictures in {shown} and the drafter aspect: {data.aspect}"
    return None


def training_data(
    stage: RecordsSettings, context: Context, dataset: ConversationDataset, processor: Processor, seed: int
) -> tuple[Samples, Collate, DraftWriter | None]:
    """What the loader reads, and how: records, or their prompts with answers by source; and the draft's own writer."""
    if stage.answers is None:
        return dataset, ConversationCollate(processor.pad_id, processor.image_size), None
    answers = None
    if stage.answers.share("target"):
        folder = Path(stage.answers.path) if stage.answers.path else context.inputs["answers"] / SHARDS
        answers = Answers(folder, dataset, others=stage.answers.others)
    num_kept = 0
    objective = stage.objective
    if objective is not None and objective.kind == "distill" and objective.probabilities == "kept":
        assert answers is not None, "see TrainStage"
        num_kept = answers.num_kept
        if not num_kept:
            raise UserError(
                "the answers were written without log-probabilities", where=str(answers.folder),
                hint="set keep_logprobs in the regenerate stage, or objective.probabilities: online",
            )  # fmt: skip
    samples = AnsweredSamples(dataset, stage.answers, answers, seed=seed)
    writer = None
    if stage.answers.share("draft"):
        writer = DraftWriter(samples, processor, end_ids(processor, stage.format), seed)
    collate = AnswerCollate(samples, processor.pad_id, processor.image_size, num_kept)
    return samples, collate, writer


class DraftWriter:
    """Lets the draft answer, with its weights as they stand, what a step's batches leave open.

    An answer depends on the weights and on (seed, step, sample) alone.
    """

    def __init__(self, samples: AnsweredSamples, processor: Processor, ends: Sequence[int], seed: int):
        self.samples, self.processor, self.ends, self.seed = samples, processor, ends, seed

    def __call__(self, engine: Engine, batches: StepBatches) -> StepBatches:
        module: Any = engine.module
        try:
            decoder = family_of(module.model.config).decoder(
                module.model, num_token_ids=self.processor.num_token_ids, never=(self.processor.image_token_id,)
            )
            micro = [
                batch.filled(self._answers(decoder, batch.requests, batches.step) if batch.requests else [])
                for batch in batches.micro
            ]
        finally:
            module.train()  # the decoder puts the model into evaluation mode
        return replace(batches, micro=micro)

    def _answers(self, decoder: CachedDecoder, requests: Sequence[Request], step: int) -> list[list[int]]:
        settings = self.samples.config.draft
        written = write_answers(
            decoder,
            requests,
            Warp(settings.temperature, settings.top_k, settings.top_p),
            limits=[self.samples.limit(request) for request in requests],
            seeds=[random.Random(f"draft/{self.seed}/{step}/{r.name}").getrandbits(63) for r in requests],
            eos_ids=self.ends,
        )
        return [answer.ids for answer in written]


def check_positions(positions: int, stage: RecordsSettings) -> None:
    """Samples longer than the language model has positions would be learned wrong, silently."""
    if stage.data.max_length > positions:
        raise UserError(
            f"data.max_length is {stage.data.max_length} and the language model has {positions} positions "
            "(max_position_embeddings)",
            hint=f"set data.max_length to {positions} or less, or give the model more: drafter.rope_scaling, or the "
            "stage's positions",
        )


def start_weights(which: str, context: Context, processor: Processor, seed: int) -> PreTrainedModel:
    """The model as this stage finds it: an earlier stage's result, or assembled from the recipe."""
    trained = context.inputs.get(which)
    if trained is not None:
        # Under ZeRO 3 a GPU need not hold the whole model: DeepSpeed shares it out from the host.
        place: dict[str, Any] = {"device": None if context.engine.zero_stage == 3 else context.device()}
        if which != "target":
            return load_drafter(trained, tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32, **place)
        return target_weights(language_section(context.target), trained, dtype=torch.float32, **place)
    if which == "target":
        return build_target(language_section(context.target), context.token_ids(processor, processor.num_token_ids))
    drafter = cast(LvlmConfig, context.drafter)
    if "target" in (drafter.vision_tower, drafter.language_model):
        target: Any = target_weights(language_section(context.target), context.target_source(), dtype=torch.float32)
    elif (folder := context.inputs.get("target")) is not None:
        target = read_config(str(folder), key="target")
    else:
        target = target_config(language_section(context.target), None, network=True)
    ids = context.token_ids(processor, getattr(target, "config", target).text_config.vocab_size)
    return build_drafter(drafter, target, ids, seed=seed)


def _save(
    stage: RecordsSettings, context: Context, engine: Engine, processor: Processor, total: int, seed: int,
    aspect: dict[str, str],
) -> None:  # fmt: skip
    """The result: a directory that transformers loads, written by rank 0. `aspect` as of `other_aspect`."""
    with engine.full_weights():
        if ranks.is_main():
            module = engine.module
            assert isinstance(module, ModelTraining)
            if (rounding := merge_adapters(module.model)) > _ROUNDING:
                context.say(f"rounding the merged weights moves them by {rounding:.1%} of what the adapters add")
            save_model(stage.model, stage.format, context, module.model, processor, total, seed, aspect)
    ranks.barrier()


def save_model(
    which: str, form: PromptFormat, context: Context, model: PreTrainedModel, processor: Processor, total: int,
    seed: int, aspect: dict[str, str],
) -> None:  # fmt: skip
    """Write a trained draft, target or captioner with its processor and manifest into the stage's folder."""
    draft = context.drafter if which == "drafter" else None
    manifest = {
        **({} if draft is None else {"drafter": draft.model_dump(mode="json")}),
        "model": which,
        "target": shipped_name(context.target.path or "inline"),
        "target_revision": context.target.revision,
        "tokenizer_hash": processor.tokenizer_hash,
        # Its own image processor' projected features stand at visual tokens, and every token has one position.
        "reads": {"visual_embedding": "projected", "positions": "flat"},
        "tested_with": tested_with(),
        "format": form.model_dump(),
        **aspect,
        "training": {"stage": context.name, "steps": total, "seed": seed, "fingerprint": context.fingerprint},
        "command": context.command,
    }
    save_lvlm(model, context.folder, manifest)
    family: Any = model.config.model_type
    if family_of(model.config).shares_pictures:
        selects = model.config.vision_feature_select_strategy
        processor = replace(processor.of_family(PICTURE_FAMILIES[family]), selects=selects)
    template = None if language_section(context.target).halves is None else TEMPLATES.get(form.template)
    if which == "target" and template is not None and template.head:
        # The language model's own may write a system sentence that was not trained with, and no pictures.
        system = template.system if form.system is None else form.system
        processor.tokenizer.chat_template = template.jinja(system, IMAGE_MARK, "")
    processor.save(context.folder)
