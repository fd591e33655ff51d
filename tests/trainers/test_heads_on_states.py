"""Heads of a language model train alike from states that are computed, read, or read after the first epoch."""

import functools
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.core.errors import Refused, UserError
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData
from draftsmith.data.loader import Loader
from draftsmith.data.order import BucketedOrder, RisingVisualOrder
from draftsmith.data.shards.codes import forward_seed
from draftsmith.data.shards.shards import ShardReader
from draftsmith.data.states.samples import split
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic, Product, Static
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.draft_vocabulary import likeliest_ids
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.head_draws import is_blind
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.drafters.peagle import PeagleConfig
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.trainers.run.stage_records import open_records
from draftsmith.trainers.serve import states_builder as build
from draftsmith.trainers.train import on_states as train
from draftsmith.trainers.train import states_source as sources
from fails import fails_with
from pydantic import ValidationError
from safetensors.torch import load_file
from states_run import RECORDS, cached, losses, parsed, section, stage
from states_run import context as context_of

SPARROW = SparrowConfig(kind="sparrow", gap_share=0.5, blind_share=0.5)
SEED = 3  # not a default, so that a seed that is not handed on is noticed
context = functools.partial(context_of, seed=SEED)


@pytest.fixture(scope="module")
def kept(made, tmp_path_factory):
    return cached(made, tmp_path_factory.mktemp("run") / "cache", SPARROW).folder


