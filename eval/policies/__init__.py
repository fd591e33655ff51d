"""Tree policies: which nodes a cycle drafts. The loop knows none of them, and they know no drafter.

A recipe's tree is one section for each kind, each defined beside the policy that it builds, or a name.

    here              EAGLE               ADT-Tree     meaning
    total             total_tokens        N            nodes, with the root
    depth             depth               d            expansions; the tree has depth + 1 levels
    width             top_k               k            children of a node, and nodes in the beam
    gamma             -                   -            levels of a chain

Every section has `build(grid=..., seed=...)`: codes in a row of the image (null: no image), and the run's seed.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from ...core.errors import Refused, did_you_mean
from ...core.fields import shorthand
from ...core.import_paths import OrImported
from ...core.json_types import JsonObject
from .adt import Adt, AdtTree
from .base import Draw, DrawName, Expand, TreePolicy, TreeSection, check_combination
from .chain import Chain, ChainTree
from .dynamic import Dynamic, DynamicTree
from .product import Product, ProductTree
from .sage import Sage, SageTree
from .static import CHOICES, Static, StaticTree

__all__ = [
    "CHOICES", "Adt", "AdtTree", "Chain", "ChainTree", "Draw", "DrawName", "Dynamic", "DynamicTree", "Expand",
    "Product", "ProductTree", "Sage", "SageTree", "Static", "StaticTree", "TextTreeConfig", "TreeConfig", "TreePolicy",
    "TreeSection", "check_combination",
]  # fmt: skip

# Total with the root, levels, width, as Sparrow's tables name EAGLE-2's trees.
_SIZES = re.compile(r"(\d+)-(\d+)-(\d+)")


_NAMED: dict[str, JsonObject] = {
    "chain": {"kind": "chain", "gamma": 5},  # SpecVLM's two trees
    "static": {"kind": "static", "choices": "mc_sim_7b_63"},
    "sage": {"kind": "sage"},
    **{name: {"kind": "static", "choices": name} for name in CHOICES},
}


def _named_tree(value: str) -> JsonObject:
    """The section that a name stands for.

    "chain" has 5 tokens, "static" 25 nodes; "30-4-8" is EAGLE-2's tree of 30 nodes with the root on 4 levels, 8 wide;
    `sage` has SAGE's own settings; MODULE:CLASS is a section of another package; other names are the published static
    lists. Raises `ValueError` for any other name.
    """
    if ":" in value:  # of another package
        return {"kind": value}
    if value in _NAMED:
        return _NAMED[value]
    if sizes := _SIZES.fullmatch(value):
        total, levels, width = map(int, sizes.groups())
        if levels < 1:
            raise ValueError(f"{value!r} has no level (total with the root - levels - width)")
        return {"kind": "dynamic", "total": total, "depth": levels - 1, "width": width}
    nearest = did_you_mean(value, ["chain", "static", "30-4-8", "48-5-10", "25-5-8", "sage", *CHOICES])
    raise Refused("", "names no tree (chain, static, total-levels-width, sage or a published list)", nearest)


TreeConfig = Annotated[
    Annotated[ChainTree | StaticTree | DynamicTree | AdtTree | SageTree | ProductTree, Field(discriminator="kind")],
    OrImported(TreeSection),
    shorthand(str, _named_tree),
]
# Of text: ADT-Tree follows the rows of an image.
TextTreeConfig = Annotated[
    Annotated[ChainTree | StaticTree | DynamicTree | SageTree | ProductTree, Field(discriminator="kind")],
    OrImported(TreeSection),
    shorthand(str, _named_tree),
]
