"""An image generator drafts for itself: what its last pass computed behind the rejected code is the next draft.

Speculative Jacobi Decoding (Teng et al. 2025, arXiv 2410.01699, section 4, algorithm 1) verifies a window of codes in
one pass, and draws the rejected part of the window anew from that pass's distributions, which follow the old codes.
Speculative Coupled Decoding (So et al. 2026, arXiv 2510.24211, section 4) couples the draws with the codes that stood
there: a code stays where its probability allows it, what follows it was computed after it, and the output is still the
target's. The tree is a chain, whose length is the window, or of a fixed shape: SJD-PAC (arXiv 2603.18599) drafts
siblings without replacement where the window begins. Nothing is trained, but for a head before the window.
Letters: F nodes, K known levels, V vocabulary, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batch import ImageRequest
from ...core.errors import Refused
from ...core.states import Taps, uploaded
from ..decoding.tree import ROOT, Expansions, Tree
from ..decoding.warp import Warp
from ..targets.base import Target, TargetStep, Verified
from .base import PLAIN, Drafter, DraftingOptions, WeightlessDrafter
from .mixed import MembersConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class JacobiConfig(WeightlessDrafter):
    """No weights. Takes `tree: {kind: chain, gamma: W}` or a `static` one; above temperature 0, `draw: sample`."""

    kind: Literal["jacobi"]
    for_language: ClassVar[bool] = False
    for_images: ClassVar[bool] = True

    # How a code is drawn anew where one stood. maximal: it stays with probability min(1, q_new / q_old), as often as a
    # coupling can; gumbel: each place has its own Gumbel noise, kept from pass to pass; independent: SJD's own draw.
    coupling: Literal["maximal", "gumbel", "independent"] = "maximal"
    # What stands at new places of the window: the code above in the picture, the code to the left, or a random code.
    initial: Literal["above", "left", "random"] = "above"

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> JacobiProposal:
        return JacobiProposal(self, target.shape.grid, target.vocab_size)

    def check_method(self, tree: str, rule: str) -> None:
        """Refuse trees that grow; couplings with `rule: block`, which looks at the codes behind a rejected one."""
        if tree not in ("chain", "static"):
            problem = f"jacobi drafts trees of a fixed shape, and {tree} has none"
            raise Refused("tree", problem, "write tree: {kind: chain, gamma: 16}")
        if rule == "block" and self.coupling != "independent":
            problem = f"block is not exact with the coupling {self.coupling}"
            raise Refused("rule", problem, "write rule: exact, or coupling: independent")

    def lines(self, shape: Any, config: PreTrainedConfig) -> list[str]:
        return [f"  no weights, no training; {self.coupling} coupling, new places begin as {self.initial}"]


class JacobiProposal:
    """Answers by level: what the last pass computed for a place, or a first guess."""

    taps = Taps()
    max_levels: int | None = None

    def __init__(self, config: JacobiConfig, grid: int, vocab_size: int):
        self._config, self._grid, self._vocab_size = config, grid, vocab_size

    def start(self, request: ImageRequest, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        self._warp, self._codes = warp, list[int]()
        self._possible = prefill.logits[-1].isfinite().float()  # [V]; Anole scores its codes alone
        self._known = prefill.logits[:0].float()  # [K,V] q of the next places
        self._old, self._old_q = self._known.argmax(-1), self._known  # what stood there: [<=K], [<=K,V]
        self._noise: dict[int, Tensor] = {}  # place -> [V]

    def begin(self, first: int) -> None:
        self._codes.append(first)

    @property
    def num_known(self) -> int:
        """Places whose distributions the last pass computed."""
        return len(self._known)

    def root(self) -> Tensor:
        self._expansions, self._drawn = Expansions(), 0
        self._window: list[Any] = []  # what is drawn in this cycle
        return self._level(0)

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """q [F,V] of the next place, the same after every code of a level: a tree of fixed shape has one a level."""
        self._drawn = self._expansions.take(parents)[0]
        self._window.append(tokens[0])
        return self._level(self._drawn).expand(len(parents), -1)

    def choose(self, q: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw codes [F,count] of the next place from q [F,V] without replacement, the first of each row coupled with
        the one that stood there, the others fresh. A code depends on the one that stood at its place and on nothing
        behind it, so that siblings are draws from q given all that their acceptance looks at: where codes are accepted
        one by one, from the first sibling on, not as a block.
        """
        if self._config.coupling == "gumbel":
            place = len(self._codes) + self._drawn
            if place not in self._noise:
                waits = torch.empty_like(q[0]).exponential_(generator=generator)
                self._noise[place] = -waits.log()
            return (q.log() + self._noise[place]).topk(count, dim=-1).indices
        first = self._first(q, generator)
        if count == 1:
            return first
        # Drawn without replacement by the shortest waits. What q gives nothing stands last, for q of too few codes.
        race = q / torch.empty_like(q).exponential_(generator=generator)
        return race.scatter(1, first, float("inf")).topk(count, dim=-1).indices

    def _first(self, q: Tensor, generator: torch.Generator | None) -> Tensor:
        """Codes [F,1] from q [F,V], coupled with what stood at the place."""
        if self._config.coupling == "independent" or self._drawn >= len(self._old):
            return torch.multinomial(q, 1, generator=generator)
        old, old_q = self._old[self._drawn], self._old_q[self._drawn]
        rest = (q - old_q).clamp(min=0.0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, q)  # equal distributions: the code stays in any case
        other = torch.multinomial(rest, 1, generator=generator)
        chance = torch.rand((len(q), 1), device=q.device, generator=generator)
        return torch.where(chance * old_q[old] < q[:, old, None], old, other)

    def accept(self, verified: Verified) -> None:
        """Keep what the pass computed behind the place that the bonus code took, and the codes behind that place: of
        those at the place itself acceptance has looked at all siblings, so that they couple nothing.
        """
        tree = verified.tree
        assert tree is not None and verified.scores is not None
        self._codes += [*verified.tokens, verified.bonus]
        line = torch.tensor(_line_behind(tree, verified.path), dtype=torch.int64)  # [K]
        self._known = self._warp.apply_temperature(verified.scores[uploaded(line + 1, verified.scores.device)])
        self._old, self._old_q = self._known.argmax(-1)[:0], self._known[:0]
        if tree.draft_probs is not None:
            rows = torch.tensor(tree.parent_rows)[line[1:]]
            self._old = tree.tokens[uploaded(line[1:], tree.tokens.device)].to(self._known.device)
            self._old_q = tree.draft_probs[uploaded(rows, tree.draft_probs.device)]
        self._noise = {place: noise for place, noise in self._noise.items() if place >= len(self._codes)}

    def _level(self, level: int) -> Tensor:
        """q [V] of a place of the window; the places before it are drawn."""
        if level < len(self._known):
            return self._known[level]
        if self._config.initial == "random":
            return self._possible / self._possible.sum()
        codes = [*self._codes[-self._grid :], *self._window]
        is_left = self._config.initial == "left" or len(codes) < self._grid  # nothing is above the first row
        code = codes[-1 if is_left else -self._grid]
        return F.one_hot(torch.as_tensor(code, device=self._known.device), self._vocab_size).to(self._possible)


