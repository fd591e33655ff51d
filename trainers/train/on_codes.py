"""Models of image codes: a head of an image generator, or the synthetic dataset's tokenizer, reader and generator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...core import ranks
from ...core.errors import UserError
from ...core.pretrained import reading_pretrained
from ...core.results import CODES, DATASET_FOLDER, TOKENIZER
from ...data.captioned.prompts import read_prompts
from ...data.loader import Collate, Loader
from ...data.shards.codes import CodeCollate, PictureCollate, ShardData, ShardSample, ShardSamples
from ...eval.figures import save_grid
from ...models.drafters.base import TargetIdentity
from ...models.targets.drawing import TEXT_ENCODER
from ...models.targets.guided import GuidedTarget
from ...models.targets.table import ImageTargetConfig, image_section
from ..readers import Reader, captioned, new_reader
from ..run.context import Context
from ..run.stage import Planned
from .drafter import Requests, TrainedDrafter
from .engine import Engine
from .fit import held_out_loader, training_loader
from .loop import Training
from .settings import CodesSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_codes(stage: CodesSettings, context: Context, seed: int) -> Training:
    """A head of an image generator, or a model of the synthetic dataset: image tokenizer, reader, generator."""
    if stage.model in ("vq", "target") and not image_section(context.target).is_trained_here:
        raise UserError(f"model: {stage.model} for {context.target.kind}, which is published and not trained here",
                        key=f"stages.{context.name}.model", hint="train its head: model: drafter")  # fmt: skip
    samples = ShardSamples(shards_of(stage.data, context), stage.data)
    if not len(samples):
        raise UserError("no sample to train on", where=str(samples.reader.folder), hint="check data and held_out")
    _check_tensors(stage, context, samples[0])
    total = stage.num_steps(len(samples))
    context.say(f"{len(samples)} samples, {total} steps of {stage.batch_size}")
    if stage.model == "drafter":
        return _open_head(stage, context, seed, samples, total)
    module, collate = _module(stage, context, seed, total), _collate(stage, context, samples, seed)
    make_loader = functools.partial(training_loader, stage, samples, collate, seed=seed, total=total)
    return Training(module, make_loader, total, lambda engine: _save(stage, context, engine))


def _open_head(stage: CodesSettings, context: Context, seed: int, samples: ShardSamples, total: int) -> Training:
    """A head beside its frozen target, whose states are computed for each batch."""
    target, requests = _target_and_requests(stage, context)
    dropout = 0.1 if stage.condition_dropout is None else stage.condition_dropout
    drafter = TrainedDrafter(
        stage, context, target, TargetIdentity(context.target.model_dump(mode="json")),
        manifest_fields={"condition_dropout": dropout}, requests=requests,
    )  # fmt: skip
    template = samples[0]
    collate = CodeCollate(
        image_section(context.target).sample_condition(), template, seed, dropout, len(template.tensors["codes"]) - 1
    )  # fmt: skip
    taps = drafter.config.taps_for(target.shape, training=True)
    source = functools.partial(target.states, taps=taps)
    held_out = _held_out(stage, context, collate)
    return Training(
        drafter.module,
        functools.partial(training_loader, stage, samples, collate, seed=seed, total=total),
        total,
        lambda engine: drafter.finish(engine, total, seed),
        source=source,
        validate=drafter.validation(None if held_out is None else lambda: held_out, source, total),
        validate_every=stage.checked_every,
    )


def _target_and_requests(stage: CodesSettings, context: Context) -> tuple[GuidedTarget, Requests | None]:
    device, check = context.device(), stage.decoding
    if check is None:
        return image_section(context.target).load(context.inputs, device=device), None
    generator = image_section(context.target).generator(context.inputs, device=device)
    target, source = generator.target, check.prompts
    folder = None if source.from_stage is None else context.inputs["data"] / DATASET_FOLDER
    requests = [generator.request(p.caption, p.label, p.key) for p in read_prompts(source.resolved(folder))]

    def pictures(temperature: float, step: int, tokens: list[list[int]]) -> dict[str, Path]:
        codes = torch.stack([target.codes(row) for row in tokens])
        path = context.folder / "samples" / f"step-{step:06d}-T{temperature:g}.png"
        save_grid(path, generator.pictures(codes))
        return {f"samples_T{temperature:g}": path}

    return target, Requests(
        len(requests),
        requests.__getitem__,
        target.num_codes,
        (),
        check.temperatures or [0.0, 1.0],
        target.grid,
        pictures,
    )


def shards_of(data: ShardData, context: Context) -> Path:
    """The folder of code shards: `path`, or where the stage of `from` left them."""
    return Path(data.path) if data.path else context.inputs["codes"] / CODES


def tensors_read(model: str, target: ImageTargetConfig) -> list[str]:
    """What a model is trained on, of each sample of a shard: pixels, or codes with or without features."""
    if model in ("vq", "reader"):
        return ["pixels"]
    # A target whose text encoder is trained along reads captions instead.
    reads = model == "drafter" or not target.trains_text_encoder
    return ["codes", "features"] if reads and target.condition == "text" else ["codes"]


def lacking(makers: Sequence[Planned], model: str) -> dict[str, str]:
    """Planned stages that write shards without what a model is trained on -> what they lack, after "which"."""
    lacks: dict[str, str] = {}
    for maker in makers:
        written = maker.stage.tensors
        if missing := [name for name in tensors_read(model, image_section(maker.recipe.target)) if name not in written]:
            lacks[maker.name] = f"writes {', '.join(written)} and no {' or '.join(missing)}"
    return lacks


def _check_tensors(stage: CodesSettings, context: Context, sample: ShardSample) -> None:
    target = image_section(context.target)
    wanted = tensors_read(stage.model, target)
    for name in wanted:
        if name not in sample.tensors:
            raise UserError(
                f"the shards hold {', '.join(sample.tensors)} and no {name}", where=str(stage.data),
                hint=f"add {name} to `write` of the encode stage",
            )  # fmt: skip
    if "codes" in wanted and len(sample.tensors["codes"]) != target.num_codes:
        raise UserError(
            f"images of {len(sample.tensors['codes'])} codes, the target's have {target.num_codes}",
            where=str(stage.data), hint="encode at the target's image_size",
        )  # fmt: skip


def _module(stage: CodesSettings, context: Context, seed: int, total: int) -> nn.Module:
    """The model as this stage finds it, with its training forward."""
    folder = context.inputs.get(stage.model)
    if stage.model == "reader":
        return new_reader() if folder is None else Reader.load(folder)
    if stage.revive_every and context.engine.zero_stage:
        raise UserError("revive_every needs zero_stage 0", hint="leave it out, or change the engine section")
    forwards = total * -(-stage.batch_size // (stage.micro * ranks.world_size()))  # of each rank
    words = _words(context) if stage.model == "target" else None
    return image_section(context.target).training(
        stage.model, folder, seed=seed, words=words, perceptual=stage.perceptual, code_dropout=stage.code_dropout,
        revive_every=stage.revive_every, revive_until=int(0.6 * forwards),
    )  # fmt: skip


def _collate(stage: CodesSettings, context: Context, samples: ShardSamples, seed: int) -> Collate:
    template = samples[0]
    if stage.model == "reader":
        return PictureCollate(template, lambda sample: captioned(sample.info["caption"]).flatten())
    if stage.model == "vq":
        return PictureCollate(template, lambda sample: torch.zeros(0, dtype=torch.int64))
    condition = image_section(context.target).sample_condition(_words(context))
    dropout = 0.1 if stage.condition_dropout is None else stage.condition_dropout
    return CodeCollate(condition, template, seed, dropout, len(template.tensors["codes"]))


def _words(context: Context) -> PreTrainedTokenizerBase | None:
    """The tokenizer of captions, for a text encoder that is trained along: the recipe's, or the synthetic dataset's;
    None: there is no such encoder.
    """
    from transformers import AutoTokenizer

    target = image_section(context.target)
    if not target.trains_text_encoder:
        return None
    source = dict(target).get("tokenizer") or context.inputs["tokenizer"] / TOKENIZER
    key, hint = "target.tokenizer", "give a Hub id or a tokenizer's folder"
    with reading_pretrained(source, "cannot load the tokenizer", key=key, hint=hint, weights=False):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token_id is None:
        problem = f"the tokenizer {str(source)!r} has no padding token"
        raise UserError(problem, key=key, hint="set its pad_token and save it again")
    return tokenizer


def _held_out(stage: CodesSettings, context: Context, collate: CodeCollate) -> Loader | None:
    if stage.validation is None:
        return None
    most = stage.validation.max_samples
    held_out = ShardSamples(shards_of(stage.data, context), stage.data, held_out=True, most=most)
    if not len(held_out):
        raise UserError("no held-out sample", where=str(stage.data), hint="raise data.held_out")
    # Every condition is given: dropout is training's.
    return held_out_loader(held_out, replace(collate, dropout=0.0), stage.validation.rows(16))


def _save(stage: CodesSettings, context: Context, engine: Engine) -> None:
    module: Any = engine.module
    with engine.full_weights():
        if ranks.is_main():
            module.save(context.folder)
            if stage.model == "target" and (words := _words(context)) is not None:
                words.save_pretrained(context.folder / TEXT_ENCODER)
    ranks.barrier()
