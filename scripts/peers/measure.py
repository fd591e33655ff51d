#!/usr/bin/env python
"""Our training steps against those of speculators and SpecForge, in one process, on the same weights and states.

    scripts/peers/measure.py --peers FOLDER                    every peer at two sizes and four lengths, 9 pairs
    scripts/peers/measure.py --peers FOLDER --only specforge-dflash --lengths 64 --pairs 1

FOLDER holds a clone and a package, which are read and not installed:

    git clone https://github.com/sgl-project/SpecForge FOLDER/SpecForge && git -C FOLDER/SpecForge checkout a6b6b02
    pip install --no-deps --target FOLDER/speculators speculators==0.9.0

Losses and every weight's gradient are compared before anything is timed, and a difference ends the run.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from draftsmith.scripts.bench import SIZES, about, target_of
from peers import specforge_steps, speculators_steps
from peers.steps import HEADING, KINDS, over_blocks, over_heads

PEERS = ("speculators-eagle3", "speculators", "specforge-eagle3", "specforge-dflash")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=[*PEERS])
    parser.add_argument("--sizes", nargs="+", default=["demo size", "width 512"], choices=SIZES)
    parser.add_argument("--lengths", nargs="+", type=int, help="of samples, in tokens")
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args(arguments)
    print(about("scripts/peers/measure.py", arguments, 0))
    for peer in options.only:
        print(f"\n{peer}\n\n| {' | '.join(HEADING)} |\n|" + " --- |" * len(HEADING))
        torch.manual_seed(0)
        targets = {size: target_of(size, torch.device("cpu")) for size in options.sizes}
        if peer.endswith("eagle3"):  # the likeliest token of a real target is nearly always one that a draft has
            for target in targets.values():
                target.decoder.model.lm_head.weight.data[::4] *= 4
        if peer == "speculators-eagle3":
            over_heads(options, targets, speculators_steps.Head)
        elif peer == "specforge-eagle3":
            over_heads(options, targets, specforge_steps.Head)
        elif peer == "speculators":
            over_blocks(options, targets, KINDS, speculators_steps.Blocks)
        else:
            over_blocks(options, targets, ["DFlash"], specforge_steps.Blocks)


if __name__ == "__main__":
    main(sys.argv[1:])
