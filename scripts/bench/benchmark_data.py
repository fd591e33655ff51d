#!/usr/bin/env python
"""Time to open a data section of LLaVA's size, and its memory.

    scripts/bench/benchmark_data.py    665000 generated records, as many as LLaVA-1.5's finetuning mixture has
    scripts/bench/benchmark_data.py --suffix .jsonl
    scripts/bench/benchmark_data.py --loader               ours against a plain DataLoader, in thread time

Writes LLaVA JSON of the mixture's shape (1.3 KB and four rounds a record, every sixteenth without a picture) and a few
tiny pictures that all records share. `--loader` compares batches of 16 with those of a DataLoader that somebody
writes who needs no more than this file: records in memory, one call of the tokenizer and of the image processor, labels
by offsets, padding; both in this process, in turns. Else opens it as a train stage does, each time in a fresh process:
cold, where the index is made, and warm, where it is kept; then reads random samples. Memory is what the process alone
holds (USS).
"""

import json
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from draftsmith.data.collate import ConversationCollate
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.llava import LLAVA, SYSTEM
from draftsmith.data.families.processor import Processor
from draftsmith.data.loader import Loader
from draftsmith.data.order import epoch_order
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.scripts import timing
from PIL import Image

TEXT = (
    "the picture shows a red circle near blue square and green triangle that is standing on table with two people "
    "walking beside dog under tree while birds fly over mountain"
)
NUM_PICTURES = 8


def sentence(rng: random.Random, num_words: int) -> str:
    """So many random words, capitalized, with a full stop."""
    return " ".join(rng.choices(TEXT.split(), k=num_words)).capitalize() + "."


def generate(path: Path, num_records: int) -> None:
    """One to eight rounds a record; some answers with paragraphs and characters beyond ASCII."""
    rng = random.Random(0)
    questions = [sentence(rng, rng.randint(4, 16)) for _ in range(2000)]
    answers = [sentence(rng, rng.randint(1, 60)) for _ in range(2000)]
    answers += [f"{sentence(rng, 20)}\n\n“{sentence(rng, 40)}” — café" for _ in range(200)]
    lines = path.suffix == ".jsonl"
    with open(path, "w") as file:
        file.write("" if lines else "[")
        for number in range(num_records):
            image = {"image": f"images/{number % NUM_PICTURES}.png"} if number % 16 else {}
            turns = []
            for turn in range(rng.choice((1, 2, 3, 5, 6, 8))):
                mark = "<image>\n" if image and turn == 0 else ""
                turns.append({"from": "human", "value": mark + rng.choice(questions)})
                turns.append({"from": "gpt", "value": rng.choice(answers)})
            text = json.dumps({"id": f"{number:012d}", **image, "conversations": turns})
            file.write(text + "\n" if lines else (",\n" if number else "") + text)
        file.write("" if lines else "]")
    (path.parent / "images").mkdir()
    for number in range(NUM_PICTURES):
        Image.new("RGB", (40 + number, 30), (30 * number, 100, 50)).save(path.parent / "images" / f"{number}.png")


def small_processor() -> Processor:
    """A processor with a tokenizer of 500 ids."""
    rng = random.Random(0)
    texts = ["USER: ASSISTANT:\n", *(sentence(rng, 12) for _ in range(300))]
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    return LLAVA.new(train_tokenizer(texts, 500), image_size=28, patch_size=14, image_mean=mean, image_std=std)


def held_mib() -> float:
    """Memory that this process alone holds (USS), in MiB."""
    return psutil.Process().memory_full_info().uss / 2**20


def cpu_s() -> float:
    """Of this process and the readers that it has waited for."""
    return sum(os.times()[:4])


