"""Checks of what an evaluation reads beside its records, before a run: published sets, and scores of pictures."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import UserError
from ..core.section import Section, within
from ..core.words import counted
from ..data.suites.turn_files import PUBLISHED, published_files, published_records
from ..data.suites.turn_sets import TURN_SETS
from ..eval.quality import QualityConfig, check
from .finding import Finding, fault, ok


def quality_findings(subject: str, stage: Section) -> list[Finding]:
    """Return the findings of each section inside a stage that says how drawn pictures are judged."""
    return [f for place, config in within(stage, QualityConfig) for f in _findings(".".join((subject, *place)), config)]


def _findings(subject: str, config: QualityConfig) -> list[Finding]:
    """A finding for each metric's weights and for the real images."""
    looked = {f"{subject}.weights ({m})": config.model_copy(update={"metrics": (m,), "reference": None})
              for m in config.metrics}  # fmt: skip
    if config.reference is not None:
        looked[f"{subject}.reference"] = config.model_copy(update={"metrics": ()})
    findings = []
    for place, part in looked.items():
        try:
            check(part)
            findings.append(ok(place, "there"))
        except UserError as error:
            findings.append(fault(place, error.problem, error.hint or "name its place with this key"))
    compares = {"fid", "precision_recall"} & set(config.metrics)
    if compares and config.reference is None:
        what = f"{' and '.join(sorted(compares))} compare with real images, and no folder is named"
        findings.append(fault(f"{subject}.reference", what, "name a folder of real images"))
    return findings


def published_set(subject: str, name: str, path: Path) -> Finding:
    """A set of conversations as its authors publish it, and its pictures."""
    records = published_records(name, path)
    folder = published_files(name, path)[0].parent
    pictures = [folder / Path(picture).relative_to(PUBLISHED) for r in records for picture in r.get("image", ())]
    if gone := [str(picture) for picture in pictures if not picture.is_file()]:
        return fault(subject, f"pictures missing: {len(gone)} of {len(pictures)}, the first {gone[0]}",
                     TURN_SETS[name].cure)  # fmt: skip
    return ok(subject, f"{counted(len(records), 'conversation')} of {name}")
