"""`draftsmith.check_drafter`: whether a drafter keeps to its protocol, in a minute on a CPU, without data.

Greedy output is the target's whatever a drafter proposes, so a broken one is only slow. The check that finds most is
"by heart": a drafter that was trained on one answer until it knows it must also be accepted on it.
Letters: F nodes, V vocabulary.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ..core.batch import Batch, Request
from ..core.errors import UserError, first_line
from ..models.decoding.tree import ROOT
from ..models.decoding.warp import Warp
from ..models.drafters.base import Drafter, DrafterConfig, TargetIdentity
from ..models.targets.base import Target
from ..models.targets.causal.section import CausalTarget
from .first_proposals import FirstProposals, NothingTaken
from .lesson import KNOWN, Lesson
from .loop import Decoding, Generation, generate
from .policies import Chain, Draw, Static
from .rules import RULES

_PROMPT, _ANSWER, _LEVELS = 12, 32, 3  # tokens, tokens, levels of a drafter without a limit that are judged
_MOST_LEVELS, _DEEP = 5, 8  # judged where it has a limit; drafted at least once
_TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
# Shares of the drafts accepted of an answer that is known by heart: of the first level, and of all where `expand`
# answers by level; of deeper ones of the others, whose mistakes add up along a path.
_ACCEPTED, _ACCEPTED_BELOW = 0.9, 0.5
_CALLS = ("start", "begin", "root", "expand", "accept")
# What a check looks at that others have found to be right: one fault is said once.
_NEEDS = {
    "q": (), "accept": ("q",), "greedy": ("q",), "files": ("q",),
    "by heart": ("loss and gradients", "q", "accept", "files"),
}  # fmt: skip


def check_drafter(
    config: DrafterConfig, target: Target | None = None, *, steps: int = 300, of_pictures: Sequence[str] = ()
) -> dict[str, str]:
    """Check a drafter of a language model: its loss, its proposals, its files.

    Args:
        config: its section.
        target: a loaded target; None: a tiny Llama with random weights, which any head can be built beside.
        steps: of training on one answer at most, for "by heart".
        of_pictures: beginnings of names of weights that only pictures reach, which the check has none of.

    Returns:
        What was checked -> what was seen. "not formed" is said of a check that this kind does not allow.

    Raises:
        UserError: something is wrong; the message has a line for each check that failed.
    """
    target = target if target is not None else tiny_target()
    if target.shape.draws_images:
        hint = "give a target that answers in words; draftsmith evaluate measures the others"
        raise UserError("drafters of image generators are not checked here", where="check_drafter", hint=hint)
    checks = _Checks(config, target, steps, tuple(of_pictures))
    seen, faults = {}, {}
    for name, check in checks.all().items():
        if (name in _NEEDS and checks.module is None) or any(earlier in faults for earlier in _NEEDS.get(name, ())):
            continue
        try:
            seen[name] = check()
        except UserError as error:
            faults[name] = error.problem
        except Exception as error:  # the drafter's own code
            faults[name] = checks.raised(error)
    if faults:
        lines = "".join(f"\n  {name}: {problem}" for name, problem in faults.items())
        raise UserError(
            f"{type(config).__name__} does not keep to the protocol of drafters:{lines}",
            hint="help(draftsmith.models.drafters.base.Drafter) says what each call gets and returns, "
            "help(draftsmith.models.drafters.base.DrafterConfig) what the section's verbs do",
        )
    return seen


def tiny_target() -> CausalTarget:
    """A Llama of twelve layers with random weights that stay the same, and a vocabulary of 64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=48, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, vocab_size=64,
                max_position_embeddings=128, initializer_range=0.3,
            )
        )  # fmt: skip
    return CausalTarget(model.requires_grad_(False), num_token_ids=64)


class _Watched:
    """A drafter that looks at each of its proposals, and keeps them."""

    def __init__(self, inner: object, vocab_size: int):
        if missing := [name for name in ("taps", "max_levels", *_CALLS) if not hasattr(inner, name)]:
            raise UserError(f"what drafter() returned ({type(inner).__name__}) has no {', '.join(missing)}")
        self.inner, self.roots, self.q = cast(Drafter, inner), list[Tensor](), list[Tensor]()
        self.first: dict[tuple[int, ...], Tensor] = {}  # path of tokens -> q [V] after it, in the first cycle
        self._paths: list[tuple[int, ...]] = []  # of this cycle's expansions
        self._looks = FirstProposals(self.inner, vocab_size)
        # Only the two calls that propose are looked at.
        self.taps, self.start, self.begin = self.inner.taps, self.inner.start, self.inner.begin
        self.accept = self.inner.accept

    @property
    def max_levels(self) -> int | None:
        return self.inner.max_levels

    def root(self) -> Tensor:
        q = self.inner.root()
        if self.inner.max_levels != 0:  # 0: it has nothing to propose in this cycle
            q = self._seen("root", q)
        self.roots.append(q.clone())
        self._paths = []
        return q

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        above = [() if parent == ROOT else self._paths[parent] for parent in parents]
        q = self._seen("expand", self.inner.expand(parents, tokens), len(parents))
        self._paths += [(*path, token) for path, token in zip(above, tokens.tolist(), strict=True)]
        if len(self.roots) == 1:
            self.first |= zip(self._paths[-len(above) :], q.clone(), strict=True)
        return q

    def _seen(self, call: str, q: Tensor, *rows: int) -> Tensor:
        self._looks.see(call, q, *rows)
        self._looks.settle()
        self.q.append(q.clone())
        return q


