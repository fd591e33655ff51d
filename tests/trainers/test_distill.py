"""Distillation under the engine: ranks, ZeRO stages, answers that the draft writes, and coming back from a stop."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distill_run import BEFORE
from distill_run import run as run_recipe
from draftsmith.core.batch import TEXT, Batch
from draftsmith.core.errors import UserError
from draftsmith.data.dataset import ConversationData
from draftsmith.data.loader import StepBatches
from draftsmith.data.sources import OpenBatch
from draftsmith.models.drafters.distillation import DistillObjective, DistillTraining, Teacher
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.trainers.train import on_records
from draftsmith.trainers.train import on_records as conversations
from draftsmith.trainers.train.fit import OptimConfig
from draftsmith.trainers.train.validate import RecordsValidation
from ranks_run import run_ranks
from safetensors.torch import load_file
from tiny import EOS, IMAGE_ID, TOKENS, VOCAB, llava, request
from training import run

OPTIM = OptimConfig(lr=0.1, eps=1.0)  # so large an eps moves weights by their gradients


def module(chunk: int = 3) -> DistillTraining:
    """A chunk so small that ranks and micro-batches have different numbers of them."""
    banned = torch.zeros(VOCAB, dtype=torch.bool)
    banned[TOKENS:], banned[IMAGE_ID] = True, True
    return DistillTraining(
        llava(0, width=16, layers=1), ["projector", "language_model"], gradient_checkpointing=False, banned=banned,
        objective=DistillObjective(kind="distill", divergence="kl", chunk=chunk), teacher=Teacher(llava(7, width=24)),
    )  # fmt: skip


TWO_RANKS = """
import torch
from pathlib import Path
from draftsmith.core import ranks
from draftsmith.trainers.train.engine import init_distributed
from training import run
from test_distill import OPTIM, module

init_distributed()
for zero in (0, 3):
    losses, weights, _ = run(Path(f"run{zero}"), steps=3, zero=zero, every=2, micro=1, model=module(), optim=OPTIM)
    if ranks.is_main():
        torch.save((losses, weights), f"zero{zero}.pt")
"""


def test_two_ranks_compute_what_one_does(tmp_path):
    """Losses and weights after three steps. Under ZeRO-3 a call of the head more on one rank would hang."""
    for code, text in run_ranks(2, TWO_RANKS, cwd=tmp_path):
        assert code == 0, text[-3000:]
    one, expected, _ = run(tmp_path / "one", steps=3, model=module(), optim=OPTIM)
    start = dict(module().named_parameters())
    moved = {n for n, value in expected.items() if (value - start[n]).abs().max() > 1e-4}
    assert {"llava.lm_head.weight", "llava.model.multi_modal_projector.linear_1.weight"} <= moved
    for zero in (0, 3):
        losses, actual = torch.load(tmp_path / f"zero{zero}.pt", weights_only=True)
        assert losses == pytest.approx(one, rel=1e-5)
        for name, value in expected.items():
            assert torch.allclose(actual[name], value, atol=1e-5), (zero, name)
    (path,) = (tmp_path / "run0").rglob("*model_states.pt")
    kept = set(torch.load(path, weights_only=False)["module"])
    assert kept == {n for n, p in module().state_dict(keep_vars=True).items() if p.requires_grad}


DRAFT = "stages.distill.answers.shares={target: 0.3, data: 0.3, draft: 0.4}"
WRITES = "stages.distill.answers.draft={max_new_tokens: 5, temperature: 1.0}"


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """All stages up to a draft and the target's answers, with what was kept of the target."""
    output = tmp_path_factory.mktemp("distill") / "run"
    run_recipe(output, "stages.answers.keep_logprobs=8", stages=BEFORE)
    return output


@pytest.fixture
def train(before, tmp_path):
    """Runs the stage `distill` in a fresh copy (or goes on in the one of that name); returns its folder."""

    def train(name: str, *settings: str) -> Path:
        output = tmp_path / name
        if not output.exists():
            shutil.copytree(before, output)
        run_recipe(output, "stages.answers.keep_logprobs=8", *settings, stages=["distill"])
        return output / "distill"

    return train


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def losses(folder: Path) -> list[dict]:
    return [row for line in (folder / "metrics.jsonl").read_text().splitlines() if "loss" in (row := json.loads(line))]


def equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(v, expected[n]) for n, v in actual.items())


