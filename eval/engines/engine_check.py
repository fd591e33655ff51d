"""An exported folder served by vLLM and decoded here, on the same requests: what `draftsmith verify-engine` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ...core.batch import TEXT
from ...core.errors import UserError
from ...core.files import checked
from ...core.json_types import JsonObject
from .agreement import Cell, Engine, by_start, compare, faults
from .ours import PIECES, RESIZED, TOGETHER, CheckRequest, Drafted, Exported, make_requests
from .program import LLAMA, TIMEOUT_S, VLLM, check_plugin, run_program

MAX_NEW_TOKENS = 48
_AT_ONCE = 3
_CURE = "the engine or its program is at fault: read log.txt beside it"

HEADER = ("prompts", "plain answers", "drafted answers", "equal chains", "accepted here", "accepted there", "")

MEANING = (
    "plain answers: the engine's tokens without the drafter are ours. drafted answers: they stay the same with it.",
    "equal chains: drafted tokens that agree at every place. accepted: drafted tokens that stood.",
)


@dataclass(frozen=True)
class Verification:
    """What was compared, and every fault as (problem, hint)."""

    engine: Engine
    cells: list[Cell]
    faults: list[tuple[str, str]]

    def shown(self) -> str:
        """The table of groups, and every fault with what it points at."""
        rows = [HEADER]
        for cell in self.cells:
            rows.append((
                cell.group, f"{cell.plain}/{cell.requests}", f"{cell.same}/{cell.requests}",
                f"{cell.equal}/{cell.chains}", str(cell.accepted[0]), str(cell.accepted[1]),
                "ok" if cell.good and cell.plain == cell.requests else "DIFFERS",
            ))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines = [f"{self.engine.name} {self.engine.version} on {self.engine.device}, runner {self.engine.runner}", ""]
        lines += [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += ["", *MEANING, ""]
        for problem, hint in self.faults:
            lines += [f"fault    {problem}", f"         hint: {hint}"]
        return "\n".join([*lines, f"{len(self.faults)} fault(s)"])


def verify_engine(
    folder: Path,
    scratch: Path,
    *,
    python: str,
    target: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    without_known_faults: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Verification:
    """Serve a folder that `draftsmith export` wrote for vLLM or llama.cpp, and compare every chain with our own loop's.
    Raises `UserError`: no such export, no target, or the engine stopped.

    Args:
        scratch: an empty folder for requests, pictures, answers and the engine's logs.
        python: of the engine's environment.
        target: Hub id or directory; None: as the manifest names it.
        without_known_faults: patch the engine's known faults in its process: is the export right without them?
        timeout_s: of each of its three starts, after which it is taken for hung.
    """
    exported = Exported(folder, target)
    if exported.in_llama and without_known_faults:
        raise UserError("--without-known-faults patches vLLM, and a GGUF runs in llama.cpp", hint="leave it out")
    if exported.made.plugin:
        check_plugin(python, patches=exported.made.patched)
    requests = make_requests(exported.processor, scratch, pictures=exported.pictures)
    ours = exported.decode(requests, max_new_tokens)
    side = _Side(exported, requests, scratch, python, max_new_tokens, timeout_s, without_known_faults)
    about, plain = side.answers(None)
    ours = {name: answer.until(about.ends) for name, answer in ours.items()}
    _, drafted = side.answers(exported.speculative, (1, _AT_ONCE))
    tokens = {name: answer.tokens for name, answer in plain[1].items()}
    cells = compare(requests, ours, tokens, drafted[1])
    again = [request for request in requests if request.group != RESIZED]
    more = {TOGETHER: drafted[_AT_ONCE]}
    if not exported.made.whole_prompts and not exported.in_llama:
        more[PIECES] = side.answers(exported.speculative, (_AT_ONCE,), in_pieces=True)[1][_AT_ONCE]
    for group, answers in more.items():
        cells += compare([replace(request, group=group) for request in again], ours, tokens, answers)
    layers = getattr(exported.config, "num_layers", 1)
    lengths = {}  # group -> a prompt whose number of tokens is not ours
    for request in requests:
        if (count := drafted[1][request.name].prompt_tokens) != request.prompt_tokens:
            lengths[request.group] = (
                f"{request.group}: the prompt has {count} tokens in the engine and {request.prompt_tokens} here",
                "the target's processor files make another number of tokens of a picture than ours",
            )
    differences = faults(cells, about, kind=exported.kind, target=exported.model_type, layers=layers)
    return Verification(about, cells, [*lengths.values(), *differences])


_Id = Annotated[int, Field(ge=0)]


class _About(BaseModel):
    """The first line of `vllm_program.py` or `llama_program.py`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    engine: str
    version: str
    device: str
    runner: str
    ends: list[_Id] = []  # tokens after which it ends an answer


