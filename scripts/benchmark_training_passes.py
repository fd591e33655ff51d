#!/usr/bin/env python
"""A training step of an EAGLE-3 head, with the attention of its passes fast and as one dense softmax over all keys.

    OMP_NUM_THREADS=1 scripts/benchmark_training_passes.py      prints a section for docs/results/benchmarks.md
    scripts/benchmark_training_passes.py --width 3584 --vocab 32000 --dtype bfloat16 --lengths 2048     for a GPU

A step is forward, backward and AdamW of seven passes over rows of one length, from states that are there already. The
dense form attends in pass s to the keys of s + 1 passes under a mask, as this project did before. Both take turns, and
ratios are of neighbours: of the thread's own time on a CPU, of wall time on a GPU. The loss of both is compared.
"""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.pictures import TEXT
from draftsmith.core.section import torch_dtype
from draftsmith.core.states import TargetStates
from draftsmith.eval import timing
from draftsmith.eval.timing import ratios, spread
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.head_training import HeadTraining
from draftsmith.models.targets.base import Target, language_shape
from draftsmith.models.training_passes import TrainingPasses
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig


def dense(self: TrainingPasses, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Replaces `TrainingPasses.attend`: one masked softmax over the keys of all passes, of which later ones may run the
    last inputs alone.
    """
    held = vars(self).setdefault("all", ([], []))
    for states, state in zip(held, (k, v), strict=True):
        states.append(state)
    step, entry = len(held[0]) - 1, torch.arange(q.shape[2], device=q.device)
    true = torch.arange(held[0][0].shape[2], device=q.device)
    blocks = [true[None] <= true[-len(entry) :, None] - step]
    blocks += [entry[None] == entry[:, None] - step + number for number in range(1, step + 1)]
    keys, values = (torch.cat(states, 2) for states in held)
    mask = torch.cat(blocks, 1) if step else None
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=not step, enable_gqa=q.shape[1] != k.shape[1]
    )


FORMS = {"fast": TrainingPasses.attend, "dense": dense}


class Steps:
    """One head in training, whose steps can be run again and again in both forms."""

    def __init__(self, arguments: Any, length: int, device: torch.device):
        width, vocab, dtype = arguments.width, arguments.vocab, torch_dtype(arguments.dtype)
        torch.manual_seed(arguments.seed)
        config = LlamaConfig(
            hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 128), num_hidden_layers=8, vocab_size=vocab,
        )  # fmt: skip
        table = torch.randn(vocab, width, device=device, dtype=dtype) * 0.02
        target = SimpleNamespace(
            config=config, shape=language_shape(config), embedding=table, scores=lambda state: (state @ table.T).float()
        )
        settings = Eagle3Config(kind="eagle3", taps=(2, 4, 6), mtp_steps=6, draft_vocab_size=vocab // 4)
        head = settings.build(cast(Target, target), count_tokens=lambda: torch.arange(vocab)).to(device, dtype)
        self.training = cast(HeadTraining, settings.training_objective(head, cast(Target, target))).train()
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=0.0)
        rows, ids = arguments.rows, torch.randint(vocab, (arguments.rows, length), device=device)
        positions = torch.arange(length, device=device).expand(1, rows, -1)
        supervised = torch.arange(length, device=device).expand(rows, -1) >= length // 4
        self.batch = Batch(
            ids, torch.ones_like(ids, dtype=torch.bool), supervised, torch.full_like(ids, TEXT, dtype=torch.int8),
            positions, None, tuple(map(str, range(rows))), seeds=tuple(range(rows)),
        )  # fmt: skip
        layers = {layer: torch.randn(rows, length, width, device=device, dtype=dtype) for layer in (2, 4, 6)}
        self.states = TargetStates(layers[6], layers, positions)
        self.losses: dict[str, float] = {}  # of a supervised token, by form

    def step(self, form: str) -> None:
        """One step, whose loss is kept."""
        TrainingPasses.attend = FORMS[form]  # type: ignore[method-assign]
        loss = self.training(self.batch, self.states)
        self.optimizer.zero_grad()
        (loss.loss_sum / loss.num_tokens).backward()
        self.optimizer.step()
        self.losses[form] = float(loss.loss_sum.detach() / loss.num_tokens)


def main() -> None:
    parser = timing.options(__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = timing.device()
    clock = timing.wall if device.type == "cuda" else time.thread_time
    timing.header(f"seed {arguments.seed}, width {arguments.width}, {arguments.rows} row(s), seven passes")
    timing.table("tokens of a row", "fast / dense, whole step", "loss of a token, fast and dense", "pairs")
    for length in arguments.lengths:
        steps = Steps(arguments, length, device)
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for number in range(arguments.pairs + 1):
            actions = {form: partial(steps.step, form) for form in FORMS}
            for form, seconds in timing.in_turn(actions, number, clock).items():
                if number:  # the first pair warms up
                    times[form].append(seconds)
        ratio = spread(ratios(times["fast"], times["dense"]))
        timing.row(length, ratio, ", ".join(f"{steps.losses[form]:.7g}" for form in FORMS), arguments.pairs)


if __name__ == "__main__":
    main()
