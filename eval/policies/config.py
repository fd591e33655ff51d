"""The tree of a recipe: one section for each kind, each defined beside the policy that it builds.

    here              EAGLE               ADT-Tree     meaning
    total             total_tokens        N            nodes, with the root
    depth             depth               d            expansions; the tree has depth + 1 levels
    width             top_k               k            children of a node, and nodes in the beam
    gamma             -                   -            levels of a chain

Every section has `build(grid=..., seed=...)`: codes in a row of the image (null: no image), and the run's seed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .adt import AdtTree
from .chain import ChainTree
from .dynamic import DynamicTree
from .static import StaticTree

TreeConfig = Annotated[ChainTree | StaticTree | DynamicTree | AdtTree, Field(discriminator="kind")]
