#!/usr/bin/env python
"""Records what the project does today, and checks later that it still does the same.

    scripts/freeze.py record                 # all of it, into tests/goldens
    scripts/freeze.py check                  # run it again; every difference by name; exit code 1 where there is one
    scripts/freeze.py check lvlm video       # these runs alone (`dry-runs` is one of them)

Each run is a shipped demo recipe at a tiny size, on one CPU thread. It records the losses of every step, names, shapes
and hashes of the saved weights, manifests, names of files, the tokens and accepted counts of every request, what
reports say without the clock, exported drafters, and the dry-run texts of all shipped recipes. A change that is meant
is recorded again in the same commit, which says in one line what it is due to.

Everything is compared bit for bit on a machine like the one that recorded it (processor and torch, in machine.json).
On another machine the last bits of a sum differ, and with them tokens: there losses are compared within 1%, names,
shapes and texts as ever, and hashes, tokens and reports not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# One thread, no network, no tracker, no GPU; set before torch is imported.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
}

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"

Settings = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------------------
# What is run: overrides of each recipe. Recipe keys that are renamed are renamed here, and nothing else of this script.
# ---------------------------------------------------------------------------------------------------------------------

# A random target with large weights says different things to different prompts: some drafts stand, some fall.
LANGUAGE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 48, "patch_size": 16,
}  # fmt: skip
# A draft of its target's shape begins as its copy, and training moves it a little away.
TINY_LVLM = {
    "target.language_model": LANGUAGE, "target.vision_tower": VISION, "drafter.language_model": LANGUAGE,
    "stages.world.vocab_size": 420,
}  # fmt: skip
SCENARIOS = (
    "name", "caption", "colors", "attribute", "conversation", "place", "probe", "count", "word", "difference", "edit",
    "story", "clip", "sums", "fact", "aside",
)  # fmt: skip
FORMAT = {"system": "", "image_rule": "verbatim"}


def split(kinds: str, **counts: int) -> dict[str, int]:
    """Records of a split: of the `kinds` that the recipe names none, but for `counts`."""
    return dict.fromkeys(kinds.split(), 0) | counts


def train(*stages: str, **settings: Any) -> Settings:
    """The same settings for several train stages, every step logged."""
    settings = {"log_every": 1} | settings
    return {f"stages.{stage}.{key.replace('__', '.')}": value for stage in stages for key, value in settings.items()}


LVLM_WORLD = {
    "stages.world.splits.train": split(
        "name colors place probe count word edit story fact aside",
        caption=9, attribute=9, conversation=3, difference=3, sums=3,
    ),
    "stages.world.splits.align": {"caption": 16},
    "stages.world.splits.seen": split("count probe difference", attribute=2, conversation=1, place=1),
    "stages.world.splits.text": split("aside", sums=2, fact=1),
    "stages.world.splits.held_out": split("caption", attribute=3, conversation=1),
    "stages.world.splits.binding": {"attribute": 2},
}  # fmt: skip
LVLM: Settings = {
    **TINY_LVLM,
    **LVLM_WORLD,
    **train("target", "language", "pretrain", "finetune", batch_size=8),
    **train("target", "language", "finetune", steps=3),
    "stages.finetune.validation.every": 2,
    "stages.finetune.validation.micro_batch_size": 4,
    "stages.evaluate.max_new_tokens": 10,
    "stages.evaluate.warmup": 0,
}
# Beside the demo's own evaluation: sampling, trees and ensembles.
SEEN = {"from": "world", "path": "seen", "aspect": "square", "max_length": 256}
SAMPLED = {
    "kind": "evaluate", "format": FORMAT, "warmup": 0, "max_new_tokens": 10, "benchmarks": {"pictures": {"data": SEEN}},
}  # fmt: skip
MODES = {mode: {"mode": mode} for mode in ("M", "T", "P", "MT", "MT*")}
SEEDED = [f"{stage}_{seed}" for seed in (1, 2) for stage in ("language", "pretrain", "finetune")]
DISTILLED = ["distill", "distill_1", "distill_2"]

OV_KINDS = "name colors place probe count fact"
OV: Settings = {
    **TINY_LVLM,
    "drafter.language_model": LANGUAGE | {"max_position_embeddings": 64},
    "stages.world.splits.words": split("", **dict.fromkeys(SCENARIOS[:8] + SCENARIOS[9:15], 2)),
    "stages.world.splits.single": split(OV_KINDS, caption=8, attribute=8, conversation=6, sums=2),
    "stages.world.splits.pairs": {"difference": 3, "edit": 3},
    "stages.world.splits.stories": {"story": 4},
    "stages.world.splits.clips": {"clip": 4},
    "stages.world.splits.seen_single": split("", attribute=1, conversation=1, place=0),
    "stages.world.splits.seen_pairs": {"difference": 1, "edit": 0},
    "stages.world.splits.seen_stories": {"story": 1},
    "stages.world.splits.seen_clips": {"clip": 1},
    "stages.world.splits.binding": {"attribute": 2},
    **train("target", "language", "align", "knowledge", "single_image", "onevision", "single_only", batch_size=8),
    **train("few_single_image", "few_onevision", "few_single_only", batch_size=8),
    **train("target", "language", "knowledge", "single_image", "onevision", "single_only", steps=2),
    **train("few_single_image", "few_onevision", "few_single_only", steps=2),
    "stages.evaluate.max_new_tokens": 8,
    "stages.evaluate.warmup": 0,
}
SUITE: Settings = {
    key: value
    for key, value in OV.items()
    if not key.startswith("stages.world.splits.words")
} | {
    "stages.world.splits.words": split("word aside", **dict.fromkeys(SCENARIOS[:8] + SCENARIOS[9:15], 2)),
    "stages.world.splits.single": split(OV_KINDS + " word aside", caption=8, attribute=8, conversation=6, sums=2),
    "stages.world.suite": 1,
    **train("captioner", steps=2, batch_size=8),
    "stages.suite.max_new_tokens": 6,
    "stages.suite.warmup": 0,
    "stages.suite.record_weights": 1,
    "stages.suite.benchmarks.suite.quality.max_new_tokens": 6,
}  # fmt: skip

READ_LANGUAGE = LANGUAGE | {"num_hidden_layers": 4, "num_attention_heads": 4, "initializer_range": 0.3}
VIDEO_KINDS = "name colors place"
VIDEO: Settings = {
    "target.language_model": READ_LANGUAGE,
    "target.vision_tower": VISION,
    "stages.world.vocab_size": 420,
    "stages.world.splits.words": dict.fromkeys(
        ("name", "caption", "colors", "attribute", "place", "clip", "sums", "fact"), 2
    ),
    "stages.world.splits.single": split(VIDEO_KINDS, caption=4, attribute=4),
    "stages.world.splits.text": {"sums": 6, "fact": 2},
    "stages.world.splits.clips": {"clip": 4},
    "stages.world.splits.clips_12": {"clip": 2},
    "stages.world.splits.clips_32": {"clip": 1},
    "stages.world.splits.binding": {"attribute": 2},
    "stages.world.clip_frames": {"clips_12": 6, "clips_32": 8},
    "stages.world.video_suite": 1,
    "stages.world.clip_lengths": [2, 4, 6],
    # Until it says the commonest words, which a head learns in a few steps.
    **train("target", steps=60, batch_size=8, optim__lr=0.005, optim__warmup_steps=5, log_every=5),
    "stages.answers.max_new_tokens": 8,
    "stages.answers.batch_size": 8,
    "stages.text_states.batch_size": 4,
    "stages.states.batch_size": 4,
    **train("sparrow_text", "sparrow", "msd_text", "msd", steps=12, batch_size=4),
    **train("sparrow_text", "sparrow", "msd_text", "msd", optim__lr=0.01, optim__warmup_steps=2),
    "stages.evaluate.benchmarks.sets.sets": ["clips-6", "COCO", "GQA"],
    "stages.evaluate.lengths": [2, 6],
    "stages.evaluate.max_new_tokens": 8,
    "stages.evaluate.warmup": 0,
}  # fmt: skip
# Every kind of head on the same target: what a head reads, learns and proposes, and where its states come from.
HEAD = {"kind": "train", "from": "scratch", "format": FORMAT, "steps": 12, "batch_size": 4, "log_every": 1}
HEAD |= {"optim": {"lr": 0.01, "betas": [0.9, 0.95], "warmup_steps": 2, "clip_norm": 0.5}}
CACHED = HEAD | {"source": {"kind": "cached", "from": "states"}}
VIDEO_READING = {"pooling": "none", "newline": "none", "num_frames": 32}
PICTURES = {"from": "world", "path": "pictures.yaml", "aspect": "square", "video": VIDEO_READING, "max_length": 384}
EAGLE3 = {"kind": "eagle3", "taps": [1, 2, 3]}
HEADS: Settings = {
    "stages.states.drafters": [EAGLE3, *({"kind": kind} for kind in ("msd", "eagle", "vispec", "hivis"))],
    "stages.eagle": CACHED | {"drafter": {"kind": "eagle"}},
    "stages.eagle_online": HEAD | {"drafter": {"kind": "eagle"}, "data": PICTURES, "source": {"kind": "online"}},
    "stages.eagle3": CACHED | {"drafter": EAGLE3},
    "stages.eagle3_kept": HEAD
    | {"drafter": EAGLE3, "data": PICTURES, "source": {"kind": "cached_on_first_epoch"}},
    "stages.vispec": CACHED | {"drafter": {"kind": "vispec"}},
    "stages.hivis": CACHED | {"drafter": {"kind": "hivis"}},
    "stages.all_heads": {
        "kind": "evaluate", "format": FORMAT, "warmup": 0, "max_new_tokens": 8, "temperatures": [0.0, 1.0],
        "benchmarks": {
            "sets": {
                "kind": "sets", "data": PICTURES | {"path": "video_suite"}, "sets": ["clips-6", "COCO"],
                "convention": "verbatim",
            },
        },
        "lengths": [4],
        "probes": {"requests": 1, "confidence": True, "states": True},
        "methods": {
            "EAGLE, dynamic": {"drafter": "eagle", "tree": "8-3-3"},
            "EAGLE, static": {"drafter": "eagle_online", "tree": "static"},
            "EAGLE-3, dynamic": {"drafter": "eagle3", "tree": "8-3-3"},
            "EAGLE-3, chain, sampled": {"drafter": "eagle3_kept", "tree": "chain", "draw": "sample"},
            "EAGLE-3, sage": {"drafter": "eagle3", "tree": "sage"},
            "ViSpec": {"drafter": "vispec", "tree": "8-3-3"},
            "HiViS": {"drafter": "hivis", "tree": "8-3-3"},
            "Sparrow, flat": {"drafter": "sparrow", "tree": "8-3-3", "vata": False, "positions": "flat"},
            "MSD, half": {"drafter": "msd", "tree": "8-3-3", "visual_share": 0.5},
            "SpecVLM": {"drafter": {"kind": "pruned", "ratio": 0.5}, "tree": "chain"},
        },
    },
}  # fmt: skip

TREE = {"kind": "dynamic", "total": 8, "depth": 2, "width": 3}
ADT = {"kind": "adt", "total": 8, "width_step": 1, "width_range": [1, 4], "initial_width": 2}
RELAXED = {"kind": "lantern", "k": 4, "delta": 0.2}
DRAWN = {"target": 20, "vq": 4, "reader": 3, "head": 4, "head_without_dropout": 2}
VISUAL: Settings = {
    "target.image_size": 16,
    "target.shape": {
        "num_layers": 1, "num_heads": 2, "dim": 16, "ffn_hidden": 32, "vocab_size": 16, "caption_dim": 16,
        "caption_slots": 16, "init_std": 0.3, "dropout": 0.1,
    },
    "target.vq": {
        "base_channels": 8, "ch_mult": [1, 1, 1], "num_res_blocks": 1, "z_channels": 8, "codebook_size": 16,
        "codebook_dim": 8, "groups": 8,
    },
    "target.text_encoder": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0},
    "stages.world.image_size": 16,
    "stages.world.splits": {"train": 60, "test": 6},
    **{f"stages.{stage}.samples_per_shard": 25 for stage in ("pictures", "codes", "features")},
    **train(*DRAWN, batch_size=8),
    **{f"stages.{stage}.steps": steps for stage, steps in DRAWN.items()},
    **{f"stages.{stage}.optim.warmup_steps": 1 for stage in ("vq", "target", "head")},
    "stages.vq.revive_every": None,
    **train("target", "head", optim__lr=0.01),
    "stages.head.select": "last",
    "stages.head.data.held_out": 0.25,
    "stages.head.validation": {"every": 2, "micro_batch_size": 4, "max_samples": 10},
    "stages.head.decoding.tree": TREE,
    "stages.head.decoding.every": 4,
    "stages.head.decoding.prompts.max_samples": 2,
    "stages.evaluate.benchmarks.captions.prompts.max_samples": 2,
    "stages.evaluate.probes": None,  # its figures take as long as all the rest
    "stages.evaluate.methods.EAGLE-2.tree": TREE,
    "stages.evaluate.methods.ADT-Tree.tree": ADT,
    "stages.evaluate.methods.LANTERN": {"tree": TREE, "rule": RELAXED},
    "stages.evaluate.methods.ADT-Tree + LANTERN": {"tree": ADT, "rule": RELAXED},
    "stages.evaluate.methods.EAGLE-2, head without condition dropout.tree": TREE,
}  # fmt: skip

# Run -> its recipe, its overrides, and whose results are exported.
RUNS: dict[str, dict[str, Any]] = {
    "lvlm": {
        "recipe": "demo/lvlm",
        "set": LVLM
        | {
            "stages.sampled": SAMPLED
            | {"temperatures": [1.0], "tree": {"kind": "chain", "gamma": 3}}
            | {"methods": {name: mode | {"draw": "sample"} for name, mode in MODES.items()}},
            "stages.trees": SAMPLED | {"tree": "8-3-3", "methods": MODES},
            "stages.adaptive": SAMPLED | {"tree": "sage", "methods": MODES},
        },
        "exports": ["finetune"],
    },
    "lvlm-distilled": {
        "recipe": "demo/lvlm-distilled",
        "set": LVLM
        | train(*SEEDED, *DISTILLED, batch_size=8)
        | train(*(stage for stage in SEEDED if "pretrain" not in stage), *DISTILLED, steps=2)
        | {"stages.answers.max_new_tokens": 8, "stages.answers.batch_size": 8, "stages.answers.samples_per_shard": 7}
        | {"stages.compare.max_new_tokens": 6, "stages.compare.warmup": 0},
        "exports": ["distill"],
    },
    "lvlm-ov": {"recipe": "demo/lvlm-ov", "set": OV, "exports": ["onevision"]},
    "lvlm-seeds": {
        "recipe": "demo/lvlm-seeds",
        "set": LVLM
        | train(*SEEDED, batch_size=8)
        | train(*(stage for stage in SEEDED if "pretrain" not in stage), steps=2)
        | {"stages.seeds.max_new_tokens": 6, "stages.seeds.warmup": 0},
        "exports": [],
    },
    "suite": {"recipe": "demo/suite", "set": SUITE, "exports": []},
    "video": {
        "recipe": "demo/video",
        "set": VIDEO | HEADS,
        "exports": ["sparrow", "msd", "eagle", "eagle3", "vispec", "hivis"],
    },
    "visual-ar": {"recipe": "demo/visual-ar", "set": VISUAL, "exports": ["head"]},
    "medusa": {"recipe": "demo/visual-ar", "set": VISUAL | {"drafter": {"kind": "medusa"}}, "exports": ["head"]},
}  # fmt: skip
DRY_RUNS = "dry-runs"
REPORTS = ("report.json", "suite.json")

# ---------------------------------------------------------------------------------------------------------------------
# What is left out
# ---------------------------------------------------------------------------------------------------------------------

# Keys of any JSON: of the clock, of this machine, of versions. Fingerprints have a version of their own.
LEFT_OUT = re.compile(
    r".*_(s|ms|bytes|gib)|time|date|seconds|(DSR|ESR|SR|T_)\b.*|(DSR|ESR|SR|T)_.*|prefill_share|.*speedup.*"
    r"|command|device|torch|versions|tested_with|transformers_version|path|fingerprint"
    r"|findings"
)
# Printed tables of seconds, where a row is one measurement; what they say of tokens stands in the report's cells, too.
TIME_TABLES = re.compile("Breakdown|Time by operation")
# Files of a stage that say how long it took, or that hold what others say already.
UNRECORDED = re.compile(
    r"done\.json|fingerprint\.json|metrics\.jsonl|report\.json|suite\.json|.*\.(lock|npz|png|md|sqlite)"
)


def cleaned(value: Any) -> Any:
    """Without what depends on the clock, the machine or versions."""
    if isinstance(value, dict):
        value = _untimed_table(value)
        return {str(key): cleaned(item) for key, item in value.items() if not LEFT_OUT.fullmatch(str(key))}
    if isinstance(value, list | tuple):
        return [cleaned(item) for item in value]
    return value


def _untimed_table(value: dict[str, Any]) -> dict[str, Any]:
    """A table that names its columns: without the cells of those that are left out, or of times altogether."""
    columns = value.get("columns")
    if not isinstance(columns, list):
        return value
    if TIME_TABLES.match(str(value.get("title"))):
        return {"title": value["title"]}
    kept = [number for number, column in enumerate(columns) if not any(map(LEFT_OUT.fullmatch, _names(column)))]

    def cells(row: Any) -> Any:
        if isinstance(row, dict):
            return {key: cells(item) if isinstance(item, list) else item for key, item in row.items()}
        return [row[number] for number in kept] if isinstance(row, list) and len(row) == len(columns) else row

    rows = {key: [cells(row) for row in value[key]] for key in ("rows", "lines") if isinstance(value.get(key), list)}
    return value | {"columns": [columns[number] for number in kept]} | rows


def _names(column: Any) -> list[str]:
    """What a column is called: a text, or a list of texts and of sections with a key."""
    if isinstance(column, dict):
        return [str(column.get("key", "")), str(column.get("name", ""))]
    return [name for part in column for name in _names(part)] if isinstance(column, list) else [str(column)]


# ---------------------------------------------------------------------------------------------------------------------
# What is recorded of a run
# ---------------------------------------------------------------------------------------------------------------------


class Decoded:
    """Notes every call of the decoding loop: stage -> request -> one line for each call."""

    def __init__(self) -> None:
        self.output: Path | None = None
        self.lines: dict[str, dict[str, list[str]]] = {}

    def wrap(self) -> None:
        """Puts the recorder in the place of `generate`, also where it was imported by name before."""
        from draftsmith.eval import loop

        original = loop.generate

        def generate(target: Any, drafter: Any, request: Any, *more: Any, **named: Any) -> Any:
            generation = original(target, drafter, request, *more, **named)
            self.note(request, drafter, generation)
            return generation

        for module in [module for name, module in sys.modules.items() if name.startswith("draftsmith")]:
            if getattr(module, "generate", None) is original:
                module.generate = generate  # type: ignore[attr-defined]

    def note(self, request: Any, drafter: Any, generation: Any) -> None:
        cycles = " ".join(f"{c.num_drafted}/{c.num_nodes}/{c.num_accepted}/{c.num_emitted}" for c in generation.cycles)
        how = "plain" if drafter is None else "drafted"
        line = f"{how}: {' '.join(map(str, generation.tokens))} | {cycles}"
        name = request.name or getattr(request, "caption", "")
        self.lines.setdefault(self.stage(), {}).setdefault(name, []).append(line)

    def stage(self) -> str:
        """The stage that has begun and not finished, as its folder says."""
        folders = [] if self.output is None else [path for path in self.output.iterdir() if path.is_dir()]
        begun = [path.name for path in folders if (path / "fingerprint.json").is_file()]
        return next((name for name in begun if not (self.output / name / "done.json").is_file()), "none")  # type: ignore[operator]

    def table(self) -> dict[str, dict[str, list[str]]]:
        """Sorted, since the order in which methods are measured is no promise; equal calls as one line."""
        return {
            stage: {name: [f"{count}x {line}" for line, count in sorted(Counter(lines).items())]
                    for name, lines in sorted(requests.items())}
            for stage, requests in sorted(self.lines.items())
        }  # fmt: skip


def arguments_of(run: dict[str, Any], output: Path) -> list[str]:
    """The command line of a run."""
    settings = [f"{key}={'null' if value is None else json.dumps(value)}" for key, value in run["set"].items()]
    return [f"recipe={run['recipe']}", f"output={output}", *settings]


def record_run(name: str, folder: Path) -> dict[str, Any]:
    """Runs a recipe in this process. Returns file name -> what it is to hold."""
    from draftsmith.recipes.cli import main

    output = folder / "run"
    decoded = Decoded()
    decoded.output = output
    decoded.wrap()
    run = RUNS[name]
    code = main(arguments_of(run, output))
    if code:
        raise SystemExit(f"{name}: the run ended with exit code {code}")
    stages = sorted(path.name for path in output.iterdir() if (path / "done.json").is_file())
    main_file = {"stages": {stage: of_stage(output / stage) for stage in stages}, "decoded": decoded.table()}
    reports = {f"{stage}/{file}": cleaned(json.loads(path.read_text()))
               for stage in stages for file in REPORTS if (path := output / stage / file).is_file()}  # fmt: skip
    found: dict[str, Any] = {f"{name}.json": main_file, f"{name}-reports.json": reports}
    if run["exports"]:
        found[f"{name}-exports.json"] = {stage: exports_of(output, stage, folder) for stage in run["exports"]}
    text = json.dumps(found).replace(str(output), "<run>").replace(str(ROOT), "<repository>")
    return dict(json.loads(text))


def of_stage(folder: Path) -> dict[str, Any]:
    """Names of files, metrics of every step, manifest, and hashes of weights and data."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = Counter(_shown(str(path.relative_to(folder))) for path in files)
    found: dict[str, Any] = {"files": dict(sorted(names.items()))}
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        found["metrics"] = [cleaned(json.loads(line)) for line in metrics.read_text().splitlines()]
    manifest = folder / "draftsmith.json"
    if manifest.is_file():
        found["manifest"] = cleaned(json.loads(manifest.read_text()))
    kept = [path for path in files if "checkpoints" not in path.parts and not UNRECORDED.fullmatch(path.name)]
    found["weights"] = {
        str(path.relative_to(folder)): tensors_of(path) for path in kept if path.suffix == ".safetensors"
    }
    digests: dict[str, Any] = {}
    # What an evaluation has measured is its report; the rest are logs with times.
    is_evaluation = any((folder / name).is_file() for name in REPORTS)
    for path in () if is_evaluation else kept:
        if path.suffix != ".safetensors" and path != manifest:
            # Of pictures one digest a folder.
            key = path.parent if path.suffix in (".png", ".mp4") else path
            digests.setdefault(_shown(str(key.relative_to(folder))), hashlib.sha256()).update(content(path, folder))
    if digests:
        found["data"] = {key: digest.hexdigest()[:16] for key, digest in sorted(digests.items())}
    return found


