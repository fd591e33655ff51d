"""A small recipe that trains a draft LVLM and heads on one target, and measures them in one table."""

from heads_run import DATA, FORMAT, LANGUAGE, STEPS, VISION
from stages_run import runner

METHODS = {
    "M": {"drafter": "draft"},
    "T": {"drafter": "draft", "mode": "T"},
    "MT*": {"drafter": "draft", "mode": "MT*", "tree": {"kind": "chain", "gamma": 3}},
    "M, dynamic": {"drafter": "draft", "tree": "8-3-3"},
    "EAGLE-3": {"drafter": "eagle3", "tree": "8-3-3"},
    "MSD": {"drafter": "msd", "tree": "static"},
    "SpecVLM": {"drafter": {"kind": "pruned", "ratio": 0.5, "model": "target"}, "tree": "sage"},
    "M with EAGLE-3": {"drafter": {"kind": "ensemble", "members": ["M", "EAGLE-3"]}},
    "adaptive": {
        "drafter": {"kind": "ensemble", "members": ["M", "T", "EAGLE-3"], "weights": {"kind": "inverse"}},
        "tree": "8-3-3",
    },
}
RECIPE = {
    "target": {"kind": "llava", "language_model": LANGUAGE, "vision_tower": VISION, "vision_feature_layer": -1},
    "drafter": {"kind": "lvlm", "language_model": LANGUAGE, "vision_tower": "target"},
    "stages": {
        "world": {
            "kind": "generate", "image_size": 24, "patch_size": 8, "vocab_size": 420,
            "splits": {"train": {"caption": 6, "sums": 4}, "held_out": {"caption": 2, "difference": 1, "sums": 1}},
        },
        "target": {
            "kind": "train", "model": "target", "trainable": ["language_model"], "format": FORMAT,
            "data": DATA | {"path": "train"}, "steps": 1, **STEPS,
        },
        "draft": {
            "kind": "train", "trainable": ["projector", "language_model"], "format": FORMAT,
            "data": DATA | {"path": "train"}, "steps": 1, **STEPS,
        },
        "eagle3": {
            "kind": "train", "drafter": {"kind": "eagle3", "taps": [1, 2, 3]}, "format": FORMAT,
            "data": DATA | {"path": "train"}, "source": {"kind": "online"}, "from": "scratch", "steps": 1, **STEPS,
        },
        "msd": {
            "kind": "train", "drafter": {"kind": "msd"}, "format": FORMAT, "data": DATA | {"path": "train"},
            "source": {"kind": "online"}, "from": "scratch", "steps": 1, **STEPS,
        },
        "evaluate": {
            "kind": "evaluate", "format": FORMAT, "max_new_tokens": 6, "methods": METHODS,
            "benchmarks": {"held out": {"data": DATA | {"path": "held_out"}}},
        },
    },
}  # fmt: skip
loaded, run = runner(lambda: RECIPE, "table-test")
