"""Batches are a function of seed, step and rank: whoever asks, from wherever, with however many workers."""

import json
import multiprocessing
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import IMAGE, TEXT, Batch
from draftsmith.core.errors import UserError
from draftsmith.data.collate import ConversationCollate, Sample, collate, empty_sample
from draftsmith.data.loader import Loader, prefetched
from draftsmith.data.order import BucketedOrder, epoch_order, rows_of_rank
from fails import fails_with
from small_records import talk

PAD, SIZE = 3, 24


def sample(length: int, images: int, name: str) -> Sample:
    """`images` runs of two image ids, then text; the second half is supervised."""
    modality = [IMAGE, IMAGE] * images + [TEXT] * (length - 2 * images)
    pixels = torch.full((images, 3, SIZE, SIZE), float(length)) if images else None
    return Sample([10 + i for i in range(length)], [i >= length / 2 for i in range(length)], modality, pixels, name)


def test_collation_pads_on_the_right():
    batch = collate([sample(5, 1, "a"), sample(8, 2, "b"), sample(3, 0, "c")], pad_id=PAD, image_size=SIZE)
    assert batch.ids.tolist() == [[10, 11, 12, 13, 14, 3, 3, 3], [*range(10, 18)], [10, 11, 12, 3, 3, 3, 3, 3]]
    assert batch.attention_mask.sum(1).tolist() == [5, 8, 3]
    assert batch.attention_mask.int().diff().max() == 0, "nothing is kept after padding"
    assert batch.loss_mask.int().tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1] + [0] * 5]
    assert (batch.modality == IMAGE).sum(1).tolist() == [2, 4, 0]
    assert batch.positions.shape == (1, 3, 8) and batch.positions[0].tolist() == [list(range(8))] * 3
    assert batch.pixels[:, 0, 0, 0].tolist() == [5.0, 8.0, 8.0], "in row order"
    assert (batch.num_dummy_images, batch.sample_ids) == (0, ("a", "b", "c"))
    assert (batch.ids.dtype, batch.loss_mask.dtype, batch.modality.dtype) == (torch.int64, torch.bool, torch.int8)
    assert batch.num_supervised == 2 + 4 + 1


def test_a_batch_of_text_carries_a_dummy_picture():
    batch = collate([sample(5, 0, "a"), sample(4, 0, "b")], pad_id=PAD, image_size=SIZE)
    assert batch.pixels.shape == (1, 3, SIZE, SIZE) and not batch.pixels.any()
    assert batch.num_dummy_images == 1 and not (batch.modality == IMAGE).any()


def test_the_first_token_is_no_label_and_a_filler_supervises_nothing():
    first = Sample([1, 2], [True, False], [TEXT, TEXT], None, "a")
    assert collate([first], pad_id=PAD, image_size=SIZE).num_supervised == 0
    assert collate([empty_sample(PAD)], pad_id=PAD, image_size=SIZE).num_supervised == 0


def write(folder: Path, broken: int | None = None) -> Path:
    """21 records of growing length, every third without a picture."""
    rows = []
    for number in range(21):
        mark, image = ("", {}) if number % 3 == 0 else ("<image>\n", {"image": f"images/{number % 6}.png"})
        if number == broken:
            image = {"image": "images/none.png"}
        turns = talk(f"{mark}Which picture?", "It is" + " not" * number + ".")
        rows.append({"id": f"r{number}", **image, "conversations": turns})
    path = folder / "data.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def dataset(folder, open_data):
    return open_data(write(folder))


def loader(dataset, **changes) -> Loader:
    """Six steps of an epoch (21 = 5 x 4 + 1), and two of the next."""
    settings = {"seed": 7, "batch_size": 4, "micro_batch_size": 2, "total_steps": 8}
    settings["collate"] = ConversationCollate(PAD, SIZE)
    return Loader(dataset, **(settings | changes))


def equal(a: Batch, b: Batch) -> bool:
    for field in fields(Batch):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if not (torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y):
            return False
    return True


def same_steps(actual, expected) -> bool:
    actual, expected = list(actual), list(expected)
    return len(actual) == len(expected) and all(
        (a.step, a.epoch, len(a.micro)) == (b.step, b.epoch, len(b.micro)) and all(map(equal, a.micro, b.micro))
        for a, b in zip(actual, expected, strict=True)
    )


