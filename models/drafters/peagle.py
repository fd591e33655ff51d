"""P-EAGLE: EAGLE-3's layer drafts several tokens in one pass (Hui et al. 2026, arXiv 2602.01469).

After the newest true entry stand K - 1 masked ones: a mask's embedding beside a trained state, `mask_hidden`, in place
of three true ones. Attention stays causal, so that entry i knows the true entries and the masks before it, and answers
for the token i places on. In training such masks stand after tokens of the answer that are drawn for each sample.
Departures: one layer, as EAGLE-3 has, and anchors drawn as DFlash's in place of dropping deeper places at a rate.
Letters: B rows, N true entries, A blocks of a row, M = K - 1 masks of a block, S trained places, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.batch import Batch, StepLoss
from ...core.errors import Refused
from ...core.json_types import JsonObject
from ...core.section import Section
from ...core.states import TargetStates, uploaded
from ..decoding.warp import Warp
from ..layer import LayerShape
from ..losses import Divergence
from ..targets.base import Target, TargetShape, TargetStep
from .base import PLAIN, CountTokens, Drafter, DraftingOptions, HeadObjective
from .dflash_proposal import Levels
from .dflash_settings import check_mask
from .dflash_training import Places, draw_blocks
from .eagle3 import Eagle3Config, Eagle3Head
from .head_module import StateHead
from .head_proposal import HeadProposal
from .head_training import HeadTraining


class PeagleLoss(Section):
    # Against the target's distribution at each place; ce: against the answer's own tokens.
    token_divergence: Literal["ce"] | Divergence = "soft_ce"
    # Weight of the token i places after the first one is decay ** i.
    decay: float = Field(0.8, gt=0, le=1)
    # Most blocks of a sample, drawn anew in each epoch; a shorter answer has one after each of its tokens.
    num_anchors: int = Field(256, ge=1)
    # Places whose vocabulary is projected at once.
    chunk: int = Field(512, ge=1)


class PeagleConfig(Eagle3Config):
    """An EAGLE-3 head that drafts in parallel."""

    kind: Literal["peagle"]  # type: ignore[assignment]
    # Tokens that a pass drafts, K.
    parallel_tokens: int = Field(8, ge=2, le=64)
    # The target's id whose embedding stands for a mask (vLLM's `pard_token`): one that no text has. Null: a vector that
    # is trained.
    mask_token_id: int | None = Field(None, ge=0)
    positions: Literal["compact", "flat"] = "flat"  # type: ignore[assignment]
    # What is trained for.
    loss: PeagleLoss = PeagleLoss()

    beside_states: ClassVar[frozenset[str]] = Eagle3Config.beside_states | {"parallel_tokens", "mask_token_id", "loss"}
    takes_objective: ClassVar[bool] = False
    least_supervised: ClassVar[int] = 2

    @model_validator(mode="after")
    def _window_of_a_block(self) -> PeagleConfig:
        if self.sliding_window is not None and self.sliding_window < self.parallel_tokens:
            raise ValueError(f"sliding_window is {self.sliding_window}, shorter than {self.parallel_tokens} places")
        return self

    def check_settings(self, draws_images: bool) -> None:
        super().check_settings(draws_images)
        for name in ("mtp_steps", "mtp_attention", "replace", "objective", "fc_norm", "norm_output"):
            if dict(self)[name] != type(self).model_fields[name].default:
                problem = "it is of heads that read their own outputs, and this one drafts in one pass"
                raise Refused(name, problem, "leave it out")

    def check(self, shape: TargetShape) -> None:
        super().check(shape)
        check_mask(self.mask_token_id, shape)

    def module(self, layer: LayerShape, draft_ids: Tensor | None) -> StateHead:
        ids = torch.arange(layer.vocab_size) if draft_ids is None else draft_ids
        return PeagleHead(layer, ids, learns_mask=self.mask_token_id is None, **self.options)

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> StateHead:
        """A trained mask's vector begins with the mean of the embedding."""
        head = cast(PeagleHead, super().build(target, count_tokens=count_tokens))
        if head.mask_embedding is not None:
            head.mask_embedding.data.copy_(target.embedding.float().mean(0))
        return head

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        return PeagleTraining(cast(PeagleHead, module), target, self)

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        return PeagleProposal(cast(PeagleHead, module), target, self)

    def written_settings(self) -> JsonObject:
        return super().written_settings() | {
            "parallel_tokens": self.parallel_tokens, "mask_token_id": self.mask_token_id
        }  # fmt: skip

    def exports(self, engine: str) -> list[str]:
        if engine not in ("vllm", "speculators"):
            return ["it has no layout for heads that draft in parallel (P-EAGLE) that was read here"]
        if self.mask_token_id is None:
            return ["its mask is a trained vector, and the engine embeds an id: drafter.mask_token_id"]
        return []


