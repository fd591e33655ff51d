"""Stage kind `train` of the visual track: a head, or the models of the embedded world that it drafts for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import AutoTokenizer, T5EncoderModel

from ....core import ranks
from ....core.errors import UserError
from ....core.section import Section
from ....data.codes import CodeCollate, PictureCollate, ShardData, ShardSample, ShardSamples
from ....data.loader import Collate
from ....data.shapes.captioned import COLORS, SHAPES, figures_of, places_of
from ....models.generators import TEXT_ENCODER, build_text_encoder, build_transformer, sample_condition
from ....models.llamagen.captions import caption_ids
from ....models.llamagen.files import load_llamagen, load_vq, save_llamagen, save_vq
from ....models.llamagen.training import LlamaGenTraining, VqTraining
from ....models.llamagen.vq import VqTokenizer
from ....models.shapes_reader import ShapesReader
from ...context import Context
from ...describe.train import describe_image_model
from ...engine import Engine, init_distributed
from ...fit import FitSettings, Validate, fit, seed_all, training_loader
from ..base import Planned
from ..encode import SHARDS
from ..generate import TOKENIZER
from .heads import DecodingCheck, Heads

Model = Literal["vq", "reader", "target", "drafter"]


class ValidationSettings(Section):
    """Scoring of held-out samples (`data.held_out`)."""

    # Optimizer steps between two of them; the last step always has one.
    every: int = Field(ge=1)
    # Rows of one forward on one rank.
    micro_batch_size: int = Field(16, ge=1)
    max_samples: int | None = Field(None, ge=1)


class VisualTrainStage(FitSettings):
    kind: Literal["train"]
    # Whose weights are trained: the head (drafter), or a world's image tokenizer, reader or target.
    model: Model = "drafter"
    data: ShardData = ShardData()
    # Share of samples that lose their condition, drawn anew in each epoch; guidance needs both sides.
    condition_dropout: float = Field(0.1, ge=0, lt=1)
    validation: ValidationSettings | None = None
    # A small decoding run with the head as it is (drafter only).
    decoding: DecodingCheck | None = None
    # vq: forwards between two revivals of codes that no picture chooses, in the first 60% of the training; small
    # tokenizers keep a handful of codes otherwise. Writes weights in place: zero_stage 0 and fp32 only.
    revive_every: int | None = Field(None, ge=1)
    # Which weights become the stage's result: the last, or those with the best held-out top-3 accuracy (the papers'
    # choice) or the best measured tau. Each best one is kept beside it as well.
    select: Literal["last", "top3", "tau"] = "last"

    @model_validator(mode="after")
    def _measured(self) -> VisualTrainStage:
        if self.select == "top3" and self.validation is None:
            raise ValueError("select: top3 needs validation")
        if self.select == "tau" and self.decoding is None:
            raise ValueError("select: tau needs decoding")
        if self.validation is not None and not self.data.held_out:
            raise ValueError("validation needs data.held_out")
        if self.model != "drafter" and (self.decoding or self.validation or self.select != "last"):
            raise ValueError("validation, decoding and select are for heads (model: drafter)")
        if self.revive_every and self.model != "vq":
            raise ValueError("revive_every is for image tokenizers (model: vq)")
        if self.decoding and self.validation and self.decoding.every % self.validation.every:
            raise ValueError("decoding.every must be a multiple of validation.every")
        return self

    def makes(self) -> set[str]:
        return {"target", "text"} if self.model == "target" else {self.model}

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {} if self.data.path else {"codes": self.data.from_stage}
        if self.model == "drafter":
            wanted["target"] = None
        if self.model == "target":
            wanted["tokenizer"] = None
        if self.decoding is not None:
            wanted |= {"vq": None, "text": None}
            if self.decoding.prompts.from_stage is not None:
                wanted["data"] = self.decoding.prompts.from_stage
        if self.from_stage not in (None, "scratch"):
            wanted["target" if self.model == "target" else self.model] = self.from_stage
        return wanted

    def run(self, context: Context) -> None:
        run(self, context)

    def describe(self, plan: Planned) -> list[str]:
        return describe_image_model(plan)


def run(stage: VisualTrainStage, context: Context) -> None:
    if stage.model in ("vq", "target") and context.target.kind != "llamagen":
        raise UserError(f"model: {stage.model} for {context.target.kind}, which is published and not trained here",
                        where=f"stages.{context.name}.model", cure="train its head: model: drafter")  # fmt: skip
    init_distributed()
    seed = context.seed if stage.seed is None else stage.seed
    seed_all(seed)
    samples = ShardSamples(shards_of(stage.data, context), stage.data)
    if not len(samples):
        raise UserError("no sample to train on", where=str(samples.reader.folder), cure="check data and held_out")
    _check_tensors(stage, context, samples[0])
    total = stage.num_steps(len(samples))
    heads = Heads(stage, context) if stage.model == "drafter" else None
    module = heads.module if heads else _module(stage, context, seed, total)
    collate = _collate(stage, context, samples, seed, heads)
    context.say(f"{len(samples)} samples, {total} steps of {stage.batch_size}")
    make_loader = functools.partial(training_loader, stage, samples, collate, seed=seed, total=total)
    validate = None
    every = None
    if heads and (stage.validation or stage.decoding):
        held_out = ShardSamples(shards_of(stage.data, context), stage.data, held_out=True) if stage.validation else None
        validate = _validation(stage, context, heads, held_out, collate)
        every = (stage.validation or stage.decoding).every  # type: ignore[union-attr]
    engine = fit(stage, context, module, make_loader, total=total, validate=validate, validate_every=every)
    if heads:
        heads.finish(engine, total, seed)
    else:
        _save(stage, context, engine)


def shards_of(data: ShardData, context: Context) -> Path:
    return Path(data.path) if data.path else context.inputs["codes"] / SHARDS


def _check_tensors(stage: VisualTrainStage, context: Context, sample: ShardSample) -> None:
    """What the shards hold is what this model reads."""
    wanted = {"vq": "pixels", "reader": "pixels"}.get(stage.model, "codes")
    # A target whose text encoder is trained along reads captions instead.
    reads = stage.model == "drafter" or (stage.model == "target" and not isinstance(context.target.text_encoder, dict))
    needs_features = reads and getattr(context.target, "condition", None) == "text"
    for name in [wanted] + (["features"] if needs_features else []):
        if name not in sample.tensors:
            raise UserError(
                f"the shards hold {', '.join(sample.tensors)} and no {name}", where=str(stage.data),
                cure=f"add {name} to `write` of the encode stage",
            )  # fmt: skip
    if wanted == "codes" and len(sample.tensors["codes"]) != context.target.num_codes:
        raise UserError(
            f"images of {len(sample.tensors['codes'])} codes, the target's have {context.target.num_codes}",
            where=str(stage.data), cure="encode at the target's image_size",
        )  # fmt: skip


def _module(stage: VisualTrainStage, context: Context, seed: int, total: int) -> nn.Module:
    """The model as this stage finds it, with its training forward."""
    target = context.target
    if stage.model == "vq":
        if isinstance(target.vq, str):
            raise UserError("target.vq is a directory, and a stage trains vq", cure="spell out its shape in target.vq")
        engine = context.engine
        if stage.revive_every and (engine.zero_stage or engine.precision != "fp32"):
            raise UserError(
                "revive_every needs zero_stage 0 and fp32", cure="leave it out, or change the engine section"
            )
        made = context.inputs.get("vq")
        tokenizer = VqTokenizer(target.vq) if made is None else load_vq(made)
        if made is None:
            tokenizer.reset_parameters(torch.Generator().manual_seed(seed))
        forwards = total * -(-stage.batch_size // (stage.micro * ranks.world_size()))  # of each rank
        return VqTraining(tokenizer, revive_every=stage.revive_every, revive_until=int(0.6 * forwards))
    if stage.model == "reader":
        made = context.inputs.get("reader")
        return ShapesReader(len(COLORS), len(SHAPES)) if made is None else ShapesReader.load(made)
    made = context.inputs.get("target")
    transformer = load_llamagen(made) if made is not None else build_transformer(target, seed)
    encoder: Any = None
    if isinstance(target.text_encoder, dict) and made is not None:
        encoder = T5EncoderModel.from_pretrained(made / TEXT_ENCODER, dtype=torch.float32, weights_only=True)
    elif isinstance(target.text_encoder, dict):
        words = AutoTokenizer.from_pretrained(context.inputs["tokenizer"] / TOKENIZER)
        encoder = build_text_encoder(target, vocab_size=len(words), pad_id=words.pad_token_id)
    return LlamaGenTraining(transformer, encoder)


def _collate(
    stage: VisualTrainStage, context: Context, samples: ShardSamples, seed: int, heads: Heads | None
) -> Collate:
    template = samples[0]
    if stage.model in ("vq", "reader"):
        return PictureCollate(template, _places if stage.model == "reader" else _nothing)
    if heads is not None:
        return CodeCollate(heads.condition, template, seed, stage.condition_dropout, len(template.tensors["codes"]) - 1)
    condition = sample_condition(context.target)
    if isinstance(context.target.text_encoder, dict):
        condition = _CaptionIds(context.inputs["tokenizer"] / TOKENIZER, context.target.model_config_of().num_slots)
    return CodeCollate(condition, template, seed, stage.condition_dropout, len(template.tensors["codes"]))


def _places(sample: ShardSample) -> Tensor:
    return torch.tensor(places_of(figures_of(sample.info["caption"]))).flatten()


def _nothing(sample: ShardSample) -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


class _CaptionIds:
    """Ids [t] of a sample's caption, for a text encoder that is trained along."""

    def __init__(self, folder: Path, slots: int):
        self.tokenizer, self.slots = AutoTokenizer.from_pretrained(folder), slots

    def __call__(self, sample: ShardSample) -> Tensor:
        batch = caption_ids(self.tokenizer, [sample.info["caption"]], self.slots)
        return batch["input_ids"][0][batch["attention_mask"][0].bool()]


