"""What `check` finds in records: training's own code reads them, and one of each kind goes through the stage's model on
the meta device, where nothing is computed and shapes are compared.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ...core.batch import TEXT, Batch, Request
from ...core.errors import UserError, counted, first_line
from ...core.files import fetch_command
from ...data.collate import Sample, collate
from ...data.dataset import ConversationDataset
from ...data.families.processor import Processor
from ...data.records.mixture import Name
from ...data.records.skipped import Listed
from ...data.served_prompt import other_aspect
from ...data.sources import answered
from ...models.drafters.lvlm import LvlmConfig
from ...models.targets.base import ShapeAlone, Taps
from ...models.targets.load import target_config
from ...models.targets.sizes import empty_model
from ...models.targets.table import family_of, language_section, training_of
from ...trainers.estimate.counted import META, most_bytes
from ...trainers.estimate.models import target_shape
from ...trainers.estimate.train_memory import synthetic_batch
from ...trainers.estimate.train_stage import lvlm_of
from ...trainers.run.context import Context
from ...trainers.run.stage import Planned, WholeRecipe
from ...trainers.train.preflight import render
from ...trainers.train.settings import RecordsSettings, StatesSettings
from .finding import Finding, fault, graded, ok, tried, warning

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]  # files of a target that say how records are encoded
TOLERANCE = 0.05  # of the declared number of records
SHOWN_IDS = 1200  # characters of a rendered sample
_LENGTH = 2048  # ids of the batch that a model without records is run over: a picture of every family fits
_CURE = "use the tokenizer and image processor that belong to these weights, or fix the config's sizes"


@dataclass(frozen=True)
class DataSection:
    """A data section inside a stage: conversations, captioned pictures, prompts of pictures, or benchmark sets."""

    key: str
    section: Any
    form: Any = None  # the prompt format around it
    maker: str | None = None  # the stage that writes what it names
    learned: bool = False  # each record has to bring an answer
    is_suite: bool = False  # a directory of benchmark sets, or the published ones
    published: str | None = None  # the set of conversations whose own files stand in the place of a directory


def records_findings(
    subject: str, data: DataSection, files: list[Name], plan: Planned, context: Context, finished: set[str], count: int
) -> list[Finding]:
    """How many records can be used, what they become, and whether the stage's model takes one of each kind.

    Args:
        finished: things whose stage has finished.
        count: records that are read, spread over all; those of each kind come in addition.

    Raises:
        UserError: the processor's files are here and cannot be used, or the records stop at one (`on_error: strict`).
    """
    if "processor" in context.inputs and "processor" not in finished:
        return [ok(subject, "on disk, not read: the stage that makes the processor has not run")]
    if why := without_processor(context):
        return [ok(subject, f"on disk, not read: {why}")]
    processor = context.processor_of(dict(plan.stage).get("model", "drafter"))
    read, ids, supervised, largest, kinds = 0, 0, 0, -1, dict[int, Sample]()
    with tempfile.TemporaryDirectory() as cache:
        dataset = ConversationDataset(
            data.section, data.form, processor, files=files, skipped_log=Path(cache) / "skipped.jsonl",
            cache=Path(cache), learned=data.learned,
        )  # fmt: skip
        usable, kept = len(dataset), 0
        # Text alone, a picture, several, and the same with clips.
        kind_of = np.minimum(dataset.column("images"), 2) + 3 * (dataset.column("clips") > 0)
        firsts = np.unique(kind_of, return_index=True)[1].tolist()
        for index in sorted({*firsts, *range(0, usable, max(1, -(-usable // count)))}):
            sample = dataset[index] if data.learned else _prompt(dataset, index, data)
            read += 1
            if sample is None or (data.learned and not any(sample.loss_mask)):
                continue
            kept, ids, supervised = kept + 1, ids + len(sample.ids), supervised + sum(sample.loss_mask)
            largest = max(largest, *sample.ids)
            kinds.setdefault(int(kind_of[index]), sample)
        listed, unusable = dataset.log.listed(), sum(1 for _ in dataset.selection.problems())
    share = kept / max(1, read) * usable / (usable + unusable)
    about = f"{counted(usable, 'usable record')}, {read} read, usable share {share:.0%}"
    if end := data.section.question_end:
        about += f"; each question ends with {end!r} (question_end, which null takes away)"
    if not kept:
        use = "learned from" if data.learned else "asked"
        return [fault(subject, f"{about}: none can be {use}: {listed.why}", "fix the records")]
    shown = render(next(iter(kinds.values())), processor)
    shown = shown if len(shown) <= SHOWN_IDS else shown[:SHOWN_IDS] + " ..."
    part = f"{supervised / kept:,.0f} of them supervised\n  [[ ]]" if data.learned else "up to the answer\n  prompt"
    about += f": {ids / kept:,.0f} ids each, {part}: {shown}"
    if listed != Listed():
        about = f"{listed}; {about}"
    findings = [graded(listed == Listed(), subject, about, "fix them, or set on_error: strict to stop at the first")]
    served = data.key == "data" and plan.stage.trains and dict(plan.stage).get("model") == "drafter"
    if served and data.form.template != "plain" and (other := other_aspect(data.section, processor, kind_of)):
        what = f"pictures are cut with aspect: {other['aspect']}, and on a server as the processor says"
        findings.append(warning(subject, what, "aspect: square, for a drafter that is served"))
    if not plan.recipe.target.draws_images:
        look = functools.partial(_stage_forward, data, plan, processor, list(kinds.values()), largest)
        findings.append(tried(f"forward of {subject}", look, _CURE))
    expected = dict(plan.stage).get("expected") if data.key == "data" else None
    if expected is not None and abs(usable - expected.samples) > TOLERANCE * expected.samples:
        key = subject.removesuffix("data") + "expected.samples"
        problem = f"the recipe declares {expected.samples:,} records, and the data has {usable:,}"
        findings.append(warning(key, problem, f"look whether its files are whole; for other data set {key}={usable}"))
    return findings


def without_processor(context: Context) -> str:
    """Why the files of the target's processor are not here, where no stage writes them; or nothing."""
    target = context.target
    places = () if "processor" in context.inputs else (target.path, *(target.halves or ()))
    return next(filter(None, (fetched(place, target.revision) for place in places if place)), "")


