"""The model card, written from the run: what it says of numbers, data and terms it has from the run's own files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ... import __version__
from ...core.errors import UserError
from ...core.files import read_json
from ...core.markdown import Markup, block, code, label, plain, sentence
from ...eval.cells import RELAXED, MethodInfo, cells_of
from ...eval.findings import own_findings
from ...eval.published_section import PublishedSection
from ...eval.report import described
from ...eval.rows import read_rows
from ...eval.run_tables import overview
from ...eval.tables import Figure, Items, figure_markdown, items_markdown, markdown, words
from .folder import REPORT
from .licences import Licence, Link, own_licence, warnings
from .lineage import Trained
from .names import word
from .places import without_places
from .snippets import OWN_TARGET, PICTURE, Snippet

LVLM = "lvlm"  # the one kind of drafter that is a whole model


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation says of one drafter.

    Args:
        headline: its best row.
        table: lines of Markdown.
        about: command, device, date and settings of the measurement.
        findings: what its rows say in sentences, as a list of Markdown.
        others: lines of Markdown, of the drafters beside it.
        methods: by which it was decoded.
        relaxed: methods of either table whose outputs are not distributed as the target's.
    """

    headline: str
    table: list[str]
    about: dict[str, Any]
    findings: list[str]
    others: list[str] = field(default_factory=list)
    methods: tuple[str, ...] = ()
    relaxed: tuple[str, ...] = ()