def _shown(name: str) -> str:
    """A file's name without hashes and numbers of records."""
    return re.sub(r"\d{3,}", "#", re.sub(r"[0-9a-f]{12,}", "*", name))


def content(path: Path, folder: Path) -> bytes:
    """What a digest is made of: JSON without what depends on clock and machine."""
    data = path.read_bytes()
    if path.suffix == ".json":
        with contextlib.suppress(ValueError):
            data = json.dumps(cleaned(json.loads(data)), sort_keys=True).encode()
    return path.name.encode() + data.replace(str(folder.parent).encode(), b"<run>")


def tensors_of(path: Path) -> dict[str, str]:
    """Name -> type, shape and hash of each tensor of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, about in sorted(json.loads(data[8 : 8 + size]).items()):
        if name != "__metadata__":
            start, end = about["data_offsets"]
            digest = hashlib.sha256(data[8 + size + start : 8 + size + end]).hexdigest()[:16]
            found[name] = f"{about['dtype']} {about['shape']} {digest}"
    return found


def exports_of(output: Path, stage: str, folder: Path) -> dict[str, Any]:
    """engine, prompts -> what was written, or that the engine cannot express it."""
    from draftsmith.core.errors import UserError
    from draftsmith.models.exports import ENGINES, export_drafter

    found: dict[str, Any] = {}
    for engine in ENGINES:
        for prompts in ("all", "text"):
            place = folder / "exports" / stage / f"{engine}-{prompts}"
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                export_drafter(output / stage, place, engine, target=str(output / "target"), prompts=prompts)  # type: ignore[arg-type]
            except UserError:
                found[f"{engine}, {prompts}"] = "refused"
                continue
            files = sorted(path for path in place.rglob("*") if path.is_file())
            told: dict[str, Any] = {}
            for path in files:
                name = str(path.relative_to(place))
                if path.suffix == ".safetensors":
                    told[name] = tensors_of(path)
                elif path.suffix == ".json" and not name.startswith("tokenizer"):
                    told[name] = cleaned(json.loads(path.read_text()))
                else:
                    told[name] = hashlib.sha256(content(path, place)).hexdigest()[:16]
            found[f"{engine}, {prompts}"] = told
    return found


def dry_runs(only: str | None = None) -> dict[str, str]:
    """File name -> dry-run text of each shipped recipe."""
    from draftsmith.recipes.cli import main

    # As if every disk had room: a dry run warns where states do not fit, which depends on the machine.
    shutil.disk_usage = lambda path: SimpleNamespace(total=1 << 60, used=0, free=1 << 60)  # type: ignore[assignment,return-value]
    found = {}
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        name = str(path.relative_to(ROOT / "recipes").with_suffix(""))
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([f"recipe={name}", "dry_run=true"])
        text = said.getvalue().replace(str(ROOT), "<repository>").replace(str(Path.home()), "~")
        found[f"{DRY_RUNS}/{name.replace('/', '.')}.txt"] = text + (f"exit code {code}\n" if code else "")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Recording and checking
# ---------------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the last bits of a number depend on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    processor = models[0] if models else platform.processor() or platform.machine()
    return {"processor": processor, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def _child(name: str, folder: str) -> None:
    """One run in a forked process: what it sets, seeds and wraps stays there. Its result goes to a file."""
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    found = dry_runs() if name == DRY_RUNS else record_run(name, Path(folder))
    Path("found.json").write_text(json.dumps(found))


def run_one(name: str) -> dict[str, Any]:
    """File name -> what it is to hold."""
    with tempfile.TemporaryDirectory(prefix="freeze-") as folder:
        process = multiprocessing.get_context("fork").Process(target=_child, args=(name, folder))
        start = time.monotonic()
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name} failed:\n{(Path(folder) / 'log.txt').read_text()[-4000:]}")
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        return dict(json.loads((Path(folder) / "found.json").read_text()))


def preload() -> None:
    """Imports what every run needs, once; the runs are forked from here."""
    import deepspeed  # noqa: F401
    import draftsmith.recipes.cli
    import torch

    with contextlib.suppress(ImportError):
        import draftsmith.recipes.schema
        import draftsmith.trainers.run  # noqa: F401
    torch.set_num_threads(1)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else pretty(value) + "\n")


def read(path: Path) -> Any:
    if not path.is_file():
        return None
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else text


def pretty(value: Any, depth: int = 0) -> str:
    """JSON with a line for each key, and lists of numbers in one line."""
    pad = " " * (depth + 1)
    if isinstance(value, dict) and value:
        lines = [f"{pad}{json.dumps(key)}: {pretty(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list | str) for item in value):
        return "[\n" + ",\n".join(pad + pretty(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
    return json.dumps(value)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Key and value of everything in a file; texts by their lines."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{key}/{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        # In any order: what a request was continued with.
        for item, count in Counter(value).items():
            yield f"{key}/{item}", count
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from leaves(item, f"{key}[{number}]")
    elif isinstance(value, str) and "\n" in value:
        for number, line in enumerate(value.splitlines(), 1):
            yield f"line {number}", line
    else:
        yield key, value


ABSENT = "(absent)"
_HASH = re.compile(r"[0-9a-f]{16}$")


def differences(old: Any, new: Any, *, same_machine: bool) -> list[str]:
    """`key: old -> new` for everything that differs."""
    before, after = dict(leaves(old)), dict(leaves(new))
    return [
        f"{key}: {before.get(key, ABSENT)!r} -> {after.get(key, ABSENT)!r}"
        for key in [*before, *(key for key in after if key not in before)]
        if not _equal(key, before.get(key, ABSENT), after.get(key, ABSENT), same_machine)
    ]


def _equal(key: str, old: Any, new: Any, same_machine: bool) -> bool:
    if isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new):
        return True
    if same_machine or old == new:
        return bool(old == new and type(old) is type(new))
    if key.startswith("decoded/"):
        return True
    if isinstance(old, str) and isinstance(new, str):
        return _HASH.sub("", old) == _HASH.sub("", new)
    if isinstance(old, float) and isinstance(new, float):
        return not key.endswith("loss") or math.isclose(old, new, rel_tol=1e-2)
    return False


def record(names: list[str]) -> int:
    for name in names:
        for file, value in run_one(name).items():
            write(GOLDENS / file, value)
    write(GOLDENS / "machine.json", machine())
    size = sum(path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file())
    print(f"{GOLDENS}: {size / 1e6:.2f} MB")
    return 0


def check(names: list[str]) -> int:
    here, there = machine(), read(GOLDENS / "machine.json")
    if here != there:
        print(f"recorded on {there}, and this is {here}: losses within 1%, and neither hashes, tokens nor reports")
    count = 0
    for name in names:
        found = run_one(name)
        for file, value in found.items():
            if here != there and file.endswith("-reports.json"):
                continue
            for line in differences(read(GOLDENS / file), json.loads(json.dumps(value)), same_machine=here == there):
                print(f"{file}: {line}")
                count += 1
        gone = {f"{DRY_RUNS}/{path.name}" for path in (GOLDENS / DRY_RUNS).glob("*.txt")} - found.keys()
        for file in sorted(gone if name == DRY_RUNS else ()):
            print(f"{file}: recorded, and no recipe makes it")
            count += 1
    print("no difference" if not count else f"{count} differences")
    return 1 if count else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("runs", nargs="*", help=f"of {DRY_RUNS}, {', '.join(RUNS)}; none: all")
    asked = parser.parse_args()
    if unknown := set(asked.runs) - {DRY_RUNS, *RUNS}:
        parser.error(f"no run {', '.join(sorted(unknown))}")
    os.environ |= ENVIRONMENT
    preload()
    return {"record": record, "check": check}[asked.command](asked.runs or [DRY_RUNS, *RUNS])


if __name__ == "__main__":
    sys.exit(main())
