"""Repairs of vLLM 0.32, made once a process; what is wrapped already stays.

tests/eval/engines/test_plugin.py shows each fault without its repair.
"""

import functools


def repair_cut_prompts() -> None:
    """Prompts that are read in pieces (chunked prefill), for EAGLE-type drafters, in the V1 runner.

    An EAGLE-type drafter pairs each state with the token after it. After a piece of a prompt, vLLM pairs the last state
    with the prompt's last token: `SpecDecodeBaseProposer.prepare_next_token_ids_padded` asks for token
    `num_tokens_no_spec - 1`, which is the end of all known tokens, while the piece ends earlier. The pair's key and
    value stay in the draft's cache. Here the token after the piece is asked for. A preempted request comes back so,
    too: its prompt and its answer so far are read anew. Can go when, without it, both draft as whole prompts do.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(SpecDecodeBaseProposer.prepare_next_token_ids_padded, "__wrapped__"):
        return
    propose, prepare = GPUModelRunner.propose_draft_token_ids, SpecDecodeBaseProposer.prepare_next_token_ids_padded

    @functools.wraps(propose)
    def with_lengths(self, scheduled, *arguments, **named):
        self.drafter.draftsmith_scheduled = scheduled.num_scheduled_tokens
        return propose(self, scheduled, *arguments, **named)

    @functools.wraps(prepare)
    def with_next(self, sampled, requests, batch, discarded):
        known, lengths = batch.num_tokens_no_spec, getattr(self, "draftsmith_scheduled", {})
        batch.num_tokens_no_spec = ends_of_pieces(known, batch.req_ids, requests, lengths)
        try:
            return prepare(self, sampled, requests, batch, discarded)
        finally:
            batch.num_tokens_no_spec = known

    GPUModelRunner.propose_draft_token_ids = with_lengths
    SpecDecodeBaseProposer.prepare_next_token_ids_padded = with_next


def ends_of_pieces(known, names, requests, lengths):
    """Known tokens by row, and one past the piece's end where known ones go on after it.

    Args:
        known: array of all rows of the batch; not changed.
        names: of the requests, by row.
        requests: name -> its state, with `num_computed_tokens` (before this pass) and `num_tokens`.
        lengths: name -> tokens of this pass.
    """
    ends = known.copy()
    for row, name in enumerate(names):
        if name in lengths:
            end = requests[name].num_computed_tokens + lengths[name]
            if end < requests[name].num_tokens:
                ends[row] = end + 1
    return ends


def repair_drawn_tokens() -> None:
    """Temperatures of drafted tokens on CPUs, where tokens are drawn.

    Before drafted tokens are judged, each is given its request's temperature, top-k and top-p by
    `expand_batch_to_tokens`. The CPU's kernel (`_expand_kernel_impl`) writes into an int64 copy of its output, so that
    a float one, the temperatures, keeps whatever its memory held. Answers then have another distribution than plain
    decoding's. Can go when, without it, drawn answers have plain decoding's distribution.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = repeated


def repeated(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """[num_tokens] of values [R]: each as often as its request has drafted tokens, whose running sums are given."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def repair_top_k() -> None:
    """Drawn requests with `top_k`, in passes that bring no drafted token.

    Such a pass hands zero rows to `apply_top_k_only`, whose `k.max()` raises, and the engine ends. Here no rows come
    back as they are. Can go when, without it, a request with a temperature and `top_k` is answered beside a drafter.
    """
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    apply = ops.apply_top_k_only
    if not hasattr(apply, "__wrapped__"):
        ops.apply_top_k_only = functools.wraps(apply)(lambda logits, k: apply(logits, k) if len(logits) else logits)


def repair_medusa_ids() -> None:
    """Medusa heads that score a part of the vocabulary.

    `Medusa.load_weights` makes the file's `token_map` a parameter and leaves it out of the names that it returns, so
    that the loader stops: weights were not initialized from checkpoint. Can go when such heads load without it.
    """
    from vllm.model_executor.models.medusa import Medusa

    load = Medusa.load_weights
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def with_ids(self, weights):
        loaded = load(self, weights)
        return loaded if self.token_map is None else loaded | {"token_map"}

    Medusa.load_weights = with_ids
