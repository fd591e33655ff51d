"""What target and head make of the pictures that an evaluation drew plainly: its probe `analysis`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ...core.errors import UserError
from ...core.results import CODES
from ...eval.measured_rows import PLAIN
from ...eval.studies.drawn_cells import CellStatistics, encoded_pictures, read_pictures
from ...eval.studies.drawn_tables import contrasts, drawn_section
from ...eval.tables import ReportSection
from ...models.decoding.warp import Warp
from ...models.drafters.beside import head_in
from ...models.drafters.eagle_images import ImageEagleHead
from ...models.targets.drawing import Generator
from ...models.targets.table import image_section
from .drafters import Drafting
from .evaluate_settings import EvaluateSettings
from .kept_pictures import PicturesOfRows, codes_of, drawn_tokens


def eagle_head(drafting: Sequence[Drafting]) -> ImageEagleHead:
    """The head of the first method. Raises `UserError` where it is none of EAGLE's."""
    head: ImageEagleHead | None = head_in(drafting[0].drafter)
    if drafting[0].config.base_kind != "eagle" or head is None:
        raise UserError("probes.analysis reads an EAGLE head, and the first method drafts with another",
                        key="probes.analysis",
                        hint="put a method with an eagle drafter first, or leave analysis out")  # fmt: skip
    return head


def check_analysis(stage: EvaluateSettings, generator: Generator, drafting: Sequence[Drafting]) -> None:
    """Raises `UserError` for settings beyond the codebook, and for a first method without an EAGLE head."""
    if (config := stage.probes.analysis) is not None:
        config.check(len(generator.codebook))
        eagle_head(drafting)


def analysis(pictures: PicturesOfRows) -> list[ReportSection]:
    """Of the pictures that were drawn plainly, at every temperature. Numbers of each cell go to the stage's folder, as
    `analysis-T1.safetensors`: docs/notebooks draws the papers' figures from them.
    """
    measuring, generator, prompts, rows = pictures.measuring, pictures.generator, pictures.prompts, pictures.rows
    stage, context, config = measuring.stage, measuring.context, measuring.stage.probes.analysis
    if config is None:
        return []
    target, head = generator.target, eagle_head(measuring.drafting)
    codebook = generator.codebook.to(target.device)
    table = config.table(codebook, offset=generator.first_id, folder=context.folder / "neighbours")

    def read(drawn: list[tuple[Tensor, Tensor]], temperature: float) -> CellStatistics:
        return read_pictures(config, target, head, drawn, Warp(temperature, stage.top_k, stage.top_p), table)

    conditions = [generator.request(p.caption, p.label, p.key).condition for p in prompts[: config.pictures]]
    by_temperature, contrast = {}, {}
    for temperature, by_method in drawn_tokens(rows).items():
        codes = [target.codes(list(row)) for row in by_method[PLAIN][: len(conditions)]]
        statistics = read(list(zip(conditions, codes, strict=True)), temperature)
        by_temperature[temperature] = statistics
        save_file(statistics.arrays(), context.folder / f"analysis-T{temperature:g}.safetensors")
        contrast[temperature] = {
            method: contrasts(generator.pictures(codes_of(generator, tokens)), target.grid)
            for method, tokens in by_method.items()
        }
    encoded = {}
    if config.head_data is not None:
        data = config.head_data
        folder = Path(data.path) if data.path else context.inputs["codes"] / CODES
        for name, samples in encoded_pictures(config, folder, image_section(context.target).sample_condition()).items():
            encoded[name] = read(samples, stage.temperatures[0])
    return [drawn_section(config, by_temperature, rows, encoded=encoded, contrast=contrast)]
