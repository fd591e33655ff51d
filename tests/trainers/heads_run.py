"""A small recipe of the video track: a tiny target, cached states, two heads, and clips decoded at two lengths."""

from stages_run import runner

LANGUAGE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 24, "patch_size": 8,
}  # fmt: skip
FORMAT = {"system": "", "image_rule": "verbatim"}
VIDEO = {"num_frames": 4, "fps": None, "min_frames": 2, "newline": "none"}
DATA = {"from": "world", "aspect": "square", "max_length": 256, "video": VIDEO}
STEPS = {"batch_size": 4, "optim": {"lr": 0.001}}
RECIPE = {
    "target": {"kind": "llava", "language_model": LANGUAGE, "vision_tower": VISION, "vision_feature_layer": -1},
    "drafter": {"kind": "sparrow"},
    "stages": {
        "world": {
            "kind": "generate", "image_size": 24, "patch_size": 8, "vocab_size": 420, "video_suite": 2,
            "clip_lengths": [2, 6], "splits": {"train": {"caption": 4, "sums": 4, "clip": 4}},
        },
        "target": {
            "kind": "train", "model": "target", "trainable": ["language_model"], "format": FORMAT,
            "data": DATA | {"path": "train"}, "steps": 1, **STEPS,
        },
        "answers": {
            "kind": "regenerate", "format": FORMAT, "data": DATA | {"path": "train", "kinds": ["caption"]},
            "max_new_tokens": 6,
        },
        "states": {
            "kind": "cache", "format": FORMAT, "data": DATA | {"path": "train"}, "drafters": [{"kind": "msd"}],
        },
        "head": {"kind": "train", "format": FORMAT, "source": {"kind": "cached"}, "steps": 2, **STEPS},
        "msd": {
            "kind": "train", "format": FORMAT, "source": {"kind": "cached"}, "drafter": {"kind": "msd"},
            "from": "scratch", "steps": 1, **STEPS,
        },
        "evaluate": {
            "kind": "evaluate", "format": FORMAT, "max_new_tokens": 6, "temperatures": [0.0, 1.0], "warmup": 0,
            "benchmarks": {
                "sets": {
                    "kind": "sets", "data": DATA | {"path": "video_suite", "max_samples": 1},
                    "sets": ["clips-6", "SEED-Bench", "GSM8K"], "convention": "stock",
                },
            },
            "lengths": [2, "54"],
            "probes": {
                "requests": 1, "states": True,
                "importance": {"sets": ["SEED-Bench"], "layers": [0]},
            },
            "methods": {
                "Sparrow": {"drafter": "head", "tree": "8-3-3"},
                "Sparrow without VATA": {"drafter": "head", "tree": "8-3-3", "vata": False, "positions": "flat"},
                "MSD": {"drafter": "msd", "tree": "static"},
                "SpecVLM": {"drafter": {"kind": "pruned", "ratio": 0.5}, "tree": "sage", "temperatures": [0.0]},
            },
        },
    },
}  # fmt: skip
loaded, run = runner(lambda: RECIPE, "reading-test")
