"""Codes replaced by near ones, a probe in the form of a rule (LANTERN, section 4.1, table 4 and figure 3).

It asks whether near codes are interchangeable, which LANTERN's acceptance supposes: every code that the target draws is
replaced by a uniform draw among its k nearest, and the picture goes on from there. Its quality is measured as any
method's is, `untimed` or timed. Nothing that was drafted is accepted. Letters: N nodes without the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import Tensor

from ..core.errors import UserError
from ..models.decoding.neighbours import NeighbourTable, load_neighbours
from ..models.decoding.tree import Tree
from ..models.decoding.warp import Distributions
from .rules import Codes, RuleSection, Verified, inverse_cdf


class ReplacedConfig(RuleSection):
    """Of image codes, above temperature 0. The first code of a picture, which the prefill draws, stays."""

    kind: Literal["replaced"]
    # Nearest codes to draw from, the code itself included, as in the paper's own set: 50, 100 and 1000 in table 4.
    k: int = Field(100, ge=2)

    def check_codebook(self, num_codes: int) -> None:
        if self.k > num_codes:
            raise UserError(f"replaced: k is {self.k}, in a codebook of {num_codes}", hint=f"k is at most {num_codes}")

    def build_for_codes(self, temperature: float, codes: Codes) -> Replaced:
        self.check_codebook(len(codes.codebook))
        table = load_neighbours(codes.codebook, self.k - 1, metric="l2", offset=codes.offset, folder=codes.folder)
        return Replaced(self.k, table)


@dataclass(frozen=True)
class Replaced:
    """The rule; the table lies on the device of p."""

    k: int
    table: NeighbourTable

    name = "replaced"

    def __call__(self, tree: Tree, p: Tensor | Distributions, uniforms: Sequence[float]) -> Verified:
        """`p` [N+1,V], row 0 at the root: warped probabilities. One uniform draws the code, and the replacement by its
        place within the code's share of the distribution.
        """
        probs = Distributions.of(p).row(0).double()
        token = inverse_cdf(probs, uniforms[0])
        total, through, mass = probs.sum(), probs[: token + 1].sum(), probs[token]
        place = float((uniforms[0] * total - (through - mass)) / mass)  # uniform in [0,1), given the code
        rank = min(max(int(place * self.k), 0), self.k - 1)  # 0 is the code itself
        if rank:
            near, known = self.table.of(probs.new_full((1,), token).long(), rank)
            token = int(near[0, -1]) if bool(known[0]) else token
        return Verified((), (), token)
