"""vLLM as what an evaluation measures: the section, the methods that it cannot run, and its words for those it can."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from ...core.errors import Refused
from ...core.json_types import JsonObject
from ...models.drafters.base import DrafterConfig
from ...models.drafters.lookup import NgramConfig, SuffixConfig
from ...models.targets.generators import AnyTarget
from .engine_section import VllmEngine
from .target_engine import DecodedBy, Evaluated

_OURS = "measure it in a stage without engine"


class VllmEvaluation(VllmEngine):
    """vLLM decodes the requests of an evaluation, with its own drafting; a process for plain decoding and each method.

    Requests are not drawn from a cache of prefixes, unless `options` turns it on.
    """

    ours: ClassVar[tuple[str, ...]] = (*VllmEngine.ours, "disable_log_stats", "per_request_spec_decode_metrics")

    # Requests that are decoded side by side; all of a benchmark are measured anew at each number.
    concurrency: list[Annotated[int, Field(ge=1)]] = Field([1, 8, 32], min_length=1)
    # An evaluate stage before this one that asks the same in our own loop: its rows of the same methods stand in the
    # same tables, and a tau at temperature 0 that differs by more than 2% is named. null: none.
    beside: str | None = None

    @model_validator(mode="after")
    def _sized(self) -> VllmEvaluation:
        if len({*self.concurrency}) < len(self.concurrency):
            raise Refused("concurrency", f"{self.concurrency} names a number twice", "give each once")
        for key in {"max_num_seqs", "ahead"} & self.model_fields_set:
            raise Refused(key, "nothing reads it: concurrency says how many requests run together", "leave it out")
        return self

    @property
    def beside_stage(self) -> str | None:
        return self.beside

    @property
    def identity(self) -> JsonObject:
        return super().identity | {"concurrency": self.concurrency, "beside": self.beside}

    def settings(self, model: str, dtype: str, max_length: int, most_pictures: int, *, on_gpu: bool) -> JsonObject:
        known = super().settings(model, dtype, max_length, most_pictures, on_gpu=on_gpu)
        own = {"max_num_seqs": max(self.concurrency), "enable_prefix_caching": False, "disable_log_stats": False}
        return known | own

    def lines(self) -> list[str]:
        beside = "" if self.beside is None else f", beside our own loop's of stage {self.beside}"
        return [f"  decoded by vllm, {', '.join(map(str, self.concurrency))} requests at once{beside}"]

    def check_evaluation(self, stage: Evaluated, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        for name, benchmark in stage.benchmarks.items():
            if benchmark.kind == "tabed":
                raise Refused(f"benchmarks.{name}", "TABED's tables are of our own loop", "leave out engine")
            self.check(target, states=False, aspect=benchmark.data.aspect)
        for name, method in stage.methods.items():
            self.check_method(f"methods.{name}", method, method.section or (None if method.names else drafter))

    def check_method(self, key: str, method: DecodedBy, drafter: DrafterConfig | None) -> None:
        if method.chain is None:
            problem = "vLLM drafts one chain of the likeliest tokens"
            which = "tree" if method.draw == "top-k" else "draw"
            raise Refused(f"{key}.{which}", problem, f"tree: {{kind: chain}}, draw: top-k, or {_OURS}")
        if method.rule.kind != "exact":
            raise Refused(f"{key}.rule", "vLLM accepts by its own rule, which is exact", f"leave it out, or {_OURS}")
        changed = [*method.settings, *(["visual_skip"] if method.visual_skip is not None else [])]
        if changed:
            problem = "vLLM's drafters have no such setting: an exported drafter decodes as it was trained"
            raise Refused(f"{key}.{changed[0]}", problem, f"leave it out, or {_OURS}")
        if drafter is None or isinstance(drafter, NgramConfig | SuffixConfig):
            return
        if reasons := drafter.exports("vllm"):
            raise Refused(f"{key}.drafter", "; ".join(reasons), _OURS)
