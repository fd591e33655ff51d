#!/usr/bin/env python
"""How much memory the distillation loss takes beyond the models' own states, and how it grows with the tokens.

    scripts/benchmark_distillation.py           prints a section for docs/benchmarks.md
    scripts/benchmark_distillation.py --tokens 8192 --chunk 512

One training step (forward and backward) of a draft of the 68M's width and vocabulary, with a frozen target beside it,
each in a fresh process: the same batch with half of its tokens supervised and with all of them, the vocabulary in
chunks or at once. "Own states" is the peak of the same step with a loss that needs no vocabulary: weights, both models'
hidden states and activations, gradients. The loss takes what the peak has beyond it. On a GPU it is the allocator's
peak, on a CPU the process's resident set.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from typing import Any, cast

import torch
from draftsmith.core.loss import StepLoss
from draftsmith.core.nouns import Batch
from draftsmith.core.states import TargetStates
from draftsmith.eval.timing import command, machine
from draftsmith.models.distillation import DistillObjective, DistillTraining, Teacher
from draftsmith.models.llava import TokenIds, assemble, llava_config
from transformers import CLIPVisionConfig, LlamaConfig, PreTrainedModel

VOCAB, TOKENS = 32064, 32000
BOUND = 1.1


def model(width: int, layers: int) -> PreTrainedModel:
    """Random weights; the tower is a small one, since the batch is text."""
    text = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=VOCAB, max_position_embeddings=4096,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    return assemble(llava_config(text, vision, TokenIds(VOCAB, TOKENS, 1, 2, 0)))


def batch(tokens: int, supervised: int, rows: int) -> Batch:
    """`tokens` labels in `rows` rows, the last of each supervised so that there are `supervised` in all."""
    length = tokens // rows + 1
    ids = torch.randint(3, TOKENS, (rows, length), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.zeros(rows, length, dtype=torch.bool)
    loss_mask[:, length - supervised // rows :] = True
    seen, modality = torch.ones(rows, length, dtype=torch.bool), torch.zeros(rows, length, dtype=torch.int8)
    positions, pixels = torch.arange(length).expand(1, rows, length), torch.zeros(1, 3, 28, 28)
    return Batch(ids, seen, loss_mask, modality, positions, pixels, tuple("r" * rows), num_dummy_images=1)


class OwnStates(DistillTraining):
    """The same step without the vocabulary: both models run, and the loss is a sum of states."""

    def forward(
        self, batch: Batch, states: TargetStates | None = None, target_choice: torch.Tensor | None = None
    ) -> StepLoss:
        """The sum of both models' states at supervised positions."""
        assert states is not None and states.feature is not None
        keep = batch.loss_mask[:, 1:]
        hidden, goal = self.hidden_states(batch)[:, :-1][keep], states.feature[:, :-1][keep]
        unused = 0.0 * cast(Any, self.llava).lm_head.weight.sum()
        return StepLoss(hidden.float().sum() + goal.float().sum() + unused, keep.sum())


def measure(tokens: int, supervised: int, chunk: int, rows: int) -> float:
    """Peak in MiB of one step in this process; chunk 0: without the vocabulary."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    objective = DistillObjective(kind="distill", chunk=chunk or 1)
    banned = torch.zeros(VOCAB, dtype=torch.bool)
    banned[TOKENS:] = True
    kind: Any = DistillTraining if chunk else OwnStates
    teacher = Teacher(cast(Any, cast(torch.nn.Module, model(1024, 2)).to(device)))
    module = kind(
        model(768, 2), ["projector", "language_model"], objective=objective, teacher=teacher,
        banned=banned, gradient_checkpointing=False,
    ).to(device).train()  # fmt: skip
    given = batch(tokens, supervised, rows).to(device)
    assert given.num_supervised == supervised, (given.num_supervised, supervised)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    module(given, teacher.states(given)).loss_sum.backward()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="supervised in the larger case")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)  # supervised, chunk: a fresh process
    given = parser.parse_args()
    if given.measure:
        supervised, chunk = given.measure
        print(json.dumps(measure(given.tokens, supervised, chunk, given.rows)))
        return

    def peaks(supervised: int, chunk: int) -> list[float]:
        again = [sys.executable, __file__, "--tokens", str(given.tokens), "--rows", str(given.rows)]
        again += ["--measure", str(supervised), str(chunk)]
        # Large blocks go back to the system when they are freed: else the resident set keeps what is long gone.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}
        found = [
            subprocess.run(again, check=True, capture_output=True, text=True, env=environment)
            for _ in range(given.repeats)
        ]
        return [float(one.stdout.splitlines()[-1]) for one in found]

    half, whole = given.tokens // 2, given.tokens
    own = {count: statistics.median(peaks(count, 0)) for count in (half, whole)}
    print(f"`{command()}`: {machine()}, seed 0, float32; draft of width 768, target of width 1024, {VOCAB} ids.")
    print(f"Medians of {given.repeats} fresh processes; own states {own[half]:.0f} and {own[whole]:.0f} MiB.\n")
    print("| vocabulary | beyond own states, half supervised | all supervised | ratio | bound | whole peaks | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, chunk in ((f"in chunks of {given.chunk}", given.chunk), ("at once", whole)):
        first, second = (peaks(count, chunk) for count in (half, whole))
        a, b = statistics.median(first), statistics.median(second)
        beyond = a - own[half], b - own[whole]
        ratio = beyond[1] / beyond[0]
        bound = f"at most {BOUND}" if chunk == given.chunk else ""
        shown = f"{ratio:.3f}" if not bound or ratio <= BOUND else f"**{ratio:.3f}: missed**"
        spread = f"[{min(first):.0f}, {max(first):.0f}], [{min(second):.0f}, {max(second):.0f}] MiB"
        print(f"| {name} | {beyond[0]:.0f} MiB | {beyond[1]:.0f} MiB | {shown} | {bound} | {spread} | {b / a:.3f} |")


if __name__ == "__main__":
    main()
