"""A patch of vLLM 0.32's V1 runner: a draft model (method `draft_model`) that is shown pictures.

`GPUModelRunner.propose_draft_token_ids` gathers pictures for every drafter from one token further on
(`shift_computed_tokens=1`), which is right for EAGLE, whose ids are rotated; a draft model's are not, so that pictures
would stand one token too early. And `SpecDecodeBaseProposer.set_inputs_first_pass` gives each request of a draft model
one more input, the token that was just drawn, for which the mask of pictures has no place. Here the pictures are
gathered unshifted, and the mask gets a place for each request. Can go when vLLM shows a draft model its pictures by
itself: when tests/eval/engines/test_patches.py passes for mode M without it.
"""

import functools
import inspect
import itertools


@functools.cache
def patch() -> None:
    """Wrap two methods, once a process."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Base
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather, signature = GPUModelRunner._gather_mm_embeddings, inspect.signature(Base.propose)

    @functools.wraps(gather)
    def unshifted(self, scheduled, shift_computed_tokens=0):
        shift = 0 if isinstance(getattr(self, "drafter", None), DraftModelProposer) else shift_computed_tokens
        return gather(self, scheduled, shift_computed_tokens=shift)

    @functools.wraps(Base.propose)
    def with_places(self, *arguments, **named):
        bound = signature.bind(self, *arguments, **named)
        given = bound.arguments
        if given.get("mm_embed_inputs") is not None:
            features, mask = given["mm_embed_inputs"]
            starts = given["common_attn_metadata"].query_start_loc_cpu.tolist()
            given["mm_embed_inputs"] = features, one_more_each(mask, starts)
        return Base.propose(*bound.args, **bound.kwargs)

    GPUModelRunner._gather_mm_embeddings = unshifted
    DraftModelProposer.propose = with_places


def one_more_each(mask, starts):
    """[N + R] of a mask [N]: False after each of R requests, whose first places and the end are `starts`."""
    import torch

    pieces = [piece for a, b in itertools.pairwise(starts) for piece in (mask[a:b], mask.new_zeros(1))]
    return torch.cat(pieces)
