"""Answers that vLLM draws to one prompt at temperature 1. Runs in vLLM's environment: nothing of ours.

    python drawn_program.py FOLDER

FOLDER/asked.json: `model`, `speculative` (vLLM's speculative_config, or null), `prompts` (lists of ids), `count` of
answers to each, `max_new_tokens`, `temperature`, `top_k` (0: none), `first_seed`. FOLDER/answers.jsonl: `tokens` of
each answer, a line.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main(folder: Path) -> None:
    asked = json.loads((folder / "asked.json").read_text())
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=asked["model"], speculative_config=asked["speculative"], dtype="float32", enforce_eager=True,
        max_num_seqs=64, max_model_len=96, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"] for _ in range(asked["count"])]
    drawn = {"temperature": asked["temperature"], "top_k": asked["top_k"], "ignore_eos": True,
             "max_tokens": asked["max_new_tokens"]}  # fmt: skip
    sampling = [SamplingParams(seed=asked["first_seed"] + number, **drawn) for number in range(len(prompts))]
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    with (folder / "answers.jsonl").open("w") as file:
        for answer in answers:
            print(json.dumps({"tokens": [int(token) for token in answer.outputs[0].token_ids]}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
