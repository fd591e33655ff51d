"""Sparrow that decodes with pictures (IVSB without VATA): a middle layer's state enters the layer at pictures.

By vLLM's method `eagle3`, which hands over what several layers left: here the middle one, and the last one before the
final norm, which the folder has a copy of. N inputs, D width.
"""

import torch
from torch import nn
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from .msd import Msd


class Middle(Msd, Eagle3LlamaForCausalLM):
    """The proposer asks for one of its own classes of EAGLE-3, of which this one has nothing else."""

    drafter = "middle"

    def __init__(self, *, vllm_config, prefix: str = ""):
        if vllm_config.scheduler_config.enable_chunked_prefill:
            raise ValueError(
                "a prompt that is cut inside a picture ends with an input whose state belongs to the next pass: serve "
                "this drafter with --no-enable-chunked-prefill"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        width = self.config.hidden_size
        self.model.target_norm = nn.RMSNorm(width, eps=self.config.rms_norm_eps)
        self.register_buffer("middle", torch.zeros(len(self.of_pictures), width), persistent=False)

    def combine_hidden_states(self, hidden_states):
        """[N,2D] of the target's layers to its feature [N,D]. Keeps the middle states, each at the input before it."""
        middle, last = hidden_states.chunk(2, -1)
        self.middle[: len(middle) - 1] = middle[1:]
        return self.model.target_norm(last)

    def at_pictures(self, inputs_embeds):
        return self.middle[: len(inputs_embeds)].to(inputs_embeds.dtype)
