"""A data section of a recipe as a sequence of encoded samples, and as requests for the decoding loop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator

from ..core.batch import Request
from ..core.errors import UserError
from ..core.fields import Place
from ..core.json_types import JsonObject, all_are, listed
from ..core.pictures import Picture
from ..core.section import Section
from .collate import Sample, empty_sample
from .conversations import Encoded, PromptFormat, TooLong, check_template, encode
from .families.processor import Processor, Resizing
from .media import ImageReader, Media, check_some
from .pictures.tiles import Aspect, Convention, Size
from .pictures.videos import VideoSettings
from .records.mixture import CURES, Name, RecordSources, Selection, identities
from .records.record import in_words, with_end, without_marks
from .records.records import RecordFile, id_of, name_of, repeated_ids
from .records.skipped import TEXT_KEPT, SkippedLog

_LOOKED_AT = 64  # records with pictures whose files are looked for at the start, over all files
_LEAST_LOOKED_AT = 4  # of each


class ConversationData(Section):
    """LLaVA JSON or JSONL with an image folder, tables of `datasets`, tars, or mixtures of them."""

    # Of a train stage's `data`: the default where the target is a language model.
    kind: Literal["conversations"] = Field("conversations", exclude=True)
    # Files, brace patterns ({a,b}.json) and OneVision mixtures (.yaml); with `from` the names of splits, or of
    # mixtures (NAME.yaml), that a `generate` stage wrote. Records of a table or of tars, pictures included:
    # {kind: datasets, path: HUB_ID_OR_FOLDER} or {kind: webdataset, path: "shards/{000..999}.tar"}.
    path: RecordSources
    # Of the draws of `random:` in a mixture. Not the recipe's seed: drafts of several seeds see the same records.
    mixture_seed: int = Field(0, ge=0)
    # The stage that wrote the files; null: `path` names files on disk.
    from_stage: str | None = Field(None, alias="from")
    # Folder that image paths are relative to; null: the data file's own folder.
    images: Place | None = None
    # Folder that clips are relative to; null: as images.
    videos: Place | None = None
    # Take absolute paths of records and paths with `..` as they are. false: such a record is unusable, since whoever
    # wrote it could have any picture of this machine read. Symbolic links inside the folders are followed.
    allow_outside: bool = False
    # square cuts the longer side off (official pretraining), pad keeps it (official finetuning); anyres tiles for
    # LLaVA-NeXT, anyres_max_9 for LLaVA-OneVision.
    aspect: Aspect = "pad"
    # The same for requests to a draft with pictures of its own (drafter.pictures: own); null: as aspect.
    drafter_aspect: Aspect | None = None
    # How tiles are chosen where the published training code (original) and transformers' models (hf) differ: as the
    # target does, and targets are transformers' models.
    anyres_convention: Convention = "hf"
    # Pixels of an image that is read whole (Qwen-VL), or of its tiles (InternVL); null: as the processor's files say.
    # What lies outside is resized.
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    video: VideoSettings = VideoSettings()
    # Ids in a sample, pictures included; no more than the language model has positions.
    max_length: int = Field(2048, ge=8, le=1 << 24)
    # Text that is appended to each record's last question ("Please answer with at least 1000 words."); null: none. It
    # belongs to the files: where a recipe or the command line names another `path`, the shipped one goes.
    question_end: Annotated[str, BeforeValidator(lambda text: "" if text is None else text)] = ""
    # strict stops at the first unusable record; skip leaves it out and lists it in skipped.jsonl.
    on_error: Literal["strict", "skip"] = "strict"
    # A sample of more than max_length ids: error stops; skip leaves it out and lists it; drop_images takes all its
    # pictures (and their marks) away, keeps the text and lists it. null, and what is too long without pictures, too:
    # as on_error says. Prompts that are decoded are never shortened.
    over_length: Literal["error", "skip", "drop_images"] | None = None
    # Maximum number of usable records to keep, in file order; null: all. The first records of a file that is grouped by
    # kind are of few kinds: choose them with `kinds`, or mix the file first.
    max_samples: int | None = Field(None, ge=1)
    # Keep only these scenario kinds (the record's `kind` key); null: all.
    kinds: list[str] | None = None

    @model_validator(mode="after")
    def _named(self) -> ConversationData:
        if self.from_stage is not None and not all_are(listed(self.path), str):
            raise ValueError("`from` is for splits that a stage wrote: name them alone, or leave `from` out")
        return self

    def image_reader(self, processor: Processor, *, drafter: bool = False) -> ImageReader:
        """A reader of pictures and clips; with `drafter`, in `drafter_aspect` where that is set."""
        aspect = (self.drafter_aspect if drafter else None) or self.aspect
        resizing = Resizing(aspect, self.anyres_convention, (self.min_pixels, self.max_pixels))
        return ImageReader(processor, resizing, self.video, self.allow_outside)


class ConversationDataset:
    """Samples in file order; which of them are used is fixed before training starts.

    Args:
        files: data files, brace patterns and mixtures, or sections that name tables or tars.
        skipped_log: file that lists what was left out and why (with `on_error: skip`).
        cache: folder for indices.
        drafter_processor: of a draft with its own image processor, whose view is added to every request; None: it
            shares the target's.
        learned: the records' own answers are; False: records may be questions alone.
    """

    def __init__(
        self,
        config: ConversationData,
        form: PromptFormat,
        processor: Processor,
        *,
        files: Sequence[Name],
        skipped_log: Path | None,
        cache: Path,
        drafter_processor: Processor | None = None,
        learned: bool = True,
    ):
        if form.template == "chat":
            check_template(form, processor)  # a mistake in the recipe, not in each record
        self.config, self.form, self.processor = config, form, processor
        self._image_reader, self._drafter_image_reader = config.image_reader(processor), None
        if drafter_processor is not None:
            self._drafter_image_reader = config.image_reader(drafter_processor, drafter=True)
        self.log = SkippedLog(skipped_log)
        self._paths = files
        self.selection = Selection(files, cache=cache, seed=config.mixture_seed, learned=learned)
        self.records: list[RecordFile] = self.selection.files
        self.places = self._usable()
        self.lengths = self.column("lengths")
        if config.on_error == "skip":  # else the first record stops, by its name
            self._look_for_pictures()

    def _look_for_pictures(self) -> None:
        """Raises `UserError` where those of some records of a file are all missing."""
        named = self.places[(self.column("images") > 0) | (self.column("clips") > 0)]
        files = np.unique(named[:, 0]).tolist()
        each = max(_LEAST_LOOKED_AT, _LOOKED_AT // max(1, len(files)))
        for number in files:
            own, file = named[named[:, 0] == number, 1], self.records[number]
            of = f" of {file.reader.name}" if len(self.records) > 1 else ""
            looked = own[:: max(1, len(own) // each)].tolist()
            check_some(file, looked, self.folders(number), allow_outside=self.config.allow_outside, of=of)

    def _usable(self) -> np.ndarray:
        """[n,2] (file, record) of the records that can be used."""
        strict = self.config.on_error == "strict"
        notes = []
        for file, index, problem in self.selection.problems():
            if strict:
                raise self._unusable(file, index, problem)
            notes.append(self._note(file, index, problem))
        for file in self.records:
            if (repeated := repeated_ids(file)) is not None:
                problem, place = repeated
                if strict:
                    hint = "fix the ids, or set on_error: skip (records are then identified by their position)"
                    raise UserError(problem, where=f"{file}, {place}", hint=hint)
                reason = f"{problem}, {place}: all are kept and identified by their position in the file"
                notes.append({"file": str(file), "record": None, "id": None, "reason": reason})
        places = self.selection.places()
        if self.config.kinds is not None:
            wanted = set(self.config.kinds)
            kept = [self.records[f].read(i).get("kind") in wanted for f, i in places.tolist()]
            places = places[np.array(kept, dtype=bool)]
        places = places[: self.config.max_samples]
        self.log.add(notes)
        if not len(places):
            hint = CURES.get(notes[0]["reason"] if notes else "", "see above")
            raise UserError("no usable records", where=", ".join(map(str, self.records)), hint=hint)
        return places

    def __len__(self) -> int:
        return len(self.places)

    def column(self, name: str) -> np.ndarray:
        """[n] a column of the files' indices (lengths, sizes, images, clips) for the samples."""
        return self.selection.column(name, self.places)

    def record(self, index: int) -> JsonObject:
        """The record of sample `index`, as its file has it, with the data section's `question_end` added."""
        file, number = self.places[index]
        record = self.records[file].read(number)
        return with_end(record, self.config.question_end) if self.config.question_end else record

    def sample_id(self, index: int) -> str:
        """A name that is unique even if ids repeat: file, index and id."""
        file, number = self.places[index]
        return f"{self.records[file].reader.name}[{number}]"

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, encoded. With `on_error: skip` a record that turns out to be unusable keeps its place with
        nothing to learn from, and is listed; its neighbour never takes the place.
        """
        return self._sample(index, pixels=True)

    def counted(self, index: int) -> Sample:
        """Sample `index` without its pixels; one that is left out has nothing to learn from."""
        return self._sample(index, pixels=False)

    def _sample(self, index: int, *, pixels: bool) -> Sample:
        name = self.sample_id(index)
        try:
            encoded, media = self._read(index)
            if media is not None and not pixels and self.config.on_error == "skip":
                media.open_files()
            shown, pictures = (media.pixels(), media.pictures) if pixels and media is not None else (None, ())
        except UserError as error:
            if self._stops(error):
                raise self._named(index, error) from error
            self.list_as_left_out(index, error.problem)
            return replace(empty_sample(self.processor.pad_id), sample_id=name)
        return Sample(encoded.ids, encoded.loss_mask, encoded.modality, shown, name, pictures)

    def _read(self, index: int) -> tuple[Encoded, Media | None]:
        """The sample cut to max_length, and its pictures if it kept them."""
        record = self.record(index)
        media = self._media(record, int(self.places[index, 0]))
        encoded, seen = self._fitting(record, media, index)
        if not any(encoded.loss_mask):
            raise UserError("nothing to learn from: no supervised token", hint="give every record an answer")
        return encoded, media if seen else None

    def image_reader(self, *, prompt: bool) -> ImageReader:
        """The reader whose tiles are counted: for prompts it is the draft's, which may have its own image processor."""
        return (self._drafter_image_reader if prompt else None) or self._image_reader

    def num_ids(self, index: int, *, prompt: bool = False, flat: bool = False, most: int | None = None) -> int:
        """Length of sample `index`, or of its prompt, without decoding pictures; `flat` as a model without a newline
        reads them. Raises `TooLong` for far more than `most`, with the least that it has.
        """
        record, file = self.record(index), int(self.places[index, 0])
        image_reader = self.image_reader(prompt=prompt)
        pictures = self._media(record, file, image_reader).pictures
        if flat:
            pictures = tuple(picture.flat for picture in pictures)
        turns = record["conversations"]
        processor = image_reader.processor
        encoded = encode(
            turns, self.form, processor, pictures=pictures, open_ended=prompt, record=record, most=most
        )  # fmt: skip
        return len(encoded.ids)

    def clip_sizes(self, count: int) -> list[Size]:
        """Width and height of up to `count` clips spread over the samples. Raises `UserError` as `on_error` says."""
        with_clips = np.flatnonzero(self.column("clips"))
        spread = with_clips[np.linspace(0, len(with_clips) - 1, min(count, len(with_clips))).round().astype(int)]
        sizes: list[Size] = []
        problem: UserError | None = None
        for index in spread.tolist():
            try:
                sizes += self._media(self.record(index), int(self.places[index, 0])).clip_sizes
            except UserError as error:
                problem = self._named(index, error)
                if self._stops(error):
                    raise problem from error
        if problem is not None and not sizes:
            raise problem
        return sizes

    def _fitting(self, record: JsonObject, media: Media, index: int) -> tuple[Encoded, bool]:
        """The sample within max_length, and whether it has kept its pictures."""
        turns, config = record["conversations"], self.config
        try:
            return self._within(turns, record, media.pictures), True
        except TooLong as error:
            # The plain template is nothing but a picture and its caption.
            if config.over_length != "drop_images" or not media.pictures or self.form.template == "plain":
                raise
            try:
                shorter = self._within(without_marks(record), record, ())
            except TooLong:
                raise error from None
            self.list_as_left_out(index, f"{error.problem}: its {len(media.pictures)} {TEXT_KEPT}")
            return shorter, False

    def _within(self, turns: list[JsonObject], record: JsonObject, pictures: Sequence[Picture]) -> Encoded:
        """Raises `TooLong` for more than max_length ids."""
        most = self.config.max_length
        hint = "raise max_length (up to the model's positions), or set over_length: skip or drop_images"
        try:
            encoded = encode(turns, self.form, self.processor, pictures=pictures, record=record, most=most)
        except TooLong as error:
            raise TooLong(error.problem, hint=hint, at_least=error.at_least) from error
        if len(encoded.ids) > most:
            raise TooLong(f"{len(encoded.ids)} ids, more than max_length {most}", hint=hint)
        return encoded

    def _stops(self, error: UserError) -> bool:
        """Whether an unusable record ends the run; else it is left out and listed."""
        if isinstance(error, TooLong) and self.config.over_length in ("error", "skip"):
            return self.config.over_length == "error"
        return self.config.on_error == "strict"

    def too_long(self, count: int) -> UserError:
        """What `leave_out` is told of a prompt, or of a prompt with its answer, of `count` ids."""
        return TooLong(
            f"{count} ids, more than max_length {self.config.max_length}",
            hint="raise max_length (up to the model's positions), or set over_length: skip",
        )

    def leave_out(self, index: int, error: UserError) -> None:
        """List sample `index` as left out; raises `error` where the settings say that such a record ends the run."""
        if self._stops(error):
            raise error
        self.list_as_left_out(index, error.problem)

    def request(
        self, index: int, *, originals: bool = False, pixels: bool = True, most: int | None = None, words: bool = False
    ) -> tuple[Request, str | None]:
        """The prompt up to the last answer, and that answer if the data has it; with `originals` for a captioner.
        Without `pixels` it can only be counted. A prompt of far more than `most` ids is refused before it is tokenized.
        With `words` each picture is the record's text for it.
        """
        record, file = self.record(index), int(self.places[index, 0])
        name = self.sample_id(index)

        def asked(reader: ImageReader, media: Media) -> Request:
            encoded = encode(
                record["conversations"], self.form, reader.processor, pictures=media.pictures, open_ended=True,
                record=record, most=most,
            )  # fmt: skip
            modality = torch.tensor(encoded.modality, dtype=torch.int8)
            shown = media.pixels() if pixels else None
            return Request(torch.tensor(encoded.ids), modality, shown, name, media.pictures, originals=seen)

        try:
            record = in_words(record) if words else record
            media = self._media(record, file)
            seen = media.originals() if originals else ()
            request = asked(self._image_reader, media)
            if (own := self._drafter_image_reader) is not None:
                request = replace(request, drafter_view=asked(own, self._media(record, file, own)))
        except TooLong as error:
            raise self.too_long(error.at_least or 0) from error
        except UserError as error:
            raise self._named(index, error) from error
        last = record["conversations"][-1]
        return request, last["value"] if last["from"] == "gpt" else None

    def identity(self) -> str:
        """Hash of what the samples are made from, for a stage's fingerprint."""
        parts = [
            *identities(self._paths),
            *self.selection.digests(),
            self.config.model_dump_json(),
            self.form.model_dump_json(),
            *([json.dumps(self.processor.tokenizer.chat_template)] if self.form.template == "chat" else []),
        ]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    def _media(self, record: JsonObject, file: int, image_reader: ImageReader | None = None) -> Media:
        return (image_reader or self._image_reader).media(record, *self.folders(file))

    def folders(self, file: int) -> tuple[Path, Path]:
        """Return the folders of images and of clips of the records in file number `file`."""
        images = Path(self.config.images) if self.config.images else self.records[file].reader.folder
        return images, Path(self.config.videos) if self.config.videos else images

    def _unusable(self, file: RecordFile, index: int, problem: str, cause: UserError | None = None) -> UserError:
        where = f"{file.file_of(index)}, {name_of(file, index)}"
        if cause is not None and cause.where:
            where += f", {cause.where}"
        usual = "fix or remove the record, or set on_error: skip to leave such records out"
        hint = (cause and cause.hint) or CURES.get(problem, usual)
        return UserError(problem, where=where, hint=hint)

    def _named(self, index: int, error: UserError) -> UserError:
        """`error` with the file and record of sample `index`."""
        file, number = self.places[index]
        return self._unusable(self.records[file], int(number), error.problem, error)

    def list_as_left_out(self, index: int, reason: str) -> None:
        """Write sample `index` into the log of what is left out."""
        file, number = self.places[index]
        self.log.add([self._note(self.records[file], int(number), reason)])

    def _note(self, file: RecordFile, index: int, problem: str) -> JsonObject:
        return {"file": file.file_of(index), "record": index, "id": id_of(file, index), "reason": problem}
