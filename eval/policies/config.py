"""The tree of a recipe: one section for each kind, each defined beside the policy that it builds, or a name.

    here              EAGLE               ADT-Tree     meaning
    total             total_tokens        N            nodes, with the root
    depth             depth               d            expansions; the tree has depth + 1 levels
    width             top_k               k            children of a node, and nodes in the beam
    gamma             -                   -            levels of a chain

Every section has `build(grid=..., seed=...)`: codes in a row of the image (null: no image), and the run's seed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...core.errors import did_you_mean
from .adt import AdtTree
from .chain import ChainTree
from .choices import CHOICES
from .dynamic import DynamicTree
from .sage import SageTree
from .static import StaticTree

# Total with the root, levels, width, as Sparrow's tables name EAGLE-2's trees.
_SIZES = re.compile(r"(\d+)-(\d+)-(\d+)")


def named_tree(given: Any) -> Any:
    """The section that a name stands for; a section, and the plain word chain, as they are.

    "30-4-8" is EAGLE-2's tree of 30 nodes with the root on 4 levels, 8 wide; `sage` has SAGE's own settings; other
    names are the published static lists. Raises `ValueError` for any other name.
    """
    if not isinstance(given, str) or given == "chain":
        return given
    if sizes := _SIZES.fullmatch(given):
        total, levels, width = map(int, sizes.groups())
        if levels < 1:
            raise ValueError(f"{given!r} has no level (total with the root - levels - width)")
        return {"kind": "dynamic", "total": total, "depth": levels - 1, "width": width}
    if given == "sage":
        return {"kind": "sage"}
    if given in CHOICES:
        return {"kind": "static", "choices": given}
    nearest = did_you_mean(given, ["chain", "30-4-8", "48-5-10", "25-5-8", "sage", *CHOICES])
    raise ValueError(f"names no tree (chain, total-levels-width, sage or a static list); {nearest}")


TreeConfig = Annotated[
    Annotated[ChainTree | StaticTree | DynamicTree | AdtTree | SageTree, Field(discriminator="kind")],
    BeforeValidator(named_tree),
]
# Of text: ADT-Tree follows an image's rows, which language has not. The plain word chain goes with a stage's gamma.
TextTreeConfig = Annotated[
    Literal["chain"] | Annotated[ChainTree | StaticTree | DynamicTree | SageTree, Field(discriminator="kind")],
    BeforeValidator(named_tree),
]
