"""Shards of finished stages that were deleted or damaged: their stage writes them again, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.errors import UserError
from ...core.results import DONE, Fault, faults, read_mark, sums_of, write_mark
from ...data.shards import shard_faults
from ...data.shards.shard_files import tar_path
from ...data.shards.shards import IDENTITY, MANIFEST, read_manifest
from .stage import Planned

# Shards of up to so many bytes are read before a stage that takes them runs: a second or two. Of more, each sample's
# checksum is compared when it is first read.
READ_BYTES = 4 << 30


@dataclass(frozen=True)
class Broken:
    """What is wrong with the shards of a finished stage.

    Args:
        sums: SHA-256 of each shard by the name of its tar; empty where the manifest is damaged, too.
    """

    faults: tuple[Fault, ...]
    sums: dict[str, str]

    def refusal(self, planned: Planned, maker: str, output: Path) -> UserError:
        """The error to raise where a stage takes these shards and they are not made again now."""
        things = ", ".join(sorted(thing for thing, name in planned.inputs.items() if name == maker))
        first, folder = self.faults[0], output / maker / str(planned.earlier[maker].stage.shards)
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return UserError(
            f"stage {planned.name} takes the {things} of stage {maker}, and {first.name} {first.problem}{more}",
            where=str(folder / first.name),
            hint=f'"stages=[{maker},{planned.name}]" writes again what is missing or damaged, and no more of {maker}',
        )  # fmt: skip


def find_broken(planned: Planned, folder: Path, *, is_read: bool) -> Broken | None:
    """Look at the shards of a finished stage; None: they are whole, or it has none.

    Args:
        is_read: a stage will read them. Otherwise only names and sizes are looked at.
    """
    if planned.stage.shards is None:
        return None
    place = folder / planned.stage.shards
    found = _unlike_the_list(folder, planned.stage.shards) if is_read else []
    if not any(fault.name == MANIFEST for fault in found):
        others = shard_faults.broken(place, read_bytes=READ_BYTES) if is_read else shard_faults.lost(place)
        found += [fault for fault in others if fault.name not in {f.name for f in found}]
    return Broken(tuple(found), _sums(place) if MANIFEST not in {f.name for f in found} else {}) if found else None


def drop(planned: Planned, folder: Path, broken: Broken, say: Callable[[str], None]) -> None:
    """Delete what is broken, so that the stage writes it."""
    assert planned.stage.shards is not None
    for fault in broken.faults:
        say(f"stage {planned.name}: {fault.name} {fault.problem}; it is written again")
    shard_faults.drop(folder / planned.stage.shards, broken.faults)


def compare(planned: Planned, folder: Path, broken: Broken, say: Callable[[str], None]) -> None:
    """Say whether what was written again has the bytes of before; where not, `done.json` lists the new ones."""
    assert planned.stage.shards is not None
    place = folder / planned.stage.shards
    mark, sums = read_mark(folder / DONE), _sums(place)
    now = sums_of(folder, [f"{planned.stage.shards}/{name}" for name in (IDENTITY, MANIFEST)])
    others = [name for name, value in sums.items() if broken.sums.get(name, value) != value]
    listed = {} if mark is None or mark.files is None else mark.files
    if not others and all(listed.get(name, value) == value for name, value in now.items()):
        say(f"stage {planned.name}: written again with the same bytes as before")
        return
    say(
        f"stage {planned.name}: warning: {', '.join(others) or MANIFEST} came out otherwise than before (on another "
        "device or version?); what was made from it before was made from other bytes"
    )
    if mark is not None and mark.files is not None:
        write_mark(folder / DONE, replace(mark, files={**mark.files, **now}))


def _unlike_the_list(folder: Path, shards: str) -> list[Fault]:
    """Those of the two files that bind the shards together that are not as `done.json` has them."""
    mark = read_mark(folder / DONE)
    names = [f"{shards}/{name}" for name in (IDENTITY, MANIFEST)]
    listed = {} if mark is None or mark.files is None else {n: mark.files[n] for n in names if n in mark.files}
    return [replace(fault, name=Path(fault.name).name) for fault in faults(folder, listed)]


def _sums(place: Path) -> dict[str, str]:
    return {tar_path(place, shard.index).name: shard.sha256 for shard in read_manifest(place).shards}