class PeagleHead(Eagle3Head):
    """EAGLE-3's head with the state of a mask, and its embedding where no id of the target stands for it."""

    model_type = "peagle"

    def __init__(self, shape: LayerShape, draft_ids: Tensor, *, learns_mask: bool, **options: bool):
        super().__init__(shape, draft_ids, **options)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, 3 * shape.hidden_size))
        self.mask_embedding = nn.Parameter(torch.zeros(shape.hidden_size)) if learns_mask else None

    def masks(self, rows: int, count: int, embedding: Tensor, mask_token_id: int | None) -> tuple[Tensor, Tensor]:
        """Embeddings and fused states [B,count,D] of masked entries; `embedding` [V,D] is the target's."""
        mask = torch.full((), mask_token_id or 0, device=embedding.device)
        embed = self.embed(mask, embedding) if self.mask_embedding is None else self.mask_embedding
        states = self.fuse(self.mask_hidden)
        return embed.to(self.dtype).expand(rows, count, -1), states.expand(rows, count, -1)


class PeagleTraining(HeadTraining):
    """One pass over all true entries, and after drawn ones over their masks."""

    metrics = ("top1", "top3", "accepted")

    def __init__(self, head: PeagleHead, target: Target, config: PeagleConfig):
        super().__init__(head, target, config)
        self.loss = config.loss
        self.lm = head.lm_head_of(target.scores, self.loss.chunk, target.embedding.dtype)
        values = torch.tensor([self.loss.decay**place for place in range(config.parallel_tokens)])
        self.place_weights = values / values.sum()

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        """Sums over blocks, each for as many supervised tokens as there are for each block of its row; metrics as of
        `DflashTraining`. A block's first place is the true entry itself.
        """
        config = cast(PeagleConfig, self.config)
        loss_mask, device, count = batch.on_host("loss_mask"), batch.ids.device, config.parallel_tokens
        drawn = draw_blocks(loss_mask, batch.seeds, self.loss.num_anchors, count)
        blocks = drawn.to(device)
        outputs = self.outputs(batch, states, blocks.anchors)  # [B,A,K,D]
        trained = torch.arange(count) < drawn.lengths[..., None]
        chosen = trained.nonzero().T.contiguous()
        row, block, place = uploaded(chosen, device)
        at = blocks.anchors[row, block] + place
        assert states.feature is not None
        weights = uploaded(self.place_weights, device)[place] * blocks.share[row]
        name = self.loss.token_divergence
        compare = Places(
            name, self.goal_scores, states.feature, drawn.sources(trained), batch.ids[row, at + 1], weights,
            first=chosen[2] == 0,
        )  # fmt: skip
        loss, _ = self.lm(self.head.hidden(outputs[row, block, place]), compare)
        sums = compare.hits(trained.shape, (row, block, place), blocks.share)
        return StepLoss(loss, batch.loss_mask[:, 1:].sum(), dict(zip(self.metrics, sums, strict=True)))

    def outputs(self, batch: Batch, states: TargetStates, anchors: Tensor) -> Tensor:
        """[B,A,K,D] of the true entry at each anchor [B,A] and the masks after it."""
        config, head = cast(PeagleConfig, self.config), cast(PeagleHead, self.head)
        filled, positions = self.fill(batch, states)
        layout, masks = filled.layout, config.parallel_tokens - 1
        rows, entries = layout.index.shape
        # The entry of an anchor pairs its token with the state before it; dropped pictures have moved it.
        entry = torch.zeros(rows, batch.ids.shape[1] + 1, dtype=torch.int64, device=anchors.device)
        places = torch.where(layout.real, layout.index + 1, batch.ids.shape[1])
        numbers = torch.arange(entries, device=anchors.device).expand(rows, -1)
        entry = entry.scatter(1, places, numbers).gather(1, anchors)  # [B,A]
        embeds, hidden = head.masks(rows, anchors.shape[1] * masks, self.embedding, config.mask_token_id)
        behind = torch.arange(1, masks + 1, device=anchors.device)
        of_masks = (positions.gather(1, entry)[..., None] + behind).flatten(1)
        visible = rollout_mask(layout.real, entry, masks, head.shape.sliding_window)
        made = head(
            torch.cat([filled.embeds, embeds], 1), torch.cat([filled.fused(head), hidden], 1),
            torch.cat([positions, of_masks], 1), visible,
        )  # fmt: skip
        first = made.gather(1, entry[..., None].expand(-1, -1, made.shape[-1]))
        return torch.cat([first[:, :, None], made[:, entries:].unflatten(1, (-1, masks))], dim=2)


