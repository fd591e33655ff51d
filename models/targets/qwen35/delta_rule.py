"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) over a chain in chunks, or over a tree in one solve.

A place decays its parent's state by exp(g) and moves what the state answers to its key towards its value by beta:
S = exp(g) S' + k u^T with u = beta (v - exp(g) S'^T k). A state is thus exp(G) S0 plus one term for each ancestor, with
G the sum of g on the way. The u of all nodes are thus the solution of one triangular system, and the state after
a path is a sum over its nodes: none is kept for each node, and none is ever undone.
Letters: R rows, H heads, N new places, P places before them that are not committed, C chunk, K key and E value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.states import uploaded

CHUNK = 64  # places of a chain that are solved at once


@dataclass(frozen=True)
class Step:
    """The update of the state at each place; in float32 or wider."""

    queries: Tensor  # [R,H,N,K], of length 1 / sqrt(K)
    keys: Tensor  # [R,H,N,K], of length 1
    values: Tensor  # [R,H,N,E]
    decay: Tensor  # [R,H,N] g, at most 0
    beta: Tensor  # [R,H,N]


class Written(NamedTuple):
    """Updates written after a committed state; enough to make the state after any path of them."""

    keys: Tensor  # [R,H,P,K]
    updates: Tensor  # [R,H,P,E] u
    decay: Tensor  # [R,H,P] g
    total: Tensor  # [R,H,P] G: of the place and its ancestors

    def first(self, count: int) -> Written:
        """The first `count` places."""
        return Written(*(part[:, :, :count] for part in self))


def over_tree(step: Step, state: Tensor, ancestors: Tensor, before: Written | None = None) -> tuple[Tensor, Written]:
    """Outputs [R,H,N,E] of N places, and all P + N written places.

    Args:
        state: [R,H,K,E] of the last committed place, which is every node's ancestor.
        ancestors: [1 or R,N,P+N] bool: a node's ancestors and itself; parents stand before their children.
        before: P places of earlier passes; None: there are none.
    """
    k, count, ancestors = step.keys, step.keys.shape[2], ancestors.unsqueeze(1)
    past = ancestors.shape[-1] - count
    decays = step.decay if before is None else torch.cat([before.decay, step.decay], dim=2)
    total = (ancestors.to(decays) @ decays.unsqueeze(-1)).squeeze(-1)  # [R,H,N]
    totals = total if before is None else torch.cat([before.total, total], dim=2)
    # A node's decay since each of its ancestors; what is none of them would overflow.
    since = (total.unsqueeze(-1) - totals.unsqueeze(-2)).masked_fill(~ancestors, float("-inf")).exp()  # [R,H,N,P+N]
    all_decayed, beta = total.exp().unsqueeze(-1), step.beta.unsqueeze(-1)
    wanted = step.values - all_decayed * (k @ state)
    if before is not None:
        wanted = wanted - (k @ before.keys.mT * since[..., :past]) @ before.updates
    # The diagonal is not read: `unitriangular` puts ones there.
    mixing = beta * (k @ k.mT) * since[..., past:]
    updates = torch.linalg.solve_triangular(mixing, beta * wanted, upper=False, unitriangular=True)
    keys = k if before is None else torch.cat([before.keys, k], dim=2)
    everything = updates if before is None else torch.cat([before.updates, updates], dim=2)
    outputs = all_decayed * (step.queries @ state) + (step.queries @ keys.mT * since) @ everything
    return outputs, Written(keys, everything, decays, totals)


def behind(state: Tensor, written: Written, path: Sequence[int]) -> Tensor:
    """The state [R,H,K,E] after the places `path` of those that were written, each the next one's parent."""
    if not path:
        return state
    if list(path) == list(range(len(path))):
        chosen = written.first(len(path))
    else:
        index = uploaded(torch.tensor(path), state.device)
        chosen = Written(*(part.index_select(2, index) for part in written))
    total = chosen.total[:, :, -1:]
    since = (total - chosen.total).exp().unsqueeze(-1)
    return total.exp().unsqueeze(-1) * state + (chosen.keys * since).mT @ chosen.updates


def over_chain(step: Step, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [R,H,N,E] of N places one after another, and the state after the last; `CHUNK` places at a time."""
    count = step.keys.shape[2]
    extra = -count % min(CHUNK, count)
    size = min(CHUNK, count)

    def cut(part: Tensor) -> Tensor:
        """[R,H,N,...] -> [R,H,chunks,C,...]; places that are added at the end write nothing and decay nothing."""
        padded = F.pad(part, (0, 0) * (part.dim() - 3) + (0, extra))
        return padded.unflatten(2, (-1, size))

    q, k, v, g = (cut(part) for part in (step.queries, step.keys, step.values, step.decay))
    beta = cut(step.beta).unsqueeze(-1)
    total = g.cumsum(-1)
    causal = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    since = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    decayed = total.exp().unsqueeze(-1)
    mixing = beta * (k @ k.mT) * since
    # Of each chunk: its updates on an empty state, and what a state at its beginning takes from them.
    both = torch.linalg.solve_triangular(
        mixing, torch.cat([beta * v, beta * decayed * k], dim=-1), upper=False, unitriangular=True
    )
    alone, answered = both.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, decayed_queries = q @ k.mT * since, decayed * q
    decayed_keys = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).mT
    carried = total[..., -1].exp()[..., None, None]
    outputs = []
    for number in range(k.shape[2]):
        updates = alone[:, :, number] - answered[:, :, number] @ state
        outputs.append(decayed_queries[:, :, number] @ state + scores[:, :, number] @ updates)
        state = carried[:, :, number] * state + decayed_keys[:, :, number] @ updates
    return torch.cat(outputs, dim=2)[:, :, :count], state
