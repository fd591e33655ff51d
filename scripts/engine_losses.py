#!/usr/bin/env python
"""Answers and losses of a training whose data vLLM makes, compared with those of our own passes: one row a target.

    scripts/engine_losses.py OUT                    every target; about ten minutes on two cores
    scripts/engine_losses.py OUT --targets llava

Each run trains a tiny target, lets both engines answer the same questions, and trains an EAGLE-3 head from our own
states, from the engine's as they come, and from both kept in bf16. vLLM runs in the environment that
DRAFTSMITH_VLLM_PYTHON names (scripts/test_engines makes one). OUT keeps the runs; what is there is not made again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from draftsmith.data.shards.shards import ShardReader
from draftsmith.scripts import timing
from engine_table import TARGETS

VLLM = {"kind": "vllm", "max_num_seqs": 16}
STEPS, QUESTIONS = 50, 200


def recipe(target: str, *, questions: int = QUESTIONS, cached: bool = True) -> dict[str, Any]:
    """A target of a few steps, both engines' answers to the same questions, and the same training from both.

    Args:
        cached: states are kept, too; vLLM keeps none of text alone in these recipes.
    """
    sees, whole = target != "llama", target.startswith("qwen")
    form = {"system": "", "image_rule": "verbatim", "template": "qwen_vl" if whole else "v1"}
    data = {"from": "world", "path": "train", "max_length": 256, "max_samples": questions}
    data |= {"aspect": "square"} if target == "llava" else {}
    optim = {"lr": 2.0e-3, "warmup_steps": 5, "clip_norm": 1.0}
    trained = {"kind": "train", "format": form, "data": data, "steps": STEPS, "batch_size": 8, "optim": optim}
    trained |= {"log_every": 1}
    answers = {"kind": "regenerate", "format": form, "data": data, "max_new_tokens": 32}
    head = trained | {"from": "scratch", "answers": {"from": "answers"}}
    kept = {"kind": "cache", "format": form, "data": data, "answers": {"from": "answers"}}
    from_kept = {key: value for key, value in trained.items() if key != "data"} | {"from": "scratch"}
    splits = {"caption": 100, "colors": 60, "sums": 60} if sees else {"sums": 220}
    parts = ["vision_tower", "projector", "language_model"] if sees else ["language_model"]
    drafter = {"kind": "eagle3", "taps": [1, 3, 6]} | ({"visual_slots": "read", "image": "placeholder"} if sees else {})
    stages = {
        "world": {"kind": "generate", "splits": {"train": splits}} | ({"patch_size": 8} if whole else {}),
        "target": trained | {"model": "target", "trainable": parts},
        "answers": answers,
        "answers_vllm": answers | {"engine": VLLM},
        "own": head,
        "served": head | {"source": {"kind": "online", "engine": VLLM}},
    }
    if cached:
        stages |= {
            "states": kept,
            "states_vllm": kept | {"engine": VLLM},
            "own_kept": from_kept | {"source": {"kind": "cached", "from": "states"}},
            "served_kept": from_kept | {"source": {"kind": "cached", "from": "states_vllm"}},
        }
    return {"target": TARGETS[target], "drafter": drafter, "stages": stages}


def losses(folder: Path) -> list[float]:
    """Of each step of a finished training."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def equal_answers(run: Path) -> tuple[int, int]:
    """Answers with the same ids from both engines, and all."""
    ours, theirs = (ShardReader(run / stage / "answers") for stage in ("answers", "answers_vllm"))
    same = sum(ours[i][1]["ids"].tolist() == theirs[i][1]["ids"].tolist() for i in range(len(ours)))
    return same, len(ours)


def apart(run: Path, ours: str, theirs: str) -> float:
    """The largest relative difference of the losses of any step."""
    own, served = losses(run / ours), losses(run / theirs)
    assert len(own) == len(served) == STEPS
    return max(abs(a - b) / abs(a) for a, b in zip(own, served, strict=True))


def main() -> None:
    """Train both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    asked = parser.parse_args()
    rows = []
    for target in asked.targets:
        path, run = asked.out / f"{target}.yaml", asked.out / "runs" / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(recipe(target), sort_keys=False))
        command = [sys.executable, "-m", "draftsmith", "train", f"recipe={path}", f"output={run}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        same, number = equal_answers(run)
        kept = f"{apart(run, 'own_kept', 'served_kept'):.1e}"
        rows.append((target, f"{same}/{number}", f"{apart(run, 'own', 'served'):.1e}", kept))
    timing.header(f"seed 0, {QUESTIONS} questions, {STEPS} steps of 8 samples")
    timing.table("target", "answers equal to our own", "losses, states computed online", "losses, states kept (bf16)")
    for row in rows:
        timing.row(*row)


if __name__ == "__main__":
    main()
