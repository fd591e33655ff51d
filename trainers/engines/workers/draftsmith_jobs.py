"""The files between draftsmith and an engine, as the engine's program sees them. Imports nothing of ours.

FOLDER/engine.json: `settings` (arguments of the engine) and `layers` (null, or the layers whose hidden states are
wanted: k is what enters layer k, and the number of layers is what leaves the last one, before the final norm).
FOLDER/jobs/NAME.json: `requests`, each with `ids` (one placeholder for a picture), `pictures` (names of tensors
[H,W,3] uint8 in NAME.safetensors beside it) and `sampling`. Jobs are done in the order of their names.
FOLDER/done/NAME.json appears whole: `answers`, each with `prompt_tokens` as the engine counts them, `tokens`, `stop`
(eos or length) and, where layers are wanted, `states`, a file beside it with `hidden_states` [T,layers,D] and
`token_ids` [T]. The program ends when FOLDER/jobs/end appears, or when the process that started it does.
"""

import json
import os
import time

_LOOK_S = 0.005  # between two looks for a job


def asked(folder):
    """What engine.json says."""
    return json.loads((folder / "engine.json").read_text())


def serve(folder, answer):
    """Do jobs until the end.

    Args:
        answer: (name of the job, requests, pictures of each request) -> its answers.
    """
    from PIL import Image
    from safetensors.numpy import load_file

    jobs, done, parent = folder / "jobs", folder / "done", os.getppid()
    while os.getppid() == parent and not (jobs / "end").exists():
        left = sorted(path for path in jobs.glob("*.json") if not (done / path.name).exists())
        if not left:
            time.sleep(_LOOK_S)
            continue
        name, requests = left[0].stem, json.loads(left[0].read_text())["requests"]
        beside = left[0].with_suffix(".safetensors")
        tensors = load_file(beside) if beside.is_file() else {}
        pictures = [[Image.fromarray(tensors[key]) for key in request["pictures"]] for request in requests]
        aside = done / f"{name}.partial"
        aside.write_text(json.dumps({"answers": answer(name, requests, pictures)}))
        os.replace(aside, done / f"{name}.json")
