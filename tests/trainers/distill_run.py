"""The distillation demo at the smallest size that still has every part, and runs of its stages in this process."""

from pathlib import Path

from draftsmith.recipes.config.load import load
from stages_run import run_loaded

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
# Records of each kind; of all others that the recipe names there is none.
COUNTS = {"train": {"caption": 9, "attribute": 9, "conversation": 3, "difference": 3, "sums": 3},
          "align": {"caption": 8}, "seen": {"attribute": 2, "place": 1}, "text": {"sums": 2},
          "held_out": {"attribute": 3}, "binding": {"attribute": 2}}  # fmt: skip


def _few(split: str, counts: dict[str, int]) -> dict[str, int]:
    named = load(["recipe=demo/lvlm-distilled"]).tree["stages"]["world"]["splits"][split]
    return dict.fromkeys(named, 0) | counts


# Overrides of recipe=demo/lvlm-distilled. A loud random target says different things to different prompts.
FEW = [
    *(f"stages.world.splits.{split}={_few(split, counts)}" for split, counts in COUNTS.items()),
    "stages.world.vocab_size=420",
    f"target.language_model={ {'model_type': 'llama', 'num_hidden_layers': 2, 'max_position_embeddings': 512, 'initializer_range': 0.4} | SIZES }",  # noqa: E501
    *(f"stages.{name}{seed}.steps=2" for name in ("language", "finetune", "distill") for seed in ("", "_1", "_2")),
    *(f"stages.{name}{seed}.batch_size=8" for name in ("finetune", "distill") for seed in ("", "_1", "_2")),
    *(f"stages.{name}.{key}" for name in ("seeing", "target") for key in ("steps=1", "batch_size=8")),
    "stages.answers.max_new_tokens=8",
    "stages.answers.samples_per_shard=7",
    "stages.answers.batch_size=4",
    "stages.evaluate.max_new_tokens=4",
    "stages.compare.max_new_tokens=6",
    "stages.distill.log_every=1",
]
BEFORE = ("world", "seeing", "target", "language", "pretrain", "answers")


def run(output: Path, *settings: str, stages=None, restart=None) -> list[str]:
    """Stages of the tiny demo; returns what was said."""
    loaded = load(["recipe=demo/lvlm-distilled", f"output={output}", *FEW, *settings])
    return run_loaded(loaded, output, stages=stages, restart=restart)
