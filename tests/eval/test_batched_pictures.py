"""Pictures drawn side by side are those of the decoding loop, whatever stands beside them."""

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.batched import draw_pictures, even_batches
from draftsmith.models.decoding.warp import Warp
from fails import fails_with
from visual_tiny import anole, llamagen, request, target

WARPS = [Warp(), Warp(1.0), Warp(0.7, top_k=9, top_p=0.8)]
TEXTS = [[25, 27, 31], [30], [24, 25, 26, 27, 28, 29], [33, 33], [24], [28, 31, 25, 27], [26, 26, 26], [32, 24]]


def llamagens(condition, scale, interval=-1, **sizes):
    model = llamagen(condition, **sizes)
    return target(model, scale, interval), [request(model, seed) for seed in range(8)]


# name -> a target, and eight requests of unequal lengths where they are of text.
TARGETS = {
    "class": lambda: llamagens("class", 3.0),
    "class, unguided": lambda: llamagens("class", 1.0),
    "class, interval": lambda: llamagens("class", 3.0, 3),
    "text": lambda: llamagens("text", 3.0),
    "text, unguided": lambda: llamagens("text", 1.0),
    "anole": lambda: (anole(), [ImageRequest(torch.tensor(ids)) for ids in TEXTS]),
    "text, other sizes": lambda: llamagens("text", 3.0, 6, grid=5, vocab=37, dim=48, heads=3),
    "anole, other sizes": lambda: (
        anole(grid=3, heads=4, kv_heads=2),
        [ImageRequest(torch.tensor(ids)) for ids in TEXTS],
    ),
    "anole, unguided": lambda: (anole(scale=1.0), [ImageRequest(torch.tensor(ids)) for ids in TEXTS]),
}


@pytest.mark.covering
@pytest.mark.parametrize("warp", WARPS, ids=["greedy", "sampled", "top-k, top-p"])
@pytest.mark.parametrize("name", TARGETS)
def test_tokens_do_not_depend_on_the_batch(name, warp):
    """Those of 1, 3 and 8 at a time, and of another order, are the decoding loop's own."""
    target, requests = TARGETS[name]()
    assert name.startswith("class") or len({len(r.condition) for r in requests}) > 3
    seeds = [100 + n for n in range(8)]
    decoding = Decoding(
        Chain(1), RULES["greedy" if warp.greedy else "sampling"], Draw("top-k"), warp, target.num_codes, ()
    )
    alone = [
        generate(target, None, asked, decoding, torch.Generator().manual_seed(seed)).tokens
        for asked, seed in zip(requests, seeds, strict=True)
    ]
    assert len(set(map(tuple, alone))) > 3, "the targets say different things, or this would say little"
    for size in (1, 3, 8):
        drawn = []
        for some in even_batches(range(8), size):
            drawn += draw_pictures(target, [requests[n] for n in some], warp, seeds=[seeds[n] for n in some])
        assert drawn == alone, (name, warp, size)
    order = [5, 2, 7, 0]
    drawn = draw_pictures(target, [requests[n] for n in order], warp, seeds=[seeds[n] for n in order])
    assert drawn == [alone[n] for n in order]


@pytest.mark.parametrize("name", ["class", "text", "anole"])
@torch.inference_mode()
def test_scores_of_a_batch_are_each_pictures_own(name):
    """Guided threefold in float32, scores of about 10: a row sees neither another's padding nor its tokens."""
    target, requests = TARGETS[name]()
    tokens = torch.randint(4, 20, (6, 8), generator=torch.Generator().manual_seed(0))

    def scores(numbers):
        session, first = target.prefill_batch([requests[n] for n in numbers], capacity=6)
        return torch.stack([first, *(target.feed(session, step[numbers]) for step in tokens)])

    together = scores(list(range(8)))
    for number in range(8):
        torch.testing.assert_close(together[:, number : number + 1], scores([number]), atol=1e-4, rtol=0)


def test_texts_with_special_ids_are_refused_in_a_batch_too():
    requests = [ImageRequest(torch.tensor([25])), ImageRequest(torch.tensor([25, 22]))]
    fails_with("special ones", draw_pictures, anole(), requests, Warp(), seeds=[0, 1])


def test_batches_are_even_and_as_few_as_there_can_be():
    assert even_batches(range(0), 4) == []
    assert [list(b) for b in even_batches(range(5), 8)] == [[0, 1, 2, 3, 4]]
    assert [len(b) for b in even_batches(range(100), 16)] == [14, 14, 14, 15, 14, 14, 15]
    assert [n for b in even_batches(range(100), 16) for n in b] == list(range(100))
