"""A GGUF of `draftsmith export` served by llama.cpp and decoded here, on the same requests, chain by chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ...core.errors import UserError
from ...core.files import checked
from ...models.formats.gguf_drafts import DRAFT, write_wide
from .agreement import Engine, compare, faults
from .engine_check import AT_ONCE, MAX_NEW_TOKENS, Verification, read_answers
from .ours import TOGETHER, CheckRequest, Drafted, Exported, make_requests
from .program import TIMEOUT_S, run_program, version_of

PROGRAM, MODULE, TRIED = Path(__file__).with_name("llama_program.py"), "xllamacpp", "2026.10.11549"


class _About(BaseModel):
    """The first line of `llama_program.py`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    xllamacpp: str
    ends: list[int]  # tokens that end an answer, by the target's GGUF


def check_llama(python: str) -> None:
    """Raises `UserError` where an interpreter has no llama.cpp, or another than was tried: chains are read in its log,
    whose words move from version to version.
    """
    if (version := version_of(MODULE, python)) != TRIED:
        found = f"{MODULE} {version} is" if version else f"{MODULE}, which has llama.cpp's server, is not"
        raise UserError(f"{found} installed in this Python, and chains are read in the log of {TRIED}", where=python,
                        hint=f'pip install {MODULE}=={TRIED}, or "draftsmith[llama-cpp]"')  # fmt: skip


def verify_llama(
    folder: Path,
    scratch: Path,
    *,
    python: str,
    target: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    timeout_s: float = TIMEOUT_S,
    samples_in_backend: bool = False,
) -> Verification:
    """Serve a folder that `draftsmith export` wrote for llama.cpp, and compare chain by chain with our own loop on the
    drafter that it was written of, on texts, alone and three at once. Raises `UserError`: no such export, a file of it
    has moved, or the engine stopped.

    Args:
        scratch, python, target, max_new_tokens, timeout_s: as of `verify_engine`; two starts.
        samples_in_backend: as the server does by default, which mixes up requests (b11549).
    """
    exported = Exported(folder, target)
    check_llama(python)
    requests = make_requests(exported.processor, scratch, pictures=False)
    whole = exported.decode(requests, max_new_tokens)
    side = _Side(exported, requests, scratch, python, max_new_tokens, timeout_s, samples_in_backend)
    about, plain = side.answers(None, (1,))
    ours = {name: _cut(drafted, about.ends) for name, drafted in whole.items()}
    engine = Engine(about.xllamacpp, "cpu", "without flash attention, cache in float32", "llama.cpp")
    write_wide(folder / DRAFT, scratch / DRAFT)  # as our loop computes
    _, drafted = side.answers(scratch / DRAFT, (1, AT_ONCE))
    tokens = {name: answer.tokens for name, answer in plain[1].items()}
    cells = compare(requests, ours, tokens, drafted[1])
    cells += compare([replace(one, group=TOGETHER) for one in requests], ours, tokens, drafted[AT_ONCE])
    layers = getattr(exported.config, "num_layers", 1)
    problems = faults(cells, engine, kind=exported.kind, target=exported.model_type, layers=layers)
    return Verification(engine, cells, problems)


def _cut(drafted: Drafted, ends: Sequence[int]) -> Drafted:
    """Up to the first token that ends an answer, where llama.cpp stops; our loop went on."""
    count = next((place for place, token in enumerate(drafted.tokens, 1) if token in ends), len(drafted.tokens))
    chains = {start: chain for start, chain in drafted.chains.items() if start < count}
    return replace(drafted, tokens=drafted.tokens[:count], chains=chains)


@dataclass(frozen=True)
class _Side:
    """The engine's: what it is asked, and where."""

    exported: Exported
    requests: Sequence[CheckRequest]
    scratch: Path
    python: str
    max_new_tokens: int
    timeout_s: float
    samples_in_backend: bool

    def answers(self, draft: Path | None, together: Sequence[int]) -> tuple[_About, dict[int, dict[str, Drafted]]]:
        """To all requests, by number of them that are asked at once. `draft`: None: plain decoding."""
        made = self.exported.made
        longest = max(one.prompt_tokens for one in self.requests) + self.max_new_tokens + 2 * made.chain + 8
        job = {
            "model": str(Path(made.target_gguf).resolve()), "draft": None if draft is None else str(draft.resolve()),
            "type": made.method, "num_drafted": made.chain, "samples_in_backend": self.samples_in_backend,
            "context": longest * max(together), "together": list(together), "max_new_tokens": self.max_new_tokens,
            "requests": [{"name": one.name, "ids": one.ids} for one in self.requests],
        }  # fmt: skip
        written = run_program(PROGRAM, self.scratch, job, python=self.python, timeout_s=self.timeout_s)
        file = self.scratch / "answers.jsonl"
        if not written:
            raise UserError("the engine wrote no line", where=str(file), hint="read log.txt beside it")
        about = checked(written[0], _About, where=f"{file}, line 1", hint="read log.txt beside it")
        names = [one.name for one in self.requests]
        answers = read_answers(written[1:], names, self.scratch, together, drafts=draft is not None)
        return about, answers
