"""The key-value cache by itself: what is written where, what a commit keeps, and what a place outside changes."""

import pytest
import torch
from draftsmith.models.decoding.model_cache import ModelCache
from fails import fails_with

ROWS, HEADS, WIDTH, CAPACITY, LAYERS = 2, 3, 4, 12, 2


def states(*numbers: int) -> torch.Tensor:
    """[R,H,N,D]; each position holds its number, and rows differ by 100."""
    places = torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]
    return (places + 100 * torch.arange(ROWS)[:, None, None, None]).expand(ROWS, HEADS, len(numbers), WIDTH).clone()


def write(cache: ModelCache, *numbers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As the layers of a model do. Values are the keys' negatives."""
    return [cache.update(states(*numbers), -states(*numbers), layer) for layer in range(LAYERS)]


def held(cache: ModelCache) -> list[int]:
    """What the first row's committed positions hold; the same in every layer, and in keys and values."""
    layers = [layer.keys[0, 0, : layer.length, 0].tolist() for layer in cache.kv_layers]
    values = [(-layer.values[0, 0, : layer.length, 0]).tolist() for layer in cache.kv_layers]
    assert layers == values == [layers[0]] * LAYERS
    return [int(number) for number in layers[0]]


@pytest.fixture
def cache() -> ModelCache:
    """Of five committed positions."""
    cache = ModelCache(LAYERS, CAPACITY)
    write(cache, 0, 1, 2, 3, 4)
    cache.advance(5)
    return cache


@pytest.mark.parametrize("written", [(), (0,), (0, 1, 2), (0, 2), (1, 3), (2, 0, 1), (3,)])
def test_a_commit_keeps_what_was_accepted(cache, written):
    write(cache, 5, 6, 7, 8)
    cache.commit(written)
    assert held(cache) == [0, 1, 2, 3, 4, *(5 + place for place in written)]
    for keys, values in write(cache, 50):
        assert keys.shape[2] == cache.length + 1 and keys[1, 0, -1, 0] == 150 and values[1, 0, -1, 0] == -150


def test_rows_are_kept_in_the_order_asked_for(cache):
    cache.select_rows([1])
    for layer in cache.kv_layers:
        assert torch.equal(layer.keys[:, :, :5], states(0, 1, 2, 3, 4)[1:])
        assert torch.equal(layer.values[:, :, :5], -states(0, 1, 2, 3, 4)[1:])


@pytest.mark.parametrize("ends", ["whole", "by an error"])
def test_places_hold_inside_their_context_alone(cache, ends):
    def forward() -> None:
        with cache.written_at(torch.tensor([7, 9])):
            for keys, values in write(cache, 70, 90):
                assert keys.shape[2] == values.shape[2] == CAPACITY
                assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 70, 0, 90, 0, 0]
                assert torch.equal(values, -keys)
            if ends == "by an error":
                raise KeyError

    if ends == "whole":
        forward()
    else:
        fails_with("", forward, error=KeyError)
    assert all(keys.shape[2] == 6 and keys[0, 0, 5, 0] == 5 for keys, _ in write(cache, 5))


def test_more_than_its_capacity_is_refused(cache):
    fails_with("cache of 12 positions asked to hold 13", write, cache, *range(8), error=AssertionError)


def test_positions_are_noted_from_the_first_place_on(cache):
    fails_with("filled without positions", cache.place, torch.tensor([[5]]), ROWS, error=AssertionError)
    cache.empty()
    assert cache.place(torch.tensor([[3, 4]]), ROWS).tolist() == [[3, 4]] * ROWS
