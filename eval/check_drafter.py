"""`draftsmith.check_drafter`: whether a drafter keeps to its protocol, in a minute on a CPU, without data.

Greedy output is the target's whatever a drafter proposes, so a broken one is only slow. The check that finds most is
"by heart": a drafter that was trained on one answer until it knows it must also be accepted on it.
Letters: V vocabulary.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ..core.batch import Batch, Request, StepLoss
from ..core.errors import UserError, first_line
from ..models.decoding.tree import ROOT
from ..models.decoding.warp import Warp
from ..models.drafters.base import Drafter, DrafterConfig, TargetIdentity
from ..models.targets.base import Target
from ..models.targets.causal.section import CausalTarget
from .first_proposals import FirstProposals, NothingTaken
from .loop import Decoding, Generation, generate
from .policies import Chain, Draw, Static
from .rules import RULES

_PROMPT, _ANSWER, _LEVELS = 12, 32, 3  # tokens, tokens, levels of a drafter without a limit that are judged
_MOST_LEVELS, _DEEP = 5, 8  # judged where it has a limit; drafted at least once
_TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
# Shares of the drafts accepted of an answer that is known by heart: of the first level, and of all where `expand`
# answers by level; of deeper ones of the others, whose mistakes add up along a path.
_ACCEPTED, _ACCEPTED_BELOW = 0.9, 0.5
_KNOWN = 0.95  # share of the answer's tokens that training guesses where it is known by heart
_ZEROS, _CHUNK = 3, 40  # steps: a weight that starts behind a zero then has a gradient; learned at a time
_SUMS = "forward returns sums over supervised tokens, which the loop divides by their number in the whole step"
_CALLS = ("start", "begin", "root", "expand", "accept")
# Check -> those that must have passed, as one fault is said once; all but the first two need a module.
_NEEDS = {
    "settings": (), "loss and gradients": (), "q": (), "accept": ("q",), "greedy": ("q",), "files": ("q",),
    "by heart": ("loss and gradients", "q", "accept", "files"),
}  # fmt: skip


def check_drafter(
    config: DrafterConfig, target: Target | None = None, *, steps: int = 300, of_pictures: Sequence[str] = ()
) -> dict[str, str]:
    """Check a drafter of a language model: its loss, its proposals, its files. Returns what was checked -> what was
    seen, "not formed" where its kind does not allow a check. Raises `UserError` with a line for each failed check.

    Args:
        target: a loaded target; None: a tiny Llama with random weights, which any head can be built beside.
        steps: of training on one answer at most, for "by heart".
        of_pictures: beginnings of names of weights that only pictures reach, which the check has none of.
    """
    target = target if target is not None else tiny_target()
    if target.shape.draws_images:
        hint = "give a target that answers in words; draftsmith evaluate measures the others"
        raise UserError("drafters of image generators are not checked here", where="check_drafter", hint=hint)
    checks = _Checks(config, target, steps, tuple(of_pictures))
    observed, faults = dict[str, str](), dict[str, str]()
    for number, (name, needs) in enumerate(_NEEDS.items()):
        if (number > 1 and checks.module is None) or faults.keys() & needs:
            continue
        try:
            observed[name] = getattr(checks, name.replace(" ", "_"))()
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
    return observed


def tiny_target() -> CausalTarget:
    """A Llama of twelve layers with random weights that stay the same, and a vocabulary of 64."""
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # only the two calls that propose are looked at

    def root(self) -> Tensor:
        q = self.inner.root()
        if self.inner.max_levels != 0:  # 0: it has nothing to propose in this cycle
            self._look("root", q)
        self.roots.append(q.clone())
        self._paths = []
        return q

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        above = [() if parent == ROOT else self._paths[parent] for parent in parents]
        q = self._look("expand", self.inner.expand(parents, tokens), len(parents))
        self._paths += [(*path, token) for path, token in zip(above, tokens.tolist(), strict=True)]
        if len(self.roots) == 1:
            self.first |= zip(self._paths[-len(above) :], q.clone(), strict=True)
        return q

    def _look(self, call: str, q: Tensor, *rows: int) -> Tensor:
        self._looks.see(call, q, *rows)
        self._looks.settle()
        self.q.append(q.clone())
        return q


class _Checks:
    """The checks of one drafter; each returns what it saw, and raises `UserError` with what is wrong."""

    def __init__(self, config: DrafterConfig, target: Target, steps: int, of_pictures: tuple[str, ...]):
        self.config, self.target, self.steps, self.of_pictures = config, target, steps, of_pictures
        self.module: nn.Module | None = None  # once it could be trained, or is loaded
        self.losses, self.known, self.by_level = list[float](), 0.0, False
        generator = torch.Generator().manual_seed(1)
        # Low ids may be special tokens, and the last rows of a table may have none.
        ids = torch.randint(3, min(60, target.vocab_size), (_PROMPT,), generator=generator)
        self.request = Request(ids, torch.zeros(_PROMPT, dtype=torch.int8), None, "check")

    def raised(self, error: Exception) -> str:
        """What the drafter's own code raised, and where in it."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(self.config).__module__), "__file__", None)
        place = [frame for frame in frames if file and Path(frame.filename).parent == Path(file).parent] or frames
        said = f"{type(error).__name__}: {first_line(error)} ({Path(place[-1].filename).name}:{place[-1].lineno})"
        if "NoneType" not in str(error):
            return said
        taps = f"taps_for asks for {self.config.taps_for(self.target.shape, training=True)} in training"
        if self.module is not None:
            taps += f", the proposal's taps are {self._drafter().taps}"
        return f"{said}. States that are not asked for are None: {taps}"

    def settings(self) -> str:
        self.config.check_settings(draws_images=False)
        self.config.check(self.target.shape)
        return "fit the target"

    def loss_and_gradients(self) -> str:
        """Train on one answer, the target's own, until the metrics say that it is known."""
        config, target = self.config, self.target
        if config.trains_on != "states":
            self.module = config.load(None, target)
            return f"not formed: kind {config.kind} is not trained on the target's states"
        torch.manual_seed(0)
        module = config.build(target, count_tokens=lambda: torch.ones(target.vocab_size).long())
        module = _expect(module, nn.Module, "build()", "a torch.nn.Module").to(target.device)
        objective = config.training_objective(module, target)
        self.objective = _expect(objective, nn.Module, "training_objective()", "a torch.nn.Module")
        # The prompt and the target's own greedy answer, which is supervised.
        ids = torch.cat([self.request.ids, torch.tensor(self.plain.tokens)])[None]
        places, modality = torch.arange(ids.shape[1])[None], torch.zeros_like(ids, dtype=torch.int8)
        batch = Batch(ids, places >= 0, places >= _PROMPT, modality, places[None], None, ("check",), seeds=(0,))
        self._batch = batch.to(target.device)
        self._states = self._states_of(self._batch)
        parts = getattr(self.objective, "parts", None)
        what, wanted = "parts() of the training objective", "a dict: part -> named parameters"
        parts = _expect(parts() if callable(parts) else None, dict, what, wanted)
        self._weights = {name: p for part in parts.values() for name, p in part if p.requires_grad}
        if not self._weights:
            raise UserError("parts() names no weight that is trained")
        self._unreached = {name for name in self._weights if not name.startswith(self.of_pictures)}
        self._optimizer = torch.optim.AdamW([*self._weights.values()], lr=3e-3, weight_decay=0.0)
        module.train()
        while len(self.losses) < self.steps and not (len(self.losses) > _ZEROS and self.known >= _KNOWN):
            self._step()
        self._check_sums()
        self.module = module.eval()
        first, last, count = self.losses[0], self.losses[-1], len(self._weights)
        return f"loss {first:.3g} to {last:.3g} in {len(self.losses)} steps, gradients at {count} weights"

    def _states_of(self, batch: Batch) -> Any:
        return self.target.states(batch, self.config.taps_for(self.target.shape, training=True))

    def _forward(self, batch: Batch, states: object) -> StepLoss:
        loss = _expect(self.objective(batch, states), StepLoss, "forward() of the training objective", "a StepLoss")
        for name in ("loss_sum", "num_tokens"):
            _expect(getattr(loss, name), Tensor, f"{name} of the StepLoss", "a tensor")
        return loss

    def _step(self) -> None:
        step, named = len(self.losses), self._weights.items()
        if step == _ZEROS:
            self.objective.eval()  # noise would be learned by heart, too: it is the same for a sample
        loss = self._forward(self._batch, self._states)
        mean = loss.loss_sum / loss.num_tokens
        if not mean.isfinite():
            raise UserError(f"the loss of step {step} is {float(mean)}")
        if not mean.requires_grad:
            raise UserError("the loss depends on no weight")
        self.losses.append(float(mean.detach()))
        self.known = float(loss.metrics["top1"] / loss.num_tokens) if "top1" in loss.metrics else 0.0
        self._optimizer.zero_grad()
        mean.backward()
        self._unreached -= {
            name for name, p in named if p.grad is not None and bool(p.grad.any()) and p.grad.isfinite().all()
        }
        if step + 1 == _ZEROS and self._unreached:
            some = ", ".join(sorted(self._unreached)[:3])
            raise UserError(f"no finite gradient reaches {len(self._unreached)} of {len(named)} weights: {some}")
        nn.utils.clip_grad_norm_([*self._weights.values()], 1.0)
        self._optimizer.step()

    def _check_sums(self) -> None:
        """Compare with a batch that holds the sample twice: it has twice its loss, tokens and metrics."""

        def both(name: str, value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.cat([value, value], dim=1 if name == "positions" else 0)
            return value * 2 if isinstance(value, tuple) else value

        self.objective.eval()
        batch = self._batch
        twice = replace(batch, **{f.name: both(f.name, vars(batch)[f.name]) for f in fields(batch)})
        with torch.no_grad():
            one, two = (self._forward(each, self._states_of(each)) for each in (batch, twice))
        supervised = int(batch.loss_mask.sum())
        if int(one.num_tokens) < supervised / 2:
            raise UserError(f"num_tokens is {int(one.num_tokens)} where {supervised} tokens are supervised: {_SUMS}")
        pairs = {"num_tokens": (one.num_tokens, two.num_tokens), "loss_sum": (one.loss_sum, two.loss_sum)}
        pairs |= {f"metric {name}": (value, two.metrics[name]) for name, value in one.metrics.items()}
        for name, (alone, together) in pairs.items():
            if abs(float(together) - 2 * float(alone)) > 0.01 * abs(float(alone)) + 1e-3:
                raise UserError(
                    f"{name} is {float(alone):.4g} of one sample and {float(together):.4g} of a batch that holds it "
                    f"twice, not {2 * float(alone):.4g}: {_SUMS}"
                )

    @functools.cached_property
    def plain(self) -> Generation:
        return self._decode(None, Chain(1), Warp())

    def _decode(self, drafter: Any, policy: Any, warp: Warp, draw: Any = "top-k") -> Generation:
        rule = RULES["greedy" if warp.greedy else "sampling"]
        decoding = Decoding(policy, rule, Draw(draw), warp, _ANSWER, ())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingTaken)  # `accept` looks at all cycles
            return generate(self.target, drafter, self.request, decoding, torch.Generator().manual_seed(0))

    def _drafter(self, module: Any = None) -> _Watched:
        proposal = self.config.drafter(module or cast(nn.Module, self.module), self.target)
        return _Watched(proposal, self.target.vocab_size)

    def q(self) -> str:
        """In a chain, a tree and above temperature 0, in each cycle; the same where the same is asked."""
        chain, tree, sampled = self._drafter(), self._drafter(), self._drafter()
        self._decode(chain, Chain(_LEVELS), Warp())
        drawn_q = [*chain.q]
        self._decode(chain, Chain(_LEVELS), Warp())
        if not _alike(drawn_q, chain.q[len(drawn_q) :]):
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
        deep = self._drafter()
        try:
            self._decode(deep, Chain(_DEEP), Warp())
        except Exception as error:
            problem = error.problem if isinstance(error, UserError) else self.raised(error)
            said = f"max_levels is {deep.max_levels}, but a chain of {_DEEP} cannot be drafted"
            raise UserError(f"{said}: {problem}") from error
        count = sum(len(watched.q) for watched in (chain, tree, sampled))
        reads = "; expand answers by level, whatever the tokens" if self.by_level else ""
        return f"{count} calls returned distributions over {self.target.vocab_size} tokens{reads}"

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
        """Learn on until drafts of every level are accepted."""
        if not self.losses:
            return "not formed: nothing is trained"
        assert self.module is not None
        while True:
            shares = self._accepted()
            least = [_ACCEPTED if level == 0 or self.by_level else _ACCEPTED_BELOW for level in range(len(shares))]
            if not (low := [level for level, share in enumerate(shares) if share < least[level]]):
                said = ", ".join(f"{share:.0%}" for share in shares)
                return f"of an answer that it was trained on, drafts of levels 1 to {len(shares)} are accepted: {said}"
            if len(self.losses) >= self.steps:
                break
            self.module.requires_grad_(True)
            for _ in range(min(_CHUNK, self.steps - len(self.losses))):
                self._step()
            self.module.eval()
        if self.known < _KNOWN:
            return f"not formed: top1 of the training metrics is not {_KNOWN:.0%} after the training on one answer"
        said = f"decoding has {shares[low[0]]:.0%} of the drafts of level {low[0] + 1} accepted"
        if low[0] == 0:
            reads = "the proposal reads other states, tokens or places than the loss"
            raise UserError(f"training guesses the next token of the answer, {said}: {reads}")
        raise UserError(
            f"training knows the answer, {said} where those before it are: expand reads other states or tokens than "
            "the loss, or the loss does not train this level (max_levels says how many it has)"
        )

    def _accepted(self) -> list[float]:
        """Level -> share of its drafts accepted where those before it are, in chains and a tree."""
        most = self._drafter().max_levels
        levels = _LEVELS if most is None else min(most, _MOST_LEVELS)
        cycles, shares = [], []
        for policy in (Chain(1), Chain(levels), Static(_TREE)):
            cycles += self._decode(self._drafter(), policy, Warp()).cycles
        for level in range(levels):
            tried = [c.num_accepted > level for c in cycles if c.num_drafted > level and c.num_accepted >= level]
            shares.append(sum(tried) / max(1, len(tried)))
        return shares


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(some, others, strict=True)
    )


def _expect(value: Any, kind: type, what: str, wanted: str) -> Any:
    """`value`, of a type that the protocol says."""
    if not isinstance(value, kind):
        other = "nothing (None)" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{what} returned {other}, expected {wanted}")
    return value
