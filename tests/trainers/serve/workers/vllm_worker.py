"""In the place of the package's worker: the same files, answered by transformers' own model and image processor.

A file FOLDER/../fault.json says what goes wrong: {"die": n} ends the process before the n-th job once, {"die": -1}
always and at once; {"longer": true} counts one token more of each prompt with pictures; {"write": id} answers with
this id.
"""

import json
import os
import sys
from pathlib import Path

# The package's own file, which its workers import from their folder.
sys.path += [str(Path(__file__).parents[4] / "trainers" / "serve" / "workers"), str(Path(__file__).parent)]
from draftsmith_jobs import InTurn, asked, prompt_hash, serve


def die():
    print("ValueError: no memory for another block")
    print("[shutdown] done")
    os._exit(9)


def main(folder):
    given, fault_file = asked(folder), folder.parent / "fault.json"
    if given["timed"]:
        import timed_answers

        timed_answers.main(folder)
        return
    fault = json.loads(fault_file.read_text()) if fault_file.is_file() else {}
    if fault.get("die") == -1:
        die()
    from transformers_engine import Engine  # and not before: that takes seconds

    engine, layers, count = Engine(given["settings"]), given["layers"], 0

    def answer(name, requests, pictures):
        nonlocal count
        from safetensors.torch import save_file

        count += 1
        if fault.get("die") == count:
            fault_file.write_text("{}")
            die()
        answers = []
        for number, request in enumerate(requests):
            ids, more = engine.inputs(request, pictures[number])
            length = ids.shape[1] + bool(fault.get("longer") and more)
            line = {"prompt_tokens": length, "prompt": prompt_hash(number, ids[0])}
            if layers is None:
                tokens, stop = engine.write(ids, more, request["sampling"])
                tokens = [fault["write"]] if "write" in fault else tokens
                answers.append(line | {"tokens": tokens, "stop": stop})
            else:
                states = {"hidden_states": engine.states(ids, more, layers).contiguous(), "token_ids": ids[0]}
                save_file(states, folder / "done" / f"{name}-{number}.safetensors")
                answers.append(line | {"tokens": [0], "stop": "length"})
        return answers

    serve(folder, InTurn(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
