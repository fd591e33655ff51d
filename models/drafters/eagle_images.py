"""EAGLE over image codes: its head, files, loss and proposal (Li et al. 2024; LANTERN's weights and their layout).

The condition stands in front, rows come with and without it (guidance), and the loss can compare guided distributions
as well. Letters: R rows, B samples, N new positions, T positions, F nodes, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.batch import CodeBatch, StepLoss
from ...core.json_types import JsonMapping
from ...core.placement import without_storage
from ...core.section import Section
from ...core.states import Taps, TargetStates, at_places, places_of, uploaded
from ..attention import causal_among
from ..decoding.cache import Cache
from ..decoding.warp import Warp
from ..folders import write_folder
from ..layer import LayerShape
from ..losses import Divergence, divergence
from ..targets.base import Target, TargetStep, Verified
from .draft_vocabulary import BesideTarget
from .head_config import HeadConfig
from .head_draws import add_noise, row_uniforms
from .head_files import check_layer, head_state, stored_layer, take_weights, weights_file
from .head_module import FusedHead
from .head_proposal import Recursive
from .manifest import write_manifest


class EagleLoss(Section):
    """EAGLE's weights are the defaults; the papers of the visual track give none."""

    # SmoothL1 between predicted and true features.
    feature: float = Field(1.0, ge=0)
    # Between the two distributions that the LM head makes of them.
    token: float = Field(0.1, ge=0)
    token_divergence: Divergence = "soft_ce"
    # The same between guided distributions: every sample then runs with and without its condition, which doubles
    # the cost and takes the place of condition dropout.
    guided: float = Field(0.0, ge=0)
    guided_divergence: Divergence = "kl"
    # Width of the uniform noise on input features at 512 positions; shorter samples get more of it (EAGLE: 0.2).
    noise: float = Field(0.2, ge=0)
    # next: the predictions that give codes 1 to n - 1 of an image; decoding drafts these but for the last one, which
    # the target's own pass always gives. eagle: the published mask, which leaves out the first of them (code 1) and
    # has one after the end.
    mask: Literal["next", "eagle"] = "next"


class ImageEagleHead(FusedHead):
    """The head of an image generator: the same layer, with the target's embedding, frozen, inside.

    Some published heads were trained with other rows than the target's; they travel with the head.
    """

    def __init__(self, shape: LayerShape, *, fc_bias: bool = True):
        # Drawn first, as it always was: a seed gives the same layer.
        embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        super().__init__(shape, fc_bias=fc_bias)
        self.embed_tokens = embedding.requires_grad_(False)
        self.has_embedding = False

    def share_embedding(self, weight: Tensor) -> None:
        """Use the target's rows [V,D] as they are, without a copy."""
        self.embed_tokens.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def predict(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None = None
    ) -> Tensor:
        """Predicted features [R,N,D] of features [R,N,D] and the tokens [R,N] after them; the rest as of `forward`. A
        module call, as the engine needs it.
        """
        return self(self.embed_tokens(tokens), features, positions, mask, cache)


_EMBEDDING = "embed_tokens.weight"


def save_eagle(head: ImageEagleHead, folder: Path, manifest: JsonMapping, *, with_embedding: bool = False) -> None:
    """`model.safetensors`, `config.json` and our manifest; an embedding that is the target's stays out."""
    whole = with_embedding or head.has_embedding
    state = {name: value for name, value in head.state_dict().items() if whole or name != _EMBEDDING}
    values = {"model_type": "eagle", "fc_bias": head.fc.bias is not None, **head.shape.to_dict()}
    write_folder(folder, values, state)
    write_manifest(folder, manifest)


