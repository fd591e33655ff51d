#!/usr/bin/env python
"""Records what the project does today, and checks later that it still does the same.

    tests/tools/freeze.py record              # all of it, into tests/goldens
    tests/tools/freeze.py check               # run it again; every difference by name; exit code 1 where there is one
    tests/tools/freeze.py check lvlm video    # these runs alone (`dry-runs` is one of them)
    DRAFTSMITH_FAST=0 tests/tools/freeze.py check --close lvlm    # without models/fast: losses to 1e-4, equal tokens

Each run is a shipped demo recipe at a tiny size, on one CPU thread. It records the losses of every step, names, shapes
and hashes of the saved weights, the tokens and accepted counts of every request, tau of every method on every set, and
the dry-run texts of all shipped recipes. A change that is meant is recorded again in the same commit, which says in one
line what it is due to.

Everything is compared bit for bit on a machine like the one that recorded it (processor and torch, in machines.json).
On another machine the last bits of a sum differ, and with them tokens: there losses are compared within 1%, names,
shapes and texts as ever, and hashes, tokens and taus not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections import ChainMap, Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from goldens import differences, read, write

# One thread, no network, no tracker, no GPU; set before torch is imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled",
               "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens"

MACHINES = GOLDENS / "machines.json"  # run -> what it was recorded on; runs may be recorded one at a time

DRY_RUNS = "dry-runs"
REPORT = "report.json"


def expanded(value: Any) -> Any:
    """`value` with each key of a mapping that has {a,b} in it as one key with a and one with b."""
    if not isinstance(value, dict):
        return value
    items = {}
    for key, item in value.items():
        texts, choices = re.split(r"\{[^}]*\}", key), [part.split(",") for part in re.findall(r"\{([^}]*)\}", key)]
        for names in itertools.product(*choices):
            items["".join(map("".join, zip(texts, (*names, ""), strict=True)))] = expanded(item)
    return items


def load_runs() -> dict[str, dict[str, Any]]:
    """Run -> its recipe, and its settings in the order of the command line."""
    runs = yaml.safe_load((GOLDENS / "runs.yaml").read_text())["runs"]
    return {name: run | {"set": dict(ChainMap(*map(expanded, reversed(run["set"]))))} for name, run in runs.items()}


RUNS = load_runs()

# What is left out

# Keys of any JSON: of the clock, of this machine, of versions. Fingerprints have a version of their own.
LEFT_OUT = re.compile(
    r".*_(s|ms|bytes|gib)|time|date|seconds|(DSR|ESR|SR|T_)\b.*|(DSR|ESR|SR|T)_.*|prefill_share|.*speedup.*"
    r"|command|run|device|torch|versions|tested_with|transformers_version|path|fingerprint"
)
# Files of a stage that say how long it took, or that hold what others say already; manifests have tests of their own.
UNRECORDED = re.compile(
    r"done\.json|draftsmith\.json|fingerprint\.json|metrics\.jsonl|report\.json|.*\.(lock|npz|png|md|html)|digests-\d+"
)


def cleaned(value: Any) -> Any:
    """Without what depends on the clock, the machine or versions."""
    if isinstance(value, dict):
        return {str(key): cleaned(item) for key, item in value.items() if not LEFT_OUT.fullmatch(str(key))}
    if isinstance(value, list | tuple):
        return [cleaned(item) for item in value]
    return value


# What is recorded of a run


class Decoded:
    """Notes every call of the decoding loop: stage -> request -> one line for each call."""

    def __init__(self) -> None:
        self.output: Path | None = None
        self.lines: dict[str, dict[str, list[str]]] = {}

    def wrap(self) -> None:
        """Puts the recorder in the place of `generate`, also where it was imported by name before."""
        from draftsmith.eval import loop

        original = loop.generate

        def generate(target: Any, drafter: Any, request: Any, *more: Any, **named: Any) -> Any:
            generation = original(target, drafter, request, *more, **named)
            self.note(request, drafter, generation)
            return generation

        for module in [module for name, module in sys.modules.items() if name.startswith("draftsmith")]:
            if vars(module).get("generate") is original:
                module.generate = generate  # type: ignore[attr-defined]

    def note(self, request: Any, drafter: Any, generation: Any) -> None:
        """Add a line for one call: its tokens, and levels/nodes/accepted/emitted of each cycle."""
        cycles = " ".join(f"{c.num_drafted}/{c.num_nodes}/{c.num_accepted}/{c.num_emitted}" for c in generation.cycles)
        how = "plain" if drafter is None else "drafted"
        line = f"{how}: {' '.join(map(str, generation.tokens))} | {cycles}"
        name = request.name or getattr(request, "caption", "")
        self.lines.setdefault(self.stage(), {}).setdefault(name, []).append(line)

    def stage(self) -> str:
        """The stage that has begun and not finished, as its folder says."""
        folders = [] if self.output is None else [path for path in self.output.iterdir() if path.is_dir()]
        begun = [path.name for path in folders if (path / "fingerprint.json").is_file()]
        return next((name for name in begun if not (self.output / name / "done.json").is_file()), "none")  # type: ignore[operator]

    def table(self) -> dict[str, dict[str, list[str]]]:
        """Sorted, since the order in which methods are measured is no promise; equal calls as one line."""
        return {
            stage: {name: [f"{count}x {line}" for line, count in sorted(Counter(lines).items())]
                    for name, lines in sorted(requests.items())}
            for stage, requests in sorted(self.lines.items())
        }  # fmt: skip


def record_run(name: str, folder: Path) -> dict[str, Any]:
    """Runs a recipe in this process. Returns file name -> what it is to hold."""
    from draftsmith.recipes.commands.cli import main

    output = folder / "run"
    decoded = Decoded()
    decoded.output = output
    decoded.wrap()
    run = RUNS[name]
    settings = [f"{key}={'null' if value is None else json.dumps(value)}" for key, value in run["set"].items()]
    code = main([f"recipe={run['recipe']}", f"output={output}", *settings])
    if code:
        raise SystemExit(f"{name}: the run ended with exit code {code}")
    stages = sorted(path.name for path in output.iterdir() if (path / "done.json").is_file())
    golden = {
        "stages": {stage: of_stage(output / stage) for stage in stages},
        "taus": {stage: taus_of(output / stage / REPORT) for stage in stages if (output / stage / REPORT).is_file()},
        "decoded": decoded.table(),
    }
    text = json.dumps({f"{name}.json": golden}).replace(str(output), "<run>").replace(str(ROOT), "<repository>")
    return dict(json.loads(text))


def taus_of(report: Path) -> dict[str, float | None]:
    """What was measured on, and the method -> tau."""
    cells = json.loads(report.read_text())["cells"]
    names = ("benchmark", "turn", "budget", "temperature", "max_new_tokens", "method")
    return {" | ".join(f"{cell[name]}" for name in names if cell[name] != ""): cell["tau"] for cell in cells}


def of_stage(folder: Path) -> dict[str, Any]:
    """Metrics of every step, and hashes of weights and data."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    record: dict[str, Any] = {}
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        record["metrics"] = [cleaned(json.loads(line)) for line in metrics.read_text().splitlines()]
    kept = [path for path in files if "checkpoints" not in path.parts and not UNRECORDED.fullmatch(path.name)]
    # Shards are what losses are of: those tell of them.
    kept = [path for path in kept if not (path.parent / "identity.json").is_file()]
    record["weights"] = {_without_hashes(str(path.relative_to(folder))): tensors_of(path) for path in kept
                         if path.suffix == ".safetensors"}  # fmt: skip
    digests: dict[str, Any] = {}
    # What an evaluation has measured is its report; the rest are logs with times.
    is_evaluation = (folder / REPORT).is_file()
    for path in () if is_evaluation else kept:
        if path.suffix != ".safetensors":
            # Of pictures one digest a folder.
            key = path.parent if path.suffix in (".png", ".mp4") else path
            digests.setdefault(shown(str(key.relative_to(folder))), hashlib.sha256()).update(content(path, folder))
    if digests:
        record["data"] = {key: digest.hexdigest()[:16] for key, digest in sorted(digests.items())}
    return record


