"""Hands what was measured to the report: the one place where an evaluation meets `eval/report.py`."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core import ranks
from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject
from ...core.markdown import Markup, code, plain, sentence
from ...core.secrets import redact, shortened
from ...data.captioned.prompts import ImagePrompt
from ...eval import report
from ...eval.cells import MethodInfo, Quality
from ...eval.figures import save_grid
from ...eval.measured_rows import Row
from ...eval.run_reports import COLOURED, EXAMPLES
from ...eval.tables import Figure, ReportSection, Table
from ...models.drafters.head_settings import HeadSettings
from ...models.folders import shipped_name
from .drafters import Drafting
from .measuring import Measuring
from .requests import ConversationSet

SIDE, MOST_PICTURES, MOST_PARTS = 96, 4, 32  # of an example: pictures in a report, parts of its answer at a run's end


@dataclass(frozen=True)
class Reporting:
    """Writes the report of one stage; rank 0 does."""

    measuring: Measuring
    rows: Sequence[Row]
    about: JsonMapping  # beside what every report says
    warnings: Sequence[str] = ()  # beside those of the settings

    def write(
        self,
        *sections: ReportSection,
        binding: Mapping[str, float] | None = None,
        quality: Quality | None = None,
        again: bool = False,
    ) -> None:
        """`report.md`, `report.json` and the figures; `again`: with more sections, which nobody need be told."""
        stage, context = self.measuring.stage, self.measuring.context
        built = report.build(
            self.rows, about=self._about(), methods=infos(self.measuring.drafting), contrasts=stage.contrasts,
            compare=stage.compare, binding=binding, quality=quality, sections=sections,
            warnings=[*stage.warnings(), *self.warnings],
        )  # fmt: skip
        report.write(context.folder, built, self.rows)
        if not again:
            context.say("\n".join(f"- {finding}" for finding in built.findings))
            context.say(f"report: {context.folder / 'report.md'}")

    def write_scores(self, table: Table, *sections: ReportSection, quality: Quality) -> None:
        """A report of pictures that were drawn for their quality alone: no rows, no speed."""
        context = self.measuring.context
        built = report.Report(self._about(), infos(self.measuring.drafting), (), (), (table,), sections, quality)
        report.write(context.folder, built, ())
        context.say(f"report: {context.folder / 'report.md'}")

    def _about(self) -> JsonObject:
        stage, context, left_out = self.measuring.stage, self.measuring.context, self.measuring.left_out
        path = None if context.target.path is None else shipped_name(context.target.path)
        was_auto = any(key.endswith("target.dtype") for key in context.resolved)
        trained = "trained in this run" + ("" if path is None else f" from {path}")
        return {
            "run": f"{context.folder.parent.name}, stage {context.name}",
            "command": context.command,
            "device": f"{device_name(context.device())}, {torch.get_num_threads()} thread(s), "
            f"{ranks.world_size()} rank(s)",
            "date": time.strftime("%Y-%m-%d"),
            "seed": context.seed,
            "target": trained if "target" in context.inputs else path,
            "dtype": context.target.dtype + (" (auto)" if was_auto else ""),
            "temperatures": stage.temperatures,
            "truncation": f"top-k {stage.top_k or 'all'}, top-p {stage.top_p:g}",
            "repeats": stage.repeats,
            **({"seconds": "of the thread that decodes (clock: thread)"} if stage.clock == "thread" else {}),
            **self.about,
            **({"left out": dict(left_out)} if left_out else {}),
            **({"not applied": penalties} if (penalties := context.penalties()) else {}),
            "torch": torch.__version__,
        }


def device_name(device: torch.device) -> str:
    """What reports call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def infos(drafting: Sequence[Drafting]) -> dict[str, MethodInfo]:
    """How each method decodes, for the report."""
    by_method: dict[str, MethodInfo] = {}
    for one in drafting:
        method, policy = one.method, one.policy
        tree = method.tree.model_dump(mode="json", exclude_defaults=True)
        shape = ", ".join(f"{key} {value}" for key, value in tree.items() if key != "kind")
        named = f"{policy.name} ({shape})" if shape else policy.name
        by_method[one.name] = MethodInfo(
            drafter=", ".join(other.drafter_name for other in drafting if other.name == one.name), mode=one.mode,
            tree=f"chain of {policy.num_levels}" if policy.name == "chain" else named, levels=policy.num_levels,
            rule=method.rule.kind, draw=method.draw,
            temperatures=None if method.temperatures is None else tuple(method.temperatures),
            adaptive=policy.name == "sage",
            parts=one.config.parts if isinstance(one.config, HeadSettings) else None,
            visual_skip=method.visual_skip, is_exact=method.rule.is_exact,
        )  # fmt: skip
    return by_method


