"""Divergences between a target's and a draft's distributions, per position, and LM heads with a loss on top.

p is the target's, q the draft's probability; alpha = sum of min(p, q) is what speculative sampling accepts.
`ChunkedHead` and `FrozenHead` project a chunk of positions at a time and take each chunk's gradient in the forward:
what a step holds does not grow with the vocabulary, and the head is one module call for any number of supervised
positions, so that ranks make the same collectives under ZeRO-3.
Letters: S positions, C positions of a chunk, D width, V vocabulary, M further sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Divergence = Literal["soft_ce", "kl", "reverse_kl", "jsd", "tvd", "tvd_plus", "lk_alpha", "lk_hybrid"]

# Stands for the logarithm of 0 where differences of logarithms are taken: minus infinity would make them no number.
NEVER = -1e30

# Scores that a loss goes through at once: fresh memory costs a CPU more than what is written to it, and a GPU waits for
# many small calls.
AT_ONCE, AT_ONCE_ON_CPU = 1 << 23, 1 << 19


def divergence(
    name: Divergence, target_scores: Tensor, draft_scores: Tensor, *, beta: float = 0.5, eta: float = 3.0
) -> Tensor:
    """[S,V], [S,V] -> [S] float32 (float64 from float64). Ids that must not come have minus infinity in both.

    - soft_ce: -sum p log q (EAGLE's classification term).
    - kl: sum p log(p/q), forward. reverse_kl: sum q log(q/p).
    - jsd: beta KL(p|m) + (1 - beta) KL(q|m), m = beta p + (1 - beta) q.
    - tvd: half the sum of |p - q|, which is 1 - alpha.
    - tvd_plus: TVD++ (arXiv 2403.00858), see `_tvd_plus`.
    - lk_alpha: -log alpha. lk_hybrid: lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha), alpha without
      gradient (LK losses, arXiv 2602.23881).
    """
    if name in ("kl", "tvd") and not target_scores.requires_grad:
        return _OfScores.apply(draft_scores, target_scores, name)
    return divergence_of_logs(name, log_probs(target_scores), log_probs(draft_scores), beta=beta, eta=eta)


class _OfScores(torch.autograd.Function):
    """KL and TVD of scores, whose gradients by the draft's are known: a vocabulary is read fewer times."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target_scores: Tensor, name: str) -> Tensor:
        ctx.dtype = scores.dtype
        ctx.gradient = torch.empty_like(scores, dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32)
        values = []
        for target, draft, gradient in _rows(target_scores, scores, ctx.gradient):
            both = [one if one.dtype == torch.float64 else one.float() for one in (target, draft)]
            if name == "kl":
                log_p, log_q = (torch.log_softmax(one, dim=-1).clamp_(min=NEVER) for one in both)
                p = log_p.exp()
                values.append(log_p.sub_(log_q).mul_(p).sum(-1))
                gradient.copy_(log_q.exp_().sub_(p))
            else:
                p, q = (one.softmax(-1) for one in both)
                apart = p.sub_(q).neg_()
                values.append(0.5 * apart.abs().sum(-1))
                side = apart.sign_()
                gradient.copy_(side.sub_((q * side).sum(-1, keepdim=True)).mul_(q).mul_(0.5))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found, ctx.gradient = ctx.gradient, None
        return found.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None


