"""An evaluation that a serving engine decodes: plainly and by each method, at each number of requests at once.

Each method has an engine of its own, one after the other. Plain decoding comes first: what the others wrote is compared
with its answers, and later turns of a conversation follow them.
"""

from __future__ import annotations

import shutil
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from ...core import ranks
from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject, listed
from ...data.conversations import end_ids
from ...eval.by_category import turns_section
from ...eval.engines.program import check_plugin, find_python, version_of
from ...eval.engines.served_results import disagreements, served_section
from ...eval.measured_rows import PLAIN, Row, read_rows
from ...models.drafters.base import PublishedDrafter
from ...models.drafters.lookup import NgramConfig, SuffixConfig
from ...models.formats.export import export_drafter, read_export
from ...models.formats.expressible import Prompts
from ...models.formats.plugin import MODULE, PACKAGE
from ...models.hub import config_value, read_config
from ..run.context import Context
from ..serve.engine_section import VllmEvaluation, engine_process
from .benchmarks import SetsBenchmark, of_class
from .drafters import Drafters, Drafting, Source
from .engine_measuring import ServedMeasuring
from .evaluate_settings import EvaluateSettings
from .methods import decoding_with
from .reporting import Reporting, device_name
from .requests import Opening
from .turns import turn_runs

EXPORTS = "exported"  # folder of the exported drafters, in the stage's
_SUFFIX = "arctic_inference"  # the module that vLLM's suffix method needs
_ROOM = 4  # cycles between a request's end and the engine's: vLLM drafts for none of a batch where one comes near


def run_in_engine(stage: EvaluateSettings, context: Context) -> None:
    """Measure and report. Raises `UserError`: several ranks, a method that the engine cannot run, or an engine that
    died three times.
    """
    section = stage.engine
    assert isinstance(section, VllmEvaluation)
    if ranks.world_size() > 1:
        raise UserError(
            f"{ranks.world_size()} ranks would each measure an engine, and it is one that is measured",
            key=f"stages.{context.name}.engine",
            hint="start one rank; engine.tensor_parallel_size spreads a target",
        )
    python = find_python(section.python, key=f"stages.{context.name}.engine.python")
    processor = context.processor()
    opening = Opening(context, processor, stage.format, [])
    sets = opening.all(stage.benchmarks)
    suites = of_class(stage.benchmarks, SetsBenchmark)
    counts = [int(part.dataset.column("images").max()) for part in sets]
    for talk in turn_runs(suites, opening):  # pictures of a conversation stand in its first turn
        records = talk.suite.first_turns(talk.name, talk.section.convention, talk.section.data.max_samples)
        counts += [len(listed(record.get("image"))) for record in records]
    most_pictures = max(counts, default=0)
    if context.device().type == "cpu" and max(stage.temperatures) > 0 and not version_of(MODULE, python):
        raise UserError(
            f"beside a drafter vLLM draws with wrong temperatures on a CPU, which {PACKAGE} repairs, and that is not "
            "installed in this Python", where=python,
            hint=f"{python} -m pip install ./serving/{PACKAGE} (in a checkout), or measure at temperature 0",
        )  # fmt: skip
    plans = [(None, {}), *_methods(stage, context, python, pictures=most_pictures > 0)]
    ends = end_ids(processor, stage.format) if stage.stop_at_end else ()
    drafting = [by for by, _ in plans if by is not None]
    rows, early = list[Row](), list[str]()
    drafted = max(more.get("speculative_config", {}).get("num_speculative_tokens", 0) for _, more in plans)
    config = read_config(str(context.target_source()), key="target", revision=context.target.revision)
    longest = stage.capacity + _ROOM * (drafted + 1)
    if (held := config_value(config.get_text_config(), "max_position_embeddings", None)) is not None:
        longest = min(longest, held - 1)
    for by, more in plans:
        context.say(f"vLLM: {PLAIN if by is None else by.title}")
        # It is started with its first job, if there is one left to do.
        with engine_process(
            section, context, key="engine", layers=None, max_length=longest, most_pictures=most_pictures, timed=True,
            more=more,
        ) as process:  # fmt: skip
            measuring = ServedMeasuring(
                stage, context, None, drafting, ends, processor.tokenizer, section=section, process=process,
                processor=processor, by=by,
            )  # fmt: skip
            for requests in sets:
                rows.extend(measuring.all([requests]))
            for talk in turn_runs(suites, opening):
                of_turns, said = talk.measure(measuring)
                rows.extend(of_turns)
                early += said
    if not rows:
        raise UserError("no request of any set could be read", where=str(context.folder / "skipped.jsonl"),
                        hint="check the folders of pictures")  # fmt: skip
    _report(stage, context, measuring, rows, version_of("vllm", python), list(dict.fromkeys(early)))