def test_the_stage_trains_the_draft_and_leaves_the_target(train, before):
    was = (before / "target" / "model.safetensors").read_bytes()
    folder = train("a", "stages.distill.steps=3")
    assert (before / "target" / "model.safetensors").read_bytes() == was
    start, result = weights(before / "pretrain"), weights(folder)
    moved = {name for name, value in result.items() if not torch.equal(value, start[name])}
    assert any("multi_modal_projector" in n for n in moved) and any("layers.0" in n for n in moved)
    assert not any("vision_tower" in n for n in moved)
    rows = losses(folder)
    assert len(rows) == 3 and all(0 < row["alpha"] < 1 and row["loss"] > 0 for row in rows)
    # The first step still runs the draft that it found: its loss is the divergence to the target, not to the data.
    again = train("b", "stages.distill.objective.divergence=tvd")
    assert losses(again)[0]["loss"] == pytest.approx(1 - losses(again)[0]["alpha"], abs=1e-5)
    assert losses(again)[0]["alpha"] == pytest.approx(rows[0]["alpha"], abs=1e-6)


def seen_batches(monkeypatch) -> list:
    """What the engine is given, in order."""
    seen: list = []
    whole = DistillTraining.forward

    def forward(self, batch, states=None, target_choice=None):
        seen.append(batch)
        return whole(self, batch, states, target_choice)

    monkeypatch.setattr(DistillTraining, "forward", forward)
    return seen


def supervised(batch: Batch) -> dict[str, list[int]]:
    return {n: batch.ids[r][batch.loss_mask[r]].tolist() for r, n in enumerate(batch.sample_ids)}


def test_the_draft_writes_with_its_weights_before_each_step(train, monkeypatch):
    """Deterministic by (seed, step, sample): the same answers come of the same weights, whatever the micro-batches."""
    settings = ("stages.distill.steps=6", WRITES)  # the data is gone through one and a half times
    shares = "stages.distill.answers.shares={target: 0, draft: 1.0}"
    seen = seen_batches(monkeypatch)
    first = train("a", *settings, shares)
    whole = [supervised(b) for b in seen]
    assert all(isinstance(b, Batch) for b in seen) and len(whole) == 6
    seen.clear()
    second = train("b", *settings, shares, "stages.distill.micro_batch_size=3")
    cut = [supervised(b) for b in seen]
    assert len(cut) == 18
    # Of the first step: later weights differ in the last bits.
    assert {name: ids for batch in cut[:3] for name, ids in batch.items()} == whole[0]
    assert all(1 <= len(ids) <= 5 for answers in whole for ids in answers.values())
    assert losses(first)[0]["loss"] == pytest.approx(losses(second)[0]["loss"], rel=1e-5)
    # A sample that comes twice is answered anew.
    twice = [(a[n], b[n]) for i, a in enumerate(whole) for b in whole[i + 1 :] for n in a.keys() & b.keys()]
    assert twice and any(a != b for a, b in twice)
    assert not equal(weights(first), weights(train("c", *settings, shares, "stages.distill.seed=3")))


def test_answers_are_those_of_the_weights_of_that_step(train, monkeypatch):
    """With a rate of 0 greedy answers stay from epoch to epoch, with a large one they change."""
    settings = ("stages.distill.steps=8", "stages.distill.answers.shares={target: 0, draft: 1.0}")
    settings += (
        "stages.distill.answers.draft={max_new_tokens: 5, temperature: 0}",
        "stages.distill.optim.warmup_ratio=0",
    )
    answers = {}
    for name, rate in (("still", "1.0e-30"), ("moving", "0.3")):
        seen = seen_batches(monkeypatch)
        train(name, *settings, f"stages.distill.optim.lr={rate}")
        answers[name] = [supervised(b) for b in seen]
        monkeypatch.undo()
    for name, result in answers.items():
        pairs = [(a[n], b[n]) for i, a in enumerate(result) for b in result[i + 1 :] for n in a.keys() & b.keys()]
        assert len(pairs) >= 20
        same = sum(a == b for a, b in pairs) / len(pairs)
        assert same == 1.0 if name == "still" else same < 0.8


