"""The tiers of the tests, and what keeps them quick: products of parameters in part, garbage collected seldom.

None is collected before the first test runs: looking for it takes a quarter of the time of the imports.
"""

import gc
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Tests of the extras, files or folders: further families, baseline drafters, formats of other tools, engines, the
# studies of papers, the synthetic dataset, the project's own tools and pages. Everything else is the core.
EXTRAS = (
    "docs", "papers", "pretend_cuda", "serving",
    "test_check_gpu.py", "test_goldens.py", "test_mutants.py", "test_mutate.py", "test_peers.py", "test_torture.py",
    "test_timing.py", "test_wheel.py",
    "data/captioned", "data/shapes", "data/families/test_gemma.py", "data/families/test_towers.py",
    "eval/engines", "eval/studies", "eval/test_combinations.py", "eval/test_cycle_operations.py",
    "eval/test_quality.py", "eval/test_specvlm.py",
    "eval/test_text_quality.py", "eval/test_tiled.py", "eval/test_block.py", "eval/test_block_targets.py",
    "models/test_assistant.py", "models/test_captioners.py", "models/test_dflash2_layouts.py", "models/test_exports.py",
    "models/test_formats.py", "models/test_gguf.py", "models/test_served_drafts.py",
    "models/test_imports.py", "models/test_speculators.py", "models/test_delta_rule.py", "models/test_tiled_drafts.py",
    "models/test_windows.py",
    "models/drafters/test_dflash.py", "models/drafters/test_dflash2.py", "models/drafters/test_dflash_confidence.py",
    "models/drafters/test_dflash_images.py", "models/drafters/test_dspark.py", "models/drafters/test_msd.py",
    "models/drafters/test_mtp.py", "models/drafters/test_peagle.py", "models/drafters/test_pruned.py",
    "models/drafters/test_vispec.py",
    "models/targets/test_gemma.py", "models/targets/test_hybrid.py", "models/targets/test_outside_section.py",
    "models/targets/test_towers.py",
    "recipes/test_fingerprints.py", "recipes/test_imports.py", "recipes/test_leaderboard.py",
    "recipes/test_over_seeds.py", "recipes/test_paper_settings.py", "recipes/test_paper_tables.py",
    "trainers/serve", "trainers/test_demo_ov.py", "trainers/test_distill_demo.py", "trainers/test_heads_stages.py",
    "trainers/test_judge.py", "trainers/test_outside_start.py", "trainers/test_recorded_ends.py",
    "trainers/test_suite_stage.py", "trainers/test_tower_stages.py", "trainers/test_weights_stage.py",
)  # fmt: skip


gc.disable()


def pytest_collection_finish():
    gc.freeze()  # what was imported and collected is none
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("core", "extras", "all"), default="all", help="which of the default tests")


def pytest_configure(config):
    if gone := [place for place in EXTRAS if not (HERE / place).exists()]:
        raise pytest.UsageError(f"tests/conftest.py lists as extras what is not there: {', '.join(gone)}")


def pytest_ignore_collect(collection_path, config):
    """Files of the other tier are not even imported."""
    tier = config.getoption("tier")
    if tier == "all" or collection_path.suffix != ".py":
        return None
    place = collection_path.relative_to(HERE)
    is_extra = any(str(part) in EXTRAS for part in (place, *place.parents))
    return True if is_extra == (tier == "core") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `covering`, whose parameters are a product, most combinations are slow: the sum of the places of
    a case's values is a multiple of the second longest list's length. Each value of each parameter stays, and so does
    each pair of values of the longest and of any but the second longest.
    """
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering"):
            products[item.nodeid.split("[")[0]].append(item)
    for cases in products.values():
        # A part of the id for each parametrisation. A case that is asked for by its own name is the only one: it runs.
        named = [case.callspec._idlist for case in cases]
        axes = [list(dict.fromkeys(names)) for names in zip(*named, strict=True)]
        second_longest = sorted(map(len, axes))[-2]
        for case, names in zip(cases, named, strict=True):
            if sum(axis.index(name) for axis, name in zip(axes, names, strict=True)) % second_longest:
                case.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_not_searched_for_garbage():
    """DeepSpeed collects garbage a score of times for each engine, and a third of a second long each time where it must
    look through all that transformers and torch have imported. Models that are garbage by now are collected first.
    """
    gc.collect()
    gc.freeze()
