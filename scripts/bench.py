#!/usr/bin/env python
"""Our decode cycle and training step beside their floor, and the start of the command: a table for docs/benchmarks.md.

    OMP_NUM_THREADS=1 scripts/bench.py --write            # measures both sizes and writes the table into the page
    scripts/bench.py --sizes tiny --count 1               # a look: prints it

Targets and heads are drawn at random: tau is near 1 then, and what a cycle takes hardly depends on it. The floor of a
request or of a step is its matrix products and attention alone, replayed one after the other: no loop over the same
models takes less. Floor and whole take turns; a ratio is of neighbours. The start is CPU seconds of user and system.
"""

import argparse
import itertools
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from draftsmith.core.batch import Batch, Request
from draftsmith.core.pictures import TEXT
from draftsmith.core.secrets import redact_argument
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.identical import Identical
from draftsmith.models.decoding.tree import Tree, no_tree
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.causal.section import CausalTarget
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 64},
    "demo size": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 512},
    "width 512": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 32000},
    "SmolLM2's": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "vocab_size": 49152,
                  "num_key_value_heads": 3, "num_hidden_layers": 30},
}  # fmt: skip
HEADS: dict[str, Any] = {
    "EAGLE-3": Eagle3Config(kind="eagle3"),
    "EAGLE-3 in a window of 512": Eagle3Config(kind="eagle3", sliding_window=512),
    "DFlash": DflashConfig(kind="dflash", block_size=8, num_layers=1, taps=(2, 3, 4), mask_token_id=3),
}
TREES = {"chain of 5": Chain(5), "chain of 7": Chain(7), "tree of 60": Dynamic(total=60, depth=5, width=10)}
CYCLES = (
    ("EAGLE-3", "chain of 5", 64), ("EAGLE-3", "tree of 60", 64), ("DFlash", "chain of 7", 64),
    ("EAGLE-3 in a window of 512", "chain of 5", 128), ("EAGLE-3 in a window of 512", "chain of 5", 3800),
)  # fmt: skip
STEPS = ("EAGLE-3", "DFlash")
TWELVE = (-1, -1, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9)  # parents
DRAFTED = {"plain step": (), "chain of 5": (-1, 0, 1, 2, 3), "plain step beside trees": (), "tree of 12": TWELVE}
PLACES = (150, 500, 1500)  # tokens before a pass
LENGTHS = (64, 512)  # tokens of a training sample
COMMANDS = (["--help"], ["show", "llava15-68m"], ["train", "recipe=llava15-68m", "dry_run=true"])
HEADING = ("what", "median [quartiles]", "its products and attention alone, of it", "n")
Row = tuple[str, str, str, int]
Action = Callable[[], Any]


