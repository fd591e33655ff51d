"""Drafters that learn a language model's hidden states: heads (Sparrow, MSD, ViSpec, HiViS, EAGLE, EAGLE-3, Medusa).

A hard switch from text to pictures (Sparrow, ViSpec) is two stages, each from the one before; MSD's rising share of
pictures is `visual_share: linear` over data that has both kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...core import ranks
from ...core.errors import UserError
from ...core.results import STATES
from ...data.conversations import end_ids
from ...data.families.processor import Processor
from ...data.loader import Collate, Loader, Samples, StepBatches, steps_per_epoch
from ...data.order import WINDOW, BucketedOrder, Order, RisingVisualOrder
from ...data.served_prompt import other_aspect
from ...data.states.reader import StatesReader
from ...data.states.samples import SeededCollate, split
from ...models.drafters.base import TargetIdentity
from ...models.drafters.manifest import read_manifest
from ...models.drafters.outside import find_start, is_own
from ...models.targets.language import LanguageTarget
from ..run.context import Context
from ..run.stage_records import check_fit, open_records
from ..serve.states_builder import (
    Builder,
    StatesStore,
    count_samples,
    identity_of,
    open_samples,
    open_target,
    wanted_taps,
)
from .drafter import Requests, TrainedDrafter
from .fit import SCRATCH, held_out_loader, training_loader
from .loop import Training
from .settings import StatesSettings, row_tokens
from .states_source import Cached, CachedStates, FirstEpoch, FirstEpochStates, Online, OnlineStates, States

_NEVER_WRITTEN = (
    "the target writes none of the draft's own ids there (drafter.draft_vocab_size: {}): make it larger, or train on "
    "the target's own answers (stage kind regenerate)"
)


def open_heads(stage: StatesSettings, context: Context, seed: int) -> Training:
    """A head beside its target, with the stage's source of states."""
    processor = context.processor()
    target = open_target(context, processor, tables_only=stage.reads_tables)
    states = open_states(stage, context, processor, target, seed)
    config, supervised = context.drafter, states.supervised
    assert config is not None
    least = config.least_supervised
    train, held_out = (part[supervised[part] >= least] for part in split(states.draws, stage.held_out))
    num_short = int(((supervised > 0) & (supervised < least)).sum())
    why = f"{config.kind} learns from an answer's second token on"
    short_note = f"{num_short:,} samples of one token are left out: {why}" if num_short else ""
    if not len(train) or (stage.validation is not None and not len(held_out)):
        where = "; ".join(filter(None, (short_note, states.left_out()))) or None
        raise UserError("no sample to train on, or none held out", where=where, hint="check the data and held_out")
    max_tokens = row_tokens(stage, context.name, states.lengths[train])
    order = training_order(stage, states.lengths[train], seed)
    total = stage.steps or steps_per_epoch(len(order), stage.batch_size) * (stage.epochs or 0)
    shown = f"{len(train):,} samples, {len(held_out):,} held out; {total:,} steps of {stage.batch_size}"
    context.say("; ".join(filter(None, (shown, short_note))))
    # Of pictures, which a server has to be started with.
    limits = stage.data and stage.data.model_dump(include={"min_pixels", "max_pixels"}, exclude_none=True)
    drafter = TrainedDrafter(
        stage, context, target, TargetIdentity(context.target.model_dump(mode="json"), processor.tokenizer_hash),
        manifest_fields={"format": stage.format.model_dump(mode="json")}
        | ({"pixels": limits} if limits else {}) | other_aspect(stage.data, processor, states.lengths[train])
        | _text_only(stage, context, states, train),
        requests=_requests(stage, context, processor),
        count_tokens=functools.partial(_count_tokens, states, train, len(target.embedding)), objective=stage.objective,
    )  # fmt: skip

    def make_loader(samples: Samples, collate: Collate, first: int, last: int) -> Loader:
        return training_loader(
            stage, samples, collate, first, seed=seed, total=last, order=order, max_tokens=max_tokens
        )

    return Training(
        drafter.module,
        lambda first: states.steps(train, make_loader, first, total, trains=True),
        total,
        lambda engine: drafter.finish(engine, total, seed),
        source=states,
        validate=drafter.validation(_held_out(stage, states, held_out), states.held_out, total),
        validate_every=stage.checked_every,
        left_out=states.left_out,
        why_untaught=_NEVER_WRITTEN.format(size) if (size := dict(config).get("draft_vocab_size")) else "",
    )


