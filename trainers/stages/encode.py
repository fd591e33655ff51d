"""Stage kind `encode`: captioned pictures to shards of pixels, codes and text features.

Input items are dealt to output shards by their numbers, so shards depend on nothing but the source: ranks write side by
side, a killed run leaves out the shards that it finished, and memory does not grow with the number of pictures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from ...core import ranks
from ...core.errors import UserError
from ...core.json_types import listed
from ...core.results import CODES, DATASET_FOLDER
from ...data.captioned.items import Captioned, Refused, decode_image
from ...data.captioned.sources import CaptionedSource, num_items, read, repeated, write_digests
from ...data.shards.shards import SAMPLE_BYTES, Sample, claim, finish, summary, unfinished, write_shard
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget, image_section
from ..run.context import Context
from ..run.progress import of_shards
from ..run.stage import Planned, Stage
from ..train.engine import init_distributed

Write = Literal["pixels", "codes", "features"]
_DUPLICATE = "duplicate"


class EncodeStage(Stage):
    holds_models: ClassVar[bool] = False
    reads_drafter: ClassVar[bool] = False  # codes and features are of the target's parts alone
    usual_purpose: ClassVar[str] = "pictures are read and encoded"

    kind: Literal["encode"]
    # The stage whose pictures are read (paths are then those of its world); null: files from elsewhere.
    from_stage: str | None = Field(None, alias="from")
    source: CaptionedSource
    # pixels: for training a tokenizer; codes: for a target; features too: for a head of a text-conditional target.
    write: list[Write] = Field(["codes", "features"], min_length=1)
    # Input items of one output shard: what a killed run does again at most, on each rank.
    samples_per_shard: int = Field(1000, ge=1)
    # Pictures that are encoded at once.
    batch_size: int = Field(16, ge=1)
    # Shorter side below which a picture is refused; null: that of the codes' picture.
    min_side: int | None = Field(None, ge=1)
    # Leave out pictures whose bytes came before. The source is then read twice.
    deduplicate: bool = True
    # strict stops at the first picture that cannot be used; skip counts and lists it.
    on_error: Literal["strict", "skip"] = "skip"

    @classmethod
    def unsuited(cls, target: AnyTarget, drafter: DrafterConfig | None) -> str | None:
        return None if target.draws_images else f"encode writes codes of pictures, which no {target.kind} reads"

    @property
    def shards(self) -> str:
        return CODES

    def makes(self) -> set[str]:
        return {"codes"}

    @property
    def tensors(self) -> Sequence[str]:
        """What each sample of its shards holds."""
        return self.write

    def needs(self) -> dict[str, str | None]:
        wanted: dict[str, str | None] = {}
        if self.from_stage is not None:
            wanted["data"] = self.from_stage
        if "codes" in self.write:
            wanted["vq"] = None
        if "features" in self.write:
            wanted["text"] = None
        return wanted

    def describe(self, plan: Planned) -> list[str]:
        """Samples, and how large their shards get."""
        target = image_section(plan.recipe.target)
        least = 3 * target.image_size**2 * ("pixels" in self.write) + 4 * target.num_codes * ("codes" in self.write)
        most = least  # with the features of the longest caption
        if "features" in self.write and target.condition == "text":
            text = target.model_config_of()
            most += 2 * text.num_condition_tokens * text.caption_dim
        count, how = self.source.max_samples, "declared"
        if self.from_stage is None:
            with contextlib.suppress(UserError):  # not on disk: what the recipe declares stands
                count, how = num_items(self.source), "measured"
        size = f"{least:,} to {most:,}" if most > least else f"{least:,}"
        lines = [f"  writes {', '.join(self.write)}: {size} bytes a sample, and about {SAMPLE_BYTES} around it"]
        if count:
            lines.append(f"  {count:,} samples ({how}): up to {count * (most + SAMPLE_BYTES) / 2**30:.1f} GiB")
        return lines

    def run(self, context: Context) -> None:
        """Writes the shards that are not there yet; ranks take turns."""
        init_distributed()
        source = resolved(self.source, context.inputs.get("data"))
        if source.kind == "classes":
            image_section(context.target).check_labels(source.class_labels())
        folder = context.folder / CODES
        total = num_items(source)
        if not total:
            raise UserError("the source holds no picture", where=str(self.source), hint="check its path")
        num_shards = -(-total // self.samples_per_shard)
        identity = {
            "settings": self.model_dump(mode="json", by_alias=True, exclude={"about"}),
            "image_size": image_section(context.target).image_size,
            "items": total,
            "stage": context.fingerprint,
            # Another set of folders numbers its classes anew.
            "classes": dict(source.class_labels()) if source.kind == "classes" else None,
        }
        claim(folder, identity)
        duplicates = self._duplicates(source, context, total, num_shards) if self.deduplicate else {}
        encoder = _Encoder(self, context)
        left = unfinished(folder, num_shards)
        line = context.progress
        line.count("picture", *of_shards(total, self.samples_per_shard, ranks.share(num_shards), left), is_share=True)
        with context.stop.together():
            for index in left:
                counts: Counter[str] = Counter()
                watched = context.stop.watch(self._items(source, index), "inside a shard")
                log = context.folder / f"refused-{index:06d}.jsonl"
                pictures = usable_pictures(line.counted(watched), self, duplicates, counts, log, encoder.size)
                write_shard(folder, index, encoder.samples(pictures), counts)
        if ranks.is_main():
            finish(folder, identity, num_shards=num_shards)
            context.say(summary(folder))
        ranks.barrier()

    def _items(self, source: CaptionedSource, shard: int) -> Iterator[Captioned | Refused]:
        return itertools.islice(read(source, shard * self.samples_per_shard), self.samples_per_shard)

    def _duplicates(self, source: CaptionedSource, context: Context, total: int, num_shards: int) -> dict[int, int]:
        """Item -> the first one with the same picture. Ranks write digests side by side, a file for each shard."""
        files = [context.folder / "cache" / f"digests-{index:06d}" for index in range(num_shards)]
        mine, line = ranks.share(num_shards), context.progress
        left = [index for index in mine if not files[index].is_file()]
        line.count("duplicates: picture", *of_shards(total, self.samples_per_shard, mine, left), is_share=True)
        with context.stop.together():
            for index in left:
                items = context.stop.watch(self._items(source, index), "while duplicates were looked for")
                write_digests(line.counted(items), files[index])
        return repeated(files)

    def decoded(self, item: Captioned, size: int) -> Image.Image | Refused:
        """The picture as it is encoded, of the codes' `size`; or why not."""
        return decode_image(item, size, min_side=self.min_side or size)


