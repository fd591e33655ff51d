"""The visual demo at the smallest size that still has every part, and runs of its stages in this process."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from draftsmith.core.tracking import TrackingConfig
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.targets.llamagen.files import save_model
from draftsmith.models.targets.llamagen.section import (
    TEXT_ENCODER,
    LlamaGenTargetConfig,
    build_text_encoder,
    build_transformer,
)
from draftsmith.models.targets.llamagen.vq import VqTokenizer
from draftsmith.recipes.config.load import load
from draftsmith.trainers.run.context import Context, EngineConfig
from PIL import Image
from stages_run import run_loaded

SIDE = 16  # pixels; 4 x 4 codes
SHAPE = {
    "num_layers": 1, "num_heads": 2, "dim": 16, "ffn_hidden": 32, "vocab_size": 16, "caption_dim": 16,
    "caption_slots": 16, "init_std": 0.3, "dropout": 0.1,
}  # fmt: skip
VQ = {
    "base_channels": 8, "ch_mult": [1, 1, 1], "num_res_blocks": 1, "z_channels": 8, "codebook_size": 16,
    "codebook_dim": 8, "groups": 8,
}  # fmt: skip
TEXT = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
TREE = {"kind": "dynamic", "total": 8, "depth": 2, "width": 3}
ADT = {"kind": "adt", "total": 8, "width_step": 1, "width_range": [1, 4], "initial_width": 2}
CHAIN = {"kind": "chain", "gamma": 4}
RELAXED = {"kind": "lantern", "k": 4, "delta": 0.2}
# Of the recipe's methods those whose trees are too large here; the others stay as they are.
METHODS = {"EAGLE-2": {"tree": TREE}, "ADT-Tree": {"tree": ADT}, "LANTERN": {"tree": TREE, "rule": RELAXED},
           "ADT-Tree + LANTERN": {"tree": ADT, "rule": RELAXED}, "chain": {"tree": CHAIN},
           "LANTERN, chain": {"tree": CHAIN, "rule": RELAXED},
           "EAGLE-2, head without condition dropout": {"tree": TREE}}  # fmt: skip
# The goldens have the rows of Jacobi decoding.
RECIPE = """# The image demo with its trained drafters alone
extends: demo/visual-ar
stages: {evaluate: {methods: {Jacobi: null, "Jacobi, coupled": null, "Jacobi, uncoupled": null}}}
"""
# Enough for a target that does not say the same everywhere, and a head that is right now and then.
STEPS = {"vq": 20, "reader": 3, "target": 60, "head": 8, "head_without_dropout": 2}
# Overrides of recipe=demo/visual-ar: 60 pictures of 16 codes, and a handful of steps.
FEW = [
    f"target.image_size={SIDE}",
    f"target.shape={SHAPE}",
    f"target.vq={VQ}",
    f"target.text_encoder={TEXT}",
    f"stages.world.image_size={SIDE}",
    "stages.world.splits={train: 60, test: 6}",
    *(f"stages.{name}.samples_per_shard=25" for name in ("pictures", "codes", "features")),
    *(f"stages.{name}.steps={steps}" for name, steps in STEPS.items()),
    *(f"stages.{name}.batch_size=8" for name in STEPS),
    *(f"stages.{name}.optim.warmup_steps=1" for name in ("vq", "target", "head")),
    "stages.vq.revive_every=null",
    "stages.target.optim.lr=0.01",
    "stages.head.optim.lr=0.01",
    "stages.head.log_every=1",
    "stages.head.select=last",
    "stages.head.data.held_out=0.25",
    "stages.head.validation={every: 2, micro_batch_size: 4, max_samples: 10}",
    f"stages.head.decoding.tree={TREE}",
    "stages.head.decoding.every=4",
    "stages.head.decoding.prompts.max_samples=2",
    "stages.evaluate.benchmarks.captions.prompts.max_samples=3",
    "stages.evaluate.probes=null",  # its figures take as long as all the rest
    *(f"stages.evaluate.methods.{name}={method}" for name, method in METHODS.items()),
]


def run(output: Path, *settings: str, stages=None, restart=None, recipe="demo/visual-ar") -> list[str]:
    """Stages of the tiny demo; returns what was said."""
    loaded = load([f"recipe={recipe}", f"output={output}", *FEW, *settings])
    return run_loaded(loaded, output, stages=stages, restart=restart)


def context(folder: Path, target: LlamaGenTargetConfig, inputs: dict[str, Path], **changes) -> Context:
    """Of one stage by hand; what it says is in `say.lines`."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)

    say.lines = lines
    settings = {
        "name": "stage", "seed": 0, "fingerprint": "f", "drafter": None, "engine": EngineConfig(),
        "tracking": TrackingConfig(), "say": say,
    }  # fmt: skip
    return Context(folder=folder, target=target, inputs=inputs, **(settings | changes))


def translators(folder: Path) -> SimpleNamespace:
    """`target` and `inputs` of a context: a random image tokenizer and text encoder, as their stages save them."""
    target = LlamaGenTargetConfig(
        kind="llamagen", shape=SHAPE, condition="text", image_size=SIDE, vq=VQ, text_encoder=TEXT, cfg_scale=3.0
    )
    vq = VqTokenizer(target.vq)
    vq.reset_parameters(torch.Generator().manual_seed(0))
    save_model(vq, folder / "vq")
    words = train_tokenizer(["a picture with many words in it", "a short one"] * 4, 300)
    torch.manual_seed(0)
    encoder = build_text_encoder(target, vocab_size=len(words), pad_id=words.pad_token_id)
    encoder.save_pretrained(folder / TEXT_ENCODER)
    words.save_pretrained(folder / TEXT_ENCODER)
    return SimpleNamespace(target=target, inputs={"vq": folder / "vq", "text": folder})


def with_target(folder: Path) -> SimpleNamespace:
    """The same with a target of random weights beside them, which is `model`."""
    made = translators(folder)
    made.model = build_transformer(made.target, seed=0)
    torch.nn.init.normal_(made.model.output.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    save_model(made.model, folder / "target")
    made.inputs["target"] = folder / "target"
    return made


def pictures(folder: Path, count: int, side: int = SIDE) -> Path:
    """`<n>.png` beside `<n>.txt`: noise, and a caption that names it."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03d}.png").write_bytes(noise(number, side))
        (folder / f"{number:03d}.txt").write_text(f"a picture with {number} words" + " in it" * (number % 4))
    return folder


def noise(seed: int, side: int = SIDE) -> bytes:
    """A PNG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()
