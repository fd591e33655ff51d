"""Small files: how all of ours are read, and written whole or not at all. Errors name the file and the cure.

A file may be cut, edited or somebody else's: it is read up to a size, as UTF-8, and what it holds is checked against a
schema before anyone uses it.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import uuid
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from .errors import NotFound, Refused, UserError, causes, first_line, shown_value
from .file_kinds import HEAD, other_kind
from .import_paths import NotImported
from .json_types import JsonObject, parse
from .secrets import shortened

T = TypeVar("T")
# The largest that we write is the json beside a shard, of 30 bytes for each sample.
SMALL_BYTES = 64 << 20
# Of logs and reports, which grow with a run and are read whole.
LOG_BYTES = 4 << 30
# What `draftsmith fetch NAME` writes -> the folder in which it does.
FETCHED = {"smollm2": "weights", "lite0": "weights", "emoji-vlm": "weights", "emoji": "data", "stamps": "data"}
_ADAPTER = functools.cache(TypeAdapter)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegular(OSError):
    """Something else than a file: a folder, a pipe, a device."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one. Nothing that another process puts there makes this wait. Raises
    `NotRegular` for something else, `OSError` where it cannot be read, `ValueError` for a name that no file can have.
    """
    _check_regular(os.stat(path).st_mode)  # to open a pipe or a device may already do something
    # Without O_NONBLOCK a pipe that takes the file's place in between would be waited for.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(number).st_mode)
    except NotRegular:
        os.close(number)
        raise
    return os.fdopen(number, "rb")


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegular(_KINDS.get(stat.S_IFMT(mode), "something else"))


def open_data(path: Path, *, hint: str = "check its name and that you may read it, or name another") -> BinaryIO:
    """A file, to be read piece by piece. Raises `UserError` where it may not be read, is gone, or is no file."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise NotFound("file not found", where=str(path), hint=hint) from error
    except NotRegular as error:
        raise UserError(f"not a regular file: {error}", where=str(path), hint=hint) from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), hint=hint) from error


@contextmanager
def _opened(path: Path, hint: str) -> Iterator[BinaryIO]:
    """`open_data`, where errors of reading are the user's, too."""
    with open_data(path, hint=hint) as file:
        try:
            yield file
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), hint=hint) from error


def read_small(path: Path, *, hint: str, max_bytes: int = SMALL_BYTES) -> bytes:
    """The whole file: the one way in which a file of another process, or of an earlier one, is read. Raises `UserError`
    with `hint`, how the user gets a good file, where it is missing, no regular file, too large, or cannot be read.
    """
    with _opened(path, hint) as file:
        size = os.fstat(file.fileno()).st_size
        pieces = iter(functools.partial(file.read, 1 << 20), b"")  # one read would take memory for all of the bound
        data = b"" if size > max_bytes else b"".join(islice(pieces, (max_bytes >> 20) + 2))  # it may grow meanwhile
    _check_size(path, max(size, len(data)), max_bytes, hint)
    return data


def _check_size(path: Path, size: int, max_bytes: int, hint: str) -> None:
    if size > max_bytes:
        raise UserError(f"larger than {max_bytes:,} bytes, the limit for such a file", where=str(path), hint=hint)


