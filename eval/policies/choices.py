"""Published static trees by the names that their authors gave them.

A word is a path: `021` is the first child (0) of the root, its third child (2), and that one's second child (1).
Sources: EAGLE (mc_sim_7b_63, its default; the name counts 63 and the tree has 25 nodes) and LANTERN (the others).
"""

from __future__ import annotations


def _paths(words: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(rank) for rank in word) for word in words.split())


CHOICES: dict[str, tuple[tuple[int, ...], ...]] = {
    "chain5": _paths("0 00 000 0000 00000"),
    # Levels of 4, 8, 8, 3 and 2 nodes.
    "mc_sim_7b_63": _paths(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
    # 3, 8, 9, 3 and 2.
    "mc_sim_7b_63_balanced": _paths(
        "0 1 2 00 01 02 10 11 12 20 21 000 001 002 010 011 100 101 110 111 0000 0001 0002 00000 00001"
    ),
    # 5, 13, 16, 14 and 9: LANTERN's default.
    "naive_extend_57": _paths(
        "0 1 2 3 4 "
        "00 01 02 03 10 11 12 20 21 22 30 31 40 "
        "000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200 "
        "0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200 "
        "00000 00001 00002 00010 00011 00100 00101 00110 00200"
    ),
}
