"""Hands what was measured to the report: the one place where an evaluation meets `eval/report.py`."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core import ranks
from ...core.json_types import JsonMapping, JsonObject
from ...data.captioned.prompts import ImagePrompt
from ...eval import report
from ...eval.cells import MethodInfo, Quality
from ...eval.figures import save_grid
from ...eval.measured_rows import Row
from ...eval.tables import Figure, ReportSection, Table
from ...models.drafters.head_settings import HeadSettings
from ...models.folders import shipped_name
from .drafters import Drafting
from .measuring import Measuring


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
    """A row of pictures for each method.

    Args:
        shown: temperature -> method -> uint8 [B,3,S,S] of the first prompts.
    """
    content: list[Figure] = []
    for temperature, by_method in shown.items():
        name, columns = f"pictures-T{temperature:g}.png", len(next(iter(by_method.values())))
        save_grid(folder / name, torch.cat([*by_method.values()]), columns=columns)
        caption = f"Temperature {temperature:g}. Rows from top to bottom: {'; '.join(by_method)}. Columns: "
        caption += "; ".join(p.caption or f"class {p.label}" for p in prompts[:columns])
        content.append(Figure(name, caption))
    return ReportSection("Pictures", tuple(content))
