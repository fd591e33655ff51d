"""How the tests decode."""

from draftsmith.eval.loop import Decoding, Generation, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp


def greedy(policy, max_new_tokens: int = 24, eos: tuple[int, ...] = (), skip: float | None = None) -> Decoding:
    """The likeliest tokens, until one of `eos` comes (default: none ends an answer)."""
    return Decoding(policy, Greedy(), Draw("top-k"), Warp(), max_new_tokens, eos, skip)


def of_transformers(model, given: dict, max_new_tokens: int, *, never, eos: int, pad: int) -> list[int]:
    """Greedy continuation by transformers' own loop and cache; the ids `never` are kept out."""
    output = model.generate(
        **given, max_new_tokens=max_new_tokens, do_sample=False, suppress_tokens=never, eos_token_id=eos,
        pad_token_id=pad,
    )  # fmt: skip
    return output[0, given["input_ids"].shape[1] :].tolist()


def as_plain(target, drafter, asked, policy, max_new_tokens: int = 24, **more) -> Generation:
    """A drafted answer, whose tokens are plain decoding's."""
    plain = generate(target, None, asked, greedy(Chain(1), max_new_tokens, **more))
    drafted = generate(target, drafter, asked, greedy(policy, max_new_tokens, **more))
    assert drafted.tokens == plain.tokens
    return drafted
