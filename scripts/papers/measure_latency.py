#!/usr/bin/env python
"""How long targets, drafts and captioners take: TABED's Tables 4 and 6 and Figs. 5, 6 and 9, with random weights.

    scripts/papers/measure_latency.py                  small models on a CPU, the real sizes on a GPU
    scripts/papers/measure_latency.py --quick          fewer points and rounds, for a look
    scripts/papers/measure_latency.py --sizes full --dtype bfloat16        whatever the device

Latency does not depend on the weights. Real sizes are those of the pinned configs; models that do not fit into memory
are left out and named. Small ones, "/16", keep the layers of the real ones and have a sixteenth of their widths,
vocabularies and heads and a third of the pictures' sides: 64 tokens a picture instead of 576. What small models show is
that everything runs, and a CPU's shape of the curves; ratios of the real pairs come from a GPU.

Writes latency.json (every measured second), latency.md (a section for docs/results/benchmarks.md) and the figures.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from draftsmith.core.section import torch_dtype
from draftsmith.eval.tables import Table, markdown
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.parts import num_parameters
from draftsmith.models.targets.llava.decoder import LlavaDecoder
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.scripts.papers import latency_figures as latency_plots
from draftsmith.scripts.papers.latency import Measured, caption_times, grid_times, stage_times, step_times
from draftsmith.scripts.papers.latency_models import (
    CAPTIONERS,
    Shape,
    draft_config,
    free_bytes,
    random_model,
    target_config,
)
from draftsmith.scripts.papers.latency_report import captions_table, remarks_table, stages_table, steps_table
from draftsmith.scripts.timing import Action, command, machine
from transformers import LlavaConfig, LlavaForConditionalGeneration
from transformers.utils import logging

GIB = 2**30
GAMMA = 5  # of TABED's evaluation
TARGETS = {"7B": "llava-1.5-7b-hf", "13B": "llava-1.5-13b-hf"}  # label -> pinned config
DRAFTS = {"68M": "llama-68m", "160M": "llama-160m"}


@dataclass(frozen=True)
class Sizes:
    """The models' shape and what is asked of them."""

    shape: Shape
    rows: tuple[int, ...] = (1, 2, 3, 4)
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 3072)
    gammas: tuple[int, ...] = (1, 3, 5, 7)
    images: tuple[int, ...] = (1, 2, 5)
    num_text: int = 64  # text tokens of a prompt; with 576 per image: 0.6k, 1.2k and 2.9k, as in appendix J.3
    num_tokens: int = 100  # decoded ones
    num_caption_tokens: int = 16
    burst: int = 4  # passes in one measurement


SIZES = {
    "full": Sizes(Shape()),
    "small": Sizes(Shape(narrower=16, smaller_sides=3), lengths=(64, 128, 192, 256, 320), num_text=8, burst=3),
}
QUICK: dict[str, Any] = {"rows": (1, 2), "gammas": (1, 5), "num_tokens": 20, "num_caption_tokens": 4}


# Measuring


