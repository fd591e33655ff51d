#!/usr/bin/env python
"""Memory of encoding pictures for an image generator, and the work that a killed encode stage repeats.

    scripts/benchmark_encoding.py             prints a section for docs/results/benchmarks.md
    scripts/benchmark_encoding.py --quick     fewer pictures, for a look

Peak memory of an encode stage over 500 and 5000 pictures, each in a fresh process; and a run that is killed in the
middle and started again by the same command.
"""

import argparse
import io
import os
import signal
import statistics
import sys
import tarfile
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from draftsmith.core.tracking import TrackingConfig
from draftsmith.eval import timing
from draftsmith.eval.timing import answer_of, fresh_process, row, spread
from draftsmith.models.llamagen.files import save_model
from draftsmith.models.llamagen.vq import VqConfig, VqTokenizer
from draftsmith.recipes.load import load
from draftsmith.trainers.context import Context
from draftsmith.trainers.engine import EngineConfig
from draftsmith.trainers.stages.encode import EncodeStage
from PIL import Image

SIDE, PER_TAR, NUM_SHARDS = 32, 1000, 20


def write_pictures(folder: Path, count: int) -> int:
    """Tars of noise with captions, in which every fiftieth picture repeats an earlier one; returns their bytes."""
    folder.mkdir()
    for first in range(0, count, PER_TAR):
        with tarfile.open(folder / f"{first:06d}.tar", "w") as tar:
            for number in range(first, min(first + PER_TAR, count)):
                generator = np.random.default_rng(number - 7 if number % 50 == 49 else number)
                data, pixels = io.BytesIO(), generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(data, "PNG", compress_level=1)
                for suffix, content in (("png", data.getvalue()), ("txt", b"a picture of noise")):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return sum(path.stat().st_size for path in folder.iterdir())


def encode(pictures: Path, output: Path, per_shard: int) -> None:
    """One stage in this process: pixels and codes."""
    torch.set_num_threads(1)
    shape = VqConfig(base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, z_channels=8, codebook_size=16, groups=8)
    if not (vq := output / "vq").is_dir():
        tokenizer = VqTokenizer(shape)
        tokenizer.reset_parameters(torch.Generator().manual_seed(0))
        save_model(tokenizer, vq)
    target = load(["recipe=demo/visual-ar"]).recipe.target.model_copy(update={"vq": shape, "image_size": SIDE})
    source = {"kind": "webdataset", "path": f"{pictures}/*.tar"}
    settings: dict[str, Any] = {"kind": "encode", "source": source, "write": ["pixels", "codes"]}
    folder, engine, tracking = output / "stage", EngineConfig(), TrackingConfig()
    folder.mkdir(exist_ok=True)
    context = Context("codes", folder, 0, "benchmark", target, None, engine, tracking, {"vq": vq}, lambda line: None)
    with redirect_stdout(sys.stderr):
        EncodeStage(**settings, samples_per_shard=per_shard).run(context)


def encoding(pictures: Path, output: Path, per_shard: int) -> Any:
    """The stage in a fresh process."""
    output.mkdir(exist_ok=True)
    return fresh_process("--encode", pictures, output, per_shard)


def benchmark_encode(folder: Path, few: int, many: int, pairs: int) -> None:
    """Print the encode stage's peak memory over few and many pictures."""
    per_shard = many // NUM_SHARDS
    sizes = {count: write_pictures(folder / f"{count}", count) for count in (few, many)}
    peaks: dict[int, list[float]] = {few: [], many: []}
    for number in range(pairs):
        for count in (few, many) if number % 2 else (many, few):
            process = encoding(folder / f"{count}", folder / f"out-{count}-{number}", per_shard)
            peaks[count].append(float(answer_of(process)))
    low, high = peaks[few], peaks[many]
    added, files = (many - few) * SIDE * SIDE * 3 / 2**20, (sizes[many] - sizes[few]) / 2**20
    more = [h - s for s, h in zip(low, high, strict=True)]
    row(f"peak RSS over {many} pictures / over {few} ({statistics.median(low):.0f} MiB)", 1,
        spread(timing.ratios(high, low)), pairs)  # fmt: skip
    row(f"the same in MiB more; {added:.0f} MiB of pixels and {files:.0f} MiB of files were added", 0,
        spread(more, 1), pairs)  # fmt: skip
    benchmark_kill(folder / f"{many}", folder / "killed", folder / f"out-{many}-0", per_shard)


def benchmark_kill(pictures: Path, output: Path, whole: Path, per_shard: int) -> None:
    """SIGKILL in the middle, then the same command again; `whole` is an undisturbed run's."""
    shards = output / "stage" / "shards"
    process = encoding(pictures, output, per_shard)
    while len(list(shards.glob("shard-*.json"))) < NUM_SHARDS // 2 and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    before = written(shards)
    answer_of(encoding(pictures, output, per_shard))
    after = written(shards)
    again = sum(before[name] != after[name] for name in before)
    expected = list((whole / "stage" / "shards").iterdir())
    same = sum(path.read_bytes() == (shards / path.name).read_bytes() for path in expected)
    row(f"killed with {len(before)} of {NUM_SHARDS} shards finished; of these, the restart wrote again", 0, again, 1)
    row("shards that it wrote for the first time", NUM_SHARDS - len(before), len(after) - len(before), 1)
    row("its files that equal an undisturbed run's", len(expected), same, 1)


def written(shards: Path) -> dict[str, list[tuple[int, int]]]:
    """Finished shard -> when its files were written, and as which ones: a rename over a file changes both."""
    finished = {path.stem: (path, path.with_suffix(".tar")) for path in shards.glob("shard-*.json")}
    return {name: [(p.stat().st_mtime_ns, p.stat().st_ino) for p in paths] for name, paths in finished.items()}


def encoding_section(arguments: argparse.Namespace) -> None:
    """Print the measurements of encoding, made in a temporary folder."""
    few, many, pairs = (100, 1000, 1) if arguments.quick else (500, 5000, 2)
    size = f"pictures of {SIDE} x {SIDE} pixels, pixels and codes, deduplicated, {many // NUM_SHARDS} in a shard"
    timing.header(f"seed {arguments.seed}, {size}")
    timing.table("what", "bound", "median [quartiles]", "pairs")
    with tempfile.TemporaryDirectory() as folder:
        benchmark_encode(Path(folder), few, many, pairs)


def main() -> None:
    """Prints the section; `--encode` runs one stage for a fresh process and prints its peak memory."""
    parser = timing.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pictures, for a look")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--encode", nargs=3, help=timing.HIDDEN)
    arguments = parser.parse_args()
    if arguments.encode:
        pictures, output, per_shard = arguments.encode
        encode(Path(pictures), Path(output), int(per_shard))
        print(timing.peak_mib())
    else:
        encoding_section(arguments)


if __name__ == "__main__":
    main()