def measure(path: Path, num_samples: int) -> dict[str, float]:
    """Open the file and read from it, in this process."""
    torch.set_num_threads(1)
    processor = small_processor()
    before, start, used = held_mib(), time.perf_counter(), cpu_s()
    dataset = ConversationDataset(
        ConversationData(path=str(path), max_length=8192),
        PromptFormat(),
        processor,
        files=[path],
        skipped_log=None,
        cache=path.parent / "cache",
    )
    numbers = {"open_s": time.perf_counter() - start, "cpu_s": cpu_s() - used, "open_mib": held_mib() - before}
    order = lambda: epoch_order(dataset.lengths, seed=0, epoch=0, batch_size=128, grouped=True)  # noqa: E731
    numbers["order_s"] = timing.timed(order)
    indices = np.random.default_rng(0).integers(0, len(dataset), num_samples)
    for name, part in zip(("tenth", "rest"), np.split(indices, [num_samples // 10]), strict=True):
        start = time.perf_counter()
        for index in part.tolist():
            dataset[index]
        numbers[f"{name}_mib"] = held_mib() - before
        numbers["samples_per_s"] = len(part) / (time.perf_counter() - start)
    numbers["peak_rss_mib"] = timing.peak_mib()
    numbers["reader_peak_rss_mib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return numbers


class Plain(torch.utils.data.Dataset):
    """The same records by a short script of one's own."""

    def __init__(self, path: Path, processor: Processor):
        self.records, self.folder, self.processor = json.loads(path.read_text()), path.parent, processor

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        record, processor = self.records[index], self.processor
        run = "<image>" * processor.num_image_tokens
        text, spans = SYSTEM + " ", []
        for turn in record["conversations"]:
            words = turn["value"].replace("<image>", run)
            start = len(text) + len("ASSISTANT:")
            text += f"USER: {words} " if turn["from"] == "human" else f"ASSISTANT: {words}</s>"
            spans += [] if turn["from"] == "human" else [(start, len(text))]
        encoded = processor.tokenizer(text, return_offsets_mapping=True)
        mask = [any(a <= start and end <= b for a, b in spans) for start, end in encoded.offset_mapping]
        item = {"ids": torch.tensor(encoded.input_ids), "mask": torch.tensor(mask)}
        if "image" in record:
            picture = Image.open(self.folder / record["image"]).convert("RGB")
            item["pixels"] = processor.image_processor(picture, return_tensors="pt").pixel_values
        return item


def plain_batch(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded on the right, pictures in one tensor."""
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {name: pad([item[name] for item in items], batch_first=True) for name in ("ids", "mask")}
    pixels = [item["pixels"] for item in items if "pixels" in item]
    return batch | ({"pixels": torch.cat(pixels)} if pixels else {})


def time_loaders(path: Path, pairs: int, steps: int = 12) -> None:
    """Prints the ratio of thread times of both loaders over the same number of batches, in pairs that take turns."""
    torch.set_num_threads(1)
    processor, batch = small_processor(), 16
    dataset = ConversationDataset(
        ConversationData(path=str(path), max_length=8192, aspect="square"), PromptFormat(), processor, files=[path],
        skipped_log=None, cache=path.parent / "cache",
    )  # fmt: skip
    collate = ConversationCollate(processor.pad_id, processor.image_size)
    plain = Plain(path, processor)

    def ours(first: int) -> None:
        loader = Loader(dataset, seed=0, batch_size=batch, micro_batch_size=batch, total_steps=first + steps,
                        start_step=first, collate=collate)  # fmt: skip
        for _ in loader:
            pass

    def theirs(first: int) -> None:
        rows = epoch_order(dataset.lengths, seed=0, epoch=0, batch_size=batch, grouped=False)
        sampler = rows[first * batch : (first + steps) * batch].tolist()
        for _ in torch.utils.data.DataLoader(plain, batch, sampler=sampler, collate_fn=plain_batch):
            pass

    ratios = []
    for pair in range(pairs + 1):
        times = {}
        for run in (ours, theirs) if pair % 2 else (theirs, ours):
            start = time.thread_time()
            run(pair * steps)
            times[run] = time.thread_time() - start
        ratios += [times[ours] / times[theirs]] if pair else []  # the first reads files and tables
    timing.table("12 batches of 16 records, pictures included", "median of ratios [quartiles]", "pairs")
    timing.row("ours / a plain DataLoader", timing.spread(ratios), pairs)


def main() -> None:
    """Writes a file of records and prints what opening and reading it takes; `--measure` is one fresh process."""
    parser = timing.options(__doc__)
    parser.add_argument("--records", type=int, default=665000)
    parser.add_argument("--samples", type=int, default=20000, help="read at random after opening")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes for each line")
    parser.add_argument("--suffix", choices=(".json", ".jsonl"), default=".json")
    parser.add_argument("--loader", action="store_true", help="compare with a plain DataLoader instead")
    parser.add_argument("--pairs", type=int, default=15, help="of --loader")
    parser.add_argument("--measure", type=Path, help=timing.HIDDEN)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.samples)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{options.suffix}"
        if options.loader:
            generate(path.with_suffix(".json"), 4000)
            timing.header(f"4,000 records, {options.pairs} pairs")
            return time_loaders(path.with_suffix(".json"), options.pairs)
        generate(path, options.records)
        size = f"{options.records} records, {path.stat().st_size / 1e6:.0f} MB of {options.suffix}"
        timing.header(f"{size}, seed 0, n {options.rounds}")
        few, many = options.samples // 10, options.samples
        timing.table("start", "opening the data", "CPU", "grouping by modality", "memory after opening",
                     f"added by {few:,} samples", f"added by {many:,}", "samples a second", "peak RSS",
                     "peak RSS of an index reader")  # fmt: skip
        for name in ("cold (two processes build the index)", "warm (the index exists)"):
            several = []
            for _ in range(options.rounds):
                if name.startswith("cold"):
                    shutil.rmtree(path.parent / "cache", ignore_errors=True)
                process = timing.fresh_process("--samples", options.samples, "--measure", path)
                several.append(json.loads(timing.answer_of(process)))
            found = {key: statistics.median(one[key] for one in several) for key in several[0]}
            opening, used = (timing.spread([one[key] for one in several], 2, unit=" s") for key in ("open_s", "cpu_s"))
            timing.row(name, opening, used, f"{found['order_s']:.2f} s",
                       *(f"{found[key]:.0f} MiB" for key in ("open_mib", "tenth_mib", "rest_mib")),
                       f"{found['samples_per_s']:,.0f}",
                       *(f"{found[key]:.0f} MiB" for key in ("peak_rss_mib", "reader_peak_rss_mib")))  # fmt: skip


if __name__ == "__main__":
    main()