def read_end(path: Path, max_bytes: int = 1 << 20) -> str:
    """The end of a log that another program writes, as far as it can be read; "" where there is none."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")
    return ""


def read_text(path: Path, *, hint: str, max_bytes: int = SMALL_BYTES) -> str:
    """A text file without the byte order mark of spreadsheets. Raises `UserError` as `read_small`, or if not UTF-8."""
    return _decoded(read_small(path, hint=hint, max_bytes=max_bytes), str(path), hint)


def read_json(
    path: Path,
    schema: type[T] | TypeAdapter[T],
    *,
    hint: str,
    max_bytes: int = SMALL_BYTES,
    once: bool = False,
) -> T:
    """What a JSON file holds, as `schema` says: a pydantic model, a dataclass, a type such as `JsonObject`, or a
    `TypeAdapter`. With `once` each key of an object stands once; else the last one counts, as other readers of JSON
    have it. Raises `UserError` as `read_text`, and where it is no JSON, or a field is missing or of another kind than
    the schema's.
    """
    data = read_small(path, hint=hint, max_bytes=max_bytes)
    return parse_json(data, schema, where=str(path), hint=hint, once=once)


def read_json_lines(
    path: Path, schema: type[T] | TypeAdapter[T], *, hint: str, max_bytes: int = LOG_BYTES, once: bool = False
) -> Iterator[T]:
    """One value for each line, which are read one by one. Raises `UserError` as `read_json`; it names the line."""
    with _opened(path, hint) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, max_bytes, hint)
        for number, line in enumerate(file, start=1):
            yield parse_json(line, schema, where=f"{path}, line {number}", hint=hint, once=once)


def read_yaml(path: Path, schema: type[T] | TypeAdapter[T], *, hint: str) -> T:
    """What a YAML file holds; nothing in it is run. Raises `UserError` as `read_json`."""
    text = read_text(path, hint=hint)
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"not valid YAML: {first_line(error)}", where=str(path), hint=hint) from error
    return checked(value, schema, where=str(path), hint=hint)


def parse_json(data: bytes, schema: type[T] | TypeAdapter[T], *, where: str, hint: str, once: bool = False) -> T:
    """`read_json` of bytes that are in memory; `where` names their file."""
    text = _decoded(data, where, hint)
    try:
        value = parse(text, _each_once if once else None)
    except ValueError as error:
        problem = f"not valid JSON: {error}" if text.strip() else "the file is empty"
        raise UserError(problem, where=where, hint=hint) from error
    return checked(value, schema, where=where, hint=hint)


def checked(
    value: object, schema: type[T] | TypeAdapter[T], *, where: str, hint: str, context: dict[str, Any] | None = None
) -> T:
    """The value as `schema` says. Raises `UserError` that names the first field which differs, and what it holds."""
    adapter = schema if isinstance(schema, TypeAdapter) else _ADAPTER(cast(Hashable, schema))
    try:
        return adapter.validate_python(value, context=context)
    except NotImported as error:
        raise NotImported(error.problem, where=where, hint=error.hint) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if isinstance(refused := first.get("ctx", {}).get("error"), Refused):
            key = ".".join(map(str, (*first["loc"], refused.key))).strip(".")
            raise UserError(f"{key}: {refused.problem}", where=where, hint=refused.hint or hint) from error
        problem = ": ".join([".".join(map(str, first["loc"])), first["msg"].replace("Input should be", "expected")])
        actual = "" if first["type"] == "missing" else f", found {shown_value(repr(first['input']))}"
        others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise UserError(problem.removeprefix(": ") + actual + others, where=where, hint=hint) from error


def _each_once(pairs: list[tuple[str, object]]) -> JsonObject:
    value: JsonObject = {}
    for key, entry in pairs:
        if key in value:
            raise ValueError(f"key {shortened(key, 60)!r} stands twice")
        value[key] = entry
    return value


def _decoded(data: bytes, where: str, hint: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind, cure = other_kind(data[:HEAD]) or (None, hint)
        if kind is not None:
            raise UserError(f"{kind}, and no text in UTF-8", where=where, hint=cure) from error
        problem = f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}"
        raise UserError(problem, where=where, hint=hint) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, flush to the disk, rename: nobody meets half a file. Ranks may write the same at once. Raises
    `UserError` where the disk is full, or the folder is not ours.
    """
    # Ranks in containers of two nodes may have one process id.
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise unwritable(path, error, needed=len(data)) from error
    flush(path.parent)


