#!/usr/bin/env python
"""What to run first on a node with GPUs: small runs of every track on one and on all of them, and a table to send back.

    scripts/check_gpu.py                                  one GPU, then all of this node's
    scripts/check_gpu.py --ranks 1 2 8                    these numbers of ranks
    scripts/check_gpu.py --ranks 1 8 --evaluate RUN/recipe.yaml     evaluation alone, of a run that is there
    scripts/check_gpu.py --plan                           the commands in their order, and nothing else
    OMP_NUM_THREADS=1 scripts/check_gpu.py --ranks 1 2 --tracks draft       on a CPU, over gloo

The steps, in this order; a later one means little where an earlier one failed:

1. versions, devices, and the sum of an all-reduce over all ranks;
2. each track trained and measured on one rank: exit code 0, greedy tokens identical to plain decoding. On a GPU the
   passes of targets, heads and drafts are CUDA graphs by themselves, and the report must say so;
   then with eager passes: the same tau to the last digit; and how many launches one way and the other have;
3. evaluation alone on the other numbers of ranks, of the same weights: the same tau to the last digit;
4. each track trained and measured on them: exit code 0, greedy tokens identical; losses differ in their last digits;
5. how often a training step waits for the GPU (torch's own count): 1 is the bound; and, told alone, equal score rows.

`table.md` in the folder holds what to send back. Exits with 1 where a step failed. About ten minutes on one GPU.
"""

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LANGUAGE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
ALONE = ("stages=[evaluate]", "restart=evaluate")
EAGER = "stages.evaluate.graphs=false"


@dataclass(frozen=True)
class Track:
    """A demo recipe made small."""

    recipe: str
    trained: tuple[str, ...]  # its stages that train; each gets a few steps
    settings: tuple[str, ...]

    def words(self, output: Path, quick: bool) -> list[str]:
        """The recipe's arguments."""
        steps = [f"stages.{n}.steps={2 if quick else 60 if n == 'target' else 20}" for n in self.trained]
        batches = [f"stages.{name}.batch_size=8" for name in self.trained]
        return [f"recipe={self.recipe}", f"output={output}", *steps, *batches, *self.settings]


def _splits(split: str, **kinds: int) -> list[str]:
    return [f"stages.world.splits.{split}.{kind}={number}" for kind, number in kinds.items()]


_NONE = {kind: 0 for kind in ("name", "colors", "place", "probe", "count", "word", "edit", "story", "aside")}
TRACKS = {
    "draft": Track(
        "demo/lvlm-from-nothing", ("seeing", "target", "language", "finetune"),
        (
            f"target.language_model={LANGUAGE}",
            *_splits("train", **_NONE, caption=60, attribute=60, sums=30, fact=10, difference=0, conversation=30),
            *_splits("align", caption=40),
            *_splits("seen", attribute=3, conversation=1, place=0, count=0, probe=0, difference=0),
            *_splits("text", sums=2, fact=1, aside=0),
            *_splits("held_out", caption=4, attribute=4, conversation=2),
            "stages.finetune.validation=null", "stages.evaluate.max_new_tokens=16", "stages.evaluate.warmup=1",
            "stages.evaluate.probes=null", "stages.evaluate.temperatures=[0.0]",
        ),
    ),
    "image head": Track(
        "demo/visual-ar", ("vq", "reader", "target", "head", "head_without_dropout"),
        (
            "stages.world.splits={train: 200, test: 8}", "stages.evaluate.probes=null", "stages.head.decoding=null",
            "stages.head.validation=null", "stages.head.select=last", "stages.vq.revive_every=null",
            "stages.evaluate.benchmarks.captions.prompts.max_samples=3",
        ),
    ),
    "states head": Track(
        "demo/video", ("target", "target_long", "sparrow_text", "sparrow", "matched", "half_blind", "msd_text", "msd"),
        (
            f"target.language_model={LANGUAGE}",
            *_splits("words", name=4, caption=4, colors=4, attribute=4, place=4, clip=4, clip_late=4, sums=4, fact=4),
            *_splits("single", name=0, colors=0, caption=30, attribute=30, place=0),
            *_splits("text", sums=20, fact=10), *_splits("clips_4", clip=12, clip_late=4),
            *_splits("clips_12", clip=4, clip_late=0), *_splits("clips_32", clip=2, clip_late=0),
            *_splits("clips_222", clip=4, clip_late=4), *_splits("binding", attribute=4),
            "stages.world.video_suite=2", "stages.answers.max_new_tokens=16", "stages.evaluate.max_new_tokens=16",
            "stages.evaluate.lengths=[4]",
        ),
    ),
}  # fmt: skip


