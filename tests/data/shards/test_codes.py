"""Encoded pictures as batches: what is held out, who loses its condition and when, and rows that fill a place."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import CodeBatch, PictureBatch
from draftsmith.data.loader import Loader
from draftsmith.data.shards.codes import (
    CodeCollate,
    PictureCollate,
    ShardData,
    ShardSamples,
    forward_seed,
    loses_condition,
)
from draftsmith.data.shards.shards import claim, finish, write_shard
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.drafters import EagleConfig, MedusaConfig
from draftsmith.models.drafters.eagle_images import EagleLoss
from draftsmith.models.shapes_reader import ShapesReader
from draftsmith.models.targets.llamagen.target import LlamaGenTarget
from draftsmith.models.targets.llamagen.training import LlamaGenTraining, VqTraining
from draftsmith.models.targets.llamagen.transformer import LlamaGen, LlamaGenConfig
from draftsmith.models.targets.llamagen.vq import VqConfig, VqTokenizer
from fails import fails_with
from pydantic import ValidationError
from torch.nn import functional as F
from visual_tiny import step_of

GRID, VOCAB, CAPTION = 3, 12, 8


def sample(number: int):
    generator = torch.Generator().manual_seed(number)
    length = 1 + number % 5
    tensors = {
        "codes": torch.randint(0, VOCAB, (GRID * GRID,), generator=generator, dtype=torch.int32),
        "features": torch.randn(length, CAPTION, generator=generator),
        "pixels": torch.randint(0, 256, (3, 8, 8), generator=generator, dtype=torch.uint8),
    }
    return f"{number:09d}", tensors, {"caption": f"picture {number}", "label": number % 4}


def shards(folder: Path, count: int, *, in_shard: int = 7, bare: bool = False) -> Path:
    """`count` samples; `bare` ones hold one number each."""
    claim(folder, {"made": "here"})
    for index, start in enumerate(range(0, count, in_shard)):
        numbers = range(start, min(start + in_shard, count))
        rows = ((f"{n:09d}", {"codes": torch.tensor([n])}, {}) if bare else sample(n) for n in numbers)
        write_shard(folder, index, rows, {})
    finish(folder, {"made": "here"}, num_shards=-(-count // in_shard))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """21 samples in three shards: a batch of 4 leaves one over."""
    return shards(tmp_path_factory.mktemp("codes"), 21)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    return shards(tmp_path_factory.mktemp("many"), 4000, in_shard=1000, bare=True)


# Held-out samples


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("limit", [None, 1500])
def test_held_out_and_training_samples_share_nothing_and_are_all(many, share, limit):
    data = ShardData(path=str(many), held_out=share, max_samples=limit)
    train, held_out = (ShardSamples(many, data, held_out=side) for side in (False, True))
    count = limit or 4000
    assert sorted([*train.indices, *held_out.indices]) == list(range(count))
    assert len(train) == len(train.indices) == len(train.lengths)
    # Within four standard deviations of the share.
    assert len(held_out) / count == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)
    assert {train[0].key, train[len(train) - 1].key} <= {f"{n:09d}" for n in train.indices}
    # The same again, whoever asks.
    assert (ShardSamples(many, data, held_out=True).indices == held_out.indices).all()


def test_more_samples_move_none_to_the_other_side(many):
    few, all_of_them = (
        ShardSamples(many, ShardData(path=str(many), held_out=0.1, max_samples=limit), held_out=True).indices
        for limit in (1000, None)
    )
    assert len(few) > 50 and (all_of_them[: len(few)] == few).all() and (all_of_them[len(few) :] >= 1000).all()


def test_a_larger_share_keeps_what_was_held_out(many):
    small, large = (
        set(ShardSamples(many, ShardData(path=str(many), held_out=share), held_out=True).indices)
        for share in (0.05, 0.1)
    )
    assert small < large


def test_settings_that_mean_nothing_are_refused():
    fails_with("from or path", ShardData, **{"from": "codes", "path": "shards"}, error=ValidationError)
    for wrong in (-0.1, 1.0):
        fails_with("held_out", ShardData, held_out=wrong, error=ValidationError)


# Condition dropout


def test_dropout_is_pinned():
    """Python draws this from a string in the same way on every machine: a resumed run must find the same rows."""
    names = [f"{n:09d}" for n in range(40)]
    assert [n for n, name in enumerate(names) if loses_condition(0, 0, name, 0.1)] == PINNED[0]
    assert [n for n, name in enumerate(names) if loses_condition(0, 1, name, 0.1)] == PINNED[1]


PINNED = ([3, 7, 11, 38], [14, 15, 28, 32, 34])


def test_dropout_has_the_share_in_each_epoch_and_no_memory_of_the_last():
    count, share = 20000, 0.1
    lost = np.array([[loses_condition(7, epoch, f"{n:09d}", share) for n in range(count)] for epoch in (0, 1)])
    deviation = (share * (1 - share) / count) ** 0.5
    assert lost.mean(1) == pytest.approx(share, abs=4 * deviation)
    both = (lost[0] & lost[1]).mean()
    assert both == pytest.approx(share**2, abs=4 * (share**2 / count) ** 0.5)
    assert not any(loses_condition(7, 0, f"{n}", 0.0) for n in range(1000))


def collate_of(samples: ShardSamples, **changes) -> CodeCollate:
    def features(row):
        return row.tensors["features"]

    return replace(CodeCollate(features, samples[0], 5, 0.3, GRID * GRID), **changes)


def steps(samples, collate, *, ranks=1, start=0, total=12, workers=0):
    """Each step's micro-batches of all ranks: six steps to an epoch, the last with one sample."""
    loaders = [
        Loader(samples, seed=5, batch_size=4, micro_batch_size=2, total_steps=total, collate=collate, rank=rank,
               world_size=ranks, start_step=start, num_workers=workers)
        for rank in range(ranks)
    ]  # fmt: skip
    for parts in zip(*loaders, strict=True):
        yield parts[0].epoch, [batch for part in parts for batch in part.micro]


