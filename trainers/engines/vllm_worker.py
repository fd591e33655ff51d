"""Answers and hidden states by vLLM, job after job. Runs in vLLM's environment: nothing of ours.

    python vllm_worker.py FOLDER

FOLDER/engine.json: `settings` (arguments of vllm.LLM) and `layers` (null, or the layers whose hidden states are
wanted: k is what enters layer k, and the number of layers is what leaves the last one, before the final norm).
FOLDER/jobs/NAME.json: `requests`, each with `ids` (one placeholder for a picture), `pictures` (names of tensors
[H,W,3] uint8 in NAME.safetensors beside it) and `sampling` (arguments of SamplingParams). Jobs are done in the order
of their names; FOLDER/done/NAME.json appears whole: `answers`, each with `prompt_tokens` as the engine counts them,
`tokens`, `stop` (eos or length) and, where layers are wanted, `states`, a file with `hidden_states` [T,layers,D] and
`token_ids` [T]. It ends when FOLDER/jobs/end appears, or when the process that started it does.
"""

import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

# Before vLLM is imported. Its engine has a process of its own: it writes states after `generate` has returned.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
_LOOK_S = 0.005  # between two looks for a job


def open_engine(settings, layers, store):
    """vllm.LLM with these settings; with `layers` it writes hidden states into `store`."""
    from vllm import LLM
    from vllm.platforms import current_platform

    if layers is None:
        return LLM(**settings)
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    if current_platform.device_type == "cpu":
        # The engine's own connector copies by CUDA streams.
        sys.path.insert(0, str(Path(__file__).parent))
        connector |= {"kv_connector": "OnCpu", "kv_connector_module_path": "vllm_connector"}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    # Every place of a prompt is computed, in one piece: what comes from a cache of prefixes has no states.
    whole = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    return LLM(speculative_config=speculative, kv_transfer_config=connector, **(settings | whole))


def work(engine, folder, name, with_states):
    """Do one job and write what came of it."""
    from PIL import Image
    from safetensors.numpy import load_file
    from vllm import SamplingParams

    requests = json.loads((folder / "jobs" / f"{name}.json").read_text())["requests"]
    beside = folder / "jobs" / f"{name}.safetensors"
    tensors = load_file(beside) if beside.is_file() else {}
    prompts = []
    for request in requests:
        prompt = {"prompt_token_ids": request["ids"]}
        if request["pictures"]:
            prompt["multi_modal_data"] = {"image": [Image.fromarray(tensors[p]) for p in request["pictures"]]}
        prompts.append(prompt)
    for request in requests:  # JSON's keys are texts
        bias = request["sampling"].get("logit_bias")
        request["sampling"]["logit_bias"] = bias and {int(token): value for token, value in bias.items()}
    sampling = [SamplingParams(**request["sampling"]) for request in requests]
    answers = []
    for number, answer in enumerate(engine.generate(prompts, sampling, use_tqdm=False)):
        output = answer.outputs[0]
        line = {
            "prompt_tokens": len(answer.prompt_token_ids),
            "tokens": [int(token) for token in output.token_ids],
            "stop": "eos" if output.finish_reason == "stop" else "length",
        }
        if with_states:
            kept = folder / "done" / f"{name}-{number}.safetensors"
            take(answer.kv_transfer_params["hidden_states_path"], kept)
            line["states"] = kept.name
        answers.append(line)
    aside = folder / "done" / f"{name}.partial"
    aside.write_text(json.dumps({"answers": answers}))
    os.replace(aside, folder / "done" / f"{name}.json")


def take(path, destination):
    """Move a file of states once it is written: its writer holds the lock until then."""
    lock = Path(f"{path}.lock")
    if lock.is_file():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        lock.unlink()
    os.replace(path, destination)


def main(folder):
    asked = json.loads((folder / "engine.json").read_text())
    jobs, done, parent = folder / "jobs", folder / "done", os.getppid()
    store = folder / "states"
    store.mkdir(exist_ok=True)
    engine = open_engine(asked["settings"], asked["layers"], store)
    while os.getppid() == parent and not (jobs / "end").exists():
        left = sorted(path.stem for path in jobs.glob("*.json") if not (done / path.name).exists())
        if left:
            work(engine, folder, left[0], asked["layers"] is not None)
        else:
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
