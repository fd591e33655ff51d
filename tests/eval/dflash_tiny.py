"""A small block draft with loud weights, and batches with states for it."""

import torch
from draftsmith.core.batch import Batch
from draftsmith.core.states import TargetStates
from heads_tiny import config_of

SMALL = {"kind": "dflash", "block_size": 5, "num_layers": 2, "taps": [1, 2, 4]}


def draft(big, seed=0, **settings):
    """(config, head) with loud weights."""
    config = config_of(**SMALL | settings)
    torch.manual_seed(seed)
    head = config.build(big, count_tokens=lambda: torch.arange(big.vocab_size))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return config, head


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