def lost(found, drawn="uncond") -> dict[tuple[int, str], bool]:
    """(epoch, name) -> whether the real row lost its condition; or what else was `drawn` for it."""
    rows = {}
    for epoch, batches in found:
        for batch in batches:
            values = torch.as_tensor(getattr(batch, drawn)).tolist()
            for name, value, real in zip(batch.sample_ids, values, batch.real.tolist(), strict=True):
                if real:
                    assert (epoch, name) not in rows
                    rows[epoch, name] = value
    return rows


@pytest.fixture(scope="module")
def samples(folder) -> ShardSamples:
    return ShardSamples(folder, ShardData(path=str(folder)))


def test_dropout_is_the_same_on_any_rank_in_any_worker_and_after_a_resume(samples):
    collate = collate_of(samples)
    alone = lost(steps(samples, collate))
    assert len(alone) == 2 * 21
    assert alone == {(e, n): loses_condition(5, e, n, 0.3) for e, n in alone}
    assert lost(steps(samples, collate, ranks=2)) == alone
    assert lost(steps(samples, collate, workers=1)) == alone
    resumed = lost(steps(samples, collate, start=8))
    assert len(resumed) == 4 + 4 + 4 + 1 and resumed.items() <= alone.items()
    # It changes from epoch to epoch, in both directions, and with the seed.
    changed = {(alone[0, name], alone[1, name]) for _, name in alone}
    assert {(True, False), (False, True)} <= changed
    assert lost(steps(samples, collate_of(samples, seed=6))) != alone


def test_seeds_of_forwards_are_the_samples_own_on_any_rank_in_any_worker_and_after_a_resume(samples):
    """Each epoch has others, so that a head never meets the same noise again."""

    def seeds(seed=5, **how):
        return lost(steps(samples, collate_of(samples, seed=seed), **how), "seeds")

    alone = seeds()
    assert len(alone) == 2 * 21 == len({*alone.values()}) and all(0 <= seed < 2**63 for seed in alone.values())
    assert alone == {(e, n): forward_seed(5, e, n) for e, n in alone}
    assert seeds(ranks=2) == seeds(workers=1) == alone and seeds(start=8).items() <= alone.items()
    assert not {*seeds(seed=6).values()} & {*alone.values()}


def test_nothing_of_it_is_written_into_the_shards(folder, samples):
    def digests():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}

    before = digests()
    assert any(lost(steps(samples, collate_of(samples))).values()) and digests() == before
    row = samples[0]
    assert set(row.info) == {"caption", "label"} and set(row.tensors) == {"codes", "features", "pixels"}
    # A row that lost its condition still carries it: the target leaves it out, and guided losses need both.
    batch = collate_of(samples, dropout=0.99)([row], epoch=0)
    assert batch.uncond.all() and torch.equal(batch.conditions[0], row.tensors["features"])


