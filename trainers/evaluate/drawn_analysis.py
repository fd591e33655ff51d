"""What target and head make of the pictures that an evaluation drew plainly: its probe `analysis`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ...core.errors import UserError
from ...data.stage_folders import CODES
from ...eval.lantern import LanternConfig
from ...eval.measured_rows import PLAIN
from ...eval.studies.drawn import CellStatistics, encoded_pictures, read_pictures
from ...eval.studies.drawn.places import contrasts
from ...eval.tables import ReportSection
from ...models.decoding.warp import Warp
from ...models.drafters.beside import head_in
from ...models.drafters.eagle_images import ImageEagleHead
from ...models.families.generators import Generator, image_section
from .drafters import Drafting
from .evaluate_settings import EvaluateSettings
from .pictures_of_rows import PicturesOfRows, codes_of, drawn_tokens


def eagle_head(drafting: Sequence[Drafting]) -> ImageEagleHead:
    """The head of the first method. Raises `UserError` where it is none of EAGLE's."""
    head: ImageEagleHead | None = head_in(drafting[0].drafter)
    if drafting[0].config.base_kind != "eagle" or head is None:
        raise UserError("probes.analysis reads an EAGLE head, and the first method drafts with another",
                        key="probes.analysis",
                        hint="put a method with an eagle drafter first, or leave analysis out")  # fmt: skip
    return head


def check_analysis(stage: EvaluateSettings, generator: Generator, drafting: Sequence[Drafting]) -> None:
    """Raises `UserError` for settings beyond the codebook or the grid, and for a first method without an EAGLE head."""
    if (config := stage.probes.analysis) is not None:
        config.check(len(generator.codebook), generator.target.grid)
        eagle_head(drafting)


def analysis(pictures: PicturesOfRows) -> list[ReportSection]:
    """What target and head make of the pictures that were drawn plainly, at every temperature."""
    measuring, generator, prompts, rows = pictures.measuring, pictures.generator, pictures.prompts, pictures.rows
    stage, context, config = measuring.stage, measuring.context, measuring.stage.probes.analysis
    if config is None:
        return []
    target, head = generator.target, eagle_head(measuring.drafting)
    codebook = generator.codebook.to(target.device)
    table = config.table(codebook, offset=generator.first_id, folder=context.folder / "neighbours")

    def read(drawn: list[tuple[Tensor, Tensor]], temperature: float) -> CellStatistics:
        warp = Warp(temperature, stage.top_k, stage.top_p)
        return read_pictures(config, target, head, drawn, warp, table, seed=context.seed)

    conditions = [generator.request(p.caption, p.label, p.key).condition for p in prompts[: config.pictures]]
    by_temperature = {}
    for temperature, by_method in drawn_tokens(rows).items():
        codes = [target.codes(list(row)) for row in by_method[PLAIN][: len(conditions)]]
        by_temperature[temperature] = read(list(zip(conditions, codes, strict=True)), temperature)
    encoded = {}
    if config.head_data is not None:
        data = config.head_data
        folder = Path(data.path) if data.path else context.inputs["codes"] / CODES
        for name, samples in encoded_pictures(config, folder, image_section(context.target).sample_condition()).items():
            encoded[name] = read(samples, stage.temperatures[0])
    relaxed = {name: (m.tree, m.rule) for name, m in stage.methods.items() if isinstance(m.rule, LanternConfig)}
    tree = next((tree for tree, _ in relaxed.values()), None)
    rules = {name: rule for name, (its, rule) in relaxed.items() if its == tree}
    captions = [p.caption for p in prompts]
    contrast = {
        t: {m: contrasts(generator.pictures(codes_of(generator, codes)), target.grid) for m, codes in by.items()}
        for t, by in drawn_tokens(rows).items()
    }
    from ...eval.studies.drawn.report_section import drawn_section  # and with it matplotlib

    section = drawn_section(
        context.folder, config, by_temperature, rows, pictures.shown, captions, rules=rules, quality=pictures.quality,
        encoded=encoded, contrast=contrast,
    )  # fmt: skip
    return [section]
