"""Pinned configs of published models have the published sizes."""

import pytest
from draftsmith.models.hub import pinned_config, read_config
from draftsmith.models.sizes import parameter_counts

# Billions as published, and millions of the tower where the model's authors count them.
PUBLISHED = {
    "llava-onevision-qwen2-7b-ov-hf": (8.03, 397.75),
    "llava-onevision-qwen2-72b-ov-hf": (73.2, 397.75),
    "qwen2-vl-7b-instruct": (8.29, 675.76),
    "qwen2.5-vl-7b-instruct": (8.29, 676.55),
    "qwen2.5-vl-72b-instruct": (73.4, 704.57),
    "qwen3-vl-8b-instruct": (8.77, 576.39),
    "qwen3-vl-235b-a22b-instruct": (235.7, 576.39),
    "llama-3.1-8b-instruct": (8.03, 0.0),
    "llama-3.2-1b-instruct": (1.24, 0.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pinned_configs_have_the_published_sizes(name):
    assert pinned_config(name) is not None
    counts = parameter_counts(read_config(f"somebody/{name}", key="target.path", network=False))
    billions, _ = PUBLISHED[name]
    assert sum(counts.values()) / 1e9 == pytest.approx(billions, rel=4e-3)
