"""A patch of vLLM 0.32's V1 runner: drafters whose inputs leave pictures out (`positions: compact`).

`SpecDecodeBaseProposer.propose` makes an input of every token, at the token's own position and slot of the cache. Here
the inputs of pictures are taken out of its arguments. The others move up: an input's position is the number of kept
inputs before it, its slot is that one of the request's own blocks, which are long enough. So later passes, and draft
steps, find the cache as a shorter prompt's. In mode T of a draft LVLM one newline stays for each picture, and ViSpec
keeps a picture's last inputs, which hold vectors. Can go when vLLM's proposer takes a draft's own inputs: when
tests/eval/engines/test_patches.py passes for T, the text-only window and ViSpec without it.
N inputs, R requests, D width.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any


@functools.cache
def patch() -> None:
    """Wrap two methods, once a process."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose = SpecDecodeBaseProposer.propose
    signature, propose_ids = inspect.signature(propose), GPUModelRunner.propose_draft_token_ids

    @functools.wraps(propose_ids)
    def with_requests(self, scheduled, *arguments, **named):
        self.drafter.draftsmith_pass = self, scheduled.num_scheduled_tokens
        return propose_ids(self, scheduled, *arguments, **named)

    @functools.wraps(propose)
    def narrowed(self, *arguments, **named):
        window = getattr(self.model, "draftsmith_window", None)
        if window is None:
            return propose(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named)
        bound.arguments |= narrow(self, bound.arguments, window)
        return propose(*bound.args, **bound.kwargs)

    GPUModelRunner.propose_draft_token_ids = with_requests
    SpecDecodeBaseProposer.propose = narrowed


@dataclass(frozen=True)
class Window:
    """The inputs that a drafter keeps of each picture.

    Args:
        fill: (runner, names of requests, their `Remaining`) -> what stands in the kept inputs of pictures, as
            `mm_embed_inputs` of `propose`; None: nothing does.
    """

    newline: int | None = None  # id that stands in its first input; None: that input is not kept
    last: int = 0  # how many of its last inputs stay
    fill: Any = None


@dataclass(frozen=True)
class Remaining:
    """The inputs of one request that stay in a pass."""

    places: Any  # [n] numbers of the inputs that stay, among all of the request; of its last one in any case
    moved: Any  # [n] how many are left out before each
    left_out: int  # how many are, up to the end of the pass
    runs: list[tuple[int, int]]  # first and one past the last input of each picture


def remaining(start: int, count: int, runs: list[tuple[int, int]], window: Window) -> Remaining:
    """The inputs that stay, of `count` from `start` on.

    A prompt that is cut inside a picture keeps the pass's last input, or there might be none: the next pass writes over
    it, because it stands where the first input after the picture will.
    """
    import numpy as np

    places = np.arange(start, start + count)
    mask, before, left_out = np.ones(count, dtype=bool), np.zeros(count, dtype=np.int64), 0
    for first, stop in runs:
        lo = first + (window.newline is not None)
        hi = max(lo, stop - window.last)
        mask &= (places < lo) | (places >= hi)
        before += places.clip(lo, hi) - lo
        left_out += min(max(start + count, lo), hi) - lo
    left_out -= int(not mask[-1])
    mask[-1] = True
    return Remaining(places[mask], before[mask], left_out, runs)


def narrow(proposer, given, window: Window) -> dict:
    """Arguments of `propose` without the inputs of pictures; those that stay as they are, are left out. `given`: the
    arguments by name.
    """
    import numpy as np
    import torch

    runner, lengths = proposer.draftsmith_pass
    metadata, shift = given["common_attn_metadata"], int(proposer.pass_hidden_states_to_model)
    names = runner.input_batch.req_ids[: metadata.batch_size()]
    rows, places, newlines, offset = [], [], [], 0
    for name in names:
        request, count = runner.requests[name], lengths[name]
        start = request.num_computed_tokens
        pictures = [f.mm_position for f in request.mm_features]
        # An EAGLE-type drafter's input holds the token after it.
        runs = [(max(at.offset - shift, 0), at.offset - shift + at.length) for at in pictures]
        rows.append(remaining(start, count, runs, window))
        places.append(rows[-1].places - start + offset)
        newlines += [offset + first - start for first, _ in runs if start <= first < start + count]
        offset += count
    more = {"mm_embed_inputs": window.fill(runner, names, rows)} if window.fill else {}
    left_out = torch.tensor([row.left_out for row in rows], dtype=metadata.seq_lens.dtype)
    if not left_out.any() and not newlines:
        return more
    ids, device = given["target_token_ids"], given["target_token_ids"].device
    assert offset == len(ids), f"{offset} inputs of requests, {len(ids)} of the pass"
    stays = torch.from_numpy(np.concatenate(places)).to(device)
    positions = given["target_positions"][stays] - torch.from_numpy(np.concatenate([r.moved for r in rows])).to(device)
    if window.newline is not None:
        ids = ids.clone()
        ids[newlines] = window.newline
    if shift:  # the proposer hands each input the id of the next one
        ids = torch.cat([ids[:1], ids.roll(-1)[stays][:-1]])
    else:
        ids = ids[stays]
    sizes = [len(row.places) for row in rows]
    starts, upper = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32), metadata.seq_lens_cpu_upper_bound
    sampled = given.get("token_indices_to_sample")
    if sampled is not None:  # by pass: of those that stay, the one with the same number
        numbers = torch.full((offset,), -1, device=device)
        numbers[stays] = torch.arange(len(stays), device=device)
        more["token_indices_to_sample"] = numbers[sampled.long()].to(sampled.dtype)
    return more | {
        "target_token_ids": ids,
        "target_positions": positions,
        "target_hidden_states": given["target_hidden_states"][stays],
        "common_attn_metadata": metadata.replace(
            query_start_loc=starts.to(device), query_start_loc_cpu=starts, num_actual_tokens=len(stays),
            seq_lens=metadata.seq_lens - left_out.to(device), max_query_len=max(sizes),
            seq_lens_cpu_upper_bound=None if upper is None else upper - left_out,
            slot_mapping=_slots(metadata, positions, sizes, metadata.slot_mapping[stays], proposer.block_size),
            _num_computed_tokens_cache=None, _token_to_req_indices_cache=None,
        ),
    }  # fmt: skip


def _slots(metadata, positions, sizes, slots, block_size: int):
    """[N] of the requests' blocks, at the positions; padding stays what it is in `slots` [N]."""
    import torch

    rows = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(positions.device)
    blocks = metadata.block_table_tensor[rows, positions // block_size].to(slots.dtype)
    return torch.where(slots < 0, slots, blocks * block_size + positions % block_size)
