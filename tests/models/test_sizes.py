"""Pinned configs of published models have the published sizes."""

import pytest
from draftsmith.models.hub import pinned_config, read_config
from draftsmith.models.targets.sizes import parameter_counts

# Parameters of the published weights by class and config, counted once, and the billions that their authors name.
PUBLISHED = {
    "llava-onevision-qwen2-7b-ov-hf": (8_030_807_584, 8.03),
    "llava-onevision-qwen2-72b-ov-hf": (73_181_570_592, 73.2),
    "qwen2-vl-7b-instruct": (8_291_375_616, 8.29),
    "qwen2.5-vl-7b-instruct": (8_292_166_656, 8.29),
    "qwen2.5-vl-72b-instruct": (73_410_777_344, 73.4),
    "qwen3-vl-8b-instruct": (8_767_123_696, 8.77),
    "qwen3-vl-235b-a22b-instruct": (235_670_022_896, 235.7),
    # 9.65 of them in the files, with a layer that predicts a second token, which transformers leaves out.
    "qwen3.5-9b": (9_409_813_744, 9.41),
    "internvl3-8b-hf": (7_944_373_760, 7.94),
    "mistral-small-3.1-24b-instruct-2503": (24_011_361_280, 24.0),
    # 7,996,156,490 in the files: 308,756,768 of the tower of sounds and its projector, 55,055,616 of layers' keys and
    # values that nothing reads, 42 scalars of layers.
    "gemma-4-e4b-it": (7_632_344_064, 7.63),
    "gemma-4-31b-it": (31_273_086_512, 31.3),  # 31,273,088,876 in the files, with 2,364 numbers that do not learn
    "pixtral-12b": (12_682_739_712, 12.7),  # "12B" and a tower of 400M
    "llama-3.1-8b-instruct": (8_030_261_248, 8.03),
    "llama-3.2-1b-instruct": (1_235_814_400, 1.24),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pinned_configs_have_the_published_sizes(name):
    assert pinned_config(name) is not None
    counts = parameter_counts(read_config(f"somebody/{name}", key="target.path", network=False))
    exactly, billions = PUBLISHED[name]
    assert sum(counts.values()) == exactly == pytest.approx(billions * 1e9, rel=4e-3)