def shown(name: str) -> str:
    """A file's name without hashes and numbers of records."""
    return re.sub(r"\d{3,}", "#", _without_hashes(name))


def _without_hashes(name: str) -> str:
    """A table of neighbours is named by its codebook's hash, whose last bits are the machine's."""
    return re.sub(r"[0-9a-f]{12,}", "*", name)


def content(path: Path, folder: Path) -> bytes:
    """What a digest is made of: JSON without what depends on clock and machine."""
    data = path.read_bytes()
    if path.suffix == ".json":
        with contextlib.suppress(ValueError):
            data = json.dumps(cleaned(json.loads(data)), sort_keys=True).encode()
    return path.name.encode() + data.replace(str(folder.parent).encode(), b"<run>")


def tensors_of(path: Path) -> dict[str, str]:
    """Name -> type, shape and hash of each tensor of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, about in sorted(json.loads(data[8 : 8 + size]).items()):
        if name != "__metadata__":
            start, end = about["data_offsets"]
            digest = hashlib.sha256(data[8 + size + start : 8 + size + end]).hexdigest()[:16]
            tensors[name] = f"{about['dtype']} {about['shape']} {digest}"
    return tensors


def dry_runs() -> dict[str, str]:
    """File name -> dry-run text of each shipped recipe."""
    from draftsmith.recipes.commands.cli import main

    # As if every disk had room: a dry run warns where states do not fit, which depends on the machine.
    shutil.disk_usage = lambda path: SimpleNamespace(total=1 << 60, used=0, free=1 << 60)  # type: ignore[assignment,return-value]
    texts = {}
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        name = str(path.relative_to(ROOT / "recipes").with_suffix(""))
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([f"recipe={name}", "dry_run=true"])
        text = said.getvalue().replace(str(ROOT), "<repository>").replace(str(Path.home()), "~")
        texts[f"{DRY_RUNS}/{name.replace('/', '.')}.txt"] = text + (f"exit code {code}\n" if code else "")
    return texts


# Recording and checking


def machine() -> dict[str, str]:
    """What the last bits of a number depend on."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    processor = models[0] if models else platform.processor() or platform.machine()
    return {"processor": processor, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def _child(name: str, folder: str) -> None:
    """One run in a forked process: what it sets, seeds and wraps stays there. Its result goes to a file."""
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    goldens = dry_runs() if name == DRY_RUNS else record_run(name, Path(folder))
    Path("found.json").write_text(json.dumps(goldens))


def run_one(name: str) -> dict[str, Any]:
    """File name -> what it is to hold."""
    with tempfile.TemporaryDirectory(prefix="freeze-") as folder:
        process = multiprocessing.get_context("fork").Process(target=_child, args=(name, folder))
        start = time.monotonic()
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name} failed:\n{(Path(folder) / 'log.txt').read_text()[-4000:]}")
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        return dict(json.loads((Path(folder) / "found.json").read_text()))