@pytest.fixture(scope="module")
def runs(made, kept, tmp_path_factory):
    """The same training from each source: name -> folder."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "online": {"kind": "online"},
        "cached": {"kind": "cached"},
        "first": {"kind": "cached_on_first_epoch", "states": {"shard_bytes": 20_000, "measured_samples": 2}},
    }
    for name, source in kinds.items():
        asked = context(made, folder / name, SPARROW, {"states": kept} if name == "cached" else None)
        validation = {"every": 4, "micro_batch_size": 2}
        stage(made, source=source, epochs=3, validation=validation, select="top3").run(asked)
    return {name: folder / name for name in kinds}


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_the_three_sources_give_the_same_losses(runs):
    online, read, first = (losses(runs[name]) for name in ("online", "cached", "first"))
    assert online.keys() == read.keys() == first.keys() and len(online) > 8
    for step, loss in online.items():
        assert read[step] == pytest.approx(loss, rel=0.02), step
        assert first[step] == pytest.approx(loss, rel=0.02), step
    assert online[max(online)] < online[1], "nothing was learned"
    # The first epoch and the step after it are computed: the same to the last bit.
    epoch = len(online) // 3
    assert [first[step] for step in range(1, epoch + 2)] == [online[step] for step in range(1, epoch + 2)]
    assert any(first[step] != online[step] for step in range(epoch + 3, 3 * epoch + 1)), "nothing was read"


def test_the_target_stays_as_it_was_and_the_head_is_saved_whole(made, runs, tmp_path):
    asked = context(made, tmp_path / "load", SPARROW)
    processor = asked.processor()
    target = build.open_target(asked, processor)
    head = SPARROW.load(runs["online"], target, identity=TargetIdentity({}, processor.tokenizer_hash))
    assert sum(p.numel() for p in head.parameters()) > 1000
    manifest = json.loads((runs["online"] / "draftsmith.json").read_text())
    assert manifest["method"] == "sparrow" and manifest["selected"] == "top3" and manifest["seed"] == SEED


def test_the_best_weights_are_kept_and_chosen(runs):
    rows = [json.loads(line) for line in (runs["online"] / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row for row in rows if "val_top3" in row}
    assert {"val_loss", "val_top1", "val_top3"} <= scores[max(scores)].keys()
    for name in ("top1", "top3"):
        best = json.loads((runs["online"] / f"best-{name}" / "score.json").read_text())
        assert best["score"] == max(row[f"val_{name}"] for row in scores.values())
    chosen = weights(runs["online"] / "best-top3")
    assert all(torch.equal(tensor, chosen[name]) for name, tensor in weights(runs["online"]).items())


class Killed(Exception):
    pass


STOPS = [(build.Builder, "states", 6), (sources.CachedCollate, "__call__", 4)]


@pytest.mark.parametrize(("owner", "name", "last"), STOPS, ids=["computed", "read"])
def test_a_first_epoch_that_was_stopped_goes_on_as_it_would_have(made, runs, tmp_path, monkeypatch, owner, name, last):
    """In the first epoch, in the middle of a shard, while states are computed, and in the one after it, where they are
    read.
    """
    settings = {
        "source": {"kind": "cached_on_first_epoch", "states": {"shard_bytes": 20_000, "measured_samples": 2}},
        "epochs": 3, "validation": {"every": 4, "micro_batch_size": 2}, "select": "top3",
        "checkpoints": {"every": 1},
    }  # fmt: skip
    real, calls = getattr(owner, name), itertools.count(1)

    def dying(*given, **named):
        if next(calls) == last:
            raise Killed
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            stage(made, **settings).run(context(made, tmp_path / "first", SPARROW))
    stage(made, **settings).run(context(made, tmp_path / "first", SPARROW))
    assert losses(tmp_path / "first") == losses(runs["first"])
    ours, theirs = (
        {info["number"]: tensors for _, tensors, info in map(reader.__getitem__, range(len(reader)))}
        for reader in (ShardReader(tmp_path / "first" / "states"), ShardReader(runs["first"] / "states"))
    )
    assert ours.keys() == theirs.keys()
    for number, tensors in ours.items():
        for name, tensor in tensors.items():
            assert torch.allclose(tensor.float(), theirs[number][name].float(), rtol=0.01, atol=0.01)


def test_tau_is_measured_in_a_real_decoding_run(made, tmp_path):
    asked = context(made, tmp_path / "tau", SPARROW)
    decoding = {
        "every": 2, "data": made.data | {"max_samples": 2}, "max_new_tokens": 6, "temperatures": [0.0, 1.0],
        # So wide that a head which has learned nothing is right now and then.
        "tree": {"kind": "dynamic", "total": 121, "depth": 0, "width": 120},
    }  # fmt: skip
    stage(made, steps=2, decoding=decoding, select="tau").run(asked)
    rows = [json.loads(line) for line in (asked.folder / "metrics.jsonl").read_text().splitlines()]
    taus = next(row for row in rows if "tau_T0" in row)
    assert 1 < taus["tau_T0"] <= 2 and 1 < taus["tau_T1"] <= 2
    best = json.loads((asked.folder / "best-tau" / "score.json").read_text())
    assert best["score"] == pytest.approx((taus["tau_T0"] + taus["tau_T1"]) / 2)
    # By the weights that the stage leaves, which it measured last.
    processor = asked.processor()
    target = build.open_target(asked, processor)
    head = SPARROW.load(asked.folder, target, dtype=torch.float32)
    dataset = open_records(stage(made).data, stage(made).format, asked, processor)
    for temperature in (0.0, 1.0):
        rule = Sampling() if temperature else Greedy()
        check = Decoding(Dynamic(121, 0, 120), rule, Draw("top-k"), Warp(temperature), 6, (processor.eos_id,))
        cycles = []
        for number in range(2):
            uniforms = torch.Generator().manual_seed(SEED * 1_000_003 + number)
            proposal = SPARROW.drafter(head, target)
            cycles += generate(target, proposal, dataset.request(number)[0], check, uniforms).cycles
        assert taus[f"tau_T{temperature:g}"] == sum(c.num_emitted for c in cycles) / len(cycles)
    # Text has no rows of codes: said before anything trains, not at the first measurement.
    with pytest.raises(ValidationError, match="tree: adt follows the rows of an image"):
        stage(made, steps=2, decoding=decoding | {"tree": {"kind": "adt", "preset": "anole"}})


def test_a_second_stage_goes_on_from_the_first(made, runs, tmp_path):
    asked = context(made, tmp_path / "second", SPARROW, {"drafter": runs["online"]})
    stage(made, steps=1, optim={"lr": 1e-12}).run(asked)
    first, second = weights(runs["online"]), weights(asked.folder)
    assert all(torch.allclose(tensor, second[name], atol=1e-9) for name, tensor in first.items())


def test_a_reduced_vocabulary_holds_the_likeliest_ids_whatever_the_source(made, tmp_path):
    drafter = Eagle3Config(kind="eagle3", taps=(1, 2, 3), draft_vocab_size=8)
    folder = cached(made, tmp_path / "cache", drafter).folder
    for name, source in (("online", {"kind": "online"}), ("read", {"kind": "cached"})):
        asked = context(made, tmp_path / name, drafter, {"states": folder})
        stage(made, source=source, steps=1).run(asked)
    one, other = (weights(tmp_path / name)["d2t"] for name in ("online", "read"))
    assert torch.equal(one, other) and len(one) == 8
    # Counted over the samples that train: what is held out has no say.
    asked = context(made, tmp_path / "by hand", drafter)
    processor = asked.processor()
    target = build.open_target(asked, processor)
    states = train.open_states(stage(made, source={"kind": "online"}), asked, processor, target, SEED)
    never = target.scores(target.embedding.new_zeros(1, target.shape.hidden_size))[0].isneginf()
    kept_ids = []
    for indices in split(states.draws, 0.2):
        ids = torch.cat([states.supervised_ids(n) for n in indices.tolist()])
        kept_ids.append(likeliest_ids(ids.bincount(minlength=len(never)), len(one), never))
    assert torch.equal(one + torch.arange(len(one)), kept_ids[0]) and not torch.equal(*kept_ids)


def test_blind_rows_are_the_same_on_any_ranks_and_after_a_resume(made, kept, tmp_path):
    """Computed or read: each epoch draws anew, by the samples' names alone."""
    asked = context(made, tmp_path / "blind", SPARROW, {"states": kept})
    processor = asked.processor()
    target, found = build.open_target(asked, processor), {}
    for kind in ("online", "cached"):
        states = train.open_states(stage(made, source={"kind": kind}), asked, processor, target, SEED)
        for world_size, first in ((1, 0), (2, 0), (2, 7)):
            drawn = found[kind, world_size, first] = {}
            for rank in range(world_size):

                def make_loader(samples, collate, first, last, rank=rank, world_size=world_size, states=states):
                    return Loader(
                        samples, seed=0, batch_size=4, micro_batch_size=2, total_steps=last, collate=collate, rank=rank,
                        world_size=world_size, start_step=first, order=BucketedOrder(states.lengths, 0, 4, 2),
                    )  # fmt: skip

                steps = states.steps(np.arange(RECORDS), make_loader, first, 15, trains=True)
                for number, step in enumerate(steps, first):
                    pairs = [pair for b in step.micro for pair in zip(b.sample_ids, b.seeds, strict=True)]
                    pairs = [(name, seed) for name, seed in pairs if name[0] != "("]
                    assert all(seed == forward_seed(SEED, number // 5, name) for name, seed in pairs), kind
                    drawn |= {(number // 5, name): is_blind(seed, 0.5) for name, seed in pairs}
    whole = found["online", 1, 0]
    assert len(whole) == 3 * RECORDS and 18 < sum(whole.values()) < 42
    epochs = [{name: blind for (epoch, name), blind in whole.items() if epoch == number} for number in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    for (_, _, first), drawn in found.items():
        assert drawn.items() <= whole.items() and len(drawn) == (15 - first) * 4


def test_a_head_of_text_alone_starts_any_variant(made, tmp_path):
    """What stands at visual tokens changes nothing while there are none: three trainings give the same tensors."""
    text = json.loads((made.folder / "data.json").read_text())
    (tmp_path / "text.json").write_text(json.dumps([record for record in text if "image" not in record]))
    data = {"path": str(tmp_path / "text.json"), "max_length": 256}
    variants = (
        {}, {"ivsb": False, "mtp_steps": 0}, {"train_visual_share": 0.0}, {"blind_share": 0.5}, {"gap_share": 0.5},
        {"middle_layer": 3},
    )  # fmt: skip
    configs = [SparrowConfig(kind="sparrow", **{"gap_share": 0.0} | changes) for changes in variants]
    objective = {"feature": 1.0, "token": 0.1, "listmle": 0.01, "mtp_steps": 0}
    for number, config in enumerate(configs):
        asked = context(made, tmp_path / str(number), config)
        stage(made, data=data, held_out=0.0, steps=4, objective=objective).run(asked)
        assert json.loads((asked.folder / "draftsmith.json").read_text())["text_only"]
    first = weights(tmp_path / "0")
    for number in range(1, len(configs)):
        assert all(torch.equal(value, first[name]) for name, value in weights(tmp_path / str(number)).items())
    # So each goes on from the first, and what has seen pictures is a head of its own making.
    for number, config in enumerate(configs[1:], 1):
        asked = context(made, tmp_path / f"next-{number}", config, {"drafter": tmp_path / "0"})
        stage(made, steps=1, optim={"lr": 1e-12}).run(asked)
        assert all(torch.allclose(v, first[n], atol=1e-9) for n, v in weights(asked.folder).items())
        assert "text_only" not in json.loads((asked.folder / "draftsmith.json").read_text())
    asked = context(made, tmp_path / "again", configs[0], {"drafter": tmp_path / "next-1"})
    fails_with("made otherwise: ivsb is False, expected True", stage(made, data=data, steps=1).run, asked)
    # Text after pictures is not text alone.
    asked = context(made, tmp_path / "behind", configs[1], {"drafter": tmp_path / "next-1"})
    stage(made, data=data, held_out=0.0, steps=1).run(asked)
    assert "text_only" not in json.loads((asked.folder / "draftsmith.json").read_text())


def test_the_share_of_pictures_rises_over_caches_of_both_kinds(made, kept, tmp_path):
    asked = context(made, tmp_path / "rising", SPARROW, {"states": kept})
    chosen = stage(made, source={"kind": "cached"}, visual_share="linear", epochs=4, text_epochs=1, held_out=0.0)
    states = train.open_states(chosen, asked, asked.processor(), build.open_target(asked, asked.processor()), 0)
    order = train.training_order(chosen, states.lengths, 0)
    assert isinstance(order, RisingVisualOrder) and len(order) == int((states.lengths > 0).sum())
    assert not (states.lengths[order(0)] > 0).any() and (states.lengths[order(3)] > 0).all()
    fails_with("pictures and samples without", train.training_order, chosen, np.array([3, 4]), 0)
    chosen.run(asked)
    assert len(losses(asked.folder)) == 4 * -(-len(order) // 4)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"data": None}, "give data, or source"),
        ({"source": {"kind": "cached"}, "answers": {}}, "answers belong to data"),
        ({"answers": {"shares": {"data": 0.5, "target": 0.5}}}, "one source alone"),
        ({"select": "top3"}, "select: top3 needs validation"),
        ({"held_out": 0.0, "validation": {"every": 1}}, "validation needs held_out"),
        ({"visual_share": "linear", "steps": 3}, "needs epochs"),
        ({"visual_share": "linear", "source": {"kind": "cached_on_first_epoch"}}, "does not see"),
        ({"source": {"kind": "cached", "from": "a", "path": "b"}}, "give from or path"),
        ({"source": {"kind": "cached", "accept": ["image_backnd"]}}, "'image_backend'"),
        ({"objective": {"kind": "distill"}}, r"objective\.kind\n +Input should be 'head'"),
        ({"decoding": {"every": 1, "tree": {"kind": "chain", "gamma": 2}}}, r"decoding\.data\n +Field required"),
        ({"validation": {"every": 1, "against_target": True}}, "against_target: unknown key"),
        ({"trainable": ["projector"]}, "trainable: unknown key"),
        ({"condition_dropout": 0.5}, "condition_dropout: unknown key"),
        ({"drafter": {"kind": "eagle", "num_heads": 2}, "from": "scratch"}, "drafter.num_heads: nothing reads it"),
        (
            {"drafter": {"kind": "hivis", "blind_share": 0.5}, "from": "scratch"},
            "blind_share: this hivis head holds no",
        ),
        ({"drafter": {"kind": "eagle3", "blind_share": 1}, "from": "scratch"}, "so that every sample is blind"),
        ({"drafter": {"kind": "medusa"}, "from": "scratch", "objective": {"token": 1.0}}, "set drafter.loss"),
        ({"drafter": {"kind": "pruned"}, "from": "scratch"}, "of kind pruned, which is not trained"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(made, settings, problem, tmp_path):
    with pytest.raises((ValidationError, Refused), match=problem):
        parsed(context(made, tmp_path).target, SPARROW, section(made, **settings))


MEDUSA = MedusaConfig(kind="medusa", num_heads=3)


DFLASH = DflashConfig(kind="dflash", block_size=4, num_layers=2, taps=(1, 2), blind_share=0.3, draft_vocab_size=40)


PEAGLE = PeagleConfig(
    kind="peagle", parallel_tokens=3, taps=(1, 2, 3), visual_slots="read", loss={"token_divergence": "ce"}
)


@pytest.mark.parametrize("config", [MEDUSA, DFLASH, PEAGLE], ids=lambda config: config.kind)
def test_drafts_by_level_train_and_draft_what_the_target_says(made, tmp_path, config):
    """A real stage with validation and a decoding check, and then requests with and without pictures."""
    asked = context(made, tmp_path / config.kind, config)
    decoding = {
        "every": 10, "data": made.data | {"max_samples": 2}, "tree": {"kind": "chain", "gamma": 3}, "max_new_tokens": 6,
    }  # fmt: skip
    validation = {"every": 10, "micro_batch_size": 4}
    stage(made, epochs=None, steps=30, optim={"lr": 2e-2}, decoding=decoding, validation=validation).run(asked)
    result = losses(asked.folder)
    assert result[30] < 0.8 * result[1]
    rows = [json.loads(line) for line in (asked.folder / "metrics.jsonl").read_text().splitlines()]
    assert {"val_top1", "tau_T0"} <= next(row for row in rows if row["step"] == 30 and "tau_T0" in row).keys()
    processor = asked.processor()
    target = build.open_target(asked, processor)
    identity = TargetIdentity(asked.target.model_dump(mode="json"), processor.tokenizer_hash)
    drafter = config.drafter(config.load(asked.folder, target, identity=identity), target)
    samples = build.open_samples(ConversationData(**made.data), PromptFormat(), None, asked, processor)
    drafted_tokens = 0
    for policy, number in (
        (Chain(3), 0),
        (Static([(0,), (1,), (0, 0)]), 1),
        (Dynamic(6, 2, 2), 2),
        (Product(6, 3, 3), 3),
    ):
        request = samples.dataset.request(number)[0]
        decode = lambda drafter, policy=policy, request=request: generate(  # noqa: E731
            target, drafter, request, Decoding(policy, Greedy(), Draw("top-k"), Warp(), 12, ())
        )
        drafted = decode(drafter)
        assert drafted.tokens == decode(None).tokens
        drafted_tokens += sum(cycle.num_drafted for cycle in drafted.cycles)
    assert drafted_tokens > 0
    fails_with("tokenizer_sha256", config.load, asked.folder, target, identity=TargetIdentity({}, "another"))


def test_an_id_behind_the_targets_last_one_is_told_where_ids_are_counted():
    """Cached states of another target."""
    rows = [torch.tensor([0, 2, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])]
    states = SimpleNamespace(supervised_ids=rows.__getitem__)
    assert train._count_tokens(states, np.array([0, 1]), 3).tolist() == [1, 0, 2]
    with pytest.raises(UserError, match="sample 2 supervises id 3, and the target has 3 ids"):
        train._count_tokens(states, np.array([0, 1, 2]), 3)
