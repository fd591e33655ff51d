"""A repair of vLLM 0.32's V1 runner: prompts that are read in pieces (chunked prefill), for EAGLE-type drafters.

An EAGLE-type drafter pairs each state with the token after it. After a piece of a prompt, vLLM pairs the last state
with the prompt's last token: `SpecDecodeBaseProposer.prepare_next_token_ids_padded` asks for token
`num_tokens_no_spec - 1`, which is the end of all known tokens, while the piece ends earlier. The pair's key and value
stay in the draft's cache. Here the token after the piece is asked for. Can go when, without it, a cut prompt drafts as
a whole one does (tests/eval/engines/test_plugin.py).
"""

import functools


def repair() -> None:
    """Wrap two methods; what is wrapped already stays."""
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
    """Known tokens by row, and one past the piece's end where a prompt goes on after it.

    Args:
        known: array of all rows of the batch; not changed.
        names: of the requests, by row.
        requests: name -> its state, with `num_computed_tokens` (before this pass) and `num_prompt_tokens`.
        lengths: name -> tokens of this pass.
    """
    ends = known.copy()
    for row, name in enumerate(names):
        if name in lengths:
            end = requests[name].num_computed_tokens + lengths[name]
            if end < requests[name].num_prompt_tokens:
                ends[row] = end + 1
    return ends
