"""Published sets of conversations: rows whose `turns` are asked one after another, with the target's answers between.

Sources: MMSpec (arXiv 2603.14989) and its repository; SPEED-Bench (arXiv 2604.09557), its card on the Hub and NVIDIA's
specdec_bench. `turn_files.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .benchmark_sets import Medium

LABELS = ("category", "sub_category", "difficulty")  # what tables group by


@dataclass(frozen=True)
class TurnSet:
    """How a set names the parts of its rows.

    Args:
        repository: on the Hub; None: it is published as files alone.
        files: pattern of its files, JSON lines or parquet, in a folder as it is published.
        labels: of `LABELS` -> the column that has it.
        images: the folder, beside the file, of the pictures that `image` names; None: texts alone.
        placeholder: how a turn begins whose text its authors may not hand on.
        cure: how to get the set, or whole rows of it.
        size: what dry runs say of it.
    """

    medium: Medium
    files: str
    labels: Mapping[str, str]
    cure: str
    size: str
    id: str = "id"
    images: str | None = None
    repository: str | None = None
    config: str | None = None
    split: str = "test"
    placeholder: str | None = None


TURN_SETS: dict[str, TurnSet] = {
    "MMSpec": TurnSet(
        "image", "mmspec.jsonl", {"category": "topic", "sub_category": "category"}, images="images",
        cure="clone github.com/killthefullmoon/MMSpec, and give its folder dataset/MMSpec/test (or testmini) as path",
        size="600 conversations, 723 turns",
    ),
    "SPEED-Bench": TurnSet(
        "text", "*.parquet", {name: name for name in LABELS}, id="question_id",
        repository="nvidia/SPEED-Bench", config="qualitative", placeholder="FULL BENCHMARK DATA SHOULD BE FETCHED",
        cure="write whole rows with examples/specdec_bench/prepare_data.py of NVIDIA's Model-Optimizer (--dataset "
        "speed --config qualitative), and give the folder that it writes as path",
        size="880 conversations in the qualitative split",
    ),
}  # fmt: skip


def turn_set(called: str) -> str | None:
    """The name of the set of conversations that is called by it or by a Hub id; None: it is none of them."""
    known = {key.casefold(): name for name, about in TURN_SETS.items() for key in (name, about.repository or name)}
    return known.get(called.casefold())