def picture_grids(
    folder: Path, shown: Mapping[float, Mapping[str, Tensor]], prompts: Sequence[ImagePrompt]
) -> ReportSection:
    """A row of pictures for each method; of one alone a square.

    Args:
        shown: temperature -> method -> uint8 [B,3,S,S] of the first prompts.
    """
    content: list[Figure] = []
    for temperature, by_method in shown.items():
        name, columns = f"pictures-T{temperature:g}.png", len(next(iter(by_method.values())))
        is_one = len(by_method) == 1
        save_grid(folder / name, torch.cat([*by_method.values()]), columns=None if is_one else columns)
        order = "Row by row" if is_one else "Columns"
        caption = f"Temperature {temperature:g}. Rows from top to bottom: {'; '.join(by_method)}. {order}: "
        caption += "; ".join(p.caption or f"class {p.label}" for p in prompts[:columns])
        content.append(Figure(name, caption))
    return ReportSection("Pictures", tuple(content))


def examples(measuring: Measuring, rows: Sequence[Row], sets: Sequence[ConversationSet]) -> list[ReportSection]:
    """The requests with the best, median and worst tau at the lowest temperature, by the best exact drafter (of those
    that are trained, if any is) and by the best draft LVLM. Publishing leaves them behind, with the files that this
    writes: small pictures, and lines for the run's end.
    """
    folder, cell = measuring.context.folder, (min(measuring.stage.temperatures), max(measuring.lengths))
    places = {(part.benchmark, part.dataset.sample_id(n)): (part, n) for part in sets for n in range(len(part))}
    asked = [row for row in rows if (row.temperature, row.max_new_tokens) == cell and row.num_cycles
             and (row.benchmark, row.request) in places]  # fmt: skip
    by = {d: [r for r in asked if (r.method, r.drafter) == (d.name, d.drafter_name)] for d in measuring.drafting}
    rising = sorted(filter(by.get, by), key=lambda d: (d.method.rule.is_exact, bool(d.config.trains_on), _tau(*by[d])))
    content = ["**Bold** and coloured: what the drafter proposed. The target added the rest itself."]
    lines = list[str]()
    for one in dict.fromkeys([*rising[-1:], *[one for one in rising if one.mode][-1:]]):
        its = sorted(by[one], key=lambda row: (_tau(row), -row.num_cycles))
        for place, which in sorted({len(its) // 2: "median", 0: "worst", len(its) - 1: "best"}.items(), reverse=True):
            row = its[place]
            part, index = places[row.benchmark, row.request]
            title = _visible(f"{one.title}, {which} tau: {_tau(row):.2f} ({row.request})")
            turns = part.dataset.record(index)["conversations"]
            question = _visible(" / ".join(t["value"] for t in turns if t["from"] != "gpt" or t is not turns[-1]))
            parts = answer_parts(row, measuring.text)
            answer = "".join(f"**{code(text)}**" if proposed else code(text) for text, proposed in parts)
            content += [Markup(f"### {plain(title)}"), _pictures(part, index, folder, f"example-{len(content)}"),
                        Markup(f"> {code(question)}\n>\n> {answer}")]  # fmt: skip
            if one is rising[-1] and which != "median":
                coloured = "".join(text.join(COLOURED) if proposed else text for text, proposed in parts[:MOST_PARTS])
                lines += [f"{title}; {'proposed by the drafter'.join(COLOURED)}", shortened(question, 200), coloured]
    if lines:
        (folder / EXAMPLES).write_text(redact("\n".join(lines)))
    return [ReportSection("Examples", tuple(filter(None, content)))] if lines else []


def answer_parts(row: Row, decoded: Callable[..., str]) -> list[tuple[str, bool]]:
    """The answer in parts, each with whether the drafter proposed it. A letter of several tokens stands with its last.
    `decoded` is `Measuring.text`. Where a secret was taken out, parts begin some letters too late.
    """
    whole, cycles = redact(decoded(row.tokens, special=True)), zip(row.accepted, row.emitted, strict=True)
    proposed = [False, *(number < accepted for accepted, emitted in cycles for number in range(emitted))]
    letters = list[bool]()
    for count, is_proposed in enumerate(proposed, 1):
        so_far = decoded(row.tokens[:count], special=True).rstrip("\ufffd") if count < len(proposed) else whole
        letters += [is_proposed] * (len(so_far) - len(letters))
    runs = itertools.groupby(range(len(whole)), letters.__getitem__)
    return [(_visible("".join(whole[place] for place in run)), is_proposed) for is_proposed, run in runs]


def _tau(*rows: Row) -> float:
    return sum(row.num_emitted for row in rows) / sum(row.num_cycles for row in rows)


def _pictures(part: ConversationSet, index: int, folder: Path, stem: str) -> Markup:
    """The request's pictures, saved small; or why there are none."""
    try:
        originals = part.dataset.request(index, originals=True, pixels=False)[0].originals
    except UserError as error:
        return sentence(f"Its pictures cannot be shown: {error.problem}.")
    shown = []
    for number, picture in enumerate(originals[:MOST_PICTURES], 1):
        picture.thumbnail((SIDE, SIDE))
        name = f"{stem}-{number}.jpeg"
        picture.save(folder / name)
        shown.append(f"![{number} of {len(originals)}]({name})")
    return Markup(" ".join(shown))


def _visible(text: str) -> str:
    """On one line, without what a page would hide and a terminal obey."""
    return "".join(c if c.isprintable() or c in "\xa0\u200c\u200d\u3000" else repr(c)[1:-1] for c in text)
