"""Operations of a decode cycle on a CPU, where calls take longer than arithmetic; `pretend_cuda/test_decoding.py`
counts launches, reads and uploads.
"""

from typing import Any

import dflash_tiny
import pytest
import test_head_decoding as heads
import tiny
import torch
import visual_tiny
from draftsmith.eval import loop
from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from torch.utils._python_dispatch import TorchDispatchMode

TREE = {"total": 16, "depth": 3, "width": 4}
# Bookkeeping that moves no number.
_FREE = {"detach", "alias", "lift_fresh", "_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided"}


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        self.count += not views and func._schema.name.removeprefix("aten::") not in _FREE
        return func(*args, **(kwargs or {}))


def _case(name):
    """Target, drafter, policy and a request."""
    if name.startswith("image"):
        generator = visual_tiny.llamagen("text", 0)
        big = visual_tiny.target(generator, 3.0)
        torch.manual_seed(0)
        drafter = visual_tiny.EAGLE.drafter(visual_tiny.EAGLE.build(big).eval(), big)
        return big, drafter, Dynamic(**TREE), visual_tiny.request(generator, 7)
    big = tiny.target(whole := tiny.llava(0, layers=6))
    policy = Chain(4) if "chain" in name else Dynamic(**TREE)
    if name.startswith("draft LVLM"):
        return big, tiny.proposal(tiny.near(whole)), policy, tiny.request(1, 1)
    if name.startswith("DFlash"):
        config, head = dflash_tiny.draft(big)
        return big, config.drafter(head, big), policy, tiny.request(1, 1)
    return (
        big,
        heads.drafter_of({"EAGLE-1": "eagle", "EAGLE-3": "eagle3"}[name.split(",")[0]], big),
        policy,
        tiny.request(1, 1),
    )


# The most that a whole cycle has today, of targets with six layers (the image's: two). Lower them with the count.
MOST = {
    "draft LVLM, chain": 1188, "draft LVLM, tree": 1231, "EAGLE-1, tree": 363, "EAGLE-3, tree": 385,
    "EAGLE-3, chain": 396, "DFlash, chain": 326, "image EAGLE, tree": 183,
}  # fmt: skip


@pytest.mark.parametrize("name", MOST)
def test_a_cycle_has_a_bounded_number_of_operations(name):
    big, drafter, policy, asked = _case(name)
    decoding = Decoding(policy, Greedy(), Draw("top-k"), Warp(), 14 if name.startswith("image") else 30, ())
    run, counts = loop._Run(big, drafter, decoding, None, loop._clock(big, drafter)), []
    with torch.inference_mode():
        run.prefill(asked)
        while not run.ended and run.room > policy.num_levels:
            first = run.looks is not None  # cycles in which proposals are looked at
            with Operations() as operations:
                run.cycle()
            counts += [] if first else [operations.count]
    assert max(counts) <= MOST[name], counts