def _validation(
    stage: VisualTrainStage, context: Context, heads: Heads, held_out: ShardSamples | None, collate: Collate
) -> Validate:
    """Held-out loss and accuracies, and now and then tau in a real decoding loop."""
    settings, decoding = stage.validation, stage.decoding
    if held_out is not None and not len(held_out):
        raise UserError("no held-out sample", where=str(stage.data), cure="raise data.held_out")
    total = stage.num_steps(len(ShardSamples(shards_of(stage.data, context), stage.data)))

    def validate(engine: Engine, step: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if settings is not None and held_out is not None:
            found |= heads.score(engine, held_out, collate, settings.micro_batch_size, settings.max_samples)
        if decoding is not None and (step % decoding.every == 0 or step == total):
            found |= heads.decode(engine, step)
        heads.keep_best(engine, found, step)
        return found

    return validate


def _save(stage: VisualTrainStage, context: Context, engine: Engine) -> None:
    module: Any = engine.module
    with engine.full_weights():
        if ranks.is_main():
            if stage.model == "vq":
                save_vq(module.tokenizer, context.folder)
            elif stage.model == "reader":
                module.save(context.folder)
            else:
                save_llamagen(module.transformer, context.folder)
                if module.text_encoder is not None:
                    module.text_encoder.save_pretrained(context.folder / TEXT_ENCODER)
                    tokenizer = AutoTokenizer.from_pretrained(context.inputs["tokenizer"] / TOKENIZER)
                    tokenizer.save_pretrained(context.folder / TEXT_ENCODER)
    ranks.barrier()
