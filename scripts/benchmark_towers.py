#!/usr/bin/env python
"""A Qwen2.5-VL's vision tower: a training step with windows in few calls, and an evaluation that runs it once.

    OMP_NUM_THREADS=1 scripts/benchmark_towers.py      prints a section for docs/results/benchmarks.md

Windows: forward and backward of `QwenTraining` over one picture, against transformers' own tower, which attends window
by window. Methods: one request decoded plainly and by a chain of four drafted tokens several times over, its tower run
once for all of them or once in each. Both forms take turns, and ratios are of neighbours by thread time.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from draftsmith.core.batch import IMAGE, TEXT, Request
from draftsmith.core.pictures import PatchGrid, whole_picture
from draftsmith.data.collate import Sample, collate
from draftsmith.eval import timing
from draftsmith.eval.loop import Decoding, embed_once, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES
from draftsmith.eval.timing import ratios, spread
from draftsmith.models import qwen
from draftsmith.models.decoding.qwen import QwenDecoder
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.llava import TokenIds
from draftsmith.models.targets.qwen import QwenTarget
from draftsmith.models.training import training_of
from draftsmith.models.windows import WINDOWS
from torch.nn import functional as F

VOCAB, PICTURE, EOS = 512, 500, 2
IDS = TokenIds(VOCAB, PICTURE, None, EOS, 0, 501, 502, 503)
PARTS = ("vision_tower", "projector", "language_model")


def model_of(width: int, depth: int, layers: int) -> Any:
    """Qwen2.5-VL's proportions: windows of 64 patches in all layers of the tower but the last."""
    torch.manual_seed(0)
    text = {
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 32, "num_key_value_heads": max(1, width // 64),
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "hidden_size": width, "intermediate_size": 3 * width, "depth": depth, "num_heads": width // 32,
        "out_hidden_size": width, "window_size": 112, "fullatt_block_indexes": [depth - 1],
    }  # fmt: skip
    config = qwen.qwen_config("qwen2_5_vl", text, vision, IDS)
    return qwen.QWEN_FAMILIES["qwen2_5_vl"][1](config).float()


def request_of(side: int) -> Request:
    """One square picture of `side` patches, and 16 words."""
    picture = whole_picture(PatchGrid(1, side, side), IMAGE)
    ids = [502, *[PICTURE] * picture.num_tokens, 503, *range(10, 26)]
    modality = torch.tensor([TEXT, *[IMAGE] * picture.num_tokens, *[TEXT] * 17], dtype=torch.int8)
    return Request(torch.tensor(ids), modality, torch.randn(side * side, 3 * 2 * 14 * 14), "request", (picture,))


def compared(actions: dict[str, Callable[[], Any]], pairs: int) -> str:
    """Ratio of the first action's thread time to the second's, after a pair that warms up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(pairs + 1):
        for name, seconds in timing.in_turn(actions, number, time.thread_time).items():
            if number:
                times[name].append(seconds)
    return spread(ratios(*times.values()))


class Training:
    """Steps of a whole model, with our tower and with transformers' own."""

    def __init__(self, arguments: Any, side: int):
        asked = request_of(side)
        self.module: Any = training_of(
            model_of(arguments.width, arguments.depth, 2), PARTS, gradient_checkpointing=False
        ).train()
        supervised = [n >= len(asked.ids) - 8 for n in range(len(asked.ids))]
        sample = Sample(asked.ids.tolist(), supervised, asked.modality.tolist(), asked.pixels, "s", asked.pictures)
        self.batch = collate([sample], pad_id=0, image_size=8)
        self.forms = {
            "once a length": (WINDOWS, qwen.tower_inputs),
            "once a window": ("sdpa", lambda tower, sizes, device: {"grid_thw": sizes}),
        }
        self.calls: dict[str, int] = {}

    def step(self, form: str) -> None:
        """Forward and backward."""
        implementation, qwen.tower_inputs = self.forms[form]  # type: ignore[assignment]
        self.module.llava.config.vision_config._attn_implementation = implementation
        self.module.zero_grad()
        self.module(self.batch).loss_sum.backward()

    def count(self) -> str:
        """Attention calls of a forward of each form."""
        real, counts = F.scaled_dot_product_attention, []
        for form in self.forms:
            calls: list[int] = []
            F.scaled_dot_product_attention = lambda *a, calls=calls, **k: calls.append(1) or real(*a, **k)
            self.step(form)
            counts.append(len(calls))
        F.scaled_dot_product_attention = real
        return " / ".join(map(str, counts))


def evaluation(arguments: Any, methods: int, pairs: int) -> str:
    """Time of a request with plain decoding and `methods` methods, its tower run once, over that with a run in each."""
    model, asked = model_of(arguments.width, arguments.depth, 4).eval(), request_of(32)
    target = QwenTarget(model, num_token_ids=PICTURE)
    draft = IndependentProposal(
        QwenDecoder(model_of(64, 2, 1).eval(), num_token_ids=PICTURE), "M", newline_id=7
    )  # fmt: skip
    decoding = Decoding(Chain(4), RULES["greedy"], Draw("top-k"), Warp(), arguments.tokens, ())
    answers: dict[bool, list[list[int]]] = {}

    def decode(once: bool) -> None:
        embedded = embed_once(target, asked) if once else None
        drafters = [None, *[draft] * methods]
        answers[once] = [generate(target, d, asked, decoding, embedded=embedded).tokens for d in drafters]

    ratio = compared({"once": partial(decode, True), "each": partial(decode, False)}, pairs)
    assert answers[True] == answers[False], "tokens differ"
    return ratio


def main() -> None:
    parser = timing.options(__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8, help="layers of the tower")
    parser.add_argument("--sides", type=int, nargs="+", default=[16, 32], help="patches across the picture")
    parser.add_argument("--methods", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    arguments = parser.parse_args()
    timing.header(
        f"seed 0, float32, width {arguments.width}, a tower of {arguments.depth} layers, {arguments.pairs} pairs"
    )
    timing.table(
        "patches of the picture", "training step, once a length / once a window", "attention calls of a forward"
    )
    for side in arguments.sides:
        steps = Training(arguments, side)
        ratio = compared({form: partial(steps.step, form) for form in steps.forms}, arguments.pairs)
        timing.row(f"{side} x {side}", ratio, steps.count())
    print()
    timing.table("methods beside plain decoding", "a request, tower once / in each")
    for methods in arguments.methods:
        timing.row(methods, evaluation(arguments, methods, arguments.pairs))


if __name__ == "__main__":
    main()
