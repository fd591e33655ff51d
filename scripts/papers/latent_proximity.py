#!/usr/bin/env python
"""Draw with every token replaced by one of its k nearest codes: LANTERN's figures 3 and 6 and table 4.

    scripts/papers/latent_proximity.py recipe=NAME output=RUN [key=value ...] ["k=[50,100]"] [count=100] [own options]

    scripts/papers/latent_proximity.py recipe=demo/visual-ar output=runs/demo-visual-ar "k=[2,5,20]" count=50
    scripts/papers/latent_proximity.py recipe=eagle-llamagen-xl-stage1 count=5000 \\
        stages.evaluate.benchmarks.NAME.quality='{metrics: [fid, clip], reference: data/coco/val2017, weights: {...}}'
    scripts/papers/latent_proximity.py recipe=eagle-llamagen-xl-stage2 count=9 shown=9 name=appendix-i \\
        stages.evaluate.benchmarks.NAME.prompts.path=recipes/visual_ar/lantern-prompts.txt

Takes a finished run of a recipe, or one whose weights are published, and the recipe's stage of kind evaluate: its
prompts, truncation, quality metrics and the synthetic dataset's reader. Other keys are the recipe's, as for draftsmith;
recipe=RUN/recipe.yaml is a run's own recipe. Writes RUN/latent_proximity: report.md and .json, pictures.png (a row
for each k, the first is plain decoding) and codes.png (a code, its nearest, its farthest). Under `deepspeed` the ranks
share the prompts.

Own options:
"""

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
from draftsmith.core import ranks
from draftsmith.core.secrets import redact_argument
from draftsmith.data.captioned.prompts import ImagePrompt
from draftsmith.eval.figures import save_grid
from draftsmith.eval.tables import markdown, words
from draftsmith.models.decoding.neighbours import load_neighbours
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.families.generators import Generator, load_generator
from draftsmith.recipes.commands.cli import say
from draftsmith.scripts.papers import proximity
from draftsmith.scripts.papers.finished import Finished, ScriptOptions, run_script
from draftsmith.trainers.evaluate.judge import Drawn, Judge
from draftsmith.trainers.stages.evaluate import EvaluateStage
from draftsmith.trainers.train.engine import init_distributed
from pydantic import Field
from torch import Tensor

PAPER = (200, 200, 200)  # what `save_grid` leaves between pictures


class Options(ScriptOptions):
    k: list[Annotated[int, Field(ge=2)]] = Field(
        [50, 100, 1000], min_length=1, description="nearest codes to draw from, the token itself included"
    )
    temperature: float = Field(1.0, ge=0, description="of drawing; 0 replaces the most likely token")
    shown: int = Field(4, ge=1, description="pictures in a row")
    codes: int = Field(8, ge=1, description="codes whose nearest and farthest are shown, from often to rarely drawn")
    extremes: int = Field(5, ge=1, description="nearest and farthest codes of each")
    name: str = Field(
        "latent_proximity", min_length=1, description="folder inside the run, which must not hold a report"
    )


def draw(
    options: Options,
    stage: EvaluateStage,
    generator: Generator,
    prompts: list[ImagePrompt],
    folder: Path,
    seed: int,
) -> dict[int, list[list[int]]]:
    """k -> tokens of each prompt's picture; k = 1 is plain decoding. Gathered over the ranks."""
    ks = [1, *sorted(set(options.k))]
    # On the CPU, where a cell's one look-up costs no synchronisation.
    table = load_neighbours(
        generator.codebook.cpu(), ks[-1] - 1, metric="l2", offset=generator.first_id, folder=folder / "neighbours"
    )
    warp = Warp(options.temperature, stage.top_k, stage.top_p)
    tokens: dict[int, dict[int, list[int]]] = {k: {} for k in ks}
    for number in range(ranks.rank(), len(prompts), ranks.world_size()):
        prompt = prompts[number]
        request = generator.request(prompt.caption, prompt.label, prompt.key)
        for k in ks:
            luck = torch.Generator().manual_seed(seed * 1_000_003 + number)  # of the request, not of k
            tokens[k][number] = proximity.draw_replaced(generator.target, request, warp, table, k, luck)
    shards = ranks.gather(tokens)
    merged = {k: {n: row for shard in shards for n, row in shard[k].items()} for k in ks}
    return {k: [rows[number] for number in range(len(prompts))] for k, rows in merged.items()}


