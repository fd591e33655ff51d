"""A data section of a recipe as a sequence of encoded samples, and as requests for the decoding loop."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from ..core.errors import UserError
from ..core.nouns import Request
from ..core.section import Section
from .collate import Sample
from .conversations import PromptFormat, encode
from .images import Aspect, load_image, pixels
from .processor import Processor
from .records import RecordFile, file_identity, num_images, open_records


class ConversationData(Section):
    """LLaVA JSON or JSONL with an image folder."""

    # Files, or with `from` the names of splits that a `generate` stage wrote.
    path: str | list[str]
    # The stage that wrote the files; null: `path` names files on disk.
    from_stage: str | None = Field(None, alias="from")
    # Folder that image paths are relative to; null: the data file's own folder.
    images: str | None = None
    # square cuts the longer side off (official pretraining), pad keeps it (official finetuning).
    aspect: Aspect = "pad"
    # Ids in a sample, pictures included; no more than the language model has positions.
    max_length: int = Field(2048, ge=8)
    # strict stops at the first unusable record; skip leaves it out and lists it in skipped.jsonl.
    on_error: Literal["strict", "skip"] = "strict"
    # Keep the first so many usable records; null: all.
    max_samples: int | None = Field(None, ge=1)
    # Keep only these scenario kinds (the record's `kind` key); null: all.
    kinds: list[str] | None = None


class ConversationDataset:
    """Samples in file order; which of them are used is fixed before training starts.

    Args:
        files: the data files, resolved.
        image_folder: folder of relative image paths, or None for each file's own.
        skipped_log: file that lists what was left out and why (with `on_error: skip`).
        cache: folder for indices.
    """

    def __init__(
        self,
        config: ConversationData,
        form: PromptFormat,
        processor: Processor,
        *,
        files: list[Path],
        skipped_log: Path | None,
        cache: Path,
    ):
        self.config, self.form, self.processor, self.skipped_log = config, form, processor, skipped_log
        self._listed: set[str] = set()  # lines of the log up to `_log_read`
        self._log_read = 0
        self.records: list[RecordFile] = [open_records(path, cache) for path in files]
        self.places = self._usable()
        self.lengths = np.empty(len(self.places), dtype=np.int32)
        for number, file in enumerate(self.records):
            mine = self.places[:, 0] == number
            self.lengths[mine] = file.lengths[self.places[mine, 1]]

    def _usable(self) -> np.ndarray:
        """[n,2] (file, record) of the records that can be used."""
        strict = self.config.on_error == "strict"
        notes, places = [], []
        for number, file in enumerate(self.records):
            for index, problem in file.problems.items():
                if strict:
                    raise self._unusable(file, index, problem)
                notes.append(self._note(file, index, problem))
            for problem, place in _id_problems(file):
                if strict:
                    cure = "mend the ids, or set on_error: skip (records are then told apart by their place)"
                    raise UserError(problem, where=f"{file.path}, {place}", cure=cure)
                reason = f"{problem}, {place}: all are kept and told apart by their place"
                notes.append({"file": str(file.path), "record": None, "id": None, "reason": reason})
            good = np.ones(len(file), dtype=bool)
            good[list(file.problems)] = False
            indices = np.flatnonzero(good)
            places.append(np.stack([np.full_like(indices, number), indices], axis=1))
        found = np.concatenate(places)
        if self.config.kinds is not None:
            wanted = set(self.config.kinds)
            kept = [self.records[f].read(i).get("kind") in wanted for f, i in found.tolist()]
            found = found[np.array(kept, dtype=bool)]
        found = found[: self.config.max_samples]
        self._log_skipped(notes)
        if not len(found):
            raise UserError("no usable records", where=", ".join(str(f.path) for f in self.records), cure="see above")
        return found

    def __len__(self) -> int:
        return len(self.places)

    def record(self, index: int) -> dict[str, Any]:
        file, number = self.places[index]
        return self.records[file].read(number)

    def sample_id(self, index: int) -> str:
        """Unique whatever the ids are: file, place and id."""
        file, number = self.places[index]
        return f"{self.records[file].path.name}[{number}]"

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, encoded.

        With `on_error: skip` a record that turns out to be unusable keeps its place with nothing to learn
        from, and is listed; its neighbour never takes the place.
        """
        record = self.record(index)
        file, number = self.places[index]
        try:
            encoded = encode(record["conversations"], self.form, self.processor, num_images=num_images(record))
            if len(encoded.ids) > self.config.max_length:
                raise UserError(
                    f"{len(encoded.ids)} ids, more than max_length {self.config.max_length}",
                    cure="raise max_length (up to the model's positions), or set on_error: skip",
                )
            if not any(encoded.loss_mask):
                raise UserError("nothing to learn from: no supervised token", cure="give every record an answer")
            pictures = self._pixels(record, int(file))
        except UserError as error:
            if self.config.on_error == "strict":
                raise self._unusable(self.records[file], int(number), error.problem, error) from error
            self._log_skipped([self._note(self.records[file], int(number), error.problem)])
            pad = self.processor.pad_id
            return Sample([pad, pad], [False, False], [0, 0], None, self.sample_id(index))
        return Sample(encoded.ids, encoded.loss_mask, encoded.modality, pictures, self.sample_id(index))

    def request(self, index: int) -> tuple[Request, str]:
        """The prompt up to the last answer, and that answer as the data has it."""
        record = self.record(index)
        file, number = self.places[index]
        turns = record["conversations"]
        try:
            encoded = encode(turns, self.form, self.processor, num_images=num_images(record), open_ended=True)
            pictures = self._pixels(record, int(file))
        except UserError as error:
            raise self._unusable(self.records[file], int(number), error.problem, error) from error
        modality = torch.tensor(encoded.modality, dtype=torch.int8)
        request = Request(torch.tensor(encoded.ids), modality, pictures, self.sample_id(index))
        return request, turns[-1]["value"]

    def identity(self) -> str:
        """Hash of what the samples are made from, for a stage's fingerprint."""
        parts = [file_identity(f.path) for f in self.records] + [
            self.config.model_dump_json(),
            self.form.model_dump_json(),
        ]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    def _pixels(self, record: dict[str, Any], file: int) -> torch.Tensor | None:
        if not num_images(record):
            return None
        names = [record["image"]] if isinstance(record["image"], str) else record["image"]
        folder = Path(self.config.images) if self.config.images else self.records[file].path.parent
        return pixels([load_image(folder / name) for name in names], self.processor, self.config.aspect)

    def _unusable(self, file: RecordFile, index: int, problem: str, cause: UserError | None = None) -> UserError:
        where = f"{file.path}, {_name(file, index)}"
        if cause is not None and cause.where:
            where += f", {cause.where}"
        cure = (cause and cause.cure) or "mend or remove the record, or set on_error: skip to leave such records out"
        return UserError(problem, where=where, cure=cure)

    def _note(self, file: RecordFile, index: int, problem: str) -> dict[str, Any]:
        return {"file": str(file.path), "record": index, "id": _id(file, index), "reason": problem}

    def _log_skipped(self, notes: list[dict[str, Any]]) -> None:
        """List each record once, whichever of the ranks, workers, epochs and starts of a stage comes upon it."""
        if not notes or self.skipped_log is None:
            return
        self.skipped_log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.skipped_log, "a+") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            log.seek(self._log_read)
            self._listed.update(log.readlines())
            fresh = [line for note in notes if (line := json.dumps(note) + "\n") not in self._listed]
            log.writelines(fresh)
            self._listed.update(fresh)
            self._log_read = log.tell()


def _id(file: RecordFile, index: int) -> Any:
    record = file.read(index)
    return record.get("id") if isinstance(record, dict) else None


def _name(file: RecordFile, index: int) -> str:
    return f"record {index} (id {_id(file, index)!r})"


def _id_problems(file: RecordFile) -> Iterator[tuple[str, str]]:
    """(problem, place) where ids do not tell the records of a file apart."""
    if len(file.id_kinds) > 1:
        first = " and ".join(_name(file, index) for index in sorted(file.id_kinds.values()))
        yield f"ids of different types: {', '.join(file.id_kinds)}", first
    if file.first_duplicate:
        index, earlier = file.first_duplicate
        yield (
            f"{file.duplicate_ids} records repeat the id of an earlier one",
            f"{_name(file, index)} repeats record {earlier}",
        )