def preload() -> None:
    """Imports what every run needs, once; the runs are forked from here."""
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  every engine asks for it, and it imports a compiler
    import draftsmith.recipes.commands.cli
    import draftsmith.recipes.config.schema
    import draftsmith.trainers.run.run  # noqa: F401
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage a score of times for an engine, and what is imported is none


def record(names: list[str]) -> int:
    """Run these and write their goldens and what each was recorded on; returns the exit code."""
    for name in names:
        for file, value in run_one(name).items():
            write(GOLDENS / file, value)
        write(MACHINES, dict(sorted((read(MACHINES) | {name: machine()}).items())))
    size = sum(path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file())
    print(f"{GOLDENS}: {size / 1e6:.2f} MB")
    return 0


def check(names: list[str], close: float | None = None) -> int:
    """Run these and print every difference from their goldens; returns the exit code, 1 where there is one.

    Args:
        close: as of `differences`.
    """
    here, machines = machine(), read(MACHINES)
    count = 0
    for name in names:
        there = machines.get(name)
        if here != there and name != DRY_RUNS:
            print(f"{name}: recorded on {there}, and this is {here}: losses within 1%, no hashes, tokens or taus")
        goldens = run_one(name)
        for file, value in goldens.items():
            value, same = json.loads(json.dumps(value)), here == there
            for line in differences(read(GOLDENS / file), value, same_machine=same, close=close):
                print(f"{file}: {line}")
                count += 1
        gone = {f"{DRY_RUNS}/{path.name}" for path in (GOLDENS / DRY_RUNS).glob("*.txt")} - goldens.keys()
        for file in sorted(gone if name == DRY_RUNS else ()):
            print(f"{file}: recorded, and no recipe makes it")
            count += 1
    print("no difference" if not count else f"{count} differences")
    return 1 if count else 0


def main() -> int:
    """Read the command line and record or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("runs", nargs="*", help=f"of {DRY_RUNS}, {', '.join(RUNS)}; none: all")
    parser.add_argument("--close", action="store_true", help="numbers within 1e-4, any weights: what is not fast")
    arguments = parser.parse_intermixed_args()
    if unknown := set(arguments.runs) - {DRY_RUNS, *RUNS}:
        parser.error(f"no run {', '.join(sorted(unknown))}")
    os.environ |= ENVIRONMENT
    preload()
    names = arguments.runs or [DRY_RUNS, *RUNS]
    return record(names) if arguments.command == "record" else check(names, 1e-4 if arguments.close else None)


if __name__ == "__main__":
    sys.exit(main())
