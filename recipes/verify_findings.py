"""Findings of `draftsmith verify`: a published folder's files, its manifest, and what its stored prompt gives here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..core.checksums import SUMS, check_sums, read_sums
from ..core.errors import UserError
from ..core.files import open_data
from ..eval.published import LOST_TARGET, fetch, lost_target, read_published
from ..eval.stored_prompt import reproduce
from ..models.drafters.manifest import MANIFEST
from .finding import Finding, any_fault, fault, ok

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")


def verify(
    source: str,
    target: Mapping[str, str] | None,
    revision: str | None = None,
    *,
    files_only: bool = False,
    allow_import: bool = False,
) -> list[Finding]:
    """Check a published folder or Hub id. Nothing of a folder with a fault among its files is loaded.

    Args:
        target: part -> Hub id or directory; None: as the manifest names the target.
        files_only: leave the stored prompt alone.
        allow_import: import the packages that the manifest names.

    Raises:
        UserError: there is no such folder or repository, or the target is not known.
    """
    folder = fetch(source, revision)
    findings = [_files(folder), *_pickles(folder), _manifest(folder, allow_import)]
    if files_only:
        return findings
    lost = fault("target", f"{LOST_TARGET}",
                 "give its folder (--target FOLDER), or check the files alone (--files-only)")  # fmt: skip
    unplaced = target is None and lost_target(folder)
    if any_fault(findings):  # all that is in the way at once
        return [*findings, lost] if unplaced else findings
    if unplaced:
        raise UserError(lost.what, where=str(folder / MANIFEST), hint=lost.hint)
    return [*findings, _stored_prompt(folder, target, allow_import)]


def _files(folder: Path) -> Finding:
    if not (folder / SUMS).is_file():
        return fault("files", f"{folder / SUMS} is missing: nothing shows whether a file was changed",
                     "fetch the folder again, or publish it anew")  # fmt: skip
    try:
        check_sums(folder)
        listed = read_sums(folder)
    except UserError as error:
        return _fault("files", error)
    size = sum((folder / name).stat().st_size for name in listed)
    return ok("files", f"{len(listed)} files, {size / 2**20:,.1f} MiB, as they were published")


def _pickles(folder: Path) -> list[Finding]:
    """Files that some reader may unpickle, which can run what their maker wrote: what is published here has none."""
    hint = "remove them, or fetch the folder from who published it: weights are in model.safetensors alone"
    found = sorted(path for path in folder.rglob("*") if path.is_file() and _is_pickle(path))
    return [fault("pickles", f"{path} is a pickle, and may run code where it is loaded", hint) for path in found]


def _is_pickle(path: Path) -> bool:
    """By its name, or by how it begins: pickle's protocols from 2 on, or torch's archive around one."""
    if path.suffix.lower() in PICKLES:
        return True
    with open_data(path) as file:
        head = file.read(4)
    pickled = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5
    return pickled or (head == b"PK\x03\x04" and path.suffix.lower() not in (".npz", ".zip"))


def _manifest(folder: Path, allow_import: bool) -> Finding:
    try:
        section = read_published(folder, allow_import=allow_import)
    except UserError as error:
        return _fault("manifest", error)
    target = section.target.get("path") or "a target that its maker trained"
    return ok("manifest", f"{section.drafter.get('kind')} drafter for {target}, method {section.decoding.name}")


def _stored_prompt(folder: Path, target: Mapping[str, str] | None, allow_import: bool) -> Finding:
    try:
        expected = reproduce(folder, target=target, allow_import=allow_import)
    except UserError as error:
        return _fault("stored prompt", error)
    cycles = len(expected.accepted)
    return ok("stored prompt", f"{len(expected.tokens)} tokens in {cycles} cycles, tau {expected.tau:.2f}: "
              "the same tokens and accepted drafts as published")  # fmt: skip


def _fault(subject: str, error: UserError) -> Finding:
    place = f" ({error.found_at})" if error.found_at else ""
    return fault(subject, f"{error.problem}{place}", error.hint or "fetch it again, or publish it anew")
