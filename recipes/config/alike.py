"""What a run was started with: versions and the checkout's state; and whether all ranks were started alike, with the
same command, recipe, data and code.

On a cluster the command is typed on each node, and nothing in torch or DeepSpeed notices that two ranks train different
things together. Asked once the ranks can talk, before anything is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ... import __version__
from ...core import ranks
from ...core.errors import UserError
from ...core.import_paths import code_of, kinds_within
from ...core.json_types import JsonObject, flat
from ...core.secrets import redact, redact_tree
from ...data.records.records import of_any_copy
from ...trainers.run.matching import is_done
from ...trainers.run.restart import built_on
from ...trainers.run.stage import Planned
from .health import version_of
from .load import Loaded
from .plan import plan

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)
# Last words of keys that a rank may have of its own: rank 0 alone tracks, and how data is read changes no result.
_OWN = ("num_workers", "about")
_COMMIT = "the commit of the checkout"
_DIGITS = 12  # of a hash: all 40 of a commit look like a key, and would be hidden
_SHOWN = 4  # keys of one message
# What is compared -> how its value is shown, and a hash of the value itself, which may hold a secret.
Facts = Mapping[str, tuple[str, str]]


def versions() -> JsonObject:
    """Python, packages (None: not installed) and the checkout's git commit with its number of changed files."""
    changed = _git("status", "--porcelain") or ""
    git = {"commit": commit(), "changed_files": len(changed.splitlines())}
    return {"python": platform.python_version(), "packages": packages(), "git": git}


def packages() -> dict[str, str | None]:
    """The versions of those that matter; None: not installed."""
    return {name: version_of(name) for name in PACKAGES}


def commit() -> str | None:
    """The checkout's; None: this is an installed wheel, or git does not answer."""
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    """Output of git in this checkout; None for an installed wheel, whatever checkout its environment lies in."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Unlike(UserError):
    """Ranks differ. Each of them says so: on several nodes each has a terminal of its own."""

    is_said_by_each_rank = True


def check_alike(loaded: Loaded, planned: Sequence[Planned]) -> None:
    """All ranks call. Raises `Unlike` on every rank where one was started otherwise than rank 0."""
    if ranks.world_size() == 1:
        return
    chosen, output = loaded.options.stages, Path(loaded.recipe.output)
    stale = built_on(planned, loaded.options.restart)  # which nothing is read of: a damaged record stops no restart
    # Data that only finished stages read may lie on one node and not on another.
    unfinished = [
        p.name for p in planned if (chosen is None or p.name in chosen) and (p.name in stale or not is_done(p, output))
    ]
    ranks.on_main(_compare, ranks.gather(started_with(loaded)), unfinished)


def started_with(loaded: Loaded) -> Facts:
    """What this rank was started with. Data may be a copy on the disk of each node."""
    with of_any_copy():
        return facts(loaded, plan(loaded.recipe, loaded.path))


def facts(loaded: Loaded, planned: Sequence[Planned]) -> Facts:
    """The command, the recipe, the stages' files and the code, by names that messages give."""
    recipe, options = loaded.recipe, loaded.options
    settings = recipe.model_dump(mode="json", by_alias=True, exclude={"tracking"})
    settings["output"] = os.path.realpath(recipe.output)
    recipes = {key: value for key, value in flat(settings).items() if key.rpartition(".")[2] not in _OWN}
    shown = flat(redact_tree(settings))
    values = {
        "stages=": None if options.stages is None else sorted(options.stages),
        "restart=": options.restart,
        **recipes,
        "the order of stages": [*recipe.stages],
        **{f"stage {one.name}: {key}": value for one in planned for key, value in _outside(one).items()},
        "the version of draftsmith": __version__,
        **({} if (checkout := commit()) is None else {_COMMIT: checkout[:_DIGITS]}),
        **{f"the version of {name}": v for name, v in {"Python": platform.python_version(), **packages()}.items()},
        **{f"the code of {kind}": code_of(kind) for kind in sorted({*kinds_within(settings)})},
    }
    return {
        key: (
            _shortened(json.dumps(shown.get(key, "<hidden>") if key in recipes else value)),
            hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32],
        )
        for key, value in values.items()
    }


def _shortened(value: str) -> str:
    """A value with its ends, redacted before it is cut: half a key no longer looks like one."""
    value = redact(value)
    return value if len(value) <= 80 else f"{value[:30]} ... {value[-45:]}"


def _outside(planned: Planned) -> JsonObject:
    """The content of files and weights that a stage reads from outside the run, and its fingerprint over all."""
    settings = planned.settings
    content = {f"the files at {key}": identity for key, identity in settings.get("outside", {}).items()}
    content |= {f"data file {number}": identity for number, identity in enumerate(settings.get("data", ()), 1)}
    content["its fingerprint"] = planned.fingerprint
    return {key: identity[:_DIGITS] for key, identity in content.items()}


def _compare(every: Sequence[Facts], unfinished: Collection[str]) -> None:
    unlike = {}  # key -> its value on the first rank, and on the first that differs
    for key in dict.fromkeys(key for facts in every for key in facts):
        # Git may not answer on one node; every other key that a rank lacks is a difference.
        values = {n: facts.get(key, ("not set", "")) for n, facts in enumerate(every) if key in facts or key != _COMMIT}
        (one, (value, digest)), *others = values.items()
        differs = next((f"{other} on rank {rank}" for rank, (other, its) in others if its != digest), None)
        is_finished = key.startswith("stage ") and key[6:].partition(":")[0] not in unfinished
        if differs is not None and not is_finished:
            alike = sum(its == digest for _, (_, its) in others)
            unlike[key] = f"{key} is {value} on rank {one}{f' and {alike} more,' * bool(alike)} and {differs}"
    # A fingerprint is of the others: alone it says that something differs which no key has.
    named = [text for key, text in unlike.items() if not key.endswith(": its fingerprint")] or [*unlike.values()]
    if named:
        more = f"; and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        raise Unlike(
            f"the ranks of this run were not started alike: {'; '.join(named[:_SHOWN])}{more}",
            hint="give every node the same command, recipe, data and code; nothing was written",
        )