@functools.lru_cache(8)
def fetched(name: str, revision: str | None) -> str:
    """Fetches a target's small files where they are not on this machine. Returns why they are not, or nothing."""
    if Path(name).is_dir():
        return ""
    if (command := fetch_command(name)) is not None:
        return f"the tokenizer and configs of {name} are not here: {command}"
    try:
        snapshot_download(name, revision=revision, allow_patterns=SMALL)
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        fetch = f"hf download {name} --include {' '.join(map(repr, SMALL))}"
        return f"the tokenizer and configs of {name} are not here: {fetch} ({first_line(error)})"
    return ""


def _prompt(dataset: ConversationDataset, index: int, data: DataSection) -> Sample | None:
    """A record up to its last answer; None: it cannot be used, and is left out."""
    try:
        request, _ = dataset.request(index)
        if data.key == "data" and len(request.ids) >= dataset.config.max_length:
            raise dataset.too_long(len(request.ids) + 1)
        return answered(request, [], request.name)
    except UserError as error:
        dataset.leave_out(index, error)
        return None


# What runs on the meta device


def model_findings(recipe: WholeRecipe) -> list[Finding]:
    """Whether the target, and a draft LVLM, run over text with pictures: their sizes fit, before there is any data."""
    if recipe.target.draws_images:
        return []
    target, drafter = target_shape(recipe), recipe.drafter
    configs = {"target": target}
    if isinstance(drafter, LvlmConfig):
        configs["drafter"] = drafter.config_beside(target)

    def train(model: Any, batch: Batch) -> object:
        return training_of(model, (), gradient_checkpointing=False).hidden_states(batch)

    def look(config: PreTrainedConfig) -> str:
        return _forward(config, train, [synthetic_batch(config, 1, _LENGTH)], 0)

    return [tried(f"forward of {key}", functools.partial(look, config), _CURE) for key, config in configs.items()]


