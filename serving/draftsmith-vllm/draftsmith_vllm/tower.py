"""A patch of vLLM 0.32: LLaVA-1.5 as a target that also hands its draft what its tower saw.

`LlavaForConditionalGeneration._process_image_input` keeps of a picture what the projector made of it, and nothing else
reaches a draft. A draft LVLM's own projector reads the tower. So this class keeps both beside each other,
[P, target + tower], and takes its own part when it embeds; the cache of pictures grows by the tower's width. It does
so beside a draft that reads the tower alone. Can go when a draft model is handed the tower's features, or is trained on
projected ones (`projector_input: projected`).
"""

import torch
from vllm.model_executor.models.llava import LlavaForConditionalGeneration

from . import patches, refusals, section

refusals.check()


class Llava(LlavaForConditionalGeneration):
    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculative = vllm_config.speculative_config
        draft = None if speculative is None else speculative.draft_model_config
        self.hands_tower = draft is not None and section.reads_tower(draft.hf_config)
        if self.hands_tower and vllm_config.model_config.multimodal_config.enable_mm_embeds:
            raise patches.Refused(
                "this draft reads the tower, which pictures that come as embeddings have passed: serve it without "
                "--enable-mm-embeds"
            )

    def _process_image_input(self, image_input):
        if not self.hands_tower:
            return super()._process_image_input(image_input)
        features = self._process_image_pixels(image_input)
        return torch.cat([self.multi_modal_projector(features), features], dim=-1)

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, **named):
        if self.hands_tower and multimodal_embeddings is not None:
            width = self.config.text_config.hidden_size
            multimodal_embeddings = [rows[..., :width] for rows in multimodal_embeddings]
        return super().embed_input_ids(input_ids, multimodal_embeddings, **named)
