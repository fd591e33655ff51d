"""An image generator drafts for itself: what its last pass computed behind the rejected code is the next draft.

Speculative Jacobi Decoding (Teng et al. 2025, arXiv 2410.01699, section 4, algorithm 1) verifies a window of codes in
one pass, and draws the rejected part of the window anew from that pass's distributions, which follow the old codes.
Speculative Coupled Decoding (So et al. 2026, arXiv 2510.24211, section 4) couples the draws with the codes that stood
there: a code stays where its probability allows it, what follows it was computed after it, and the output is still the
target's. The tree is a chain, whose length is the window. Nothing is trained.
Letters: K known levels, V vocabulary, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batch import ImageRequest
from ...core.errors import Refused, UserError
from ...core.states import Taps
from ..decoding.tree import Expansions
from ..decoding.warp import Warp
from ..targets.base import Target, TargetStep, Verified
from .base import PLAIN, DraftingOptions, WeightlessDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class JacobiConfig(WeightlessDrafter):
    """No weights. Takes `tree: {kind: chain, gamma: W}`; above temperature 0, `draw: sample`."""

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
        """Refuse trees that branch; couplings with `rule: block`, which looks at the codes behind a rejected one."""
        if tree != "chain":
            raise Refused("tree", f"jacobi drafts a chain, and {tree} is none", "write tree: {kind: chain, gamma: 16}")
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

    def root(self) -> Tensor:
        self._expansions, self._drawn = Expansions(), 0
        self._window: list[Any] = []  # what is drawn in this cycle
        return self._level(0)

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        if len(parents) > 1:
            raise _branches()
        (depth,) = self._expansions.take(parents)
        self._window.append(tokens[0])
        return self._level(depth)[None]

    def choose(self, q: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw the code [1,1] of the next place from q [1,V], coupled with the one that stood there. A code depends on
        the one that stood at its place and on nothing behind it, so that it has distribution q given all that its
        acceptance looks at: where codes are accepted one by one, not as a block.
        """
        if count > 1:
            raise _branches()
        level, self._drawn = self._drawn, self._drawn + 1
        if self._config.coupling == "gumbel":
            place = len(self._codes) + level
            if place not in self._noise:
                waits = torch.empty_like(q[0]).exponential_(generator=generator)
                self._noise[place] = -waits.log()
            return (q.log() + self._noise[place]).argmax(-1, keepdim=True)
        if self._config.coupling == "independent" or level >= len(self._old):
            return torch.multinomial(q, 1, generator=generator)
        old, old_q = self._old[level], self._old_q[level]
        rest = (q[0] - old_q).clamp(min=0.0)
        rest = torch.where(rest.sum() > 0, rest, q[0])  # equal distributions: the code stays in any case
        other = torch.multinomial(rest, 1, generator=generator)
        chance = torch.rand((), device=q.device, generator=generator)
        return torch.where(chance * old_q[old] < q[0, old], old, other)[None]

    def accept(self, verified: Verified) -> None:
        """Keep what the pass computed behind the place that the bonus code took."""
        tree, accepted = verified.tree, len(verified.path)
        assert tree is not None and verified.scores is not None
        if not tree.is_chain:
            raise _branches()
        self._codes += [*verified.tokens, verified.bonus]
        self._known = self._warp.apply_temperature(verified.scores[accepted + 1 :])
        self._old, self._old_q = self._known.argmax(-1)[:0], self._known[:0]
        if tree.draft_probs is not None:
            self._old = tree.tokens[accepted + 1 :].to(self._known.device)
            self._old_q = tree.draft_probs[accepted + 1 :]
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


def _branches() -> UserError:
    problem = "Jacobi decoding drafts a window of codes, and the tree branches"
    return UserError(problem, key="tree", hint="use tree: {kind: chain, gamma: 16}")
