"""Whole runs on the pretend device, a tiny one of each track: everything is trained, cached, drawn and measured there.

They run as rank 1 of a node; what is named no device would go to the other one and raise there, or be counted.
"""

import copy
import json
import tempfile
from pathlib import Path

import heads_run
import visual_run
from draftsmith.recipes.config.load import load
from draftsmith.trainers.train.engine import init_distributed
from stages_run import load_spelled, run_loaded

from pretend_cuda import engine
from pretend_cuda.device import COUNTS, GRAPHS


def _result(output, told, stages):
    """What a run leaves: stages that finished, what its report says of greedy tokens, where work ran."""
    report = (output / "evaluate" / "report.md").read_text()
    return {
        "finished": [name for name in stages if (output / name / "done.json").is_file()],
        "identical": "Greedy outputs are identical to plain decoding" in report,
        "launched on": sorted(place for place in COUNTS.devices if place.startswith("cuda")),
        "trained on": sorted(engine.TRAINED_ON),
        "graphs": list(GRAPHS),
        "said": next((line for line in report.splitlines() if "CUDA graphs:" in line), ""),
        "requests": sum("requests decoded" in line for line in told),
        "replayed": _replayed(output),
    }


def _replayed(output):
    """Method -> passes of target and drafter that rows tell were replayed."""
    found = {}
    for line in (output / "evaluate" / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        counts = row["details"].get("replayed", {"target": 0, "drafter": 0})
        found[row["method"]] = [a + b for a, b in zip(found.get(row["method"], (0, 0)), counts.values(), strict=True)]
    return found


def _begin():
    init_distributed()
    COUNTS.clear()
    GRAPHS.clear()
    engine.TRAINED_ON.clear()
    return Path(tempfile.mkdtemp()) / "run"


LANGUAGE = heads_run.LANGUAGE | {"num_hidden_layers": 2}
VISION = heads_run.VISION | {"image_size": 48, "patch_size": 16}
NONE = ("name", "colors", "place", "probe", "count", "word", "edit", "story", "fact", "aside", "difference")
SPLITS = {
    "train": {**dict.fromkeys((*NONE, "conversation"), 0), "caption": 6, "attribute": 6, "sums": 2},
    "align": {"caption": 4},
    "seen": {**dict.fromkeys(("conversation", "place", "count", "probe", "difference"), 0), "attribute": 1},
    "text": {"fact": 0, "aside": 0, "sums": 1},
    "held_out": {"caption": 0, "conversation": 0, "attribute": 1},
    "binding": {"attribute": 1},
}  # fmt: skip
DRAFT = [
    f"target.language_model={LANGUAGE}",
    f"target.vision_tower={VISION}",
    f"drafter.language_model={LANGUAGE}",
    "stages.world.vocab_size=420",
    *(f"stages.world.splits.{split}.{kind}={n}" for split, kinds in SPLITS.items() for kind, n in kinds.items()),
    *(f"stages.{name}.batch_size=4" for name in ("seeing", "target", "language", "pretrain", "finetune")),
    *(f"stages.{name}.steps=1" for name in ("seeing", "target", "language", "finetune")),
    "stages.finetune.validation.every=1",
    "stages.evaluate.max_new_tokens=5",
    "stages.evaluate.warmup=0",
    "stages.evaluate.probes=null",
]


def draft():
    """A draft LVLM: trained, measured in two modes; then the same target over two devices."""
    output = _begin()

    def run(*more, **chosen):
        return run_loaded(load(["recipe=demo/lvlm-from-nothing", f"output={output}", *DRAFT, *more]), output, **chosen)

    stages = ("world", "seeing", "target", "language", "pretrain", "finetune", "evaluate")
    one = _result(output, run(), stages)
    cycles = _cycles(output)
    COUNTS.clear()
    GRAPHS.clear()
    spread = _result(output, run("target.device_map=balanced", stages=["evaluate"], restart="evaluate"), stages)
    return {"one": one, "spread": spread, "same cycles": cycles == _cycles(output) and len(cycles) > 0}


def _cycles(output):
    """What each cycle of each request gave."""
    rows = [json.loads(line) for line in (output / "evaluate" / "rows.jsonl").read_text().splitlines()]
    return [(row["method"], row["request"], row["emitted"], row["accepted"]) for row in rows]


def states():
    """A head of a language model: answers, states in shards, a head learned from them, clips decoded."""
    output = _begin()
    recipe = copy.deepcopy(heads_run.RECIPE)
    stages = recipe["stages"]
    del stages["msd"]
    evaluate = stages["evaluate"]
    evaluate["benchmarks"]["sets"]["sets"] = ["clips-6", "GSM8K"]
    evaluate |= {"lengths": [2], "probes": None, "max_new_tokens": 4}
    evaluate["methods"] = {name: evaluate["methods"][name] for name in ("Sparrow", "SpecVLM")}
    told = run_loaded(load_spelled(recipe, "states", output), output)
    return _result(output, told, stages)


def images():
    """An image head: a tokenizer, a generator and a text encoder learned from scratch, codes and features, a head."""
    output = _begin()
    steps = {"vq": 1, "reader": 1, "target": 2, "head": 2, "head_without_dropout": 1}
    few = [f"stages.{name}.steps={n}" for name, n in steps.items()]
    few += ["stages.head.decoding.every=2", "stages.world.splits={train: 24, test: 2}"]
    few += ["stages.evaluate.benchmarks.captions.prompts.max_samples=2", "stages.evaluate.warmup=0"]
    loaded = load(["recipe=demo/visual-ar", f"output={output}", *visual_run.FEW, *few])
    return _result(output, run_loaded(loaded, output), loaded.recipe.stages)
