"""The cached forward over Qwen-VL: pictures read whole, positions in three coordinates, visual states between layers.

Letters: R rows, T places, N new positions, P patches, D width, n visual tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ....core.pictures import Picture
from ....core.positions import Resume
from ....core.states import uploaded
from ...decoding.decoder import CachedDecoder, PromptRows
from ...hub import num_deepstack
from .model import added_behind, position_scheme, see_patches, use_places
from .windows import use_windows


class QwenDecoder(CachedDecoder):
    """A Qwen-VL in eval mode.

    Args:
        resume: where text goes on after a clip.
    """

    def __init__(self, model: nn.Module, *, num_token_ids: int, resume: Resume = "max_plus_one"):
        super().__init__(model, num_token_ids=num_token_ids)
        config = self.model.config
        use_windows(config.vision_config)
        use_places(self.model)
        self.scheme = position_scheme(config, resume)
        self.num_deepstack = num_deepstack(config)

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """`SeenPatches` of patches [P,C]."""
        return see_patches(self.model, pixels, pictures)

    def _features(self, seen: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        assert pool == 1, "Qwen-VL's mergers read patches as they are"
        return seen.features

    def _deepstack_of(self, seen: Any) -> tuple[Tensor, ...]:
        return () if seen is None else seen.deepstack

    def _deepstack(self, prompts: PromptRows, start: int, stop: int) -> Mapping[str, object]:
        if prompts.visual is None or not (here := prompts.visual[:, start:stop]).any():
            return {}
        number = (prompts.visual.flatten().cumsum(0) - 1).view_as(prompts.visual)[:, start:stop][here]
        chosen = uploaded(number, prompts.embeds.device)
        return added_behind([part.index_select(0, chosen) for part in prompts.deepstack], here)

    def coordinates(self, positions: Tensor) -> Tensor:
        """[3,R,N]: what stands after a prompt is text, and counts alike in all three."""
        return positions if positions.dim() == 3 else positions[None].expand(3, -1, -1)