def names(step) -> list[str]:
    return [name for batch in step.micro for name in batch.sample_ids if name != "(filler)"]


def modalities(step) -> set[bool]:
    """Of the records in a step: True is text."""
    return {int(name.removeprefix("data.json[").rstrip("]")) % 3 == 0 for name in names(step)}


def test_an_epoch_holds_every_record_once(dataset):
    steps = list(loader(dataset))
    assert [(s.step, s.epoch) for s in steps] == [(n, n // 6) for n in range(8)]
    first = [name for s in steps[:6] for name in names(s)]
    assert sorted(first) == sorted(dataset.sample_id(i) for i in range(21))
    second = [name for s in steps[6:] for name in names(s)]
    assert second != first[:8], "another epoch, another order"
    assert not same_steps(steps, loader(dataset, seed=8))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_batch_of_a_single_rank(dataset, grouped, ranks):
    """The same rows in every step, and as many micro-batches on each rank, in the last partial batch too."""
    whole = list(loader(dataset, grouped=grouped))
    shares = [
        list(loader(dataset, grouped=grouped, rank=r, world_size=ranks, micro_batch_size=1)) for r in range(ranks)
    ]
    for step, *parts in zip(whole, *shares, strict=True):
        assert sorted(name for part in parts for name in names(part)) == sorted(names(step))
        assert len({len(part.micro) for part in parts}) == 1
        assert sum(b.num_supervised for p in parts for b in p.micro) == sum(b.num_supervised for b in step.micro)
        assert all(batch.pixels is not None and len(batch.pixels) for part in parts for batch in part.micro)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("start", [1, 5, 7, 8])
def test_a_later_start_gives_the_batches_of_a_whole_run(dataset, grouped, start):
    whole = list(loader(dataset, grouped=grouped))
    assert same_steps(loader(dataset, grouped=grouped, start_step=start), whole[start:])
    assert len(loader(dataset, start_step=start)) == 8 - start


@pytest.mark.parametrize("start", [0, 3])
def test_workers_give_the_same_batches(dataset, start):
    expected = list(loader(dataset, grouped=True, start_step=start))
    state = torch.random.get_rng_state()
    assert same_steps(loader(dataset, grouped=True, start_step=start, num_workers=2), expected)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_record_stops_with_the_same_words(folder, open_data, workers):
    """From a worker, too, the user gets the error itself and no traceback; what came before is handed out first."""
    dataset = open_data(write(folder, broken=7))
    order = epoch_order(dataset.lengths, seed=7, epoch=0, batch_size=4, grouped=False).tolist()
    steps = iter(loader(dataset, num_workers=workers))
    for _ in range(order.index(7) // 4):
        next(steps)
    caught = fails_with("", next, steps)
    image = folder / "images" / "none.png"
    assert str(caught) == (
        f"missing image\n  where: {folder / 'data.json'}, record 7 (id 'r7'), {image}\n"
        "  hint:  check the `images` folder of the data section"
    )
    assert (caught.problem, type(caught)) == ("missing image", UserError)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_record_leaves_the_other_rows_as_they_are(folder, open_data, workers):
    good = list(loader(open_data(write(folder)), micro_batch_size=1))
    result = list(loader(open_data(write(folder, broken=7), on_error="skip"), micro_batch_size=1, num_workers=workers))
    differing = 0
    for a, b in zip(good, result, strict=True):
        for x, y in zip(a.micro, b.micro, strict=True):
            assert x.sample_ids == y.sample_ids
            if x.sample_ids == ("data.json[7]",):
                assert y.num_supervised == 0 and y.num_dummy_images == 1
                differing += 1
            else:
                assert equal(x, y)
    assert differing
    (line,) = (folder / "run" / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line)["record"] == 7


def test_workers_end_with_the_pass_that_needed_them(folder, open_data):
    """After an error and after a pass that is left early: whoever collects what is left does not wait for them."""
    dataset = open_data(write(folder, broken=7))
    passes = [iter(loader(dataset, num_workers=1)) for _ in range(2)]
    next(passes[0])
    passes[0].close()
    with pytest.raises(UserError) as kept:  # as an error handler keeps it, with its frames
        list(passes[1])
    assert kept.traceback and not multiprocessing.active_children()


def test_grouped_batches_hold_one_modality_and_like_lengths(dataset):
    steps = list(loader(dataset, grouped=True, micro_batch_size=4))[:6]
    # 14 records with a picture fill 3 batches and 7 without fill 1; what is left of both makes the mixed tail.
    assert sorted(map(modalities, steps[:4]), key=sorted) == [{False}] * 3 + [{True}]
    assert [len(names(step)) for step in steps] == [4, 4, 4, 4, 4, 1]
    for step in steps[:4]:
        (batch,) = step.micro
        assert batch.num_dummy_images == (modalities(step) == {True})
        lengths = batch.attention_mask.sum(1).tolist()
        assert lengths == sorted(lengths, reverse=True), "dealt longest first"
    mixed = [modalities(step) == {True, False} for step in loader(dataset)]
    assert sum(mixed) > 4, "without grouping most batches are mixed"


@pytest.mark.parametrize("start", [0, 2, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_by_length_are_shared_by_tokens_and_come_back(dataset, ranks, start):
    """Whoever asks, from any step on: the same samples in each step, and ranks share them by counted tokens."""
    tokens = np.random.default_rng(0).integers(5, 90, 21) * np.sign(dataset.lengths)
    by_length = {"order": BucketedOrder(tokens, 7, 4, 3, apart=True), "lengths": tokens}
    whole = list(loader(dataset, **by_length))
    assert same_steps(loader(dataset, **by_length, start_step=start), whole[start:])
    shares = [
        list(loader(dataset, **by_length, rank=r, world_size=ranks, micro_batch_size=1, start_step=start))
        for r in range(ranks)
    ]
    number = {dataset.sample_id(index): index for index in range(21)}
    for step, *parts in zip(whole[start:], *shares, strict=True):
        mine = [[name for name in names(part) if name != "(filler)"] for part in parts]
        assert sorted(name for some in mine for name in some) == sorted(names(step))
        rows = np.array([number[name] for name in names(step)])
        expected = [rows_of_rank(rows, tokens, rank, ranks) for rank in range(ranks)]
        assert [[number[name] for name in some] for some in mine] == [some.tolist() for some in expected]


def test_micro_batches_add_up_to_the_step(dataset):
    """However the step is divided: the same rows in the same order."""
    whole = loader(dataset, micro_batch_size=4)
    for size in (1, 2, 3):
        for a, b in zip(whole, replace(whole, micro_batch_size=size), strict=True):
            assert names(b) == names(a) and len(b.micro) == -(-4 // size)


CRASH = """
import numpy as np
from draftsmith.data.collate import ConversationCollate, Sample
from draftsmith.data.loader import Loader, prefetched

class Endless:
    lengths = np.ones(200)
    def __len__(self): return 200
    def __getitem__(self, index): return Sample([1, 2], [False, True], [0, 0], None, str(index))

steps = iter(Loader(Endless(), seed=0, batch_size=2, micro_batch_size=2, total_steps=100,
                    collate=ConversationCollate(0, 8), num_workers=2))
next(steps)
raise RuntimeError("as out of memory")
"""


def test_a_crash_with_workers_ends():
    """Workers ignore SIGTERM, and Python waits for its children when it exits: the rank must not hang on them."""
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: as out of memory\n"), done.stderr


# The thread that reads ahead


def test_items_come_in_their_order_and_are_made_beforehand():
    made = []

    def items():
        for number in range(6):
            made.append(number)
            yield number

    result = prefetched(items(), depth=2)
    assert next(result) == 0
    for _ in range(200):
        if len(made) == 3:
            break
        threading.Event().wait(0.01)
    assert made == [0, 1, 2], "one is out, and two wait"
    assert list(result) == [1, 2, 3, 4, 5]


def test_an_error_is_raised_where_its_item_would_have_been():
    def items():
        yield 1
        raise UserError("damaged", where="shard-000002.tar")

    result = prefetched(items())
    assert next(result) == 1
    fails_with("damaged", next, result)


def test_a_reader_that_stops_early_leaves_no_thread():
    before = threading.active_count()
    result = prefetched(range(1000))
    assert next(result) == 0
    result.close()
    assert threading.active_count() == before