@dataclass
class Row:
    """A line of the table; `result` is empty until it has run."""

    step: str
    ranks: int
    expected: str
    result: str = ""
    good: bool = False
    command: list[str] = field(default_factory=list)


def launched(words: Sequence[str], ranks: int) -> list[str]:
    """A recipe's command on this number of ranks of this node."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "draftsmith.recipes.commands.cli", *words]


def plan(folder: Path, tracks: Sequence[str], ranks: Sequence[int], *, quick: bool) -> list[Row]:
    """The steps in their order."""
    others = [n for n in ranks if n > 1]
    rows = [
        Row("all-reduce", n, f"{n * (n - 1) // 2}", command=[
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", __file__,
            "--all-reduce",
        ])
        for n in others
    ]  # fmt: skip
    trained = {name: folder / f"{name.replace(' ', '-')}-1" for name in tracks}
    for name, output in trained.items():
        words = TRACKS[name].words(output, quick)
        rows.append(Row(f"{name}: train and evaluate", 1, "greedy identical", command=launched(words, 1)))
    for name, output in trained.items():
        if name != "image head":  # image generators have no graphs
            words = [*TRACKS[name].words(output, quick), *ALONE]
            eager, counted = launched([*words, EAGER], 1), [sys.executable, __file__, "--launches", *words]
            rows.append(Row(f"{name}: evaluate without graphs", 1, "tau of graphs", command=eager))
            rows.append(Row(f"{name}: launches with graphs", 1, "at most 0.7", command=counted))
    for name, output in trained.items():
        alone = [*TRACKS[name].words(output, quick), *ALONE]
        rows += [Row(f"{name}: evaluate alone", n, "tau of 1 rank", command=launched(alone, n)) for n in others]
    for name, output in trained.items():
        for n in others:
            words = TRACKS[name].words(output.with_name(f"{output.name[:-1]}{n}"), quick)
            rows.append(Row(f"{name}: train and evaluate", n, "greedy identical", command=launched(words, n)))
    for name, output in trained.items():
        words = TRACKS[name].words(output.with_name(f"{output.name[:-1]}waits"), True)
        command = [sys.executable, __file__, "--waits", *words]
        rows.append(Row(f"{name}: waits of a training step", 1, "at most 1", command=command))
    passes = [sys.executable, str(ROOT / "scripts" / "bench.py"), "--identical", "--count", "2"]
    return [*rows, Row("score rows of passes in bfloat16", 1, "told alone", command=passes)]


def evaluation_of(path: Path, ranks: Sequence[int]) -> list[Row]:
    """Evaluation alone of a run that is there, on each number of ranks; its results go on lying where they are."""
    words = [f"recipe={path}", f"output={path.parent}", *ALONE]
    expected = {n: "tau of 1 rank" if n > 1 else "greedy identical" for n in ranks}
    return [Row("evaluate alone", n, expected[n], command=launched(words, n)) for n in ranks]


def taus(evaluate: Path) -> dict[str, float]:
    """Method and benchmark -> tokens of a cycle, over all greedy requests. They do not depend on time."""
    emitted: dict[str, list[int]] = defaultdict(list)
    for row in greedy(evaluate):
        emitted[f"{row['method']} {row['drafter']}, {row['benchmark']} {row['budget']}"] += row["emitted"]
    return {key: sum(numbers) / max(1, len(numbers)) for key, numbers in emitted.items()}


def greedy(evaluate: Path) -> list[dict[str, Any]]:
    """The rows of greedy requests."""
    rows = map(json.loads, (evaluate / "rows.jsonl").read_text().splitlines())
    return [row for row in rows if row["temperature"] == 0]


def run(row: Row, folder: Path, known: dict[str, dict[str, float]]) -> None:
    """Run a step and judge it."""
    start, pipe = time.monotonic(), subprocess.PIPE
    with subprocess.Popen(row.command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, process_group=0) as ended:
        try:
            out, err = ended.communicate()
        except BaseException:  # a stop ends all ranks
            os.killpg(ended.pid, signal.SIGTERM)
            raise
    log = folder / f"{row.step.replace(': ', '-').replace(' ', '-')}-{row.ranks}.log"
    log.write_text(shlex.join(row.command) + "\n" + out + err)
    seconds = f"{time.monotonic() - start:.0f} s"
    if ended.returncode:
        row.result = f"exit code {ended.returncode}, see {log.name}"
        return
    if "--identical" in row.command:
        row.result, row.good = "; ".join(line.strip("| ").replace("|", ",") for line in out.splitlines()[4:]), True
        return
    outputs = [word.removeprefix("output=") for word in row.command if word.startswith("output=")]
    is_bound = {"--waits", "--launches"} & {*row.command}
    if is_bound or not outputs:
        row.result = out.strip().splitlines()[-1]
        limit = float(row.expected.split()[-1])
        measured = row.result.split()[0]
        row.good = measured == "not" or (float(measured) <= limit if is_bound else float(measured) == limit)
        return
    output = Path(outputs[0])
    taus_of, name = taus(output / "evaluate"), row.step.split(":")[0]
    compared = [one for one in greedy(output / "evaluate") if one["identical"] is not None]
    row.good = bool(compared) and all(one["identical"] for one in compared if "LANTERN" not in one["method"])
    parts = ["greedy identical" if row.good else "greedy tokens differ"]
    if row.expected.startswith("tau") and name in known:
        same = taus_of == known[name]
        row.good &= same
        parts.append("tau equal" if same else "tau differs")
    elif row.ranks == 1:
        known[name] = taus_of
    said = re.findall(r"CUDA graphs:.*", (output / "evaluate" / "report.md").read_text())
    if said:  # on a GPU
        row.good &= all("passes replayed" in line or name not in TRACKS for line in said)
        row.good &= not any("failed" in line for line in said)
        parts += said
    best = max((key for key in taus_of if not key.startswith("plain")), key=lambda key: taus_of[key])
    memory = max((float(size) for size in re.findall(r"(\d+\.\d+) GiB", out + err)), default=0.0)
    parts += [f"tau {taus_of[best]:.2f} ({best.strip()})", f"{memory:.1f} GiB" if memory else "", seconds]
    row.result = ", ".join(part for part in parts if part)


def table(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in about.items()), ""]
    lines += ["| step | ranks | expected | found | |", "| --- | --- | --- | --- | --- |"]
    for r in rows:
        sign = "" if not r.result else "ok" if r.good else "**no**"
        lines.append(f"| {r.step} | {r.ranks} | {r.expected} | {r.result or 'not run'} | {sign} |")
    return "\n".join(lines) + "\n"


def about_this_machine() -> dict[str, Any]:
    """Versions and devices."""
    import torch
    from draftsmith.recipes.config.alike import versions

    written, facts = versions(), {"machine": platform.platform(), "cores": os.cpu_count()}
    facts |= {"python": written["python"], "commit": (written.get("git") or {}).get("commit"), **written["packages"]}
    facts["torch's CUDA"] = torch.version.cuda or "none"
    facts["GPUs"] = torch.cuda.device_count() or "none: everything below ran on the CPU"
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            facts[f"GPU {number}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
    return facts


def all_reduce(_: Sequence[str]) -> None:
    """On every rank: the sum of all ranks' numbers, and how fast 256 MB go around."""
    import torch
    from draftsmith.core import ranks
    from draftsmith.trainers.train.engine import init_distributed

    init_distributed()
    device = ranks.device()
    total = torch.full((), float(ranks.rank()), device=device)
    torch.distributed.all_reduce(total)
    many = torch.ones(1 << (26 if device.type == "cuda" else 20), device=device)
    torch.distributed.all_reduce(many)
    float(many[0])
    start = time.monotonic()
    torch.distributed.all_reduce(many)
    float(many[0])
    rate = 4 * many.numel() / (time.monotonic() - start) / 1e9
    if ranks.is_main():
        backend, size = torch.distributed.get_backend(), 4 * many.numel() >> 20
        print(f"{total.item():.0f} by {backend}, {rate:.1f} GB/s of {size} MB")
    torch.distributed.destroy_process_group()


