"""A method of an evaluation: who drafts, in which tree, by which acceptance rule, and at which temperatures.

The same keys serve every target. What cannot go together is refused by name before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator

from ...core.errors import UserError
from ...core.fields import Temperature, shorthand
from ...core.import_paths import OrImported
from ...core.json_types import JsonMapping, JsonObject
from ...core.section import Section
from ...eval.block import BlockConfig
from ...eval.lantern import LanternConfig
from ...eval.policies import ChainTree, TreeConfig, TreePolicy, check_combination
from ...eval.replaced import ReplacedConfig
from ...eval.rules import RULES, Codes, Rule, RuleSection
from ...models.drafters import AnyDrafter, members_of
from ...models.drafters.base import DrafterConfig, PublishedDrafter, for_decoding
from ...models.drafters.ensemble import DraftingMode
from ...models.drafters.jacobi import HeadTailConfig, JacobiConfig
from ...models.drafters.mixed import MembersConfig
from ...models.targets.drawing import ImageTargetSection
from ...models.targets.table import IMAGE_SECTIONS


class ExactRule(RuleSection):
    """Greedy at temperature 0, speculative sampling above."""

    kind: Literal["exact"] = "exact"
    is_exact: ClassVar[bool] = True

    def build(self, temperature: float) -> Rule:
        return RULES["sampling" if temperature else "greedy"]


# A section with a kind, or the name of a rule without settings (exact, block).
RuleConfig = Annotated[
    Annotated[ExactRule | LanternConfig | BlockConfig | ReplacedConfig, Field(discriminator="kind")],
    OrImported(RuleSection),
    shorthand(str, lambda name: {"kind": name}),
]
# What a method changes in its drafter's section: settings that decoding alone reads.
SETTINGS = ("mode", "vata", "positions", "visual_share", "share_by", "share_layer", "cut_below", "cfg_scale")


class Method(Section):
    """One way of decoding."""

    # What drafts: the name of a stage that trained it or of an entry of the evaluation's `drafters`, or a section like
    # the recipe's `drafter` (something published by its path, kind: pruned, kind: ensemble). null: the recipe's
    # drafter, as the latest stage left it.
    drafter: str | AnyDrafter | None = None
    # Several names: drafters of several seeds, say. They share this method's row in the tables.
    drafters: list[str] | None = Field(None, min_length=1)
    # A tree's name (chain: 5 tokens; static; 30-4-8: total with the root, levels, width; sage) or section. null: the
    # evaluation's `tree`.
    tree: TreeConfig = ChainTree(kind="chain")
    # exact, block (of sampled chains), or a section, for image codes alone: kind lantern relaxes acceptance, and kind
    # replaced replaces each code by one of its k nearest (LANTERN, table 4).
    rule: RuleConfig = ExactRule()
    # sample draws proposals from the drafter without replacement, for trees whose shape is fixed.
    draw: Literal["top-k", "sample"] = "top-k"
    # Only at these temperatures of the evaluation; null: at all that this method can be used at.
    temperatures: list[Temperature] | None = None
    # Of a draft LVLM: M, T, C, P, T-text, T-raw; MT, MTCP (equal weights); MT*, MTCP* (adaptive); or a section with
    # name, members and weights. null: M.
    mode: DraftingMode | None = None
    # Of heads of language models; null: as the head's own section has it. vata: no visual input is held.
    vata: bool | None = None
    # How positions count where visual inputs are dropped.
    positions: Literal["compact", "flat", "mrope"] | None = None
    # Share of the visual inputs that is held without vata, by the attention that they get in the target.
    visual_share: float | None = Field(None, ge=0, le=1)
    # Whose attention chooses: the prompt's last token's, or that of all its text.
    share_by: Literal["last", "text"] | None = None
    # The layer of the target whose attention chooses.
    share_layer: int | None = Field(None, ge=0)
    # Of a DFlash draft with a confidence head: blocks end where the chance that all is accepted falls below this.
    cut_below: float | None = Field(None, gt=0, lt=1)
    # ViSkip: draft nothing in cycles whose last token came from a place that gave the pictures at least this share of
    # the last layer's attention (MMSpec's code: 0.35). Any drafter of a language model; outputs stay exact. null: off.
    visual_skip: float | None = Field(None, gt=0, le=1)
    # Of a smaller image generator: its guidance.
    cfg_scale: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one_source(self, info: ValidationInfo) -> Method:
        if self.drafter is not None and self.drafters is not None:
            raise ValueError("give drafter (one) or drafters (several names), not both")
        if self.drafters is not None and len({*self.drafters}) < len(self.drafters):
            raise ValueError(f"drafters name one twice: {', '.join(self.drafters)}")
        if self.section is not None:
            for section in (self.section, *self.member_sections.values()):
                check_method(self, section)
            decoding_with(self.section, self.settings, None)
            members_of(self.section, info.context)  # sections among them are checked here
        return self

    @property
    def names(self) -> list[str]:
        """Drafters that are named, not spelt out."""
        return [self.drafter] if isinstance(self.drafter, str) else self.drafters or []

    @property
    def section(self) -> DrafterConfig | None:
        """The drafter's section, where it is spelt out."""
        return self.drafter if isinstance(self.drafter, DrafterConfig) else None

    @property
    def member_sections(self) -> dict[int, DrafterConfig]:
        """Place in the ensemble -> section, of the members that are spelt out."""
        members = [] if self.section is None else members_of(self.section)
        return {place: member for place, member in enumerate(members) if isinstance(member, DrafterConfig)}

    @property
    def settings(self) -> JsonObject:
        """What this method changes in its drafter's section."""
        return {key: value for key, value in self if key in SETTINGS and value is not None}

    def allowed(self, temperature: float) -> bool:
        """Whether `temperatures` has it (None: any). 0 also needs `draw: top-k` and a rule that draws nothing."""
        if self.temperatures is not None and temperature not in self.temperatures:
            return False
        return temperature > 0 or (self.draw == "top-k" and self.rule.kind not in ("block", "replaced"))

    def policy(self, *, grid: int | None = None, seed: int = 0) -> TreePolicy:
        """The policy that the `tree` section builds. `grid`: codes along one side; None for text."""
        return self.tree.build(grid=grid, seed=seed)

    def check(self, medium: Literal["text", "drawn"], temperature: float) -> None:
        """Refuse what cannot be.

        Args:
            medium: drawn where the target's tokens are an image's codes.

        Raises:
            UserError: tree or rule are of another medium, or the combination would not be exact.
        """
        if medium == "text" and not self.tree.for_text:
            raise UserError(f"tree: {self.tree.kind} follows the rows of an image, and this target writes text",
                            hint="use 30-4-8 (EAGLE-2's), sage, static or chain")  # fmt: skip
        if medium == "text" and self.rule.kind in ("lantern", "replaced"):
            raise UserError(
                f"rule: {self.rule.kind} reads which image codes are similar, and words have no such neighbours",
                hint="use rule: exact, which speculative decoding of text keeps to",
            )
        if medium == "drawn" and self.visual_skip is not None:
            raise UserError("visual_skip follows the target's attention on the prompt's pictures, and here are none",
                            hint="leave visual_skip out")  # fmt: skip
        policy = self.policy(grid=1)  # of any side
        exact = "sampling" if temperature else "greedy"
        check_combination(
            temperature=temperature, draw=self.draw, policy=policy.name, prunes_by_token=policy.prunes_by_token,
            rule=exact if self.rule.kind == "exact" else self.rule.kind,
        )  # fmt: skip

    def rule_at(self, temperature: float, codes: Codes | None = None) -> Rule:
        """The rule at a temperature. `codes`: of a target that draws; None: it writes text."""
        return self.rule.build(temperature) if codes is None else self.rule.build_for_codes(temperature, codes)

    def line(self, drafters: Collection[str]) -> str:
        """The line of a dry run. The evaluation names `drafters`; stages train all others."""
        if self.names:
            what = ", ".join(name if name in drafters else f"drafter of stage {name}" for name in self.names)
        else:
            what = "the recipe's drafter" if self.section is None else f"kind {self.section.kind}"
            if isinstance(self.section, PublishedDrafter) and self.section.path is not None:
                what += f", {self.section.path}"
        mode = "" if self.mode is None else f", mode {self.mode.name}"
        policy = self.policy(grid=1)
        nodes = getattr(policy, "num_nodes", policy.max_nodes)  # ours say how many of these are of one tree
        shape = f"tree {policy.name}, {policy.num_levels} levels, at most {nodes} nodes"
        rule = "" if self.rule.kind == "exact" else f", rule {self.rule.kind}"
        skip = "" if self.visual_skip is None else f", no draft at {self.visual_skip:g} of the attention on the picture"
        return f"{what}{mode}; {shape}{rule}{', sampled draws' if self.draw == 'sample' else ''}{skip}"

    @property
    def chain(self) -> int | None:
        """The tree's length where every proposal is the likeliest chain."""
        return self.tree.chain_length if self.draw == "top-k" else None


