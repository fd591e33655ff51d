"""Answers by vLLM with its own metrics of each request, so many at once. Runs in vLLM's environment, as
`python -I timed_vllm_worker.py FOLDER`.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from draftsmith_jobs import InTurn, asked, reason, serve

# Before vLLM is imported. Its engine has a process of its own, as in a server. The V1 runner is the one that was tried.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


class Running:
    """A request that the engine has."""

    def __init__(self, number, began_s):
        self.number, self.began_s, self.tokens, self.passes = number, began_s, [], []

    def take(self, output):
        """What one pass has added to it."""
        tokens = [int(token) for token in output.outputs[0].token_ids]
        if tokens:
            self.tokens += tokens
            self.passes.append(len(tokens))

    def line(self, output, ended_s):
        """The finished request as its job's file has it."""
        answer, times = output.outputs[0], output.metrics
        drafts = answer.spec_decode_metrics
        timing = {
            "began_s": self.began_s,
            "ended_s": ended_s,
            "first_s": times.first_token_latency,
            "decode_s": times.last_token_ts - times.first_token_ts,
            "passes": self.passes,
            "drafted": [] if drafts is None else [int(count) for count in drafts.per_step_drafted],
            "accepted": [] if drafts is None else [int(count) for count in drafts.per_step_accepted],
        }
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": self.tokens,
            "stop": reason(answer.finish_reason),
            "timing": timing,
        }


class Timed:
    """Answers jobs: as a request ends, the job's next one takes its place."""

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
                one.take(output)
                if output.finished:
                    del running[output.request_id]
                    answers[one.number] = one.line(output, time.monotonic() - start)
                    self.alive.touch()
        return [answers[number] for number in range(len(requests))]

    def ask(self, request, shown):
        """Hand a request to the engine, and return its name there."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # An output for each pass, with the tokens that it adds: what a pass emitted is in none of the metrics.
        sampling = SamplingParams(**request["sampling"], output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": request["ids"]} | ({"multi_modal_data": {"image": shown}} if shown else {})
        self.count += 1
        self.core.add_request(str(self.count), prompt, sampling)
        return str(self.count)


def main(folder):
    from vllm import LLM

    engine = LLM(**asked(folder)["settings"])
    serve(folder, InTurn(Timed(engine, folder / "alive")))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