def read_evaluation(folder: Path, drafter: str) -> Evaluated:
    """Of an `evaluate` stage's folder, without places.

    Args:
        drafter: as its rows name it.

    Raises:
        UserError: it holds no report, or none with a row of this drafter.
    """
    path, again = folder / "report.json", f"run stage {folder.name} again, which writes it"
    if not path.is_file():
        raise UserError("no report of this evaluation", where=str(folder), hint=again)
    report = read_json(path, dict[str, Any], hint=again)
    rows = folder / "rows.jsonl"
    own = [row for row in read_rows(rows) if row.drafter == drafter] if rows.is_file() else []
    if not own:
        raise UserError(f"this evaluation has no row of the drafter of stage {drafter!r}", where=str(path),
                        hint="name another evaluation (report=STAGE), or another drafter (from=STAGE)")  # fmt: skip
    try:
        methods = {name: MethodInfo(**info) for name, info in report["methods"].items()}
        measured = cells_of(own, methods)
        table = overview({"cells": [cell.to_json() for cell in measured]})
        beside = [cell for cell in report["cells"] if drafter not in cell["drafters"]]
        others = overview({"cells": beside})
        warned = [text for text in report["findings"] if text.startswith("**Warning**")]
        # A table of M and MT* alone says nothing to a stranger.
        about = report["about"] | {f"method {cell.method}": described(methods[cell.method]) for cell in measured}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("the report is of an earlier version", where=str(path), hint=again) from error
    headline, *findings = own_findings(measured)
    names = dict.fromkeys(cell.method for cell in measured)
    shown = dict.fromkeys((*names, *(cell["method"] for cell in beside)))
    relaxed = tuple(name for name in shown if methods[name].relaxed)
    lines = items_markdown(Items((headline, *findings, *warned)))[:-1]
    return Evaluated(
        without_places(headline), without_places(markdown(table)), without_places(about), without_places(lines),
        without_places(markdown(others) if beside else []), tuple(names), relaxed,
    )  # fmt: skip


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from.

    Args:
        method: kind of the drafter.
        task: what the target does, in the Hub's word.
        target: Hub id of the target; None: it was trained in the run, or is not on the Hub.
        target_name: what it is called without one.
        base: Hub id of what the drafter's own weights began as; None: none.
        datasets: Hub ids for the front matter.
        plots: files of the report's folder.
    """

    repo: str
    method: str
    task: str
    target: str | None
    target_name: str
    base: str | None
    links: list[Link]
    license: str | None
    languages: list[str]
    datasets: list[str]
    training: list[Trained]
    evaluated: Evaluated
    plots: list[str]
    section: PublishedSection
    snippets: list[Snippet]
    versions: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """A model of its own, and not a head."""
        return self.method == LVLM


def model_card(facts: CardFacts) -> str:
    """README.md."""
    parts = [
        ["---", yaml.safe_dump(front_matter(facts), sort_keys=False).strip(), "---", ""],
        _introduction(facts),
        _use(facts),
        _training(facts),
        _evaluation(facts),
        _licence(facts),
        _limitations(facts),
        _files(facts),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def front_matter(facts: CardFacts) -> dict[str, Any]:
    """A drafter that runs alone is finetuned from its initial weights; a head is an adapter of its target."""
    whole = facts.is_whole
    base = facts.base if whole else facts.target
    licence = own_licence(facts.links, facts.license)
    fields: dict[str, Any] = {
        "library_name": "transformers" if whole else "draftsmith",
        "tags": ["speculative-decoding", "draft-model", "draftsmith", word(facts.method), facts.task],
        "language": facts.languages,
    }
    if whole:
        fields["pipeline_tag"] = facts.task
    if licence.id is not None:
        fields["license"] = licence.id
        if licence.id == "other":
            fields |= _other(facts, licence)
    if base is not None:
        fields |= {"base_model": base, "base_model_relation": "finetune" if whole else "adapter"}
    return fields | ({"datasets": facts.datasets} if facts.datasets else {})


def _other(facts: CardFacts, licence: Licence) -> dict[str, str]:
    """The Hub wants a name and an address for a licence that it does not list."""
    if facts.license is None and not any(link.role == "target" and link.licence == licence for link in facts.links):
        return {"license_name": "as-of-its-parts"} | ({"license_link": licence.link} if licence.link else {})
    address = licence.link or (f"https://huggingface.co/{facts.target}" if facts.target else "")
    return {"license_name": "as-of-the-target"} | ({"license_link": address} if address else {})


def _introduction(facts: CardFacts) -> list[str]:
    target = _linked(facts.target) if facts.target else sentence(facts.target_name)
    what = "A small model" if facts.is_whole else "A head, not a model of its own,"
    revision = facts.section.target.get("revision")
    rows = [
        ["target", Markup(target + (f" at revision {code(revision)}" if revision else ""))],
        ["method", code(facts.method)],
        ["measured", sentence(facts.evaluated.headline)],
        ["trained and measured with", f"draftsmith {__version__}, " + _shown(facts.versions)],
    ]
    if facts.base is not None:
        rows.append(["began as", _linked(facts.base)])
    return [
        f"# {plain(facts.repo.split('/')[-1])}", "",
        f"{what} that drafts tokens for {target}. {_kept_promise(facts.evaluated)}", "",
        *markdown(words(["", ""], rows)),
    ]  # fmt: skip


def _linked(name: str) -> Markup:
    return Markup(f"[{label(name)}](https://huggingface.co/{quote(name)})")


def _kept_promise(evaluated: Evaluated) -> str:
    """What becomes of the target's output: a relaxed rule in the table changes it."""
    if not evaluated.relaxed:
        return "The target checks every token, so the output stays the target's; the speedup is measured below."
    return (
        "By an exact rule, as in the code below, the target checks every token, and the output stays the target's. "
        f"The tables below also have rows of relaxed rules ({plain(', '.join(evaluated.relaxed))}). {RELAXED}"
    )


def _shown(versions: dict[str, Any]) -> str:
    packages = versions.get("packages") or {}
    names = [f"{name} {packages[name]}" for name in ("torch", "transformers") if packages.get(name)]
    return ", ".join(names) or "versions were not recorded"


def _use(facts: CardFacts) -> list[str]:
    lines = ["## Use", "", "The code below was run before this was published.", ""]
    for snippet in facts.snippets:
        lines += [f"{snippet.title}:", "", *block(snippet.code, "python"), ""]
    prompt, expected = facts.section.prompt, facts.section.expected
    if expected is not None:
        pictures = " with `check/picture.png`" if prompt.pictures else ""
        lines += [
            f"On the stored prompt ({plain(repr(prompt.text))}{pictures}) it has tau {expected.tau:.2f} "
            f"({plain(facts.section.decoding.name)}, temperature {facts.section.decoding.temperature:g}, "
            f"{expected.measured['device']}): `draftsmith.eval.stored_prompt.reproduce` measures it again. "
            f"`sha256sum -c SHA256SUMS` checks the files; a folder with a changed file is refused by its name.", "",
        ]  # fmt: skip
    if any(f'"{PICTURE}"' in snippet.code for snippet in facts.snippets):
        lines += [f"`{PICTURE}` is a picture of yours.", ""]
    if any(f'"{OWN_TARGET}"' in snippet.code for snippet in facts.snippets):
        lines += [f"`{OWN_TARGET}` is the folder where you have the target.", ""]
    return lines


