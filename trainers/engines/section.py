"""A stage's `engine` section: which program runs the target that answers, or whose hidden states are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...core.fields import Place
from ...core.refused import Refused
from ...core.section import Section

# Targets whose hidden states vLLM hands out; of the others it has no layers to tap.
_TAPPED = ("causal_lm", "llava", "qwen2_5_vl", "qwen3_vl")
# Arguments of vllm.LLM that follow from the recipe.
_OURS = (
    "model", "revision", "dtype", "tensor_parallel_size", "quantization", "gpu_memory_utilization", "max_num_seqs",
    "max_model_len", "seed", "speculative_config", "kv_transfer_config", "limit_mm_per_prompt",
)  # fmt: skip


class TransformersEngine(Section):
    """The target runs in this process, by our own passes."""

    kind: Literal["transformers"] = "transformers"


class VllmEngine(Section):
    """The target runs in vLLM, in a process of its own beside each rank: continuous batching, tensor parallel,
    quantised weights. What it writes differs in the last bits, and its version is part of the shards' identity.
    """

    kind: Literal["vllm"]
    # Interpreter of the environment that vLLM is installed in; null: DRAFTSMITH_VLLM_PYTHON, else this Python.
    python: Place | None = None
    # GPUs that hold the target; above 1 the run has one rank, which starts the engine on all of them.
    tensor_parallel_size: int = Field(1, ge=1)
    # vLLM's name of a quantisation (fp8, awq, ...); null: as the weights' config says.
    quantization: str | None = None
    # Share of a GPU's memory that the engine takes. Beside a head that trains on the same GPU, well below 1.
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    # Requests that it runs together.
    max_num_seqs: int = Field(64, ge=1)
    # Folder of requests and answers on their way; null: in the stage's folder. /dev/shm/NAME keeps them in memory.
    scratch: Place | None = None
    # Batches that it works ahead of the training or the shard that reads its hidden states.
    ahead: int = Field(4, ge=1)
    # Further arguments of vllm.LLM, such as enforce_eager or max_num_batched_tokens.
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What of this section changes the last bits of what it writes."""
        return {"kind": self.kind, "quantization": self.quantization, "options": self.options}

    def check(self, target: Any, *, states: bool, aspect: str) -> None:
        """Refuse what this engine cannot do as our own passes do it.

        Args:
            target: the recipe's section.
            states: hidden states are wanted.
            aspect: of the data section.

        Raises:
            Refused: names the setting, and what can be used in its place.
        """
        own = "engine: {kind: transformers} does"
        if taken := sorted(set(self.options) & set(_OURS)):
            raise Refused(
                f"engine.options.{taken[0]}", "it follows from the recipe", "leave it out, or set its own key"
            )
        if states and target.kind not in _TAPPED:
            known = ", ".join(_TAPPED)
            raise Refused(
                "engine.kind", f"vLLM hands out no hidden states of a {target.kind} (it does of {known})", own
            )
        if aspect is not None and aspect.startswith("anyres"):
            problem = "vLLM cuts a picture into tiles by itself, which may not be those that the data section cuts"
            raise Refused("engine.kind", problem, f"{own}, or set aspect: square or pad")
        if target.tensor_parallel_size > 1 or target.device_map is not None:
            raise Refused("engine.kind", "target.tensor_parallel_size and device_map spread a target of this process",
                          "leave them out, and set engine.tensor_parallel_size")  # fmt: skip


EngineSection = Annotated[TransformersEngine | VllmEngine, Field(discriminator="kind")]
