"""`draftsmith audit`: does a server that drafts write what its target alone would? One page, and an exit code."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ...core.errors import CRASH, FAULTS, OK, UserError
from ...core.files import write_whole
from ...core.json_types import JsonObject, nulls
from ...core.secrets import redact, redact_markdown
from ..config.launch import say
from .command import Argument, Command

_KINDS = (
    "Of greedy answers, each token is checked by the plain server, which goes on from the drafting server's prefix "
    "after each difference. A drafted token that was kept unverified, a bonus token of the draft or a missed end token "
    "would be a fault; a tie, or arithmetic, is what two right servers part by.",
    "Drawn tokens are compared with the plain server's law of each: a greedy choice or a wrong temperature changes the "
    "surprise, a lossy acceptance the typicality (log p + entropy), a wrong cut the tokens outside, an unused "
    "residual or a sibling that is tried twice the counts of single tokens in one context.",
    "First tokens, which no draft made, are a group of their own: a fault there is of the server's sampling.",
)
_LUCK = 1.1  # tokens/s over tau times the plain server's that times of a quiet machine may reach
_VERDICTS = {
    "fault": "fault", "no fault": "no fault was seen",
    "not enough power": "no fault was seen, but too little was tried to rule one out",
}  # fmt: skip
_TASKS = ("Explain to a child:", "Write a short poem about", "List five facts about", "Write a Python function about",
          "Tell a joke about", "Translate into French and German:")  # fmt: skip
_TOPICS = ("the tides of the sea", "a train that is late", "prime numbers", "bread and butter")


def _run(options: argparse.Namespace) -> int:
    from ...eval.engines.audit import SHOWN, audit
    from ...eval.engines.exact_law import Sampling
    from ...eval.engines.server import Server
    from ...eval.tables import html_page, markdown

    if min(options.limit, options.tokens) < 1 or min(options.draws, options.top_k or 0) < 0:
        raise UserError("--limit and --tokens are numbers from 1, --draws and --top-k from 0",
                        hint="see draftsmith audit --help")  # fmt: skip
    samplings = [Sampling(), Sampling(top_k=8, top_p=0.8)]
    if (options.temperature, options.top_k, options.top_p) != (None, None, None):
        chosen = Sampling(options.temperature or 1.0, options.top_k or 0, options.top_p or 1.0)
        if not (0 < chosen.top_p <= 1 and chosen.temperature > 0 and chosen.top_k < SHOWN):
            raise UserError(f"no draws with {chosen}", hint=f"T above 0, top-k below {SHOWN}, top-p above 0, at most 1")
        if chosen.temperature != 1 and (chosen.top_k == 0 or chosen.top_p < 1):
            raise UserError(f"{SHOWN} log-probabilities do not tell the law at {chosen}, and engines differ in it",
                            hint="at another temperature than 1 give --top-k, and no --top-p")  # fmt: skip
        samplings = [chosen]
    drafting, plain = (Server(url, options.model, options.timeout) for url in (options.url, options.beside))
    messages = _messages(options)
    prompts = [plain.prompt(one) for one in messages]
    if isinstance(prompts[0], tuple) and drafting.prompt(messages[0]) != prompts[0]:
        raise UserError("the servers write a prompt in other tokens, and so are not of one target", where=options.url,
                        hint="start both with one model and one chat template")  # fmt: skip
    found = audit(drafting, plain, prompts, samplings, count=options.tokens, most_draws=options.draws,
                  seed=options.seed, say=say)  # fmt: skip
    about = {"command": options.typed, "model": drafting.model, "engine": drafting.engine,
             "plain server": options.beside, "prompts": len(prompts), "tokens of an answer": options.tokens,
             "sampling": "; ".join(map(str, samplings))}  # fmt: skip
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    page = redact_markdown("\n".join(markdown(_section(found, about, options.url), level=1)))
    texts = {"audit.md": page, "audit.json": redact(json.dumps(nulls(_as_json(found, about)), indent=1)),
             "audit.html": html_page(page, output)}  # fmt: skip
    for name, content in texts.items():
        write_whole(output / name, content.encode())
    say(page)
    say("written: " + ", ".join(str(output / name) for name in texts))
    return CRASH if found.faults else FAULTS if found.missing else OK


def _messages(options: argparse.Namespace) -> list[list[JsonObject]]:
    """The prompts, as messages: a server has its own chat template and image processor. Raises `UserError`: a record
    cannot be read, or none can.
    """
    if options.name is None:
        texts = [f"{task} {topic}" for topic in _TOPICS for task in _TASKS]
        return [[{"role": "user", "content": text}] for text in texts[: options.limit]]
    from ...core.tracking import TrackingConfig
    from ...data.conversations import PromptFormat
    from ...data.dataset import ConversationData
    from ...data.records.logged_pictures import Conversation
    from ...data.records.skipped import Listed, SkippedLog
    from ...data.suites.suite import INDEX
    from ...data.suites.turn_files import set_at
    from ...trainers.evaluate.benchmarks import SetsBenchmark
    from ...trainers.evaluate.requests import Opening
    from ...trainers.run.context import Context, EngineConfig
    from ...trainers.run.stage_records import data_files

    path, of_the_server = Path(options.name), cast(Any, None)  # target and processor
    data = ConversationData(path=str(path), images=options.images, on_error=options.on_error, max_samples=options.limit)
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        context = Context(
            name="audit", folder=Path(folder) / "audit", seed=0, fingerprint="", target=of_the_server, drafter=None,
            engine=EngineConfig(), tracking=TrackingConfig(), inputs={}, say=say,
        )  # fmt: skip
        opening = Opening(context, of_the_server, PromptFormat(), [])
        if (name := set_at(path)) is not None or (path / INDEX).is_file():
            section = SetsBenchmark(kind="sets", data=data, sets=None if name is None else [name])
            suite = opening.suite(section)
            talks = [Conversation(row["id"], row, suite.folder) for one in section.names or suite.about.sets
                     for row in suite.first_turns(one, section.convention, data.max_samples)]  # fmt: skip
        else:
            dataset = opening.dataset(data, data_files(data, context))
            images = [dataset.folders(file)[0] for file in range(len(dataset.records))]
            talks = [  # each record up to its last answer
                Conversation(dataset.sample_id(n), dataset.record(n), images[dataset.places[n, 0]], data.allow_outside)
                for n in range(len(dataset))
            ]
        found = []
        for talk in talks:
            try:
                found.append(talk.messages())
            except UserError as error:
                if data.on_error == "strict":
                    raise
                say(f"left out {talk.name}: {error.problem}")
        if (listed := SkippedLog(context.folder / "skipped.jsonl").listed()) != Listed():
            say(str(listed))
    if not found:
        raise UserError(f"no conversation of {path} can be read", hint="check its folder of pictures")
    return found


def _as_json(found: Any, about: JsonObject) -> JsonObject:
    """The page's values. `found`: `Findings`, whose module only this command imports."""
    draws = found.draws
    return {
        "about": about, "verdict": found.verdict,
        "faults": found.faults, "missing": found.missing, "seen_1_in": found.seen, "cells": found.cells,
        "greedy": {"answers": found.answers, "ended": found.ended, "tokens": found.tokens, "noise": found.noise,
                   "differences": [vars(one) for one in found.differences]},
        "drawn": {"draws": draws.number, "p_values": draws.p_values, "bound": draws.bound,
                  "tokens": {group: some.num_tokens for group, some in draws.evidence.items()},
                  "passed_over": sum(some.passed_over for some in draws.evidence.values()),
                  "speculation": found.drawn_speculation},
    }  # fmt: skip


