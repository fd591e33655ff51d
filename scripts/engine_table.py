#!/usr/bin/env python
"""Trains tiny targets and heads, exports them as served pairs, and verifies each in vLLM: one row a drafter.

    DRAFTSMITH_VLLM_PATCHES=1 scripts/engine_table.py OUT     every target and drafter; about an hour on two cores
    scripts/engine_table.py OUT --targets llava --drafters medusa msd middle lvlm      those that need no patch

Everything goes through the commands that users have: train, export, verify-engine. vLLM runs in the environment that
DRAFTSMITH_VLLM_PYTHON names (scripts/test_engines makes one). OUT keeps runs, exports and logs; what is there is not
made again. Where a fault is the engine's own, the pair is verified once more with its known faults patched. The table
goes to OUT/table.md; docs/exports.md has what was measured. Exits with 3 where an export differs.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import yaml
from draftsmith.eval.engines.engine_check import Verification, verify_engine
from draftsmith.eval.engines.program import check_plugin, find_python
from draftsmith.eval.tables import markdown, words
from draftsmith.models.formats import export_drafter, export_target
from draftsmith.models.formats.patched_lvlm import PatchedMode

# Heads of 32 wide, the smallest that the CPU engine has a kernel for.
LANGUAGE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.09,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 48, "patch_size": 16,
}  # fmt: skip
QWEN_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
QWEN_TOWER = {
    "depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 64,
    "intermediate_size": 128, "out_hidden_size": 128, "window_size": 32, "fullatt_block_indexes": [1],
    "tokens_per_second": 4,
}  # fmt: skip
TARGETS = {
    "llama": {"kind": "causal_lm", "language_model": {"model_type": "llama", **LANGUAGE}},
    "llava": {
        "kind": "llava", "language_model": {"model_type": "llama", **LANGUAGE}, "vision_tower": CLIP,
        "vision_feature_layer": -1,
    },
    "qwen2_5_vl": {
        "kind": "qwen2_5_vl", "vision_tower": QWEN_TOWER,
        "language_model": {"model_type": "qwen2_5_vl_text", **LANGUAGE, "rope_scaling": QWEN_ROPE},
    },
}  # fmt: skip
TAPS = [2, 4, 6]
MASK = 0  # an id that no text has: of padding or of what the tokenizer does not know
DRAFT = {
    "kind": "lvlm", "vision_tower": "target",
    "language_model": {
        "model_type": "llama", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 3, "max_position_embeddings": 1024,
    },
}  # fmt: skip
DRAFTERS: dict[str, dict] = {
    "eagle": {"kind": "eagle", "image": "placeholder"},
    "eagle3": {"kind": "eagle3", "taps": TAPS, "visual_slots": "read", "image": "placeholder"},
    "dflash": {"kind": "dflash", "block_size": 5, "num_layers": 1, "taps": TAPS, "mask_token_id": MASK},
    "peagle": {
        "kind": "peagle", "taps": TAPS, "visual_slots": "read", "image": "placeholder", "parallel_tokens": 4,
        "mask_token_id": MASK,
    },
    "medusa": {"kind": "medusa", "num_heads": 4},
    "msd": {"kind": "msd"},
    "sparrow": {"kind": "sparrow", "train_visual_share": 0},
    "middle": {"kind": "sparrow", "vata": False},
    "vispec": {"kind": "vispec", "positions": "compact"},
    # Narrower than their target: one made for our plugin, and one as the paper has it, which serves two modes.
    "lvlm": DRAFT | {"projector_input": "projected", "first_token": False},
    "lvlm_m": DRAFT,
    "lvlm_t": DRAFT,
}  # fmt: skip
# Drafters that not every target has.
ONLY = {"medusa": ("llama", "llava"), **dict.fromkeys(
    ("msd", "sparrow", "middle", "vispec", "lvlm", "lvlm_m", "lvlm_t"), ("llava",))}  # fmt: skip
# Drafters whose weights another one's stage trains -> that stage, and the mode that is exported.
MODES: dict[str, tuple[str, PatchedMode]] = {"lvlm_m": ("lvlm_m", "M"), "lvlm_t": ("lvlm_m", "T")}


def recipe(target: str) -> dict:
    """A tiny target of this family, its own answers and states, and a head of every kind on them."""
    sees = target != "llama"
    qwen = target == "qwen2_5_vl"
    form = {"system": "", "image_rule": "verbatim", "template": "qwen_vl" if qwen else "v1"}
    splits = {"train": {"name": 400, "caption": 800, "colors": 300, "sums": 200, "fact": 100, "aside": 200}} if sees \
        else {"train": {"sums": 1200, "fact": 400}}  # fmt: skip
    data = {"from": "world", "path": "train", "max_length": 256} | ({"aspect": "square"} if sees and not qwen else {})
    drafters = {name: dict(settings) for name, settings in DRAFTERS.items() if target in ONLY.get(name, TARGETS)}
    drafts = {name: drafters.pop(name) for name in [*drafters] if drafters[name]["kind"] == "lvlm"}
    drafts.pop("lvlm_t", None)
    if not sees:
        for settings in drafters.values():
            settings.pop("image", None)
    optim = {"lr": 2.0e-3, "betas": [0.9, 0.95], "warmup_steps": 20, "clip_norm": 1.0}
    trainable = ["vision_tower", "projector", "language_model"] if sees else ["language_model"]
    learns = {"kind": "train", "from": "scratch", "format": form, "steps": 200, "batch_size": 16, "optim": optim}
    head = learns | {"source": {"kind": "cached", "from": "states"}}
    return {
        "target": TARGETS[target],
        "drafter": drafters["eagle3"],
        "stages": {
            "world": {"kind": "generate", "splits": splits, **({"patch_size": 8} if qwen else {})},
            "target": {"kind": "train", "model": "target", "trainable": trainable, "format": form, "data": data,
                       "steps": 400, "batch_size": 16, "optim": optim | {"lr": 1.0e-3}},
            "answers": {"kind": "regenerate", "format": form, "data": data, "max_new_tokens": 48, "batch_size": 64},
            "states": {"kind": "cache", "format": form, "data": data, "answers": {"from": "answers"},
                       "drafters": list(drafters.values()), "batch_size": 32},
            **{name: head | {"drafter": settings} for name, settings in drafters.items()},
            **{name: learns | {"data": data, "trainable": trainable[1:], "drafter": settings}
               for name, settings in drafts.items()},
        },
    }  # fmt: skip


def verified(target: str, drafter: str, out: Path, python: str, *, patched: bool = False) -> Verification:
    """Export and serve one pair of a finished run.

    Args:
        patched: the engine's known faults are.
    """
    run, place = out / "runs" / target, out / "exports" / target
    if not (place / "target").is_dir():
        export_target(run / "target", place / "target")
    if not (place / drafter).is_dir():
        stage, mode = MODES.get(drafter, (drafter, None))
        export_drafter(run / stage, place / drafter, "vllm", target=str(place / "target"), mode=mode)
    scratch = out / "served" / f"{target}-{drafter}"
    scratch.mkdir(parents=True, exist_ok=True)
    target_folder = str(place / "target")
    return verify_engine(place / drafter, scratch, python=python, target=target_folder, without_known_faults=patched)


HEADS = ("target", "drafter", "prompts", "plain answers", "drafted answers", "chains equal to ours",
         "drafted tokens accepted by our loop, by vLLM")  # fmt: skip


def rows(target: str, drafter: str, found: Verification) -> list[tuple[str, ...]]:
    """Return the rows of the table, one for each group of requests."""
    return [
        (target, drafter, cell.group, f"{cell.plain}/{cell.requests}", f"{cell.same}/{cell.requests}",
         f"{cell.equal}/{cell.chains}", f"{cell.accepted[0]}, {cell.accepted[1]}")
        for cell in found.cells
    ]  # fmt: skip


def main() -> int:
    """Train, export and verify; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--python", help="an interpreter with vLLM")
    asked = parser.parse_args()
    python, faults = find_python(asked.python), 0
    if own := {"msd", "middle", "sparrow", "vispec", "lvlm", "lvlm_m", "lvlm_t"} & {*asked.drafters}:
        check_plugin(python, patches=bool(own & {"sparrow", "vispec", "lvlm_m", "lvlm_t"}))
    table: list[tuple[str, ...]] = []
    named: list[str] = []
    for target in asked.targets:
        path = asked.out / f"{target}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(recipe(target), sort_keys=False))
        command = ["train", f"recipe={path}", f"output={asked.out / 'runs' / target}"]
        subprocess.run([sys.executable, "-m", "draftsmith", *command], check=True, stdout=sys.stderr)
        for drafter in (name for name in asked.drafters if target in ONLY.get(name, TARGETS)):
            found = verified(target, drafter, asked.out, python)
            table += rows(target, drafter, found)
            named += [f"- {target}, {drafter}: {problem}. {hint}." for problem, hint in found.faults]
            if found.faults and all("the engine's fault" in hint for _, hint in found.faults):
                found = verified(target, drafter, asked.out, python, patched=True)
                table += rows(f"{target}, patched", drafter, found)
            faults += len(found.faults)
            (asked.out / "table.md").write_text("\n".join([*markdown(words(HEADS, table)), *named, ""]))
    print((asked.out / "table.md").read_text())
    return 3 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
