"""What a stage's settings become in its training: `fit` against a loop by hand."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.tracking import Tracker, TrackingConfig
from draftsmith.data.collate import ConversationCollate
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.trainers.run.context import Context, EngineConfig
from draftsmith.trainers.stages.train import TrainRecords
from draftsmith.trainers.train import loop
from draftsmith.trainers.train.engine import init_distributed
from draftsmith.trainers.train.fit import fit, training_loader
from draftsmith.trainers.train.loop import Training
from draftsmith.trainers.train.muon import is_hidden
from training import BATCH, Samples, loader, module, weights

SETTINGS = {
    "steps": 5, "batch_size": BATCH, "micro_batch_size": 1, "log_every": 2, "checkpoints": {"every": 2, "keep": 1},
    "optim": {
        "lr": 1e-2, "lr_by_part": {"projector": 3e-2}, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1,
        "schedule": "linear", "warmup_steps": 1, "final_ratio": 0.5, "clip_norm": 0.3,
    },
}  # fmt: skip
RATES = (0.0, 1.0, 0.875, 0.75, 0.625)  # one step of warm-up, then down to a half


def trained(folder, samples, **changes):
    """The engine after `fit`, and what it logged."""
    init_distributed()
    stage = TrainRecords(kind="train", trainable=["projector"], data={"path": "none.json"}, **(SETTINGS | changes))
    target = LlavaTargetConfig(kind="llava", path="none")
    context = Context(
        name="stage", folder=folder, seed=0, fingerprint="f", target=target, drafter=None, engine=EngineConfig(),
        tracking=TrackingConfig(), inputs={}, say=pytest.fail,
    )  # fmt: skip
    collate = ConversationCollate(3, 16)
    make_loader = functools.partial(training_loader, stage, samples, collate, seed=0, total=stage.steps)
    engine = fit(stage, context, Training(module(noisy=False), make_loader, stage.steps, lambda engine: None))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return engine, {line["step"]: line for line in lines}


def test_the_sample_that_was_looked_at_before_step_0_is_told(tmp_path, monkeypatch):
    tables = []
    monkeypatch.setattr(Tracker, "table", lambda self, *table: tables.append(table))
    (tmp_path / "sample.txt").write_text("why? [[so]]")
    trained(tmp_path, Samples(), steps=1)
    assert tables == [("sample", ["supervised text in [[ ]]"], [["why? [[so]]"]])]


def by_hand(muon=False):
    """Weights after SETTINGS' steps, and the losses of each; with `muon` by torch's two optimizers."""
    model, losses = module(noisy=False), []
    groups = {
        by_muon: [
            {"params": params, "weight_decay": 0.3 if by_muon else 0.1 * decays,
             "rate": 3e-2 if part == "projector" else 1e-2}
            for part, parts in model.parts().items()
            for decays in (True, False)
            if (params := [p for n, p in parts if (p.dim() >= 2) == decays and (muon and is_hidden(n, p)) == by_muon])
        ]
        for by_muon in (False, True)
    }  # fmt: skip
    optimizers = [torch.optim.AdamW(groups[False], lr=1.0, betas=(0.8, 0.9), eps=1e-3)]
    if muon:
        optimizers.append(torch.optim.Muon(groups[True], lr=1.0, adjust_lr_fn="match_rms_adamw"))
    clipped = 0
    for step, factor in zip(loader(Samples(), 5, micro=BATCH), RATES, strict=True):
        for group in groups[False] + groups[True]:
            group["lr"] = factor * group["rate"]
        loss = model(step.micro[0])
        (loss.loss_sum / loss.num_tokens).backward()
        for parameter in model.parameters():  # DeepSpeed decays what a batch has not reached as well
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        clipped += float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)) > 0.3
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.loss_sum.item(), int(loss.num_tokens)))
    assert clipped == 5, "guards this test"
    return {name: p.detach() for name, p in model.named_parameters()}, losses


@pytest.mark.parametrize("optim", [{}, {"name": "muon", "muon_weight_decay": 0.3}])
def test_a_stage_is_trained_as_its_settings_say(optim, tmp_path, monkeypatch):
    """Rates of each part, schedule, betas, eps, decay and clipping; logged over the steps since the last line."""
    # torch's own Muon on any processor, as by hand
    monkeypatch.setattr("draftsmith.trainers.train.fit.multiplies_bfloat16", lambda: True)
    expected, losses = by_hand(bool(optim))
    engine, lines = trained(tmp_path, Samples(), optim=SETTINGS["optim"] | optim)
    assert engine.accumulation == BATCH, "by this bf16 knows whether there are gradients to sum in float32"
    for name, value in weights(engine).items():
        # Muon's products are bfloat16; its weights move by 4e-3 and more.
        torch.testing.assert_close(value, expected[name], atol=1e-3 if optim else 2e-5, rtol=0)
    assert [*lines] == [2, 4, 5]
    for step, first in ((2, 0), (4, 2), (5, 4)):
        part = losses[first:step]
        assert lines[step]["loss"] == pytest.approx(sum(a for a, _ in part) / sum(n for _, n in part), rel=1e-4)
    assert lines[4]["lr"] == pytest.approx(1e-2 * RATES[4]), "the next step's"
    # The last step is saved as weights, by the stage.
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_loader_goes_on_at_the_step_of_the_checkpoint():
    stage = TrainRecords(kind="train", trainable=["projector"], data={"path": "none.json"}, **SETTINGS)
    whole, resumed = (
        [(step.step, [batch.sample_ids for batch in step.micro])
         for step in training_loader(stage, Samples(), ConversationCollate(3, 16), start, seed=0, total=5)]
        for start in (0, 3)
    )  # fmt: skip
    assert len(whole) == 5 and resumed == whole[3:]


def test_rates_are_of_the_time_since_the_last_line(tmp_path, monkeypatch):
    """By a clock that each sample moves by a second."""
    clock = SimpleNamespace(seconds=0.0)

    class Slow(Samples):
        def __getitem__(self, index):
            clock.seconds += 1.0
            return super().__getitem__(index)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    _, lines = trained(tmp_path, Slow(count=24), steps=6, log_every=2, checkpoints={"every": None})
    # A step is read ahead, and there is none after the last.
    assert [round(8 / lines[step]["samples_per_s"]) for step in (2, 4, 6)] == [12, 8, 4]
    for step in (2, 4, 6):
        assert lines[step]["tokens_per_s"] / lines[step]["samples_per_s"] > 1