def _stage_forward(data: DataSection, plan: Planned, processor: Processor, samples: list[Sample], largest: int) -> str:
    """`_forward` of a stage's own model over one record of each kind."""
    recipe, stage, own = plan.recipe, plan.stage, plan.own_target
    section = language_section(own or recipe.target)

    def target_of(model: Any) -> Any:
        return section.target(model, num_token_ids=model.config.get_text_config().vocab_size, image_token_id=None)

    def train(model: Any, batch: Batch) -> object:
        module = training_of(model, stage.trainable, gradient_checkpointing=False, lora=stage.lora)
        return module.scores(module.hidden_states(batch))

    def read(model: Any, batch: Batch) -> object:
        target = target_of(model)
        head = (stage.drafter or recipe.drafter) if isinstance(stage, StatesSettings) else None
        module = None if head is None else head.empty(target.shape)
        if head is None or module is None:  # a drafter of somebody else's may build none without weights
            return target.states(batch, Taps(feature=True))
        states = target.states(batch, head.taps_for(target.shape, training=True))
        alone: Any = ShapeAlone(target.shape, torch.bfloat16)
        training = head.training_objective(module, alone, stage.objective)
        return training.eval()(batch, replace(states, positions=batch.positions))

    trains = isinstance(stage, RecordsSettings)
    if trains:
        config = lvlm_of(plan)[0]
    else:
        config = target_shape(recipe) if own is None else target_config(section, None, network=False)
        target = target_of(empty_model(config))
        for number, one in enumerate(samples if not data.learned else ()):
            # A target of single tiles takes the further ones of a request away.
            modality = torch.tensor(one.modality, dtype=torch.int8)
            request = Request(torch.tensor(one.ids), modality, one.pixels, one.sample_id, one.pictures)
            samples[number] = answered(target.view(request), [], one.sample_id)
    batches = [collate([one], pad_id=processor.pad_id, image_size=processor.image_size) for one in samples]
    return _forward(config, train if trains else read, batches, largest)


def _forward(
    config: PreTrainedConfig, run: Callable[[Any, Batch], object], batches: Sequence[Batch], largest: int
) -> str:
    """Runs batches through a model without weights. Returns what was compared.

    Args:
        run: model and batch -> what a stage computes of it.
        largest: id of all records that were read.

    Raises:
        UserError: an id has no row, pictures have another number of tokens than places, or the pass fails.
    """
    text = config.get_text_config()
    heads, groups = text.num_attention_heads, text.num_key_value_heads
    if heads % groups:  # kernels without values do not compare them
        raise UserError(f"{heads} attention heads are no multiple of {groups} (num_key_value_heads)", hint=_CURE)
    name, model = "", empty_model(config, torch.bfloat16)
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    rows = min(len(table.get_parameter("weight")) for table in tables if table is not None)
    if largest >= rows:
        raise UserError(f"records have the id {largest:,}, and the model's tables have {rows:,} rows",
                        hint="use the tokenizer of these weights, or give added tokens rows")  # fmt: skip

    def one_batch(batch: Batch) -> object:
        shown = int((batch.on_host("modality") != TEXT).sum())
        pixels: Any = batch.pixels
        given = decoder.num_features(pixels, batch.pictures) if shown else 0
        if given != shown:  # nor these
            raise UserError(
                f"the processor writes {shown} tokens for the pictures of {batch.sample_ids[0] or 'a row'}, and "
                f"the vision tower gives {given}",
                hint="use the processor of this tower: patch_size and crop_size must be the tower's",
            )  # fmt: skip
        return run(model, batch)

    try:
        decoder = family_of(config).decoder(model, num_token_ids=rows)
        for batch in batches:
            name = f" over {batch.sample_ids[0]}" if batch.sample_ids[0] else ""
            most_bytes(functools.partial(one_batch, batch.to(META)))
    except UserError:
        raise
    except Exception as error:  # shapes that do not fit raise anything
        raise UserError(f"the model's pass{name} fails: {type(error).__name__}: {first_line(error)}") from error
    what = counted(len(batches), "kind") + f" of record, ids up to {largest:,}" if largest else "text with pictures"
    return f"{what} through {config.model_type} of {rows:,} ids, without weights"
