#!/usr/bin/env python
"""How much memory the distillation loss takes beyond the models' own states, and how it grows with the tokens.

    scripts/benchmark_distillation.py           prints a section for docs/results/benchmarks.md
    scripts/benchmark_distillation.py --tokens 8192 --chunk 512

One training step (forward and backward) of a draft of the 68M's width and vocabulary, with a frozen target beside it,
each in a fresh process: the same batch with half of its tokens supervised and with all of them, the vocabulary in
chunks or at once. "Own states" is the peak of the same step with a loss that needs no vocabulary: weights, both models'
hidden states and activations, gradients. The loss takes what the peak has beyond it. On a GPU it is the allocator's
peak, on a CPU the process's resident set.
"""

from statistics import median
from typing import Any, cast

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.loss import StepLoss
from draftsmith.core.states import TargetStates
from draftsmith.eval import timing
from draftsmith.models.distillation import DistillObjective, DistillTraining, Teacher
from draftsmith.models.llava import TokenIds
from draftsmith.scripts.papers.latency_models import random_llava
from transformers import PreTrainedModel

VOCAB, TOKENS = 32064, 32000
BOUND = 1.1


def model(width: int, layers: int) -> PreTrainedModel:
    """Random weights; the tower is a small one, since the batch is text."""
    text, tower = (width, 4 * width, layers, width // 64), (32, 64, 2, 2)
    return random_llava(text, tower, TokenIds(VOCAB, TOKENS, 1, 2, 0), side=28, patch=14)


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
    device = timing.device()
    banned = torch.zeros(VOCAB, dtype=torch.bool)
    banned[TOKENS:] = True
    kind: Any = DistillTraining if chunk else OwnStates
    teacher = Teacher(cast(Any, model(1024, 2).to(device)))  # type: ignore[arg-type]
    module = kind(
        model(768, 2), ["projector", "language_model"], objective=DistillObjective(kind="distill", chunk=chunk or 1),
        teacher=teacher, banned=banned, gradient_checkpointing=False,
    ).to(device).train()  # fmt: skip
    example = batch(tokens, supervised, rows).to(device)
    assert example.num_supervised == supervised, (example.num_supervised, supervised)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    module(example, teacher.states(example)).loss_sum.backward()
    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else timing.peak_mib()


def main() -> None:
    """Prints peak memory and time of the losses; `--measure` is one fresh process."""
    parser = timing.options(__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="supervised in the larger case")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", type=int, nargs=2, help=timing.HIDDEN)  # supervised, chunk: a fresh process
    asked = parser.parse_args()
    if asked.measure:
        supervised, chunk = asked.measure
        print(measure(asked.tokens, supervised, chunk, asked.rows))
        return

    def peaks(supervised: int, chunk: int) -> list[float]:
        more = ["--tokens", asked.tokens, "--rows", asked.rows, "--measure", supervised, chunk]
        # Large blocks go back to the system when they are freed: else the resident set keeps what is long gone.
        freeing = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}
        return [float(timing.answer_of(timing.fresh_process(*more, **freeing))) for _ in range(asked.repeats)]

    half, whole = asked.tokens // 2, asked.tokens
    own = {count: median(peaks(count, 0)) for count in (half, whole)}
    timing.header(f"seed 0, float32; draft of width 768, target of width 1024, {VOCAB} ids")
    print(f"Medians of {asked.repeats} fresh processes; own states {own[half]:.0f} and {own[whole]:.0f} MiB.\n")
    timing.table("vocabulary", "beyond own states, half supervised", "all supervised", "ratio", "bound", "whole peaks",
                 "ratio")  # fmt: skip
    for name, chunk in ((f"in chunks of {asked.chunk}", asked.chunk), ("at once", whole)):
        first, second = (peaks(count, chunk) for count in (half, whole))
        few, many = median(first) - own[half], median(second) - own[whole]
        bounded = chunk == asked.chunk
        shown = f"**{many / few:.3f}: missed**" if bounded and many / few > BOUND else f"{many / few:.3f}"
        spread = f"[{min(first):.0f}, {max(first):.0f}], [{min(second):.0f}, {max(second):.0f}] MiB"
        timing.row(name, f"{few:.0f} MiB", f"{many:.0f} MiB", shown, f"at most {BOUND}" if bounded else "", spread,
                   f"{median(second) / median(first):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
