"""The settings that serving engines share, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer

from ...core.fields import Place
from ...core.json_types import JsonObject
from ...core.refused import Refused
from ...core.section import FINGERPRINT
from ...models.decoding.warp import Warp
from ...models.families.generators import AnyTarget, language_section
from ...models.families.table import FAMILIES
from ...models.targets.family import Family
from .target_engine import TargetEngine


class ServedSettings(TargetEngine):
    """A serving engine in a process of its own beside each rank. What it writes differs in the last bits, and its
    version is part of the shards' identity.
    """

    is_served: ClassVar[bool] = True
    # The engine whose classes hand out states of targets; "": none does.
    states_of: ClassVar[str] = ""
    # Arguments of the engine that follow from the recipe.
    ours: ClassVar[tuple[str, ...]] = ()

    # Interpreter of the environment that it is installed in; null: DRAFTSMITH_VLLM_PYTHON (vLLM), else this Python.
    python: Place | None = None
    # GPUs that hold the target; above 1 the run has one rank, which starts the engine on all of them.
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
        """Arguments of the engine.

        Args:
            max_length: tokens of a prompt and its answer, at most.
            most_pictures: of a request.
        """
        raise NotImplementedError

    def sampling(
        self, warp: Warp, *, seed: int, limit: int, ends: Sequence[int], never: Mapping[int, float]
    ) -> JsonObject:
        """How an answer is drawn, in the engine's words.

        Args:
            ends: ids of the end tokens; the answer holds the one that ends it.
            never: id -> what is added to its score.
        """
        raise NotImplementedError

    def _taps(self, family: Family) -> bool:
        """Whether the engine hands out hidden states of its models."""
        return family.agrees_on_pictures and "eagle3" in family.engines.get(self.states_of, ())

    def check(self, target: AnyTarget, *, states: bool, aspect: str) -> None:
        target = language_section(target)
        own, name = "engine: {kind: transformers} does", self.name
        if taken := sorted(set(self.options) & set(self.ours)):
            raise Refused(f"engine.options.{taken[0]}", "it follows from the recipe", "leave it out")
        if states and not (target.family is not None and self._taps(target.family)):
            tapped = sorted({family.kind for family in FAMILIES.values() if self._taps(family)})
            known = f", only of {', '.join(tapped)}" if tapped else ""
            raise Refused("engine.kind", f"{name} hands out no hidden states of a {target.kind}{known}", own)
        if target.family is not None and not target.family.agrees_on_pictures:
            problem = f"nobody has compared here how {name} expands the pictures of a {target.kind}"
            raise Refused("engine.kind", problem, own)
        if target.family is not None and target.family.shares_pictures and aspect.startswith("anyres"):
            problem = f"{name} cuts a picture into tiles by itself, which may not be those that the data section cuts"
            raise Refused("engine.kind", problem, f"{own}, or set aspect: square or pad")
        if target.tensor_parallel_size > 1 or target.device_map is not None:
            raise Refused("engine.kind", "target.tensor_parallel_size and device_map spread a target of this process",
                          "leave them out, and set engine.tensor_parallel_size")  # fmt: skip
