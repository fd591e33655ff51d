"""Visual tokens inside a target by layer, and their share of a draft's attention.

Why Sparrow's head reads the states of a middle layer and drafts without visual keys: measured on any target that the
decoding loop knows. Sources: Sparrow, figures 2, 3, 5 and 6, appendix D.
Letters: R rows, H heads, N queries, K keys, T prompt places, D width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...core.batch import Request
from ...core.pictures import TEXT
from ...models.decoding.tapped import unseen_from
from ...models.decoding.warp import Warp
from ...models.drafters.base import Drafter
from ...models.drafters.beside import eager
from ...models.targets.base import Taps
from ...models.targets.language import LanguageTarget
from ..loop import Decoding, embed_once, generate

Kind = Literal["instruction", "visual", "text"]
KINDS: tuple[Kind, ...] = ("instruction", "visual", "text")
THRESHOLD = 0.25  # of retention, below which Sparrow takes visual tokens to be fused into the text (appendix D)


def kinds_of(modality: Tensor) -> Tensor:
    """[T] places in `KINDS`: the instruction is the text after the last visual place, text what stands before it.

    The paper does not say where its instruction begins. A prompt without visual tokens is all instruction.
    """
    visual = (modality != TEXT).nonzero().flatten()
    kinds = torch.full_like(modality, KINDS.index("text"), dtype=torch.long)
    kinds[int(visual[-1]) + 1 if len(visual) else 0 :] = KINDS.index("instruction")
    kinds[visual] = KINDS.index("visual")
    return kinds


def attention_shares(weights: Tensor, kinds: Tensor) -> dict[Kind, Tensor]:
    """Sums of one query's attention over the keys of each kind (figure 2).

    Args:
        weights: [...,K] of the query, rows that sum to one.
        kinds: [K].
    """
    return {kind: weights[..., kinds == number].sum(-1) for number, kind in enumerate(KINDS)}


@torch.inference_mode()
def target_visual_attention(target: LanguageTarget, request: Request) -> Tensor:
    """[L,H] of the last prompt token's attention that visual tokens receive together (figure 3b)."""
    layers = tuple(range(target.decoder.num_layers))
    _, step = target.prefill(request, Taps(prefill_attention=layers, attention_queries="last"), capacity=1)
    assert step.prompt is not None and step.prompt.modality is not None
    visual = step.prompt.modality[0] != TEXT
    return torch.stack([step.attention[layer][0][:, visual].sum(-1) for layer in layers])


@torch.inference_mode()
def head_shares(target: LanguageTarget, head: Drafter, request: Request) -> dict[Kind, float]:
    """Where a hidden-state head looks from the first token after the prompt, which is text, as shares over kinds.

    It is observed while it drafts: it must attend through `scaled_dot_product_attention`.

    Raises:
        AssertionError: it holds neither all visual inputs nor none (a share of them, or vectors in their place).
    """
    _, step = target.prefill(request, head.taps, capacity=8)
    assert step.prompt is not None and step.prompt.modality is not None, "the target tells of its prompt"
    # An input for each token but the first; the last one's is the token that the target has just emitted.
    kinds = torch.cat([kinds_of(step.prompt.modality[0].cpu())[1:], torch.tensor([KINDS.index("instruction")])])
    with eager(head):
        head.start(request, step, Warp(0.0), capacity=8)
        head.begin(int(step.logits[-1].argmax()))
        with _Observer() as observer:
            head.root()
    weights = observer.calls[-1]
    held = weights.shape[-1]
    text = kinds[kinds != KINDS.index("visual")]
    assert held in (len(kinds), len(text)), f"{held} inputs, of {len(kinds)} with {len(text)} of text"
    shares = attention_shares(weights.mean((0, 1)), kinds if held == len(kinds) else text)
    return {kind: float(share) for kind, share in shares.items()}


class _Observer(TorchFunctionMode):
    """Notes the last query's attention weights [R,H,K] of every attention that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            self.calls.append(_last_weights(*args, **named))
        return func(*args, **named)


def _last_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """[R,H,K]; of a causal pass the last query sees all keys."""
    last = query[..., -1:, :].float()
    shared = key.float().repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = (last @ shared.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        row = attn_mask[..., -1:, :]
        scores = scores.masked_fill(~row, float("-inf")) if row.dtype == torch.bool else scores + row
    return scores.softmax(-1).squeeze(-2).cpu()


@dataclass(frozen=True)
class Question:
    """A request with a way to score its answer."""

    request: Request
    is_right: Callable[[list[int]], bool]  # of the generated ids


def says_letter(decode: Callable[[list[int]], str], letter: str) -> Callable[[list[int]], bool]:
    """Scores stock prompts: the first capital letter that stands alone is the right one ("B", "(B)", "B. a dog")."""

    def is_right(ids: list[int]) -> bool:
        words = "".join(c if c.isalnum() else " " for c in decode(ids)).split()
        return next((word for word in words if len(word) == 1 and word.isupper()), None) == letter

    return is_right


def importance(
    target: LanguageTarget, questions: Sequence[Question], layers: Sequence[int], decoding: Decoding
) -> dict[int, float]:
    """Layer -> share of right answers where visual tokens are unseen from that layer on (figures 3a and 5).

    The number of the target's layers stands for seeing all of them: what the others are compared with.

    Args:
        decoding: plain and greedy, as many tokens as an answer needs.
    """
    assert decoding.warp.greedy and questions, "answers are compared at temperature 0"
    right = dict.fromkeys(layers, 0)
    for question in questions:
        embedded = embed_once(target, question.request)  # one pass of the tower for all layers
        for layer in layers:
            with unseen_from(target.decoder, target.view(question.request).modality != TEXT, layer):
                answer = generate(target, None, question.request, decoding, embedded=embedded).tokens
            right[layer] += question.is_right(answer)
    return {layer: count / len(questions) for layer, count in right.items()}


@torch.inference_mode()
def retention(target: LanguageTarget, requests: Sequence[Request]) -> dict[str, list[float]]:
    """Mean cosine of states after each layer with the embeddings of the same places (figure 6).

    Returns:
        For `visual` and `text` a value for each layer from 0 (the embedding: one) on; means over all places of all
        requests. A kind of which there are no places is left out.
    """
    layers = tuple(range(target.decoder.num_layers + 1))
    sums = {"visual": torch.zeros(len(layers)), "text": torch.zeros(len(layers))}
    counts = dict.fromkeys(sums, 0)
    for request in requests:
        _, step = target.prefill(request, Taps(text_layers=layers), capacity=1)
        assert step.prompt is not None and step.prompt.modality is not None
        places = step.prompt.modality[0] != TEXT
        start = step.layers[0][0].float()
        cosines = torch.stack(
            [F.cosine_similarity(step.layers[i][0].float(), start, dim=-1) for i in layers]
        )  # [L+1,T]
        for kind, chosen in (("visual", places), ("text", ~places)):
            sums[kind] += cosines[:, chosen].sum(1).cpu()
            counts[kind] += int(chosen.sum())
    return {kind: (sums[kind] / count).tolist() for kind, count in counts.items() if count}


def fused_from(values: Sequence[float]) -> int | None:
    """The first layer from which on retention stays below `THRESHOLD`; None where it never does.

    The paper's reading of the curve; what m* should be, it takes from the middle of the layers instead.
    """
    layer = next((i for i in reversed(range(len(values))) if values[i] >= THRESHOLD), -1) + 1
    return layer if layer < len(values) else None
