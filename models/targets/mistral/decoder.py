"""The cached forward over Mistral 3 and Pixtral: pictures read whole, everything else as LLaVA's.

Letters: P patches, D width, n visual tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....core.pictures import Picture
from ...decoding.decoder import CachedDecoder
from .model import see_whole


class MistralDecoder(CachedDecoder):
    """A Mistral 3 or a Pixtral in eval mode."""

    def see(self, pixels: Tensor, pictures: Sequence[Picture] = ()) -> Any:
        """[n,D] of patches [P,C]."""
        return see_whole(self.model, pixels, pictures)

    def _features(self, seen: Any, pictures: Sequence[Picture], pool: int) -> Tensor:
        assert pool == 1, "the patches of a picture that is read whole are merged as they are"
        return seen
