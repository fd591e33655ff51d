#!/usr/bin/env python
"""Look at cached states of a target, or check them. How large they will get, a recipe's dry run says.

    scripts/states.py show runs/sparrow/cache/states              what they are of, how many, and how they were rounded
    scripts/states.py show runs/sparrow/cache/states --sample 3   one record
    scripts/states.py verify runs/sparrow/cache/states ...        read all and compare every checksum

A folder is a stage's `states` folder, or the stage's own. Exits with 2 where a file is missing or damaged, naming it.
"""

import argparse
import json
import sys
from pathlib import Path

from draftsmith.core.errors import UserError
from draftsmith.data.shards.shards import ShardReader
from draftsmith.data.states.estimate import shown
from draftsmith.data.states.reader import StatesReader


def folder_of(name: str) -> Path:
    """The folder of states: `name` itself, or the one inside a stage's folder."""
    inner = Path(name) / "states"
    return inner if inner.is_dir() else Path(name)


def verify(names: list[str]) -> None:
    """Read every folder whole and compare checksums. Raises `UserError` where one is damaged."""
    for name in names:
        reader = ShardReader(folder_of(name))
        reader.verify()
        size = sum(shard.bytes for shard in reader.shards)
        print(f"{name}: {len(reader):,} samples in {len(reader.shards)} shards, {shown(size)}: all as written")


def show(name: str, sample: int | None) -> None:
    """Print what a cache is of, or one of its records."""
    reader = StatesReader([folder_of(name)])
    if sample is not None:
        show_sample(reader, sample)
        return
    shards = reader.shards[0]
    size = sum(shard.bytes for shard in shards.shards)
    lengths, visual = reader.column("length"), reader.column("visual")
    print(f"{len(reader):,} samples, {int(visual.sum()):,} with pictures; {len(shards.shards)} shards, {shown(size)}")
    print(f"{shown(size / len(reader))} a sample; {lengths.mean():,.0f} places, the longest {lengths.max():,}")
    print(f"{reader.column('supervised').sum():,} supervised tokens")
    for dtype, loss in shards.measured.get("head distribution", {}).items():
        print(f"{dtype}: KL {loss['kl']:.2e} to the exact distribution, {loss['agreement']:.2%} likeliest tokens stay")
    print(json.dumps(shards.identity, indent=1))


def show_sample(reader: StatesReader, sample: int) -> None:
    """Print one record: what is said of it, and its tensors."""
    if not 0 <= sample < len(reader):
        raise UserError(f"sample {sample} of {len(reader)}", hint="samples are counted from 0")
    row, info = reader[sample]
    print(json.dumps(info, indent=1))
    for name, tensor in row.items():
        print(f"{name:<24} {str(tensor.dtype).removeprefix('torch.'):<14} {list(tensor.shape)}")
    print(f"ids {row['ids'][:16].tolist()} ...; {int(row['loss_mask'].sum())} supervised")


def main(arguments: list[str] | None = None) -> int:
    """Verifies folders of states, or shows one. Returns the exit code: 0, or 2 after an error of the user."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify").add_argument("folders", nargs="+")
    shows = commands.add_parser("show")
    shows.add_argument("folder")
    shows.add_argument("--sample", type=int)
    given = parser.parse_args(arguments)
    try:
        if given.command == "verify":
            verify(given.folders)
        else:
            show(given.folder, given.sample)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
