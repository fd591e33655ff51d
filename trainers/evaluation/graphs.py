"""Which passes of an evaluation are CUDA graphs, and what its report says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from ...core.section import Section
from ...models.targets.verification import NODES, VerificationGraphs, lengths_up_to, why_not
from .drafters import Drafting


class GraphsConfig(Section):
    """CUDA graphs: one launch for a whole pass. On a CPU nothing is captured."""

    # The chain of a draft LVLM, where every proposal is the likeliest chain.
    draft: bool = True
    # The target's passes, plain decoding's among them: for fixed numbers of nodes and lengths, captured when they first
    # come up (the clock stands still meanwhile). Its cache is then held for the longest request.
    target: bool = False
    # Places of a request that the target's graphs are made for; longer ones are decoded eagerly, and counted. null: the
    # longest prompt of the data sections with an answer.
    length: int | None = Field(None, ge=1)


def capture_target(config: GraphsConfig, target: Any, drafting: Sequence[Drafting], capacity: int) -> None:
    """Let the target's passes be graphs, where that is asked for and can be.

    Args:
        capacity: positions that a request takes without a cycle's tree, where the section does not say.
    """
    target.graphs = None
    if config.target and why_not(target.decoder) is None:
        most = max((one.policy.max_nodes for one in drafting), default=0)
        lengths = lengths_up_to((config.length or capacity) + most + NODES[-1])
        target.graphs = VerificationGraphs(target.decoder, lengths)


def about_graphs(config: GraphsConfig, target: Any) -> dict[str, str]:
    """The report's line; none where the target's passes were not asked for."""
    if not config.target:
        return {}
    if target.graphs is None:
        return {"graphs of the target": f"off: {why_not(target.decoder)}"}
    return {"graphs of the target": f"on rank 0, {target.graphs.summary}"}
