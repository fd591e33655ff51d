"""Serves requests with llama.cpp and writes its tokens and drafted chains: `python llama_program.py FOLDER`.

Runs in a Python with xllamacpp (llama-server in a module) and imports nothing of ours. `asked.json` in the folder is
`vllm_program.py`'s: model, speculative (null: plain decoding), engine (max_model_len), together, max_new_tokens,
requests. Scores are those that chains are compared with: no flash attention, whose sums have another order, and a cache
in float32. Chains are read from the server's own log, which this process's output is: `log.txt` in the folder.
"""

import collections
import concurrent.futures
import json
import re
import sys
import time
import urllib.request
from pathlib import Path

TRIED = "2026.10.11549"  # llama.cpp's b11549
# A request begins in a slot, or a token is drafted there: its place in the chain, and its id.
_LINE = re.compile(r"launch_slot_: id +(\d+) .* processing task|seq_id (\d+), draft candidate +0, pos +(\d+): +(\d+)")
_END, _ENDS, _WAIT_S = "stop processing", re.compile(r"EOG token += (\d+)"), 30


def serve(job):
    """A server of the job's pair on a free port."""
    import xllamacpp as x

    assert x.__version__ == TRIED, f"xllamacpp {x.__version__}, and chains are read in the log of {TRIED}"
    asked, most, speculative = x.CommonParams(), max(job["together"]), job["speculative"]
    asked.model.path, asked.port, asked.n_parallel = job["model"], 0, most
    asked.n_ctx = most * job["engine"]["max_model_len"]
    asked.verbosity, asked.warmup, asked.fit_params = 5, False, False
    asked.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked.cache_prompt, asked.cache_ram_mib = False, 0
    drafting = asked.speculative.draft
    for one in (asked, drafting):
        one.cache_type_k = one.cache_type_v = x.ggml_type.GGML_TYPE_F32
        one.cpuparams.n_threads = one.cpuparams_batch.n_threads = 1
    if speculative is not None:
        drafting.mparams.path = speculative["model"] + "/draft.gguf"
        drafting.n_max = speculative["num_speculative_tokens"]
        # On by default; with several requests EAGLE-3 then proposes the last one's tokens to all (b11549).
        drafting.backend_sampling = False
        name = "COMMON_SPECULATIVE_TYPE_" + speculative["method"].replace("-", "_").upper()
        asked.speculative.types = [getattr(x.common_speculative_type, name)]
    return x.Server(asked)


def chains_of(log):
    """By slot, of its requests in their order: the chains that a log names. A chain begins where no place grows."""
    slots: dict[int, list] = collections.defaultdict(list)
    places: dict[int, int] = {}
    for begun, slot, place, token in _LINE.findall(log):
        if begun:
            slots[int(begun)].append([])
            places[int(begun)] = -1
            continue
        chains = slots[int(slot)][-1]
        if not chains or int(place) <= places[int(slot)]:
            chains.append([])
        places[int(slot)] = int(place)
        chains[-1].append(int(token))
    return slots


def main(folder):
    job = json.loads((folder / "asked.json").read_text())
    server = serve(job)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this machine

    def answer(slot, request):
        body = {"prompt": request["ids"], "n_predict": job["max_new_tokens"], "temperature": 0, "return_tokens": True,
                "cache_prompt": False, "id_slot": slot}  # fmt: skip
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode(), kind)
        with opener.open(asked) as response:
            answered = json.load(response)
        return {"name": request["name"], "prompt_tokens": answered["tokens_evaluated"], "tokens": answered["tokens"],
                "chains": None}  # fmt: skip

    slots: list[int] = []
    lines: list[dict] = []
    for together in job["together"]:
        for start in range(0, len(job["requests"]), together):
            requests = job["requests"][start : start + together]
            with concurrent.futures.ThreadPoolExecutor(together) as pool:
                lines += [line | {"together": together} for line in pool.map(answer, range(together), requests)]
            slots += range(len(requests))
    deadline = time.monotonic() + _WAIT_S  # its log is written by a thread of its own
    while (log := (folder / "log.txt").read_text("utf-8", "replace")).count(_END) < len(lines):
        assert time.monotonic() < deadline, "the server's log does not say where answers end: another llama.cpp"
        time.sleep(0.05)
    if job["speculative"] is not None:
        chains = chains_of(log)
        for slot, line in zip(slots, lines, strict=True):
            line["chains"] = chains[slot].pop(0)
        assert not any(chains.values()), "the server's log names more requests than were asked: another llama.cpp"
    ends = sorted({int(token) for token in _ENDS.findall(log)})
    about = {"engine": "llama.cpp", "version": TRIED, "device": "cpu", "runner": "without flash attention"}
    with (folder / "answers.jsonl").open("w") as file:
        for line in (about | {"ends": ends}, *lines):
            print(json.dumps(line), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
