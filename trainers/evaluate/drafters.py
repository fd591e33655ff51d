"""Opens the drafters of an evaluation's methods beside the loaded target. Weights that several share load once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ...core.states import Taps
from ...eval.pair import Pair, trained_section
from ...eval.policies import TreePolicy
from ...eval.rules import Codes, Rule
from ...models.drafters import members_of
from ...models.drafters.base import PLAIN, Drafter, DrafterConfig, DraftingOptions, PublishedDrafter
from ...models.drafters.beside import visual_counts
from ...models.drafters.lvlm import LvlmConfig
from ...models.drafters.manifest import MANIFEST
from ...models.drafters.mixed import MembersConfig
from ..run.context import Context
from .evaluate_settings import EvaluateSettings
from .methods import Method, decoding_with
from .requests import Opened


@dataclass(frozen=True, eq=False)
class Drafting:
    """A method with one of its drafters, ready to decode."""

    name: str  # of the method, in the tables
    drafter_name: str  # whose weights draft: a stage, a published name
    method: Method
    config: DrafterConfig  # the drafter's section, as it decodes
    drafter: Any  # a `Drafter`; draft LVLMs and pruned copies have a `decoder` besides
    policy: TreePolicy
    rule: Callable[[float], Rule]  # temperature -> acceptance rule

    @property
    def mode(self) -> str:
        """Drafting mode of a draft LVLM; "" of other drafters."""
        return self.config.mode.name if isinstance(self.config, LvlmConfig) else ""

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the drafting mode: what a draft LVLM is shown, row by row."""
        return self.config.mode.members if isinstance(self.config, LvlmConfig) else ()

    @property
    def title(self) -> str:
        """The method, with the drafter where it has several."""
        return self.name if self.method.drafters is None else f"{self.name} ({self.drafter_name})"

    def details(self, opened: Opened, max_new_tokens: int) -> JsonObject:
        """Details that drafter, policy and rule recorded for the request that was just decoded."""
        details: JsonObject = {"rule": self.method.rule.kind}
        details |= visual_counts(self.drafter)
        details |= getattr(self.policy, "details", dict)()  # of those that adapt
        if self.members:
            held = self.drafter.decoder.max_positions
            last = self.drafter.last_position(opened.request, max_new_tokens)
            details["beyond_positions"] = held is not None and last > held
        return details


@dataclass(frozen=True)
class Source:
    """The source of a drafter: its section, and the folder of the stage that trained it (None if no stage did)."""

    name: str
    config: DrafterConfig
    folder: Path | None


