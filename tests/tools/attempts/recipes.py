"""Bad recipes: one value, key or byte of a good one is changed. Nothing but a message may come of it."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from typing import Any

import psutil
import yaml
from attempts import process
from attempts.attempt import Attempt, Broken, check_refusal, last_words, snapshot
from attempts.reference import Reference

# For a run that may begin: small enough to end.
SMALL: tuple[Any, ...] = (None, True, False, "", "x", "target", -1, 0, 1, 2, 3, 0.5, 1.5, [], [1], {}, {"kind": "lvlm"})
# For a dry run alone.
WILD: tuple[Any, ...] = (
    *SMALL, 10**30, 1e26, -1e-30, float("nan"), float("inf"), "../x", "/etc/passwd", "a\ud800b", "\x00", "ü 漢",
    "${seed}", "1e5", [[]], [{}], {"a": {"b": {}}}, {"": 1}, "null", 2**63,
)  # fmt: skip
# Sections whose keys are names that the recipe's author gives.
FREE = {"stages", "methods", "benchmarks", "splits", "language_model", "vision_tower", "text_encoder"}
Keys = tuple[Any, ...]


def recipe(attempt: Attempt) -> str:
    """A recipe with one change, over a run whose earlier stages have finished."""
    reference = attempt.reference()
    tree = yaml.safe_load(reference.recipe.read_text())
    dry = attempt.dice.random() < 0.5
    keys, refused, what = change(attempt.dice, tree, WILD if dry else SMALL)
    stages = [stage for stage in reference.stages if stage != "publish"]
    own = keys[1] if keys[:1] == ("stages",) and len(keys) > 1 and keys[1] in stages else attempt.dice.choice(stages)
    finished = stages[: stages.index(own)]
    reference.copy(attempt.output, finished)
    path = attempt.folder / "mine.yaml"
    text = as_text(tree).encode("utf-8", "surrogatepass")
    if attempt.dice.random() < 0.2:
        text, refused, what = spoil_text(attempt.dice, text), False, "a byte of the text"
    path.write_bytes(text)
    attempt.tell(f"recipe: {what}: {'.'.join(map(str, keys))}")
    arguments = [f"recipe={path}", f"output={attempt.output}", f"stages=[{own}]", *(["dry_run=true"] if dry else [])]
    return judge(attempt, reference, arguments, finished, refused=refused)


def judge(
    attempt: Attempt, reference: Reference, arguments: list[str], finished: list[str], *, refused: bool, names: str = ""
) -> str:
    """Runs a command with a bad input. Raises `Broken` for anything but an end with 0 or with a message, for finished
    stages that changed, and for an end with 0 where it had to be refused.

    Args:
        names: what a refusal must name.
    """
    before = {name: snapshot(attempt.output / name) for name in finished}
    ended = attempt.work(with_little_memory(process.command(arguments)), f"draftsmith {' '.join(arguments)}")
    if {name: snapshot(attempt.output / name) for name in finished} != before:
        raise Broken("a finished stage changed")
    if ended.code == 0 and not ended.says_traceback:
        if refused:
            raise Broken(f"accepted: {ended.text[-200:]}")
        return "accepted"
    check_refusal(ended, *([names] if names else []))
    if "error: " not in ended.text:
        raise Broken(f"no message: {last_words(ended.text)}")
    return "refused with a message"


def with_little_memory(work: Callable[[], int]) -> Callable[[], int]:
    """The same with at most 6 GiB more than now: what a bad number asks for must not take the machine."""

    def limited() -> int:
        most = psutil.Process().memory_info().vms + 6 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return work()

    return limited


def change(dice: random.Random, tree: dict[str, Any], values: tuple[Any, ...]) -> tuple[Keys, bool, str]:
    """Changes one place of a recipe. Returns its keys, whether the recipe must now be refused, and what was done."""
    places = list(_places(tree))
    keys = dice.choice(places)
    parent = tree
    for key in keys[:-1]:
        parent = parent[key]
    last = keys[-1]
    way = dice.choice(("value", "value", "value", "misspell", "drop", "add"))
    if way == "value" or not isinstance(parent, dict):
        parent[last] = dice.choice(values)
        return keys, False, f"the value {parent[last]!r}"
    strict = not (set(keys[-3:-1]) & FREE) and len(keys) > 1
    if way == "drop":
        del parent[last]
        return keys, False, "dropped"
    if way == "add":
        parent[f"{last}x"] = dice.choice(values)
        return keys, strict, f"a key {last}x added"
    place = dice.randrange(len(last) + 1) if isinstance(last, str) else 0
    parent[f"{str(last)[:place]}q{str(last)[place:]}"] = parent.pop(last)
    return keys, strict, "a misspelt key"


def _places(tree: Any, keys: Keys = ()) -> list[Keys]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in [(*keys, key), *_places(value, (*keys, key))]]


def as_text(tree: Any) -> str:
    """A recipe as YAML that JSON's writer makes, in which every odd string can be spelled."""
    text = json.dumps(tree, indent=1)
    return text.replace("NaN", ".nan").replace("Infinity", ".inf").replace("\\u0000", "\\0")


def spoil_text(dice: random.Random, text: bytes) -> bytes:
    """A file's bytes with one of them changed, taken away, or cut off at the end."""
    data = bytearray(text)
    place = dice.randrange(len(data))
    way = dice.choice(("change", "remove", "cut", "not UTF-8"))
    if way == "change":
        data[place] = dice.choice(b"{}[]:,\"'\t&*!|>%@#-")
    elif way == "remove":
        del data[place]
    elif way == "cut":
        del data[place:]
    else:
        data[place] = 0xFF
    return bytes(data)
