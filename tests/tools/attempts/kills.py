"""Kills of one process: SIGKILL, SIGTERM or SIGINT before a chosen change of the folder, or at any time."""

from __future__ import annotations

import signal

from attempts.attempt import Attempt, Broken, last_words, signal_name
from attempts.process import Disturbance, Ended
from attempts.reference import Reference

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def kill(attempt: Attempt) -> str:
    """A chain of one to three kills of the same command, which must then end as if nothing had been."""
    reference, _, stages = attempt.begin()
    arguments = attempt.arguments(reference, stages)
    delivered = []
    for _ in range(attempt.dice.choice((1, 1, 2, 3))):
        disturbance = draw_kill(attempt, reference, stages)
        ended = attempt.run(arguments, disturbance)
        check_end(attempt, stages, ended, disturbance)
        if ended.code == 0:
            break
        delivered.append(signal_name(disturbance.number))
    attempt.must_finish(reference, arguments, stages)
    return "went on to equal results" if delivered else "ended before the signal"


def draw_kill(attempt: Attempt, reference: Reference, stages: list[str]) -> Disturbance:
    """A signal and its moment."""
    number = attempt.dice.choice(SIGNALS)
    if attempt.dice.random() < 0.7:
        return Disturbance(event=attempt.dice.randint(1, sum(reference.events[s] for s in stages)), number=number)
    return Disturbance(seconds=attempt.dice.random() * sum(reference.seconds[s] for s in stages), number=number)


def check_end(attempt: Attempt, stages: list[str], ended: Ended, disturbance: Disturbance) -> None:
    """Raises `Broken` unless the command ended by its signal, with 143, or with its work done; with a traceback; or
    where it went on into a further stage.
    """
    name = signal_name(disturbance.number)
    if ended.says_traceback or ended.code not in (0, 143, -(disturbance.number or 0)):
        raise Broken(f"{name}: exit code {ended.code}: {last_words(ended.text)}")
    if ended.reached is not None:
        begun = [path for stage in stages if (path := attempt.output / stage / "fingerprint.json").is_file()]
        # Half a second: the signal may come while a stage begins.
        later = [path.parent.name for path in begun if path.stat().st_mtime > ended.reached + 0.5]
        if later:
            raise Broken(f"{name} came before stage {later[0]}, which was begun all the same")