def _training(facts: CardFacts) -> list[str]:
    head = ["stage", "trains", "data", "length", "batch", "learning rate", "last loss", "hours"]
    rows = [
        [t.name, t.trains, t.data, t.length, str(t.batch_size or "-"), t.rate,
         "-" if t.loss is None else f"{t.loss:.4f}", "-" if t.hours is None else f"{t.hours:.2f}"]
        for t in facts.training
    ]  # fmt: skip
    return ["## Training", "", *markdown(words(head, rows)),
            "`recipe.yaml` has every setting, `run.yaml` command and versions of the last start.", ""]  # fmt: skip


def _evaluation(facts: CardFacts) -> list[str]:
    evaluated = facts.evaluated
    about = [f"- {plain(key)}: {sentence(str(value))}" for key, value in evaluated.about.items() if key != "command"]
    plots = [
        line
        for name in facts.plots
        for line in figure_markdown(Figure(f"{REPORT}/{quote(name)}", name.removesuffix(".png")))
    ]
    return [
        "## Evaluation", "", "Of this drafter:", "", *evaluated.findings, "", *evaluated.table,
        *_others(evaluated), *([f"- {RELAXED}", ""] if evaluated.relaxed else []),
        "tau: tokens emitted after the prefill over verification passes, bonus token included; plain decoding has 1. "
        "Speedups are wall clock against plain decoding of the same target in the same run, on:", "", *about, "",
        *plots, f"The whole report is in [{REPORT}]({REPORT}).", "",
    ]  # fmt: skip


def _others(evaluated: Evaluated) -> list[str]:
    if not evaluated.others:
        return []
    return ["Other drafters of the same run, on the same requests:", "", *evaluated.others]


def _licence(facts: CardFacts) -> list[str]:
    rows = [[link.role, code(link.name), link.licence.id or "not known"] for link in facts.links]
    warned = [f"> **Warning.** {sentence(text)}" for text in warnings(facts.links)]
    spaced = [line for text in warned for line in (text, "")]
    return [
        "## Licence", "",
        "A drafter inherits the terms of what it was made from: the target whose answers or states it learned, the "
        "weights that it began as, and its data. The table is from draftsmith's own list and may be out of date.", "",
        *markdown(words(["part", "name", "licence"], rows)), *spaced,
    ]  # fmt: skip


def _limitations(facts: CardFacts) -> list[str]:
    lines = ["## Limitations", "", "- It was trained for one target. Beside another it drafts noise, which costs time "
             "and, by an exact rule, changes no answer; another tokenizer or width is refused."]  # fmt: skip
    if facts.is_whole:
        lines += [
            "- **`target.generate(assistant_model=drafter)` does not show the picture to the drafter** in transformers "
            "5 (read and measured in 5.18 to 5.23): answers stay right, and nearly nothing is accepted. Decode with "
            "the three lines above, where target and drafter both see it; in transformers' own loop "
            "`draftsmith.models.assistant.sees(drafter, **inputs)` gives the picture back.",
            "- vLLM and SGLang take no drafter that reads pictures.",
        ]
    else:
        lines.append("- It cannot run alone: it reads its target's hidden states and shares its tables. No engine "
                     "loads this folder as it is; the layout is draftsmith's.")  # fmt: skip
    temperature = facts.section.decoding.temperature
    lines += [
        "- Speedups are of one machine at batch size 1; on another a draft step costs another part of a target step.",
        f"- The stored prompt was decoded at temperature {temperature:g} in {facts.section.target.get('dtype')}: in "
        "low precision another device may round otherwise and stop at another token.",
        "",
    ]  # fmt: skip
    return lines


def _files(facts: CardFacts) -> list[str]:
    named = [
        ["`model.safetensors`, `config.json`", "weights and shape"],
        ["`draftsmith.json`", "what it was trained for, how it decodes, the stored prompt's outcome"],
        ["`recipe.yaml`, `run.yaml`", "settings; command, versions and commit"],
        ["`report/`", "the evaluation with its plots"],
        ["`check/`", "pictures of the stored prompt"],
        ["`SHA256SUMS`", "checksums of all of these but this page"],
    ]
    rows = [[Markup(cell) for cell in row] for row in named]
    return ["## Files", "", *markdown(words(["file", "what it is"], rows))]