def load_eagle(folder: Path, embedding: Tensor, shape: LayerShape, config: HeadConfig) -> ImageEagleHead:
    """A trained head, ours or one that LANTERN published (pytorch_model.bin, read without running code); sizes that its
    folder names take the place of those in `shape`. One that was saved without an embedding takes the target's [V,D]; a
    published head keeps its own: some hold rows of the LM head there, and were trained with them. Raises `UserError`
    where a file is missing, or it was made for another target or otherwise than `config` says.
    """
    check_layer(folder, shape, generator=True)
    device = embedding.device
    state = head_state(folder, device)
    shape = stored_layer(config, folder, shape, state)
    with without_storage(device):
        head = ImageEagleHead(shape, fc_bias="fc.bias" in state)
    head.has_embedding = _EMBEDDING in state
    if not head.has_embedding:
        head.share_embedding(embedding)
        state[_EMBEDDING] = embedding
    take_weights(head, state, weights_file(folder), device)
    return head


class ImageEagleTraining(BesideTarget):
    """The training forward."""

    def __init__(self, head: ImageEagleHead, target: Target, config: EagleLoss):
        super().__init__(head, target)
        self.head: ImageEagleHead = head
        self.config = config

    def forward(self, batch: CodeBatch, states: TargetStates) -> StepLoss:
        """Sums over trained positions; metrics are sums as well: top-1 and top-3 hits of the target's best token."""
        if self.config.guided:
            return self._pairs(batch, states)
        predicted, true = self._predict(states, batch)
        places = places_of(self._trained(states, batch), predicted.device)
        terms, metrics = self._unguided(at_places(predicted, places), at_places(true, places))
        return StepLoss(terms, torch.full((), places.shape[1], device=terms.device), metrics)

    def _pairs(self, batch: CodeBatch, states: TargetStates) -> StepLoss:
        """Each sample with and without its condition; guided distributions of target and head are compared too."""
        assert states.unconditional is not None and states.ids is not None
        keep = self._trained(states, batch)
        places = places_of(keep, batch.codes.device)
        sides = [self._predict(side, batch, number) for number, side in enumerate((states, states.unconditional))]
        unguided = [self._unguided(at_places(ours, places), at_places(true, places)) for ours, true in sides]
        # Position t predicts the state that scores token t + 2 - (prompt length).
        prompt = states.ids.shape[1] - states.num_generated
        steps = (keep.nonzero()[:, 1] + 2 - prompt).tolist()
        with torch.no_grad():
            goal = self.target.guided(torch.stack([at_places(true, places) for _, true in sides]), steps)
        ours = self.target.guided(torch.stack([at_places(predicted, places) for predicted, _ in sides]), steps)
        guided = divergence(self.config.guided_divergence, goal, ours).sum()
        metrics = {name: (unguided[0][1][name] + unguided[1][1][name]) / 2 for name in unguided[0][1]}
        metrics |= {"guided_loss": guided.detach(), **_hits(goal, ours, "guided_")}
        loss = (unguided[0][0] + unguided[1][0]) / 2 + self.config.guided * guided
        return StepLoss(loss, torch.full((), places.shape[1], device=loss.device), metrics)

    def _trained(self, states: TargetStates, batch: CodeBatch) -> Tensor:
        """[B,T-1] bool on the CPU: which positions count."""
        assert states.ids is not None
        trained = trained_positions(states.ids.shape[1], states.num_generated, self.config.mask)
        return trained & batch.on_host("real")[:, None]

    def _predict(self, states: TargetStates, batch: CodeBatch, side: int = 0) -> tuple[Tensor, Tensor]:
        """Predicted and true features [B,T-1,D]; each side has noise of its own."""
        assert states.feature is not None and states.ids is not None
        assert states.mask is not None and states.positions is not None
        features, true = states.feature[:, :-1], states.feature[:, 1:]
        if self.training and self.config.noise:
            lengths = features.new_full((len(features),), states.ids.shape[1])
            if self.head.shape.mask_padding:
                lengths = states.mask.sum(1)
            uniforms = row_uniforms(features, states.padding, [seed + side for seed in batch.seeds])
            features = add_noise(features, uniforms, lengths, self.config.noise)
        mask, read = causal_mask(self.head, states.mask[:, :-1]), features.to(self.head.dtype)
        return self.head.predict(read, states.ids[:, 1:], states.positions[0, :, :-1], mask), true

    def _unguided(self, predicted: Tensor, true: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[P,D] each: EAGLE's two terms, summed over positions."""
        feature = F.smooth_l1_loss(predicted.float(), true.float(), reduction="none").mean(-1).sum()
        with torch.no_grad():
            goal = self.target.scores(true)
        ours = self.target.scores(predicted.to(true.dtype))
        token = divergence(self.config.token_divergence, goal, ours).sum()
        metrics = {"feature_loss": feature.detach(), "token_loss": token.detach(), **_hits(goal, ours, "")}
        return self.config.feature * feature + self.config.token * token, metrics


def causal_mask(head: ImageEagleHead, visible: Tensor) -> Tensor:
    """[N,N], or [B,N,N] where the head hides padding, for inputs that are no padding where `visible` [B,N]."""
    if head.shape.mask_padding:
        return causal_among(visible)
    return torch.ones(visible.shape[1], visible.shape[1], dtype=torch.bool, device=visible.device).tril()


def trained_positions(length: int, num_generated: int, mask: Literal["next", "eagle"]) -> Tensor:
    """[T-1] bool for a sequence of T = `length` places that ends with `num_generated` tokens. Position t predicts the
    feature of t + 1. The first prediction that decoding makes stands at the last prompt place, which reads the first
    generated token; EAGLE's unshifted mask begins one later and ends one later.
    """
    places = torch.arange(length - 1)
    first = length - num_generated
    if mask == "eagle":
        return places >= first
    return (places >= first - 1) & (places < length - 2)


def _hits(goal: Tensor, ours: Tensor, prefix: str) -> dict[str, Tensor]:
    best = goal.argmax(-1, keepdim=True)
    ranked = ours.topk(min(3, ours.shape[-1]), dim=-1).indices
    right = ranked == best
    return {f"{prefix}top1": right[:, 0].sum(), f"{prefix}top3": right.any(-1).sum()}


class ImageEagleProposal(Recursive):
    """Drafts with a head, row by row as the target is guided: `guided` is its LM head and guidance, [R,F,D], steps ->
    [F,V].
    """

    taps = Taps(feature=True)
    max_levels: int | None = None

    def __init__(self, head: ImageEagleHead, guided: Callable[[Tensor, Sequence[int]], Tensor]):
        self.head, self.guided = head.eval(), guided

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        prompt = prefill.prompt
        assert prompt is not None and prefill.feature is not None, "an image generator's prefill gives its prompt"
        self._warp, self._prompt = warp, prompt
        self._cache = self._new_cache(prompt.ids.shape[1] + capacity)
        # [R,L] of the whole cache
        self._visible = F.pad(prompt.mask, (0, self._cache.capacity - prompt.mask.shape[1]), value=True)
        self._states, self._positions = prefill.feature, prompt.positions
        self._emitted = 0

    def begin(self, first: int) -> None:
        """Every prompt position reads the token after it; the last one reads the first generated."""
        ids = self._prompt.ids
        self._tokens = torch.cat([ids[:, 1:], ids.new_full((len(ids), 1), first)], dim=1)
        self._emitted = 1

    def accept(self, verified: Verified) -> None:
        assert verified.step is not None and verified.step.feature is not None
        self._states = verified.step.feature
        tokens = uploaded(torch.tensor([*verified.tokens, verified.bonus]), self._states.device)
        self._tokens = tokens.expand(len(self._states), -1)
        self._positions = self._next + torch.arange(len(tokens), device=tokens.device)
        self._emitted += len(tokens)

    def _fused(self, states: Tensor) -> Tensor:
        return states

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, depths: Tensor) -> Tensor:
        if self.head.shape.mask_padding:
            places = self._cache.length + 1 if mask is None else mask.shape[-1]
            visible = self._visible[:, None, :places]
            mask = visible if mask is None else mask & visible  # [R,N,K]
            if not self._cache.length:
                # Padding of a prompt sees itself, so that no row of the attention is empty.
                mask = mask | torch.eye(places, dtype=torch.bool, device=mask.device)
        return self.head.predict(states.to(self.head.dtype), tokens, positions, mask, self._cache)

    def _probabilities(self, hidden: Tensor, steps: Sequence[int]) -> Tensor:
        return self._warp.apply_temperature(self.guided(hidden.to(self._states), steps))
