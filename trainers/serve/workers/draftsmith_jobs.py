"""The files between draftsmith and an engine, as the engine's program sees them. Imports nothing of ours.

FOLDER/engine.json: `settings` (arguments of the engine), `layers` (null, or the layers whose hidden states are wanted:
k is what enters layer k, and the number of layers is what leaves the last one, before the final norm) and `timed`.
FOLDER/ready appears once the engine is loaded.
FOLDER/jobs/NAME.json: `requests`, each with `ids` (one placeholder for a picture), `pictures` (names of tensors
[H,W,3] uint8 in NAME.safetensors beside it) and `sampling`; of timed jobs `together`, how many of its requests may run
at once. Jobs are begun in the order of their names.
FOLDER/done/NAME.json appears whole: `answers`, each with `prompt_tokens` as the engine counts them, `prompt`
(`prompt_hash` of the engine's own ids, so that no answer is taken for another's), `tokens` and `stop`
(eos, length, or what the engine calls another reason, which is refused); of timed jobs `timing` (`Timing` in
engine_answers.py). Where layers are wanted, NAME-NUMBER.safetensors lies beside it for each answer, with
`hidden_states` [T,layers,D] and `token_ids` [T]. A program with long jobs touches FOLDER/alive in between. It ends
when FOLDER/jobs/end appears.
"""

import hashlib
import json
import os
import time

_LOOK_S = 0.005  # between two looks for a job


def asked(folder):
    """What engine.json says."""
    return json.loads((folder / "engine.json").read_text())


def prompt_hash(number, ids):
    """Whose answer it is: the request's number in its job, and the prompt's ids with every placeholder in full."""
    return hashlib.sha256(json.dumps([number, [int(token) for token in ids]]).encode()).hexdigest()


class InTurn:
    """Jobs one after the other. `answer`: (name of a job, requests, pictures of each request) -> its answers."""

    def __init__(self, answer):
        self.answer, self.jobs = answer, []

    def begin(self, *job):
        self.jobs.append(job)

    def step(self):
        job = self.jobs.pop(0)
        return {job[0]: self.answer(*job)}


def serve(folder, engine):
    """Do jobs until the end. `engine`: `begin(name, requests, pictures of each request)` takes a job on; `step()` works
    on what was taken on, and returns the answers of each job that is finished, by name.
    """
    jobs, done, last, working = folder / "jobs", folder / "done", "", set()
    (folder / "ready").touch()
    while not (jobs / "end").exists():
        # Names rise. Whoever reads an answer removes it and then the job, which must not be done again in between.
        for path in sorted(path for path in jobs.glob("*.json") if path.stem > last):
            last = path.stem
            if not (done / path.name).exists():  # by an engine before this one
                engine.begin(last, *_read(path))
                working.add(last)
        if not working:
            time.sleep(_LOOK_S)
            continue
        for name, answers in engine.step().items():
            aside = done / f"{name}.partial"
            aside.write_text(json.dumps({"answers": answers}))
            os.replace(aside, done / f"{name}.json")
            working.remove(name)


def _read(path):
    """The requests of a job, and each one's pictures."""
    from PIL import Image
    from safetensors.numpy import load_file

    requests, beside = json.loads(path.read_text())["requests"], path.with_suffix(".safetensors")
    tensors = load_file(beside) if beside.is_file() else {}
    return requests, [[Image.fromarray(tensors[key]) for key in request["pictures"]] for request in requests]
