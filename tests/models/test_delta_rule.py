"""The gated delta rule over chains and trees against one place after the other, as its recurrence is written."""

import pytest
import torch
from draftsmith.models.decoding.tree import Tree
from draftsmith.models.targets.qwen35.delta_rule import CHUNK, Step, behind, over_chain, over_tree

PARENTS = (-1, -1, 0, 0, 2, 1, 4, 2)
PATHS = [[0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5], [0, 2, 4, 6], [0, 2, 7], []]


def steps(count: int, seed: int = 0, fastest: float = 2.0) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def draw(*width: int) -> torch.Tensor:
        return torch.randn(2, 3, count, *width, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(8), dim=-1) for _ in range(2))
    return Step(q * 8**-0.5, k, draw(5), -fastest * draw().abs(), draw().sigmoid())


def one(step: Step, place: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state after a place: S = exp(g) S' (1 - beta k k^T) + beta k v^T, read with the query."""
    q, k, v = (part[:, :, place] for part in (step.queries, step.keys, step.values))
    decayed = step.decay[:, :, place, None, None].exp() * state
    answered = torch.einsum("rhk,rhke->rhe", k, decayed)
    state = decayed + step.beta[:, :, place, None, None] * k.unsqueeze(-1) * (v - answered).unsqueeze(-2)
    return torch.einsum("rhk,rhke->rhe", q, state), state


def begun() -> torch.Tensor:
    return torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_chain_is_its_places_one_by_one(count):
    step, state = steps(count), begun()
    outputs, last = over_chain(step, state)
    assert outputs.shape == (2, 3, count, 5)
    for place in range(count):
        expected, state = one(step, place, state)
        torch.testing.assert_close(outputs[:, :, place], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(last, state, atol=1e-12, rtol=0)


@pytest.mark.parametrize("passes", [(8,), (2, 4, 2), (1,) * 8])
def test_a_tree_is_its_paths_one_by_one_in_one_pass_or_in_levels(passes):
    step, state = steps(len(PARENTS)), begun()
    seen = Tree(torch.zeros(8, dtype=torch.int64), PARENTS, (-1,) * 8).ancestor_mask()[1:, 1:]
    parts, written, first = [], None, 0
    for count in passes:
        last = first + count
        now = Step(*(part[:, :, first:last] for part in vars(step).values()))
        part, written = over_tree(now, state, seen[None, first:last, :last], written)
        parts.append(part)
        first = last
    outputs = torch.cat(parts, dim=2)
    for path in PATHS:
        expected = state
        for node in path:
            read, expected = one(step, node, expected)
            if node == path[-1]:
                torch.testing.assert_close(outputs[:, :, node], read, atol=1e-12, rtol=0)
        torch.testing.assert_close(behind(state, written, path), expected, atol=1e-12, rtol=0)


def test_a_state_that_decays_to_nothing_is_no_nan():
    """Differences of decays that are no ancestors' would overflow."""
    step = steps(8, fastest=400.0)
    single = Step(*(part.float() for part in vars(step).values()))
    seen = Tree(torch.zeros(8, dtype=torch.int64), PARENTS, (-1,) * 8).ancestor_mask()[1:, 1:]
    outputs, written = over_tree(single, begun().float(), seen[None])
    chained, last = over_chain(single, begun().float())
    made = (outputs, chained, last, behind(begun().float(), written, [0, 2, 4, 6]))
    assert all(part.isfinite().all() for part in made)
