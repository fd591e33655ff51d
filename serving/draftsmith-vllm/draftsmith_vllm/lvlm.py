"""Draft LVLMs in vLLM: a Llama with a projector of its own on what the target makes of pictures.

`Lvlm` runs on the EAGLE path, which hands over ids one further on, so the draft never sees a prompt's first token: it
is trained without (`first_token: false`), on the target's projected features. Positions are relative, so that they
count from one changes nothing. The path's states are not read, and are handed back as they came.

`SeeingDraft` and `TextDraft` are drafts as they were trained, by the method `draft_model`: mode M with the pictures,
mode T without. Both need patches (`patches.py`). M's projector reads the target's tower (`tower.py`), or what the
target's projector made of it. In T one newline stands for each picture, whose other tokens are not in the draft's cache
(`window.py`). N inputs, P tokens of a picture, E the target's width, D the draft's.
"""

from copy import copy

import torch
from torch import nn
from transformers import LlamaConfig
from vllm.model_executor.models.interfaces import SupportsEagle
from vllm.model_executor.models.llama import LlamaForCausalLM

from . import patches, refusals, section
from .window import Window

refusals.check()


class Projector(nn.Module):
    """[P,E] -> [P,D]: linear, GELU, linear, as LLaVA's."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, features):
        return self.linear_2(nn.functional.gelu(self.linear_1(features)))


class _Draft(LlamaForCausalLM):
    """A Llama whose folder has all of its weights."""

    def load_weights(self, weights):
        return super().load_weights(refusals.every(weights, [name for name, _ in self.named_parameters()]))


class _Sees(_Draft):
    """One with a projector of its own."""

    supports_multimodal_embeddings = True
    skipped = 0  # of the width of features

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, is_multimodal=None):
        """[N] ids to [N,D], with projected pictures at their places."""
        embeds = self.model.embed_input_ids(input_ids)
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            features = torch.cat([rows.flatten(0, -2) for rows in multimodal_embeddings])[:, self.skipped :]
            embeds[is_multimodal] = self.multi_modal_projector(features.to(embeds.dtype))
        return embeds


class Lvlm(_Sees, SupportsEagle):
    """The embedding and the LM head are its own."""

    has_own_embed_tokens = has_own_lm_head = True

    def __init__(self, *, vllm_config, prefix: str = ""):
        given = vllm_config.speculative_config.draft_model_config
        about = section.read(given.hf_config, "lvlm")
        draft = copy(vllm_config)
        draft.model_config = copy(given)
        # The outer keys give the engine's buffers the target's width; the Llama is the section's.
        draft.model_config.hf_config = LlamaConfig(**about.language_model)
        super().__init__(vllm_config=draft, prefix="draft_model")
        self.multi_modal_projector = Projector(given.get_hidden_size(), self.config.hidden_size)

    def forward(self, input_ids, positions, hidden_states, inputs_embeds=None):
        """States [N,D] for the scores, and [N,E] for the next step, which does not read them."""
        return self.model(input_ids, positions, None, inputs_embeds=inputs_embeds), hidden_states


class SeeingDraft(_Sees):
    """Mode M."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        patches.check(vllm_config)
        about = section.read(vllm_config.model_config.hf_config, "lvlm-m")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        target = vllm_config.speculative_config.target_model_config.hf_config
        width, tower = target.text_config.hidden_size, target.vision_config.hidden_size
        reads_tower = about.projector_input == "tower"
        self.skipped = width if reads_tower else 0  # of [P, target + tower]
        self.multi_modal_projector = Projector(tower if reads_tower else width, self.config.hidden_size)


class TextDraft(_Draft):
    """Mode T."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        patches.check(vllm_config, drops_inputs=True)
        about = section.read(vllm_config.model_config.hf_config, "lvlm-t")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draftsmith_window = Window(newline=about.newline_id)
