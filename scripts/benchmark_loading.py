#!/usr/bin/env python
"""Host memory that reading a checkpoint needs, apart from the pages of its files.

    scripts/benchmark_loading.py    prints a section for docs/results/benchmarks.md; writes 1.4 GB to a temporary folder

A Llama of 1.4 GB in float32 and 8 shards is read by `load_weights` to the host, as it is stored and as another type.
Anonymous memory is this process's own; pages of the files are mapped, shared by all ranks of a node, and given back
when memory is short.
"""

import ctypes
import gc
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from draftsmith.eval import timing
from draftsmith.models.targets.load import load_weights
from transformers import LlamaConfig, LlamaForCausalLM

MIB, KINDS = 2**20, ("RssAnon", "RssFile")


def held() -> list[float]:
    """MiB of this process: its own, and mapped from files."""
    status = Path("/proc/self/status").read_text()
    return [int(status.split(f"{kind}:")[1].split()[0]) / 1024 for kind in KINDS]


def written(folder: str) -> tuple[float, list[float]]:
    """Write the checkpoint; MiB of its weights and of each shard."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "num_attention_heads": 8,
        "num_hidden_layers": 12,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
    model.save_pretrained(folder, max_shard_size="208MB")
    shards = [file.stat().st_size / MIB for file in Path(folder).glob("*.safetensors")]
    return sum(p.numel() * p.element_size() for p in model.parameters()) / MIB, shards


def peak(folder: str, dtype: torch.dtype) -> list[float]:
    """The most that reading adds to `held`, looked at every 2 ms."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, most, reading = held(), [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not reading.is_set():
            most[:] = [max(m, now - b) for m, now, b in zip(most, held(), before, strict=True)]
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    load_weights(LlamaForCausalLM, folder, revision=None, dtype=dtype, key="target.path")
    reading.set()
    thread.join()
    return most


def main() -> None:
    timing.options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights, shards = written(folder)
        timing.header(
            f"seed 0, {weights:.0f} MiB of float32 in {len(shards)} shards of up to {max(shards):.0f} MiB, n 1"
        )
        timing.table("read as", "anonymous MiB at the peak", "mapped MiB at the peak")
        for dtype in (torch.float32, torch.bfloat16):
            timing.row(str(dtype).removeprefix("torch."), *(f"{value:.0f}" for value in peak(folder, dtype)))


if __name__ == "__main__":
    main()
