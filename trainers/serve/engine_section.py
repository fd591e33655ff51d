"""The serving engines, as a stage's `engine` section names them: in a process of their own beside each rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

from ...core.json_types import JsonObject
from ...core.states import Taps
from ...data.families.processor import Processor
from ...data.states.samples import StatesSamples
from ...eval.engines.program import find_python, version_of
from ...models.decoding.warp import Warp
from ...models.hub import read_config
from ...models.targets.language import LanguageTarget
from ..run.context import Context
from .engine_settings import ServedSettings
from .rank_engine import engine_process
from .served import ServedAnswers, ServedStates, check_layers


class ServedEngine(ServedSettings):
    """A serving engine at work."""

    def installed_identity(self, key: str) -> JsonObject:
        python = find_python(self.python, self.name, key=f"{key}.python")
        return self.identity | {"version": version_of(self.name, python)}

    def side_by_side(self, batch_size: int) -> int:
        return self.max_num_seqs

    def open_answers(
        self,
        context: Context,
        processor: Processor,
        warp: Warp,
        ends: Sequence[int],
        never: Collection[int],
        *,
        max_length: int,
        most_pictures: int,
    ) -> ServedAnswers:
        process = context.opened.enter_context(engine_process(
            self, context, key="engine", layers=None, max_length=max_length, most_pictures=most_pictures
        ))  # fmt: skip
        return ServedAnswers(self, process, processor, warp, ends, never)

    def open_states(
        self,
        context: Context,
        samples: StatesSamples,
        target: LanguageTarget,
        processor: Processor,
        wanted: Taps,
        *,
        key: str,
    ) -> ServedStates:
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
        return ServedStates(process, target, processor, wanted, layers, self.ahead)


class VllmEngine(ServedEngine):
    """vLLM: continuous batching, tensor parallel, quantised weights; answers, and states of tapped targets."""

    states_of: ClassVar[str] = "vllm"
    ours: ClassVar[tuple[str, ...]] = (
        "model", "revision", "dtype", "tensor_parallel_size", "quantization", "gpu_memory_utilization", "max_num_seqs",
        "max_model_len", "seed", "speculative_config", "kv_transfer_config", "limit_mm_per_prompt",
    )  # fmt: skip

    kind: Literal["vllm"]

    def settings(self, model: str, dtype: str, max_length: int, most_pictures: int, *, on_gpu: bool) -> JsonObject:
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
        return {
            "temperature": warp.temperature, "top_k": warp.top_k or -1, "top_p": warp.top_p, "seed": seed % 2**63,
            "max_tokens": limit, "ignore_eos": True, "stop_token_ids": list(ends), "skip_special_tokens": False,
            "logit_bias": dict(never) or None,
        }  # fmt: skip


class SglangEngine(ServedEngine):
    """SGLang: answers alone. Written by reading its documentation, and not run."""

    ours: ClassVar[tuple[str, ...]] = (
        "model_path", "revision", "dtype", "tp_size", "quantization", "mem_fraction_static", "max_running_requests",
        "context_length", "random_seed",
    )  # fmt: skip

    kind: Literal["sglang"]

    def settings(self, model: str, dtype: str, max_length: int, most_pictures: int, *, on_gpu: bool) -> JsonObject:
        known: JsonObject = {
            "model_path": model, "dtype": dtype, "tp_size": self.tensor_parallel_size,
            "quantization": self.quantization, "max_running_requests": self.max_num_seqs,
            "context_length": max_length, "random_seed": 0,
        }  # fmt: skip
        return known | ({"mem_fraction_static": self.gpu_memory_utilization} if on_gpu else {"device": "cpu"})

    def sampling(
        self, warp: Warp, *, seed: int, limit: int, ends: Sequence[int], never: Mapping[int, float]
    ) -> JsonObject:
        return {
            "temperature": warp.temperature, "top_k": warp.top_k or -1, "top_p": warp.top_p, "sampling_seed": seed,
            "max_new_tokens": limit, "ignore_eos": True, "stop_token_ids": list(ends), "skip_special_tokens": False,
            "logit_bias": {str(token): value for token, value in never.items()} or None,
        }  # fmt: skip