class _Checks:
    def __init__(self, config: DrafterConfig, target: Target, steps: int, of_pictures: tuple[str, ...]):
        self.config, self.target, self.steps, self.of_pictures = config, target, steps, of_pictures
        self.module: nn.Module | None = None
        self.lesson: Lesson | None = None
        self.by_level = False
        generator = torch.Generator().manual_seed(1)
        # Low ids may be special tokens, and the last rows of a table may have none.
        ids = torch.randint(3, min(60, target.vocab_size), (_PROMPT,), generator=generator)
        self.request = Request(ids, torch.zeros(_PROMPT, dtype=torch.int8), None, "check")

    def all(self) -> dict[str, Callable[[], str]]:
        """Name -> what looks, in the order in which each needs those before it."""
        return {
            "settings": self.settings, "loss and gradients": self.training, "q": self.q, "accept": self.accept,
            "greedy": self.greedy, "files": self.files, "by heart": self.by_heart,
        }  # fmt: skip

    def raised(self, error: Exception) -> str:
        """What the drafter's own code raised, and where in it."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(self.config).__module__), "__file__", None)
        place = [frame for frame in frames if file and Path(frame.filename).parent == Path(file).parent] or frames
        said = f"{type(error).__name__}: {first_line(error)} ({Path(place[-1].filename).name}:{place[-1].lineno})"
        if "NoneType" not in str(error):
            return said
        asked = f"taps_for asks for {self.config.taps_for(self.target.shape, training=True)} in training"
        if self.module is not None:
            asked += f", the proposal's taps are {getattr(self._drafter(), 'taps', None)}"
        return f"{said}. States that are not asked for are None: {asked}"

    def settings(self) -> str:
        self.config.check_settings(self.target.shape.draws_images)
        self.config.check(self.target.shape)
        return "fit the target"

    def training(self) -> str:
        """Trains on the target's own answer until it is known."""
        if self.config.trains_on != "states":
            self.module = self.config.load(None, self.target)
            return f"not formed: kind {self.config.kind} is not trained on the target's states"
        self.lesson = lesson = Lesson(self.config, self.target, self._answer(), self.steps, self.of_pictures)
        lesson.learn(until_known=True)
        self.module = lesson.module
        lesson.check_sums()
        losses = lesson.losses
        return f"loss {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} steps, gradients at {lesson.count} weights"

    def _answer(self) -> Batch:
        """The prompt and the target's own greedy answer, which is supervised."""
        ids = torch.cat([self.request.ids, torch.tensor(self.plain.tokens)])[None]
        mask, supervised = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        supervised[:, _PROMPT:] = True
        positions = torch.arange(ids.shape[1])[None, None]
        modality = torch.zeros_like(ids, dtype=torch.int8)
        batch = Batch(ids, mask, supervised, modality, positions, None, ("check",), seeds=(0,))
        return batch.to(self.target.device)

    @functools.cached_property
    def plain(self) -> Generation:
        return self._decode(None, Chain(1), Warp())

    def _decode(self, drafter: Any, policy: Any, warp: Warp, draw: Any = "top-k") -> Generation:
        rule = RULES["greedy" if warp.greedy else "sampling"]
        decoding = Decoding(policy, rule, Draw(draw), warp, _ANSWER, ())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingTaken)  # `accept` looks at all cycles
            return generate(self.target, drafter, self.request, decoding, torch.Generator().manual_seed(0))

    def _drafter(self, module: nn.Module | None = None) -> _Watched:
        module = module if module is not None else self.module
        assert module is not None
        return _Watched(self.config.drafter(module, self.target), self.target.vocab_size)

    def q(self) -> str:
        """In a chain, a tree and above temperature 0, in each cycle; the same where the same is asked."""
        chain, tree, sampled = self._drafter(), self._drafter(), self._drafter()
        self._decode(chain, Chain(_LEVELS), Warp())
        seen = [*chain.q]
        self._decode(chain, Chain(_LEVELS), Warp())
        if not _alike(seen, chain.q[len(seen) :]):
            raise UserError(
                "of the same request it proposes something else the second time: it draws, or start() and root() do "
                "not clear what was kept of an earlier request or cycle"
            )
        self._decode(tree, Static(_TREE), Warp())
        shared = [path for path in chain.first if path in tree.first]
        if not _alike([chain.first[path] for path in shared], [tree.first[path] for path in shared]):
            raise UserError(
                "expand returns another q after the same tokens in a tree than in a chain: parents are numbers of "
                "expansions since root(), one for each token"
            )
        siblings = [q for path, q in tree.first.items() if len(path) == 1]
        self.by_level = len(siblings) > 1 and all(torch.equal(siblings[0], q) for q in siblings)
        self._decode(sampled, Chain(_LEVELS), Warp(1.0), "sample")
        self._deep()
        count = sum(len(watched.q) for watched in (chain, tree, sampled))
        reads = "; expand answers by level, whatever the tokens" if self.by_level else ""
        return f"{count} calls returned distributions over {self.target.vocab_size} tokens{reads}"

    def _deep(self) -> None:
        """Checks that it has as many levels as it says."""
        watched = self._drafter()
        try:
            self._decode(watched, Chain(_DEEP), Warp())
        except Exception as error:
            problem = error.problem if isinstance(error, UserError) else self.raised(error)
            said = f"max_levels is {watched.max_levels}, but a chain of {_DEEP} cannot be drafted"
            raise UserError(f"{said}: {problem}") from error

    def accept(self) -> str:
        watched = self._drafter()
        self._decode(watched, Chain(_LEVELS), Warp(1.0), "sample")
        roots = watched.roots
        if len(roots) > 2 and all(torch.equal(root, roots[0]) for root in roots):
            raise UserError(f"{len(roots) - 1} accepted paths have not changed the proposal: accept takes nothing in")
        return f"changed the proposal over {len(roots)} cycles"

    def greedy(self) -> str:
        for policy in (Chain(_LEVELS), Static(_TREE)):
            if self._decode(self._drafter(), policy, Warp()).tokens != self.plain.tokens:
                raise UserError(f"with tree {policy.name} the output is not plain decoding's")
        return "output is plain decoding's, in a chain and a tree"

    def files(self) -> str:
        if self.config.trains_on != "states":
            return "not formed: nothing is trained"
        before = self._drafter()
        assert self.module is not None
        identity = TargetIdentity({"kind": "checked", "path": None})
        with tempfile.TemporaryDirectory(prefix="check-drafter-") as place:
            folder = Path(place) / "drafter"
            self.config.save(self.module, folder, self.config.manifest(self.target, identity))
            loaded = self.config.load(folder, self.target, dtype=torch.float32, identity=identity)
        after = self._drafter(loaded.eval())
        for watched in (before, after):
            self._decode(watched, Chain(_LEVELS), Warp())
        if not _alike(before.q, after.q):
            raise UserError("what was saved and loaded proposes something else")
        return "saved and loaded, it proposes the same"

    def by_heart(self) -> str:
        """Learns on until drafts of every level are accepted."""
        if self.lesson is None:
            return "not formed: nothing is trained"
        while True:
            shares = self._accepted()
            least = [_ACCEPTED if level == 0 or self.by_level else _ACCEPTED_BELOW for level in range(len(shares))]
            if not (low := [level for level, share in enumerate(shares) if share < least[level]]):
                said = ", ".join(f"{share:.0%}" for share in shares)
                return f"of an answer that it was trained on, drafts of levels 1 to {len(shares)} are accepted: {said}"
            if not self.lesson.learn():
                break
        if self.lesson.known < KNOWN:
            return f"not formed: top1 of the training metrics is not {KNOWN:.0%} after the training on one answer"
        said = f"{shares[low[0]]:.0%} of the drafts of level {low[0] + 1}"
        if low[0] == 0:
            raise UserError(
                f"training guesses the next token of the answer, decoding has {said} accepted: the proposal reads "
                "other states, tokens or places than the loss"
            )
        raise UserError(
            f"training knows the answer, decoding has {said} accepted where those before it are: expand reads other "
            "states or tokens than the loss, or the loss does not train this level (max_levels says how many it has)"
        )

    def _accepted(self) -> list[float]:
        """Level -> share of its drafts accepted where those before it are, in chains and a tree."""
        most = self._drafter().max_levels
        levels = _LEVELS if most is None else min(most, _MOST_LEVELS)
        cycles = [
            cycle
            for policy in (Chain(1), Chain(levels), Static(_TREE))
            for cycle in self._decode(self._drafter(), policy, Warp()).cycles
        ]
        shares = []
        for level in range(levels):
            tried = [c.num_accepted > level for c in cycles if c.num_drafted > level and c.num_accepted >= level]
            shares.append(sum(tried) / max(1, len(tried)))
        return shares


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(some, others, strict=True)
    )
