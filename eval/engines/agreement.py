"""How far two sides drafted alike, group by group, and what a difference points at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...models.targets.table import family_named
from .ours import ONE, PIECES, RESIZED, TEXT, TOGETHER, TWO, CheckRequest, Drafted

BOUND = 0.02  # share of chains that may differ in a cell


@dataclass(frozen=True)
class Engine:
    """What the engine says of itself."""

    version: str
    device: str
    runner: str
    name: str = "vLLM"
    ends: tuple[int, ...] = ()  # tokens after which it ends an answer, where our loop goes on


@dataclass(frozen=True)
class Cell:
    """A group of requests on both sides."""

    group: str
    requests: int
    plain: int  # requests whose plain answers of the engine are ours; `requests` in all
    same: int  # requests whose tokens with the drafter are the engine's own plain ones
    chains: int  # compared chains; `equal` of them agree at every place
    equal: int
    accepted: tuple[int, int]  # drafted tokens that stood: ours, the engine's

    @property
    def off(self) -> float:
        """Share of chains that differ; 1 where none could be compared."""
        return (self.chains - self.equal) / self.chains if self.chains else 1.0

    @property
    def good(self) -> bool:
        """Whether the drafter runs in the engine as it runs here."""
        return self.same == self.requests and self.off <= BOUND


def by_start(tokens: Sequence[int], chains: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """An engine's chains by the number of tokens before each: a cycle emits what stood of its chain, and one more."""
    placed, start = {}, 1
    for chain in chains:
        if start >= len(tokens):
            break
        if chain:  # none: the pass had no room for it
            placed[start] = list(chain)
        start += accepted(tokens, start, chain) + 1
    return placed


def accepted(tokens: Sequence[int], start: int, chain: Sequence[int]) -> int:
    """Length of the chain's beginning that the answer's tokens from `start` on repeat."""
    count = 0
    while count < len(chain) and start + count < len(tokens) and chain[count] == tokens[start + count]:
        count += 1
    return count


def compare(
    requests: Sequence[CheckRequest],
    ours: Mapping[str, Drafted],
    plain: Mapping[str, Sequence[int]],
    engine: Mapping[str, Drafted],
) -> list[Cell]:
    """A cell for each group, in the order of the requests. `plain`: the engine's tokens without a drafter, by request.
    `engine`: with it.
    """
    cells = []
    for group in dict.fromkeys(request.group for request in requests):
        names = [request.name for request in requests if request.group == group]
        pairs = [pair for name in names for pair in _pairs(ours[name], engine[name])]
        cells.append(
            Cell(
                group,
                len(names),
                plain=sum(list(plain[name]) == ours[name].tokens for name in names),
                same=sum(list(plain[name]) == engine[name].tokens for name in names),
                chains=len(pairs),
                equal=sum(mine == theirs for mine, theirs, _ in pairs),
                accepted=(
                    sum(accepted(tokens, 0, mine) for mine, _, tokens in pairs),
                    sum(accepted(tokens, 0, theirs) for _, theirs, tokens in pairs),
                ),
            )
        )
    return cells


def _pairs(ours: Drafted, engine: Drafted) -> list[tuple[list[int], list[int], list[int]]]:
    """(our chain, the engine's, the answer's tokens from there on) after the same tokens. Chains are cut to the shorter
    one: an engine drafts on where an answer has no room left.
    """
    pairs = []
    for start, chain in ours.chains.items():
        other = engine.chains.get(start)
        if other is not None and ours.tokens[:start] == engine.tokens[:start]:
            count = min(len(chain), len(other))
            pairs.append((chain[:count], other[:count], ours.tokens[start:]))
    return pairs


_UNPAIRED = ("dflash", "medusa")  # kinds that pair no state with the token after it
_OTHER_ANSWERS = (
    "nothing of the drafter's: the engine runs other weights or sees other pictures (swapped, left out). One that is "
    "resized differs a little with the library (engines: torchvision, here: PIL): hand over pictures that are resized "
    "already"
)
_OTHER_CHAINS = (
    "the head reads other states or weights: tapped layers in config.json, their order, fc; where pictures alone "
    "differ, what stands at them: the placeholder's row, or projected pictures"
)


def faults(cells: Sequence[Cell], engine: Engine, *, kind: str, target: str, layers: int) -> list[tuple[str, str]]:
    """What is wrong and what to look at, as (problem, hint); empty where every cell is good.

    Args:
        kind: of the drafter.
        target: the target's model_type.
        layers: of the drafter.
    """
    by_group = {cell.group: cell for cell in cells}
    text_good = TEXT not in by_group or by_group[TEXT].good
    alone_good = all(cell.good for cell in cells if cell.group not in (TOGETHER, PIECES, RESIZED))
    problems = []
    for cell in cells:
        again = cell.group in (TOGETHER, PIECES)
        if cell.plain < cell.requests and not again:
            problem = f"{cell.group}: {cell.requests - cell.plain} of {cell.requests} plain answers are not ours"
            problems.append((problem, _OTHER_ANSWERS))
        if cell.same < cell.requests:
            problems.append((
                f"{cell.group}: {cell.requests - cell.same} of {cell.requests} answers change when it drafts",
                "verification must not change an answer: serve it with and without the drafter, and draftsmith audit "
                "measures whether arithmetic parts them or a fault",
            ))  # fmt: skip
        if cell.off > BOUND and (alone_good or not again):  # else the same difference again
            hint = _MIXED if again else _OTHER_CHAINS
            if cell.group == PIECES and TOGETHER in by_group and by_group[TOGETHER].off <= BOUND:
                hint = _PIECES_UNPAIRED if kind in _UNPAIRED else _PIECES_PAIRED
            elif kind == "dflash" and layers > 1 and (engine.name, engine.device) == ("vLLM", "cpu") and not again:
                hint = _NORMS
            elif cell.group in (ONE, TWO, RESIZED) and text_good and family_named(target).v1_misplaces_drafts:
                hint = _V1 if engine.runner == "V1" else hint
            problems.append((f"{cell.group}: {cell.chains - cell.equal} of {cell.chains} chains differ", hint))
    return problems


_MIXED = "alone they draft as here: the engine, or the drafter's class in it, mixes up requests of a batch"
_PIECES_UNPAIRED = "whole prompts draft as here: the engine reads a prompt's later pieces otherwise"
_PIECES_PAIRED = (
    "the engine's fault: with chunked prefill vLLM pairs the last state of each piece with the prompt's last "
    "token, and not with the next one. Our plugin repairs it (pip install ./serving/draftsmith-vllm); without it "
    "let a pass take whole prompts: --max-num-batched-tokens"
)
_NORMS = (
    "the engine's fault: vLLM's norm op on CPUs takes the first layer's weight for every layer of a DFlash "
    "draft; on a GPU, or with one layer, it does not"
)
_V1 = (
    "the engine's fault: vLLM's V1 runner writes draft steps after a Qwen-VL picture into the slots of earlier keys; "
    "its V2 runner does not (VLLM_USE_V2_MODEL_RUNNER=1). To see the export without it: --without-known-faults"
)
