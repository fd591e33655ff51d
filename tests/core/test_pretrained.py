"""Sizes in a model's config before anything is made of them, and folders that hold no model."""

import pytest
from draftsmith.core.json_types import value_at
from draftsmith.core.pretrained import check_config, check_pretrained
from fails import fails_with


@pytest.mark.parametrize("place", [("hidden_size",), ("text_config", "num_hidden_layers"), ("parts", "1", "head_dim")])
def test_sizes_that_no_model_has_are_refused_at_any_depth(tmp_path, place):
    config = {"hidden_size": 64, "text_config": {"num_hidden_layers": 2}, "parts": [{}, {"head_dim": 16}]}
    check_config(config, tmp_path)
    value_at(config, *place[:-1])[place[-1]] = 10**9
    fails_with(rf"{'.'.join(place)} is 1,000,000,000, and models have up to", check_config, config, tmp_path)


def test_an_adapter_is_named_with_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    assert "merge it into me/base" in fails_with("holds a PEFT adapter", check_pretrained, tmp_path).hint
