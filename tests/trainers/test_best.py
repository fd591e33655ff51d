"""Which of the weights of a training are kept as the best."""

import json
import math

from damage import DAMAGES, told
from draftsmith.trainers.train.drafter import Best
from fails import fails_with


def test_the_best_by_each_score_stay_and_others_are_not_even_copied(tmp_path):
    copied = []

    def save(head, folder, step):
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(f"{head} of step {step}")

    best = Best(tmp_path, save)
    scores = [(2, 0.3, math.nan), (4, 0.5, 1.5), (6, 0.4, None), (8, 0.5, math.nan), (10, 0.1, 1.6)]
    for step, top1, tau in scores:
        best.keep({"top1": top1, "tau": tau}, step, lambda step=step: copied.append(step) or f"weights {step}")
    assert copied == [2, 4, 4, 10], "once for each score that is better than all before; an equal one is not"
    for name, score, step in (("top1", 0.5, 4), ("tau", 1.6, 10)):
        assert best.of(name) == (tmp_path / f"best-{name}", score, step)
        assert (tmp_path / f"best-{name}" / "weights").read_text() == f"weights {step} of step {step}"
    # What another process kept before counts: a run that comes back does not begin with worse weights.
    Best(tmp_path, save).keep({"top1": 0.45}, 12, lambda: "later")
    assert json.loads((tmp_path / "best-top1" / "score.json").read_text())["step"] == 4


def test_a_damaged_score_is_told(tmp_path):
    """Without it nobody knows how good the weights beside it are: neither read nor replaced."""
    best = Best(tmp_path, lambda head, folder, step: folder.mkdir())
    best.keep({"top1": 0.5}, 2, lambda: "weights")
    path = tmp_path / "best-top1" / "score.json"
    assert told(path, lambda: best.of("top1")) == set(DAMAGES)
    path.write_text('{"score": "half"}')
    fails_with(r"score: expected a valid number[\s\S]*score\.json", best.keep, {"top1": 0.9}, 4, lambda: "others")
