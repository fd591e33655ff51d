"""Heads on vLLM's EAGLE path that hold few inputs of a picture, or none: a text-only window, and ViSpec.

Both need patches (`patches.py`, `window.py`), which leave the other inputs out. N inputs, R requests, P tokens of a
picture, Q queries, D width.
"""

from typing import ClassVar

import torch
from torch import nn

from . import patches, section
from .msd import Msd
from .window import Window


class TextWindow(Msd):
    """A head that holds no input of a picture (VATA of Sparrow; HiViS)."""

    drafter = "window"
    supports_multimodal_embeddings = False

    def __init__(self, *, vllm_config, prefix: str = ""):
        patches.check(vllm_config, drops_inputs=True)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draftsmith_window = Window()


class Adaptor(nn.Module):
    """ViSpec's: learned queries attend over the projected features of one picture, [P,D] -> [Q,D]."""

    def __init__(self, config, queries: int):
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        self.q = nn.Parameter(torch.empty(queries, heads, width))
        # Not k_proj and v_proj, as in the file: those names are stacked into a layer's qkv_proj.
        self.keys = nn.Linear(config.hidden_size, heads * width, bias=config.attention_bias)
        self.values = nn.Linear(config.hidden_size, heads * width, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)

    def forward(self, features):
        heads, width = self.q.shape[1:]
        keys, values = (
            project(features).unflatten(-1, (heads, width)).transpose(0, 1) for project in (self.keys, self.values)
        )
        mixed = nn.functional.scaled_dot_product_attention(self.q.transpose(0, 1), keys, values)
        return self.o_proj(mixed.transpose(0, 1).flatten(1))


class Vispec(Msd):
    """ViSpec: all vectors of a picture but one stand in its last inputs, and enter the layer directly; the last one
    joins the states of all text after the picture, by `img_fc`.
    """

    drafter = "vispec"
    renamed: ClassVar = {"imadpt.k_proj.": "imadpt.keys.", "imadpt.v_proj.": "imadpt.values."}

    def __init__(self, *, vllm_config, prefix: str = ""):
        patches.check(vllm_config, drops_inputs=True)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        about, width = section.read(self.config, self.drafter), self.config.hidden_size
        self.model.imadpt = Adaptor(self.config, about.num_queries)
        self.model.img_fc = nn.Linear(2 * width, width)
        self.draftsmith_window = Window(last=about.num_held, fill=self.fill)
        # The global vector of each input of this pass: of fixed place, as compiled passes need.
        self.register_buffer("image", torch.zeros(len(self.of_pictures), width), persistent=False)
        self._first = self._later = None  # of the coming pass [N,D]; of its requests [R,D]
        self._vectors = {}  # name of a request -> number of a picture -> [Q,D]

    def fill(self, runner, names, rows):
        """The vectors in the kept inputs of pictures. Keeps the global vector of each input for `embed_input_ids`."""
        self._vectors = {name: held for name, held in self._vectors.items() if name in runner.requests}
        last, zero = self.draftsmith_window.last, self.image.new_zeros(1, self.image.shape[1])
        vectors, masks, globals_, later = [], [], [], []
        for name, row in zip(names, rows, strict=True):
            held = self._vectors.setdefault(name, {})
            mask, image = torch.zeros(len(row.places), dtype=torch.bool), zero.expand(len(row.places), -1).clone()
            for number, (first, stop) in enumerate(row.runs):
                if row.places[-1] <= first:
                    continue  # this pass ends before the picture, or with its first token as the next one
                if number not in held:  # whole, also where the pass holds a part of it
                    feature = runner.requests[name].mm_features[number]
                    features = runner._get_encoder_output_from_cache(feature.identifier)
                    held[number] = self.model.imadpt(features.to(image.dtype))
                places = torch.from_numpy((row.places >= stop - last) & (row.places < stop))
                if places.any():
                    numbers = torch.from_numpy(row.places)[places] - stop + last
                    vectors.append(held[number][:last][numbers.to(image.device)])
                    mask |= places
                image[torch.from_numpy(row.places >= stop).to(image.device)] = held[number][-1]
            globals_.append(image)
            later.append(image[-1])
            masks.append(mask)
        self._first, self._later = torch.cat(globals_), torch.stack(later)
        return (vectors, torch.cat(masks)) if vectors else None

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, is_multimodal=None):
        if self._later is not None:  # None: vLLM only measures its memory
            given = self._later if self._first is None else self._first
            self.image[: len(given)], self._first = given, None
        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal)

    def entering(self, inputs_embeds, hidden_states):
        joined = self.model.img_fc(torch.cat([hidden_states, self.image[: len(hidden_states)]], -1))
        return super().entering(inputs_embeds, joined)
