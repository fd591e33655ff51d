"""EAGLE-1/2 heads for image generators: one layer that predicts the target's next feature (Li et al. 2024; LANTERN).

Position t reads the target's feature f_t beside the embedding of token x_{t+1}, embedding first, and predicts
f_{t+1}; the target's own LM head turns it into scores. No final norm stands between: features are already normed.
Letters: R rows, B samples, N new positions, T positions, F nodes, D width, V vocabulary, S slots.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ChameleonConfig

from ...core.errors import UserError
from ...core.loss import StepLoss
from ...core.nouns import CodeBatch
from ...core.section import Section
from ..decoding.cache import Cache
from ..decoding.warp import Warp
from ..llamagen.folders import check_shapes, shapes_of
from ..llamagen.transformer import LlamaGenConfig
from ..losses import Divergence, divergence
from ..targets.base import Taps, TargetSequence, TargetStep
from .layer import DecoderLayer, LayerShape, Rotary
from .noise import add_noise, row_uniforms
from .recursion import Recursive


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
    # has one behind the end.
    mask: Literal["next", "eagle"] = "next"


class EagleConfig(Section):
    """An EAGLE head; everything that is null mirrors the target."""

    kind: Literal["eagle"]
    # Directory or Hub id of a trained head (LANTERN's: jadohu/llamagen_drafter, ...), which a train stage starts from
    # unless it says `from: scratch`; null: a stage trains it from random weights.
    path: str | None = None
    revision: str | None = None
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    # LANTERN's heads for LlamaGen have 1e-6 where their target has 1e-5.
    norm_eps: float | None = Field(None, gt=0)
    loss: EagleLoss = EagleLoss()

    def provides(self) -> set[str]:
        """Things that need no stage."""
        return set() if self.path is None else {"drafter"}


class EagleHead(nn.Module):
    """The head. `embed_tokens` is the target's, frozen; parameter names are those of published checkpoints."""

    def __init__(self, shape: LayerShape, *, fc_bias: bool = True):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size).requires_grad_(False)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.rotary = Rotary(shape)
        # Some published heads were trained with other rows than the target's; they travel with the head.
        self.own_embedding = False

    def share_embedding(self, weight: Tensor) -> None:
        """Use the target's rows [V,D] as they are, without a copy."""
        self.embed_tokens.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Predicted features [R,N,D].

        Args:
            features: [R,N,D] of the positions.
            tokens: [R,N] the token after each position.
            positions: [R,N] or [N] int64 of the features.
            mask: [N,K] or [R,N,K] bool.
        """
        states = self.fc(torch.cat([self.embed_tokens(tokens), features], dim=-1))
        return self.layers[0](states, self.rotary(positions), mask, cache)


def eagle_shape(config: EagleConfig, target: LlamaGenConfig | ChameleonConfig) -> LayerShape:
    """The layer that mirrors `target`'s, as LANTERN's published heads do."""
    if isinstance(target, LlamaGenConfig):
        heads = config.num_heads or target.num_heads
        return LayerShape(
            vocab_size=target.vocab_size, hidden_size=target.dim, num_heads=heads, num_kv_heads=heads,
            intermediate_size=config.intermediate_size or target.hidden, norm_eps=config.norm_eps or 1e-6,
            rope="grid", rope_theta=target.rope_base, grid=target.grid,
            # Position p reads the token after it, whose cell turns it: one condition place fewer than the target has.
            zeros_before=target.num_slots - 1, mask_padding=False,
        )  # fmt: skip
    heads = config.num_heads or target.num_attention_heads
    return LayerShape(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_heads=heads, num_kv_heads=heads,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        norm_eps=config.norm_eps or target.rms_norm_eps, rope="half", rope_theta=_theta(target),
        input_norm=True, qk_norm=True,
    )  # fmt: skip


def _theta(target: ChameleonConfig) -> float:
    parameters = getattr(target, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(target, "rope_theta", 10000.0))


def save_eagle(head: EagleHead, folder: Path, manifest: dict[str, Any], *, with_embedding: bool = False) -> None:
    """`model.safetensors`, `config.json` and our manifest; an embedding that is the target's stays out."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = with_embedding or head.own_embedding
    state = {k: v.contiguous() for k, v in head.state_dict().items() if whole or k != _EMBEDDING}
    save_file(state, folder / "model.safetensors")
    settings = {"model_type": "eagle", "fc_bias": head.fc.bias is not None, **head.shape.to_dict()}
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    (folder / "draftsmith.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))


def load_eagle(folder: Path, embedding: Tensor, shape: LayerShape) -> EagleHead:
    """A trained head, ours or one that LANTERN published (pytorch_model.bin, read without running code).

    Args:
        embedding: the target's [V,D], for heads that were saved without one. A published head keeps its own: some
            hold rows of the LM head there, and were trained with them.
        shape: what this target's heads look like.

    Raises:
        UserError: a file is missing, or the head was made for another target.
    """
    _check_made_for(folder, shape)
    state = head_state(folder)
    head = EagleHead(shape, fc_bias="fc.bias" in state)
    own = _EMBEDDING in state
    if not own:
        head.share_embedding(embedding)
        state[_EMBEDDING] = embedding
    check_shapes(
        shapes_of(state), shapes_of(head.state_dict()), where=str(weights_file(folder)),
        what="the head does not fit this target: ", cure="name the target that the head was trained for",
    )  # fmt: skip
    head.own_embedding = own
    if own:
        head.load_state_dict(state)
    else:
        head.load_state_dict({k: v for k, v in state.items() if k != _EMBEDDING}, strict=False)
    return head.to(embedding.device)


def _check_made_for(folder: Path, shape: LayerShape) -> None:
    """Our heads say what they mirror, most of which is in no weight's shape. Published configs do not."""
    path = folder / "config.json"
    try:
        written = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"unreadable: {error}", where=str(path), cure="train or download it again") from error
    if "zeros_before" not in written:
        return
    different = shape.differs_from(written)
    if different is not None:
        name, found, expected = different
        raise UserError(
            f"the head does not fit this target: {name} is {found}, expected {expected}",
            where=str(path), cure="name the target and the settings that the head was trained with",
        )  # fmt: skip


