"""The model card, written from the run: what it says of numbers, data and terms it has from the run's own files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import yaml

from ... import __version__
from ...core.errors import UserError
from ...core.files import read_json
from ...core.json_types import JsonObject
from ...core.markdown import Markup, block, cell, code, filled, label, plain, sentence
from ...eval.by_category import lengths_table
from ...eval.cells import RELAXED, MethodInfo, cells_of, modes_line
from ...eval.findings import findings, headline
from ...eval.measured_rows import read_rows
from ...eval.published_section import PublishedSection
from ...eval.report import described
from ...eval.run_reports import cells, overview
from ...eval.tables import Items, markdown
from .folder import REPORT, without_places
from .fresh import OWN_TARGET, PICTURE, Snippet
from .hub_upload import word
from .lineage import Link, Trained, own_licence, warnings

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
        lengths: lines of Markdown, of acceptance lengths by category.
        methods: by which it was decoded.
        modes: what the modes of a draft LVLM see that either table has; "": it has none.
        relaxed: methods of either table whose outputs are not distributed as the target's.
    """

    headline: str
    table: list[str]
    about: JsonObject
    findings: list[str]
    others: list[str] = field(default_factory=list)
    lengths: list[str] = field(default_factory=list)
    methods: tuple[str, ...] = ()
    modes: str = ""
    relaxed: tuple[str, ...] = ()


def read_evaluation(folder: Path, drafter: str) -> Evaluated:
    """Reads an `evaluate` stage's folder, without places.

    Args:
        drafter: as its rows name it.

    Raises:
        UserError: it holds no report, or none with a row of this drafter.
    """
    path, again = folder / "report.json", f"run stage {folder.name} again, which writes it"
    if not path.is_file():
        raise UserError("no report of this evaluation", where=str(folder), hint=again)
    report = read_json(path, JsonObject, hint=again)
    rows = folder / "rows.jsonl"
    rows_of = [row for row in read_rows(rows) if row.drafter == drafter] if rows.is_file() else []
    if not rows_of:
        raise UserError(f"this evaluation has no row of the drafter of stage {drafter!r}", where=str(path),
                        hint="name another evaluation (report=STAGE), or another drafter (from=STAGE)")  # fmt: skip
    try:
        methods = {name: MethodInfo(**info) for name, info in report["methods"].items()}
        measured = cells_of(rows_of, methods)
        beside = cells({"cells": [cell for cell in report["cells"] if drafter not in cell["drafters"]]})
        warned = [text for text in report["findings"] if text.startswith("**Warning**")]
        # A table of M and MT* alone says nothing to a stranger.
        about = report["about"] | {f"method {cell.method}": described(methods[cell.method]) for cell in measured}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("the report is of an earlier version", where=str(path), hint=again) from error
    first, table, lengths = headline(measured), overview(measured), lengths_table(rows_of)
    names = dict.fromkeys(cell.method for cell in measured)
    shown = dict.fromkeys((*names, *(cell.method for cell in beside)))
    relaxed = tuple(name for name in shown if methods[name].relaxed)
    said = [text for text in findings(measured) if text != first]
    lines = markdown(Items((first, *said, *warned)))[:-1]
    return Evaluated(
        without_places(first), without_places(markdown(table)), without_places(about), without_places(lines),
        without_places(markdown(overview(beside)) if beside else []),
        without_places(markdown(lengths) if lengths is not None else []), tuple(names),
        modes_line(methods[name].mode for name in shown), relaxed,
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
    versions: JsonObject = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """A model of its own, and not a head."""
        return self.method == LVLM


def model_card(facts: CardFacts) -> str:
    """README.md."""
    packages = facts.versions.get("packages") or {}
    shown = [f"{name} {packages[name]}" for name in ("torch", "transformers") if packages.get(name)]
    section = facts.section
    return filled(
        Path(__file__).parent / "model_card.md.jinja",
        sentence, cell, code, block, label, linked, quote, repr, Markup,
        escape=plain,
        facts=facts,
        evaluated=facts.evaluated,
        front_matter=Markup(yaml.safe_dump(front_matter(facts), sort_keys=False).strip()),
        target=linked(facts.target) if facts.target else sentence(facts.target_name),
        revision=section.target.get("revision"),
        version=__version__,
        packages=", ".join(shown) or "versions were not recorded",
        prompt=section.prompt,
        expected=section.expected,
        decoding=section.decoding,
        temperature=f"{section.decoding.temperature:g}",
        warnings=list(warnings(facts.links)),
        PICTURE=PICTURE,
        OWN_TARGET=OWN_TARGET,
        RELAXED=RELAXED,
        REPORT=REPORT,
    )  # fmt: skip


def linked(name: str) -> Markup:
    """A link to the Hub."""
    return Markup(f"[{label(name)}](https://huggingface.co/{quote(name)})")


def front_matter(facts: CardFacts) -> JsonObject:
    """A drafter that runs alone is finetuned from its initial weights; a head is an adapter of its target."""
    whole = facts.is_whole
    base = facts.base if whole else facts.target
    licence = own_licence(facts.links, facts.license)
    fields: JsonObject = {
        "library_name": "transformers" if whole else "draftsmith",
        "tags": ["speculative-decoding", "draft-model", "draftsmith", word(facts.method), facts.task],
        "language": facts.languages,
    }
    if whole:
        fields["pipeline_tag"] = facts.task
    if licence.id is not None:
        fields["license"] = licence.id
    if licence.id == "other":  # the Hub wants a name and an address for a licence that it does not list
        own = facts.license is None and not any(one.role == "target" and one.licence == licence for one in facts.links)
        page = "" if own or not facts.target else f"https://huggingface.co/{facts.target}"
        fields["license_name"] = "as-of-its-parts" if own else "as-of-the-target"
        fields |= {"license_link": licence.link or page} if licence.link or page else {}
    if base is not None:
        fields |= {"base_model": base, "base_model_relation": "finetune" if whole else "adapter"}
    return fields | ({"datasets": facts.datasets} if facts.datasets else {})
