"""A small recipe whose evaluate stage has a suite: a loud random target, a draft, and the synthetic dataset's own
sets.
"""

import heads_run
from heads_run import FORMAT, VISION
from stages_run import runner

LANGUAGE = heads_run.LANGUAGE | {"num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.4}
DATA = {"from": "world", "aspect": "square", "max_length": 256}
ONE_STEP = {"batch_size": 8, "steps": 1, "optim": {"lr": 0.001}}
RECIPE = {
    "target": {"kind": "llava", "language_model": LANGUAGE, "vision_tower": VISION, "vision_feature_layer": -1},
    # Of the target's config: it begins as its copy, so that it agrees with it in M, and now and then without pictures.
    "drafter": {"kind": "lvlm", "language_model": LANGUAGE, "vision_tower": "target"},
    "stages": {
        "world": {
            "kind": "generate", "image_size": 24, "patch_size": 8, "vocab_size": 420, "suite": 2,
            "splits": {"train": {"caption": 6, "attribute": 6, "sums": 2}},
        },
        "target": {
            "kind": "train", "model": "target", "trainable": ["language_model"], "format": FORMAT,
            "data": DATA | {"path": "train"}, **ONE_STEP,
        },
        "draft": {
            "kind": "train", "trainable": ["projector", "language_model"], "format": FORMAT,
            "data": DATA | {"path": "train"}, **ONE_STEP,
        },
        "captioner": {
            "kind": "train", "model": "captioner", "trainable": ["projector", "language_model"], "format": FORMAT,
            "data": DATA | {"path": "train", "kinds": ["caption"]}, **ONE_STEP,
        },
        "evaluate": {
            "kind": "evaluate", "format": FORMAT, "max_new_tokens": 6,
            "methods": {"M": {}, "T": {"mode": "T"}, "MT*": {"mode": "MT*"}},
            "benchmarks": {
                "suite": {
                    "kind": "tabed", "data": DATA | {"path": "suite"}, "convention": "verbatim",
                    "sets": ["POPE", "Spot", "PSV"], "tasks": ["next", "caption", "NQ"],
                },
            },
        },
    },
}  # fmt: skip
BEFORE = ("world", "target", "draft", "captioner")
loaded, run = runner(lambda: RECIPE, "suite-test")