def _text_only(stage: StatesSettings, context: Context, states: States, train: np.ndarray) -> dict[str, bool]:
    """What the manifest says of weights that have read no sample with pictures, here or in a stage before."""
    assert context.drafter is not None
    folder = context.inputs.get("drafter")
    if stage.outside is not None:
        folder = find_start(stage.outside.path, stage.outside.revision)
    if folder is None:
        started_so = stage.from_stage == SCRATCH or not context.drafter.provides()
    else:  # of heads in other layouts nobody knows what they have read
        started_so = is_own(folder) and bool(read_manifest(folder).get("text_only"))
    return {"text_only": True} if started_so and not (states.lengths[train] > 0).any() else {}


def open_states(
    stage: StatesSettings, context: Context, processor: Processor, target: LanguageTarget, seed: int
) -> States:
    """The stage's source, whose states are checked to be this target's."""
    taps, source = wanted_taps([context.drafter], target.shape), stage.source
    if isinstance(source, CachedStates):
        expected = identity_of(context, processor, stage.format, None, taps, None)
        folders = [context.inputs["states" if n is None else f"states/{n}"] / STATES for n in source.stages]
        reader = StatesReader([*folders, *source.folders], expected=expected, accept=source.accept)
        return Cached(reader, seed)
    assert stage.data is not None
    samples = open_samples(stage.data, stage.format, stage.answers, context, processor)
    check_fit(context, samples.dataset, target.decoder, as_cut=True)
    builder = Builder(
        samples, count_samples(samples, context), target, taps,
        source.states if isinstance(source, FirstEpochStates) else StatesStore(),
        context.folder / STATES, SeededCollate(processor.pad_id, processor.image_size, seed), stage.micro,
    )  # fmt: skip
    if isinstance(source, OnlineStates):
        served = source.engine.open_states(context, samples, target, taps, key="source.engine")
        return Online(replace(builder, served=served))
    measured = ranks.broadcast(builder.measure() if ranks.is_main() else None)
    known = identity_of(context, processor, stage.format, stage.data, taps, source.states.dtype)
    return FirstEpoch(builder, known, measured, context.say)


def training_order(stage: StatesSettings, lengths: np.ndarray, seed: int) -> Order:
    """Which samples each epoch has, and when."""
    if stage.visual_share is None:
        return BucketedOrder(lengths, seed, stage.batch_size, stage.window or WINDOW)
    if not (lengths > 0).any() or not (lengths <= 0).any():
        raise UserError(
            "visual_share: linear needs samples with pictures and samples without",
            hint="give data of both kinds, or caches of both in source.from",
        )
    assert stage.epochs is not None
    return RisingVisualOrder(
        lengths, seed, stage.batch_size, stage.num_text_epochs, stage.epochs, stage.window or WINDOW
    )


def _held_out(
    stage: StatesSettings, states: States, held_out: np.ndarray
) -> Callable[[], Iterable[StepBatches]] | None:
    settings = stage.validation
    if settings is None:
        return None
    held_out, rows = held_out[: settings.max_samples], settings.rows(16)
    batch_size = rows * ranks.world_size()
    order = BucketedOrder(states.lengths[held_out], 0, batch_size, stage.window or WINDOW)

    def make_loader(samples: Samples, collate: Collate, first: int, last: int) -> Loader:
        return held_out_loader(samples, collate, rows, order)

    last = steps_per_epoch(len(held_out), batch_size)
    return functools.partial(states.steps, held_out, make_loader, 0, last, trains=False)


def _requests(stage: StatesSettings, context: Context, processor: Processor) -> Requests | None:
    check = stage.decoding
    if check is None:
        return None
    dataset = open_records(check.data, stage.format, context, processor, log="skipped-decoding", learned=False)
    if not len(dataset):
        raise UserError("no request to decode", key=f"stages.{context.name}.decoding.data", hint="check the data")
    return Requests(
        len(dataset), lambda number: dataset.request(number)[0], check.max_new_tokens or 64,
        end_ids(processor, stage.format), check.temperatures or [0.0],
    )  # fmt: skip


def _count_tokens(states: States, train: np.ndarray, vocab_size: int) -> Tensor:
    """[V] how often each id is supervised, over all ranks."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in train[ranks.rank() :: ranks.world_size()].tolist():
        ids = states.supervised_ids(index)
        if len(ids) and int(ids.max()) >= vocab_size:
            raise UserError(f"sample {index} supervises id {int(ids.max())}, and the target has {vocab_size} ids",
                            hint="its states are damaged, or of another target: make them again")  # fmt: skip
        counts += torch.bincount(ids, minlength=vocab_size)
    return sum(ranks.gather(counts), torch.zeros_like(counts))
