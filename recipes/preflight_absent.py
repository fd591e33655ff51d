"""Findings of data that is not on disk: which files, and how to get or name them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.words import counted
from ..data.records.mixture import Name, missing_files, missing_hint
from ..data.records.table_records import TableRecords
from ..trainers.run.context import Context
from .finding import Finding, Level, fault


def absent(
    subject: str, paths: Sequence[str], context: Context, cure: str | None = None, *, is_fetched: bool = False
) -> Finding:
    """A fault, which stops a run before its first stage; a warning where a stage may fetch or write what is missing."""
    is_ours = all(_is_ours(path, context) for path in paths)
    place, fetch = f"name another place: {subject}.path=...", "fetch it before the run"
    level: Level = "warning" if is_fetched or is_ours else "fault"
    what = f"not on disk: {', '.join(paths)}"
    hint = f"{place}, or {fetch}: {cure}" if cure else f"{fetch}, or {place}"
    return Finding(level, subject, what, hint, is_absent=True)


def absent_records(subject: str, files: Sequence[Name], context: Context) -> Finding:
    """Of a section's files, some of which are missing."""
    missing = missing_files(files)
    # Of the section alone: what a mixture or tars name is not mended with its `path`. A stage may still write ours.
    named = {str(Path(file)) for file in files if isinstance(file, str | Path)}
    folders = [p for p in missing if p in named and Path(p).is_dir() and not _is_ours(p, context)]
    is_fetched = any(isinstance(file, TableRecords) for file in files)  # a table may be a Hub id
    others = [path for path in missing if path not in folders]
    found = absent(subject, others, context, missing_hint(files), is_fetched=is_fetched)
    if not folders:
        return found
    what = "; ".join(f"{path} is a folder, and a file of records is expected" for path in folders)
    if len(files) == 1:
        return fault(subject, what, f"name a file: {subject}.path={folders[0]}/...")
    hint = f"name files in the place of {counted(len(folders), 'folder')} in {subject}.path"
    return fault(subject, f"{what}; {found.what}", f"{hint}; {found.hint}") if others else fault(subject, what, hint)


def _is_ours(path: str, context: Context) -> bool:
    """Whether it lies in the run's own output."""
    return Path(path).resolve().is_relative_to(context.folder.parent.resolve())