def named_members(method: Method, methods: Mapping[str, Method], within: tuple[str, ...] = ()) -> set[str]:
    """Names in an ensemble, and in the ensembles among its members, that are of no method: of drafters.

    Args:
        within: methods that this one is a member of.

    Raises:
        ValueError: an ensemble is a member of itself.
    """
    names: set[str] = set()
    mixed = method.section.members if isinstance(method.section, MembersConfig) else ()
    for member in (member for member in mixed if isinstance(member, str)):
        if member in within:
            raise ValueError(f"methods.{member}: an ensemble is a member of itself, by way of {' and '.join(within)}")
        names |= named_members(methods[member], methods, (*within, member)) if member in methods else {member}
    return names


def check_method(method: Method, drafter: DrafterConfig) -> None:
    """Raise `Refused` for a tree or a rule that a drafter does not go with."""
    if isinstance(drafter, HeadTailConfig):
        drafter = drafter.tail
    if isinstance(drafter, JacobiConfig):
        drafter.check_method(method.tree.kind, method.rule.kind)


def decoding_with(config: DrafterConfig, settings: JsonMapping, key: str | None) -> DrafterConfig:
    """A drafter's section with a method's settings. Raises `UserError` for a setting that this kind does not have."""
    try:
        return for_decoding(config, **settings)
    except ValueError as error:
        raise UserError(str(error), key=key, hint="leave the setting out, or name another drafter") from error