@dataclass
class Run:
    """One process's models, as far as they fit into memory."""

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    seed: int
    num_rounds: int
    left_out: list[str] = field(default_factory=list)

    def fits(self, name: str, need: int) -> bool:
        """Whether `need` more bytes are free; noted where they are not."""
        free = free_bytes(self.device)
        if need > free:
            self.left_out.append(f"{name} (needs {need / GIB:.1f} GiB, {free / GIB:.1f} GiB are free)")
        return need <= free

    def model(self, name: str, build: Callable[[], Any], *, beside: int) -> Any | None:
        """A random model, or None where it does not fit with `beside` bytes of caches and states."""
        with torch.device("meta"):
            weights = num_parameters([build()]) * self.dtype.itemsize
        if not self.fits(name, weights + beside):
            return None
        return random_model(build, dtype=self.dtype, device=self.device, seed=self.seed)

    def target(self, name: str, config: LlavaConfig) -> LlavaTarget | None:
        """Build the target; None where it does not fit beside all prompts' caches and the longest prefill's states."""
        text: Any = config.text_config
        places = [n * config.image_seq_length + self.sizes.num_text + self.sizes.num_tokens for n in self.sizes.images]
        states = 16 * max(places) * text.intermediate_size * self.dtype.itemsize
        beside = self._cache_bytes(config, 2 * sum(places)) + states
        model = self.model(name, lambda: LlavaForConditionalGeneration(config), beside=beside)
        ids = config.image_token_index
        return None if model is None else LlavaTarget(model, num_token_ids=ids, image_token_id=ids)

    def drafts(self, target: LlavaConfig) -> dict[str, CachedDecoder]:
        """The drafts that fit in memory, by label."""
        drafts: dict[str, CachedDecoder] = {}
        ids, shape = target.image_token_index, self.sizes.shape
        for name, pinned in DRAFTS.items():
            config = draft_config(pinned, target, shape)
            build = partial(LlavaForConditionalGeneration, config)
            model = self.model(shape.label(name), build, beside=self._grid_bytes(config, self.sizes.rows))
            if model is not None:
                drafts[shape.label(name)] = LlavaDecoder(model, num_token_ids=ids, never=(ids,))
        return drafts

    def captioners(self) -> dict[str, Callable[[int], Action]]:
        """The captioners that fit in memory, by name."""
        captioners, shape = {}, self.sizes.shape
        for name, captioner in CAPTIONERS.items():
            model = self.model(name, partial(captioner.build, shape), beside=GIB // 2)
            if model is not None:
                captioners[name] = captioner.captioning(model, shape, self.sizes.num_caption_tokens)
        return captioners

    def rows(self, name: str, config: LlavaConfig) -> list[int]:
        """Those of the grid whose caches fit side by side."""
        fitting: list[int] = []
        for b in self.sizes.rows:
            if self.fits(f"{name} with B = {b}", self._grid_bytes(config, (*fitting, b))):
                fitting.append(b)
        return fitting

    def _grid_bytes(self, config: LlavaConfig, rows: tuple[int, ...]) -> int:
        places = max(self.sizes.lengths) + max(self.sizes.gammas)
        return self._cache_bytes(config, sum(rows) * places) + GIB // 2

    def _cache_bytes(self, config: LlavaConfig, positions: int) -> int:
        text: Any = config.text_config
        keys = text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
        return 2 * text.num_hidden_layers * keys * positions * self.dtype.itemsize


Sections = dict[str, list[Measured]]


def measure(run: Run) -> Sections:
    """By section: steps (Table 6), draft (Fig. 5), target (Fig. 6), stages (Fig. 9), captions (Table 4)."""
    sizes = run.sizes
    parts: Sections = {key: [] for key in ("steps", "draft", "target", "stages", "captions")}
    configs = {sizes.shape.label(name): target_config(pinned, sizes.shape) for name, pinned in TARGETS.items()}
    first, config = next(iter(configs.items()))
    drafts = run.drafts(config)
    if drafts:
        label, decoder = next(iter(drafts.items()))
        progress(f"T(B, S, 1) of {label}")
        parts["draft"] = grid_times(label, decoder, rows=sizes.rows, lengths=sizes.lengths, gammas=(1,),
                                    burst=sizes.burst, num_rounds=run.num_rounds)  # fmt: skip
    for name, config in configs.items():
        # One target at a time: it is let go before the next one is made.
        beside_target(run, name, config, drafts, parts, all_sections=name == first)
    return parts


def beside_target(run: Run, name: str, config: LlavaConfig, drafts: dict[str, CachedDecoder], parts: Sections, *,
                  all_sections: bool) -> None:  # fmt: skip
    """Add the times of a target to `parts`: steps; with `all_sections` also target, stages and captions.

    Adds nothing where the target does not fit in memory.
    """
    target, sizes = run.target(name, config), run.sizes
    if target is None:
        return
    often: dict[str, Any] = {"num_rounds": run.num_rounds}
    progress(f"a token of {name} and of {', '.join(drafts)}")
    context = config.image_seq_length + sizes.num_text + sizes.num_tokens // 2
    parts["steps"] += step_times((name, target), drafts, length=context, gamma=GAMMA, burst=sizes.burst,
                                 graphs=run.device.type == "cuda", **often)  # fmt: skip
    if not all_sections:
        return
    progress(f"T(B, S, gamma) of {name}")
    parts["target"] = grid_times(name, target.decoder, rows=run.rows(name, config), lengths=sizes.lengths,
                                 gammas=sizes.gammas, burst=sizes.burst, **often)  # fmt: skip
    progress("stages of a request")
    prompts: dict[str, Any] = {"images": sizes.images, "num_text": sizes.num_text, **often}
    parts["stages"] = stage_times(target, num_tokens=sizes.num_tokens, **prompts)
    progress("captioners beside the prefill")
    parts["captions"] = caption_times(target, run.captioners(), **prompts)


def progress(line: str) -> None:
    """Say on stderr what is being measured."""
    print(f"... {line}", file=sys.stderr, flush=True)


# What is written


def report(run: Run, timings: Sections, settings: str) -> str:
    """A section for docs/results/benchmarks.md."""
    sizes, shape = run.sizes, run.sizes.shape
    parts = [
        "## Latency of targets, drafts and captioners",
        f"`{command()}`: {settings}. Random weights. Medians with quartiles over {run.num_rounds} rounds, in each of "
        "which everything of a table runs once; ratios are of the same round.",
    ]
    if not shape.published:
        parts.append(
            f"X/{shape.narrower} has X's layers, {shape.narrower} times narrower, and pictures whose sides are "
            f"{shape.smaller_sides} times smaller: they show a CPU's behaviour and not the ratios of the real pairs."
        )
    if run.left_out:
        parts.append("Left out for want of memory: " + "; ".join(run.left_out) + ".")
    if timings["steps"]:
        parts += [
            f"TABED's Table 6: one token of one row after {timings['steps'][0].at['S']} positions. A draft pays where "
            "tau is above the last column.",
            shown(steps_table(timings["steps"], GAMMA, full=shape.published)),
        ]
    if timings["target"]:
        parts += [
            "Figs. 5 and 6: T(B, S, gamma) is a pass over gamma positions after S others in each of B rows; verifying "
            "gamma drafted tokens takes gamma + 1 positions.",
            shown(remarks_table(timings["draft"], timings["target"])),
        ]
    if timings["stages"]:
        parts += [f"Fig. 9: {sizes.num_tokens} tokens, decoded plainly.", shown(stages_table(timings["stages"]))]
    if timings["captions"]:
        parts += [
            f"Table 4: captions of exactly {sizes.num_caption_tokens} tokens, all images in one batch, Florence-2 with "
            f"{CAPTIONERS['Florence-2'].num_beams} beams and the others greedy; pixels lie ready on the device. The "
            "prefill includes the vision encoder. Below 1 a captioner that has a device of its own ends before it.",
            shown(captions_table(timings["captions"], full=shape.published)),
        ]
    return "\n\n".join(parts) + "\n"


def shown(table: Table) -> str:
    """A table as Markdown."""
    return "\n".join(markdown(table)).rstrip()


def draw(folder: Path, parts: Sections) -> None:
    """Write one plot into `folder` for each section that was measured; steps have none."""
    if parts["draft"]:
        latency_plots.by_length(folder / "draft-step.png", parts["draft"], lines_of="B")
    if parts["target"]:
        single = [m for m in parts["target"] if m.at["B"] == 1]
        latency_plots.by_length(folder / "verification.png", single, lines_of="gamma")
    if parts["stages"]:
        latency_plots.stages(folder / "stages.png", parts["stages"])
    if parts["captions"]:
        latency_plots.captioners(folder / "captioners.png", parts["captions"])


def main() -> None:
    """Measures every point, writes figures and numbers to `--output`, and prints the report."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=tuple(SIZES), default="full" if cuda else "small")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16" if cuda else "float32")
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds, for a look")
    parser.add_argument("--rounds", type=int, help="default 15, and 3 where quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/latency"))
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    sizes = SIZES[arguments.sizes]
    if arguments.quick:
        sizes = replace(sizes, lengths=sizes.lengths[::2], **QUICK)
    torch.manual_seed(arguments.seed)
    run = Run(sizes, torch.device("cuda" if cuda else "cpu"), torch_dtype(arguments.dtype), arguments.seed,
              arguments.rounds or (3 if arguments.quick else 15))  # fmt: skip
    settings = f"{machine()}, seed {run.seed}, {arguments.dtype}, scaled dot product attention, no compilation"
    parts = measure(run)
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = report(run, parts, settings)
    (arguments.output / "latency.md").write_text(text)
    record = {"command": command(), "settings": settings, "sizes": asdict(sizes), "left_out": run.left_out}
    record["measured"] = {section: [m.record() for m in measured] for section, measured in parts.items()}
    (arguments.output / "latency.json").write_text(json.dumps(record, indent=1))
    draw(arguments.output, parts)
    print(text)


if __name__ == "__main__":
    main()
