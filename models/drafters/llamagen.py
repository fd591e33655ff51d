"""A smaller image generator of the same family drafts for a larger one: LlamaGen-L for LlamaGen-3B (LANTERN, Fig. 2a).

It reads the same condition, guides its own two rows, and needs nothing of the target's states.
Letters: F nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.batch import ImageRequest
from ...core.fields import Place, Revision
from ...core.states import Taps
from ..decoding.rows import Guidance, GuidanceScale
from ..decoding.tree import Expansions, accepted_expansions
from ..decoding.warp import Warp
from ..targets.base import Target, TargetShape, TargetStep, Verified
from ..targets.llamagen.files import load_llamagen
from ..targets.llamagen.target import LlamaGenTarget
from ..targets.llamagen.transformer import LlamaGen, LlamaGenConfig, published
from .base import PLAIN, Drafter, DrafterConfig, DraftingOptions, TargetIdentity, check_alike


class SiblingConfig(DrafterConfig):
    """Published weights of a smaller LlamaGen; nothing is trained."""

    kind: Literal["llamagen"]
    # Hub id or directory of the smaller model's weights.
    path: Place
    revision: Revision | None = None
    # Which of the published sizes the weights have.
    size: Literal["B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B"]
    # Guidance of its own; null: the target's.
    cfg_scale: GuidanceScale | None = None

    decoding_settings: ClassVar[frozenset[str]] = frozenset({"cfg_scale"})
    for_language: ClassVar[bool] = False
    for_images: ClassVar[bool] = True

    @property
    def display_name(self) -> str:
        return self.path

    def provides(self) -> set[str]:
        return {"drafter"}

    def _loaded(
        self, folder: Path | None, target: Target, dtype: torch.dtype | None, identity: TargetIdentity | None
    ) -> LlamaGen:
        """The weights at `path`. Raises `UserError` for a model of another condition, size or tokenizer of images."""
        assert isinstance(target, LlamaGenTarget), "see check_sibling"
        dtype = dtype or target.embedding.dtype
        model = load_llamagen(self.path, revision=self.revision, dtype=dtype, device=target.device)
        check_sibling(target.config, model.config)
        return model

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        """Guide by `cfg_scale` in the target's interval; null: by the target's scale."""
        assert isinstance(target, LlamaGenTarget) and isinstance(module, LlamaGen)
        guidance = target.guidance
        if self.cfg_scale is not None:
            guidance = Guidance(self.cfg_scale, guidance.interval)
        return SiblingProposal(LlamaGenTarget(module, guidance))

    def count(self, shape: TargetShape) -> dict[str, int]:
        with torch.device("meta"):
            model = LlamaGen(published(self.size, grid=shape.grid, condition=shape.condition))  # type: ignore[arg-type]
        return {"transformer": sum(p.numel() for p in model.parameters())}


class SiblingProposal:
    """Proposes with another LlamaGen through its own cache."""

    taps = Taps()
    max_levels: int | None = None

    def __init__(self, model: LlamaGenTarget):
        self.model = model

    def start(self, request: ImageRequest, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        self._warp = warp
        self._session, _ = self.model.prefill(request, Taps(), capacity=capacity)

    def begin(self, first: int) -> None:
        self._pending = [first]

    @torch.inference_mode()
    def root(self) -> Tensor:
        count = len(self._pending)
        tokens = torch.tensor(self._pending, device=self.model.device)
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        logits = self.model.extend(self._session, tokens, range(count), mask)
        self._session.cache.advance(count)
        self._expansions = Expansions()
        return self._warp.apply_temperature(logits[-1])

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Run tokens [F] after the committed ones, each after its ancestors alone."""
        first = len(self._expansions)
        depths = self._expansions.take(parents)
        offsets = [depth - 1 for depth in depths]  # places after the cache's end
        return self._warp.apply_temperature(
            self.model.extend(self._session, tokens, offsets, self._expansions.ancestors(first))
        )

    def accept(self, verified: Verified) -> None:
        accepted = accepted_expansions(verified)
        self._session.cache.commit(accepted)
        self._pending = [*verified.tokens[len(accepted) :], verified.bonus]


def check_sibling(target: LlamaGenConfig, sibling: LlamaGenConfig) -> None:
    """Raises `UserError` where the two do not draw the same codes on the same condition."""
    names = ("vocab_size", "grid", "condition", "num_condition_tokens")
    pairs = {name: (getattr(sibling, name), getattr(target, name)) for name in names}
    hint = "use a smaller model of the same condition, image size and image tokenizer"
    check_alike(pairs, key="drafter", hint=hint)
