"""Memory that is lent to batches, and the thread that reads ahead of training."""

import gc
import threading

import torch
from draftsmith.core.errors import UserError
from draftsmith.data.states.memory import Lender, prefetched
from fails import fails_with


def test_memory_in_use_is_never_lent_again_and_comes_back_with_its_last_view():
    lender = Lender()
    first, second = lender.lend(1000), lender.lend(1000)
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all()
    address, view = first.data_ptr(), first[10:20].view(torch.int16)
    del first
    gc.collect()
    third = lender.lend(1000)
    third.fill_(3)
    assert third.data_ptr() not in (address, second.data_ptr()) and (view == 257).all()
    del view
    gc.collect()
    assert lender.lend(500).data_ptr() == address


def test_pieces_that_are_too_small_do_not_pile_up():
    lender = Lender()
    for size in (10, 2**24 + 1, 2**25 + 1, 2**25 + 1):
        lender.lend(size)
        gc.collect()
    assert sum(len(piece) for piece in lender._free) <= 3 * 2**24


def test_items_come_in_their_order_and_are_made_beforehand():
    made = []

    def items():
        for number in range(6):
            made.append(number)
            yield number

    result = prefetched(items(), depth=2)
    assert next(result) == 0
    for _ in range(200):
        if len(made) == 4:
            break
        threading.Event().wait(0.01)
    assert made == [0, 1, 2, 3], "one is out, two wait, and one waits to be put"
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
