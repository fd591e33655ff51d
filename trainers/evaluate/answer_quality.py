"""How good the answers of target and drafts are, with the pictures and without (TABED, tables 5 and 9)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...core import ranks
from ...core.batch import Request
from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject, nulls
from ...data.conversations import end_ids
from ...data.records.record import paths
from ...eval import text_quality
from ...eval.loop import Decoding, generate
from ...eval.policies import Chain, Draw
from ...eval.rules import RULES
from ...eval.text_quality import Metric, Scorer
from ...models.decoding.warp import Warp
from ...models.drafters.lvlm import as_target
from ...models.drafters.modes import without_pictures
from ...models.targets.language import LanguageTarget
from .benchmarks import QualitySection
from .resume_log import resumed
from .turns import TabedRun

# A request -> ids of an answer.
Answering = Callable[[Request], list[int]]
BLIND = " (text only)"


def measure_quality(
    config: QualitySection, run: TabedRun, drafts: Mapping[str, object], score: Mapping[Metric, Scorer]
) -> JsonObject:
    """Let target and drafts answer every set, seeing and blind; write `quality.json` and `quality.md`."""
    folder, models = run.context.folder, answering(config, run, drafts)
    measured: list[JsonObject] = []
    for name in config.sets:
        records = run.suite.first_turns(name, run.section.convention, config.max_samples)
        measured += _answers(name, records, run, models)
        run.context.say(f"{name}: {len(records)} questions answered by {', '.join(models)}, seeing and blind")
    names = [f"{model}{blind}" for model in models for blind in ("", BLIND)]
    built = text_quality.build(measured, score, sets=config.sets, models=names, samples=config.samples)
    if ranks.is_main():
        (folder / "quality.json").write_text(json.dumps(nulls(built), indent=1))
        page = text_quality.markdown(built, lambda record: _shown(record, run.suite.folder, folder / "samples"))
        (folder / "quality.md").write_text(page)
    return built


def answering(config: QualitySection, run: TabedRun, drafts: Mapping[str, Any]) -> dict[str, Answering]:
    """Target and drafts, each answering greedily on its own."""
    processor = run.opening.processor
    # Nothing is drafted: policy and draw are never asked.
    ends = end_ids(processor, run.form)
    decoding = Decoding(Chain(1), RULES["greedy"], Draw("top-k"), Warp(0.0), config.max_new_tokens, ends)

    def by(model: LanguageTarget, *, is_draft: bool) -> Answering:
        def answer(request: Request) -> list[int]:
            return generate(model, None, (request.drafter_view or request) if is_draft else request, decoding).tokens

        return answer

    models = {"target": by(run.measuring.target, is_draft=False)}
    for name, model in drafts.items():
        draft = as_target(model, num_token_ids=processor.num_token_ids, image_token_id=processor.image_token_id)
        models[name] = by(draft, is_draft=True)
    return models


def _answers(name: str, records: list[JsonObject], run: TabedRun, models: Mapping[str, Answering]) -> list[JsonObject]:
    """Every record with everyone's answers, of all ranks."""
    stem = run.folder / "quality" / name
    dataset, processor = run.requests(name, records, stem.with_name(f"{name}.json")).dataset, run.opening.processor

    def answer_all(index: int) -> dict[str, str] | None:
        try:
            request, _ = dataset.request(index)
        except UserError as error:
            dataset.leave_out(index, error)
            return None
        answers = {}
        for model, answer in models.items():
            for blind, shown in (("", request), (BLIND, without_pictures(request, processor.newline_id))):
                answers[f"{model}{blind}"] = str(processor.tokenizer.decode(answer(shown), skip_special_tokens=True))
        return answers

    return [
        {"set": name, "number": index, "record": records[index], "answers": answers}
        for index, answers in enumerate(resumed(stem, len(dataset), answer_all, run.context.stop))
        if answers is not None
    ]


def _shown(record: JsonMapping, source: Path, folder: Path) -> list[str]:
    """Copies of a record's pictures beside the page."""
    shown = []
    for number, path in enumerate(paths(dict(record), "image")):
        copy = folder / f"{str(record['id']).replace('/', '-')}-{number}{Path(path).suffix}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, copy)
        shown.append(f"{folder.name}/{copy.name}")
    return shown
