"""ADT-Tree: EAGLE-2's tree whose depth and width follow how well neighbouring regions of the image were drafted.

Each cycle starts from the (d, k) of a neighbour's tree, then moves by one step: deeper and narrower where the last
tree was accepted to its full depth, shallower and wider otherwise. The shape depends on past counts only, so it is
as exact as `Dynamic`. The released code does not hold the method; what the paper leaves open is an option here.
Source: ADT-Tree, section IV (equation 2), equations 6-8, table V.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator
from torch import Tensor

from ...core.errors import UserError
from ...core.fields import MOST_LEVELS, MOST_NODES
from ...core.json_types import Json, JsonObject, text_at
from ...models.decoding.tree import Tree
from ...models.targets.base import Verified
from ...models.targets.table import IMAGE_SECTIONS, ImageKind
from .base import Draw, Expand, TreeSection
from .dynamic import candidates, most_written


class AdtTree(TreeSection):
    """ADT-Tree's settings. A depth is `Dynamic`'s: d expansions plan d + 1 levels, which the paper's tables count."""

    kind: Literal["adt"]
    for_text: ClassVar[bool] = False
    # The paper's steps and widths for a target (section V-A; beta 1, depth steps of 1 and depths in (0, 10) are the
    # defaults); keys set beside it override it. null: give width_step and width_range.
    preset: ImageKind | None = None
    # Nodes with the root, the most in any cycle (not in the paper: `Dynamic`'s).
    total: int = Field(60, ge=2, le=MOST_NODES)
    # The tree of an image's first cycle (not in the paper: LANTERN's tree).
    initial_depth: int = Field(4, ge=1, le=MOST_LEVELS)
    # Nodes of a level in that first tree.
    initial_width: int = Field(10, ge=1, le=MOST_NODES)
    # Whose (d, k) a cycle starts from: the last tree's, that of the token above, random ones, or a weighted mean of
    # those around. The paper's choice is horizontal. Without a neighbour: the last tree's.
    start_from: Literal["horizontal", "vertical", "random", "token-flock"] = "horizontal"
    # horizontal, in the first cell of a row, which has no left neighbour: the last tree's (d, k), or the initial one.
    row_start: Literal["previous", "initial"] = "previous"
    # Radius in cells of token-flock's neighbourhood (equation 6; not in the paper).
    flock_radius: float = Field(2.0, ge=1, le=MOST_NODES)
    # Table V: every cycle starts from this value instead, in the paper 1 and 25. From a depth of 1 trees have 2 or 3
    # levels, and table V prints means of 3.09 to 3.23: they need a depth of 2, which its recipes have.
    fixed_depth: int | None = Field(None, ge=1, le=MOST_LEVELS)
    fixed_width: int | None = Field(None, ge=1, le=MOST_NODES)
    # alpha of the last tree, tau / d in section III-B. With tau as its tables count it (bonus token included) and their
    # d (levels planned) that is emitted/levels. At the paper's beta of 1 accepted/depth steers alike; accepted/levels
    # (tau without the bonus token) does not, and misses table I's mean depth at temperature 1.
    acceptance: Literal["accepted/depth", "accepted/levels", "emitted/levels"] = "accepted/depth"
    # beta: the rate from which the next tree becomes deeper and narrower.
    threshold: float = Field(1.0, gt=0)
    # l_d and l_k, the steps of depth and width.
    depth_step: int = Field(1, ge=1, le=MOST_LEVELS)
    width_step: int = Field(ge=1, le=MOST_NODES)
    # Open intervals, as the paper writes them: (0, 10) allows 1 to 9. A step beyond ends at the nearest allowed value.
    depth_range: tuple[int, int] = (0, 10)
    width_range: tuple[int, int]
    # Deep trees: widths are bounded only where the new depth is above 1, as the paper has it. Then up to `total - 1`:
    # beyond, a wider tree is the same tree.
    bound_width: Literal["deep-trees", "always"] = "deep-trees"

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, value: Json) -> Json:
        section = IMAGE_SECTIONS.get(text_at(value, "preset") or "")
        return value if section is None else {**section.adt_widths, **value}

    @model_validator(mode="after")
    def _in_range(self) -> AdtTree:
        values = dict(self)
        for name, (low, high) in (("depth", self.depth_range), ("width", self.width_range)):
            most = MOST_LEVELS if name == "depth" else MOST_NODES
            if high > most + 1:
                raise ValueError(f"{name}_range ({low}, {high}) allows more than {most}")
            if low < 0 or high - low < 2:
                raise ValueError(f"{name}_range ({low}, {high}) allows nothing: both ends are excluded")
            for key in (f"initial_{name}", f"fixed_{name}"):
                value = values[key]
                if value is not None and not low < value < high:
                    raise ValueError(f"{key} {value} is outside {name}_range ({low}, {high}), whose ends are excluded")
        return self

    def build(self, *, grid: int | None = None, seed: int = 0) -> Adt:
        """`grid`: codes in a row of the image. Raises `UserError` without one."""
        if grid is None:
            raise UserError(
                "tree: adt reads neighbours in an image, and this target emits no grid of codes",
                hint="use tree: dynamic, or an image target",
            )
        return Adt(self, grid=grid, seed=seed)


class Shape(NamedTuple):
    """The (d, k) of a cycle."""

    depth: int
    width: int