def _report(
    stage: EvaluateSettings,
    context: Context,
    measuring: ServedMeasuring,
    rows: list[Row],
    version: str,
    early: list[str],
) -> None:
    section, device = measuring.section, device_name(context.device())
    about = {
        "engine": f"vLLM {version}, {', '.join(map(str, section.concurrency))} requests at once, one process for plain "
                  "decoding and one for each method",
        "max_new_tokens": stage.max_new_tokens,
        "answers": "end at the end token" if stage.stop_at_end else "go on after the end token",
    }  # fmt: skip
    apart: list[str] = []
    content, figure = served_section(rows, device)
    figure(context.folder)
    first = section.concurrency[0]
    # Its tables are by method alone.
    turns = turns_section(
        [row for row in rows if row.concurrency == first], [*early, f"With {first} requests at once in vLLM."]
    )
    if section.beside is not None:
        # Our own loop's rows of the methods and settings that the engine has, with plain decoding's.
        place = attrgetter("benchmark", "turn", "budget", "temperature", "max_new_tokens", "method")
        beside, wanted = read_rows(context.inputs["report"] / "rows.jsonl"), set(map(place, rows))
        ours = [row for row in beside if not row.engine and place(row) in wanted]
        if not any(row.method != PLAIN for row in ours):
            raise UserError(
                f"stage {section.beside} measured none of these methods on these benchmarks, temperatures and lengths "
                "in our own loop", key=f"stages.{context.name}.engine.beside",
                hint="give both stages the same benchmarks, methods, temperatures and max_new_tokens",
            )  # fmt: skip
        apart, agreement = disagreements(rows, ours)
        about["our own loop"] = f"stage {section.beside}; {agreement}"
        rows = [*ours, *rows]
    sections = [content, *(part for part in [turns] if part is not None)]
    Reporting(measuring, rows, about, apart).write(*sections)


def _methods(
    stage: EvaluateSettings, context: Context, python: str, *, pictures: bool
) -> list[tuple[Drafting | None, JsonObject]]:
    """Every method with each of its drafters, exported, and the arguments of vllm.LLM. Raises `UserError`: the engine
    cannot run one; nothing was decoded yet.
    """
    no_pair: Any = None  # weights are exported from their folders, and not loaded beside a target
    drafters, plans = Drafters(stage, context, no_pair), list[tuple[Drafting | None, JsonObject]]()
    shutil.rmtree(context.folder / EXPORTS, ignore_errors=True)
    for name, method in stage.methods.items():
        for source in drafters.sources(name, method):
            key = f"stages.{context.name}.methods.{name}"
            config = decoding_with(source.config, method.settings, key)
            stage.engine.check_method(key, method, config)
            policy = method.policy(seed=context.seed)
            drafting = Drafting(name, source.name, method, config, None, policy, method.rule_at)
            lookup = config.lookup_in_vllm if isinstance(config, NgramConfig | SuffixConfig) else None
            speculative = lookup and {"method": config.kind, "num_speculative_tokens": method.chain or 0, **lookup}
            settings: JsonMapping = {}
            if speculative is None:
                folder = context.folder / EXPORTS / f"{len(plans)}-{config.kind}"
                speculative, settings = _exported(source, folder, context, method.chain or 0, key, python, pictures)
            elif config.kind == "suffix" and not version_of(_SUFFIX, python):
                raise UserError(
                    "vLLM's suffix method needs arctic-inference, which is not installed in this Python", where=python,
                    hint=f"{python} -m pip install arctic-inference, or leave out method {name}",
                )  # fmt: skip
            more = {"speculative_config": speculative, "per_request_spec_decode_metrics": "detailed"}
            plans.append((drafting, more | dict(settings)))
    return plans


def _exported(
    source: Source, folder: Path, context: Context, gamma: int, key: str, python: str, pictures: bool
) -> tuple[JsonObject, JsonMapping]:
    """vLLM's speculative_config of a drafter, and what else it needs of the engine. `folder`: that it is exported into,
    where it is no export already.
    """
    weights = source.folder or cast(PublishedDrafter, source.config).fetched()
    prompts: Prompts = "all" if pictures else "text"
    if (export := read_export(weights)) is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        exported = export_drafter(weights, folder, "vllm", target=str(context.target_source()), prompts=prompts)
    else:
        exported, promised = export
        if exported.engine != "vllm" or (pictures and promised != "all"):
            what = f"to {exported.engine}" if exported.engine != "vllm" else "for prompts without pictures"
            raise UserError(f"the folder is an export {what}", where=str(weights),
                            hint="name the drafter that it is of, which is exported here")  # fmt: skip
    if exported.plugin:
        check_plugin(python, patches=exported.patched)
    if exported.at_once and gamma < exported.chain:
        raise UserError(f"in vLLM it drafts {exported.chain} tokens at once, and the method's chain has {gamma}",
                        key=f"{key}.tree", hint=f"tree: {{kind: chain, gamma: {exported.chain}}}")  # fmt: skip
    return exported.speculative(gamma), exported.settings
