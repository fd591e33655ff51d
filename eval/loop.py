"""The decoding loop: prefill, then grow a tree, verify it in one target pass, accept a path, commit, observe.

The loop knows no method: the drafter proposes tokens, the policy shapes the tree, and the rule accepts. Plain decoding
is the same loop with nothing proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..core.batch import ImageRequest, Request
from ..core.finite import NotFinite, likeliest
from ..models.decoding.tree import Tree, no_tree
from ..models.decoding.warp import Distributions, Warp
from ..models.drafters.base import Drafter
from ..models.drafters.beside import (
    captioning_seconds,
    capture_seconds,
    choice_of,
    may_pass,
    num_replayed,
    pruning_seconds,
)
from ..models.targets.base import Taps, Target
from ..models.targets.language import LanguageTarget
from .first_proposals import FirstProposals
from .policies import Draw, TreePolicy
from .rules import SCORES, Rule, inverse_cdf

Clock = Callable[[], float]  # the moment in seconds


@dataclass(frozen=True)
class Cycle:
    """One verification pass. Times in seconds."""

    num_drafted: int  # levels of the tree
    num_nodes: int
    num_accepted: int  # without the bonus token, or the end token in its place
    num_emitted: int  # with it
    draft_s: float
    verify_s: float  # the target's pass and the rule
    total_s: float
    rule_s: float = 0.0  # the rule alone
    update_s: float = 0.0  # what the tree's policy makes of the outcome
    # Levels that the policy set out to draft (gamma, ADT-Tree's d), as far as the drafter has them; 0: none drafted.
    num_planned: int = 0
    # ViSkip: attention on the picture where the token before this cycle came from; None: nobody looked.
    visual_attention: float | None = None


@dataclass(frozen=True)
class Generation:
    """The output of a request. The first token comes from the prefill, before any cycle."""

    tokens: list[int]
    cycles: list[Cycle]
    prefill_s: float  # the tower's pass over the pictures included, whoever ran it
    draft_prefill_s: float
    total_s: float
    stop: Literal["eos", "length"]
    pruning_s: float = 0.0  # of the draft's prefill, what a drafter that prunes the prompt chose with
    captioning_s: float = 0.0  # of the draft's prefill, what a captioner wrote for mode C in
    replayed: tuple[int, int] = (0, 0)  # passes of target and drafter that CUDA graphs ran

    def visual_skips(self, skip: float) -> dict[str, Any]:
        """Return details of a row for ViSkip at threshold `skip`: how many cycles drafted nothing because of it, and
        the mean share of attention on the pictures.
        """
        shares = [cycle.visual_attention for cycle in self.cycles if cycle.visual_attention is not None]
        mean = sum(shares) / len(shares) if shares else 0.0
        return {"skipped_cycles": sum(share >= skip for share in shares), "visual_attention": mean}


@dataclass(frozen=True)
class Decoding:
    """Decoding settings: everything that stays the same from request to request."""

    policy: TreePolicy
    rule: Rule
    draw: Draw
    warp: Warp
    max_new_tokens: int
    eos_ids: Collection[int]
    # ViSkip (MMSpec): a cycle drafts nothing where its last token came from a place that gave the picture at least this
    # share of its attention. Exact with any drafter, tree and rule: see `_Run._drafted`.
    visual_skip: float | None = None


@dataclass(frozen=True)
class EmbeddedRequest:
    """The target's input of a request with pictures, for all methods that decode it, and the seconds it took.

    The seconds count in the prefill and the whole of every generation that is given it, as if its tower had run there.
    """

    prompt: Any  # `LanguageTarget.embed_prompt`'s
    seconds: float


def embed_once(
    target: Target, request: Request | ImageRequest, *, clock: Clock | None = None
) -> EmbeddedRequest | None:
    """Run the target's vision tower over the pictures of `request`; None: it has none, and nothing is worth keeping."""
    if not isinstance(request, Request) or request.pixels is None:
        return None
    clock = clock or _clock(target)
    start = clock()
    prompt = cast(LanguageTarget, target).embed_prompt(request)
    return EmbeddedRequest(prompt, clock() - start)


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    request: Request | ImageRequest,
    decoding: Decoding,
    generator: torch.Generator | None = None,
    *,
    embedded: EmbeddedRequest | None = None,
    clock: Clock | None = None,
) -> Generation:
    """Continue `request` until an end token (which is kept) or `max_new_tokens`.

    Args:
        drafter: None decodes plainly.
        generator: draws the uniforms of the rule and the bonus tokens and seeds sampled draws, on the CPU; needed
            above temperature 0.
        embedded: `embed_once`'s, of this very request; None: the target's tower runs in the prefill.
        clock: the moment in seconds; None: the wall's, after the target's device has finished.

    Raises:
        NotFinite: the scores that a token comes from are not, or those that the first cycle proposes from.
        WrongProposal: what the drafter proposes in the first cycle is no distribution.

    Warns with `NothingTaken` where the drafter's first proposals do not change with what is accepted.
    """
    run = _Run(target, drafter, decoding, generator, clock or _clock(target, drafter))
    start, replayed = run.clock(), run.replayed()
    cycles = []
    embedded_s = 0.0 if embedded is None else embedded.seconds
    try:
        prefill_s, draft_prefill_s = run.prefill(request, None if embedded is None else embedded.prompt)
        while not run.ended:
            cycles.append(run.cycle())
    except NotFinite as error:
        raise error.of(f"{request.name or '(without a name)'}, token {len(run.tokens)}") from None
    stop: Literal["eos", "length"] = "eos" if run.tokens[-1] in decoding.eos_ids else "length"
    total_s = run.clock() - start + embedded_s
    target_passes, draft_passes = (now - then for now, then in zip(run.replayed(), replayed, strict=True))
    return Generation(
        run.tokens, cycles, prefill_s + embedded_s, draft_prefill_s, total_s, stop, pruning_seconds(drafter),
        captioning_seconds(drafter), (target_passes, draft_passes),
    )  # fmt: skip