def _disturbed(cells: Sequence[JsonObject]) -> list[str]:
    """Sentences on speeds that cannot be: a pass gives tau tokens, and takes no less than one of plain decoding."""
    plain = {cell["at once"]: cell["tokens_per_s"] for cell in cells if not cell["drafting"]}
    found = []
    for cell in cells:
        base = plain[cell["at once"]]  # 0: it ended each answer at once
        if cell["drafting"] and cell["tokens_per_s"] > _LUCK * cell.get("tau", math.inf) * base > 0:
            found.append(
                f"{cell['at once']} at once: {cell['tokens_per_s'] / base:.1f} times the plain server's "
                f"tokens/s by a tau of {cell['tau']:.2f} cannot be: other work slowed it; time both again"
            )
    return found


def _section(found: Any, about: JsonObject, url: str) -> Any:
    """The page, a `ReportSection`."""
    from ...eval.engines.audit import NEEDED
    from ...eval.engines.exact_law import TESTS
    from ...eval.tables import Column, Items, ReportSection, Table, text

    passed = sum(some.passed_over for some in found.draws.evidence.values())
    draws, kinds = found.draws, Counter(one.verdict for one in found.differences)
    worst = sorted(found.differences, key=lambda one: (one.verdict != "fault", -one.gap))[:10]
    untried = "other lengths and settings, more requests at once, faults below the power" + (
        "" if found.ended else ", end tokens (no greedy answer ended by itself)")  # fmt: skip
    why = (*found.faults, *found.missing, *_disturbed(found.cells))
    depth = max(len(cell.get("accepted", ())) for cell in found.cells)
    speeds = (
        ("drafting" if cell["drafting"] else "plain", cell["at once"], cell["request_s"], cell["tokens_per_s"],
         cell.get("tau"), *(cell.get("accepted", []) + [None] * depth)[:depth])
        for cell in found.cells
    )  # fmt: skip
    content: list[Any] = [
        f"Verdict: **{_VERDICTS[found.verdict]}**.", *([Items(why)] if why else []),
        Items(tuple(f"{name}: {value}" for name, value in about.items())),
        Table("What was tried", (text("part"), Column("tokens", ",d"), Column("seen: 1 in", ",.0f"),
                                 Column("asked for: 1 in", "d")),
              (("greedy", found.tokens, found.seen["greedy"], NEEDED["greedy"]),
               (f"drawn, {draws.number} draws", draws.evidence["drafted"].num_tokens, found.seen["drawn"],
                NEEDED["drawn"])),
              note="The smallest fault that would have been seen with 95%: greedy, one drafted token in so many kept "
                   "unverified; drawn, the likeliest token in place of a draw in one of so many places."),
        f"Greedy answers part in {kinds['arithmetic']} places by arithmetic, in {kinds['tie']} by a tie and in "
        f"{kinds['fault']} by a fault; noise of a log-probability: {found.noise:.1e}.",
        *([] if not worst else [Table(
            "Places where answers part", (text("verdict"), *(Column(name, "d") for name in
            ("at once", "prompt", "place", "drafting", "plain")), Column("gap", ".1e")),
            tuple((one.verdict, one.at_once, one.prompt, one.place, one.drafting, one.plain,
                   None if math.isinf(one.gap) else one.gap) for one in worst),
            note=f"{len(worst)} of {len(found.differences)}; prompts and places from 0, tokens by id. gap: nats by "
                 "which the plain server holds its likeliest token to be likelier. arithmetic: when it reads the "
                 "answer so far as a prompt, it writes the drafting server's token, too. tie: it does not, and the gap "
                 f"is at most {found.widest_tie:.1e}, twice the largest noise.")]),
        Table("Drawn tokens: p of each test", (text("tokens"), Column("n", ",d"),
                                               *(Column(test, ".1e") for test in TESTS)),
              tuple((group, draws.evidence[group].num_tokens, *(tests[test] for test in TESTS))
                    for group, tests in draws.p_values.items()),
              note=f"A fault is below {draws.bound:.1e}, which allows for all tests and for stopping early; "
                   "where nothing is wrong most are 1."
                   + (f" {passed:,} tokens are left out: what top-p keeps there hangs on noise or on "
                      "tokens that are not shown." if passed else "")),
        Table("Speed and acceptance", (text("server"), Column("at once", "d"), Column("request, s", ".3f"),
              Column("tokens/s", ",.1f"), Column("tau"),
              *(Column(f"accepted at {place}", ".0%") for place in range(1, depth + 1))), tuple(speeds),
              note="Greedy answers. tau is 1 and the accepted tokens of a draft, by the server's own counters."),
        "What a fault would have looked like:", Items((*_KINDS, f"What was not tried: {untried}.")),
    ]  # fmt: skip
    return ReportSection(f"Audit of {url}", tuple(content))


