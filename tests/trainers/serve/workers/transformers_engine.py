"""A target by transformers' own classes: what the worker of the tests answers with."""

import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText


class Engine:
    def __init__(self, settings):
        self.config = AutoConfig.from_pretrained(settings["model"])
        sees = hasattr(self.config, "vision_config")
        self.model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(settings["model"])
        self.images = AutoImageProcessor.from_pretrained(settings["model"]) if sees else None
        self.most = settings["max_model_len"]

    def inputs(self, request, pictures):
        """Ids with every placeholder expanded, and pixels as the processor makes them."""
        ids, more = request["ids"], {}
        if pictures:
            more["pixel_values"] = self.images(pictures, return_tensors="pt")["pixel_values"]
            count = (self.config.vision_config.image_size // self.config.vision_config.patch_size) ** 2
            image = self.config.image_token_id
            ids = [token for one in ids for token in ([image] * count if one == image else [one])]
        assert len(ids) < self.most
        return torch.tensor([ids]), more

    def states(self, ids, more, layers):
        """[T,layers,D] of what enters each layer, and what leaves the last one before the final norm."""
        decoder = self.model.model.language_model if self.images else self.model.model
        entered = {}
        hooks = [
            layer.register_forward_pre_hook(lambda _, given, n=number: entered.update({n: given[0][0]}))
            for number, layer in enumerate([*decoder.layers, decoder.norm])
        ]
        with torch.no_grad():
            self.model(input_ids=ids, **more)
        for hook in hooks:
            hook.remove()
        return torch.stack([entered[layer] for layer in layers], 1)

    def write(self, ids, more, sampling):
        assert sampling["temperature"] == 0
        banned = [int(token) for token in sampling["logit_bias"] or {}]
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **more, do_sample=False,
            max_new_tokens=sampling["max_tokens"], eos_token_id=sampling["stop_token_ids"],
            suppress_tokens=banned or None,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        return out, "eos" if out[-1] in sampling["stop_token_ids"] else "length"
