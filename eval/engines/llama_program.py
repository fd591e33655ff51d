"""Serves requests with llama.cpp and writes its tokens and drafted chains: `python llama_program.py FOLDER`.

Runs in a Python with xllamacpp (llama-server in a module) and imports nothing of ours. `asked.json` in the folder:
model, draft (null: plain decoding), type, num_drafted, samples_in_backend, context, max_new_tokens, together, requests
(name, ids). Scores are those that chains are compared with: no flash attention, whose sums have another order, and a
cache in float32. Chains are read from the server's own log, which this process's output is: `log.txt` in the folder.
"""

import collections
import concurrent.futures
import json
import re
import sys
import time
import urllib.request
from pathlib import Path

# A request begins in a slot, or a token is drafted there: its place in the chain, and its id.
_LINE = re.compile(r"launch_slot_: id +(\d+) .* processing task|seq_id (\d+), draft candidate +0, pos +(\d+): +(\d+)")
_END, _ENDS, _WAIT_S = "stop processing", re.compile(r"EOG token += (\d+)"), 30


def serve(job):
    """A server of the job's pair on a free port. Returns it, and its version."""
    import xllamacpp as x

    asked = x.CommonParams()
    asked.model.path, asked.port, asked.n_ctx, asked.n_parallel = job["model"], 0, job["context"], max(job["together"])
    asked.verbosity, asked.warmup, asked.fit_params = 5, False, False
    asked.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked.cache_prompt, asked.cache_ram_mib = False, 0
    draft = asked.speculative.draft
    for one in (asked, draft):
        one.cache_type_k = one.cache_type_v = x.ggml_type.GGML_TYPE_F32
    for threads in (asked.cpuparams, asked.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        threads.n_threads = 1
    if job["draft"] is not None:
        draft.mparams.path, draft.n_max, draft.p_min = job["draft"], job["num_drafted"], 0.0
        draft.backend_sampling = job["samples_in_backend"]
        name = "COMMON_SPECULATIVE_TYPE_" + job["type"].replace("-", "_").upper()
        asked.speculative.types = [getattr(x.common_speculative_type, name)]
    return x.Server(asked), x.__version__


def chains_of(log):
    """By slot, of its requests in their order: the chains that a log names. A chain begins where no place grows."""
    slots, places = collections.defaultdict(list), {}
    for begun, slot, place, token in _LINE.findall(log):
        if begun:
            slots[int(begun)].append([])
            places.pop(int(begun), None)
            continue
        chains = slots[int(slot)][-1]
        if int(place) <= places.get(int(slot), int(place)):
            chains.append([])
        places[int(slot)] = int(place)
        chains[-1].append(int(token))
    return slots


def main(folder):
    job = json.loads((folder / "asked.json").read_text())
    server, version = serve(job)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this machine

    def answer(slot, request):
        body = {"prompt": request["ids"], "n_predict": job["max_new_tokens"], "temperature": 0, "return_tokens": True,
                "cache_prompt": False, "id_slot": slot}  # fmt: skip
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode(), kind)
        with opener.open(asked) as response:
            return json.load(response)

    lines, order = [], []
    for together in job["together"]:
        for start in range(0, len(job["requests"]), together):
            requests = job["requests"][start : start + together]
            with concurrent.futures.ThreadPoolExecutor(together) as pool:
                answers = list(pool.map(answer, range(together), requests))
            for slot, (request, answered) in enumerate(zip(requests, answers, strict=True)):
                lines.append({"name": request["name"], "together": together, "tokens": answered["tokens"],
                              "prompt_tokens": answered["tokens_evaluated"], "chains": None})  # fmt: skip
                order.append(slot)
    deadline = time.monotonic() + _WAIT_S  # its log is written by a thread of its own
    while (log := (folder / "log.txt").read_text("utf-8", "replace")).count(_END) < len(lines):
        if time.monotonic() > deadline:
            raise RuntimeError("the server's log does not say where answers end: another version of llama.cpp")
        time.sleep(0.05)
    if job["draft"] is not None:
        chains = chains_of(log)
        if sorted(order) != sorted(slot for slot, requests in chains.items() for _ in requests):
            raise RuntimeError("the server's log does not say where requests begin: another version of llama.cpp")
        for slot, line in zip(order, lines, strict=True):
            line["chains"] = chains[slot].pop(0)
    with (folder / "answers.jsonl").open("w") as file:
        ends = sorted({int(token) for token in _ENDS.findall(log)})
        for line in ({"xllamacpp": version, "ends": ends}, *lines):
            print(json.dumps(line), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