# LANTERN's and ADT-Tree's own comparisons; methods that a recipe names beside a preset are added to it. Trees have 60
# nodes with the root: LANTERN's appendix B.2 passes 60 tokens to the target, and ADT-Tree gives no number.
_EAGLE2: JsonObject = {"tree": {"kind": "dynamic", "total": 60, "depth": 4, "width": 10}}


def _adt(kind: str, section: type[ImageTargetSection]) -> dict[str, JsonObject]:
    tree: JsonObject = {"tree": {"kind": "adt", "preset": kind}}
    k, delta = section.adt_bound
    relaxed: JsonObject = {"rule": {"kind": "lantern", "k": k, "delta": delta}}
    return {
        "EAGLE-2": _EAGLE2,
        "LANTERN": {**_EAGLE2, **relaxed},
        "ADT-Tree": tree,
        "ADT-Tree + LANTERN": {**tree, **relaxed},
    }


PRESETS: dict[str, dict[str, JsonObject]] = {
    **{section.adt_preset: _adt(kind, section) for kind, section in IMAGE_SECTIONS.items()},
    "lantern": {
        "EAGLE-2": _EAGLE2,
        **{
            f"LANTERN{name} (delta = {delta:g}, k = 1000)": {
                **_EAGLE2,
                "rule": {"kind": "lantern", "k": 1000, "delta": delta, "residual": residual},
                "temperatures": [temperature],
            }
            for name, residual in (("", "paper"), (", released rule", "reference"))
            for delta, temperature in ((0.05, 0.0), (0.2, 0.0), (0.1, 1.0), (0.4, 1.0))
        },
    },
}
