"""Looked at before step 0: samples that are too long, one rendered sample with what is supervised, and the checks that
fail silently later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ...core import ranks
from ...core.batch import IMAGE, TEXT, VIDEO
from ...core.errors import UserError
from ...data.collate import Sample, collate
from ...data.dataset import ConversationDataset
from ...data.families.processor import Processor
from ...data.lengths import count_long
from ...data.loader import Subset
from ...models.targets.table import family_of
from ...models.training import ModelTraining

_LOOKED_AT = 64  # samples that token counts are estimated from
MORE_POSITIONS = "give the draft more positions (drafter.rope_scaling, trained on samples as long)"

Say = Callable[[str], None]


def before_training(dataset: ConversationDataset, positions: int, say: Say, *, prompts: bool = False) -> None:
    """Print which files a data section reads, and how many samples are too long.

    Args:
        positions: of the language model.
        prompts: the samples' answers are written by a model, so that their prompts alone are counted.

    Raises:
        UserError: there are such samples, and the data section wants none.
    """
    if summary := dataset.selection.summary():
        say(summary)
    config = dataset.config
    too_long = count_long(dataset, config.max_length, prompts=prompts)
    if too_long.first is None:
        looked = "" if too_long.is_exact else " that was looked at"
        say(f"no sample{looked} is longer than max_length {too_long.limit:,}")
        return
    if not prompts:
        _ = dataset[too_long.first]  # stops where the section says so
    drops = config.over_length == "drop_images"
    done = "their pictures are taken away and their text is kept" if drops else "they are left out"
    hint = f"raise max_length (up to {positions:,} positions)" if config.max_length < positions else MORE_POSITIONS
    say(
        f"longer than max_length {too_long.limit:,}: {too_long}; {done}, skipped.jsonl lists them. "
        f"To keep them whole: {hint}, tile pictures less (aspect) or take fewer frames (video.num_frames)."
    )


def preflight(dataset: Subset, module: ModelTraining, processor: Processor, *, folder: Path, say: Say) -> None:
    """Print a sample and counts (rank 0). Raises `UserError` where the data does not fit the model."""
    # On every rank: a tower's first forward puts transformers' hooks on its layers, and ZeRO-3 compares the order in
    # which ranks run theirs. Hooks that stand before DeepSpeed's on one rank and after them on another stop the run.
    place = next(module.parameters()).device  # a trained one was read straight onto the GPU, a new one is still here
    _check_image_tokens(module, processor, place)
    if not ranks.is_main():
        return
    count = min(_LOOKED_AT, len(dataset))
    samples = [dataset[i * len(dataset) // count] for i in range(count)]
    _check_head(module, samples[0], processor, place)
    counts = (sum(len(s.ids) for s in samples), sum(sum(s.loss_mask) for s in samples),
              sum(len(s.pictures) for s in samples))  # fmt: skip
    tokens, supervised, images = (f"{number * len(dataset) / count:.0f}" for number in counts)
    estimated = "" if count == len(dataset) else f" (estimated from {count} samples)"
    say(f"{len(dataset)} samples, {tokens} tokens, {supervised} supervised, {images} images{estimated}")
    shown = render(samples[0], processor)
    (folder / "sample.txt").write_text(shown + "\n")
    say(f"first sample, supervised text in [[ ]]:\n  {shown}")


def render(sample: Sample, processor: Processor) -> str:
    """A sample as text; supervised spans in double brackets, pictures as <image x N>, clips as <video x N>."""
    text = ""
    places = zip(sample.ids, sample.modality, sample.loss_mask, strict=True)
    for (modality, supervised), span in itertools.groupby(places, key=lambda place: place[1:]):
        ids = [token for token, _, _ in span]
        if modality != TEXT:
            text += f"<{'video' if modality == VIDEO else 'image'} x {len(ids)}>"
        else:
            words = str(processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            text += f"[[{words}]]" if supervised else words
    return text.replace("\n", "\\n")


def _check_image_tokens(module: ModelTraining, processor: Processor, place: torch.device) -> None:
    if processor.reads_whole or not processor.reads_pictures:
        return  # nothing to see, or counted from each picture and held against its patches
    size = processor.image_size
    with torch.no_grad():
        count = module.selected_features(torch.zeros(1, 3, size, size, device=place)).shape[1]
    if count != processor.num_image_tokens:
        raise UserError(
            f"the processor writes {processor.num_image_tokens} tokens for a picture, the vision tower gives {count}",
            hint="use the processor of this tower: patch_size and crop_size must be the tower's",
        )


def _check_head(module: ModelTraining, sample: Sample, processor: Processor, place: torch.device) -> None:
    """Our states through the LM head must be the scores of the model's own forward.

    Where there can be tiles it is told the text alone: its own packing may follow another convention than the data's.
    """
    batch = collate([sample], pad_id=processor.pad_id, image_size=processor.image_size)
    is_plain = all(picture.is_plain and picture.modality == IMAGE for picture in batch.pictures)
    if not family_of(module.model.config).one_tile or not is_plain:
        ids = batch.ids.masked_fill(batch.modality != TEXT, processor.pad_id)
        batch = replace(batch, pixels=None, ids=ids, modality=torch.zeros_like(batch.modality), pictures=())
    batch, first = batch.to(place), module.num_unseen
    training = module.training
    module.eval()  # dropout would make two passes differ
    with torch.no_grad():
        ours = module.scores(module.hidden_states(batch))[:, first:]
        pixels = {} if sample.pixels is None or batch.pixels is None else {"pixel_values": sample.pixels.to(place)}
        theirs = module.model(
            input_ids=batch.ids[:, first:], attention_mask=batch.attention_mask[:, first:].long(), **pixels
        ).logits
    module.train(training)
    gap = float((ours - theirs).abs().max())
    if gap > 1e-3:
        raise UserError(
            f"lm_head(feature) differs from the model's scores by {gap:.2g}",
            hint="report this with the model's name: its class computes something beyond the head",
        )
