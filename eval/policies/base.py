"""The interface of tree policies to the decoding loop, draws of children, and which combinations are exact.

A policy sees distributions only through `expand`, which runs the drafter on nodes of the tree that is
growing. How a child is taken from a distribution is a separate axis, the `Draw`.
Letters: F nodes expanded at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ...core.errors import UserError
from ...core.import_paths import Kinded
from ...models.decoding.tree import Tree
from ...models.decoding.warp import Warp
from ...models.targets.base import Verified

Expand = Callable[[Sequence[int], Tensor], Tensor]  # (parents' expansions [F], tokens [F]) -> q [F,V]
DrawName = Literal["top-k", "sample"]


@dataclass(frozen=True)
class Draw:
    """The draw of children from q: the k most likely, or k samples without replacement."""

    name: DrawName
    generator: torch.Generator | None = None
    ends: frozenset[int] = frozenset()  # tokens that end an answer: nothing is drafted below them
    warp: Warp = field(default_factory=Warp)  # what is decoded with: top-k and top-p cut what may be drawn
    # A drafter's own way to draw from q [F,V], such that each token has distribution q: (q, count, generator).
    choose: Callable[[Tensor, int, torch.Generator | None], Tensor] | None = None

    @property
    def sampled(self) -> bool:
        """Whether children are samples without replacement, not the k likeliest tokens."""
        return self.name == "sample"

    def __call__(self, q: Tensor, count: int) -> Tensor:
        """[F,V] -> tokens [F,count] in draw order. A token without probability is never drawn by choice."""
        if not self.sampled:
            return q.argmax(-1, keepdim=True) if count == 1 else q.topk(count, dim=-1).indices
        if self.choose is not None:
            return self.choose(q, count, self.generator)
        return torch.multinomial(q, count, replacement=False, generator=self.generator)

    def support(self, q: Tensor) -> Tensor:
        """q [...,V] as children are drawn from it: samples need all that top-k and top-p leave; the likeliest few
        tokens are cut when they are known (`ranked`).
        """
        return self.warp.truncate(q) if self.sampled else q

    def ranked(self, q: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens of q [F,V], which `support` has made: probabilities [F,count] and ids."""
        best = q.topk(count, dim=-1)
        return (best.values if self.sampled else self.warp.cut(best.values)), best.indices

    def seeded(self, generator: torch.Generator | None, device: torch.device) -> Draw:
        """A draw with a generator of its own, where q is, that follows from the request's on the CPU."""
        if not self.sampled or self.generator is not None:
            return self
        seed = int(torch.randint(2**62, (), generator=generator))
        return replace(self, generator=torch.Generator(device).manual_seed(seed))


def ends_read(draw: Draw, device: torch.device) -> frozenset[int]:
    """The ends that a policy looks for which reads no token otherwise: none on a GPU, where the host would wait at each
    level of every cycle to save the last cycle's tail. What is drafted after an end is never emitted.
    """
    return draw.ends if device.type == "cpu" else frozenset()


def proposes_nothing(q: Tensor) -> bool:
    """Whether q [V] is all zeros: a drafter that looks its tokens up found nothing. It makes its q on the CPU, and the
    host waits for no other.
    """
    return q.device.type == "cpu" and not float(q.sum())


class TreePolicy(Protocol):
    """Grows a cycle's tree. A policy that learns nothing derives from this, and needs `grow` alone."""

    name: str
    prunes_by_token: bool  # drops drawn nodes by their scores: not exact with sampled draws
    num_levels: int
    # Most nodes that a cycle writes after the committed tokens: of its tree, or of the drafter's expansions where
    # those are more. Caches are made for as many.
    max_nodes: int

    def start(self) -> None:
        """A request begins. What was learned from the last one goes: a report must not depend on their order."""
        return None

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        """A tree under the root, whose distribution is `root` [V], at most `max_levels` deep; leaves at `draw.ends`.

        Its `planned` says how many levels it was to have.
        """
        ...

    def observe(self, verified: Verified) -> None:
        """Told the outcome of each cycle, for policies that adapt."""
        return None


class TreeSection(Kinded):
    """A recipe's `tree`: its settings, and the policy that they make."""

    # Whether it also shapes trees of text; ADT-Tree follows the rows of an image.
    for_text: ClassVar[bool] = True

    @property
    def chain_length(self) -> int | None:
        """The length of a chain; None: it branches."""
        return None

    def build(self, *, grid: int | None = None, seed: int = 0) -> TreePolicy:
        """The policy.

        Args:
            grid: codes in a row of the image; None: text.
            seed: of the run.
        """
        raise NotImplementedError


def check_combination(*, temperature: float, draw: DrawName, policy: str, prunes_by_token: bool, rule: str) -> None:
    """Refuse what would not be exact, by name, before anything is loaded.

    `lantern` is not exact by design and goes with any temperature, and so does a rule of another package; `block` is
    exact for sampled chains only.
    """
    if draw == "sample" and prunes_by_token:
        raise UserError(
            f"tree {policy!r} prunes drawn nodes by their scores, which is not lossless with draw: sample",
            hint="use draw: top-k, or a tree whose shape is fixed before the draw (chain, static)",
        )
    if rule == "greedy" and temperature > 0:
        raise UserError("rule: greedy at a temperature above 0", hint="use rule: sampling, or temperature: 0")
    if rule in ("sampling", "block") and temperature == 0:
        raise UserError(f"rule: {rule} at temperature 0", hint="use rule: greedy, or a temperature above 0")
    if draw == "sample" and temperature == 0:
        raise UserError("draw: sample at temperature 0", hint="use draw: top-k")
    if rule == "block" and (policy != "chain" or draw != "sample"):
        raise UserError(
            f"rule: block with tree {policy!r} and draw: {draw}; it verifies one sampled chain as a whole",
            hint="use tree: chain with draw: sample, or rule: sampling",
        )
