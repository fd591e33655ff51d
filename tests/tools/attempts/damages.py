"""Damages of files: in a finished run that later stages read, and in the folder of a stage that was killed half-way.

What may come of it: a message that names the file and whose cure leads to equal results, or equal results at once.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from attempts.attempt import Attempt, Broken, check_refusal
from attempts.kills import draw_kill
from attempts.process import Ended
from attempts.reference import Reference

WAYS = ("truncate", "empty", "flip", "flip", "delete", "folder", "not UTF-8", "not a mapping", "null")


def damage(attempt: Attempt) -> str:
    """A file of a finished stage is damaged, and stages after it run."""
    reference = attempt.reference()
    stages = reference.stages
    first = attempt.dice.randrange(1, len(stages))
    reference.copy(attempt.output, stages[:first])
    files = [path for path in sorted(attempt.output.rglob("*")) if path.is_file()]
    return _recover(attempt, reference, files, stages[: first + attempt.dice.randint(1, 2)], stages[:first])


def half(attempt: Attempt) -> str:
    """A stage is killed, a file of what it has left is damaged, and the same command runs again."""
    reference, finished, stages = attempt.begin(longest=1)
    attempt.run(attempt.arguments(reference, stages), draw_kill(attempt, reference, stages))
    files = [path for path in sorted((attempt.output / stages[0]).rglob("*")) if path.is_file()]
    if not files or (attempt.output / stages[0] / "done.json").is_file():
        attempt.must_finish(reference, attempt.arguments(reference, stages), stages)
        return "nothing half-made was left"
    return _recover(attempt, reference, files, [*finished, *stages], finished)


def _recover(
    attempt: Attempt, reference: Reference, files: Sequence[Path], stages: list[str], finished: Sequence[str]
) -> str:
    victim = attempt.dice.choice(files)
    way = do_damage(attempt, victim)
    shown = victim.relative_to(attempt.output)
    attempt.tell(f"damage: {way}: {shown}")
    new = [stage for stage in stages if stage not in finished]
    arguments = attempt.arguments(reference, stages)
    ended = attempt.run(arguments)
    if ended.code == 0:
        # Files of stages that nothing read may stay as they are; what was made must be right. The log of losses is no
        # result: nothing is computed from it, and what a damaged line said of a step before the checkpoint is gone.
        attempt.must_equal(reference, new, log=victim.name != "metrics.jsonl")
        return "equal results at once"
    # A damage may be met in what holds the file: a shard, a checkpoint, a stage.
    check_refusal(ended, victim.name, str(shown))
    cure(attempt, reference, ended, victim, arguments, stages)
    attempt.must_equal(reference, new)
    return "refused by name, and the cure led to equal results"


def cure(
    attempt: Attempt, reference: Reference, ended: Ended, victim: Path, arguments: list[str], stages: Sequence[str]
) -> None:
    """Does what a refusal's hint says, one of its offers drawn. Raises `Broken` where it says nothing, or in vain."""
    hint = " ".join(re.findall(r"hint:\s+(.*)", ended.text))
    stage = victim.relative_to(attempt.output).parts[0]
    offers = []
    restart = re.search(r"restart=(\w+)", hint)
    if restart:
        name = restart[1] if restart[1] in stages else stage
        offers.append(f"restart={name}")
    if re.search(r"\b(remove|delete)\b", hint):
        offers.append("remove")
    if re.search(r"put .*back|restore|fetch it again|as it was|fix|take the change back|copy", hint):
        offers.append("restore")
    if not offers:
        raise Broken(f"the hint names no cure: {hint or ended.text[-300:]}")
    offer = attempt.dice.choice(offers)
    attempt.tell(f"cure: {offer}, of {offers}, since it says: {hint}")
    if offer == "remove":
        _remove(attempt, ended)
    elif offer == "restore":
        _remove_path(victim)
        shutil.copy2(reference.folder / victim.relative_to(attempt.output), victim)
    more = [offer] if offer.startswith("restart=") else []
    again = attempt.run([*arguments, *more])
    if again.code != 0:
        raise Broken(f"the cure ({offer}) of {ended.text[-400:]!r} ends with {again.code}: {again.text[-400:]!r}")


def _remove(attempt: Attempt, ended: Ended) -> None:
    """What the message's `where` names, inside the run."""
    for where in re.findall(r"where:\s+(.*)", ended.text):
        # "data.json, record 3, picture.png": the last is what is meant.
        for path in map(Path, reversed(re.split(r", | \(", where))):
            if path.exists() and attempt.output in path.parents:
                _remove_path(path)
                return
    raise Broken(f"a file is to be removed, and no path in the run is named: {ended.text[-300:]}")


def _remove_path(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def do_damage(attempt: Attempt, path: Path) -> str:
    """Damages a file in one of `WAYS`; returns which."""
    dice, data = attempt.dice, path.read_bytes()
    way = dice.choice([way for way in WAYS if data or way in ("delete", "folder", "null")])
    if way in ("not a mapping", "null") and path.suffix != ".json":
        way = "flip" if data else "delete"
    changed = bytearray(data)
    if way == "truncate":
        changed = changed[: dice.randrange(len(data))]
    elif way == "empty":
        changed = bytearray()
    elif way == "flip":
        changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif way == "not UTF-8":
        changed[dice.randrange(len(data))] = 0xFF
    elif way in ("delete", "folder"):
        path.unlink()
        if way == "folder":
            path.mkdir()
        return way
    elif way == "not a mapping":
        changed = bytearray(b"[1, 2]")
    else:
        changed = bytearray(json.dumps(_without_one(data, attempt)).encode())
    path.write_bytes(bytes(changed))
    return way


def _without_one(data: bytes, attempt: Attempt) -> object:
    """A JSON mapping with one of its values taken away or turned to null."""
    value = json.loads(data or b"null")
    if isinstance(value, dict) and value:
        key = attempt.dice.choice(sorted(value))
        if attempt.dice.random() < 0.5:
            del value[key]
        else:
            value[key] = None
        return value
    return None
