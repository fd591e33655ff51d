"""Wrong files of an engine: answers and hidden states that cannot be what was asked for.

The engine is `attempts.stand_in`, which answers by a rule of its own. A wrong file is refused by its name, long before
the engine is taken for hung; then the same command with a sound engine gives what an undisturbed one does.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from attempts import process, stand_in
from attempts.attempt import Attempt, Broken, check_refusal, check_success
from attempts.process import Ended
from attempts.recipes import with_little_memory
from attempts.reference import results
from goldens import differences

STAGES = {"answers": stand_in.ANSWERS | stand_in.HARMLESS, "states": stand_in.ANSWERS | stand_in.STATES}
# Of an answer of hidden states, whose one token is thrown away.
_NO_STATES = {"an end inside", "no end", "too few"}
_SOUND = "nothing"


def engine_answers(attempt: Attempt) -> str:
    """A stage whose engine writes one wrong file."""
    reference, dice = attempt.reference("lvlm"), attempt.dice
    stage = dice.choice(("answers", "answers", "states"))
    forms = sorted(STAGES[stage]) if stage == "answers" else sorted(STAGES[stage].keys() - _NO_STATES)
    form, job = dice.choice(forms), dice.randrange(2)
    reference.copy(attempt.output, ["world", "target"])
    ended = _run(attempt, attempt.output, stage, form, job)
    attempt.tell(f"engine: {form}, in job {job} of {stage}")
    if form in stand_in.HARMLESS:
        check_success(ended, "refused: ")
    else:
        if ended.code == 0:
            raise Broken("accepted")
        check_refusal(ended, f"wrong-{job:09d}")
        if ended.seconds > 40:
            raise Broken(f"waited {ended.seconds:.0f} s")
    if dice.random() < 0.25 or form in stand_in.HARMLESS:
        _must_equal(attempt, stage, again=form not in stand_in.HARMLESS)
        return "equal results" if form in stand_in.HARMLESS else "refused by name, and then equal results"
    return "refused by name"


def _must_equal(attempt: Attempt, stage: str, *, again: bool) -> None:
    """Compares the stage, run `again` by a sound engine, with one that nothing disturbed."""
    other = attempt.folder / "undisturbed"
    shutil.copytree(attempt.output, other, ignore=shutil.ignore_patterns(stage), symlinks=True)
    for folder in (*((attempt.output,) if again else ()), other):
        ended = _run(attempt, folder, stage, _SOUND, -1)
        check_success(ended, "a sound engine: ")
    expected, found = (json.loads(json.dumps(results(folder / stage))) for folder in (other, attempt.output))
    if lines := differences(expected, found, same_machine=True):
        raise Broken("other results: " + "; ".join(lines[:3]))


def _run(attempt: Attempt, output: Path, stage: str, form: str, job: int) -> Ended:
    engine = f"{{kind: vllm, python: {sys.executable}, timeout_s: 90, max_num_seqs: 4}}"
    reference = attempt.references["lvlm"]
    arguments = [f"recipe={reference.recipe}", f"output={output}", f"stages=[{stage}]"]
    arguments.append(f"stages.{stage}.engine={engine}")
    damage = {"form": form, "job": job, "seed": f"{attempt.seed}/{attempt.number}"}
    work = with_little_memory(_with_stand_in(process.command(arguments), attempt.folder / "workers", damage))
    return attempt.work(work, f"draftsmith {' '.join(arguments)}, {form}", watched=output)


def _with_stand_in(work: Callable[[], int], workers: Path, damage: dict[str, object]) -> Callable[[], int]:
    """The same in a process to which the stand-in, copied into `workers`, is vLLM."""

    def run() -> int:
        from draftsmith.trainers.serve import engine_process as engine
        from draftsmith.trainers.serve import engine_section
        from draftsmith.trainers.serve import rank_engine as opened

        workers.mkdir(exist_ok=True)
        shutil.copy(stand_in.__file__, workers / "vllm_worker.py")
        (workers / "damage.json").write_text(json.dumps(damage | {"workers": str(engine._WORKERS)}))
        engine._WORKERS = workers
        for module in (opened, engine_section):
            vars(module).update(find_python=lambda asked, engine, key: sys.executable)
        vars(engine_section).update(version_of=lambda *asked: "1.0")
        return work()

    return run
