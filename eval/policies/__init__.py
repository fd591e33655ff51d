"""Tree policies: which nodes a cycle drafts. The loop knows none of them, and they know no drafter."""

from .adt import Adt, AdtTree
from .base import Draw, DrawName, Expand, TreePolicy, TreeSection, check_combination
from .chain import Chain, ChainTree
from .config import TextTreeConfig, TreeConfig
from .dynamic import Dynamic, DynamicTree
from .product import Product, ProductTree
from .sage import Sage, SageTree
from .static import CHOICES, Static, StaticTree

__all__ = [
    "CHOICES",
    "Adt",
    "AdtTree",
    "Chain",
    "ChainTree",
    "Draw",
    "DrawName",
    "Dynamic",
    "DynamicTree",
    "Expand",
    "Product",
    "ProductTree",
    "Sage",
    "SageTree",
    "Static",
    "StaticTree",
    "TextTreeConfig",
    "TreeConfig",
    "TreePolicy",
    "TreeSection",
    "check_combination",
]
