"""What tests of exactness share: prefixes of trees, tables in place of models, and chi-square of what was drawn."""

from collections import Counter
from types import SimpleNamespace

import torch
from draftsmith.core.states import Taps
from draftsmith.models.decoding.tree import ROOT, Tree
from draftsmith.models.targets.base import TargetStep


def prefixes(tree, prefix=()):
    """The tokens that the root and each node stand after, themselves included."""
    rows = [prefix]
    for parent, token in zip(tree.parents, tree.tokens.tolist(), strict=True):
        rows.append((*rows[parent + 1], token))
    return rows


def told(tree, tokens):
    """What a policy is told of an outcome, from its accepted tokens: siblings differ."""
    path, node = [], ROOT
    for token in tokens:
        node = next(child for child in tree.children[node] if int(tree.tokens[child]) == token)
        path.append(node)
    return SimpleNamespace(path=tuple(path), tree=tree, num_accepted=len(path))


class Expands:
    """A drafter's `expand` over a function q of prefixes; remembers what it was asked."""

    def __init__(self, q, prefix=()):
        self.q, self.prefix, self.paths = q, prefix, []

    def __call__(self, parents, tokens):
        above = [self.prefix if parent == ROOT else self.paths[parent] for parent in parents]
        self.paths += [(*path, token) for path, token in zip(above, tokens.tolist(), strict=True)]
        return torch.stack([self.q(path) for path in self.paths[len(self.paths) - len(parents) :]])


class TableDrafter:
    """A drafter whose scores are a function of the tokens of the answer."""

    taps, max_levels = Taps(), None

    def __init__(self, scores):
        self.scores = scores

    def start(self, request, prefill, warp, *, capacity):
        self.warp = warp

    def begin(self, first):
        self.committed = (first,)

    def q(self, prefix):
        return self.warp.apply_temperature(self.scores(prefix))

    def root(self):
        self.expand = Expands(self.q, self.committed)
        return self.q(self.committed)

    def accept(self, verified):
        self.committed += (*verified.tokens, verified.bonus)


class TableTarget:
    """A target whose scores are a function of the tokens of the answer."""

    device = torch.device("cpu")

    def __init__(self, scores, vocab_size):
        self.scores, self.vocab_size = scores, vocab_size

    def prefill(self, request, taps, *, capacity):
        return [], TargetStep(self.scores(())[None])

    def verify(self, session, root, tree):
        self.rows = prefixes(tree, (*session, root))
        return TargetStep(torch.stack([self.scores(row) for row in self.rows]))

    def commit(self, session, path):
        session[:] = self.rows[path[-1] + 1 if path else 0]


def chances(p, length):
    """The chance of every continuation of so many tokens, where p(tokens) has those of the next."""
    result = {(): 1.0}
    for _ in range(length):
        result = {(*ids, t): chance * q for ids, chance in result.items() for t, q in enumerate(p(ids).tolist()) if q}
    return result


def chi_square(observed, expected, z=3.72) -> float:
    """Statistic over its degrees of freedom's 99.99% point (Wilson-Hilferty): below 1 is compatible."""
    keep = expected > 1e-9
    freedom = int(keep.sum()) - 1
    statistic = float(((observed - expected)[keep] ** 2 / expected[keep]).sum())
    point = freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic / point


def statistic(expected, results, least=10, z=3.72) -> float:
    """How far the first tokens of results are from `chances`: below 1 is compatible.

    Args:
        least: continuations that are expected less often are joined, as the approximation needs.
        z: of the normal distribution at the level that is tested.
    """
    length, count = len(next(iter(expected))), len(results)
    seen = Counter(tuple(result.tokens[:length]) for result in results)
    assert set(seen) <= set(expected)
    common = {ids: chance for ids, chance in expected.items() if chance * count >= least}
    observed = [seen[ids] for ids in common]
    values = torch.tensor([*observed, count - sum(observed)], dtype=torch.float64)
    wanted = count * torch.tensor([*common.values(), 1 - sum(common.values())], dtype=torch.float64)
    return chi_square(values, wanted, z)


def check_drawn(expected, run, count, **level):
    """The first tokens of `count` results of `run()` come as often as `chances` says. Returns the results."""
    results = [run() for _ in range(count)]
    assert statistic(expected, results, **level) < 1
    return results


def accepted_of_drafted(results):
    """How many tokens of these answers' drafts were accepted, and how many were drafted."""
    cycles = [cycle for result in results for cycle in result.cycles]
    return sum(c.num_accepted for c in cycles), sum(c.num_drafted for c in cycles)


def path_to(tree, node: int) -> list[int]:
    """The nodes from the root's child down to this one; none for the root."""
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = tree.parents[node]
    return path


def random_tree(dice, size: int, vocab: int, first: int = 0) -> Tree:
    """Parents and tokens by chance, of `vocab` ids from `first` on."""
    parents = tuple(dice.randrange(ROOT, node) for node in range(size))
    tokens = torch.tensor([first + dice.randrange(vocab) for _ in parents], dtype=torch.int64)
    return Tree(tokens, parents, (ROOT,) * size)
