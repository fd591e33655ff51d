"""Which passes of an evaluation are CUDA graphs, and what its report says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ...core import ranks
from ...core.errors import UserError
from ...core.notices import notice
from ...models.decoding.cache import Cache
from ...models.decoding.captured import PassGraphs
from ...models.drafters import head_graphs
from ...models.drafters.beside import members_in
from ...models.drafters.head_graphs import COUNTS
from ...models.drafters.recursion import Recursive
from ...models.targets.language import LanguageTarget
from ...models.targets.verification import NODES, lengths_up_to, why_not
from .drafters import Drafting
from .methods import GraphsConfig, Wanted


@dataclass(frozen=True)
class _Setting:
    """`graphs.target` or `graphs.head` of a stage."""

    wanted: Wanted
    key: str

    def allows(self, what: str, why: str | None, *, on_gpu: bool) -> bool:
        """Whether captures are tried, on all ranks or on none; all ranks call.

        Args:
            why: they cannot be made on this rank; None: they can.

        Raises:
            UserError: they are a must.
        """
        if self.wanted is False:
            return False
        reasons = [reason for reason in ranks.gather(why) if reason is not None]
        if reasons and self.wanted is True:
            raise self._refused(f"passes of {what} cannot be CUDA graphs: {reasons[0]}")
        if reasons and on_gpu:
            notice(f"passes of {what} run eagerly, without CUDA graphs: {reasons[0]}; {self.key}=false tries none")
        return not reasons

    def failed(self, what: str, why: str) -> None:
        """A capture has failed. Raises `UserError` where it is a must."""
        if self.wanted is True:
            raise self._refused(f"a CUDA graph of {what} could not be captured: {why}")
        notice(f"passes of {what} run eagerly from here on: a CUDA graph could not be captured ({why}); "
               f"{self.key}=false tries none")  # fmt: skip

    def _refused(self, problem: str) -> UserError:
        return UserError(problem, key=self.key, hint="write auto, and passes run eagerly where they must")


def capture_target(
    config: GraphsConfig, target: LanguageTarget, drafting: Sequence[Drafting], capacity: int, *, stage: str
) -> None:
    """Let the target's passes be graphs, where that is asked for and can be; all ranks call.

    Args:
        capacity: positions that a request takes without a cycle's tree, where the section does not say.
        stage: its name.

    Raises:
        UserError: graphs are a must, and cannot be. Later, from a pass: a capture failed.
    """
    setting, what = _Setting(config.target, f"stages.{stage}.graphs.target"), "the target"
    target.graphs = None
    if setting.allows(what, why_not(target.decoder), on_gpu=target.device.type == "cuda"):
        most = max((one.policy.max_nodes for one in drafting), default=0)
        lengths = lengths_up_to((config.length or capacity) + most + NODES[-1])
        new_cache, failed = target.decoder.new_cache, partial(setting.failed, what)
        target.graphs = PassGraphs(target.device, lengths, NODES, new_cache, failed)


def capture_heads(
    config: GraphsConfig, target: LanguageTarget, drafting: Sequence[Drafting], capacity: int, *, stage: str
) -> None:
    """Let the passes of the methods' heads be graphs; arguments and errors as above."""
    setting = _Setting(config.head, f"stages.{stage}.graphs.head")
    of_method = [(one, heads) for one in drafting if (heads := [*_heads(one.drafter)])]
    why, on_gpu = head_graphs.why_not(target), target.device.type == "cuda"
    allowed = bool(of_method) and setting.allows("heads", why, on_gpu=on_gpu)
    for one, heads in of_method:
        lengths = lengths_up_to((config.length or capacity) + one.policy.max_nodes + COUNTS[-1])
        failed = partial(setting.failed, f"{one.title}'s head")
        for head in heads:
            # Each method's head has a cache of its own, and so graphs of its own.
            head.graphs = PassGraphs(target.device, lengths, COUNTS, partial(Cache, 1), failed) if allowed else None


def _heads(drafter: object) -> Iterator[Recursive]:
    """The drafter, or what it is an ensemble of, as far as these are heads with levels."""
    if isinstance(drafter, Recursive):
        yield drafter
    for member in members_in(drafter):
        yield from _heads(member)


def about_graphs(config: GraphsConfig, target: LanguageTarget, drafting: Sequence[Drafting] = ()) -> dict[str, str]:
    """The report's lines of an evaluation on a GPU: of the target's passes and of heads'. All ranks call."""
    lines, other = dict[str, str](), "another rank cannot capture them"
    if target.device.type != "cuda":
        return lines
    if config.target:
        graphs = target.graphs
        lines["graphs of the target"] = _about([("", graphs)]) if graphs else f"off: {why_not(target.decoder) or other}"
    if config.head:
        of_method = {one.title: [*_heads(one.drafter)] for one in drafting}
        captured = [(f"{title}: ", head.graphs) for title, heads in of_method.items() for head in heads if head.graphs]
        others = [title for title, heads in of_method.items() if not heads]
        why = head_graphs.why_not(target) or (other if any(of_method.values()) else None)
        said = [_about(captured) if captured else "off" if why is None else f"off: {why}"]
        said += [f"no head with levels: {', '.join(others)}"] if others else []
        lines["graphs of heads"] = "; ".join(said)
    return lines


def _about(captured: Sequence[tuple[str, PassGraphs]]) -> str:
    """Describe rank 0's graphs, each after its method's title, and name other ranks on which a capture failed."""
    failed = ranks.gather(any(graphs.failure is not None for _, graphs in captured))
    others = [str(rank) for rank, has in enumerate(failed) if has and rank]
    said = "; ".join(f"{whose}{graphs.summary}" for whose, graphs in captured)
    return f"on rank 0, {said}" + (f"; a capture failed on rank {', '.join(others)}" if others else "")
