"""`draftsmith logs`: turn a log of chat completions into records to train on."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from ...core.pages import page
from ..launch import say
from .command import OK, Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ...data.chat_logs import PICTURES, RECORDS, SKIPPED, convert

    destination = Path(options.destination)
    images = None if options.images is None else Path(options.images)
    found = convert(Path(options.log), destination, images=images, skip=options.skip, any_system=options.any_system)
    say(f"written  {destination / RECORDS}: {found.records:,} records, {found.turns:,} answers")
    say(f"         {destination / PICTURES}: {found.pictures:,} different pictures")
    for reason, count in found.skipped.most_common():
        say(f"left out {count:,}: {reason}")
    if found.skipped:
        say(f"         {destination / SKIPPED} lists them")
    section = {"format": {"system": found.system}} if not options.any_system else {}
    section |= {"data": {"path": str(destination / RECORDS), "images": str(destination)}}
    say(yaml.safe_dump(section, default_flow_style=None, sort_keys=False, allow_unicode=True).rstrip())
    return OK


COMMAND = Command(
    name="logs",
    summary="turn a log of chat completions into records to train on",
    description="Write a JSONL log of an OpenAI-style server (requests with messages, and their answers) as records\n"
    "and pictures that recipes read. Pictures are data: URLs or local files; nothing is fetched. The recipe's\n"
    f"sections for them are printed. {page('how-to/adapt.md')} trains on such a log.",
    examples=(
        ("draftsmith logs traffic.jsonl data/traffic", "stops at the first line that cannot be used"),
        ("draftsmith logs traffic.jsonl data/traffic --skip --images /data/uploads", "leaves such lines out"),
    ),
    arguments=(
        Argument("log", "a JSONL file, a request and its answer on each line"),
        Argument("destination", "a directory that does not exist yet; it appears whole or not at all"),
        Argument("--images", "the folder that local pictures lie in (default: the log's)"),
        Argument("--skip", "leave out lines that cannot be used, and list them", {"action": "store_true"}),
        Argument("--any-system", "keep lines whatever their system message, which training does not see",
                 {"action": "store_true"}),
    ),
    run=_run,
)  # fmt: skip
