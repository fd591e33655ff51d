"""How good answers are: accuracy on OCRBench, METEOR and ROUGE-L on captions, ROUGE-L on differences and edits.

TABED's table 5 names no metric. ROUGE-L is what the sets' own bench (LLaVA-NeXT-Interleave) scores them by: F1 of the
answer's first 512 characters; its numbers there are times 100. Table 9 names accuracy, METEOR and ROUGE.
ROUGE-L is torchmetrics', METEOR nltk's; both come with the extra [metrics].
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from ..core.errors import UserError
from ..core.json_types import JsonMapping, JsonObject
from ..core.markdown import plain
from . import tables
from .tables import Column, Table, Value

Metric = Literal["accuracy", "ROUGE-L", "METEOR"]
# (answer, record) -> a score in [0, 1]. References are the record's `references`.
Scorer = Callable[[str, JsonMapping], float]

# Of each set; others are scored as captions are.
METRICS: dict[str, tuple[Metric, ...]] = {
    "OCRBench": ("accuracy",),
    "TextCaps": ("METEOR", "ROUGE-L"),
    "Spot": ("ROUGE-L",),
    "MB": ("ROUGE-L",),
}
MOST_CHARACTERS = 512
# The libraries' own modules, imported when a metric is wanted.
QUALITY_MODULES: dict[Metric, str] = {
    "ROUGE-L": "torchmetrics.functional.text",
    "METEOR": "nltk.translate.meteor_score",
}


def metrics_of(name: str) -> tuple[Metric, ...]:
    """Metrics that the set `name` is scored by; those of TextCaps for sets that `METRICS` does not list."""
    return METRICS.get(name, METRICS["TextCaps"])


def scorers(sets: Sequence[str]) -> dict[Metric, Scorer]:
    """Every metric that the sets need. Raises `UserError`: a library or its data is missing."""
    builders: dict[Metric, Callable[[], Scorer]] = {"accuracy": lambda: contains, "ROUGE-L": rouge_l, "METEOR": meteor}
    wanted = dict.fromkeys(metric for name in sets for metric in metrics_of(name))
    return {metric: builders[metric]() for metric in wanted}


def contains(answer: str, record: JsonMapping) -> float:
    """OCRBench's accuracy: does the answer contain one of the references? Formulas (HME100k) regardless of blanks."""

    def plain(text: str) -> str:
        if record.get("dataset") == "HME100k":
            return "".join(text.split())
        return text.lower().strip().replace("\n", " ")

    return float(any(plain(reference) in plain(answer) for reference in record["references"]))


def rouge_l() -> Scorer:
    """F1 over words, the best of all references; an empty answer has 0."""
    rouge = _library("ROUGE-L").rouge_score

    def score(answer: str, record: JsonMapping) -> float:
        if not answer.strip():
            return 0.0
        scores = rouge([answer[:MOST_CHARACTERS]], [list(record["references"])], rouge_keys="rougeL", accumulate="best")
        return float(scores["rougeL_fmeasure"])

    return score


def meteor() -> Scorer:
    """Over words of lower case, stems and synonyms, the best of all references."""
    module = _library("METEOR")
    tokenize = importlib.import_module("nltk.tokenize").wordpunct_tokenize
    try:
        module.meteor_score([["a"]], ["b"])
    except LookupError as error:
        hint = "python -m nltk.downloader wordnet omw-1.4 (NLTK_DATA says where), or leave TextCaps out"
        raise UserError("METEOR needs WordNet, which is not there", key="suite.quality", hint=hint) from error

    def score(answer: str, record: JsonMapping) -> float:
        references = [tokenize(reference.lower()) for reference in record["references"]]
        return float(module.meteor_score(references, tokenize(answer.lower())))

    return score


def _library(metric: Metric) -> Any:
    module = QUALITY_MODULES[metric]
    name = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = 'pip install "draftsmith[metrics]", or leave out the sets that need it'
        raise UserError(f"{metric} needs {name}, which is not installed", key="suite.quality", hint=hint) from error


def build(
    answers: Sequence[JsonMapping],
    score: Mapping[Metric, Scorer],
    *,
    sets: Sequence[str],
    models: Sequence[str],
    samples: int,
) -> JsonObject:
    """The tables and the first `samples` records of each set with everyone's answers.

    Args:
        answers: one for each record: `set`, `number`, `record`, and `answers`: (model, as named in `models`) -> text.
    """
    tables: JsonObject = {}
    shown: JsonObject = {}
    for name in sets:
        mine = sorted((a for a in answers if a["set"] == name), key=lambda a: a["number"])
        tables[name] = {}
        for metric, measure in ((metric, score[metric]) for metric in metrics_of(name)):
            scores = {model: [measure(a["answers"][model], a["record"]) for a in mine] for model in models}
            tables[name][metric] = {model: _scored(values) for model, values in scores.items()}
        first = [(dict(a["record"]), {model: a["answers"][model] for model in models}) for a in mine[:samples]]
        shown[name] = [{"record": record, "answers": texts} for record, texts in first]
    return {"models": list(models), "tables": tables, "samples": shown}


def _scored(values: Sequence[float]) -> dict[str, float]:
    """Mean, and 1.96 standard errors of it."""
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "half_width": 1.96 * spread, "n": len(values)}


def scores_table(built: JsonMapping) -> Table:
    """Tables 9 and 5: a line for each model, a column for each set and metric, 1.96 standard errors around each."""
    columns = [(name, metric) for name, metrics in built["tables"].items() for metric in metrics]
    rows: list[tuple[Value, ...]] = []
    for model in built["models"]:
        scores = [built["tables"][name][metric][model] for name, metric in columns]
        ends = ((s["mean"], s["mean"] - s["half_width"], s["mean"] + s["half_width"]) for s in scores)
        rows.append((model, *ends))
    counts = {name: next(iter(next(iter(m.values())).values()))["n"] for name, m in built["tables"].items()}
    note = (
        "Scores are in [0, 1], plus or minus 1.96 standard errors; n: "
        + ", ".join(f"{k} {n}" for k, n in counts.items()) + ". "
        "Accuracy: the answer contains a reference (OCRBench). METEOR: nltk's. ROUGE-L: F1, torchmetrics', best of the "
        f"references, of an answer's first {MOST_CHARACTERS} characters. TABED's table 5 names no metric; ROUGE-L is "
        "the one that the sets' own benchmark uses."
    )  # fmt: skip
    shown = (Column(metric, ".3f", kind="interval", group=name) for name, metric in columns)
    return Table("", (tables.text("model"), *shown), tuple(rows), note=note)


def markdown(built: JsonObject, pictures: Callable[[JsonMapping], Sequence[str]]) -> str:
    """The table of scores, and sample answers (figure 7) with the paths that `pictures` gives of a record."""
    lines = ["# Quality of answers: target and draft, with the picture and without", ""]
    lines += tables.markdown(scores_table(built))
    lines += ["## Sample answers", "", "The first records of each set, without selection.", ""]
    for name, samples in built["samples"].items():
        for sample in samples:
            record = sample["record"]
            question = record["conversations"][0]["value"].replace("<image>", "")
            shown = " ".join(f"![]({quote(path)})" for path in pictures(record))
            answers = {"question": question, "reference": record["references"][0], **sample["answers"]}
            lines += [f"### {plain(name)}: {plain(str(record['id']))}", "", shown, ""]
            lines += [
                *(f"- **{plain(who)}**: {plain(said.strip()) or '(nothing)'}" for who, said in answers.items()),
                "",
            ]
    return "\n".join(lines)
