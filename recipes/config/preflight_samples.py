"""What `check` finds in records: training's own code reads them, and one of each kind goes through the stage's model on
the meta device, where nothing is computed and shapes are compared.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.batch import TEXT, Batch, Request
from ...core.errors import UserError, counted, first_line
from ...data.collate import Sample, collate
from ...data.dataset import ConversationDataset
from ...data.families.processor import Processor
from ...data.records.mixture import Name
from ...data.records.skipped import Listed
from ...data.sources import answered
from ...models.drafters.lvlm import LvlmConfig
from ...models.drafters.plain_module import ShapeAlone
from ...models.targets.base import Taps
from ...models.targets.generators import language_section
from ...models.targets.load import target_config
from ...models.targets.sizes import empty_model
from ...models.targets.table import family_of, training_of
from ...trainers.estimate.counted import META, most_bytes
from ...trainers.estimate.models import target_shape
from ...trainers.estimate.train_memory import synthetic_batch
from ...trainers.estimate.train_stage import model_of
from ...trainers.run.stage import Planned, WholeRecipe
from ...trainers.train.preflight import render
from ...trainers.train.settings import RecordsSettings, StatesSettings
from .finding import Finding, fault, ok, tried, warning

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHOWN_IDS = 1200  # characters of a rendered sample
_LENGTH = 2048  # ids of the batch that a model without records is run over: a picture of every family fits
_CURE = "use the tokenizer and image processor that belong to these weights, or fix the config's sizes"


@dataclass(frozen=True)
class DataSection:
    """A data section inside a stage: records of conversations, or what the classes of `preflight_data.py` have."""

    key: str
    section: Any
    form: Any = None  # the prompt format around it, or None
    maker: str | None = None  # the stage that writes what it names
    learned: bool = False  # each record has to bring an answer


def sample_findings(
    subject: str, data: DataSection, files: list[Name], plan: Planned, processor: Processor, count: int
) -> tuple[int, list[Finding]]:
    """How many records can be used, what they become, and whether the stage's model takes one of each kind.

    Args:
        count: records that are read, spread over all; those of each kind come in addition.
    """
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
    why = reasons(listed)
    if not kept:
        use = "learned from" if data.learned else "asked"
        return usable, [fault(subject, f"{about}: none can be {use}: {why}", "fix the records")]
    shown = render(next(iter(kinds.values())), processor)
    shown = shown if len(shown) <= SHOWN_IDS else shown[:SHOWN_IDS] + " ..."
    part = f"{supervised / kept:,.0f} of them supervised\n  [[ ]]" if data.learned else "up to the answer\n  prompt"
    about += f": {ids / kept:,.0f} ids each, {part}: {shown}"
    finding = ok(subject, about)
    if listed != Listed():
        finding = warning(subject, f"{listed} ({why or 'see ids and over_length'}); {about}",
                          "fix them, or set on_error: strict to stop at the first")  # fmt: skip
    forward = _forward_of(plan, data)
    if forward is None:
        return usable, [finding]
    samples = list(kinds.values()) if forward.viewed is None else [forward.viewed(sample) for sample in kinds.values()]
    batches = [collate([sample], pad_id=processor.pad_id, image_size=processor.image_size) for sample in samples]
    passed = tried(f"forward of {subject}", lambda: forward(batches, largest), _CURE)
    return usable, [finding, passed]


def reasons(listed: Listed) -> str:
    """Why records were left out, each reason once: those that differ in their numbers alone count together."""
    sums: Counter[str] = Counter()
    first: dict[str, str] = {}
    for reason, number in listed.reasons.items():
        kind = re.sub(r"\d[\d,.]*", "#", reason)
        sums[kind] += number
        first.setdefault(kind, reason)
    return "; ".join(f"{number} times {first[kind]}" for kind, number in sums.most_common())


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
        return _Forward(config, train)([synthetic_batch(config, 1, _LENGTH)], 0)

    return [tried(f"forward of {key}", partial(look, config), _CURE) for key, config in configs.items()]


def _forward_of(plan: Planned, data: DataSection) -> _Forward | None:
    """The forward of a stage over the records of one of its sections; None: no language model reads them."""
    recipe, stage = plan.recipe, plan.stage
    if recipe.target.draws_images:
        return None
    if isinstance(stage, RecordsSettings):
        config = model_of(plan)

        def train(model: Any, batch: Batch) -> object:
            module = training_of(model, stage.trainable, gradient_checkpointing=False, lora=stage.lora)
            return module.scores(module.hidden_states(batch))

        return _Forward(config, train)
    own = plan.own_target
    section = language_section(own or recipe.target)
    config = target_shape(recipe) if own is None else target_config(section, None, network=False)

    def target_of(model: Any) -> Any:
        return section.target(model, num_token_ids=config.get_text_config().vocab_size, image_token_id=None)

    def viewed(sample: Sample) -> Sample:  # a target of single tiles takes the further ones of a request away
        modality = torch.tensor(sample.modality, dtype=torch.int8)
        request = Request(torch.tensor(sample.ids), modality, sample.pixels, sample.sample_id, sample.pictures)
        return answered(target_of(empty_model(config)).view(request), [], sample.sample_id)

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

    return _Forward(config, read, None if data.learned else viewed)


class _Forward:
    """Runs batches through a model of `config` without weights.

    Args:
        run: model and batch -> what the stage computes of it.
        viewed: request -> the same as the target reads it; None: samples are read as the data cuts them.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        run: Callable[[Any, Batch], object],
        viewed: Callable[[Sample], Sample] | None = None,
    ):
        self.config, self.run, self.viewed = config, run, viewed

    def __call__(self, batches: Sequence[Batch], largest: int) -> str:
        """Returns what was compared.

        Args:
            largest: id of all records that were read.

        Raises:
            UserError: an id has no row, pictures have another number of tokens than places, or the pass fails.
        """
        text = self.config.get_text_config()
        heads, groups = text.num_attention_heads, text.num_key_value_heads
        if heads % groups:  # kernels without values do not compare them
            raise UserError(f"{heads} attention heads are no multiple of {groups} (num_key_value_heads)", hint=_CURE)
        name, model = "", empty_model(self.config, torch.bfloat16)
        tables = model.get_input_embeddings(), model.get_output_embeddings()
        rows = min(len(table.get_parameter("weight")) for table in tables if table is not None)
        if largest >= rows:
            raise UserError(f"records have the id {largest:,}, and the model's tables have {rows:,} rows",
                            hint="use the tokenizer of these weights, or give added tokens rows")  # fmt: skip
        try:
            decoder = family_of(self.config).decoder(model, num_token_ids=rows)
            for batch in batches:
                name = f" over {batch.sample_ids[0]}" if batch.sample_ids[0] else ""
                most_bytes(partial(self._pass, model, decoder, batch.to(META)))
        except UserError:
            raise
        except Exception as error:  # shapes that do not fit raise anything
            raise UserError(f"the model's pass{name} fails: {type(error).__name__}: {first_line(error)}") from error
        what = counted(len(batches), "kind") + f" of record, ids up to {largest:,}" if largest else "text with pictures"
        return f"{what} through {self.config.model_type} of {rows:,} ids, without weights"

    def _pass(self, model: Any, decoder: Any, batch: Batch) -> object:
        shown = int((batch.on_host("modality") != TEXT).sum())
        if shown:
            assert batch.pixels is not None
            given = decoder.num_features(batch.pixels, batch.pictures)
            if given != shown:
                raise UserError(
                    f"the processor writes {shown} tokens for the pictures of {batch.sample_ids[0] or 'a row'}, and "
                    f"the vision tower gives {given}",
                    hint="use the processor of this tower: patch_size and crop_size must be the tower's",
                )  # fmt: skip
        return self.run(model, batch)
