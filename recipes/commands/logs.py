"""`draftsmith logs`: turn a log of chat completions into records to train on."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from ...core.errors import OK, UserError, counted, page
from ..config.launch import say
from .command import Argument, Command


def _run(options: argparse.Namespace) -> int:
    from ...data.records.chat_logs import HELD_OUT, RECORDS, SKIPPED, convert
    from ...data.records.logged_pictures import PICTURES

    if options.held_out < 0:
        raise UserError(f"--held-out {options.held_out} is below 0", hint="name a number of records")
    destination = Path(options.destination)
    images = None if options.images is None else Path(options.images)
    found = convert(
        [*map(Path, options.log)], destination, images=images, skip=options.skip, held_out=options.held_out,
        models=options.model, ignored=options.ignore,
    )  # fmt: skip
    say(f"written  {destination / RECORDS}: {counted(found.records, 'record')}")
    if options.held_out:
        fewer = f" of {options.held_out:,} asked for" if found.held_out < options.held_out else ""
        say(f"         {destination / HELD_OUT}: {counted(found.held_out, 'record')}{fewer} to measure with")
    say(f"         {destination / PICTURES}: {counted(found.pictures, 'different picture')}")
    has = "".join(f"; {count:,} with {what}" for what, count in found.has.items() if count)
    say(f"         {counted(found.answers, 'answer')} to learn{has}")
    for model, count in found.models.most_common():
        if len(found.models) > 1 or model:
            say(f"         {counted(count, 'answer')} of {model or 'no model by name'}")
    if found.repeated:
        say(f"         {counted(found.repeated, 'record')} that say what an earlier one says")
    if found.questions:
        say(f"         {counted(found.questions, 'record')} without one, for a stage of kind regenerate to answer")
    for reason, count in found.skipped.most_common():
        say(f"left out {count:,}: {reason}")
    if found.skipped:
        say(f"         {destination / SKIPPED} lists them")
    # The target's own chat template writes what the server wrote: its system block, tools, pictures where they were.
    section: dict[str, object] = {"format": {"template": "chat", "image_rule": "verbatim"}}
    section |= {"data": {"path": str(destination / RECORDS), "images": str(destination)}}
    if options.held_out:
        apart = {"path": str(destination / HELD_OUT), "images": str(destination)}
        section |= {"benchmarks": {"held-out": {"data": apart}}}
    say(yaml.safe_dump(section, default_flow_style=None, sort_keys=False, allow_unicode=True).rstrip())
    return OK


COMMAND = Command(
    name="logs",
    summary="turn a log of chat completions into records to train on",
    description="Write a JSONL log of an OpenAI-style server (requests with messages, and their answers) as records\n"
    "and pictures that recipes read. System messages, tools, calls and reasoning are kept for each record, and\n"
    "each choice becomes one; answers that the server cut, errors and redacted texts are left out, and requests\n"
    "with fields that may have changed the prompt. A request without an answer becomes a question that a stage of\n"
    "kind regenerate answers. Pictures are data: URLs or local files; nothing is fetched. LiteLLM's logs and\n"
    "Langfuse's exports are read, too. The recipe's sections are printed.\n"
    f"{page('tutorials/chat-log-to-vllm.md')} goes on from there.",
    examples=(
        ("draftsmith logs traffic.jsonl data/traffic", "stops at the first line that cannot be used"),
        ("draftsmith logs traffic.jsonl data/traffic --skip --held-out 200", "leaves such lines out, keeps 200 apart"),
        ("draftsmith logs traffic.jsonl.gz data/traffic --images /data/uploads", "packed, with local pictures"),
    ),
    arguments=(
        Argument("log", "JSONL files, a request and its answer on each line, which may be packed with gzip; or folders",
                 {"nargs": "+"}),
        Argument("destination", "a directory that does not exist yet; it appears whole or not at all"),
        Argument("--images", "the folder that local pictures lie in (default: the log's)"),
        Argument("--skip", "leave out lines that cannot be used, and list them", {"action": "store_true"}),
        Argument("--model", "take answers of this model alone; several times, where it has several names",
                 {"action": "append", "default": [], "metavar": "NAME"}),
        Argument("--ignore", "a field of requests that changed no prompt; several times",
                 {"action": "append", "default": [], "metavar": "FIELD"}),
        Argument("--held-out", "records to write to held-out.jsonl instead, none of which shares a picture or a "
                 "conversation with the others", {"type": int, "default": 0, "metavar": "N"}),
    ),
    run=_run,
)  # fmt: skip
