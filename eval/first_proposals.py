"""Whether what a drafter proposes are distributions, and change with what is accepted: looked at in a request's first
cycles.

A wrong q runs silently: greedy output stays the target's, and above temperature 0 it changes the distribution. On a GPU
the host waits for two numbers more in a request. Letters: F nodes, V vocabulary.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.finite import NotFinite

# Of sums of q: in 16 bits the probabilities of a large vocabulary miss 1 by this.
_TOLERANCE = 0.02
_CYCLES = 3  # whose first proposals are compared
_WANTED = "return probabilities over the target's whole vocabulary, with the temperature (warp.apply_temperature)"


class WrongProposal(UserError):
    """What a drafter proposed is no distribution over the target's vocabulary."""


class NothingTaken(UserWarning):
    """A drafter proposes the same whatever was accepted. One that looks up what it has no match for may be right."""


class FirstProposals:
    """What a drafter returns in its first cycle, and at the root of the next two."""

    def __init__(self, drafter: object, vocab_size: int):
        self._name, self._vocab_size = type(drafter).__name__, vocab_size
        self._facts: list[tuple[str, Tensor]] = []
        self._roots: list[Tensor] = []

    def see(self, call: str, q: Tensor, *rows: int) -> Tensor:
        """`q` as it is. Raises `WrongProposal` where its shape is not [*rows,V]."""
        expected = [*rows, self._vocab_size]
        if list(q.shape) != expected:
            problem = f"{self._name}.{call} returned q of shape {list(q.shape)}, expected {expected}"
            raise WrongProposal(problem, where=f"{self._name}.{call}", hint=_WANTED)
        total = q.sum(-1, dtype=torch.float32)
        if call == "expand":  # a row of zeros: nothing is proposed there
            total = total.where(total != 0, 1.0)
        off = (total - 1).abs().max()
        self._facts.append((call, torch.stack([off, q.min().float()])))
        if q.device.type == "cpu":  # nobody waits: before a draw refuses it in its own words
            self.settle()
        return q

    def again(self, root: Tensor) -> bool:
        """Take q [V] at the root of each cycle. False: there is nothing more to look at.

        Warns with `NothingTaken` where the first three are equal to the last bit.
        """
        if root.device.type != "cpu":
            return True  # the host would wait for each comparison
        self._roots.append(root.clone())
        if len(self._roots) < _CYCLES:
            return True
        first, *later = self._roots
        if all(torch.equal(first, root) for root in later):
            warnings.warn(
                f"{self._name}.accept: the first {_CYCLES} proposals of a request are the same to the last bit. Does "
                "accept take nothing in? draftsmith.check_drafter(CONFIG) looks closer",
                NothingTaken, stacklevel=2,
            )  # fmt: skip
        return False

    def settle(self) -> None:
        """Look at what was seen since.

        Raises:
            NotFinite: it holds NaN or infinity.
            WrongProposal: it is negative, or does not sum to 1.
        """
        calls, facts = [call for call, _ in self._facts], [fact for _, fact in self._facts]
        self._facts = []
        for call, (off, least) in zip(calls, torch.stack(facts).tolist() if facts else (), strict=True):
            # Scores that are banned are minus infinity: the word for these is not "overflow".
            if not abs(off) < float("inf") and not least < 0:
                raise NotFinite(f"the scores that {self._name}.{call} proposes from")
            if least < 0 or off > _TOLERANCE:
                what = f"is {least:.3g} at one token" if least < 0 else f"misses the sum of 1 by {off:.3g}"
                problem = f"{self._name}.{call} returned q that {what}: scores (logits) in place of probabilities?"
                raise WrongProposal(problem, where=f"{self._name}.{call}", hint=_WANTED)
