"""`draftsmith.check_drafter`: whether a drafter keeps to its protocol, in a minute on a CPU, without data.

Greedy output is the target's whatever a drafter proposes, so a broken one is only slow. The check that finds most is
"by heart": a drafter that was trained on one answer until it knows it must also be accepted on it.
Letters: F nodes, V vocabulary.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ..core.batch import Batch, Request
from ..core.errors import UserError, first_line
from ..models.decoding.warp import Warp
from ..models.drafters.base import DrafterConfig, TargetIdentity
from ..models.targets.causal import CausalTarget
from .first_proposals import FirstProposals, NothingTaken
from .loop import Decoding, Generation, generate
from .policies import Chain, Draw, Static
from .rules import RULES

_PROMPT, _ANSWER, _LEVELS = 12, 32, 3  # tokens, tokens, tokens drafted in a cycle
_TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
# Shares of the answer's tokens: guessed in training where it is known by heart, and first drafts then accepted.
_KNOWN, _ACCEPTED = 0.95, 0.6
_ZEROS = 3  # steps after which a weight that starts behind a zero has a gradient


def check_drafter(
    config: DrafterConfig, target: Any = None, *, steps: int = 300, of_pictures: Sequence[str] = ()
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
        try:
            seen[name] = check()
        except UserError as error:
            faults[name] = error.problem
        except _NeedsEarlier:
            continue
        except Exception as error:  # the drafter's own code
            place = traceback.extract_tb(error.__traceback__)[-1]
            faults[name] = f"{type(error).__name__}: {first_line(error)} ({Path(place.filename).name}:{place.lineno})"
    if faults:
        lines = "".join(f"\n  {name}: {problem}" for name, problem in faults.items())
        raise UserError(f"{type(config).__name__} does not keep to the protocol of drafters:{lines}",
                        hint="models/drafters/base.py says what each call gets and returns")  # fmt: skip
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


class _NeedsEarlier(Exception):
    """What this check looks at was not made, which an earlier one has said."""


class _Watched:
    """A drafter that looks at each of its proposals, and keeps them."""

    def __init__(self, inner: Any, vocab_size: int):
        self.inner, self.roots, self.q = inner, list[Tensor](), list[Tensor]()
        self._looks = FirstProposals(inner, vocab_size)

    @property
    def taps(self) -> Any:
        return self.inner.taps

    @property
    def max_levels(self) -> int | None:
        return self.inner.max_levels  # type: ignore[no-any-return]

    def start(self, request: Any, prefill: Any, warp: Warp, *, capacity: int) -> None:
        self.inner.start(request, prefill, warp, capacity=capacity)

    def begin(self, first: int) -> None:
        self.inner.begin(first)

    def root(self) -> Tensor:
        q = self._seen("root", self.inner.root())
        self.roots.append(q.clone())
        return q

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        return self._seen("expand", self.inner.expand(parents, tokens), len(parents))

    def accept(self, verified: Any) -> None:
        self.inner.accept(verified)

    def _seen(self, call: str, q: Tensor, *rows: int) -> Tensor:
        self._looks.see(call, q, *rows)
        self._looks.settle()
        self.q.append(q.clone())
        return q


class _Checks:
    def __init__(self, config: DrafterConfig, target: Any, steps: int, of_pictures: tuple[str, ...]):
        self.config, self.target, self.steps, self.of_pictures = config, target, steps, of_pictures
        self.module: nn.Module | None = None
        self.knows = False
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

    def settings(self) -> str:
        self.config.check_settings(self.target.shape.draws_images)
        self.config.check(self.target.shape)
        return "fit the target"

    def training(self) -> str:
        """Trains on the target's own answer until it is known."""
        if self.config.trains_on != "states":
            self.module = self.config.load(None, self.target)
            return f"not formed: kind {self.config.kind} is not trained on the target's states"
        torch.manual_seed(0)
        module = self.config.build(self.target, count_tokens=lambda: torch.ones(self.target.vocab_size).long())
        module = module.to(self.target.device).train()
        objective = self.config.training_objective(module, self.target)
        batch = self._batch()
        states = self.target.states(batch, self.config.taps_for(self.target.shape, training=True))
        named = [(name, p) for part in objective.parts().values() for name, p in part if p.requires_grad]  # type: ignore[operator]
        if not named:
            raise UserError("parts() names no weight that is trained")
        optimizer = torch.optim.AdamW([p for _, p in named], lr=3e-3, weight_decay=0.0)
        unreached = {name for name, _ in named if not name.startswith(self.of_pictures)}
        losses, known = list[float](), 0.0
        for step in range(self.steps):
            if step == _ZEROS:
                objective.eval()  # noise would be learned by heart, too: it is the same for a sample
            loss = objective(batch, states)
            mean = loss.loss_sum / loss.num_tokens
            if not mean.isfinite():
                raise UserError(f"the loss of step {step} is {float(mean)}")
            if not mean.requires_grad:
                raise UserError("the loss depends on no weight")
            losses.append(float(mean.detach()))
            known = float(loss.metrics["top1"] / loss.num_tokens) if "top1" in loss.metrics else 0.0
            if step > _ZEROS and known >= _KNOWN:
                break
            optimizer.zero_grad()
            mean.backward()
            unreached -= {n for n, p in named if p.grad is not None and bool(p.grad.any()) and p.grad.isfinite().all()}
            if step + 1 == _ZEROS and unreached:
                some = ", ".join(sorted(unreached)[:3])
                raise UserError(f"no finite gradient reaches {len(unreached)} of {len(named)} weights: {some}")
            nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
            optimizer.step()
        self.module, self.knows = module.eval().requires_grad_(False), known >= _KNOWN
        return f"loss {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} steps, gradients at {len(named)} weights"

    def _batch(self) -> Batch:
        """The prompt and the target's own greedy answer, which is supervised."""
        ids = torch.cat([self.request.ids, torch.tensor(self.plain().tokens)])[None]
        mask, supervised = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        supervised[:, _PROMPT:] = True
        positions = torch.arange(ids.shape[1])[None, None]
        modality = torch.zeros_like(ids, dtype=torch.int8)
        batch = Batch(ids, mask, supervised, modality, positions, None, ("check",), seeds=(0,))
        return batch.to(self.target.device)

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
        if module is None:
            raise _NeedsEarlier
        return _Watched(self.config.drafter(module, self.target), self.target.vocab_size)

    def q(self) -> str:
        """In a chain, a tree and above temperature 0, in each cycle."""
        count = 0
        greedy, sampled = (Warp(), "top-k"), (Warp(1.0), "sample")
        for policy, (warp, draw) in ((Chain(_LEVELS), greedy), (Static(_TREE), greedy), (Chain(_LEVELS), sampled)):
            watched = self._drafter()
            self._decode(watched, policy, warp, draw)
            count += len(watched.q)
        return f"{count} calls returned distributions over {self.target.vocab_size} tokens"

    def accept(self) -> str:
        watched = self._drafter()
        self._decode(watched, Chain(_LEVELS), Warp(1.0), "sample")
        roots = watched.roots
        if len(roots) > 2 and all(torch.equal(root, roots[0]) for root in roots):
            raise UserError(f"{len(roots) - 1} accepted paths have not changed the proposal: accept takes nothing in")
        return f"changed the proposal over {len(roots)} cycles"

    def greedy(self) -> str:
        for policy in (Chain(_LEVELS), Static(_TREE)):
            if self._decode(self._drafter(), policy, Warp()).tokens != self.plain().tokens:
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
        if len(before.q) != len(after.q) or not all(map(torch.allclose, before.q, after.q)):
            raise UserError("what was saved and loaded proposes something else")
        return "saved and loaded, it proposes the same"

    def by_heart(self) -> str:
        if self.module is None:
            raise _NeedsEarlier
        if not self.knows:
            return f"not formed: top1 of the training metrics is not {_KNOWN:.0%} after the training on one answer"
        cycles = self._decode(self._drafter(), Chain(1), Warp()).cycles
        drafted = [cycle for cycle in cycles if cycle.num_drafted]
        share = sum(cycle.num_accepted for cycle in drafted) / max(1, len(drafted))
        if share < _ACCEPTED:
            raise UserError(
                f"training guesses the next token of the answer, decoding has {share:.0%} of the same drafts accepted: "
                "the proposal reads other states, tokens or places than the loss"
            )
        return f"{share:.0%} of first drafts are accepted of an answer that it was trained on"
