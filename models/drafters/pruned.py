"""SpecVLM: a smaller sibling of the target, or the target itself, drafts with most of the visual tokens removed.

Nothing is trained. Which visual tokens stay is decided by the target's own attention over the prompt: those that hold
the first 40% of it, then an even sample of the others. The target is untouched, so its output is.
Source: SpecVLM (Ji et al., EMNLP 2025), section 3; its reuse of the target's weights as Sparrow's appendix has it.
Letters: N visual tokens, T places, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ...core.batch import Request
from ...core.errors import UserError
from ...core.pictures import TEXT
from ...core.states import Taps
from ..decoding.decoder import PromptRows
from ..decoding.rows import Places
from ..decoding.tree import Expansions
from ..decoding.warp import Warp
from ..hub import config_value, recurrent_layers
from ..targets.base import Target, TargetShape, TargetStep
from ..targets.language import LanguageTarget
from ..targets.load import load_target, target_config
from ..targets.sizes import parameter_counts, parameter_lines
from ..targets.table import TargetConfig
from .base import PLAIN, Drafter, DrafterConfig, DraftingOptions, TargetIdentity, check_alike
from .independent import IndependentProposal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class PrunedConfig(DrafterConfig):
    """A drafter without training."""

    kind: Literal["pruned"]
    # All but the weights: several ratios of one sibling load it once.
    decoding_settings: ClassVar[frozenset[str]] = frozenset(
        {"ratio", "attention_share", "budget", "positions", "attention_layers"}
    )

    # The drafting model: a smaller model of the family (a section like the target's, with its path), or `target`: the
    # target's own weights with a separate cache, which agrees most and costs most.
    model: Literal["target"] | TargetConfig = "target"
    # Share of the visual tokens that is removed. SpecVLM and SAGE: 0.9 for clips; SAGE: 0.8 for images. 0 keeps all,
    # and then nothing of the target's attention is needed: plain drafting by a sibling.
    ratio: float = Field(0.9, ge=0, lt=1)
    # Part of the attention that the kept tokens must hold before the rest of the budget is spread evenly.
    attention_share: float = Field(0.4, gt=0, le=1)
    # How many tokens N (1 - ratio) is: rounded, or cut as the published code does, where floats lose one (40 tokens at
    # ratio 0.8 leave 7).
    budget: Literal["round", "truncate"] = "round"
    # Positions of the remaining tokens: compact counts them anew (SpecVLM), target keeps those of the target.
    positions: Literal["compact", "target"] = "compact"
    # Layers whose attention is averaged; null: all that attend.
    attention_layers: tuple[int, ...] | None = None

    @property
    def display_name(self) -> str:
        return self.model if self.model == "target" else str(self.model.path or self.model)

    def provides(self) -> set[str]:
        return {"drafter"}

    def taps_for(self, shape: TargetShape, *, training: bool) -> Taps:
        recurs = recurrent_layers(shape.text) or (False,) * shape.num_layers
        layers = self.attention_layers or tuple(n for n, recurring in enumerate(recurs) if not recurring)
        return Taps(prefill_attention=layers if self.ratio else (), attention_queries="suffix")

    def _loaded(
        self, folder: Path | None, target: Target, dtype: torch.dtype | None, identity: TargetIdentity | None
    ) -> Any:
        """The drafting model, which several proposals may share: the target itself, or its sibling."""
        assert isinstance(target, LanguageTarget)
        if self.model == "target":
            return target
        if self.model.path is None:
            raise UserError("the sibling has no path", key="drafter.model.path", hint="name its weights")
        sibling = load_target(
            self.model, self.model.path, num_token_ids=target.decoder.num_token_ids,
            image_token_id=next(iter(target.decoder.never), None), device=target.device, key="drafter.model",
        )  # fmt: skip
        check_sibling(sibling, target)
        return sibling

    def drafter(self, module: Any, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        assert isinstance(target, LanguageTarget)
        return PrunedProposal(module, target, self)

    def count(self, shape: TargetShape) -> dict[str, int]:
        if self.model == "target":
            return {}
        return parameter_counts(target_config(self.model, None, network=False))

    def lines(self, shape: TargetShape, config: PreTrainedConfig) -> list[str]:
        left = f"{1 - self.ratio:.0%} of the visual tokens kept" if self.ratio else "every visual token kept"
        if self.model == "target":
            return [f"  the target's own weights, with a cache of its own; {left}; nothing is trained"]
        return [*parameter_lines(target_config(self.model, None, network=False)), f"  {left}; nothing is trained"]

    def num_kept(self, visual: int) -> int:
        """The budget for this number of visual tokens."""
        left = visual * (1 - self.ratio)
        return round(left) if self.budget == "round" else int(left)


def visual_scores(attention: Mapping[int, Tensor], modality: Tensor) -> Tensor:
    """[N] float32 on the CPU: how much the text after the last visual token looks at each of them, the mean of
    `attention` (layer -> [1,heads,T], a mean over the queries of that text) over layers and heads.
    """
    visual = (modality != TEXT).nonzero().flatten().cpu()
    suffix = len(modality) - 1 - int(visual[-1])
    if suffix < 1 or not attention:
        raise UserError(
            "the prompt has no text after its last picture, and that text's attention is what decides",
            hint="put the question after the picture, or set drafter.ratio: 0",
        )
    total = torch.zeros(len(visual))
    for weights in attention.values():
        total += weights[0].mean(0).cpu()[visual]
    return total / len(attention)


def keep_visual(scores: Tensor, budget: int, *, share: float = 0.4) -> Tensor:
    """Which of N visual tokens stay, `budget` indices, ascending: first the smallest set that holds `share` of all the
    attention, at most the budget; then as many of the others as are left, at even distances.
    """
    if budget <= 0:
        return torch.empty(0, dtype=torch.int64)
    ranked = scores.double().sort(descending=True, stable=True)
    held = ranked.values.cumsum(0)
    enough = int((held < share * held[-1]).sum()) + 1
    first = ranked.indices[: min(enough, budget)]
    is_left = torch.ones(len(scores), dtype=torch.bool)
    is_left[first] = False
    left, count = is_left.nonzero().flatten(), budget - len(first)
    # Whole numbers: the even places of `count` among len(left), both ends included.
    even = [place * (len(left) - 1) // max(1, count - 1) for place in range(count)]
    return torch.cat([first, left[even]]).sort().values


def pruned_prompt(prompts: PromptRows, places: Tensor, *, positions: Literal["compact", "target"]) -> PromptRows:
    """The prompt of one row at `places` alone."""
    at, places = places.cpu(), places.to(prompts.embeds.device)
    placed, next_position = prompts.positions[:, :, places], prompts.next_position
    if positions == "compact":
        placed = torch.arange(len(places), device=places.device).expand_as(placed)
        next_position = torch.full_like(next_position, len(places))
    visual, deepstack = prompts.visual, prompts.deepstack
    if visual is not None:
        number = (visual[0].cumsum(0) - 1)[at][visual[0, at]].to(places.device)
        visual, deepstack = visual[:, at], tuple(part[number] for part in deepstack)
    blocks = None if prompts.blocks is None else prompts.blocks[:, places]
    return PromptRows(prompts.embeds[:, places], placed, next_position, None, visual, deepstack, blocks=blocks)


class PrunedProposal(IndependentProposal):
    """Proposes after the pruned prompt with `reader`: the sibling, or the target itself, whose weights are then shared
    and whose cache is not.
    """

    def __init__(self, reader: LanguageTarget, target: LanguageTarget, config: PrunedConfig):
        super().__init__(reader.decoder, "M", newline_id=0)  # no mode but M, which no newline stands in for
        self.reader, self.config, self.vocab_size = reader, config, target.vocab_size
        self._is_target = reader is target
        self.taps = config.taps_for(target.shape, training=False)
        self.num_visual = self.num_kept = 0  # of the prompt
        self.pruning_s = 0.0  # of it, for a breakdown of the time

    @torch.inference_mode()
    def start(self, request: Request, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Prune the prompt and run it; set `num_visual` and `num_kept` (tokens) and `pruning_s` (seconds)."""
        self._warp = warp
        request = self.reader.view(request).to(self.decoder.device)
        began = time.perf_counter()
        places = self._remaining(request, prefill)
        self.pruning_s = time.perf_counter() - began
        if self._is_target:
            assert prefill.received is not None, "a language model's prefill"
            prompts = prefill.received
        else:
            ids, modality = request.ids[None], request.modality[None]
            prompts = self.decoder.prompts(ids, modality, request.pixels, request.pictures)
        if len(places) < len(request.ids):
            prompts = pruned_prompt(prompts, places, positions=self.config.positions)
        length = prompts.embeds.shape[1]
        self._cache = self.decoder.new_cache(length + capacity)
        self.decoder.run(prompts, self._cache, chunk=self.reader.prefill_chunk)
        self._places = Places((length,), length + capacity, self.decoder.device, [prompts.rope_delta])
        self._expansions = Expansions()

    def _remaining(self, request: Request, prefill: TargetStep) -> Tensor:
        """Places of the prompt that stay: all text, and the chosen visual tokens."""
        visual = (request.modality != TEXT).nonzero().flatten().cpu()
        self.num_visual, self.num_kept = len(visual), self.config.num_kept(len(visual))
        if self.num_kept == self.num_visual:
            return torch.arange(len(request.ids))
        for weights in prefill.attention.values():
            if weights.shape[-1] != len(request.ids):
                raise UserError(
                    f"the drafter reads the prompt in {len(request.ids)} places, the target in {weights.shape[-1]}",
                    where=request.name,
                    hint="use a sibling of the target's family, cut as the target is (anyres)",
                )
        scores = visual_scores(prefill.attention, request.modality)
        stays = (request.modality == TEXT).cpu()
        stays[visual[keep_visual(scores, self.num_kept, share=self.config.attention_share)]] = True
        return stays.nonzero().flatten()

    def last_position(self, request: Request, max_new_tokens: int) -> int:
        """Count only the kept visual tokens under `positions: compact`, all of them under `target`."""
        visual = int((request.modality != TEXT).sum())
        if self.config.positions == "target":
            return len(request.ids) + max_new_tokens
        return len(request.ids) - visual + self.config.num_kept(visual) + max_new_tokens

    def _q(self, feature: Tensor) -> Tensor:
        """[R,N,D] -> [N,V]. Siblings may differ in rows of the vocabulary that have no token."""
        q = super()._q(feature)[:, : self.vocab_size]
        return F.pad(q, (0, self.vocab_size - q.shape[-1]))


# Of transformers' vision configs: what decides how many tokens a picture has.
_SIZES = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size")


def check_sibling(sibling: LanguageTarget, target: LanguageTarget) -> None:
    """Raises `UserError` if the two models do not have the same tokens of a prompt."""
    ours, theirs = sibling.decoder.model.config, target.decoder.model.config
    our_vision, their_vision = (config_value(config, "vision_config") for config in (ours, theirs))
    pairs = {
        f"vision tower's {name}": (config_value(our_vision, name), config_value(their_vision, name)) for name in _SIZES
    }
    image_token = lambda config: config_value(config, "image_token_id", config_value(config, "image_token_index"))  # noqa: E731
    pairs["image token"] = image_token(ours), image_token(theirs)
    check_alike(pairs, key="drafter.model", hint="use a smaller model of the target's own family")
