"""Trees as recorded tables have them: a row of nodes for each leaf."""

from draftsmith.models.decoding.tree import ROOT


def leaf_paths(tree):
    """Every leaf's path in nodes with the root as 0, in the order of `tree.leaves`: the rows of a table of paths."""
    paths = []
    for leaf in tree.leaves:
        path, node = [], leaf
        while node != ROOT:
            path.append(node + 1)
            node = tree.parents[node]
        paths.append((0, *reversed(path)))
    return paths


def unpadded(rows):
    return [tuple(x for x in row if x >= 0) for row in rows.tolist()]