def resolved(source: CaptionedSource, folder: Path | None) -> CaptionedSource:
    """The source with its paths inside the synthetic dataset that a stage generated."""
    if folder is None:
        return source
    if source.kind != "webdataset":
        raise UserError(f"a synthetic dataset is tars, not {source.kind}", hint="use source.kind: webdataset")
    return source.model_copy(update={"path": [str(folder / DATASET_FOLDER / p) for p in listed(source.path)]})


def usable_pictures(
    items: Iterator[Captioned | Refused],
    stage: EncodeStage,
    duplicates: Mapping[int, int],
    counts: Counter[str],
    log: Path,
    size: int,
) -> Iterator[tuple[Captioned, Tensor]]:
    """Pictures with their pixels [3,S,S] uint8; the others are counted by their reason and listed."""
    notes = []
    for item in items:
        if isinstance(item, Refused):
            refused = item
        elif (first := duplicates.get(item.number)) is not None:
            refused = Refused(item.number, item.key, _DUPLICATE, item.where, f"the same bytes as item {first}")
        elif isinstance(image := stage.decoded(item, size), Refused):
            refused = image
        else:
            yield item, torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
            continue
        if stage.on_error == "strict" and refused.reason != _DUPLICATE:
            hint = "remove it, or set on_error: skip"
            raise UserError(f"{refused.reason}: {refused.detail}", where=refused.where, hint=hint)
        counts[refused.reason] += 1
        note = {"key": refused.key, "reason": refused.reason, "where": refused.where, "detail": refused.detail}
        notes.append(json.dumps(note) + "\n")
    if notes:
        log.write_text("".join(notes), encoding="utf-8")


class _Encoder:
    """Writes what the stage asks for, a few pictures at a time."""

    def __init__(self, stage: EncodeStage, context: Context):
        target, folders, device = image_section(context.target), context.inputs, context.device()
        self.stage, self.size = stage, target.image_size
        self.codes = target.picture_encoder(folders, device=device) if "codes" in stage.write else None
        self.features = target.caption_encoder(folders, device=device) if "features" in stage.write else None

    def samples(self, pictures: Iterator[tuple[Captioned, Tensor]]) -> Iterator[Sample]:
        while batch := list(itertools.islice(pictures, self.stage.batch_size)):
            pixels = torch.stack([shown for _, shown in batch])
            codes = None if self.codes is None else self.codes(pixels).to(torch.int32)
            features = None if self.features is None else self.features([item.caption for item, _ in batch])
            for place, (item, shown) in enumerate(batch):
                tensors = {} if codes is None else {"codes": codes[place]}
                if "pixels" in self.stage.write:
                    tensors["pixels"] = shown
                if features is not None:
                    tensors["features"] = features[place].cpu()
                yield f"{item.number:09d}", tensors, {"name": item.key, "caption": item.caption, "label": item.label}
