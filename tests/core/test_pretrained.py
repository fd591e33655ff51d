"""Sizes in a model's config, before anything is made of them."""

import pytest
from draftsmith.core.json_types import value_at
from draftsmith.core.pretrained import check_config
from fails import fails_with


@pytest.mark.parametrize("place", [("hidden_size",), ("text_config", "num_hidden_layers"), ("parts", "1", "head_dim")])
def test_sizes_that_no_model_has_are_refused_at_any_depth(tmp_path, place):
    config = {"hidden_size": 64, "text_config": {"num_hidden_layers": 2}, "parts": [{}, {"head_dim": 16}]}
    check_config(config, tmp_path)
    value_at(config, *place[:-1])[place[-1]] = 10**9
    fails_with(rf"{'.'.join(place)} is 1,000,000,000, and models have up to", check_config, config, tmp_path)
