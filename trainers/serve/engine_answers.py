"""What an engine wrote, compared with a schema and with what it was asked before anyone uses it.

An engine is another project's program, of a version that nobody here may know. Letters: T tokens, L layers, D width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ...core.errors import UserError
from ...core.files import read_json
from ...core.pretrained import opened
from .workers.draftsmith_jobs import prompt_hash

_CURE = (
    "the engine, or the worker that asks it, is at fault: its log lies beside the file; another version of the engine, "
    "or engine: {kind: transformers}, may do better"
)


@dataclass(frozen=True)
class Asked:
    """A request."""

    name: str  # of its record
    ids: Tensor  # of the prompt, every placeholder in full [T]
    limit: int = 1  # tokens of the answer, at most


@dataclass(frozen=True)
class Job:
    """Requests that are answered together.

    Args:
        ends: ids that end an answer, and stand nowhere else; None: the answer is thrown away, and any token will do.
    """

    requests: Sequence[Asked]
    num_ids: int  # ids from here on have no token
    never: Collection[int] = frozenset()  # further ids that have none
    ends: Collection[int] | None = None
    states: tuple[int, int] | None = None  # (L, D) of the hidden states that are wanted; None: none are
    timed: bool = False  # how each answer came about is wanted, too


_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Timing(BaseModel):
    """How an answer came about: the engine's own metrics of its request.

    Args:
        began_s, ended_s: when the request was handed over and when it was finished, from the job's begin on.
        drafted, accepted: tokens of each pass that verified a draft. Of the last one, tokens behind the answer's end
            may be among them.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    began_s: _Seconds
    ended_s: _Seconds
    first_s: _Seconds  # from its arrival to its first token
    decode_s: _Seconds  # from its first token to its last
    passes: list[Annotated[int, Field(ge=1)]]  # tokens of each pass, the prompt's first
    drafted: list[_Count]
    accepted: list[_Count]

    def by_pass(self) -> list[tuple[int, int, int]] | None:
        """(drafted, accepted, emitted) of each pass after the prompt's; None: they do not belong together.

        The engine counts the passes that verified a draft, and does not say which ones they were: a pass emits what it
        accepted and one token more, but for the last one, which the answer's end may cut.
        """
        left, found = list(zip(self.drafted, self.accepted, strict=True)), []
        for number, emitted in enumerate(self.passes[1:], 2):
            drafted, accepted = left[0] if left else (0, 0)
            if not left or (accepted + 1 != emitted and (number < len(self.passes) or accepted < emitted)):
                found.append((0, 0, emitted))
                continue
            found.append((drafted, accepted, emitted))
            del left[0]
        fits = not left and all(emitted == 1 for drafted, _, emitted in found if not drafted)
        return found if fits else None

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether passes make up the answer, and no pass accepted more than it had."""
        return (
            sum(self.passes) == len(tokens)
            and len(self.drafted) == len(self.accepted)
            and all(accepted <= drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True))
            and self.by_pass() is not None
            and self.began_s <= self.ended_s
        )


class Answer(BaseModel):
    """An answer: whose (`prompt_hash`), its ids and end token, how it stopped, and for timed jobs how it came about."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    prompt_tokens: Annotated[int, Field(ge=1)]
    prompt: str
    tokens: Annotated[list[_Count], Field(min_length=1)]
    stop: Literal["eos", "length"]
    timing: Timing | None = None


class _Answers(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    answers: list[Answer]


def read_answers(path: Path, job: Job) -> list[Answer]:
    """The answers of `job`, in the order of its requests. Raises `UserError` with what is wrong with the file."""
    try:
        answers = read_json(path, _Answers, hint=_CURE, once=True).answers
    except UserError as error:
        raise UserError(f"the engine's answers are damaged: {error.problem}", where=str(path), hint=_CURE) from error
    if len(answers) != len(job.requests):
        problem = f"the engine was asked {len(job.requests)} requests, and answered {len(answers)}"
        raise UserError(problem, where=str(path), hint=_CURE)
    for number, (answer, asked) in enumerate(zip(answers, job.requests, strict=True)):
        where = f"{path}, answer {number}, {asked.name}"
        _check(answer, asked, job, where)
        if answer.prompt != prompt_hash(number, asked.ids.tolist()):
            raise UserError("the engine's answer is to another request, or to other ids", where=where, hint=_CURE)
        if job.ends is not None:
            # An end that is the last token that it may write is an end to us, whatever stopped the engine.
            stop: Literal["eos", "length"] = "eos" if answer.tokens[-1] in job.ends else "length"
            answers[number] = answer.model_copy(update={"stop": stop})
    return answers


def _check(answer: Answer, asked: Asked, job: Job, where: str) -> None:
    if answer.prompt_tokens != len(asked.ids):
        raise UserError(
            f"the engine's prompt has {answer.prompt_tokens} tokens, and ours {len(asked.ids)}: it makes another "
            "number of tokens of a picture", where=where,
            hint="the processor files that it reads must be those of this recipe; pixel limits of the data section "
            "beyond the processor's own are cut there",
        )  # fmt: skip
    wrong = [token for token in answer.tokens if token >= job.num_ids or token in job.never]
    if wrong:
        raise UserError(f"the engine wrote id {wrong[0]}, which has no token", where=where,
                        hint="its vocabulary is another: are these the target's own files?")  # fmt: skip
    count, ends = len(answer.tokens), job.ends
    if count > asked.limit or (ends is not None and count < asked.limit and answer.tokens[-1] not in ends):
        problem = f"the engine wrote {count} of {asked.limit} tokens, and {answer.tokens[-1]} is no end token"
        raise UserError(problem, where=where, hint=_CURE)
    timing = answer.timing
    if (timing is not None) != job.timed or (timing is not None and not timing.fits(answer.tokens)):
        problem = "the engine's metrics of a request are missing, or are of another answer"
        raise UserError(problem, where=where, hint=_CURE)


def read_states(path: Path, asked: Asked, shape: tuple[int, int]) -> Tensor:
    """Hidden states [T,L,D] of a prompt. Raises `UserError` with what is wrong with the file. `shape`: (L, D)."""
    expected, where = (len(asked.ids), *shape), f"{path}, {asked.name}"
    with opened(path, hint=_CURE) as file:
        if missing := {"hidden_states", "token_ids"} - {*file.keys()}:
            raise UserError(f"the engine's states lack {min(missing)}", where=where, hint=_CURE)
        found = tuple(file.get_slice("hidden_states").get_shape())  # before anything of that size is read
        if found != expected:
            problem = f"the engine's states are of shape {found}, and {expected} were asked for"
            raise UserError(problem, where=where, hint=_CURE)
        states, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
    if ids.is_floating_point() or not torch.equal(ids.long(), asked.ids.long()):
        raise UserError("the engine's states are of other ids than this sample's", where=where,
                        hint="its processor files are others: give the engine the target's own")  # fmt: skip
    if not states.is_floating_point() or not states.isfinite().all():
        raise UserError("the engine's states are not finite numbers", where=where,
                        hint="activations overflow in its type: try another dtype, or other kernels")  # fmt: skip
    if bool((states == 0).all(-1).all(0).any()):
        raise UserError("a layer of the engine's states is zero at every place", where=where, hint=_CURE)
    return states
