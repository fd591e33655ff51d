"""Greedy answers by vLLM, with every chain that its drafter proposed. Runs in vLLM's environment: nothing of ours.

    python vllm_program.py FOLDER

FOLDER/asked.json: `model`, `engine` (further arguments of vllm.LLM), `speculative` (its speculative_config, or null),
`max_new_tokens`, `without_known_faults` (whether they are patched here), `together` (how many requests are asked at
once; for each number all are asked again) and `requests`, each with `name`, `ids` (one placeholder for a picture) and
`pictures` (files).
FOLDER/answers.jsonl: first a line about it (`engine`, `version`, `device`, `runner`), then for each of `together`
one for each request: `name`, `together`, `prompt_tokens` as the engine counts them, `tokens`, and `chains`, the drafted
tokens of each cycle in order; null where this runner shows none.
"""

import json
import os
import sys
from pathlib import Path

# Before vLLM is imported: one process, whose runner can be watched, and small caches.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # `watch` knows the V1 runner alone
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def watch() -> dict:
    """A dict that gets every proposal of the V1 runner from now on: name of the request -> lists of ids."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    drafts: dict[str, list[list[int]]] = {}
    unread: set[str] = set()  # requests whose last proposal no pass has read
    original = GPUModelRunner.propose_draft_token_ids

    def propose(self, scheduled, *arguments, **named):
        names = list(self.input_batch.req_ids)
        # A full pass has room for a part of a chain or for none of it, and a preempted request goes on without its own.
        for name in unread.intersection(names):
            drafts[name][-1] = drafts[name][-1][: len(scheduled.scheduled_spec_decode_tokens.get(name, ()))]
        unread.difference_update(names)
        drafted = original(self, scheduled, *arguments, **named)
        rows = drafted.tolist() if hasattr(drafted, "tolist") else drafted
        for name, row, discarded in zip(names, rows, self.discard_request_mask.np[: len(names)], strict=True):
            if not discarded:  # what is drafted within a prompt is thrown away
                drafts.setdefault(name, []).append([int(token) for token in row])
                unread.add(name)
        return drafted

    GPUModelRunner.propose_draft_token_ids = propose
    return drafts


def without_known_faults() -> None:
    """Patch what is known to be wrong in vLLM 0.32, in this process alone.

    The V1 runner derives the slots of draft steps from positions, and of Qwen-VL's these count a picture's tokens as
    few; the CPU's norm op takes row 0 of a weight [layers,E] for every layer of a DFlash draft.
    """
    import functools
    import inspect

    import torch
    from vllm.model_executor.models import qwen3_dflash
    from vllm.v1.spec_decode import llm_base_proposer as base

    propose = base.SpecDecodeBaseProposer.propose
    signature = inspect.signature(propose)

    @functools.wraps(propose)
    def with_slots(self, *arguments, **named):
        bound = signature.bind(self, *arguments, **named)
        given = bound.arguments
        positions = given["target_positions"]
        if positions.dim() == 2:
            count, metadata = given["target_token_ids"].shape[0], given["common_attn_metadata"]
            starts = metadata.query_start_loc_cpu.tolist()
            ends = metadata.seq_lens.tolist()
            flat = torch.cat(
                [
                    torch.arange(end - (b - a), end, device=positions.device)
                    for a, b, end in zip(starts[:-1], starts[1:], ends, strict=True)
                ]
            )
            assert len(flat) == count, "every token belongs to a request"
            given["target_positions"] = flat.expand(positions.shape[0], count)
        return propose(*bound.args, **bound.kwargs)

    def normalised(self, keys):
        wide = keys.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return (wide * self._k_norm_weights[:, None, None, :].float()).to(keys.dtype)

    assert hasattr(qwen3_dflash.DFlashQwen3Model, "_normalize_context_k"), "another vLLM: nothing to patch there"
    base.SpecDecodeBaseProposer.propose = with_slots
    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalised


def main(folder: Path) -> None:
    job = json.loads((folder / "asked.json").read_text())
    import vllm
    from PIL import Image, ImageOps
    from vllm import LLM, SamplingParams

    if job["without_known_faults"]:
        without_known_faults()
    chains = watch()
    # No reuse of prefixes: every request stands for itself.
    settings = {
        "enforce_eager": True,
        "max_num_seqs": max(job["together"]),
        "enable_prefix_caching": False,
        "seed": 0,
    }
    engine = LLM(model=job["model"], speculative_config=job["speculative"], **(settings | job["engine"]))

    def prompt_of(request):
        prompt = {"prompt_token_ids": request["ids"]}
        pictures = [ImageOps.exif_transpose(Image.open(folder / name)).convert("RGB") for name in request["pictures"]]
        return prompt | ({"multi_modal_data": {"image": pictures}} if pictures else {})

    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True)
    about = {
        "engine": "vLLM",
        "version": vllm.__version__,
        "device": str(vllm.platforms.current_platform.device_type),
        "runner": "V2" if vllm.envs.VLLM_USE_V2_MODEL_RUNNER else "V1",
    }
    with (folder / "answers.jsonl").open("w") as file:
        print(json.dumps(about), file=file)
        for together in job["together"]:
            for start in range(0, len(job["requests"]), together):
                requests = job["requests"][start : start + together]
                chains.clear()
                answers = engine.generate([prompt_of(request) for request in requests], sampling, use_tqdm=False)
                for request, answer in zip(requests, answers, strict=True):
                    # The engine's core adds to a request's name: 3-8ab2 is request 3.
                    chains_of = [c for name, c in chains.items() if name.partition("-")[0] == answer.request_id]
                    line = {
                        "name": request["name"],
                        "together": together,
                        "prompt_tokens": len(answer.prompt_token_ids),
                        "tokens": [int(token) for token in answer.outputs[0].token_ids],
                        "chains": chains_of[0] if job["speculative"] is not None and chains_of else None,
                    }
                    print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