class _Line(BaseModel):
    """A line for each request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str
    together: int
    prompt_tokens: Annotated[int, Field(ge=1)]
    tokens: list[_Id]
    chains: list[list[_Id]] | None


@dataclass(frozen=True)
class _Side:
    """The engine's: what it is asked, and where."""

    exported: Exported
    requests: Sequence[CheckRequest]
    scratch: Path
    python: str
    max_new_tokens: int
    timeout_s: float
    without_known_faults: bool

    def answers(
        self, speculative: object, together: Sequence[int] = (1,), *, in_pieces: bool = False
    ) -> tuple[Engine, dict[int, dict[str, Drafted]]]:
        """To all requests, by number of them that are asked at once. `speculative`: vLLM's speculative_config; None:
        plain decoding. `in_pieces`: a pass takes fewer tokens than a batch's prompts have.
        """
        in_llama = self.exported.in_llama
        model = Path(self.exported.made.target_gguf if in_llama else self.exported.target_path)
        settings = self._settings | (self._pieces(max(together)) if in_pieces else {})
        request = {
            "model": str(model.resolve() if model.is_dir() else model), "engine": settings,
            "speculative": speculative, "together": list(together), "max_new_tokens": self.max_new_tokens,
            "without_known_faults": self.without_known_faults and speculative is not None,
            "requests": [{"name": a.name, "ids": a.ids, "pictures": a.pictures} for a in self.requests],
        }  # fmt: skip
        program = LLAMA if in_llama else VLLM
        written = run_program(program, self.scratch, request, python=self.python, timeout_s=self.timeout_s)
        if not written:
            raise self._wrong("the engine wrote no line")
        first, *lines = written
        about = checked(first, _About, where=f"{self._file}, line 1", hint=_CURE)
        answers: dict[int, dict[str, Drafted]] = {number: {} for number in together}
        for number, value in enumerate(lines, 2):
            line = checked(value, _Line, where=f"{self._file}, line {number}", hint=_CURE)
            if line.name in answers.get(line.together, (line.name,)):
                raise self._wrong(f"the engine answered {line.name!r} twice, or was not asked it so", number)
            if speculative is not None and line.chains is None:
                raise UserError("this runner of vLLM does not show what it drafts", where=str(self.scratch / "log.txt"),
                                hint="compare under its V1 runner: VLLM_USE_V2_MODEL_RUNNER=0")  # fmt: skip
            chains = by_start(line.tokens, line.chains or [])
            answers[line.together][line.name] = Drafted(line.tokens, chains, line.prompt_tokens)
        names = [request.name for request in self.requests]
        for answered in answers.values():
            if missing := [name for name in names if name not in answered]:
                raise self._wrong(f"the engine left {len(missing)} requests unanswered: {', '.join(missing[:3])}")
        return Engine(about.version, about.device, about.runner, about.engine, tuple(about.ends)), answers

    @property
    def _file(self) -> Path:
        return self.scratch / "answers.jsonl"

    def _wrong(self, problem: str, line: int | None = None) -> UserError:
        return UserError(problem, where=f"{self._file}{f', line {line}' if line else ''}", hint=_CURE)

    @property
    def _settings(self) -> JsonObject:
        longest = max(request.prompt_tokens for request in self.requests)
        # Where a request of a batch comes near the engine's end, vLLM drafts for none of them.
        length = longest + self.max_new_tokens + 4 * (self.exported.num_drafted + 1)
        most = max(1, *(len(request.pictures) for request in self.requests))
        pictures = {"limit_mm_per_prompt": {"image": most}} if self.exported.pictures else {}
        return {"dtype": "float32", "max_model_len": length} | pictures | self.exported.made.settings

    def _pieces(self, together: int) -> JsonObject:
        """Passes shorter than a batch's prompts, in which the drafted tokens of all its requests still have room.

        The engine keeps as many tokens of pictures, and waits for ever where requests that hold one picture each have
        no room for their next.
        """
        shortest = min(request.prompt_tokens for request in self.requests)
        pictures = max(int((request.ours.modality != TEXT).sum()) for request in self.requests)
        room = together * max(self.exported.num_drafted, pictures) + together
        return {"max_num_batched_tokens": max(room, shortest // 2), "enable_chunked_prefill": True}
