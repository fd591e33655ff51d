"""In the place of the package's worker: the same files, answered by transformers' own model and image processor.

A file FOLDER/../fault.json says what goes wrong: {"die": n} ends the process before the n-th job once, {"die": -1}
always; {"longer": true} counts one token more of each picture; {"write": id} answers with this id.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText


class Engine:
    def __init__(self, settings):
        self.config = AutoConfig.from_pretrained(settings["model"])
        sees = hasattr(self.config, "vision_config")
        self.model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(settings["model"])
        self.images = AutoImageProcessor.from_pretrained(settings["model"]) if sees else None
        self.most = settings["max_model_len"]

    def inputs(self, request, tensors):
        """Ids with every placeholder expanded, and pixels as the processor makes them."""
        ids, more = request["ids"], {}
        if request["pictures"]:
            pictures = [Image.fromarray(tensors[name]) for name in request["pictures"]]
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


def main(folder):
    asked, fault_file = json.loads((folder / "engine.json").read_text()), folder.parent / "fault.json"
    engine, layers, count = Engine(asked["settings"]), asked["layers"], 0
    while not (folder / "jobs" / "end").exists() and os.getppid() > 1:
        jobs = sorted(path for path in (folder / "jobs").glob("*.json") if not (folder / "done" / path.name).exists())
        if not jobs:
            time.sleep(0.005)
            continue
        count += 1
        fault = json.loads(fault_file.read_text()) if fault_file.is_file() else {}
        if fault.get("die") in (-1, count):
            fault_file.write_text(json.dumps({"die": -1} if fault["die"] == -1 else {}))
            print("ValueError: no memory for another block")
            print("[shutdown] done")
            os._exit(9)
        job, name = json.loads(jobs[0].read_text()), jobs[0].stem
        beside = jobs[0].with_suffix(".safetensors")
        tensors = load_file(beside) if beside.is_file() else {}
        answers = []
        for number, request in enumerate(job["requests"]):
            ids, more = engine.inputs(request, tensors)
            length = ids.shape[1] + bool(fault.get("longer") and more)
            if layers is None:
                tokens, stop = engine.write(ids, more, request["sampling"])
                tokens = [fault["write"]] if "write" in fault else tokens
                answers.append({"prompt_tokens": length, "tokens": tokens, "stop": stop})
            else:
                kept = f"{name}-{number}.safetensors"
                states = {"hidden_states": engine.states(ids, more, layers).contiguous(), "token_ids": ids[0]}
                save_file(states, folder / "done" / kept)
                answers.append({"prompt_tokens": length, "tokens": [0], "stop": "length", "states": kept})
        aside = folder / "done" / f"{name}.partial"
        aside.write_text(json.dumps({"answers": answers}))
        os.replace(aside, folder / "done" / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