def target_of(size: str, device: torch.device) -> CausalTarget:
    """A Llama, of seven layers where its size names none: the fewest of which EAGLE-3 taps three different ones."""
    sizes: dict[str, Any] = {"num_hidden_layers": 7, **SIZES[size]}
    config = LlamaConfig(
        **sizes, max_position_embeddings=4096, initializer_range=0.06, bos_token_id=1,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return CausalTarget(LlamaForCausalLM(config).eval().to(device), num_token_ids=config.vocab_size)


class Products(TorchDispatchMode):
    """Keeps the calls of matrix products and attention, with what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm") or "scaled_dot_product" in name:
            self.calls.append(partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def replay(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def moment() -> float:
    """This thread's seconds on a CPU; wall time on a GPU, after it has finished."""
    if not torch.cuda.is_available():
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and quartiles."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def beside_its_floor(action: Action, count: int, other: Action | None = None) -> tuple[list[float], list[float]]:
    """Seconds of each of `count` runs, and what `other` takes of them (None: its products). The first run warms up."""
    with Products() as products:
        action()
    floor = other or partial(replay, products.calls)
    whole, shares = [], []
    for number in range(count):
        pair: dict[str, float] = {}
        for name, part in (("whole", action), ("floor", floor))[:: 1 if number % 2 else -1]:
            begin = moment()
            part()
            pair[name] = moment() - begin
        whole.append(pair["whole"])
        shares.append(pair["floor"] / pair["whole"])
    return whole, shares


def cycle(name: str, tree_name: str, after: int, size: str, device: torch.device, count: int, tokens: int) -> Row:
    """Milliseconds of a greedy cycle after a prompt of so many tokens, and its two parts; the floor is of the whole
    request.
    """
    target = target_of(size, device)
    drafter = HEADS[name].drafter(HEADS[name].build(target).eval().requires_grad_(False), target)
    ids = torch.randint(8, target.vocab_size, (after,), generator=torch.Generator().manual_seed(1))
    request = Request(ids, torch.zeros(after, dtype=torch.int8), None, "1")
    decoding = Decoding(TREES[tree_name], RULES["greedy"], Draw("top-k"), Warp(0.0), tokens, ())
    times: list[list[float]] = []

    def decode() -> None:
        done = generate(target, drafter, request, decoding, clock=moment)
        parts = zip(*((one.total_s, one.draft_s, one.verify_s) for one in done.cycles), strict=True)
        times.append([1e3 * statistics.median(part) for part in parts])

    _, shares = beside_its_floor(decode, count)
    whole, draft, verify = (spread(part) for part in zip(*times[1:], strict=True))
    shown = f"{whole} ms: {draft} the draft's, {verify} the target's"
    return f"cycle of {name}, {tree_name}, after {after:,} tokens, {size}", shown, spread(shares), count


def step(name: str, length: int, size: str, device: torch.device, count: int) -> Row:
    """Milliseconds of a training step over states that are there: forward, backward and AdamW, one sample."""
    target = target_of(size, device)
    training = HEADS[name].training_objective(HEADS[name].build(target), target).train().to(device)
    optimizer = torch.optim.AdamW(training.parameters(), lr=0.0)
    ids = torch.randint(8, target.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    supervised = (torch.arange(length) >= length // 4)[None]  # an answer after its prompt
    batch = Batch(
        ids, torch.ones_like(ids, dtype=torch.bool), supervised, torch.full_like(ids, TEXT, dtype=torch.int8),
        torch.arange(length)[None], None, ("1",), seeds=(0,),
    ).to(device)  # fmt: skip
    with torch.no_grad():
        states = target.states(batch, HEADS[name].taps_for(target.shape, training=True))

    def train() -> None:
        optimizer.zero_grad()
        loss = training(batch, states)
        (loss.loss_sum / loss.num_tokens).backward()
        optimizer.step()

    times, shares = beside_its_floor(train, count)
    shown = spread([1e3 * value for value in times])
    return f"training step of {name}, {length} tokens, {size}", f"{shown} ms", spread(shares), count


def identical(device: torch.device, count: int) -> Iterator[Row]:
    """Passes in bfloat16, what `identical` takes of them, and how many score rows have plain steps' bits either way."""
    today = target_of("SmolLM2's", device)
    ours = CausalTarget(today.decoder.model.to(torch.bfloat16), num_token_ids=today.vocab_size)
    for places, (name, parents) in itertools.product(PLACES, DRAFTED.items()):
        tree = Tree(torch.full((len(parents),), 8), parents, (-1,) * len(parents))
        path = [node + 1 for node in sorted({*parents, len(parents) - 1})]
        # On a GPU nobody claims anything. Every pass has 16 rows there; equal rows also need products without split-K
        # (cuBLASLt) and attention that splits keys alike for any number of queries.
        ours.identical = Identical(ours.decoder, trees="tree" in name, least=16 if device.type == "cuda" else 2)
        request = Request(torch.arange(8, 8 + places), torch.zeros(places, dtype=torch.int8), None, "1")
        runs, equal = list[Action](), [0, 0]
        for number, target in enumerate((today, ours)):
            session, _ = target.prefill(request, Taps(), capacity=64)
            runs.append(partial(target.verify, session, 8, tree))
            for row in runs[-1]().logits[path]:
                equal[number] += torch.equal(row, target.verify(session, 8, no_tree()).logits[0])
                target.commit(session, [])
        times, shares = beside_its_floor(runs[0], count, runs[1])
        said = f"identical: {spread(shares)} of it, {equal[0]} and {equal[1]} of {len(path)} rows equal"
        yield f"{name} after {places} tokens", f"{spread([1e3 * value for value in times])} ms", said, count


def starts(count: int) -> Iterator[Row]:
    """CPU seconds of commands, in turn; the first round reads files from the disk and does not count."""
    times: dict[str, list[float]] = {}
    for number in range(count + 1):
        for arguments in COMMANDS:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "draftsmith", *arguments], check=True, capture_output=True,
                           env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            times.setdefault(" ".join(arguments), []).extend([used] if number else [])
    for name, values in times.items():
        yield f"start of `draftsmith {name}`", f"{spread(values)} s of CPU", "", count


def about(script: str, arguments: Sequence[str], seed: int) -> str:
    """The line above the table: what was run, on what, when."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=PAGE.parent, capture_output=True, text=True)
    command = shlex.join([script, *map(redact_argument, arguments)])
    return (
        f"`{command}`: {device}, {torch.get_num_threads()} thread(s), load {os.getloadavg()[0]:.1f}, torch "
        f"{torch.__version__}, {time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip() or 'unknown'}, seed {seed}, "
        "float32"
    )


def written(page: str, lines: Sequence[str]) -> str:
    """The page with these lines behind its mark, up to the next heading."""
    block = "\n".join(["<!-- bench -->", "", *lines, ""])
    result, count = re.subn(r"<!-- bench -->\n(?:(?!## ).*\n)*", lambda match: block + "\n", page)
    assert count == 1, "the page has no mark"
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["demo size", "width 512"], choices=SIZES)
    parser.add_argument("--count", type=int, default=9, help="runs of each line")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--identical", action="store_true", help="passes with and without this setting, and no more")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    lines = [
        about("scripts/bench.py", arguments, options.seed),
        "",
        f"| {' | '.join(HEADING)} |",
        "|" + " --- |" * len(HEADING),
    ]
    print("\n".join(lines))

    def show(row: Row) -> None:
        lines.append(f"| {' | '.join(map(str, row))} |")
        print(lines[-1], flush=True)

    for row in identical(device, options.count) if options.identical else ():
        show(row)
    for size in [] if options.identical else options.sizes:
        for name, tree, after in CYCLES:
            show(cycle(name, tree, after, size, device, options.count, options.tokens))
        for name in STEPS:
            for length in LENGTHS:
                show(step(name, length, size, device, options.count))
    for row in () if options.identical else starts(options.count):
        show(row)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), lines))


if __name__ == "__main__":
    main(sys.argv[1:])
