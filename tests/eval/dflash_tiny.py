"""A small block draft with loud weights, and batches with states for it."""

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import TargetStates
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Draw
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.warp import Warp
from heads_tiny import config_of
from tensors import loud
from tiny import request as ask

SMALL = {"kind": "dflash", "block_size": 5, "num_layers": 2, "taps": [1, 2, 4]}


def draft(big, seed=0, **settings):
    """(config, head) with loud weights."""
    config = config_of(**SMALL | settings)
    torch.manual_seed(seed)
    head = config.build(big, count_tokens=lambda: torch.arange(big.vocab_size))
    loud(head, norms=0.2)
    return config, head


def decoded(config, head, big, policy, warp=None, seed=0):
    """(tokens, drafted and accepted of each cycle): greedy, or sampled chains with a warp."""
    rule = (Greedy(), Draw("top-k"), Warp()) if warp is None else (Sampling(), Draw("sample"), warp)
    decoding = Decoding(policy, *rule, 16, ())
    result = generate(big, config.drafter(head, big), ask(3, 1), decoding, torch.Generator().manual_seed(seed))
    return result.tokens, [(c.num_drafted, c.num_accepted) for c in result.cycles]


@torch.no_grad()
def walked(config, head, big, asked, last):
    """The likeliest path of a block after `last`, its q [K,V] at T = 1, and the states [T,D] by layer that it read."""
    drafter = config.drafter(head.float(), big)
    _, step = big.prefill(asked, drafter.taps, capacity=20)
    drafter.start(asked, step, Warp(1.0), capacity=20)
    drafter.begin(last)
    q, path = [drafter.root()], []
    for place in range(head.shape.num_drafts):
        path.append(int(q[-1].argmax()))
        if place < head.shape.num_drafts - 1:
            q.append(drafter.expand([place - 1], torch.tensor(path[-1:]))[0])
    return path, torch.stack(q), {tap: step.layers[tap][0] for tap in drafter.taps.text_layers}


def rows_of(big, *rows, seeds=None):
    """A batch of random words and its states; of each row t is a word of the prompt, v of a picture, a one of an
    answer.
    """
    generator, length = torch.Generator().manual_seed(0), max(map(len, rows))
    codes = torch.tensor([["tav".find(c) if c != " " else -1 for c in row.ljust(length)] for row in rows])
    ids = torch.randint(6, 50, codes.shape, generator=generator)
    positions = torch.arange(length).expand(1, len(rows), -1)
    batch = Batch(
        ids, codes >= 0, codes == 1, (codes == 2).to(torch.int8), positions, None, tuple(rows),
        seeds=seeds or tuple(range(len(rows))),
    )  # fmt: skip
    layers = {layer: torch.randn(*codes.shape, 32, generator=generator) for layer in range(1, 6)}
    feature = torch.randn(*codes.shape, 32, generator=generator)
    return batch, TargetStates(feature, layers, positions)


ROWS = ("ttvvtaaaaaa", "taaattaa", "ttttttta")