def _rows(scores: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows at a time of scores [S,...,V], and the same ones of `others` [S,...]."""
    most = AT_ONCE_ON_CPU if scores.device.type == "cpu" else AT_ONCE
    rows = max(1, most // scores.shape[-1])
    return zip(*(one.split(rows) for one in (scores, *others)), strict=True)


def log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities [...,V] in at least float32; `NEVER` where a score is minus infinity."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.log_softmax(wide, dim=-1).clamp(min=NEVER)


def soft_cross_entropy(target_probs: Tensor, draft_scores: Tensor, never: Tensor) -> Tensor:
    """-sum p log q [S,W] of W drafts' scores [S,W,V] beside one target's p [S,V]: soft_ce, with less passed over.

    Args:
        never: [S,V] bool, ids that must not come, of which p is 0.
    """
    return _SoftCrossEntropy.apply(draft_scores, target_probs, never)


class _SoftCrossEntropy(torch.autograd.Function):
    """Its gradient, q - p, is made in place of log q: a step reads a vocabulary for each pass, and waits for memory."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, p: Tensor, never: Tensor) -> Tensor:
        wide = scores if scores.dtype == torch.float64 else scores.float()
        log_q = torch.log_softmax(wide.masked_fill(never.unsqueeze(1), -torch.inf), dim=-1).clamp_(min=NEVER)
        ctx.log_q, ctx.p = log_q, p
        return -torch.matmul(log_q, p.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        q, ctx.log_q = ctx.log_q.exp_(), None
        return q.sub_(ctx.p.unsqueeze(1)).mul_(gradient.unsqueeze(-1)), None, None


def cross_entropy_over(scores: Tensor, labels: Tensor) -> Tensor:
    """The bits of `F.cross_entropy(scores, labels, reduction="none")`, [S,V] and [S] -> [S]. Scores are overwritten, by
    log-probabilities and then by their gradient: it is the last that reads them.
    """
    return _CrossEntropy.apply(scores, labels)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> Tensor:
        # Autograd notices the writing where an operation before has kept the scores for its backward pass.
        ctx.log_q, ctx.labels = scores.detach(), labels[:, None]
        for (piece,) in _rows(ctx.log_q):
            piece.copy_(piece.log_softmax(-1))
        return -ctx.log_q.gather(1, ctx.labels)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_q, ctx.log_q = ctx.log_q, None
        for piece, labels, by_label in _rows(log_q, ctx.labels, -gradient[:, None]):
            of_log_q = torch.zeros_like(piece).scatter_(1, labels, by_label)
            piece.copy_(torch._log_softmax_backward_data(of_log_q, piece, -1, piece.dtype))
        return log_q, None


def divergence_of_logs(
    name: Divergence, log_p: Tensor, log_q: Tensor, *, beta: float = 0.5, eta: float = 3.0
) -> Tensor:
    """[S,N], [S,N] -> [S], over any N outcomes: a vocabulary, or a few tokens and the rest of it as one."""
    p = log_p.exp()
    if name == "soft_ce":
        return -(p * log_q).sum(-1)
    if name == "kl":
        return (p * (log_p - log_q)).sum(-1)
    q = log_q.exp()
    if name == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "jsd":
        log_m = torch.logaddexp(log_p + _log(beta), log_q + _log(1 - beta))
        return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)
    if name == "tvd":
        return 0.5 * (p - q).abs().sum(-1)
    if name == "tvd_plus":
        return _tvd_plus(p, q, log_q)
    # In logarithms: where the two hardly meet alpha underflows, and there its gradient is needed most.
    log_alpha = torch.minimum(log_p, log_q).logsumexp(-1)
    if name == "lk_alpha":
        return -log_alpha
    alpha = log_alpha.exp()
    weight = torch.exp(-eta * alpha.detach())
    return weight * (p * (log_p - log_q)).sum(-1) + (1 - weight) * (1 - alpha)


def list_mle(target_scores: Tensor, draft_scores: Tensor, top: int = 10) -> Tensor:
    """[S,V], [S,V] -> [S]: how unlikely the draft's scores make the order of the target's `top` likeliest tokens.

    Plackett-Luce over these tokens alone: -sum_i (s_i - log sum_{k>=i} exp s_k), s in the target's order (ViSpec).
    Tokens that must not come (minus infinity) take no part.
    """
    best = target_scores.topk(min(top, target_scores.shape[-1]), dim=-1)
    wide = draft_scores if draft_scores.dtype == torch.float64 else draft_scores.float()
    ours = wide.gather(-1, best.indices)
    never = best.values.isneginf() | ours.isneginf()
    ours = ours.masked_fill(never, NEVER)
    log_rest = ours.flip(-1).logcumsumexp(-1).flip(-1)
    return (log_rest - ours).masked_fill(never, 0).sum(-1)


def _tvd_plus(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    """TVD as a policy gradient with normalised rewards: its value is TVD's, its gradient that of TVD over sigma.

    grad TVD = -E_q[r(x) grad log q(x)] with r(x) = 1 where q(x) < p(x). TVD++ takes (r - mean) / sigma for r. Here the
    expectation is the exact sum over the vocabulary, with mean and sigma of r under q at each position: no chunk of
    positions depends on another, and where the two hardly meet the gradient shrinks with the root of alpha only.
    """
    with torch.no_grad():
        reward = (q < p).to(q)
        mean = (q * reward).sum(-1, keepdim=True)
        sigma = (mean * (1 - mean)).sqrt().clamp(min=1e-6)
        weight = q * (reward - mean) / sigma
        value = 0.5 * (p - q).abs().sum(-1)
    surrogate = -(weight * log_q).sum(-1)
    return value + surrogate - surrogate.detach()


def _log(share: float) -> float:
    return torch.tensor(share, dtype=torch.float64).log().item() if share > 0 else NEVER


# A piece of the positions and the scores [C,V] there -> a loss summed over them, and further sums [M].
Compare = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


class ChunkedHead(nn.Module):
    """The draft's LM head with the loss on top, a chunk of positions at a time.

    It shares the head's parameter and reads it in one module call for all chunks: ZeRO-3 gathers the weight for that
    call, and ranks with different numbers of supervised tokens still make the same collectives.

    Args:
        added: [V,N] weights of a further product that the scores take, of N numbers behind each state; None: none.
    """

    def __init__(self, head: nn.Linear, chunk: int, added: nn.Parameter | None = None):
        super().__init__()
        assert head.bias is None, "LM heads of the Llama family have no bias"
        self.weight: nn.Parameter = head.weight
        self.added: nn.Parameter | None = added
        self.chunk: int = chunk

    def forward(self, hidden: Tensor, compare: Compare) -> tuple[Tensor, Tensor]:
        """States [S,D+N] -> the loss summed over all positions, and the further sums."""
        weight = self.weight if self.added is None else torch.cat([self.weight, self.added], dim=1)
        return _Chunked.apply(hidden, weight, compare, self.chunk, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    """Takes each chunk's gradient in the forward: nothing of a chunk outlives it, and the head runs once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, compare: Compare, chunk: int, learns: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.d_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if learns else None
        learns_weight = learns and ctx.needs_input_grad[1]
        ctx.d_weight = None
        ctx.dtypes = hidden.dtype, weight.dtype
        loss, sums = torch.zeros((), dtype=wide, device=hidden.device), torch.zeros((), device=hidden.device)
        # A rank without supervised tokens runs one empty chunk, so that its sums have the right shape.
        for start in range(0, max(1, len(hidden)), chunk):
            piece = slice(start, start + chunk)
            scores = F.linear(hidden[piece], weight).to(wide).requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                value, counts = compare(piece, scores)
            loss, sums = loss + value.detach(), sums + counts
            if learns:
                gradient = torch.autograd.grad(value, scores)[0].to(hidden.dtype)
                ctx.d_hidden[piece] = gradient @ weight
                if learns_weight:
                    part = (gradient.T @ hidden[piece]).to(wide)
                    ctx.d_weight = part if ctx.d_weight is None else ctx.d_weight.add_(part)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.d_hidden, ctx.d_weight
        ctx.d_hidden = ctx.d_weight = None
        hidden_type, weight_type = ctx.dtypes
        d_hidden = hidden.mul_(d_loss).to(hidden_type)
        return d_hidden, None if weight is None else weight.mul_(d_loss).to(weight_type), None, None, None


class FrozenHead(nn.Module):
    """The target's LM head as `ChunkedHead` is a draft's: gradients flow to the states, and to `added`.

    Args:
        scores: [...,D] -> [...,V] float32.
        added: as of `ChunkedHead`.
    """

    def __init__(
        self, scores: Callable[[Tensor], Tensor], chunk: int, dtype: torch.dtype, added: nn.Parameter | None = None
    ):
        super().__init__()
        self.scores, self.chunk, self.dtype, self.added = scores, chunk, dtype, added

    def forward(self, hidden: Tensor, compare: Compare) -> tuple[Tensor, Tensor]:
        """States [S,D+N] -> the loss summed over them, and the further sums."""
        learns = torch.is_grad_enabled()
        return _Frozen.apply(hidden, self.added, self.scores, compare, self.chunk, self.dtype, learns)


class _Frozen(torch.autograd.Function):
    """Each piece's gradient is taken in the forward, so that no scores outlive their piece."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, added: Tensor | None, scores: Callable[[Tensor], Tensor], compare: Compare,
        chunk: int, dtype: torch.dtype, learns: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.gradient = torch.zeros_like(hidden) if learns else None
        ctx.d_added, width = None, hidden.shape[1]
        if added is not None:
            added, width = added.detach().requires_grad_(learns), width - added.shape[1]
        loss, sums = hidden.new_zeros((), dtype=wide), torch.zeros((), device=hidden.device)
        # Without positions one empty chunk runs, so that the sums have the right shape.
        for start in range(0, max(1, len(hidden)), chunk):
            piece = slice(start, min(start + chunk, len(hidden)))
            with torch.set_grad_enabled(learns):
                states = hidden[piece].detach().requires_grad_(learns)
                ours = scores(states[:, :width].to(dtype))
                if added is not None:
                    ours = ours + F.linear(states[:, width:], added).to(ours)
                value, counts = compare(piece, ours)
            loss, sums = loss + value.detach(), sums + counts
            if learns:
                found = torch.autograd.grad(value, [states] if added is None else [states, added])
                ctx.gradient[piece] = found[0]
                if added is not None:
                    part = found[1].to(wide)
                    ctx.d_added = part if ctx.d_added is None else ctx.d_added.add_(part)
        ctx.dtype = None if added is None else added.dtype
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        gradient, d_added = ctx.gradient, ctx.d_added
        ctx.gradient = ctx.d_added = None
        d_added = None if d_added is None else d_added.mul_(d_loss).to(ctx.dtype)
        return (gradient.to(d_loss) * d_loss).to(gradient), d_added, None, None, None, None, None
