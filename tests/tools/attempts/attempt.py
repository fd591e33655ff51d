"""One attempt to break a run: its dice, its folder, its commands, and how it is judged."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attempts import process
from attempts.process import Disturbance, Ended
from attempts.reference import Reference


class Broken(Exception):
    """The project did not keep what it promises."""


@dataclass
class Attempt:
    """One attempt.

    Args:
        kind: of `attempts.kinds`.
        number: with the seed it decides everything that is drawn.
        folder: the attempt's own; the run is `run`.
        references: recipe -> its undisturbed run.
        story: what was done, line by line, for whoever looks at a failure.
    """

    kind: str
    seed: int
    number: int
    folder: Path
    references: Mapping[str, Reference]
    story: list[str] = field(default_factory=list)
    commands: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.seed}/{self.number}/{self.kind}")
        self.output = self.folder / "run"

    def tell(self, line: str) -> None:
        """Note what was done."""
        self.story.append(line)

    def reference(self) -> Reference:
        """One of the references, drawn."""
        return self.references[self.dice.choice(tuple(self.references))]

    def begin(self, *, longest: int = 3) -> tuple[Reference, list[str], list[str]]:
        """A reference, its finished stages, which this run has as well, and stages to run; all drawn."""
        reference = self.reference()
        first = self.dice.randrange(len(reference.stages))
        finished, later = reference.stages[:first], reference.stages[first:]
        reference.copy(self.output, finished)
        return reference, finished, later[: self.dice.randint(1, longest)]

    def arguments(self, reference: Reference, stages: Sequence[str]) -> list[str]:
        """The command line that runs these stages."""
        return [f"recipe={reference.recipe}", f"output={self.output}", f"stages=[{','.join(stages)}]"]

    def run(self, arguments: Sequence[str], disturbance: Disturbance | None = None) -> Ended:
        """Runs `draftsmith ARGUMENTS` in a process of its own. Raises `Broken` where it hangs."""
        self.commands += 1
        log = self.folder / f"log-{self.commands}.txt"
        ended = process.run(process.command(arguments), self.output, log, disturbance=disturbance)
        what = f"draftsmith {' '.join(arguments)}\n    {disturbance or 'undisturbed'}"
        self.tell(f"{what}: exit code {ended.code} after {ended.seconds:.1f} s")
        if ended.code is None:
            raise Broken(f"still running after {ended.seconds:.0f} s")
        return ended

    def must_finish(self, reference: Reference, arguments: Sequence[str], stages: Sequence[str]) -> None:
        """Runs the command, which must succeed with the reference's results."""
        ended = self.run(arguments)
        if ended.code != 0:
            raise Broken(f"the same command: exit code {ended.code}: {last_words(ended.text)}")
        self.must_equal(reference, stages)

    def must_equal(self, reference: Reference, stages: Sequence[str], *, log: bool = True) -> None:
        """Raises `Broken` where results differ from the reference's, or half a file is left in a stage's folder.

        Args:
            log: whether the losses of every step are compared as well.
        """
        lines = reference.differences(self.output, stages)
        if lines := [line for line in lines if log or "metrics" not in line.split(" -> ")[0]]:
            raise Broken("other results: " + "; ".join(lines[:3]))
        left = [path for name in stages for path in (self.output / name).rglob("*.partial")]
        if left:
            raise Broken(f"{left[0].relative_to(self.output)} is left behind")


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt.

    Args:
        how: it held.
        problem: None where it held.
    """

    attempt: Attempt
    how: str
    problem: str | None


def check_refusal(ended: Ended, *names: str) -> None:
    """Raises `Broken` unless a command ended with a message that names one of `names`, and without a traceback."""
    if ended.says_traceback or ended.code != 2:
        raise Broken(f"exit code {ended.code}: {last_words(ended.text)}")
    if names and not any(name in ended.text for name in names):
        raise Broken(f"the message names none of {', '.join(names)}: {last_words(ended.text)}")


def last_words(text: str) -> str:
    """The last line of a traceback, or a message from its beginning."""
    if "Traceback (most recent call last)" in text:
        lines = [line for line in text.splitlines() if line.strip()]
        places = [line.strip() for line in lines if line.strip().startswith("File ")]
        return f"{lines[-1][:300]} ({places[-1][-120:] if places else ''})"
    start = text.rfind("error: ")
    return " / ".join(line.strip() for line in (text[start:] if start >= 0 else text[-400:]).splitlines())[:500]


def signal_name(number: int | None) -> str:
    """SIGKILL, SIGTERM, SIGINT."""
    return "" if number is None else signal.Signals(number).name
