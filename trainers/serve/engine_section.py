"""vLLM, as a stage's `engine` section names it: in a process of its own, which writes answers and hidden states."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from ...core import ranks
from ...core.errors import Refused, UserError
from ...core.fields import Place
from ...core.files import unwritable
from ...core.json_types import JsonMapping, JsonObject
from ...core.section import FINGERPRINT
from ...core.states import Taps
from ...data.dataset import ConversationDataset
from ...data.states.samples import StatesSamples
from ...eval.engines.program import find_python, version_of
from ...models.decoding.warp import Warp
from ...models.drafters.base import DrafterConfig
from ...models.drafters.lookup import NgramConfig, SuffixConfig
from ...models.formats.target import export_target, unserved_tower, vllm_reads
from ...models.hub import read_config
from ...models.targets.family import Family
from ...models.targets.language import LanguageTarget
from ...models.targets.table import FAMILIES, AnyTarget, language_section
from ..run.context import Context
from .engine_process import EngineProcess
from .served import ServedAnswers, ServedStates, check_layers
from .target_engine import BeginAnswers, StatesElsewhere, TargetEngine

_TARGET = "served-target"
_OURS = "measure it in a stage without engine"
_WHOLE = 8192  # tokens of a pass at least, where prompts are computed in one piece


class VllmEngine(TargetEngine):
    """vLLM: continuous batching, tensor parallel, quantised weights; answers, and states of tapped targets. What it
    writes differs from our own passes' in the last bits, and its version is part of the shards' identity.
    """

    is_served: ClassVar[bool] = True
    # Arguments of vLLM that follow from the recipe.
    ours: ClassVar[tuple[str, ...]] = (
        "model", "revision", "dtype", "tensor_parallel_size", "quantization", "gpu_memory_utilization", "max_num_seqs",
        "max_model_len", "seed", "speculative_config", "kv_transfer_config", "limit_mm_per_prompt",
    )  # fmt: skip

    kind: Literal["vllm"]

    # Interpreter of the environment that it is installed in; null: DRAFTSMITH_VLLM_PYTHON, else this Python.
    python: Place | None = None
    # GPUs of the node that hold the target. A node has one engine, which the node's one rank starts.
    tensor_parallel_size: int = Field(1, ge=1)
    # The engine's name of a quantisation (fp8, awq, ...); null: as the weights' config says.
    quantization: str | None = None
    # Share of a GPU's memory that the engine takes. Beside a head that trains on the same GPU, well below 1.
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    # Requests that it runs together.
    max_num_seqs: int = Field(64, ge=1)
    # Folder of requests and answers on their way; null: in the stage's folder. /dev/shm/NAME keeps them in memory.
    scratch: Place | None = None
    # Batches that it works ahead of the training or the shard that reads its hidden states.
    ahead: int = Field(4, ge=1)
    # Seconds without a sign of it, loading included, after which it is taken for hung and started again.
    timeout_s: float = Field(3600.0, gt=0)
    # Further arguments of the engine, such as enforce_eager or max_num_batched_tokens.
    options: JsonObject = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> JsonObject:
        """A stage's fingerprint holds its identity: a run goes on with another Python, folder or share of memory."""
        return self.identity if info.context == FINGERPRINT else write(self)

    @property
    def identity(self) -> JsonObject:
        """What of this section changes the last bits of what it writes."""
        return {"kind": self.name, "quantization": self.quantization, "options": self.options}

    def settings(self, model: str, dtype: str, max_length: int, most_pictures: int, *, on_gpu: bool) -> JsonObject:
        """Arguments of vLLM. `max_length`: of a prompt and its answer. `most_pictures`: of a request, at most."""
        known: JsonObject = {
            "model": model, "dtype": dtype, "tensor_parallel_size": self.tensor_parallel_size,
            "quantization": self.quantization, "max_num_seqs": self.max_num_seqs, "max_model_len": max_length,
            "seed": 0,
        }  # fmt: skip
        known |= {"limit_mm_per_prompt": {"image": most_pictures}} if most_pictures else {}
        known |= {"gpu_memory_utilization": self.gpu_memory_utilization} if on_gpu else {"enforce_eager": True}
        return known

    def sampling(
        self, warp: Warp, *, seed: int, limit: int, ends: Sequence[int], never: Mapping[int, float]
    ) -> JsonObject:
        """How an answer is drawn, in vLLM's words. `ends`: ids of the end tokens; the answer holds the one that ends
        it. `never`: id -> what is added to its score.
        """
        return {
            "temperature": warp.temperature, "top_k": warp.top_k or -1, "top_p": warp.top_p, "seed": seed % 2**63,
            "max_tokens": limit, "ignore_eos": True, "stop_token_ids": list(ends), "skip_special_tokens": False,
            "logit_bias": dict(never) or None,
        }  # fmt: skip

    def check(self, target: AnyTarget, *, states: bool, aspect: str) -> None:
        target = language_section(target)
        instead, name = "engine: {kind: transformers} does", self.name
        if taken := sorted(set(self.options) & set(self.ours)):
            raise Refused(f"engine.options.{taken[0]}", "it follows from the recipe", "leave it out")
        if states and not (target.family is not None and _taps(target.family)):
            tapped = sorted({family.kind for family in FAMILIES.values() if _taps(family)})
            known = f", only of {', '.join(tapped)}" if tapped else ""
            raise Refused("engine.kind", f"{name} hands out no hidden states of a {target.kind}{known}", instead)
        if target.family is not None and not target.family.agrees_on_pictures:
            problem = f"nobody has compared here how {name} expands the pictures of a {target.kind}"
            raise Refused("engine.kind", problem, instead)
        if target.family is not None and target.family.shares_pictures and aspect.startswith("anyres"):
            problem = f"{name} cuts a picture into tiles by itself, which may not be those that the data section cuts"
            raise Refused("engine.kind", problem, f"{instead}, or set aspect: square or pad")
        if target.tensor_parallel_size > 1 or target.device_map is not None:
            raise Refused("engine.kind", "target.tensor_parallel_size and device_map spread a target of this process",
                          "leave them out, and set engine.tensor_parallel_size")  # fmt: skip

    def installed_identity(self, key: str) -> JsonObject:
        python = find_python(self.python, key=f"{key}.python")
        return self.identity | {"version": version_of("vllm", python)}

    def open_answers(
        self, context: Context, dataset: ConversationDataset, target: LanguageTarget, warp: Warp, ends: Sequence[int]
    ) -> BeginAnswers:
        most_pictures = int(dataset.column("images").max())
        process = context.opened.enter_context(engine_process(
            self, context, key="engine", layers=None, max_length=dataset.config.max_length, most_pictures=most_pictures
        ))  # fmt: skip
        sampling, never = partial(self.sampling, warp), target.decoder.banned
        return ServedAnswers(process, dataset.processor, sampling, ends, never).begin

    def open_states(
        self, context: Context, samples: StatesSamples, target: LanguageTarget, wanted: Taps, *, key: str
    ) -> StatesElsewhere:
        target.check(wanted)
        data = samples.dataset
        most_pictures = int(data.column("images").max())
        # The last layer gives the feature, before its norm.
        layers = tuple(sorted({*wanted.layers, target.decoder.num_layers}))
        if most_pictures:
            source = context.target_source()
            check_layers(self.name, layers, read_config(str(source), key="target", revision=context.target.revision))
        process = context.opened.enter_context(engine_process(
            self, context, key=key, layers=layers, max_length=data.config.max_length, most_pictures=most_pictures
        ))  # fmt: skip
        with context.stop.together():  # and not inside a step, which a stop does not end
            process.start()
        return StatesElsewhere(self.ahead, ServedStates(process, target, data.processor, wanted, layers).begin)


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
        more = {"max_num_seqs": max(self.concurrency), "enable_prefix_caching": False, "disable_log_stats": False}
        return known | more

    def lines(self) -> list[str]:
        beside = "" if self.beside is None else f", beside our own loop's of stage {self.beside}"
        return [f"  decoded by vllm, {', '.join(map(str, self.concurrency))} requests at once{beside}"]

    def check_evaluation(self, stage: Any, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        for name, benchmark in stage.benchmarks.items():
            if benchmark.kind == "tabed":
                raise Refused(f"benchmarks.{name}", "TABED's tables are of our own loop", "leave out engine")
            self.check(target, states=False, aspect=benchmark.data.aspect)
        for name, method in stage.methods.items():
            self.check_method(f"methods.{name}", method, method.section or (None if method.names else drafter))

    def check_method(self, key: str, method: Any, drafter: DrafterConfig | None) -> None:
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


def _taps(family: Family) -> bool:
    """Whether vLLM hands out hidden states of a family's models."""
    return family.agrees_on_pictures and "eagle3" in family.engines.get("vllm", ())


@contextmanager
def engine_process(
    section: VllmEngine,
    context: Context,
    *,
    key: str,
    layers: Sequence[int] | None,
    max_length: int,
    most_pictures: int,
    timed: bool = False,
    more: JsonMapping | None = None,
) -> Iterator[EngineProcess]:
    """The engine of this node, with the stage's target; it is started by whoever first wants something. Raises
    `UserError`: the node has several ranks, each of which would start an engine.

    Args:
        key: of the section in the stage's own.
        layers: whose hidden states are wanted; None: answers alone.
        max_length: tokens of a prompt and its answer, at most.
        most_pictures: of a request.
        timed: how each answer came about is wanted, too.
        more: further arguments of the engine, that the section does not say.
    """
    key = f"stages.{context.name}.{key}"
    if ranks.any_rank(ranks.local_rank() > 0):
        raise UserError(
            "several ranks run on one node, and a node has one engine", key=key,
            hint="start one rank a node; the engine takes the node's GPUs by tensor_parallel_size. Several ranks train "
            "on states that a cache stage of one rank has written",
        )  # fmt: skip
    on_gpu = context.device().type == "cuda"
    with _place(section, context, key) as place:
        # A prompt whose states are wanted is answered by one token.
        length = max_length + 1
        settings = section.settings(_model(context, place), context.target.dtype, length, most_pictures, on_gpu=on_gpu)
        if context.target.path is not None and not Path(context.target_source()).is_dir():
            settings["revision"] = context.target.revision
        settings |= {} if layers is None else {"max_num_batched_tokens": max(_WHOLE, length)}
        with EngineProcess(
            place / f"engine-{ranks.rank()}", settings | section.options | dict(more or {}), layers, timed=timed,
            python=find_python(section.python, key=f"{key}.python"), stop=context.stop, key=key,
            timeout_s=section.timeout_s, say=context.say,
        ) as process:  # fmt: skip
            yield process


@contextmanager
def _place(section: VllmEngine, context: Context, key: str) -> Iterator[Path]:
    """Where this stage's engines work: in its own folder, or in one of `scratch` that is removed at the end."""
    place = context.folder / "cache"
    if section.scratch is not None:  # two stages never share a place in a folder of many runs, whatever they are called
        digest = hashlib.sha256(str(context.folder.resolve()).encode()).hexdigest()[:12]
        place = Path(section.scratch) / f"{context.folder.parent.name}-{context.folder.name}-{digest}"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = unwritable(place, error)
        raise UserError(problem.problem, key=f"{key}.scratch", where=str(place), hint=problem.hint) from error
    try:
        yield place
    finally:
        # Unless an engine of another node works there, or left its logs.
        if section.scratch is not None and not list(place.glob("engine-*")):
            shutil.rmtree(place, ignore_errors=True)


def _model(context: Context, place: Path) -> str:
    """Where the engine reads the target; one that vLLM would not read is written under its names first."""
    source = Path(context.target_source())
    if not source.is_dir():
        return str(source)
    if tower := unserved_tower(read_config(str(source), key="target")):
        raise UserError(
            f"no engine has the target's tower ({tower})", key=f"stages.{context.name}.engine", where=str(source),
            hint="leave engine out, or make the target its language model alone, which export --target-to writes",
        )  # fmt: skip
    if vllm_reads(source):
        return str(source.resolve())
    served = place / _TARGET
    if ranks.is_main():
        shutil.rmtree(served, ignore_errors=True)  # of an earlier start
        export_target(source, served)
    ranks.barrier()
    return str(served.resolve())
