"""How the tests decode."""

from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies import Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp


def greedy(policy, max_new_tokens: int = 24, eos: tuple[int, ...] = (), skip: float | None = None) -> Decoding:
    """The likeliest tokens, until one of `eos` comes (default: none ends an answer)."""
    return Decoding(policy, Greedy(), Draw("top-k"), Warp(), max_new_tokens, eos, skip)