def test_a_batch_holds_its_samples(samples):
    batch = collate_of(samples)([samples[3], samples[8]], epoch=0)
    assert isinstance(batch, CodeBatch) and batch.codes.dtype == torch.int64
    assert torch.equal(batch.codes, torch.stack([sample(3)[1]["codes"], sample(8)[1]["codes"]]).long())
    assert batch.sample_ids == ("000000003", "000000008") and batch.real.all()
    assert [len(c) for c in batch.conditions] == [4, 4] and batch.num_supervised == 2 * 9
    pictures = PictureCollate(samples[0], lambda row: torch.tensor([row.info["label"]]))([samples[3]], epoch=0)
    assert isinstance(pictures, PictureBatch) and pictures.labels.tolist() == [[3]]
    assert torch.equal(pictures.pixels[0], sample(3)[1]["pixels"]) and pictures.num_supervised == 1


# Fillers


def test_a_rank_without_rows_gets_a_filler_that_supervises_nothing(samples):
    collate = collate_of(samples)
    last = list(steps(samples, collate, ranks=2, total=6))[-1][1]
    assert [batch.num_supervised for batch in last] == [9, 0]
    assert [batch.real.tolist() for batch in last] == [[True], [False]]
    # Every rank has as many batches as the others in every step.
    assert all(len(batches) == 2 for _, batches in steps(samples, collate, ranks=2, total=6))
    pictures = PictureCollate(samples[0], lambda row: torch.zeros(8, dtype=torch.int64))
    assert pictures([], epoch=0).num_supervised == 0


