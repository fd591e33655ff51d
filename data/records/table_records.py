"""Conversations from tables of Hugging Face's `datasets`: Arrow, parquet or JSON on disk, or a set of the Hub.

Rows are read from Arrow files that are mapped into memory. Nothing is decoded on the way: a picture's bytes stay in
the file until our own reader opens them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ...core.errors import UserError, did_you_mean, first_line
from ...core.fields import Place, Revision
from ...core.file_kinds import HEAD, other_kind
from ...core.files import open_data, read_text, write_whole
from ...core.json_types import Json, JsonObject, value_at
from ...core.section import Section
from ..pictures.media_files import Embedded
from .record import Unreadable
from .records import Reader, RecordFile, file_identity, indexed, open_index
from .scan import Entry

_FILES = ("parquet", "json", "jsonl", "arrow")  # of a folder that `datasets` did not save itself
_BUILDERS = {"jsonl": "json"}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NO_FILE_NAME = re.compile(r"[^\w.-]")
_ROWS = 256  # looked at together
_ONLINE = (
    "download it once (`hf download ID --repo-type dataset --local-dir FOLDER`) and give FOLDER as path, or run once "
    "with a network: HF_HOME keeps what was loaded"
)
_DAMAGED = (
    "check its files; rows of different types (ids that are numbers and texts) are no table: of LLaVA JSON give the "
    "file's name alone as path, without kind"
)


class Columns(Section):
    """What the set calls the parts of a record."""

    # A list of turns with `from` (human, gpt) and `value`.
    conversations: str = "conversations"
    # A picture or a list of them (bytes, or names of files); null: image or images, where there is one of them.
    image: str | None = None
    # A clip or a list of them, likewise; null: video or videos.
    video: str | None = None
    # null: id.
    id: str | None = None


class TableRecords(Section):
    """A set of the Hub, or a folder: saved by `datasets`, or with parquet, JSON or Arrow files."""

    kind: Literal["datasets"]
    # A folder (or a file of one), or else an id of the Hub.
    path: Place
    # The configuration on the Hub; of a folder of files the folder inside it. null: the only one.
    name: Place | None = None
    # null: the only split, or train.
    split: str | None = None
    # Commit, tag or branch on the Hub; null: main, as it is when the set is first loaded.
    revision: Revision | None = None
    columns: Columns = Columns()

    @property
    def source_name(self) -> str:
        """The set's own name, its configuration and split; a folder keeps it when it moves."""
        return "/".join(part for part in (Path(self.path).name, self.name, self.split) if part)

    def __str__(self) -> str:
        return ", ".join(part for part in (self.path, self.name, self.split) if part)

    def inside(self, folder: Path) -> TableRecords:
        """Return the section with a relative path starting at `folder`, where that is there, else unchanged."""
        path = folder / self.path
        return self.model_copy(update={"path": str(path)}) if path.exists() else self

    @property
    def on_disk(self) -> Path | None:
        path = Path(self.path)
        return path / (self.name or "") if path.exists() else None

    def is_present(self) -> bool:
        """Whether it is on disk. Sets of the Hub count where nothing else can be asked (HF_HUB_OFFLINE)."""
        path = self.on_disk
        if path is not None:
            return path.exists()
        import datasets  # takes seconds
        from datasets.naming import camelcase_to_snakecase

        owner, _, name = self.path.rpartition("/")
        folder = f"{owner}___{camelcase_to_snakecase(name)}" if owner else camelcase_to_snakecase(name)
        return bool(datasets.config.HF_HUB_OFFLINE) and (Path(datasets.config.HF_DATASETS_CACHE) / folder).is_dir()

    @property
    def opens_fast(self) -> bool:
        """Whether opening reads no more than an index needs: other files are written as Arrow first."""
        return self.on_disk is not None and _is_saved(self.on_disk)

    @property
    def is_remote(self) -> bool:
        """Whether it is on the Hub."""
        return self.on_disk is None

    def identity(self) -> str:
        """Hash of the files on disk; of a set of the Hub what names it."""
        path = self.on_disk
        if path is None or not path.exists():
            return f"{self.path}@{self.revision}/{self.name}/{self.split}"
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        parts = [part for file in files for part in (str(file.relative_to(path)), file_identity(file))]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    def open(self, cache: Path) -> RecordFile:
        """Load and index it. Raises `UserError`: it is out of reach, or has no such split or columns."""
        rows = self._loaded()
        reader = TableReader(self, rows)
        stem, settings = _NO_FILE_NAME.sub("_", self.source_name), self.model_dump_json()
        name = f"{stem}-{_hash(settings + rows._fingerprint)}"
        file = open_index(reader, name, cache, lambda: indexed(reader, reader.entries(), "name another split"))
        if self.is_remote:
            self._check_unchanged(file.digest(), cache / f"{stem}-{_hash(settings)}.sha256")
        return file

    def _check_unchanged(self, digest: str, file: Path) -> None:
        """Raise `UserError` where a branch on the Hub has changed since the stage began; `file` holds its digest."""
        hint = "delete the file: the set is then taken as it is now"
        if file.is_file() and read_text(file, hint=hint) != digest:
            hint = "set revision to the commit that the stage began with, or restart the stage (restart=STAGE)"
            raise UserError("the set has changed on the Hub since this stage began", where=str(self), hint=hint)
        write_whole(file, digest.encode())

    def _loaded(self) -> Any:
        """The split, a `datasets.Dataset`."""
        import datasets  # takes seconds

        path = self.on_disk
        try:
            if path is None:
                if _HUB_ID.fullmatch(self.path) is None:
                    raise UserError(
                        "no such folder", where=self.path, hint="check `path`; ids of the Hub are OWNER/NAME"
                    )
                loaded = datasets.load_dataset(self.path, self.name, revision=self.revision)
            elif not path.exists():
                raise UserError("no such folder", where=str(path), hint="check `path` and `name`")
            else:
                loaded = datasets.load_from_disk(str(path)) if _is_saved(path) else _of_files(path)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            hint = _ONLINE if path is None else _DAMAGED
            raise UserError(f"cannot load the set: {first_line(error)}", where=str(self), hint=hint) from error
        if not isinstance(loaded, dict):  # a saved set of one split
            loaded = {str(loaded.split): loaded}
        split = self.split or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
        if split not in loaded:
            problem = f"the set has no split {split!r}; it has {', '.join(loaded)}"
            raise UserError(problem, where=f"{self}, key split", hint=did_you_mean(split, loaded))
        return loaded[split]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_saved(path: Path) -> bool:
    """Whether `datasets` saved this folder (`save_to_disk`)."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _of_files(path: Path) -> Any:
    """The splits of a folder of files, or of a file. Which reader is used never depends on what else lies there."""
    import datasets

    held = {file.suffix for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()}
    suffixes = [s for s in _FILES if f".{s}" in held]
    if not suffixes:
        others = f"give a folder with {', '.join(_FILES)} files"
        hint = "tars are read with kind: webdataset" if ".tar" in held else others
        raise UserError("no table files", where=str(path), hint=hint)
    builder = _BUILDERS.get(suffixes[0], suffixes[0])
    if not path.is_file():
        return datasets.load_dataset(builder, data_dir=str(path))
    with open_data(path) as file:
        kind = other_kind(file.read(HEAD)) if builder == "json" else None
    if kind is not None:
        hint = "give the file the ending of what it is" if "table" in kind[0] else kind[1]
        raise UserError(f"{kind[0]}, and the name ends in {path.suffix}", where=str(path), hint=hint)
    return datasets.load_dataset(builder, data_files=str(path))


class TableReader(Reader):
    """Rows by their numbers, through a memory map."""

    def __init__(self, source: TableRecords, rows: Any):
        path = source.on_disk or Path()  # of a set of the Hub names of files start in the working directory
        super().__init__(source.source_name, str(source), path.parent if path.is_file() else path)
        schema = rows.features.arrow_schema
        self.columns = _checked(source, schema)
        wanted = {*self.columns.values(), *(f.name for f in schema if re.fullmatch(_KINDS["id"][0], str(f.type)))}
        self.rows = rows.select_columns([n for n in rows.column_names if n in wanted]).with_format("arrow")

    def read(self, offset: int, size: int) -> Json:
        """Row `offset`."""
        return self._record(self.rows[offset], 0, offset)

    def entries(self) -> Iterator[Entry]:
        """All rows, for the index; of pictures only whether they are there is looked at."""
        for start in range(0, len(self.rows), _ROWS):
            table = self.rows[start : start + _ROWS]
            for place in range(len(table)):
                record = self._record(table, place, start + place)
                turns = value_at(record, "conversations")
                yield start + place, len(json.dumps(turns, ensure_ascii=False).encode()), record

    def _record(self, table: Any, place: int, row: int) -> JsonObject | Unreadable:
        record = {}
        media = {self.columns[key] for key in ("image", "video") if key in self.columns}
        named = {column: key for key, column in self.columns.items()}
        for column in table.column_names:
            cell = table[column][place]
            if not cell.is_valid:
                continue
            try:
                where = f"{self.label}, row {row}, column {column}"
                record[named.get(column, column)] = list(media_of(cell, where)) if column in media else cell.as_py()
            except UnicodeDecodeError as error:
                return Unreadable(f"column {column} is not UTF-8: {error.reason}")
        return record


def _checked(source: TableRecords, schema: Any) -> dict[str, str]:
    """Part of a record -> column. Raises `UserError` where a column is missing or of another type."""
    columns, present = source.columns, schema.names
    guesses = {"conversations": (columns.conversations,), "image": ("image", "images"), "video": ("video", "videos"),
               "id": ("id",)}  # fmt: skip
    result = {}
    for part, guessed in guesses.items():
        named = dict(columns)[part]
        if named is not None and named not in present:
            problem = f"the set has no column {named!r}; it has {', '.join(present)}"
            raise UserError(problem, where=f"{source}, key columns.{part}", hint=did_you_mean(named, present))
        column = named or next((name for name in guessed if name in present), None)
        if column is None:
            continue
        types, wanted = _KINDS[part]
        kind = schema.field(column).type
        if re.fullmatch(types, str(kind)) is None:
            problem = f"column {column!r} holds {kind}, and {part} must be {wanted}"
            hint = "name another column, or convert this one; of LLaVA JSON give the file alone as path, without kind"
            raise UserError(problem, where=f"{source}, key columns.{part}", hint=hint)
        result[part] = column
    return result


_TEXT = r"(?:large_)?string"
_BYTES = r"(?:large_)?binary"
_ENCODED = r"struct<(?:bytes: \w+, path: \w+|path: \w+, bytes: \w+)>"  # as `datasets` keeps pictures
_LIST = r"(?:large_)?list<\w+: "
# Part of a record -> the types of its column, as pyarrow writes them, and what they are in words.
_KINDS = {
    "conversations": (rf"{_LIST}struct<(?=.*\bfrom: {_TEXT})(?=.*\bvalue: {_TEXT}).*",
                      "a list of turns with the texts `from` and `value`"),
    "image": (rf"(?:{_LIST})?(?:{_ENCODED}|{_TEXT}|{_BYTES}|null)>?",
              "pictures (bytes and path), names of files, or lists of them"),
    "video": (rf"(?:{_LIST})?(?:{_ENCODED}|{_TEXT}|{_BYTES}|null)>?",
              "clips (bytes and path), names of files, or lists of them"),
    "id": (rf"{_TEXT}|u?int\d+|(?:half)?float|double|bool", "a text or a number"),
}  # fmt: skip


def is_encoded(kind: Any) -> bool:
    """Whether a column holds encoded pictures, clips or sounds as `datasets` keeps them, or lists of them."""
    return re.fullmatch(rf"(?:{_LIST})?{_ENCODED}>?", str(kind)) is not None


def media_of(cell: Any, where: str) -> Iterator[str | Embedded]:
    """Pictures or clips of a cell that is not null: bytes inside the file, or names."""
    import pyarrow

    if isinstance(cell, pyarrow.ListScalar):
        for number, item in enumerate(cell.values):
            if item.is_valid:
                yield from media_of(item, f"{where}, {number}")
    elif isinstance(cell, pyarrow.StructScalar):
        if cell["bytes"].is_valid:
            yield from media_of(cell["bytes"], where)
        elif cell["path"].is_valid:
            yield cell["path"].as_py()
    elif isinstance(cell, pyarrow.StringScalar):
        yield cell.as_py()
    else:
        yield Embedded(where, functools.partial(_stream, cell))


def _stream(cell: Any) -> Any:
    """The cell's bytes as a file; they are not copied out of the memory map."""
    import pyarrow

    return pyarrow.BufferReader(cell.as_buffer())
