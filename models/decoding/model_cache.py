"""The cache as transformers' models take it: its layers are theirs, too.

It stands apart because a recipe is read without transformers, and `cache.py` is all that reading needs.
"""

from __future__ import annotations

from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from .cache import Cache, CacheLayer


class SizedLayer:
    """The sizes that transformers reads of a layer: `length` (committed positions) and `capacity`."""

    length: int
    capacity: int

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that a mask covers for this number of queries, and their offset."""
        return self.length + int(query_length), 0

    def get_seq_length(self) -> int:
        """Committed positions."""
        return self.length

    def get_max_length(self) -> int:
        """Capacity."""
        return self.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5.20


class ModelCacheLayer(CacheLayer, SizedLayer, CacheLayerMixin):  # type: ignore[misc]
    """A layer that answers what transformers asks of one."""

    is_croppable = True

    def __init__(self, capacity: int):
        CacheLayerMixin.__init__(self)
        CacheLayer.__init__(self, capacity)


class ModelCache(Cache, TransformersCache):
    """The cache of a model of transformers."""

    layer_class = ModelCacheLayer

    def __init__(self, num_layers: int, capacity: int):
        Cache.__init__(self, num_layers, capacity)
        TransformersCache.__init__(self, layers=self.layers)
