"""Answers and hidden states by vLLM's offline API. Runs in vLLM's environment: `python -I vllm_worker.py FOLDER`."""

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from draftsmith_jobs import asked, serve

# Before vLLM is imported. Its engine has a process of its own: it writes states after `generate` has returned.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


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
    if current_platform.device_type == "cpu":  # the engine's own connector copies by CUDA streams
        connector |= {"kv_connector": "OnCpu", "kv_connector_module_path": "draftsmith_connector"}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    # Every place of a prompt is computed, in one piece: what comes from a cache of prefixes has no states.
    whole = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    return LLM(speculative_config=speculative, kv_transfer_config=connector, **(settings | whole))


def answers(engine, folder, layers, name, requests, pictures):
    """Of one job."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": request["ids"]} for request in requests]
    for prompt, shown in zip(prompts, pictures, strict=True):
        prompt |= {"multi_modal_data": {"image": shown}} if shown else {}
    sampling = [SamplingParams(**_sampling(request["sampling"])) for request in requests]
    lines = []
    for number, answer in enumerate(engine.generate(prompts, sampling, use_tqdm=False)):
        output = answer.outputs[0]
        line = {
            "prompt_tokens": len(answer.prompt_token_ids),
            "tokens": [int(token) for token in output.token_ids],
            "stop": "eos" if output.finish_reason == "stop" else "length",
        }
        if layers is not None:
            line["states"] = f"{name}-{number}.safetensors"
            take(answer.kv_transfer_params["hidden_states_path"], folder / "done" / line["states"])
        lines.append(line)
    return lines


def _sampling(asked):
    """Arguments of SamplingParams; JSON has made texts of the ids."""
    bias = asked.get("logit_bias")
    return asked | {"logit_bias": bias and {int(token): value for token, value in bias.items()}}


def take(path, destination):
    """Move a file of states once it is written: its writer holds the lock until then."""
    lock = Path(f"{path}.lock")
    if lock.is_file():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        lock.unlink()
    os.replace(path, destination)


def main(folder):
    given = asked(folder)
    (folder / "states").mkdir(exist_ok=True)
    engine = open_engine(given["settings"], given["layers"], folder / "states")
    serve(folder, lambda *job: answers(engine, folder, given["layers"], *job))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