def waits(words: Sequence[str]) -> None:
    """How often a training step waits for the GPU: what 12 steps wait more than 4, by torch's own count."""
    import warnings

    import torch
    from draftsmith.recipes.commands.cli import main as cli
    from draftsmith.recipes.config.load import load

    if not torch.cuda.is_available():
        print("not measurable without CUDA")
        return
    counts, names = {}, list(load(list(words)).recipe.stages)
    until_target = ",".join(names[: names.index("target") + 1])
    for steps in (4, 12):
        output = next(word for word in words if word.startswith("output=")) + f"-{steps}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            code = cli([*words, output, f"stages.target.steps={steps}", "stages.target.log_every=100",
                        f"stages=[{until_target}]"])  # fmt: skip
            torch.cuda.set_sync_debug_mode("default")
        if code:
            sys.exit(code)
        counts[steps] = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    print(f"{(counts[12] - counts[4]) / 8:.2f} waits a step")


def launches(words: Sequence[str]) -> None:
    """Launches with graphs per launch of eager passes, in two more repeats of each request: nothing is captured."""
    import torch

    if not torch.cuda.is_available():
        print("not measurable without CUDA")
        return
    counts = []
    for more in ([], [EAGER]):
        commands = [[*words, *more, f"stages.evaluate.repeats={n}"] for n in (1, 3)]
        few, many = (
            subprocess.run(
                [sys.executable, __file__, "--profiled", *one], stdout=subprocess.PIPE, text=True, check=True
            )
            for one in commands
        )
        counts.append((int(many.stdout.split()[-1]) - int(few.stdout.split()[-1])) / 2)
    print(f"{counts[0] / counts[1]:.2f} of eager passes' launches: {counts[0]:,.0f} of {counts[1]:,.0f} in a repeat")


