"""Answers and hidden states by vLLM's offline API. Runs in vLLM's environment: `python -I vllm_worker.py FOLDER`."""

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from draftsmith_jobs import asked, reason, serve

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


class Batches:
    """Jobs whose requests run together: as one ends, the next one takes its place, of whichever job it is.

    Args:
        engine: vllm.LLM.
        layers: whose hidden states go into files; None: answers alone.
    """

    def __init__(self, engine, folder, layers):
        self.engine, self.done, self.layers = engine, folder / "done", layers
        self.places = {}  # id of a request in the engine -> its job, and its number there
        self.open = {}  # job -> answers by number, as far as they are there, and how many it has

    def begin(self, name, requests, pictures):
        """Hand a job to the engine."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request["ids"]} for request in requests]
        for prompt, shown in zip(prompts, pictures, strict=True):
            prompt |= {"multi_modal_data": {"image": shown}} if shown else {}
        sampling = [SamplingParams(**_sampling(request["sampling"])) for request in requests]
        ids = self.engine.enqueue(prompts, sampling, use_tqdm=False)
        # Inside, an id gets a random end after a dash, which outputs do not have.
        self.places |= {key.partition("-")[0]: (name, number) for number, key in enumerate(ids)}
        self.open[name] = {}, len(requests)

    def step(self):
        """One pass of the engine."""
        finished = {}
        for output in self.engine.llm_engine.step():
            if not output.finished:
                continue
            name, number = self.places.pop(output.request_id)
            answers, count = self.open[name]
            answers[number] = self._line(output, f"{name}-{number}.safetensors")
            if len(answers) == count:
                del self.open[name]
                finished[name] = [answers[number] for number in range(count)]
        return finished

    def _line(self, output, states):
        """A finished request as its job's file has it; `states` is the name of the file of its hidden states."""
        answer = output.outputs[0]
        line = {
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": [int(token) for token in answer.token_ids],
            "stop": reason(answer.finish_reason),
        }
        if self.layers is not None:
            line["states"] = states
            take(output.kv_transfer_params["hidden_states_path"], self.done / states)
        return line


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
    serve(folder, Batches(engine, folder, given["layers"]))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
