"""Timed jobs in the place of the package's worker: answers and metrics made of the prompt's ids alone.

Plain passes take 10 ms of made-up time for each request at once. A drafter's passes take 11 ms and, by turns, draft
nothing, accept none and accept all. Beside the stage's folder, asked.jsonl gets a line for each start and each job,
and a file fault.json says what goes wrong: {"die": n, "of": method} ends this drafter's process before its job of n at
once, the first time, or with "always" each time; {"wrong": {...}} changes the metrics of its first answer with drafts.
"""

import json
import os
from pathlib import Path

from draftsmith_jobs import InTurn, asked, prompt_hash, serve


def passes(count, gamma, seed):
    """(drafted, accepted, emitted) after the prompt's token until `count` are emitted; the last is cut."""
    found = []
    while count > 0:
        drafted, accepted = ((0, 0), (gamma, 0), (gamma, gamma))[(seed + len(found)) % 3] if gamma else (0, 0)
        found.append((drafted, accepted, min(accepted + 1, count)))
        count -= accepted + 1
    return found


def answer(number, request, gamma, image):
    ids, most = request["ids"], request["sampling"]["max_tokens"]
    assert not request["sampling"]["logit_bias"], "vLLM takes none beside a drafter"
    whole = [token for one in ids for token in [one] * (9 if one == image else 1)]  # nine of a picture
    made = passes(most - 1, gamma, sum(ids))
    decode_s = len(made) * (0.011 if gamma else 0.01) * request["together"]
    return {
        "prompt_tokens": len(whole),
        "prompt": prompt_hash(number, whole),
        "tokens": [290 + (sum(ids) + 7 * place) % 50 for place in range(most)],
        "stop": "length",
        "timing": {
            "began_s": 0.001 * number,
            "ended_s": 0.001 * number + 0.02 + decode_s,
            "first_s": 0.02,
            "decode_s": decode_s,
            "passes": [1, *(emitted for *_, emitted in made)],
            "drafted": [drafted for drafted, *_ in made if drafted],
            "accepted": [accepted for drafted, accepted, _ in made if drafted],
        },
    }


def main(folder):
    beside, settings = folder.parents[2], asked(folder)["settings"]
    fault_file, log = beside / "fault.json", beside / "asked.jsonl"

    def told(line):
        with log.open("a") as file:
            print(json.dumps(line), file=file)

    def fault():
        return json.loads(fault_file.read_text()) if fault_file.is_file() else {}

    def die():
        print("RuntimeError: the engine core ran out of luck")
        os._exit(9)

    speculative = settings.get("speculative_config")
    method = speculative["method"] if speculative else None
    told({"start": settings})
    image = json.loads((Path(settings["model"]) / "config.json").read_text()).get("image_token_index")

    def do(name, requests, pictures):
        if fault().get("die") == requests[0]["together"] and fault()["of"] == method:
            if not fault().get("always"):
                fault_file.write_text("{}")
            die()
        seeds = [request["sampling"]["seed"] for request in requests]
        told({"job": len(requests), "together": requests[0]["together"], "pictures": [len(p) for p in pictures],
              "seeds": seeds})  # fmt: skip
        gamma = speculative["num_speculative_tokens"] if speculative else 0
        answers = [answer(place, request, gamma, image) for place, request in enumerate(requests)]
        if speculative and "wrong" in fault():
            answers[0]["timing"] |= fault()["wrong"]
        return answers

    serve(folder, InTurn(do))
