#!/usr/bin/env python
"""Our decode cycle and training step against peers', in one process, on the same weights.

    scripts/bench/benchmark_peers.py                    transformers' assisted generation alone
    scripts/bench/benchmark_peers.py --peers FOLDER     and the official loops and training step, 9 pairs at two sizes

1. `transformers.generate(assistant_model=...)`: chains of five tokens, after short and long prompts.
2. `eagenerate` of SafeAILab/EAGLE: EAGLE-3's and EAGLE-1's heads, EAGLE-2's tree.
3. `generate` of jadohu/LANTERN: the same tree over a LlamaGen with guidance, exact and relaxed.
4. `dflash_generate` of z-lab/dflash and the decoding loop of deepseek-ai/DeepSpec: DFlash's and DSpark's blocks.
5. The EAGLE-3 training step of SafeAILab/EAGLE, at four lengths.
6. The training steps of vllm-project/speculators: DFlash's, DSpark's and EAGLE-3's, at four lengths.
7. The training steps of sgl-project/SpecForge: EAGLE-3's and DFlash's, at four lengths.

FOLDER holds clones, which are read and not installed:

    git clone https://github.com/SafeAILab/EAGLE FOLDER/EAGLE && git -C FOLDER/EAGLE checkout cb7e084
    git clone https://github.com/jadohu/LANTERN FOLDER/LANTERN && git -C FOLDER/LANTERN checkout 3a56e45
    git clone https://github.com/z-lab/dflash FOLDER/dflash && git -C FOLDER/dflash checkout 44947fb
    git clone https://github.com/deepseek-ai/DeepSpec FOLDER/DeepSpec && git -C FOLDER/DeepSpec checkout afdfa7c
    git clone https://github.com/sgl-project/SpecForge FOLDER/SpecForge && git -C FOLDER/SpecForge checkout a6b6b02
    pip install --no-deps --target FOLDER/speculators speculators==0.9.0

They pin older packages, which would stand in this project's way: the files that are read here need no more than an
environment with this project (scripts/environment.sh; DRAFTSMITH_VENV names one apart), and the names of transformers 4
that they miss are put back (scripts/bench/peers/clones.py). Both sides have the same random weights. Greedy answers and
gradients are compared before anything is timed, and a difference ends the run. tau is near 1 with random weights; what
a cycle takes hardly depends on it, tokens a second do.
"""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from draftsmith.core.errors import UserError
from draftsmith.scripts import timing
from peers import pairs
from peers.assisted import assisted
from peers.official_blocks import official_blocks
from peers.official_eagle import official_eagle
from peers.official_lantern import official_lantern
from peers.ours import SIZES
from peers.specforge_dflash import specforge_dflash
from peers.specforge_eagle3 import specforge_eagle3
from peers.speculators_eagle3 import speculators_eagle3
from peers.speculators_step import speculators
from peers.training_step import training
from transformers.utils import logging

LOOPS = {"assisted": assisted, "eagle": official_eagle, "lantern": official_lantern, "blocks": official_blocks}
STEPS = {
    "training": training, "speculators": speculators, "speculators-eagle3": speculators_eagle3,
    "specforge-eagle3": specforge_eagle3, "specforge-dflash": specforge_dflash,
}  # fmt: skip


def main() -> None:
    """Prints tables for docs/results/benchmarks.md."""
    parser = timing.options(__doc__)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="of the clones")
    parser.add_argument("--only", nargs="+", choices=[*LOOPS, *STEPS], help="these peers; default: all")
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--lengths", nargs="+", type=int, help="of training samples, in tokens (default: of each peer)")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--cycles", type=int, default=6, help="of an answer that are timed")
    parser.add_argument("--checked", type=int, default=3, help="greedy answers that are compared")
    parser.add_argument("--tokens", type=int, default=16, help="of such an answer")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = arguments.only or ([*LOOPS, *STEPS] if arguments.peers else ["assisted"])
    if arguments.peers is None and chosen != ["assisted"]:
        raise UserError("these peers are clones", where="--peers", hint="see --help")
    logging.set_verbosity_error()
    timing.header(f"seed {arguments.seed}, float32, this thread's time")
    if loops := [name for name in LOOPS if name in chosen]:
        pairs.head()
        pairs.profiles(
            [profile for size in arguments.sizes for name in loops for profile in LOOPS[name](size, arguments)]
        )
    for name in STEPS:
        if name in chosen:
            STEPS[name](arguments)


if __name__ == "__main__":
    main()