COMMAND = Command(
    name="audit",
    summary="does a running server that drafts write what its target alone would? beside a plain server",
    description="Ask a vLLM, llama.cpp or SGLang server that drafts, and one of the same model that does not. Greedy\n"
    "answers are checked token by token, and drawn tokens against the plain server's exact law. The page has the\n"
    "verdict, what would have been seen, each difference, times, and tau and acceptance of the server's counters.\n"
    "It is printed, and written to a folder: audit.md, audit.html, audit.json. Exit code 0: no fault was found,\n"
    "1: a fault, 3: too little was tried to say so. Nobody else may use the drafting server meanwhile.",
    examples=(
        ("draftsmith audit http://localhost:8000 --beside http://localhost:8001", "with prompts of its own"),
        ("draftsmith audit http://localhost:8000 data/held_out.json --beside http://localhost:8001", "with yours"),
    ),
    arguments=(
        Argument("url", "the server that drafts; the key of both is taken from OPENAI_API_KEY"),
        Argument("name", "records (JSON, JSONL), MMSpec or SPEED-Bench as published, a directory of sets "
                 "(24 short prompts)", {"metavar": "REQUESTS", "nargs": "?"}),
        Argument("--beside", "a server of the same model that drafts nothing", {"metavar": "URL", "required": True}),
        Argument("--images", "the folder of the records' pictures (the file's own)", {"metavar": "FOLDER"}),
        Argument("--on-error", "of records that cannot be read: strict, or skip (strict)",
                 {"choices": ("strict", "skip"), "default": "strict"}),
        Argument("--limit", "conversations of each set, first questions alone (24)",
                 {"type": int, "default": 24, "metavar": "N"}),
        Argument("--tokens", "tokens of a greedy answer, at most (96)", {"type": int, "default": 96, "metavar": "N"}),
        Argument("--draws", "drawn answers, at most; 0: greedy alone (1600)",
                 {"type": int, "default": 1600, "metavar": "N"}),
        Argument("--temperature", "of draws (half at 1, half at 1 with top-k 8 and top-p 0.8)",
                 {"type": float, "metavar": "T"}),
        Argument("--top-k", "of draws; 0: no cut", {"type": int, "metavar": "K"}),
        Argument("--top-p", "of draws; 1: no cut", {"type": float, "metavar": "P"}),
        Argument("--seed", "of the first draw (0)", {"type": int, "default": 0, "metavar": "N"}),
        Argument("--model", "the model's name at the servers, where they have several"),
        Argument("--timeout", "without a byte, after which a server is taken for hung (600)",
                 {"type": float, "default": 600.0, "metavar": "SECONDS"}),
        Argument("--output", "folder for the pages (audit)", {"default": "audit"}),
    ),
    run=_run,
)  # fmt: skip