def test_own_answers_are_drawn_anew_in_each_step_from_ids_that_have_a_token():
    """The weights are the same: with one seed for all steps the draft would see one answer for ever."""
    draft, mark = llava(0), 20
    banned = {mark, IMAGE_ID, *range(TOKENS, VOCAB)}  # the processor's mark of a picture need not be the model's
    with torch.no_grad():  # these would be drawn most of the time
        draft.lm_head.weight[[*banned]] *= 20
    settings = SimpleNamespace(draft=SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0))
    samples = SimpleNamespace(config=settings, limit=lambda asked: 6)
    writer = on_records.DraftWriter(samples, SimpleNamespace(num_token_ids=TOKENS, image_token_id=mark), (EOS,), 3)
    requests = [replace(request(0, 1), name=f"r{number}") for number in range(4)]
    asked = SimpleNamespace(requests=requests, filled=lambda ids: ids)
    engine = SimpleNamespace(module=SimpleNamespace(model=draft, train=draft.train))

    def answers(step: int) -> list[list[int]]:
        return writer(engine, StepBatches(step, 0, [asked])).micro[0]

    first, second = answers(1), answers(2)
    assert answers(1) == first and sum(a != b for a, b in zip(first, second, strict=True)) >= 3
    assert len({*map(tuple, first)}) >= 3, "samples of one prompt have their own, too"
    drawn = {token for ids in first + second for token in ids}
    assert len(drawn) > 8 and not drawn & banned


def test_a_mixture_with_own_answers_comes_back_bit_equal(train, monkeypatch):
    """Killed between steps, and gone on from the checkpoint, against a run that was left alone."""
    settings = ("stages.distill.steps=4", "stages.distill.checkpoints.every=1", DRAFT, WRITES)
    alone = train("alone", *settings)
    whole = on_records.DraftWriter.__call__
    kinds = set()

    def dies(self, engine, batches):
        kinds.update(row.request is None for batch in batches.micro for row in batch.rows)
        assert all(isinstance(batch, OpenBatch) for batch in batches.micro)
        if batches.step == 2:
            raise KeyboardInterrupt
        return whole(self, engine, batches)

    with monkeypatch.context() as patch:
        patch.setattr(on_records.DraftWriter, "__call__", dies)
        with pytest.raises(KeyboardInterrupt):
            train("killed", *settings)
    assert kinds == {True, False}, "rows of both kinds must come up"
    again = train("killed", *settings)
    assert equal(weights(again), weights(alone))
    assert [r["loss"] for r in losses(again)] == [r["loss"] for r in losses(alone)]


def test_batches_by_length_count_the_answers_that_are_learned(train, monkeypatch):
    """Lengths are tokens with pictures and the target's answers, not the record's words; batches have one modality."""
    made, whole = [], conversations.training_loader

    def keep(*arguments, **settings):
        made.append(whole(*arguments, **settings))
        return made[-1]

    monkeypatch.setattr(conversations, "training_loader", keep)
    settings = ("window=2", "group_by_modality=true", "batch_size=4", "steps=2", "answers.shares={target: 1.0}")
    train("by-length", *(f"stages.distill.{setting}" for setting in settings))
    loader = replace(made[0], total_steps=made[0].steps_per_epoch, micro_batch_size=4)
    steps, order = list(loader), loader.order(0)
    for number, step in enumerate(steps):
        (batch,) = step.micro
        rows = loader.lengths[order[4 * number : 4 * number + 4]]
        assert batch.attention_mask.sum(1).tolist() == np.abs(rows).tolist()
        assert [bool(row) for row in (batch.modality != TEXT).any(1)] == (rows > 0).tolist()
    one = [len(set((loader.lengths[order[4 * n : 4 * n + 4]] > 0).tolist())) == 1 for n in range(len(steps))]
    assert len(steps) > 5 and sum(one) >= len(one) - 1


def test_packed_rows_teach_what_padded_batches_do(train):
    """The target's answers and what was kept of it."""
    settings = ["stages.distill.objective.probabilities=kept", "stages.distill.answers.shares={target: 1.0}"]
    packing = ["stages.distill.packing={max_tokens: 400}", "stages.distill.micro_batch_size=null"]
    padded, packed = losses(train("padded", *settings)), losses(train("packed", *settings, *packing))
    assert len(padded) == 2
    for ours, theirs in zip(packed, padded, strict=True):
        assert {n: ours[n] for n in ("loss", "accuracy", "alpha")} == pytest.approx(
            {n: theirs[n] for n in ("loss", "accuracy", "alpha")}, rel=1e-5
        )


def test_kept_log_probabilities_need_no_target(train, monkeypatch):
    """With 8 of some 400 tokens kept of a loud target the loss is near; the target is not even loaded."""
    online = train("online", "stages.distill.objective.divergence=kl")
    seen = seen_batches(monkeypatch)
    monkeypatch.setattr(on_records, "frozen_target", None)
    settings = ("stages.distill.objective.divergence=kl", "stages.distill.objective.probabilities=kept")
    kept = train("kept", *settings)
    assert all(batch.states.top_log_probs.ids.shape[1] == 8 for batch in seen)
    near, exact = losses(kept)[0], losses(online)[0]
    assert near["loss"] <= exact["loss"] + 1e-5
    assert near["loss"] == pytest.approx(exact["loss"], rel=0.4)
    assert near["agreement"] == exact["agreement"] and near["alpha"] >= exact["alpha"] - 1e-6