def head_state(folder: Path) -> dict[str, Tensor]:
    """The weights in a head's folder. Raises `UserError` where there are none, or none that can be read safely."""
    path = weights_file(folder)
    try:
        if path.suffix == ".safetensors" and path.is_file():
            return load_file(path)
        if path.is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values()):
                return state
            raise UserError("pytorch_model.bin holds no named tensors", where=str(path), cure="give a head's folder")
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise UserError(f"unreadable weights: {error}", where=str(path), cure="train or download it again") from error
    raise UserError("no model.safetensors or pytorch_model.bin", where=str(folder), cure="give the folder of a head")


def weights_file(folder: Path) -> Path:
    """Ours, or of a published head that has only a pickle."""
    ours, older = folder / "model.safetensors", folder / "pytorch_model.bin"
    return older if older.is_file() and not ours.is_file() else ours


_EMBEDDING = "embed_tokens.weight"


class EagleTraining(nn.Module):
    """The training forward. The frozen target is no part of the module: neither optimizer nor checkpoint see it."""

    def __init__(self, head: EagleHead, target: Any, config: EagleLoss):
        super().__init__()
        self.head, self.config = head, config
        self.__dict__["target"] = target

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        return {"head": [(n, p) for n, p in self.head.named_parameters() if p.requires_grad]}

    def forward(self, batch: CodeBatch) -> StepLoss:
        """Sums over trained positions; metrics are sums as well: top-1 and top-3 hits of the target's best token."""
        if self.config.guided:
            return self._pairs(batch)
        sequence = self.target.sequence(batch, batch.uncond)
        predicted, true, keep = self._predict(sequence, batch)
        terms, metrics = self._unguided(predicted[keep], true[keep])
        return StepLoss(terms, keep.sum(), metrics)

    def _pairs(self, batch: CodeBatch) -> StepLoss:
        """Each sample with and without its condition; guided distributions of target and head are compared too."""
        sides = []
        for without in (False, True):
            sequence = self.target.sequence(batch, torch.full_like(batch.uncond, without))
            sides.append(self._predict(sequence, batch, side=int(without)))
        keep = sides[0][2]
        unguided = [self._unguided(predicted[keep], true[keep]) for predicted, true, _ in sides]
        # Position t predicts the state that scores token t + 2 - (prompt places).
        prompt = sequence.ids.shape[1] - sequence.num_generated
        steps = (keep.nonzero()[:, 1] + 2 - prompt).tolist()
        with torch.no_grad():
            goal = self.target.guided(torch.stack([true[keep] for _, true, _ in sides]), steps)
        ours = self.target.guided(torch.stack([predicted[keep] for predicted, _, _ in sides]), steps)
        guided = divergence(self.config.guided_divergence, goal, ours).sum()
        metrics = {name: (unguided[0][1][name] + unguided[1][1][name]) / 2 for name in unguided[0][1]}
        metrics |= {"guided_loss": guided.detach(), **_hits(goal, ours, "guided_")}
        loss = (unguided[0][0] + unguided[1][0]) / 2 + self.config.guided * guided
        return StepLoss(loss, keep.sum(), metrics)

    def _predict(self, sequence: TargetSequence, batch: CodeBatch, side: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Predicted and true features [B,T-1,D] and which positions count [B,T-1]; each side has noise of its own."""
        features, true = sequence.feature[:, :-1], sequence.feature[:, 1:]
        if self.training and self.config.noise:
            lengths = (
                sequence.mask.sum(1)
                if self.head.shape.mask_padding
                else features.new_full((len(features),), sequence.ids.shape[1])
            )
            uniforms = row_uniforms(features, sequence.padding, [seed + side for seed in batch.seeds])
            features = add_noise(features, uniforms, lengths, self.config.noise)
        length = features.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=features.device).tril()
        if self.head.shape.mask_padding:
            eye = torch.eye(length, dtype=torch.bool, device=features.device)
            mask = (mask & sequence.mask[:, None, :-1]) | eye
        dtype = self.head.fc.weight.dtype
        predicted = self.head(features.to(dtype), sequence.ids[:, 1:], sequence.positions[:, :-1], mask)
        keep = trained_positions(length + 1, sequence.num_generated, self.config.mask).to(features.device)
        return predicted, true, keep & batch.real[:, None]

    def _unguided(self, predicted: Tensor, true: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[P,D] each: EAGLE's two terms, summed over positions."""
        feature = F.smooth_l1_loss(predicted.float(), true.float(), reduction="none").mean(-1).sum()
        with torch.no_grad():
            goal = self.target.scores(true)
        ours = self.target.scores(predicted.to(true.dtype))
        token = divergence(self.config.token_divergence, goal, ours).sum()
        metrics = {"feature_loss": feature.detach(), "token_loss": token.detach(), **_hits(goal, ours, "")}
        return self.config.feature * feature + self.config.token * token, metrics


def trained_positions(length: int, num_generated: int, mask: Literal["next", "eagle"]) -> Tensor:
    """[T-1] bool for a sequence of T = `length` places that ends with `num_generated` tokens.

    Position t predicts the feature of t + 1. The first prediction that decoding makes stands at the last prompt
    place, which reads the first generated token; EAGLE's unshifted mask begins one later and ends one later.
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


class EagleProposal(Recursive):
    """Drafts with a head, row by row as the target is guided.

    Args:
        guided: [R,F,D], steps -> [F,V]: the target's LM head and its guidance.
    """

    taps = Taps(feature=True)
    max_levels: int | None = None

    def __init__(self, head: EagleHead, guided: Callable[[Tensor, Sequence[int]], Tensor]):
        self.head, self.guided = head.eval(), guided

    @torch.inference_mode()
    def start(self, request: Any, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        prompt = prefill.prompt
        assert prompt is not None and prefill.feature is not None, "an image generator's prefill gives its prompt"
        self._warp, self._prompt = warp, prompt
        self._cache = Cache(1, prompt.ids.shape[1] + capacity)
        self._features, self._positions = prefill.feature, prompt.positions
        self._emitted = 0

    def begin(self, first: int) -> None:
        """Every prompt position reads the token after it; the last one reads the first generated."""
        ids = self._prompt.ids
        self._tokens = torch.cat([ids[:, 1:], ids.new_full((len(ids), 1), first)], dim=1)
        self._emitted = 1

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Read the true features of what was committed; only they stay in the cache."""
        count, past = self._features.shape[1], self._cache.length
        mask = torch.ones(count, past + count, dtype=torch.bool, device=self._features.device).tril_(past)
        hidden = self._run(self._features, self._tokens, self._positions, mask, [0] * count)
        return self._stand(hidden, self._positions)

    def accept(self, verified: Any) -> None:
        """Features of the root and of the accepted path, each with the token after it."""
        self._features = verified.step.feature
        tokens = torch.tensor([*verified.tokens, verified.bonus], device=self._features.device)
        self._tokens = tokens.expand(len(self._features), -1)
        self._positions = self._next + torch.arange(len(tokens), device=tokens.device)
        self._emitted += len(tokens)

    def _run(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, depths: Sequence[int]) -> Tensor:
        if self.head.shape.mask_padding:
            seen = self._prompt.mask  # [R,T]
            rows = mask.expand(len(seen), *mask.shape).clone()
            rows[:, :, : seen.shape[1]] &= seen[:, None]
            # Padding sees itself, so that no row of the attention is empty.
            own = torch.arange(mask.shape[0], device=mask.device)
            rows[:, own, mask.shape[1] - mask.shape[0] + own] = True
            mask = rows
        return self.head(states.to(self.head.fc.weight.dtype), tokens, positions, mask, self._cache)

    def _heat(self, hidden: Tensor, steps: Sequence[int]) -> Tensor:
        return self._warp.heat(self.guided(hidden.to(self._features), steps))
