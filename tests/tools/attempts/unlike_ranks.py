"""Two ranks that were not started alike: both must refuse, by rank, key and both values, and write nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from attempts import process
from attempts.attempt import Attempt, Broken, last_words, snapshot
from attempts.reference import Reference
from attempts.two_ranks import Work, must_finish_by_two, run_works

KEYS = ("seed", "lr", "batch", "steps", "stages", "output", "restart", "commit", "versions")


def unlike(attempt: Attempt) -> str:
    """One rank has another word, commit or version. Afterwards two that are alike end as if nothing had been."""
    reference, _, stages = attempt.begin(ranks=2, longest=1)
    arguments, before = attempt.arguments(reference, stages), snapshot(attempt.output)
    key, odd = attempt.dice.choice(KEYS), attempt.dice.randrange(2)
    name, usual, other, work = _other(attempt, reference, stages, arguments, key)
    works = [process.command(arguments)] * 2
    works[odd] = work
    told = [f"{other if rank == odd else usual} on rank {rank}" for rank in range(2)]
    expected = f"{name} is {' and '.join(told)}"
    for rank, ended in enumerate(run_works(attempt, works, {})):
        if ended.code != 2 or ended.says_traceback or expected not in ended.text:
            raise Broken(f"rank {rank}, {expected}: exit code {ended.code}: {last_words(ended.text)}")
    # `snapshot` leaves out the two files that a run writes of itself.
    written = [str(path) for path in attempt.folder.rglob("*.yaml") if path.name in ("recipe.yaml", "run.yaml")]
    if written or snapshot(attempt.output) != before or snapshot(attempt.folder / "other"):
        raise Broken(f"{expected}: something was written: {written}")
    must_finish_by_two(attempt, reference, stages, arguments, "alike")
    return key


def _other(
    attempt: Attempt, reference: Reference, stages: list[str], arguments: list[str], key: str
) -> tuple[str, str, str, Work]:
    """What the message must name, the usual value and the other one as it shows them, and the odd rank's work."""
    dice, recipe = attempt.dice, yaml.safe_load(reference.recipe.read_text())
    if key in ("commit", "versions"):
        return _of_code(dice.choice, arguments, key)
    if key == "seed":
        value = dice.randrange(1, 100)
        return "seed", str(recipe.get("seed", 0)), str(value), process.command([*arguments, f"seed={value}"])
    if key == "output":
        value = attempt.folder / "other"
        work = process.command([word for word in arguments if not word.startswith("output=")] + [f"output={value}"])
        return "output", *(json.dumps(os.path.realpath(path))[:80] for path in (attempt.output, value)), work
    if key == "restart":
        return "restart=", "null", json.dumps(stages[0]), process.command([*arguments, f"restart={stages[0]}"])
    if key == "stages":
        others = [stage for stage in reference.stages if stage not in stages]
        value = sorted([*stages, dice.choice(others)])
        words = [word for word in arguments if not word.startswith("stages=")]
        work = process.command([*words, f"stages=[{','.join(value)}]"])
        return "stages=", json.dumps(sorted(stages)), json.dumps(value), work
    trained = [
        stage for stage, section in recipe["stages"].items() if section["kind"] == "train" and "steps" in section
    ]
    stage = dice.choice(trained)
    section = recipe["stages"][stage]
    place = {"lr": "optim.lr", "batch": "batch_size", "steps": "steps"}[key]
    usual: Any = section["optim"]["lr"] if key == "lr" else section[place]
    other = usual * dice.choice((0.5, 3, 50)) if key == "lr" else usual + dice.choice((-1, 1))
    name = f"stages.{stage}.{place}"
    return name, json.dumps(usual), json.dumps(other), process.command([*arguments, f"{name}={other}"])


def _of_code(choose: Callable[[Sequence[str]], str], arguments: list[str], key: str) -> tuple[str, str, str, Work]:
    """The odd rank finds itself at another commit, or a package in another version."""
    from draftsmith.recipes.config import alike, provenance

    usual = {"commit": provenance.commit() or "", **provenance.packages()}
    name = "commit" if key == "commit" else choose(provenance.PACKAGES)
    other = "0" * 12 if key == "commit" else "0.0.1"

    def work() -> int:
        if key == "commit":
            alike.commit = lambda: other  # type: ignore[assignment]
        else:
            alike.packages = lambda: usual | {name: other}  # type: ignore[assignment]
        return process.command(arguments)()

    what = "the commit of the checkout" if key == "commit" else f"the version of {name}"
    return what, json.dumps(usual[name] and str(usual[name])[: 12 if key == "commit" else 80]), json.dumps(other), work