def save_codes(path: Path, options: Options, generator: Generator, drawn: Tensor) -> list[int]:
    """A row for each code: its patch, its nearest codes', its farthest codes'. Returns the codes."""
    codes = proximity.spread(drawn, options.codes)
    reach = min(options.extremes, len(generator.codebook) - 1)
    near, far = proximity.extremes(generator.codebook.cpu(), codes, reach)
    grid = generator.target.grid
    shown = [proximity.patches(generator.pictures, group.flatten(), grid) for group in (codes, near, far)]
    groups = [part.unflatten(0, (len(codes), -1)) for part in shown]  # [n,1|reach,3,f,f]
    gap = torch.tensor(PAPER, dtype=torch.uint8)[:, None, None].expand_as(groups[0])
    rows = torch.cat([groups[0], gap, groups[1], gap, groups[2]], dim=1)
    save_grid(path, rows.flatten(0, 1), columns=rows.shape[1], scale=max(1, 48 // rows.shape[-1]))
    return codes.tolist()


def report(about: dict[str, Any], quality: dict[int, dict[str, Any]], codes: list[int], options: Options) -> str:
    """The text of report.md: scores for each k, the codes in the picture, and how it was measured."""
    metrics = sorted({name for scores in quality.values() for name in scores})
    rows = []
    for k, scores in quality.items():
        point = proximity.Point({}, scores)
        cells = [str(proximity.quality(metric).value(point)) for metric in metrics]
        rows.append(["plain decoding" if k == 1 else f"k = {k}", str(about["prompts drawn"]), *cells])
    whats = [f"{m}: {quality[1][m]['what']}" for m in metrics]
    return "\n".join([
        "# Tokens replaced by near codes, measured", "",
        "Every token is replaced, when it is drawn, by a uniform draw among its k nearest codes, itself included; the "
        "next token is drawn after the replaced one (LANTERN, section 4.1 and table 4).", "",
        *markdown(words(["replaced by one of", "pictures", *metrics], rows)),
        *(f"- {line}" for line in whats), *(["- ±: standard error of the mean, where it is known"] if whats else []),
        *([] if metrics else ["Nothing was scored: the stage names no quality metrics and no reader."]), "",
        f"![pictures](pictures.png)\n\nRows: {', '.join('plain decoding' if k == 1 else f'k = {k}' for k in quality)}.",
        "", f"![codes](codes.png)\n\nRows: codes {', '.join(map(str, codes))}, from often to rarely drawn. A row: the "
        "code, its nearest codes, its farthest ones, by l2 between the stored rows of the codebook. A patch is the "
        "centre cell of a picture that consists of that code alone.", "",
        "## How it was measured", "", *(f"- {key}: {value}" for key, value in about.items()), "",
    ])  # fmt: skip


def run(arguments: list[str]) -> None:
    """Draw the pictures for each k, score them, and write report.md, report.json and two pictures."""
    opened = Finished(arguments, Options)
    options, stage, recipe, folder = opened.options, opened.stage, opened.recipe, opened.folder
    inputs = opened.inputs({"target", "text", "vq", "reader", "data"})
    opened.refuse_old("report.json")
    source, prompts = opened.prompts(inputs)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    device = ranks.device()
    generator = load_generator(recipe.target, inputs, device=device)
    judge = Judge(
        stage.drawing.quality, prompts, reader=inputs.get("reader"), size=recipe.target.image_size, device=device,
        real=Path(source.path) if source.path and source.path.endswith(".tar") else None,
    )  # fmt: skip
    tokens = draw(options, stage, generator, prompts, folder, recipe.seed)
    ranks.barrier()  # a rank that leaves while another still reads what it sent looks like a crash
    if not ranks.is_main():
        return
    codes = {k: torch.stack([generator.target.codes(row) for row in rows]) for k, rows in tokens.items()}
    quality = {k: judge(Drawn(generator.pictures, drawn)) for k, drawn in codes.items()}
    shown = [generator.pictures(drawn[: options.shown]) for drawn in codes.values()]
    save_grid(folder / "pictures.png", torch.cat(shown), columns=len(shown[0]))
    codes_shown = save_codes(folder / "codes.png", options, generator, codes[1])
    about = {
        "command": shlex.join(["scripts/papers/latent_proximity.py", *(redact_argument(a) for a in arguments)]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "ranks": ranks.world_size(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "seed": recipe.seed, "prompts": stage.drawing.prompts.path or f"{stage.drawing.prompts.classes} classes",
        "prompts drawn": len(prompts),
        "drawing": f"temperature {options.temperature:g}, guidance {recipe.target.cfg_scale:g}, "
        f"top-k {stage.top_k or 'all'}, top-p {stage.top_p:g}",
    }  # fmt: skip
    text = report(about, quality, codes_shown, options)
    (folder / "report.md").write_text(text)
    data = {"about": about, "quality": quality, "codes": codes_shown}
    (folder / "report.json").write_text(json.dumps(data, indent=1))
    say(text)


def main(arguments: list[str] | None = None) -> int:
    """Runs the measurement for `key=value` arguments (None: the command line's). Returns the exit code."""
    return run_script(run, __doc__, Options, arguments)


if __name__ == "__main__":
    sys.exit(main())
