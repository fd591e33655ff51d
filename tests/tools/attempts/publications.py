"""Published folders that were changed on the way, and damaged runs that are only read."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from attempts import process
from attempts.attempt import Attempt, Broken, check_refusal
from attempts.damages import do_damage
from attempts.recipes import WILD, change, with_little_memory

_UNLISTED = {"README.md"}  # may be edited on the Hub


def publication(attempt: Attempt) -> str:
    """A published folder with a damaged or an added file, or with false values behind a right list of checksums."""
    reference, dice = attempt.reference("lvlm"), attempt.dice
    folder = attempt.output
    shutil.copytree(reference.folder / "publish" / "repository", folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    victim, way = dice.choice(files), dice.choice(("damage", "damage", "add", "false values"))
    must_refuse = True
    if way == "damage":
        told = do_damage(attempt, victim)
        must_refuse = victim.name not in _UNLISTED
    elif way == "add":
        victim = folder / dice.choice(("extra.py", "adapter_config.json", "pytorch_model.bin"))
        victim.write_bytes(b"{}")
        told = "added"
    else:
        victim = folder / "draftsmith.json"
        told, must_refuse = _false_values(attempt, folder), False
    attempt.tell(f"publication: {told}: {victim.relative_to(folder)}")
    ended = attempt.work(with_little_memory(opening(folder, reference.folder / "target")), "open and reproduce")
    if ended.code == 0 and not must_refuse:
        return "opened, with equal tokens"
    if ended.code == 0:
        raise Broken("opened all the same")
    # A changed line of the list of checksums is another file's that differs from it.
    check_refusal(ended, *([victim.name] if must_refuse and victim.name != "SHA256SUMS" else []))
    return "refused by name" if must_refuse else "refused"


def _false_values(attempt: Attempt, folder: Path) -> str:
    """Changes the manifest and signs the folder again, as somebody with bad intentions would."""
    from draftsmith.core.checksums import write_sums

    path = folder / attempt.dice.choice(("draftsmith.json", "config.json", "processor_config.json"))
    tree = json.loads(path.read_text())
    keys, _, what = change(attempt.dice, tree, WILD)
    path.write_text(json.dumps(tree))
    write_sums(folder)
    return f"{path.name}, {'.'.join(map(str, keys))}: {what}, signed again"


def opening(folder: Path, target: Path) -> Callable[[], int]:
    """What somebody who fetched the folder does: exit code 0 where it does what it did, 2 with a message."""

    def work() -> int:
        from draftsmith.core.errors import UserError
        from draftsmith.eval.stored_prompt import reproduce

        try:
            reproduce(folder, target={"target": target, "processor": target})
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0

    return work


def reading(attempt: Attempt) -> str:
    """A finished run with a damaged file, which is compared, checked, exported and described."""
    reference, dice = attempt.reference(), attempt.dice
    stages = [stage for stage in reference.stages if stage != "publish"]
    reference.copy(attempt.output, stages)
    for name in ("recipe.yaml", "run.yaml"):
        shutil.copy2(reference.folder / name, attempt.output / name)
    victim = dice.choice([path for path in sorted(attempt.output.rglob("*")) if path.is_file()])
    attempt.tell(f"damage: {do_damage(attempt, victim)}: {victim.relative_to(attempt.output)}")
    draft = attempt.output / ("draft" if reference.name == "lvlm" else "head")
    command = dice.choice(
        (
            ["compare", str(attempt.output), str(reference.folder), "--output", str(attempt.folder / "compared")],
            ["check", str(attempt.output)],
            ["export", str(draft), str(attempt.folder / "exported"), "--to", "vllm", "--prompts", "text"],
            attempt.arguments(reference, stages, "dry_run=true"),
        )
    )
    ended = attempt.work(process.command(command), f"draftsmith {' '.join(command)}")
    if ended.code == 3 and command[0] == "check":
        return "told among other things"
    if ended.code == 0 and not ended.says_traceback:
        return "read"
    check_refusal(ended)
    return "refused with a message"
