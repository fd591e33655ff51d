"""Whether drawn codes have the target's own distribution, as an exact method promises, and how unsure it is by place.

Given the codes before it, a code of an exact method has the target's guided and warped distribution p. Order the ids by
p, the likeliest first, and let a code's u be the mass before its own and a uniform share of its own: the probability
integral transform, randomised since ids are discrete. Over all codes of all pictures the u are then independent and
uniform on [0, 1), however flat p is, and a chi-square over equal bins tells. A relaxed rule draws other codes.
Letters: I pictures, n codes of each, V ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.json_types import JsonObject
from ...models.decoding.warp import Warp
from ...models.targets.guided import GuidedTarget
from ..figures import drawing
from ..tables import Column, Figure, ReportSection, Table, Value, text
from .drawn_cells import ConditionAndCodes, drawn_by

BINS = 20
FIGURE = "entropy.png"


@dataclass(frozen=True)
class DrawnLaw:
    """What one method drew at one temperature, beside p."""

    uniforms: Tensor  # [I,n] float64
    entropy: Tensor  # [I,n] of p, in nats

    @property
    def chi_square(self) -> float:
        """Of `BINS` equal bins, with BINS - 1 degrees of freedom."""
        counts = torch.histc(self.uniforms, BINS, 0.0, 1.0)
        expected = self.uniforms.numel() / BINS
        return float(((counts - expected).square() / expected).sum())

    @property
    def chance(self) -> float:
        """Of a chi-square as large or larger, where the codes are p's."""
        half = torch.tensor([(BINS - 1) / 2, self.chi_square / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def transformed(p: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """u [n] float64 of `tokens` [n], drawn from p [n,V]. Equally likely ids are in their order."""
    p = p.double().cpu()
    tokens = tokens.cpu()[:, None]
    own = p.gather(-1, tokens)
    before = (p > own) | ((p == own) & (torch.arange(p.shape[-1]) < tokens))
    share = torch.rand(len(p), generator=generator, dtype=torch.float64)
    return ((p * before).sum(-1) + share * own[:, 0]) / p.sum(-1)


def read_law(target: GuidedTarget, pictures: Sequence[ConditionAndCodes], warp: Warp, seed: int) -> DrawnLaw:
    """What was drawn at the temperature of `warp`: one pass of the target for each picture."""
    generator = torch.Generator().manual_seed(seed)
    uniforms, entropies = [], []
    for condition, codes in pictures:
        p, tokens = drawn_by(target, condition, codes, warp)
        uniforms.append(transformed(p, tokens, generator))
        entropies.append(torch.special.entr(p).sum(-1).cpu())
    return DrawnLaw(torch.stack(uniforms), torch.stack(entropies))


def law_section(laws: Mapping[float, Mapping[str, DrawnLaw]], plain: str, grid: int, folder: Path) -> ReportSection:
    """A line for each method and temperature, and the figure of plain decoding's entropies, written to `folder`."""
    lines: list[tuple[Value, ...]] = []
    data: dict[str, JsonObject] = {}
    for temperature, methods in laws.items():
        for name, law in methods.items():
            mean = float(law.entropy.mean())
            lines.append((temperature, name, law.uniforms.numel(), law.chi_square, law.chance, mean))
        places = methods[plain].entropy.mean(0)
        chances = {name: law.chance for name, law in methods.items()}
        data[f"{temperature:g}"] = {"chance": chances, "entropy_by_place": places.tolist()}
    with drawing(folder / FIGURE, len(laws), 3.2, 3.0) as (figure, panels):
        for panel, (temperature, methods) in zip(panels.flat, laws.items(), strict=False):
            shown = panel.imshow(methods[plain].entropy.mean(0).unflatten(0, (grid, grid)), cmap="viridis", vmin=0.0)
            panel.set(title=f"T = {temperature:g}", xlabel="column", ylabel="row")
            panel.grid(False)
            figure.colorbar(shown, ax=panel, label="nats", shrink=0.8)
    note = (f"u of each code: the target's mass before it and a random share of its own, in {BINS} bins. chance: of a "
            "chi-square as large where the rule is exact; one line in a hundred has less than 0.01.")  # fmt: skip
    columns = (Column("T", "g"), text("method"), Column("codes", "d"), Column("chi-square", ".1f"),
               Column("chance", ".3g"), Column("mean entropy, nats", ".2f"))  # fmt: skip
    table = Table("Are the drawn codes the target's own?", columns, tuple(lines), note=note)
    caption = "Entropy of the target's distribution at each place, as a mean over plain decoding's pictures."
    return ReportSection("The law of the drawn codes", (table, Figure(FIGURE, caption)), "law", data)