class AdtCycle(NamedTuple):
    """The log's entry of a cycle that drafted."""

    depth: int
    width: int
    accepted: int


class Adt:
    """Adapts the tree from cycle to cycle of one image. `log` holds the current image's cycles.

    Cells are counted in raster order: the prefill emits the first, a cycle the accepted tokens and one more.
    """

    name = "adt"
    prunes_by_token = True

    def __init__(self, settings: AdtTree, *, grid: int, seed: int = 0):
        self.settings, self.grid, self.seed, self.num_nodes = settings, grid, seed, settings.total - 1
        deepest, widest = settings.depth_range[1] - 1, min(settings.width_range[1] - 1, self.num_nodes)
        self.num_levels = deepest + 1
        # An unbounded width comes with one expansion, of at most `num_nodes`.
        self.max_nodes = max(self.num_nodes, most_written(self.num_nodes, depth=deepest, width=widest))
        self.start()

    def start(self) -> None:
        self.log: list[AdtCycle] = []
        self._shape = Shape(self.settings.initial_depth, self.settings.initial_width)
        self._positive: bool | None = None  # whether the last tree was accepted to its full depth
        self._drafting = False
        self._cells: list[Shape | None] = [None]  # the tree that each token came from; the first came from none
        self._random = random.Random(self.seed)

    def details(self) -> JsonObject:
        """The image's cycles, for its row."""
        return {"adaptation": [list(cycle) for cycle in self.log]}

    def grow(self, root: Tensor, expand: Expand, draw: Draw, *, max_levels: int) -> Tree:
        assert not draw.sampled, "check_combination refuses this"
        self._shape, self._drafting = self._next(), True
        depth, width = self._shape
        width, levels = min(width, self.num_nodes), min(depth + 1, max_levels)
        beam = candidates(root, expand, width=width, levels=levels, draw=draw)
        return beam.best(self.num_nodes, planned=depth + 1)

    def observe(self, verified: Verified) -> None:
        accepted = verified.num_accepted
        self._cells += [self._shape if self._drafting else None] * (accepted + 1)
        if self._drafting:
            self.log.append(AdtCycle(*self._shape, accepted))
            rate = acceptance_rate(self.settings, self._shape.depth, accepted)
            self._positive = rate >= self.settings.threshold
        self._drafting = False

    def _next(self) -> Shape:
        base = self._neighbour()
        base = Shape(self.settings.fixed_depth or base.depth, self.settings.fixed_width or base.width)
        if self._positive is None:
            return base
        adapted = adapt(self.settings, base, positive=self._positive)
        return Shape(adapted.depth, min(adapted.width, self.num_nodes))

    def _neighbour(self) -> Shape:
        """The (d, k) to start from, before the step."""
        settings, cell = self.settings, len(self._cells)
        initial = Shape(settings.initial_depth, settings.initial_width)
        if self._positive is None:
            return initial
        if settings.start_from == "random":
            (shallow, deep), (narrow, wide) = settings.depth_range, settings.width_range
            return Shape(self._random.randint(shallow + 1, deep - 1), self._random.randint(narrow + 1, wide - 1))
        if settings.start_from == "vertical" and cell >= self.grid:
            return self._cells[cell - self.grid] or self._shape
        if settings.start_from == "token-flock":
            return flock(self._cells, self.grid, settings.flock_radius) or self._shape
        if settings.start_from == "horizontal" and settings.row_start == "initial" and cell % self.grid == 0:
            return initial
        return self._shape


def acceptance_rate(settings: AdtTree, depth: int, accepted: int) -> float:
    """alpha of a tree of `depth` expansions, of which `accepted` drafts stood."""
    if settings.acceptance == "accepted/depth":
        return accepted / depth
    return (accepted + (settings.acceptance == "emitted/levels")) / (depth + 1)


def adapt(settings: AdtTree, base: Shape, *, positive: bool) -> Shape:
    """One step of equation 2, then the bounds."""
    sign = 1 if positive else -1
    depth, width = base.depth + sign * settings.depth_step, base.width - sign * settings.width_step
    bounded = depth > 1 or settings.bound_width == "always"
    return Shape(_within(settings.depth_range, depth), _within(settings.width_range, width) if bounded else width)


def flock(cells: list[Shape | None], grid: int, radius: float) -> Shape | None:
    """Equations 6-8 for the cell after `cells`: a mean over the cells within `radius` that trees produced.

    Weights are (radius - rows above + 1) / radius, normalised (the paper's y is read as the row); means are rounded.
    """
    row, column = divmod(len(cells), grid)
    reach, weights, depths, widths = int(radius), 0.0, 0.0, 0.0
    for above in range(min(reach, row) + 1):
        for other in range(max(0, column - reach), min(grid, column + reach + 1)):
            index = (row - above) * grid + other
            shape = cells[index] if index < len(cells) else None
            if shape is None or math.hypot(above, other - column) > radius:
                continue
            weight = (radius - above + 1) / radius
            weights, depths, widths = weights + weight, depths + weight * shape.depth, widths + weight * shape.width
    return Shape(int(depths / weights + 0.5), int(widths / weights + 0.5)) if weights else None


def _within(interval: tuple[int, int], value: int) -> int:
    """The nearest value inside an open interval."""
    return min(max(value, interval[0] + 1), interval[1] - 1)
