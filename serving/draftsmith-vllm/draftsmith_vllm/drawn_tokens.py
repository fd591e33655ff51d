"""A repair of vLLM 0.32 on CPUs: temperatures of drafted tokens, where tokens are drawn.

Before drafted tokens are judged, each is given its request's temperature, top-k and top-p: `expand_batch_to_tokens` of
`vllm.v1.sample.rejection_sampler`. The CPU's kernel (`_expand_kernel_impl`) writes into an int64 copy of its output,
so that a float one, the temperatures, keeps whatever its memory held. Answers then have another distribution than
plain decoding's. Here the values are repeated by torch. Can go when, without it, drawn answers have plain decoding's
distribution (tests/eval/engines/test_plugin.py).
"""


def repair() -> None:
    """Replace the function where vLLM runs on a CPU."""
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
