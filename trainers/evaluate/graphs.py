"""Which passes of an evaluation are CUDA graphs, and what its report says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pydantic import Field

from ...core.section import Section
from ...models.decoding.cache import Cache
from ...models.decoding.captured import PassGraphs
from ...models.drafters import head_graphs
from ...models.drafters.beside import members_in
from ...models.drafters.head_graphs import COUNTS
from ...models.drafters.recursion import Recursive
from ...models.targets.language import LanguageTarget
from ...models.targets.verification import NODES, lengths_up_to, why_not
from .drafters import Drafting


class GraphsConfig(Section):
    """CUDA graphs: one launch for a whole pass. On a CPU nothing is captured."""

    # The chain of a draft LVLM, where every proposal is the likeliest chain.
    draft: bool = True
    # The target's passes, plain decoding's among them: for fixed numbers of nodes and lengths, captured when they first
    # come up (the clock stands still meanwhile). Its cache is then held for the longest request.
    target: bool = False
    # The passes of heads that read the target's states: what a cycle begins with, and each level of any tree or chain.
    # Not written where it is false: evaluations that finished before there was such a setting stay finished.
    head: bool = Field(False, exclude_if=lambda value: not value)
    # Places of a request that graphs of the target and of heads are made for; longer ones are decoded eagerly, and
    # counted. null: the longest prompt of the data sections with an answer.
    length: int | None = Field(None, ge=1)


def capture_target(config: GraphsConfig, target: LanguageTarget, drafting: Sequence[Drafting], capacity: int) -> None:
    """Let the target's passes be graphs, where that is asked for and can be.

    Args:
        capacity: positions that a request takes without a cycle's tree, where the section does not say.
    """
    target.graphs = None
    if config.target and why_not(target.decoder) is None:
        most = max((one.policy.max_nodes for one in drafting), default=0)
        lengths = lengths_up_to((config.length or capacity) + most + NODES[-1])
        target.graphs = PassGraphs(target.device, lengths, NODES, target.decoder.new_cache)


def capture_heads(config: GraphsConfig, target: LanguageTarget, drafting: Sequence[Drafting], capacity: int) -> None:
    """Let the passes of the methods' heads be graphs, where that is asked for and can be; arguments as above."""
    wanted = config.head and head_graphs.why_not(target) is None
    for one in drafting:
        lengths = lengths_up_to((config.length or capacity) + one.policy.max_nodes + COUNTS[-1])
        for head in _heads(one.drafter):
            # Each method's head has a cache of its own, and so graphs of its own.
            head.graphs = PassGraphs(target.device, lengths, COUNTS, partial(Cache, 1)) if wanted else None


def _heads(drafter: object) -> Iterator[Recursive]:
    """The drafter, or what it is an ensemble of, as far as these are heads with levels."""
    if isinstance(drafter, Recursive):
        yield drafter
    for member in members_in(drafter):
        yield from _heads(member)


def about_graphs(config: GraphsConfig, target: LanguageTarget, drafting: Sequence[Drafting] = ()) -> dict[str, str]:
    """The report's lines: of the target's passes and of heads', where they were asked for."""
    lines = {}
    if config.target:
        if target.graphs is None:
            lines["graphs of the target"] = f"off: {why_not(target.decoder)}"
        else:
            lines["graphs of the target"] = f"on rank 0, {target.graphs.summary}"
    if config.head:
        lines["graphs of heads"] = _about_heads(target, drafting)
    return lines


def _about_heads(target: LanguageTarget, drafting: Sequence[Drafting]) -> str:
    if (why := head_graphs.why_not(target)) is not None:
        return f"off: {why}"
    of_method = {one.title: [head.graphs for head in _heads(one.drafter)] for one in drafting}
    others = [title for title, some in of_method.items() if not some]
    summaries = [f"{title}: {graphs.summary}" for title, some in of_method.items() for graphs in some if graphs]
    without = [f"no head with levels: {', '.join(others)}"] if others else []
    return "; ".join(["on rank 0, " + summaries[0], *summaries[1:], *without] if summaries else ["off", *without])
