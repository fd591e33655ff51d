"""A slice of `tests/tools/torture.py`, all of it in the slow tests, and planted faults that its judge must see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "tools" / "torture.py"


@pytest.fixture(scope="module")
def attempts():
    """The package of attempts, as the script finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        from attempts import attempt, damages, kills, process, reference

        yield type("Attempts", (), {"attempt": attempt, "damages": damages, "kills": kills, "process": process,
                                    "reference": reference})  # fmt: skip


def torture(folder: Path, *arguments: str, minutes: float) -> str:
    command = [sys.executable, str(SCRIPT), "--folder", str(folder / "torture"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * minutes, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert not (folder / "torture").exists(), "a run without a failure leaves nothing behind"
    return done.stdout


def test_a_slice_of_what_costs_little_holds(tmp_path):
    kinds = "damage,half"
    said = torture(tmp_path, "--attempts", "3", "--kinds", kinds, "--recipes", "visual", "--jobs", "1", minutes=5)
    assert "3 tried, 3 held, 0 failed" in said


@pytest.mark.slow
def test_all_of_it_holds_with_three_seeds(tmp_path):
    said = torture(tmp_path, "--attempts", "500", "--seed", "0,1,2", minutes=240)
    assert said.count("500 tried, 500 held, 0 failed") == 3


def test_a_kill_comes_before_the_event_that_was_asked_for(attempts, tmp_path):
    process, folder = attempts.process, tmp_path / "run"
    folder.mkdir()

    def work() -> int:
        for number in range(5):
            (folder / str(number)).write_text("")
        return 0

    undisturbed = process.run(work, folder, tmp_path / "log")
    assert (undisturbed.code, undisturbed.events, undisturbed.reached) == (0, 5, None)
    for path in folder.iterdir():
        path.unlink()
    ended = process.run(work, folder, tmp_path / "log", disturbance=process.Disturbance(event=4, number=9))
    assert ended.code == -9 and ended.reached is not None
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]


def test_the_judge_sees_what_a_run_must_not_do(attempts, tmp_path):
    """A traceback, a refusal that names nothing, a hint without a cure, a hang, and a stage begun after the signal."""
    Ended, Broken = attempts.process.Ended, attempts.attempt.Broken
    check = attempts.attempt.check_refusal
    check(Ended(2, "error: weights.bin is cut", 0, None, 0.1), "weights.bin")
    for code, text in (
        (0, ""), (1, "error: weights.bin"), (2, "error: something is cut"),
        (2, "error: weights.bin\nTraceback (most recent call last):\n  File \"x\"\nKeyError: 1"),
    ):  # fmt: skip
        with pytest.raises(Broken):
            check(Ended(code, text, 0, None, 0.1), "weights.bin")
    one = attempts.attempt.Attempt("damage", 0, 0, tmp_path, {})
    victim = one.output / "target" / "model.safetensors"
    with pytest.raises(Broken, match="no cure"):
        attempts.damages.cure(one, None, Ended(2, "error: x\n  hint: good luck", 0, None, 0.1), victim, [], [])
    (one.output / "later").mkdir(parents=True)
    (one.output / "later" / "fingerprint.json").write_text("{}")
    terminated = attempts.process.Disturbance(event=1, number=15)
    with pytest.raises(Broken, match="begun all the same"):
        attempts.kills.check_end(one, ["later"], Ended(143, "", 1, 1.0, 0.1), terminated)


def test_the_judge_sees_other_results(attempts, tmp_path):
    folder = tmp_path / "run" / "stage"
    folder.mkdir(parents=True)
    (folder / "done.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "step_s": 0.5}\n')
    (folder / "rows.jsonl").write_text('{"request": "a", "accepted": [1, 2], "total_s": 1.0}\n')
    reference = attempts.reference.Reference("visual", tmp_path / "run", ["stage"])
    reference.results["stage"] = json.loads(json.dumps(attempts.reference.results(folder)))
    # Times differ, and results do not.
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "step_s": 0.7}\n')
    assert reference.differences(tmp_path / "run", ["stage"]) == []
    (folder / "rows.jsonl").write_text('{"request": "a", "accepted": [1, 1], "total_s": 1.0}\n')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0000001}\n')
    (folder / "extra.json").write_text("{}")
    text = "\n".join(reference.differences(tmp_path / "run", ["stage"]))
    assert "loss: 1.0 -> 1.0000001" in text and "rows/" in text and "extra.json" in text
    (folder / "done.json").unlink()
    assert reference.differences(tmp_path / "run", ["stage"]) == ["stage has not finished"]
