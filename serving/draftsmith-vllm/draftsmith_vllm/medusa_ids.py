"""A repair of vLLM 0.32: Medusa heads that score a part of the vocabulary.

`Medusa.load_weights` makes the file's `token_map` a parameter and leaves it out of the names that it returns, so that
the loader stops: weights were not initialized from checkpoint. Here the name is added. Can go when such heads load
without it (tests/eval/engines/test_plugin.py).
"""

import functools


def repair() -> None:
    """Wrap the method; what is wrapped already stays."""
    from vllm.model_executor.models.medusa import Medusa

    load = Medusa.load_weights
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def with_ids(self, weights):
        loaded = load(self, weights)
        return loaded if self.token_map is None else loaded | {"token_map"}

    Medusa.load_weights = with_ids
