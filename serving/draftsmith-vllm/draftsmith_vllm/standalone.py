"""A draft LVLM as it was trained, by vLLM's method `draft_model`: mode M with the pictures, mode T without.

Both need patches (`patches.py`). M's projector reads the target's tower (`tower.py`), or what the target's projector
made of it. In T one newline stands for each picture, whose other tokens are not in the draft's cache (`window.py`).
N inputs, P tokens of a picture, D width.
"""

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM

from . import patches, section, versions
from .lvlm import Projector
from .window import Window

versions.check()


class SeeingDraft(LlamaForCausalLM):
    """Mode M."""

    supports_multimodal_embeddings = True

    def __init__(self, *, vllm_config, prefix: str = ""):
        patches.check(vllm_config)
        about = section.read(vllm_config.model_config.hf_config, "lvlm-m")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        target = vllm_config.speculative_config.target_model_config.hf_config
        width, tower = target.text_config.hidden_size, target.vision_config.hidden_size
        reads_tower = about.projector_input == "tower"
        self.skipped = width if reads_tower else 0  # of [P, target + tower]
        self.multi_modal_projector = Projector(tower if reads_tower else width, self.config.hidden_size)

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, is_multimodal=None):
        """[N] ids to [N,D], with projected pictures at their places."""
        embeds = self.model.embed_input_ids(input_ids)
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            features = torch.cat([rows.flatten(0, -2) for rows in multimodal_embeddings])[:, self.skipped :]
            embeds[is_multimodal] = self.multi_modal_projector(features.to(embeds.dtype))
        return embeds


class TextDraft(LlamaForCausalLM):
    """Mode T."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        patches.check(vllm_config, drops_inputs=True)
        about = section.read(vllm_config.model_config.hf_config, "lvlm-t")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draftsmith_window = Window(newline=about.newline_id)