def rollout_mask(real: Tensor, entry: Tensor, masks: int, window: int | None = None) -> Tensor:
    """What each entry sees, [B,L,L] bool with L = N + A * M: true entries (`real` [B,N]) those up to them, masked ones
    those up to the one that their block begins with (number `entry` [B,A]), and the masks of their block up to
    themselves; of true entries with a `window` so many before the entry itself, its own place counted.
    """
    rows, entries = real.shape
    index = torch.arange(entries, device=real.device)
    true = (index[:, None] >= index).expand(rows, -1, -1)
    before = (index <= entry[..., None]).repeat_interleave(masks, 1)  # [B,A*M,N]
    if window is not None:
        places = entry[..., None] + torch.arange(1, masks + 1, device=real.device)
        true = true & (index[:, None] - index < window)
        before = before & (places.flatten(1)[..., None] - index < window)
    number = torch.arange(entry.shape[1] * masks, device=real.device)
    of_block = (number[:, None] // masks == number // masks) & (number[:, None] >= number)
    upper = torch.cat([true, true.new_zeros(rows, entries, len(number))], -1)
    return torch.cat([upper, torch.cat([before, of_block.expand(rows, -1, -1)], -1)], 1)


class PeagleProposal(HeadProposal):
    """Drafts K tokens in one pass; `expand` answers by level."""

    head: PeagleHead
    config: PeagleConfig

    def __init__(self, head: PeagleHead, target: Target, config: PeagleConfig):
        super().__init__(head, target, config)
        self.max_levels, self.captures = config.parallel_tokens, False

    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Keep the prompt and its states; `begin` reads them. Masks are written after what is committed."""
        super().start(request, prefill, warp, capacity=capacity + self.config.parallel_tokens)

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Read what was committed and the masks after it; only the former stays. q [V] of the token after it."""
        head, masks, device = self.head, self.config.parallel_tokens - 1, self._states.device
        count, past, last = self._states.shape[1], self._cache.length, self._positions[:, -1:]
        embeds, hidden = head.masks(1, masks, self._embedding, self.config.mask_token_id)
        self._next = last + 1
        positions = torch.cat([self._positions, last + torch.arange(1, masks + 1, device=device)], dim=1)
        visible = self._mask_of(past, count + masks, device)  # a mask's own place counts in a window
        true = head.embed(self._tokens, self._embedding)
        outputs = head(
            torch.cat([true, embeds], 1), torch.cat([self._fused(self._states), hidden], 1),
            self._turned(positions), visible, self._cache,
        )  # fmt: skip
        self._cache.advance(count)
        scores = head.draft_scores(outputs[0, count - 1 :], self.target.scores, self._embedding.dtype)
        self._answers = Levels(scores, self._warp)
        return self._answers.root()

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        return self._answers.expand(parents, tokens)