def test_answers_without_kept_log_probabilities(train, before):
    shutil.copytree(before, before.parent / "bare")
    with pytest.raises(UserError, match="written without log-probabilities"):
        run_recipe(
            before.parent / "bare", "stages.distill.objective.probabilities=kept", stages=["answers", "distill"],
            restart="answers",
        )  # fmt: skip


def test_validation_is_cross_entropy_and_shares_the_target(train, monkeypatch):
    loaded = []
    whole = on_records.frozen_target
    monkeypatch.setattr(on_records, "frozen_target", lambda context: loaded.append(1) or whole(context))
    data = "{from: world, path: held_out, aspect: square, max_length: 256}"
    folder = train("a", f"stages.distill.validation={{data: {data}, every: 2, micro_batch_size: 3}}")
    assert len(loaded) == 1
    result = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = next(row for row in result if "val_loss" in row)
    assert scores["val_loss"] > 2 and 0 <= scores["val_agreement"] <= 1


def test_shared_out_weights_cannot_write(train):
    with pytest.raises(UserError, match="zero_stage 3 shares its weights out"):
        train("a", "engine.zero_stage=3", DRAFT)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["stages.distill.answers.shares={target: 0.5, draft: 0.5}", "stages.distill.objective={kind: cross_entropy}"],
         "answers that the draft writes need objective: distill"),
        (["stages.distill.answers.shares={target: 0.5, draft: 0.5}", "stages.distill.objective.cross_entropy=0.1"],
         "answers that the draft writes need objective: distill"),
        (["stages.distill.objective.probabilities=kept", "stages.distill.answers.shares={target: 0.5, data: 0.5}"],
         "answers.shares to {target: 1}"),
        (["stages.distill.objective={probabilities: kept, temperature: 2.0}"], "taken at temperature 1"),
        (["stages.finetune.model=target", "stages.finetune.objective={kind: distill}"], "a regenerate stage wrote"),
        (["stages.distill.objective.divergence=js"], "stages.distill.objective.divergence"),
        (["stages.distill.objective.beta=1.5"], "stages.distill.objective.beta"),
        (["stages.distill.answers.shares={target: 0.5, data: 0.5}", "stages.distill.packing={max_tokens: 512}"],
         "name one source in answers.shares"),
        (["stages.distill.answers.from=world"], "takes its answers from 'world', which makes none"),
        (["stages.compare.compare={first: [distill, target], second: [finetune, finetune_1]}"], "not among what is"),
        (["stages.compare.compare={first: [distill, distill_1], second: [distill, finetune_1]}"], "a common stage"),
    ],
)  # fmt: skip
def test_recipes_that_make_no_sense(settings, problem, tmp_path):
    with pytest.raises(UserError) as error:
        run_recipe(tmp_path / "run", *settings, stages=["world"])
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("kind", "anyres", "own", "aspect", "problem"),
    [
        ("llava", None, False, "pad", None),
        ("llava", None, True, "pad", "the drafter has an image processor of its own"),
        ("llava_next", None, False, "anyres", None),
        ("llava_next", None, False, "square", "the target reads pictures in tiles and the drafter aspect: square"),
        ("llava_next", False, False, "square", None),
        ("llava_next", False, False, "anyres", "the target reads pictures in single tiles and the drafter aspect: any"),
        ("llava_onevision", None, False, "anyres_max_9", None),
    ],
)
def test_a_draft_is_not_compared_on_pictures_that_its_target_reads_otherwise(
    kind, anyres, own, aspect, problem, tmp_path, monkeypatch
):
    """Neither in distillation nor in validation: `val_agreement` would be of pictures that are never decoded so."""
    context = SimpleNamespace(
        name="finetune", folder=tmp_path, drafter_has_own_image_processor=own,
        target=LlavaTargetConfig(kind=kind, path="somewhere", anyres=anyres),
    )  # fmt: skip
    data = ConversationData(path="held_out.json", aspect=aspect)
    result = on_records.other_pictures(context, data)
    assert result is None if problem is None else result.startswith(problem)
    if problem is None:
        return
    monkeypatch.setattr(conversations.records, "open_records", lambda *given, **named: None)
    stage = SimpleNamespace(model="drafter", format=None)
    settings = RecordsValidation(data=data, every=1)
    with pytest.raises(UserError, match="validation runs the target on the draft's batches") as told:
        conversations._validation(settings, stage, context, None, None)
    assert problem in str(told.value) and "stages.finetune.validation" in str(told.value)