def flush(path: str | Path) -> None:
    """Returns once the content of a file, or a folder's list of names, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines, or nothing at all; a line that a killed writer cut off is ended first. Raises `UserError`
    where the disk is full, or the file is not ours.
    """
    size: int | None = None
    try:
        # Without a buffer, which would be written once more when the file is closed.
        with open(path, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                lines = lines if file.read(1) == b"\n" else b"\n" + lines
            left = memoryview(lines)
            while left:
                left = left[file.write(left) :]
    except OSError as error:
        if size is not None:
            with suppress(OSError):
                os.truncate(path, size)
        raise unwritable(path, error, needed=len(lines)) from error


# What libraries say of a full disk in errors of their own: safetensors, sqlite, torch's writer of archives.
_FULL_TEXTS = ("no space left", "disk is full", "quota exceeded", "file too large", "unexpected pos", "failed writing")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that a disk, a quota or a file's largest size is used up."""
    return any(
        (isinstance(error, OSError) and error.errno in _FULL) or any(text in str(error).lower() for text in _FULL_TEXTS)
        for error in causes(error)
    )


def unwritable(path: Path, error: BaseException, *, needed: int | None = None) -> UserError:
    """The error to raise where a file or folder cannot be written; `needed` are bytes."""
    full = is_full(error)
    # The operating system's words, where it said the first of the errors that led to this one.
    said = [one.strerror for one in causes(error) if isinstance(one, OSError) and one.strerror]
    problem = f"cannot be written: {said[-1] if said else os.strerror(errno.ENOSPC) if full else error}"
    if not full and path.is_dir():
        hint = "remove it, and run the same command again: what is missing is made again"
        return UserError(f"a folder stands in the place of a file ({problem})", where=str(path), hint=hint)
    if not full:
        return UserError(problem, where=str(path), hint="give a folder that is yours, and run the same command again")
    known = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(known).free
    room = f"{free:,} bytes are there" if needed is None else f"{needed:,} bytes are needed, and {free:,} are there"
    hint = "make room, and run the same command again: it goes on from what is saved"
    return UserError(f"{problem}; {room}", where=str(path), hint=hint)


@contextmanager
def full_disk_is_told(folder: Path) -> Iterator[None]:
    """Errors inside that come of a full disk become a `UserError` that names the folder that was written to."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise unwritable(folder, error) from error


def sweep(folder: Path) -> None:
    """Remove what killed writers left half written under `folder`, where nobody writes now: files and folders named
    `*.partial`, and the files beside which safetensors writes (`.tmp` and six letters or digits).
    """
    for path in sorted((*folder.rglob("*.partial"), *folder.rglob(".tmp" + 6 * "[0-9A-Za-z]"))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def share_as_usual(path: Path) -> None:
    """Give a file that its owner alone may read the rights that the umask gives.

    safetensors writes to temporary files, which are private: colleagues could read all of a run but its weights.
    """
    if stat.S_IMODE(path.stat().st_mode) == 0o600:
        umask = os.umask(0o077)  # the only way to read it
        os.umask(umask)
        path.chmod(0o666 & ~umask)


def check_new(destination: Path) -> None:
    """Raises `UserError` where the destination exists."""
    if destination.exists():
        raise UserError("the destination exists", where=str(destination), hint="name another, or remove it first")


def fetch_command(place: str | Path) -> str | None:
    """The command that writes the folder of a place, where none is here; None for places that it does not write."""
    for name, parent in FETCHED.items():
        folder = Path(parent, name)
        if Path(place).is_relative_to(folder) and not folder.exists():
            return f"draftsmith fetch {name}" + (" --pictures all" if name == "emoji" else "")
    return None


@contextmanager
def new_folder(destination: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder beside the destination to write to; it becomes the destination once everything is written. Raises
    `UserError` where the destination exists, and is not to `replace`.
    """
    if not replace:
        check_new(destination)
    aside = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.rglob("*"):
            if path.is_file() and not path.is_symlink():
                share_as_usual(path)
        if replace:
            shutil.rmtree(destination, ignore_errors=True)
        check_new(destination)  # somebody may have been quicker
        os.replace(aside, destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