def _line_behind(tree: Tree, path: Sequence[int]) -> list[int]:
    """The nodes whose scores are known for the places behind an accepted path and its bonus token, one a level: first
    children of the path's end, and below where these end the first children from the root.
    """

    def down(node: int) -> list[int]:
        nodes = list[int]()
        while node in tree.children:
            node = tree.children[node][0]
            nodes.append(node)
        return nodes

    behind = down(path[-1] if path else ROOT)
    return behind + down(ROOT)[len(path) + len(behind) :]


class HeadTailConfig(MembersConfig):
    """A trained head for the window's first level, Jacobi decoding for the others. Takes Jacobi's trees and rules.

    The first level is drawn from the mean of the head's distribution and the stale one, the levels behind it from what
    the last pass computed: a head is surest one code ahead, and stale distributions need no pass of the drafter. No
    paper has it; exact as Jacobi decoding, since each level's q is known before its codes are drawn.
    """

    kind: Literal["head_tail"]
    for_language: ClassVar[bool] = False

    # One name of a stage that trained a head.
    members: tuple[Any, ...] = Field(min_length=1, max_length=1)
    tail: JacobiConfig = JacobiConfig(kind="jacobi")
    # Weight of the stale distribution in the first level's mean; 0: the head alone.
    stale: float = Field(0.5, ge=0, le=1)

    def drafter(self, module: Any, target: Target, options: DraftingOptions = PLAIN) -> HeadTailProposal:
        """`module` holds the head's proposal, as an ensemble's."""
        (head,) = module
        return HeadTailProposal(head, self.tail.drafter(nn.Module(), target), self.stale)


class HeadTailProposal:
    """Draws as Jacobi decoding, with another q at the root."""

    max_levels: int | None = None

    def __init__(self, head: Drafter, tail: JacobiProposal, stale: float):
        self.members, self._head, self._tail, self._stale = [head], head, tail, stale
        self.taps, self.choose, self.expand = head.taps, tail.choose, tail.expand

    def start(self, request: Any, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        self._head.start(request, prefill, warp, capacity=capacity)
        self._tail.start(request, prefill, warp, capacity=capacity)

    def begin(self, first: int) -> None:
        self._head.begin(first)
        self._tail.begin(first)

    def root(self) -> Tensor:
        """The mean [V]; the head's alone where the last pass computed nothing for this place."""
        stale, q = self._tail.root(), self._head.root()
        return torch.lerp(q, stale, self._stale) if self._tail.num_known else q

    def accept(self, verified: Verified) -> None:
        self._head.accept(verified)
        self._tail.accept(verified)
