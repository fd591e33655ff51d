"""The settings of stage kind `evaluate`, and which of them go together. `stages/evaluate.py` does what they say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...core.errors import Refused, UserError, did_you_mean
from ...core.fields import MOST_ANSWER, FileName, Temperature, TopK, TopP, shorthand
from ...core.json_types import object_at, text_at
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData
from ...eval.contrasts import Comparison
from ...models.drafters import AnyDrafter
from ...models.drafters.base import DrafterConfig, PublishedDrafter
from ...models.drafters.captioners import CaptionerConfig
from ...models.targets.table import AnyTarget, TargetConfig
from ..run.stage import Stage
from ..serve.engines import EvaluationEngine
from ..serve.target_engine import TransformersEngine
from .benchmarks import (
    Benchmarks,
    DataBenchmark,
    PromptsBenchmark,
    TabedBenchmark,
    check_benchmarks,
    clip_sets,
    of_class,
)
from .methods import PRESETS, Method, check_method, decoding_with, named_members
from .probe_settings import Probes
from .requests import Lengths, check_length

# Keys that only one kind of target reads.
_OF_TEXT = (
    "target", "format", "captioner", "lengths", "max_new_tokens", "stop_at_end", "record_weights", "compare",
    "graphs", "identical", "engine",
)  # fmt: skip
_OF_IMAGES = ("preset",)
# What our own loop does alone, where a serving engine decodes.
_OF_OUR_LOOP = (
    "captioner", "lengths", "repeats", "clock", "graphs", "identical", "record_weights", "compare", "contrasts",
    "probes",
)  # fmt: skip
_OF_FAMILIES = ("adt", "adt-llamagen")  # presets of one family of image generators each
_OF_TIMES = ("warmup", "repeats", "clock", "contrasts")  # nor where pictures are drawn for their quality alone


class EvaluateSettings(Stage):
    """What is decoded, by which methods, and what is read beside it."""

    command: ClassVar[str] = "evaluate"

    kind: Literal["evaluate"]
    # Another target than the recipe's, by its path: a recipe can measure drafts against several.
    target: TargetConfig | None = None
    format: PromptFormat = PromptFormat()
    # Name in the tables -> requests: files (`data`), prompts of image generators (`prompts`), published sets (kind:
    # sets) or TABED's suite (kind: tabed). A list of sections with a name each will do, too.
    benchmarks: Benchmarks = Field(min_length=1)
    # Drafters that no stage of the recipe trains, by the names that methods give: something published by its path.
    drafters: dict[FileName, AnyDrafter] = Field(default_factory=dict)
    # lantern: EAGLE-2 and LANTERN with the bounds of its table 2. adt (Anole) and adt-llamagen: EAGLE-2, LANTERN,
    # ADT-Tree and both (ADT-Tree, tables I to IV). null: the methods below. The benchmark sets the number of prompts.
    preset: Literal["adt", "adt-llamagen", "lantern"] | None = None
    # The tree of methods that name none: a name or a section, as in a method; null: chain.
    tree: Any = None
    # Name in the tables -> how it decodes.
    methods: dict[FileName, Method] = Field(min_length=1)
    # The model that writes the captions of drafting mode C; needed if a method has this mode.
    captioner: CaptionerConfig | None = None
    # Lengths of clips, as numbers of frames or, as text, of visual tokens ("0.5k", "25k"). Each clip is decoded at
    # every length; without any, once as the data section reads it. A mapping has them by set ({MVBench: ["13k"]}).
    lengths: Lengths = Field(default_factory=list)
    # Every method decodes at each temperature that it supports; 0 is greedy.
    temperatures: list[Temperature] = Field([0.0], min_length=1)
    # 0 keeps all. Image generators' own: 1000 for text-conditional LlamaGen, 2000 for class-conditional and Anole.
    top_k: TopK = 0
    top_p: TopP = 1.0
    # Tokens of an answer; several numbers decode every request anew for each (SAGE: 512, 1024, 2048).
    max_new_tokens: Annotated[
        list[Annotated[int, Field(ge=2, le=MOST_ANSWER)]],
        shorthand(int, lambda number: [number]),
    ] = Field([256], min_length=1)
    # false: answers go on after the end token, so that all have max_new_tokens (speed at 2,048 tokens, which few
    # descriptions have by themselves).
    stop_at_end: bool = True
    # Requests of each medium and length decoded before the clock counts, and times that each request is decoded.
    warmup: int = Field(1, ge=0)
    repeats: int = Field(1, ge=1)
    # Whose seconds count. thread: of the thread that decodes, which other work on the machine does not stretch; on a
    # CPU, with OMP_NUM_THREADS=1.
    clock: Literal["wall", "thread"] = Field("wall", exclude_if=lambda value: value == "wall")
    # On a GPU: whether passes of the target, of heads and of draft LVLMs are CUDA graphs, as far as captures succeed.
    graphs: bool = Field(True, exclude_if=lambda value: value)
    # Of greedy answers in bfloat16 on a CPU: whether plain steps and verification compute the same score bits.
    identical: bool = Field(False, exclude_if=lambda value: not value)
    # Who decodes: transformers, our own loop; or vllm, with so many requests at once, and with its own drafting.
    engine: EvaluationEngine = Field(TransformersEngine(), exclude_if=lambda value: value == TransformersEngine())
    # What else is asked of target and drafters, untimed; null: nothing.
    probes: Annotated[Probes, BeforeValidator(lambda given: {} if given is None else given)] = Probes()
    # Requests of each set whose ensembles' weights over time are kept (weights/), decoded once more.
    record_weights: int = Field(0, ge=0)
    # Two ways of training, over seeds: names of drafters.
    compare: Comparison | None = None
    # What one change does: name -> two of the measured drafters (or methods), the one with the change first.
    contrasts: dict[FileName, tuple[str, str]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, values: object) -> object:
        """Presets become methods; methods without a tree get the stage's."""
        written = object_at(values)
        if written is None:
            return values
        given, preset = object_at(written.get("methods") or {}), text_at(written.get("preset") or "")
        if given is None or preset is None:
            return values  # the fields' own types say what is wrong
        methods = {**PRESETS.get(preset, {}), **given}
        if (tree := written.get("tree")) is not None:
            sections = {name: section for name in methods if (section := object_at(methods, name)) is not None}
            if sections and all("tree" in section for section in sections.values()):
                raise Refused("tree", "nothing reads it: every method names its own", "leave one of them out")
            methods |= {name: {"tree": tree, **section} for name, section in sections.items()}
            written = {**written, "tree": None}  # now the methods'
        return {**written, "methods": methods} if methods or "methods" in written else values

    @model_validator(mode="after")
    def _whole(self) -> EvaluateSettings:
        check_benchmarks(self.benchmarks, template=self.format.template)
        if not self.draws and any(benchmark.draws for benchmark in self.benchmarks.values()):
            raise ValueError("benchmarks of text and of prompts of an image generator want an evaluation each")
        if self.target is not None and self.target.path is None:
            problem = "is missing: what a stage trains is the recipe's own target"
            raise Refused("target.path", problem, "name the folder or the Hub id of its weights, or leave target out")
        listed = self.listed_lengths()
        for length in itertools.chain(*listed.values()):
            check_length(length)
        if isinstance(self.lengths, dict):
            _known("lengths", {*self.lengths}, clip_sets(self.benchmarks))
        for key, values in {**listed, "temperatures": self.temperatures, "max_new_tokens": self.max_new_tokens}.items():
            if twice := {value for value in values if values.count(value) > 1}:
                raise ValueError(f"{key} name {', '.join(map(str, twice))} twice: its requests would count twice")
        if self.identical and 0 not in self.temperatures:
            raise Refused("identical", "is of greedy answers, and no temperature is 0", "leave it out")
        if self.probes.importance is not None:
            self.probes.importance.check(self.benchmarks)
        for name in ("states", "importance", "binding", "sight", "swapped") if self.draws else ("analysis", "law"):
            if dict(self.probes)[name] != Probes.model_fields[name].default:
                what = "pictures are drawn here, and it probes answers" if self.draws else "it probes drawn pictures"
                raise Refused(f"probes.{name}", f"nothing reads it: {what}", "leave it out")
        for name in () if self.is_timed else ("analysis", "law"):
            if dict(self.probes)[name]:
                what = "nothing reads it: the benchmark is untimed, and its pictures are scored alone"
                raise Refused(f"probes.{name}", what, "leave it out, or leave out untimed")
        if self.probes.law and not any(self.temperatures):
            raise Refused("probes.law", "nothing is drawn at temperature 0", "leave it out, or add a temperature")
        return self

    def unread(self) -> Mapping[str, str]:
        what, fields = ("image generators", _OF_TEXT) if self.draws else ("targets that write text", _OF_IMAGES)
        unread = dict.fromkeys(fields, f"{what} have no use for it")
        if not self.is_timed:
            unread |= dict.fromkeys(_OF_TIMES, "the benchmark is untimed, and its pictures are scored alone")
        if self.engine.is_served:
            unread |= dict.fromkeys(_OF_OUR_LOOP, f"{self.engine.name} decodes, and this is of our own loop")
        return unread

    @model_validator(mode="after")
    def _allowed(self) -> EvaluateSettings:
        for name, method in self.methods.items():
            used = [t for t in self.temperatures if method.allowed(t)]
            if not used:
                raise ValueError(f"methods.{name} fits none of the temperatures")
            with _told_of(f"methods.{name}"):
                for temperature in used:
                    method.check("drawn" if self.draws else "text", temperature)
        for temperature in self.temperatures:
            if not any(method.allowed(temperature) for method in self.methods.values()):
                raise ValueError(f"temperature {temperature:g} is used by no method")
        return self

    @model_validator(mode="after")
    def _named(self) -> EvaluateSettings:
        for name, method in self.methods.items():
            if self.captioner is None and method.mode is not None and "C" in method.mode.members:
                raise ValueError(f"methods.{name}: mode C needs a captioner: add `captioner`, or leave the method out")
        drafters = {name for method in self.methods.values() for name in method.names} | self._members()
        if unused := [name for name in self.drafters if name not in drafters]:
            raise Refused("", f"drafters.{unused[0]} drafts in no method", did_you_mean(unused[0], sorted(drafters)))
        if self.compare is not None:
            _known("compare", {*self.compare.first, *self.compare.second}, drafters)
        _known("contrasts", {name for pair in self.contrasts.values() for name in pair}, drafters | {*self.methods})
        for name, pair in self.contrasts.items():
            counts = [len(self.methods[one].names) or 1 for one in pair if one in self.methods]
            if len({*counts}) == 2:
                what = f"{counts[0]} drafters with {counts[1]}, and they pair one by one"
                raise ValueError(f"contrasts.{name} compares {what}")
        return self

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses questions to an image generator, prompts of pictures to a language model, the trees of another
        target, and settings of decoding that the drafter does not read.
        """
        if self.draws != target.draws_images:
            what, wanted = ("draws pictures", "prompts") if target.draws_images else ("writes text", "data")
            raise Refused("benchmarks", f"the target {what}, and these ask it for something else",
                          f"give a benchmark with {wanted}")  # fmt: skip
        if target.draws_images and self.preset in _OF_FAMILIES and self.preset != target.adt_preset:
            raise Refused("preset", f"{self.preset} has the trees of another target", f"use {target.adt_preset}")
        for name, method in self.methods.items():
            if method.drafter is None and method.drafters is None and drafter is not None:
                _check_settings(name, method, drafter)
        for key, section in self._own_drafters():
            with _told_of(key):
                section.check_settings(target.draws_images)
        if not target.draws_images:
            self.engine.check_evaluation(self, target, drafter)
            return
        for name, method in self.methods.items():
            with _told_of(f"methods.{name}.rule.k"):
                method.rule.check_codebook(target.codebook_size)
        with _told_of("probes.analysis.k"):
            if self.probes.analysis is not None:
                self.probes.analysis.check(target.codebook_size)

    @model_validator(mode="after")
    def _fitting_drafters(self) -> EvaluateSettings:
        if self.clock == "thread" and self.captioner is not None:
            raise Refused("captioner", "times its captions by the wall's clock, and clock is thread", "leave clock out")
        for key, section in self._own_drafters():
            if self.clock == "thread" and section.base_kind == "pruned":
                raise Refused(key, "times its pruning by the wall's clock, and clock is thread", "leave clock out")
            for field in section.beside_path() if isinstance(section, PublishedDrafter) else ():
                problem = f"nothing reads it beside {key}.path, whose weights bring it with them"
                raise Refused(f"{key}.{field}", problem, "leave one of them out (null)")
        return self

    def _own_drafters(self) -> Iterator[tuple[str, DrafterConfig]]:
        """Key -> section, of the drafters that no stage trains."""
        yield from ((f"drafters.{name}", section) for name, section in self.drafters.items())
        for name, method in self.methods.items():
            for place, member in method.member_sections.items():
                yield f"methods.{name}.drafter.members.{place}", member
            if method.section is not None:
                yield f"methods.{name}.drafter", method.section

    def check_named(self, trained: Mapping[str, DrafterConfig | None]) -> None:
        """Refuses settings of decoding that a drafter that is named does not read, and a name of two drafters."""
        for name in self.drafters:
            if name in trained:
                problem = f"stage {name} trains a drafter of this name, and methods could mean either"
                raise Refused(f"drafters.{name}", problem, "give this one another name, here and in the methods")
        sections = {**trained, **self.drafters}
        for name, method in self.methods.items():
            for drafter in method.names:
                if (section := sections.get(drafter)) is not None:
                    _check_settings(name, method, section)
                    self.engine.check_method(f"methods.{name}", method, section)

    def warnings(self) -> list[str]:
        """What in these settings misleads without being wrong, by key; said when the recipe loads, and in reports."""
        return [
            f"methods.{name}: {method.rule.caution}"
            for name, method in self.methods.items()
            if method.rule.caution is not None
            if any(temperature > 0 and method.allowed(temperature) for temperature in self.temperatures)
        ]

    @property
    def is_timed(self) -> bool:
        """Whether it measures speed: pictures may be drawn for their quality alone."""
        return not self.draws or self.drawing.untimed is None

    @property
    def draws(self) -> bool:
        """Whether an image generator is measured."""
        return all(benchmark.draws for benchmark in self.benchmarks.values())

    def listed_lengths(self) -> dict[str, list[Any]]:
        """Key -> lengths, of those that there are."""
        of_all = not isinstance(self.lengths, dict)
        listed = {"": self.lengths} if isinstance(self.lengths, list) else self.lengths
        return {"lengths" if of_all else f"lengths.{name}": [*lengths] for name, lengths in listed.items() if lengths}

    @property
    def drawing(self) -> PromptsBenchmark:
        """The benchmark of an image generator."""
        if len(self.benchmarks) > 1:
            raise Refused("benchmarks", f"{' and '.join(self.benchmarks)}: an image generator is measured on one",
                          "give the others to stages of their own")  # fmt: skip
        (benchmark,) = of_class(self.benchmarks, PromptsBenchmark)
        return benchmark

    @property
    def data(self) -> list[ConversationData]:
        """Every data section, whatever is done with it."""
        parts = [benchmark.data for benchmark in of_class(self.benchmarks, DataBenchmark)]
        parts += [] if self.probes.binding is None else [self.probes.binding.data]
        return parts if (sight := self.probes.sight) is None else [*parts, *sight.names.values(), sight.questions]

    @property
    def capacity(self) -> int:
        """Positions that a request may take, without a cycle's tree: the longest prompt, and what is emitted."""
        return max((data.max_length for data in self.data), default=0) + max(self.max_new_tokens) + 2

    def _members(self) -> set[str]:
        """Drafters that ensembles name."""
        return {n for name, method in self.methods.items() for n in named_members(method, self.methods, (name,))}

    @property
    def answer_format(self) -> PromptFormat | None:
        judged = any(benchmark.quality is not None for benchmark in of_class(self.benchmarks, TabedBenchmark))
        writes = self.stop_at_end or self.captioner is not None or judged
        return self.format if writes and not self.draws else None

    def is_drawn(self, method: Method) -> bool:
        """Whether a method's pictures are drawn; a table of quality alone needs no exact method's."""
        untimed = self.drawing.untimed
        return untimed is None or untimed.exact_methods or not method.rule.is_exact


def _check_settings(name: str, method: Method, drafter: DrafterConfig) -> None:
    with _told_of(f"methods.{name}"):
        decoding_with(drafter, method.settings, None)
        check_method(method, drafter)


@contextmanager
def _told_of(key: str) -> Iterator[None]:
    """Errors of what is checked here name `key`."""
    try:
        yield
    except Refused as refused:
        raise refused.under(key) from refused
    except UserError as error:
        raise Refused(key, error.problem, error.hint) from error


def _known(key: str, names: set[str], known: set[str]) -> None:
    if unknown := sorted(names - known):
        raise ValueError(f"{key} names {unknown}, which are not among what is measured; "
                         f"{did_you_mean(unknown[0], sorted(known))}")  # fmt: skip