class Drafters:
    """Opens the drafters of an `evaluate` stage's section."""

    def __init__(self, stage: EvaluateSettings, context: Context, pair: Pair, *, options: DraftingOptions = PLAIN):
        self.stage, self.context, self.pair, self.options = stage, context, pair, options

    def all(
        self,
        codes: Codes | None = None,
        *,
        grid: int | None = None,
        wanted: Callable[[Method], bool] = lambda method: True,
    ) -> list[Drafting]:
        """Each method with each of its drafters, in the order of the tables.

        Args:
            codes: of a target that draws; None: it writes text.
            grid: side of the target's pictures in codes; None: it writes text.
            wanted: methods that are opened.
        """
        return [
            drafting
            for name, method in self.stage.methods.items()
            if wanted(method)
            for drafting in self.open(
                name, method, partial(method.rule_at, codes=codes), method.policy(grid=grid, seed=self.context.seed)
            )
        ]

    def open(self, name: str, method: Method, rule: Callable[[float], Rule], policy: TreePolicy) -> list[Drafting]:
        """The method with each of its drafters."""
        if method.visual_skip is not None:
            self.pair.target.watched(Taps())  # refused where the target does not tell its attention
        opened = []
        for source in self.sources(name, method):
            config = decoding_with(source.config, method.settings, self._key(name))
            drafter = self._drafter(source, config, name)
            opened.append(Drafting(name, source.name, method, config, drafter, policy, rule))
        return opened

    def modules(self, method: Method, name: str, *, kind: str) -> dict[str, nn.Module]:
        """The loaded models of a method's drafters of one kind, by drafter."""
        sources = [source for source in self.sources(name, method) if source.config.base_kind == kind]
        return {source.name: self.pair.module(source.config, source.folder) for source in sources}

    def sources(self, name: str, method: Method) -> list[Source]:
        """The drafters of method `name`: those it names, its own section, the trained one, or else the recipe's.

        Raises:
            UserError: there is none.
        """
        if method.names:
            return [self._named(drafter) for drafter in method.names]
        if method.section is not None:
            section = as_saved(method.section, f"{self._key(name)}.drafter")
            return [Source(method.section.display_name, section, None)]
        folder = self.context.inputs.get("drafter")
        config = (_trained(folder) if folder is not None else None) or self.context.drafter
        if config is None:
            raise UserError("nothing drafts", key=self._key(name),
                            hint="name a stage or a section under drafter, or give the recipe a drafter")  # fmt: skip
        return [Source(folder.name if folder is not None else config.display_name, config, folder)]

    def _named(self, name: str) -> Source:
        if name in self.stage.drafters:
            key = f"stages.{self.context.name}.drafters.{name}"
            return Source(name, as_saved(self.stage.drafters[name], key), None)
        folder = self.context.inputs[f"drafter/{name}"]
        # A stage may have trained another drafter than the recipe's.
        return Source(name, _trained(folder) or cast(DrafterConfig, self.context.drafter), folder)

    def _drafter(self, source: Source, config: DrafterConfig, name: str) -> Drafter:
        """One drafter; of an ensemble each member is opened anew: two of a cycle's drafters never share a cache."""
        if not isinstance(config, MembersConfig):
            return self.pair.drafter(source.config, source.folder, config, self.options)
        members = []
        for member in members_of(config):
            if not isinstance(member, str):
                section = as_saved(member, self._key(name))
                members.append(self._drafter(Source(member.display_name, section, None), section, name))
            elif member in self.stage.methods:
                method = self.stage.methods[member]
                source, *others = self.sources(member, method)
                if others:
                    raise UserError(
                        f"member {member!r} has {1 + len(others)} drafters, and an ensemble takes one of each member",
                        key=self._key(member), hint="name a drafter in place of the method",
                    )  # fmt: skip
                config_of_member = decoding_with(source.config, method.settings, self._key(member))
                members.append(self._drafter(source, config_of_member, member))
            else:
                source = self._named(member)
                members.append(self._drafter(source, source.config, name))
        return config.drafter(cast(Any, members), self.pair.target, self.options)

    def _key(self, name: str) -> str:
        return f"stages.{self.context.name}.methods.{name}"


def as_saved(section: DrafterConfig, key: str) -> DrafterConfig:
    """A section whose `path` names a saved head, with the settings that the folder has: the section need not repeat
    them. What only decoding reads may be said otherwise.

    Raises:
        UserError: a setting is said, and the folder has another; both are named.
    """
    if not isinstance(section, PublishedDrafter) or section.path is None or section.trains_on != "states":
        return section
    folder = section.fetched()
    if (saved := _trained(folder)) is None:
        return section  # in another layout, or of before sections were kept: loading compares what its files say
    said = section.model_fields_set - {"path", "revision"}
    changeable = section.decoding_settings
    for name in sorted(said - changeable):
        here, there = dict(section)[name], dict(saved).get(name)
        if here != there:
            raise UserError(
                f"{name} is {here} here, and {there} in {folder / MANIFEST}", key=f"{key}.{name}",
                hint="leave it out: a saved drafter's settings are taken from its folder",
            )  # fmt: skip
    settings = {name: dict(section)[name] for name in {"path", "revision"} | (said & changeable)}
    return saved.model_copy(update=settings)


def _trained(folder: Path) -> DrafterConfig | None:
    """The section of the drafter in a stage's folder; None: its manifest has none."""
    return trained_section(folder, hint="train the drafter again with this version")
