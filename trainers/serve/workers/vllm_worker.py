"""Answers and hidden states by vLLM's offline API. Runs in vLLM's environment: `python -I vllm_worker.py FOLDER`."""

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from draftsmith_jobs import InTurn, asked, prompt_hash, serve

# Before vLLM is imported. Its engine has a process of its own, as in a server: it writes states after `generate` has
# returned.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def open_engine(settings, layers, store):
    """vllm.LLM with these settings; with `layers` it writes hidden states into `store`."""
    from vllm import LLM
    from vllm.platforms import current_platform

    if layers is None:
        return LLM(**settings)
    store.mkdir(exist_ok=True)
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


def prompt_of(request, pictures):
    return {"prompt_token_ids": request["ids"]} | ({"multi_modal_data": {"image": pictures}} if pictures else {})


def line_of(number, output, tokens):
    """A finished request as its job's file has it."""
    stop, ids = output.outputs[0].finish_reason, output.prompt_token_ids
    stop = "eos" if stop == "stop" else str(stop)
    whose = {"prompt_tokens": len(ids), "prompt": prompt_hash(number, ids)}
    return whose | {"tokens": [int(token) for token in tokens], "stop": stop}


class Batches:
    """Jobs whose requests run together: as one ends, the next one takes its place, of whichever job it is."""

    def __init__(self, engine, folder, layers):
        self.engine, self.done, self.layers = engine, folder / "done", layers
        self.places = {}  # id of a request in the engine -> its job, and its number there
        self.open = {}  # job -> answers by number, as far as they are there, and how many it has

    def begin(self, name, requests, pictures):
        """Hand a job to the engine."""
        from vllm import SamplingParams

        prompts = list(map(prompt_of, requests, pictures))
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
            answers[number] = line_of(number, output, output.outputs[0].token_ids)
            if self.layers is not None:
                take(output.kv_transfer_params["hidden_states_path"], self.done / f"{name}-{number}.safetensors")
            if len(answers) == count:
                del self.open[name]
                finished[name] = [answers[number] for number in range(count)]
        return finished


def _sampling(asked):
    """Arguments of SamplingParams; JSON has made texts of the ids."""
    bias = asked.get("logit_bias")
    return asked | {"logit_bias": bias and {int(token): value for token, value in bias.items()}}


def take(path, destination):
    """Move a file of states once it is written: its writer holds the lock until then."""
    lock = Path(f"{path}.lock")
    if lock.is_file():
        with lock.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        lock.unlink()
    os.replace(path, destination)


class Running:
    """A request that the engine has."""

    def __init__(self, number, began_s):
        self.number, self.began_s, self.tokens, self.passes = number, began_s, [], []

    def line(self, output, ended_s):
        """The finished request with the engine's own metrics of it."""
        times, drafts = output.metrics, output.outputs[0].spec_decode_metrics
        timing = {
            "began_s": self.began_s,
            "ended_s": ended_s,
            "first_s": times.first_token_latency,
            "decode_s": times.last_token_ts - times.first_token_ts,
            "passes": self.passes,
            "drafted": [] if drafts is None else [int(count) for count in drafts.per_step_drafted],
            "accepted": [] if drafts is None else [int(count) for count in drafts.per_step_accepted],
        }
        return line_of(self.number, output, self.tokens) | {"timing": timing}


class Timed:
    """Answers a job with metrics, so many requests at once: as one ends, the job's next one takes its place."""

    def __init__(self, engine, alive):
        self.core, self.alive, self.count = engine.llm_engine, alive, 0

    def __call__(self, name, requests, pictures):
        waiting = list(range(len(requests)))[::-1]
        running: dict[str, Running] = {}
        answers: dict[int, dict] = {}
        start = time.monotonic()
        while waiting or running:
            while waiting and len(running) < requests[waiting[-1]]["together"]:
                number = waiting.pop()
                running[self.ask(requests[number], pictures[number])] = Running(number, time.monotonic() - start)
            for output in self.core.step():
                one = running[output.request_id]
                if tokens := output.outputs[0].token_ids:
                    one.tokens += tokens
                    one.passes.append(len(tokens))
                if output.finished:
                    del running[output.request_id]
                    answers[one.number] = one.line(output, time.monotonic() - start)
                    self.alive.touch()
        return [answers[number] for number in range(len(requests))]

    def ask(self, request, pictures):
        """Hand a request to the engine, and return its name there."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # An output for each pass, with the tokens that it adds: what a pass emitted is in none of the metrics.
        sampling = SamplingParams(**request["sampling"], output_kind=RequestOutputKind.DELTA)
        self.count += 1
        self.core.add_request(str(self.count), prompt_of(request, pictures), sampling)
        return str(self.count)


def main(folder):
    given = asked(folder)
    if given["timed"]:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the V1 runner is the one that was tried
    engine = open_engine(given["settings"], given["layers"], folder / "states")
    if given["timed"]:
        serve(folder, InTurn(Timed(engine, folder / "alive")))
    else:
        serve(folder, Batches(engine, folder, given["layers"]))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