def profiled(words: Sequence[str]) -> None:
    """How often a recipe's command launches kernels or graphs, by torch's profiler."""
    import torch
    from draftsmith.recipes.commands.cli import main as cli

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        code = cli([*words])
    print(sum(event.count for event in profile.key_averages() if re.match(r"cu(da)?(Graph)?Launch", event.key)))
    sys.exit(code)


def main() -> int:
    """Run the steps; returns 1 where one failed."""
    inner = {"--all-reduce": all_reduce, "--waits": waits, "--launches": launches, "--profiled": profiled}
    if sys.argv[1:] and sys.argv[1] in inner:
        inner[sys.argv[1]](sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; default: 1, and all GPUs of this node")
    parser.add_argument("--tracks", nargs="+", choices=[*TRACKS], default=[*TRACKS])
    parser.add_argument("--evaluate", type=Path, metavar="RECIPE", help="evaluation alone, of a run's recipe.yaml")
    parser.add_argument("--folder", type=Path, default=Path("runs/check-gpu"), help="where runs, logs and table.md go")
    parser.add_argument("--quick", action="store_true", help="two steps for each stage: whether it runs, not how well")
    parser.add_argument("--plan", action="store_true", help="print the commands in their order, and run nothing")
    options = parser.parse_args()
    import torch

    ranks = options.ranks or sorted({1, max(1, torch.cuda.device_count())})
    folder = options.folder.resolve()
    rows = plan(folder, options.tracks, ranks, quick=options.quick)
    if options.evaluate is not None:
        rows = evaluation_of(options.evaluate.resolve(), ranks)
    if options.plan:
        for number, row in enumerate(rows, 1):
            print(f"{number}. {row.step}, {row.ranks} rank(s), expected: {row.expected}\n   {shlex.join(row.command)}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    about, known = about_this_machine(), dict[str, dict[str, float]]()
    print(f"GPUs: {about['GPUs']}", flush=True)
    for row in rows:
        print(f"{row.step}, {row.ranks} rank(s) ...", end=" ", flush=True)
        run(row, folder, known)
        print(row.result, "" if row.good else "NO", flush=True)
        (folder / "table.md").write_text(table(rows, about))
    print(f"send back {folder / 'table.md'}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