def llamagen(condition: str) -> LlamaGen:
    config = LlamaGenConfig(
        num_layers=1, num_heads=2, dim=16, ffn_hidden=16, vocab_size=VOCAB, grid=GRID, condition=condition,
        num_classes=4, caption_dim=CAPTION, caption_slots=6, init_std=0.3, dropout=0.0,
    )  # fmt: skip
    model = LlamaGen(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    torch.nn.init.normal_(model.output.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


def head(config) -> torch.nn.Module:
    torch.manual_seed(0)
    target = LlamaGenTarget(llamagen("text"), Guidance(3.0, -1))
    module = config.training_objective(config.build(target), target)
    if isinstance(config, MedusaConfig):  # a fresh one changes nothing, and so learns nothing from its weights alone
        torch.nn.init.normal_(module.head.heads[0][0].linear.weight, std=0.1)
    return module


def tokenizer() -> VqTraining:
    config = VqConfig(base_channels=4, ch_mult=(1, 1), num_res_blocks=1, z_channels=4, codebook_size=8, groups=4)
    model = VqTokenizer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return VqTraining(model)


def reader() -> ShapesReader:
    torch.manual_seed(0)
    return ShapesReader(8, 6, width=4)


MODULES = {
    "eagle": lambda: head(EagleConfig(kind="eagle")),
    "eagle, published mask": lambda: head(EagleConfig(kind="eagle", loss=EagleLoss(noise=0.0, mask="eagle"))),
    "eagle, guided": lambda: head(EagleConfig(kind="eagle", loss=EagleLoss(guided=0.5))),
    "medusa": lambda: head(MedusaConfig(kind="medusa", num_heads=2)),
    "target, text": lambda: LlamaGenTraining(llamagen("text"), None),
    "target, class": lambda: LlamaGenTraining(llamagen("class"), None),
    "target, without some codes": lambda: LlamaGenTraining(llamagen("text"), None, code_dropout=1.0),
    "vq": tokenizer,
    "reader": reader,
}


def collate_for(name: str, samples: ShardSamples):
    if name in ("vq", "reader"):
        return PictureCollate(samples[0], lambda row: torch.arange(8) % (row.info["label"] + 2))
    supervised = GRID * GRID - ("target" not in name)
    if name == "target, class":
        return collate_of(samples, condition=_label, supervised_per_row=supervised)
    return collate_of(samples, supervised_per_row=supervised)


def _label(row):
    return torch.tensor(row.info["label"])


def step(module, batch):
    """One training forward as the loop calls it: heads are given the target's states."""
    target = getattr(module, "target", None)
    return module(batch, None) if target is None else step_of(module, target, batch)


def gradients(module, batches) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss = sum(step(module, batch).loss_sum for batch in batches)
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", MODULES)
def test_a_filler_moves_no_weight_and_reaches_all_of_them(name, samples):
    """Ranks exchange a gradient for every weight: a rank with a filler must have one, and it must be zero."""
    module = MODULES[name]()
    collate = collate_for(name, samples)
    filler, batch = collate([], epoch=0), collate([samples[1], samples[2]], epoch=0)
    loss = step(module, filler)
    assert loss.loss_sum.item() == 0 and int(loss.num_tokens) == 0 and filler.num_supervised == 0
    assert all(value.item() == 0 for value in loss.metrics.values())
    alone, beside, empty = (gradients(module, rows) for rows in ([batch], [batch, filler], [filler]))
    assert any(grad.abs().sum() > 0 for grad in alone.values() if grad is not None)
    for weight, grad in alone.items():
        if grad is None:  # weights that this loss does not use, in any batch
            assert empty[weight] is None
            continue
        assert empty[weight] is not None and not empty[weight].any(), weight
        assert torch.equal(beside[weight], grad), weight


def test_codes_that_a_generator_does_not_read_are_each_rows_own_and_say_nothing(samples):
    module, collate = MODULES["target, without some codes"](), collate_of(samples, supervised_per_row=GRID * GRID)
    kept = [module._kept(collate([samples[0], samples[1]], epoch=epoch)) for epoch in range(200)]
    assert torch.equal(module._kept(collate([samples[1]], epoch=0)), kept[0][1:]) and not torch.equal(*kept[:2])
    shares = torch.cat(kept).double().mean(1)
    assert 0.45 < shares.mean() < 0.55 and shares.min() < 0.2 and shares.max() > 0.8
    batch, model = collate([samples[0], samples[1]], epoch=0), module.transformer
    condition, mask = model.conditioned(batch.conditions, batch.uncond)
    others = torch.where(kept[0], batch.codes[:, :-1], (batch.codes[:, :-1] + 1) % VOCAB)
    scores = model.output(model.states(condition, others, mask, kept=kept[0]).feature)[:, 5:]
    loss = F.cross_entropy(scores.flatten(0, 1), batch.codes.flatten(), reduction="sum")
    assert torch.isclose(loss, step(module, batch).loss_sum)
    assert step(module.eval(), batch).loss_sum == step(LlamaGenTraining(model, None), batch).loss_sum != loss


@pytest.mark.parametrize("name", MODULES)
def test_a_row_that_is_not_real_changes_no_sum(name, samples):
    module = MODULES[name]()
    collate = collate_for(name, samples)
    batch, more = (collate([samples[n] for n in rows], epoch=0) for rows in ([1, 2], [1, 2, 5]))
    masked = replace(more, real=torch.tensor([True, True, False]))
    actual, expected = step(module, masked), step(module, batch)
    torch.testing.assert_close(actual.loss_sum, expected.loss_sum, rtol=1e-5, atol=1e-5)
    assert int(actual.num_tokens) == int(expected.num_tokens) == batch.num_supervised == masked.num_supervised
    assert actual.metrics.keys() == expected.metrics.keys()
    for metric in actual.metrics:
        torch.testing.assert_close(actual.metrics[metric], expected.metrics[metric], rtol=1e-5, atol=1e-5)
    # The third row would have counted.
    assert not torch.isclose(step(module, more).loss_sum, expected.loss_sum)


@pytest.mark.parametrize("name", ["eagle", "eagle, guided", "medusa"])
@torch.no_grad()
def test_a_step_has_one_loss_on_any_number_of_ranks(name, samples):
    """Noise and lost conditions are the sample's own; each rank's generator may stand elsewhere."""
    module, collate = MODULES[name]().train(), collate_for(name, samples)

    def losses(**how):
        return [sum(step(module, batch).loss_sum for batch in batches) for _, batches in steps(samples, collate, **how)]

    alone = losses()
    torch.testing.assert_close(losses(ranks=2), alone, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses(ranks=3), alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [[], [1]], ids=["filler", "last picture of an epoch"])
def test_dead_codes_wait_for_a_batch_that_can_revive_them(samples, rows):
    """16 cells of a picture are too few for 32 codes: the forward must go on without."""
    config = VqConfig(base_channels=4, ch_mult=(1, 1), num_res_blocks=1, z_channels=4, codebook_size=32, groups=4)
    model = VqTokenizer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = model.codebook.clone()
    module = VqTraining(model, revive_every=1, revive_until=10).train()
    collate = collate_for("vq", samples)
    step(module, collate([samples[n] for n in rows], epoch=0))
    assert torch.equal(model.codebook, before)
    step(module, collate([samples[n] for n in (2, 3, 4)], epoch=0))
    assert not torch.equal(model.codebook, before)