class _Run:
    """One request while it is decoded; `tokens` is its answer so far."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        decoding: Decoding,
        generator: torch.Generator | None,
        clock: Clock,
    ):
        self.target, self.drafter, self.decoding, self.generator = target, drafter, decoding, generator
        self.seeing = cast(LanguageTarget, target)  # where pictures are asked for
        self.draw = replace(decoding.draw, ends=frozenset(decoding.eos_ids), warp=decoding.warp)
        self.clock, self.tokens = clock, list[int]()
        # Of the first cycles.
        self.looks = None if drafter is None else FirstProposals(drafter, target.vocab_size)
        self.watches = drafter is not None and decoding.visual_skip is not None
        self.visual_attention: float | None = None  # where the last committed token came from

    @property
    def room(self) -> int:
        """The number of tokens that may still come."""
        return self.decoding.max_new_tokens - len(self.tokens)

    def replayed(self) -> tuple[int, int]:
        """Passes of target and drafter that graphs have run so far; none on a CPU, where nothing is captured."""
        on_gpu = self.target.device.type == "cuda"
        return (num_replayed(self.target), num_replayed(self.drafter)) if on_gpu else (0, 0)

    @property
    def ended(self) -> bool:
        return self.tokens[-1] in self.decoding.eos_ids or self.room <= 0

    def prefill(self, request: Request | ImageRequest, embedded: Any = None) -> tuple[float, float]:
        """Emit the first token, and start the drafter after it. Returns the seconds of each."""
        drafter, warp, start = self.drafter, self.decoding.warp, self.clock()
        # A tree's nodes are written after the committed tokens before a path of them is kept.
        most_nodes = 1 if drafter is None else self.decoding.policy.max_nodes + 1
        capacity = self.decoding.max_new_tokens + 1 + most_nodes
        more = {} if embedded is None else {"embedded": embedded}
        taps = drafter.taps if drafter else Taps()
        taps = self.seeing.watched(taps) if self.watches else taps
        self.session, step = self.target.prefill(request, taps, capacity=capacity, **more)
        probs = warp(step.logits[-1])
        if warp.greedy:
            first = int(likeliest(probs))
            if first < 0:
                raise NotFinite(SCORES)
        else:
            first = inverse_cdf(probs, float(torch.rand((), generator=self.generator)))
        self.tokens.append(first)
        if self.watches:
            self.visual_attention = self.seeing.visual_attention(self.session, step)
        begin = self.clock()
        if drafter is not None:
            drafter.start(request, step, warp, capacity=capacity)
            drafter.begin(first)
            self.decoding.policy.start()
        return begin - start, self.clock() - begin

    def cycle(self) -> Cycle:
        """Draft a tree, verify it, commit the accepted path, and let drafter and policy learn of it."""
        drafter, policy, warp, clock = self.drafter, self.decoding.policy, self.decoding.warp, self.clock
        begin = clock()
        tree = no_tree() if drafter is None else self._drafted(drafter)
        drafted = clock()
        step = self.target.verify(self.session, self.tokens[-1], tree)
        p = Distributions(step.logits, None if warp.greedy else warp)
        scored = clock()
        uniforms: list[float] = []
        if not warp.greedy:
            uniforms = torch.rand(tree.num_nodes + 1, generator=self.generator, dtype=torch.float64).tolist()
        verified = self.decoding.rule(tree, p, uniforms)
        if self.looks is not None:
            self.looks.settle()
        verified = verified.until_end(self.decoding.eos_ids)
        committed = step.along([0, *(n + 1 for n in verified.path)])
        verified = replace(verified, step=committed, tree=tree, scores=step.logits)
        checked = clock()
        self.target.commit(self.session, verified.path)
        update_s, attention = 0.0, self.visual_attention
        if drafter is not None:
            drafter.accept(verified)
            accepted_at = clock()
            policy.observe(verified)
            if self.watches:
                self.visual_attention = self.seeing.visual_attention(self.session, committed)
            update_s = clock() - accepted_at
        self.tokens += [*verified.tokens, verified.bonus]
        most = tree.planned if drafter is None or drafter.max_levels is None else drafter.max_levels
        return Cycle(
            num_drafted=tree.num_levels, num_nodes=tree.num_nodes, num_accepted=verified.num_accepted,
            num_emitted=verified.num_accepted + 1, num_planned=min(tree.planned, most), draft_s=drafted - begin,
            verify_s=checked - drafted, rule_s=checked - scored, update_s=update_s, total_s=clock() - begin,
            visual_attention=attention,
        )  # fmt: skip

    def _drafted(self, drafter: Drafter) -> Tree:
        looks, root = self.looks if len(self.tokens) == 1 else None, drafter.root()
        # ViSkip (MMSpec, arXiv 2603.14989, and its released code) makes this cycle a step of plain decoding. Exact at
        # every temperature: what is compared is a function of the prompt and the committed tokens. It is known before
        # this cycle's first draw, so given them the choice is made, and with a tree or without one the rule emits
        # tokens distributed as the target's. A choice that looked at the draft, or at the draws that accept it, would
        # not be exact. The drafter's `root` has run: it reads the newest tokens there in every cycle.
        skip, attention = self.decoding.visual_skip, self.visual_attention
        if drafter.max_levels == 0 or (skip is not None and attention is not None and attention >= skip):
            return no_tree()
        if looks is not None:
            looks.see("root", root)
        choose = choice_of(drafter)
        may_repeat = choose is not None or may_pass(drafter)  # first guesses, what is looked up
        if self.looks is not None and not may_repeat and not self.looks.again(root):
            self.looks = None
        # Read now: a drafter may say in each cycle how much of what it drafted is worth a verification. The target adds
        # one token itself, so the last positions need no draft.
        levels = min(self.room - 1, drafter.max_levels or self.room)
        if levels <= 0:
            return no_tree()

        def expand(parents: Sequence[int], tokens: Tensor) -> Tensor:
            q = drafter.expand(parents, tokens)
            return self.draw.support(q if looks is None else looks.see("expand", q, len(parents)))

        root = self.draw.support(root)
        self.draw = replace(self.draw.seeded(self.generator, root.device), choose=choose)
        tree = self.decoding.policy.grow(root, expand, self.draw, max_levels=levels)
        return tree if tree.draft_probs is None else replace(tree, draft_probs=tree.draft_probs.to(self.target.device))


def _clock(target: Target, drafter: Drafter | None = None) -> Clock:
    """perf_counter, after the target's device has finished (CUDA runs behind), without the capture of graphs."""
    device = target.device
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter() - capture_seconds(target) - capture_seconds(drafter)

    return now
