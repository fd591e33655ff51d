"""MSD (Speculative Decoding Reimagined for Multimodal Large Language Models, arXiv 2505.14260) on vLLM's EAGLE path.

The engine pairs token j + 1 with the target's state of token j, as MSD does. Where token j + 1 is of a picture, its
projected feature enters the layer directly, in place of fc's output. N inputs, D width.
"""

from typing import ClassVar

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsEagle
from vllm.model_executor.models.llama_eagle import LlamaDecoderLayer
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from . import refusals, section

refusals.check()

_STACKED = {
    ".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k"), ".v_proj": (".qkv_proj", "v"),
    ".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1),
}  # fmt: skip


class _Layer(nn.Module):
    """Embedding (the target's), fc, and one Llama layer, mostly without its first norm."""

    def __init__(self, vllm_config, config, about):
        super().__init__()
        width = config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, width)
        self.fc = ReplicatedLinear(
            2 * width, width, bias=about.fc_bias, return_bias=False, params_dtype=vllm_config.model_config.dtype
        )
        # Attention layers are known by number: the target's come first.
        number = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.layers = nn.ModuleList([
            LlamaDecoderLayer(vllm_config, not about.input_norm, prefix=f"model.layers.{number}", config=config)
        ])  # fmt: skip


class Msd(nn.Module, SupportsEagle):
    """The embedding and the LM head are the target's, which vLLM puts in their places."""

    drafter = "msd"
    renamed: ClassVar[dict[str, str]] = {}  # parts of tensors' names, for names that would be stacked
    supports_multimodal_embeddings = True
    has_own_embed_tokens = has_own_lm_head = False

    def __init__(self, *, vllm_config, prefix: str = ""):
        nn.Module.__init__(self)  # not of the class that `Middle` puts behind it
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        self.model = _Layer(vllm_config, self.config, section.read(self.config, self.drafter))
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        count = vllm_config.scheduler_config.max_num_batched_tokens + vllm_config.scheduler_config.max_num_seqs
        # Which inputs of this pass are of pictures: a buffer of fixed place, as compiled passes need.
        self.register_buffer("of_pictures", torch.zeros(count, 1, dtype=torch.bool), persistent=False)

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, is_multimodal=None):
        """[N] ids to [N,D], with projected pictures at their places."""
        count, embeds = len(input_ids), self.model.embed_tokens(input_ids)
        self.of_pictures[:count] = False
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            embeds[is_multimodal] = torch.cat([rows.flatten(0, -2) for rows in multimodal_embeddings]).to(embeds.dtype)
            self.of_pictures[:count, 0] = is_multimodal.to(embeds.device)
        return embeds

    def forward(self, input_ids, positions, hidden_states, inputs_embeds=None):
        """States [N,D], twice: for the scores, and for the next step."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        hidden, residual = self.model.layers[0](positions, self.entering(inputs_embeds, hidden_states), None)
        hidden = hidden + residual
        return hidden, hidden

    def entering(self, inputs_embeds, hidden_states):
        """The layer's input [N,D]."""
        joined = self.model.fc(torch.cat([inputs_embeds, hidden_states], -1))
        return torch.where(self.of_pictures[: len(joined)], self.at_pictures(inputs_embeds), joined)

    def at_pictures(self, inputs_embeds):
        """The layer's input [N,D] where the next token is of a picture."""
        return inputs_embeds

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights):
        mapper = WeightsMapper(
            orig_to_new_substr=self.renamed, orig_to_new_prefix={"": "model."}, orig_to_new_stacked=_STACKED
        )
        parameters = [name for name, _ in self.model.named_parameters()]
        for ours, theirs in self.renamed.items():
            parameters = [name.replace(theirs, ours) for name in parameters]
        weights = refusals.every(weights, parameters, without=("embed_tokens.",))  # the target's
        return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)


class Middle(Msd, Eagle3LlamaForCausalLM):
    """Sparrow that decodes with pictures (IVSB without VATA): a middle layer's state enters the layer at pictures.

    By vLLM's method `eagle3`, which hands over what several layers left: here the middle one, and the last one before
    the final norm, which the folder has a copy of. The proposer asks for one of its own classes of EAGLE-3, of which
    this one has nothing else.
    """

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
