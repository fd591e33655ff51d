"""A package outside of the checkout: the drafter of docs/adding-a-drafter.md, and a tree, a rule and a target."""

import re
import sys
from pathlib import Path

import heads_run

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-drafter.md").read_text()
_SECTION = re.compile(r"^## [1-4]\. .*?(?=^## )", re.M | re.S)
_OTHERS = """
from typing import ClassVar

from draftsmith.eval.policies import Chain
from draftsmith.eval.policies.base import TreeSection
from draftsmith.eval.rules import RULES, RuleSection
from draftsmith.models.targets.llava.section import LlavaTargetConfig


class Two(TreeSection):
    # Tokens.
    gamma: int = 2

    def build(self, *, grid=None, seed=0):
        return Chain(self.gamma)


class Same(RuleSection):
    is_exact: ClassVar[bool] = True

    def build(self, temperature):
        return RULES["sampling" if temperature else "greedy"]


class Mine(LlavaTargetConfig):
    kind: str
    base_kind: ClassVar[str] = "llava"


class Unsaid(LlavaTargetConfig):
    kind: str


class Words(LlavaTargetConfig):
    pass
"""


# The recipe of a whole run, in which all four are of this package.
KIND = "her_package.recurrent:RecurrentConfig"
_SHORT = {"max_new_tokens": 6, "benchmarks": {"seen": {"data": heads_run.DATA | {"path": "train", "max_samples": 2}}}}
RECIPE = {
    "target": heads_run.RECIPE["target"] | {"kind": "her_package.others:Mine"},
    "drafter": {"kind": KIND, "levels": 2},
    "stages": {
        "world": heads_run.RECIPE["stages"]["world"] | {"video_suite": 0},
        "target": heads_run.RECIPE["stages"]["target"],
        "head": {
            "kind": "train", "format": heads_run.FORMAT, "steps": 4, "log_every": 1, "checkpoints": {"every": 2},
            "data": heads_run.DATA | {"path": "train"}, **heads_run.STEPS,
        },
        "evaluate": {
            "kind": "evaluate", "format": heads_run.FORMAT, "temperatures": [0.0, 1.0], "warmup": 0, **_SHORT,
            "methods": {
                "hers": {"tree": {"kind": "her_package.others:Two", "gamma": 3}, "temperatures": [0.0]},
                "by her rule": {"tree": "4-2-2", "rule": {"kind": "her_package.others:Same"}},
            },
        },
        "publish": {"kind": "publish", "repo": "me/tiny-head", "upload": False},
    },
}  # fmt: skip


def write_package(folder: Path) -> Path:
    """Write the package into `folder`, whose name is the package's."""
    folder.mkdir(parents=True)
    blocks = [b for s in _SECTION.findall(PAGE) for b in re.findall(r"^```python run\n(.*?)^```", s, re.M | re.S)]
    code = "\n\n".join(block for block in blocks if "check_drafter" not in block)
    (folder / "__init__.py").write_text("")
    (folder / "recurrent.py").write_text(code)
    (folder / "others.py").write_text(_OTHERS)
    return folder


def forget(package: str) -> None:
    """As if nobody had imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
