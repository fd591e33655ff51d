"""How far a reader has to go: files that one training forward and backward enter, and calls from the loop to the sums.

The numbers are bounds of the project: a reader who knows EAGLE-3 finds its arithmetic in a handful of files.
"""

import sys
import threading
from pathlib import Path

import torch
from draftsmith.data.loader import StepBatches
from draftsmith.models import training_passes
from draftsmith.models.drafters.head_training import HeadTraining
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.trainers.train import loop
from draftsmith.trainers.train.fit import OptimConfig
from heads_tiny import case_for, config_of
from tiny import IMAGE_ID, TOKENS, llava
from training import engine

ROOT = Path(HeadTraining.forward.__code__.co_filename).parents[2]


def entered(function) -> dict[str, int]:
    """File of the package -> calls of its functions while `function` runs, in all threads (backward has its own)."""
    result: dict[str, int] = {}

    def look(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        ours = path.is_relative_to(ROOT) and not {"tests", "site-packages"} & {*path.relative_to(ROOT).parts}
        if event == "call" and ours:
            name = str(path.relative_to(ROOT))
            result[name] = result.get(name, 0) + 1

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return result


def eagle3():
    """An EAGLE-3 head in training beside a real target, and a case of pictures and text."""
    target = LlavaTarget(llava(0, layers=6), num_token_ids=TOKENS, image_token_id=IMAGE_ID)
    config = config_of(kind="eagle3", taps=(1, 3, 5), mtp_steps=2, draft_vocab_size=20)
    torch.manual_seed(0)
    head = config.build(target, count_tokens=lambda: torch.arange(target.vocab_size))
    training = config.training_objective(head, target).train()
    return training, case_for(config, target, width=32, vocab=50)


# What makes it fast; each of them stands in for a readable function.
FAST = {f"models/fast/{name}.py" for name in ("__init__", "pass_attention", "in_place")}


def test_eagle3s_training_forward_enters_ten_files_beside_the_fast_ones(monkeypatch):
    """Its layer, its loss and the target's LM head are among them; attention is a kernel's, as in long samples."""
    monkeypatch.setattr(training_passes, "SHORT", 0)
    training, (batch, states) = eagle3()
    files = entered(lambda: training(batch, states).loss_sum.backward())
    assert {
        "models/drafters/head_training.py",
        "models/drafters/eagle3.py",
        "models/decoding/head_layer.py",
    } <= files.keys()
    assert files.keys() >= FAST, "what is not entered is not left out"
    assert len(files.keys() - FAST) <= 10, sorted(files)


def test_three_calls_lead_from_the_training_step_to_the_sums():
    """The loop's step calls the engine, the engine the method's forward, and that its passes and its terms."""
    training, (batch, states) = eagle3()
    built = engine(training, OptimConfig(lr=1e-3), steps=1, micro=3, accumulation=1)
    depths: dict[str, int] = {}
    depth = 0

    def look(frame, event, argument):
        nonlocal depth
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT) or {"tests", "site-packages"} & {*path.relative_to(ROOT).parts}:
            return
        if event == "call":
            depths.setdefault(frame.f_code.co_qualname, depth)
        depth += {"call": 1, "return": -1}.get(event, 0)

    sums = loop._Sums(torch.zeros(()))
    sys.setprofile(look)
    try:
        loop._forward_backward(built, StepBatches(0, 0, [batch]), lambda batch: states, 10.0, sums)
    finally:
        sys.setprofile(None)
    assert float(sums.loss) > 0 and depths["_forward_backward"] == 0
    assert depths["HeadTraining.forward"] == 2 and depths["HeadTraining.passes"] == 3
