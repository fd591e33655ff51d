"""LLaVA-like models on conversations: a draft LVLM, a tiny target, or a captioner. One path for all three."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch

from ...core import ranks
from ...core.errors import UserError
from ...data.collate import ConversationCollate
from ...data.dataset import ConversationDataset
from ...data.families.processor import Processor
from ...data.families.table import PICTURE_FAMILIES
from ...data.loader import Samples
from ...data.order import BucketedOrder
from ...data.records.skipped import Listed
from ...data.sources import AnsweredSamples
from ...data.states.samples import StatesSamples
from ...models.drafters.lvlm import LvlmConfig, build_drafter, load_drafter, save_lvlm
from ...models.drafters.manifest import tested_with
from ...models.folders import shipped_name
from ...models.hub import read_config
from ...models.parts import language_model_of
from ...models.targets.load import build_target, target_config, target_weights
from ...models.targets.table import family_of, language_section
from ...models.training import ModelTraining, merge_adapters
from ..run import stage_records as records
from ..run.context import Context
from ..serve.states_builder import count_samples
from .distill import frozen_target, other_pictures, training_data, training_module
from .engine import Engine
from .fit import held_out_loader, training_loader
from .loop import Training, Validate
from .preflight import before_training, preflight
from .settings import RecordsSettings, row_tokens
from .validate import RecordsValidation, validate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_records(stage: RecordsSettings, context: Context, seed: int) -> Training:
    """A draft LVLM, a tiny target or a captioner on conversations: next tokens, or distillation."""
    processor = context.processor_of(stage.model)
    dataset = records.open_records(stage.data, stage.format, context, processor, learned=stage.learns_answers)
    model = _start_weights(stage, context, processor, seed)
    positions = _set_positions(model, stage)
    check_positions(positions, stage)
    module = training_module(stage, context, model, processor)
    data = training_data(stage, context, dataset, processor, seed)
    total = stage.num_steps(len(dataset))
    if ranks.is_main():
        before_training(dataset, positions, context.say, prompts=stage.answers is not None)
    preflight(data.shown, module, processor, folder=context.folder, say=context.say)
    make_loader = functools.partial(
        training_loader, stage, data.samples, data.collate, seed=seed, total=total,
        **_batches(stage, context, dataset, data.samples, seed),
    )  # fmt: skip
    validation = stage.validation

    def finish(engine: Engine) -> None:
        _save(stage, context, engine, processor, total, seed)
        if ranks.is_main() and (listed := dataset.log.listed()) != Listed():
            context.say(f"{listed}: {dataset.log.path}")

    return Training(
        module,
        make_loader,
        total,
        finish,
        source=module.states,
        validate=_validation(validation, stage, context, processor, module) if validation else None,
        validate_every=stage.checked_every,
        write=data.writer,
    )


def _batches(
    stage: RecordsSettings, context: Context, dataset: ConversationDataset, samples: Samples, seed: int
) -> dict[str, Any]:
    """How the loader orders samples and shares them out: by words, as LLaVA does, or by tokens, which are counted."""
    if stage.window is None and stage.packing is None:
        return {"grouped": stage.group_by_modality}
    answered = samples if isinstance(samples, AnsweredSamples) else None
    lengths = count_samples(StatesSamples(dataset, answered), context).signed
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


def _set_positions(model: PreTrainedModel, stage: RecordsSettings) -> int:
    """The language model's positions in this stage."""
    text = model.config.get_text_config()
    if stage.positions is not None:
        text.max_position_embeddings = stage.positions
        decoder = language_model_of(model)
        assert decoder.config is text, "one config, so that what is saved is what was trained"
    return text.max_position_embeddings


def check_positions(positions: int, stage: RecordsSettings) -> None:
    """Samples longer than the language model has positions would be learned wrong, silently."""
    if stage.data.max_length > positions:
        raise UserError(
            f"data.max_length is {stage.data.max_length} and the language model has {positions} positions "
            "(max_position_embeddings)",
            hint=f"set data.max_length to {positions} or less, or give the model more: drafter.rope_scaling, or the "
            "stage's positions",
        )


def _start_weights(stage: RecordsSettings, context: Context, processor: Processor, seed: int) -> PreTrainedModel:
    """The model as this stage finds it: an earlier stage's result, or assembled from the recipe."""
    trained = context.inputs.get(stage.model)
    if trained is not None:
        # Under ZeRO 3 a GPU need not hold the whole model: DeepSpeed shares it out from the host.
        place: dict[str, Any] = {"device": None if context.engine.zero_stage == 3 else context.device()}
        if stage.model != "target":
            return load_drafter(trained, tokenizer_hash=processor.tokenizer_hash, dtype=torch.float32, **place)
        return target_weights(language_section(context.target), trained, dtype=torch.float32, **place)
    if stage.model == "target":
        return build_target(language_section(context.target), context.token_ids(processor, processor.num_token_ids))
    drafter = cast(LvlmConfig, context.drafter)
    if drafter.vision_tower == "target":
        target: Any = target_weights(language_section(context.target), context.target_source(), dtype=torch.float32)
    elif (folder := context.inputs.get("target")) is not None:
        target = read_config(str(folder), key="target")
    else:
        target = target_config(language_section(context.target), None, network=True)
    ids = context.token_ids(processor, getattr(target, "config", target).text_config.vocab_size)
    return build_drafter(drafter, target, ids, seed=seed)


def _save(
    stage: RecordsSettings, context: Context, engine: Engine, processor: Processor, total: int, seed: int
) -> None:
    """The result: a directory that transformers loads, written by rank 0."""
    draft = context.drafter if stage.model == "drafter" else None
    manifest = {
        **({} if draft is None else {"drafter": draft.model_dump(mode="json")}),
        "model": stage.model,
        "target": shipped_name(context.target.path or "inline"),
        "target_revision": context.target.revision,
        "tokenizer_hash": processor.tokenizer_hash,
        # Its own image processor' projected features stand at visual tokens, and every token has one position.
        "reads": {"visual_embedding": "projected", "positions": "flat"},
        "tested_with": tested_with(),
        "format": stage.format.model_dump(),
        "training": {"stage": context.name, "steps": total, "seed": seed, "fingerprint": context.fingerprint},
        "command": context.command,
    }
    with engine.full_weights():
        if ranks.is_main():
            module = engine.module
            assert isinstance(module, ModelTraining)
            merge_adapters(module.model)
            save_lvlm(module.model, context.folder, manifest)
            family: Any = module.model.config.model_type
            if family_of(module.model.config).shares_pictures:
                processor = processor.of_family(PICTURE_FAMILIES[family])
            processor.save(context.folder)
    ranks.barrier()
