"""What an `evaluate` stage of this track decodes with: a drafter, how it reads, the tree, and the draw.

A method's drafter is a head that a stage trained, one that is published, or one without training (`kind: pruned`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from ....core.errors import UserError
from ....core.section import Section
from ....data.processor import Processor
from ....eval.policies import (
    ChainTree,
    DynamicTree,
    SageTree,
    StaticTree,
    TreePolicy,
    check_combination,
)
from ....eval.policies.config import named_tree
from ....models.drafters import AnyDrafter
from ....models.drafters.base import TargetIdentity
from ....models.drafters.made_for import MANIFEST
from ....models.drafters.pruned import PrunedConfig
from ...context import Context


def _named(given: Any) -> Any:
    """The names of `named_tree`, and SpecVLM's two: chain, of 5 tokens, and static, of 25 nodes."""
    own = {"chain": {"kind": "chain", "gamma": 5}, "static": {"kind": "static", "choices": "mc_sim_7b_63"}}
    return own.get(given, given) if isinstance(given, str) and given in own else named_tree(given)


MethodTree = Annotated[
    Annotated[ChainTree | StaticTree | DynamicTree | SageTree, Field(discriminator="kind")], BeforeValidator(_named)
]
# How a head reads in decoding, which needs no other training: a method's own keys.
READING_KEYS = ("vata", "positions", "visual_share", "share_by", "share_layer")


class Method(Section):
    """One way of decoding."""

    # What drafts: the name of a stage that trained a head, or a section as the recipe's `drafter` (a published head by
    # its path, or kind: pruned). null: the recipe's drafter, as the latest stage left it.
    drafter: str | AnyDrafter | None = None
    # A name (30-4-8: total with the root, levels, width; chain; static; sage), or a section with a kind.
    tree: MethodTree
    # sample draws proposals from the drafter without replacement, for trees whose shape is fixed.
    draw: Literal["top-k", "sample"] = "top-k"
    # Only at these temperatures of the stage; null: at all that this method can be used at.
    temperatures: list[float] | None = None
    # Of heads, in decoding alone; null: as the head's own section has it. vata: no visual slot is held.
    vata: bool | None = None
    positions: Literal["compact", "flat", "mrope"] | None = None
    # Share of the visual slots that is held without vata, by the attention that they get in the target.
    visual_share: float | None = Field(None, ge=0, le=1)
    share_by: Literal["last", "text"] | None = None
    share_layer: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _of_heads(self) -> Method:
        if isinstance(self.drafter, PrunedConfig) and self.reading:
            raise ValueError(f"{', '.join(self.reading)}: of heads; a pruned drafter has settings of its own")
        return self

    @property
    def stage(self) -> str | None:
        """The stage whose head this is; None: not named."""
        return self.drafter if isinstance(self.drafter, str) else None

    @property
    def reading(self) -> dict[str, Any]:
        """The settings of decoding that this method changes."""
        return {key: value for key in READING_KEYS if (value := getattr(self, key)) is not None}

    def allowed(self, temperature: float) -> bool:
        if self.temperatures is not None and temperature not in self.temperatures:
            return False
        return temperature > 0 or self.draw == "top-k"

    def check(self, temperature: float) -> None:
        """Raises `UserError` where this would not be exact."""
        policy = self.tree.build()
        check_combination(
            temperature=temperature, draw=self.draw, policy=policy.name, prunes_by_token=policy.prunes_by_token,
            rule=rule_name(temperature),
        )  # fmt: skip


def rule_name(temperature: float) -> str:
    return "sampling" if temperature else "greedy"


@dataclass(frozen=True)
class OpenMethod:
    """A method with its drafter loaded."""

    method: Method
    drafter: Any
    policy: TreePolicy
    config: Any  # the drafter's section, as it decodes

    @property
    def parts(self) -> dict[str, bool] | None:
        """Which parts of Sparrow are on (table 6); None: not a head."""
        config = self.config
        if isinstance(config, PrunedConfig):
            return None
        ivsb = bool(getattr(config, "ivsb", False)) and config.visual(training=True) == "direct"
        return {"MTP": config.mtp_steps > 0, "IVSB": ivsb, "VATA": config.visual(training=False) == "none"}


def open_methods(
    methods: Mapping[str, Method], context: Context, target: Any, processor: Processor
) -> dict[str, OpenMethod]:
    """Each method's drafter beside the loaded target; weights that several methods use are loaded once."""
    loaded: dict[Any, Any] = {}
    found = {}
    for name, method in methods.items():
        where = f"key stages.{context.name}.methods.{name}"
        config, folder = _source(method, context)
        if config is None:
            raise UserError("nothing drafts", where=where,
                            cure="name a stage or a section under drafter, or give the recipe a drafter")  # fmt: skip
        decodes = config.for_decoding(**method.reading)
        identity = TargetIdentity(context.target.model_dump(mode="json"), processor.tokenizer_hash)
        # Rotary positions of three rows are part of a head.
        kept = config.for_decoding(positions=method.positions) if method.positions else config
        key = (folder, kept.model_dump_json())
        if key not in loaded:
            loaded[key] = kept.load(folder, target, identity=identity)
        found[name] = OpenMethod(
            method, decodes.drafter(loaded[key], target), method.tree.build(seed=context.seed), decodes
        )
    return found


def _source(method: Method, context: Context) -> tuple[Any, Path | None]:
    """The drafter's section, and the folder of the stage that trained it; None: no stage did."""
    if method.drafter is not None and method.stage is None:
        return method.drafter, None
    folder = context.inputs.get("drafter" if method.stage is None else f"drafter/{method.stage}")
    # A stage may have trained another head than the recipe's.
    return (_trained(folder) if folder is not None else None) or context.drafter, folder


def _trained(folder: Path) -> Any:
    """The section of the drafter in a stage's folder."""
    written = json.loads((folder / MANIFEST).read_text()).get("drafter")
    return None if written is None else TypeAdapter(AnyDrafter).validate_python(written)
