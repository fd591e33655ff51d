"""`draftsmith bench`: a running server's speed, tau and acceptance on benchmarks, beside the same without drafts."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from ...core.errors import OK, UserError
from ...core.files import write_whole
from ...core.json_types import JsonObject, nulls
from ...core.secrets import redact, redact_markdown
from ..config.launch import say
from ..config.load import load
from .command import Argument, Command, recipe_arguments

SKIP = "on_error=skip"
_NOTE = (
    "Times are the client's. tau and acceptance are of the server's counters, over all passes that drafted. Identical: "
    "answers whose text is that of the server beside, where each conversation goes on from its own server's answers."
)


def _run(options: argparse.Namespace) -> int:
    from ...eval.engines.served_results import cells_section
    from ...eval.engines.server_bench import ChatServer, ServerBench
    from ...eval.tables import Items, ReportSection, html_page, markdown
    from ...trainers.evaluate.engine_conversations import conversations

    if min(options.tokens, 1 if options.limit is None else options.limit) < 1:
        raise UserError("--tokens and --limit are numbers above 0", hint="see draftsmith bench --help")
    benchmarks, run = _benchmarks(options)
    server, beside = (url and ChatServer(url, options.model, options.timeout) for url in (options.url, options.beside))
    bench = ServerBench(
        server, beside, _numbers(options.at_once), options.temperature, options.tokens, options.seed, say
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        sets = conversations(benchmarks, Path(folder), run=run, limit=options.limit, say=say)
        cells, answers = bench.measure(sets)
    about = {
        "command": options.typed, "model": server.model, "temperature": options.temperature,
        "max_new_tokens": options.tokens,
    } | ({} if beside is None else {"plain decoding": options.beside})  # fmt: skip
    section, draw = cells_section(cells, server.engine, options.url)
    settings = Items(tuple(f"{name}: {value}" for name, value in about.items()))
    section = ReportSection(section.title, (settings, *section.content, _NOTE, Items(tuple(bench.notes))))
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    draw(output)
    page = redact_markdown("\n".join(markdown(section, level=1)))
    texts = {
        "bench.md": page,
        "bench.json": redact(json.dumps(nulls({"about": about, "notes": bench.notes, "cells": cells}), indent=1)),
        "answers.jsonl": "".join(f"{json.dumps(answer)}\n" for answer in answers),
        "bench.html": html_page(page, output),
    }
    for name, content in texts.items():
        write_whole(output / name, content.encode())
    say(page)
    say("written: " + ", ".join(str(output / name) for name in texts))
    return OK


def _benchmarks(options: argparse.Namespace) -> tuple[JsonObject, Path]:
    """The benchmarks that are named, and the folder of the run whose data they may read."""
    from ...trainers.evaluate.engine_conversations import benchmark_at
    from ...trainers.evaluate.evaluate_settings import EvaluateSettings

    path = Path(options.name)
    if path.suffix in (".json", ".jsonl", ".parquet") or (path.is_dir() and not (path / "recipe.yaml").is_file()):
        if refused := [setting for setting in options.settings if setting != SKIP]:
            raise UserError(f"{refused[0]}: settings are of a recipe, and {path} is none; of records there is {SKIP}",
                            hint="options of this command begin with --: draftsmith bench --help")  # fmt: skip
        return benchmark_at(path, options.images, "skip" if options.settings else "strict"), path
    loaded = load(recipe_arguments(options))
    stages = [stage for stage in loaded.recipe.stages.values() if isinstance(stage, EvaluateSettings)]
    if not stages:
        raise UserError("the recipe has no stage of kind evaluate, and so no benchmarks", where=str(loaded.path),
                        hint="name another recipe, or a file of records")  # fmt: skip
    return dict(stages[0].benchmarks), Path(loaded.recipe.output)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise UserError(f"--at-once {text} is no list of numbers", hint="write --at-once 1,8,32")
    return numbers


COMMAND = Command(
    name="bench",
    summary="measure a running vLLM or SGLang server on benchmarks, beside the same without drafts",
    description="Ask a running OpenAI-style server the conversations of benchmarks, streamed, so many at once, with\n"
    "its own answers between their turns and pictures as data: URLs. The page has tokens/s, time to the first\n"
    "token and between tokens, and of vLLM's counters tau and acceptance by position. With a plain server of the\n"
    "same model beside it, also the speedup and how many answers are identical. It is printed, and written to a\n"
    "folder: bench.md, bench.html, bench.json, served.png, answers.jsonl.",
    examples=(
        ("draftsmith bench http://localhost:8000 data/held_out.json --images data/images", "records of your own"),
        ("draftsmith bench http://localhost:8000 data/MMSpec/test --beside http://localhost:8001", "with the speedup"),
        ("draftsmith bench http://localhost:8000 mmspec-qwen2.5-vl-7b --limit 80 --at-once 1,16", "a recipe's sets"),
    ),
    arguments=(
        Argument("url", "the server, as http://localhost:8000; its key is taken from OPENAI_API_KEY"),
        Argument("name", "records (JSON, JSONL), MMSpec or SPEED-Bench as published, a directory of sets; or a recipe, "
                 "whose first evaluate stage names benchmarks", {"metavar": "REQUESTS"}),
        Argument("settings", f"settings that win over the recipe's; of records {SKIP} alone, which leaves out bad ones",
                 {"nargs": "*", "metavar": "key=value"}),
        Argument("--beside", "a server of the same model that drafts nothing", {"metavar": "URL"}),
        Argument("--images", "the folder of the records' pictures (the file's own)", {"metavar": "FOLDER"}),
        Argument("--at-once", "conversations side by side (1,8,32)", {"default": "1,8,32", "metavar": "N,N"}),
        Argument("--limit", "conversations of each set (all)", {"type": int, "metavar": "N"}),
        Argument("--tokens", "tokens of an answer, at most (256)", {"type": int, "default": 256, "metavar": "N"}),
        Argument("--temperature", "0 is greedy (0)", {"type": float, "default": 0.0, "metavar": "T"}),
        Argument("--seed", "of drawn answers (0)", {"type": int, "default": 0, "metavar": "N"}),
        Argument("--model", "the model's name at the server, where it has several"),
        Argument("--timeout", "without a byte, after which a server is taken for hung (600)",
                 {"type": float, "default": 600.0, "metavar": "SECONDS"}),
        Argument("--output", "folder for the pages (bench)", {"default": "bench"}),
    ),
    run=_run,
)  # fmt: skip
