"""Settings and seeds that reach their place: each was left out once by hand, and nothing noticed."""

from types import SimpleNamespace

import pytest
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.trainers.evaluate.methods import Method
from draftsmith.trainers.evaluate.stored_pictures import identity_of
from draftsmith.trainers.publish.decoding import _decoding
from ranks_run import run_ranks

PICTURES = """
from pathlib import Path
from draftsmith.core import ranks
from draftsmith.trainers.evaluate.stored_pictures import StoredPicture, drawn_once
from draftsmith.trainers.run.stopping import Stop
from draftsmith.trainers.train.engine import init_distributed
from test_wiring import prompts

init_distributed()
drawn = []

def draw(numbers):
    drawn.extend(numbers)
    return [StoredPicture([number, 7], number) for number in numbers]

pictures = drawn_once(Path("run"), {"top_p": 1.0}, prompts(5), draw, Stop())
assert [[*p.tokens] for p in pictures] == [[number, 7] for number in range(5)], pictures
print("drew", drawn)
"""


def prompts(count: int) -> list:
    return [SimpleNamespace(caption=f"a {number}", label=None) for number in range(count)]


def test_each_rank_draws_its_own_pictures(tmp_path):
    """And has all of them in the end; no picture is drawn twice."""
    result = run_ranks(2, PICTURES, cwd=tmp_path)
    assert [code for code, _ in result] == [0, 0], result
    assert ["drew [0, 2, 4]" in result[0][1], "drew [1, 3]" in result[1][1]] == [True, True]


@pytest.mark.parametrize("changed", ["top_k", "top_p", "seed", "temperature", "method"])
def test_stored_pictures_are_of_one_setting(changed):
    """A picture that was stored under another one is not this one's."""

    def identity(**changes) -> dict:
        values = {"top_k": 0, "top_p": 1.0, "seed": 0, "temperature": 1.0, "method": "chain"} | changes
        target = SimpleNamespace(model_dump=lambda **how: {"kind": "llamagen"})
        context = SimpleNamespace(target=target, inputs={}, seed=values["seed"])
        tree = {"kind": "chain", "gamma": 2 if values["method"] == "chain" else 3}
        drafting = SimpleNamespace(method=Method(tree=tree), config=EagleConfig(kind="eagle"))
        return identity_of(SimpleNamespace(**values), context, values["temperature"], drafting)

    other = {"top_k": 5, "top_p": 0.9, "seed": 1, "temperature": 0.5, "method": "longer"}
    assert identity() == identity() != identity(**{changed: other[changed]})


def test_a_published_manifest_says_how_its_rows_were_decoded():
    """The top-k and top-p of its evaluation, and its lowest temperature."""
    chain = Method(tree={"kind": "chain", "gamma": 2})
    stage = SimpleNamespace(
        methods={"chain": chain}, draws=False, max_new_tokens=[16, 64], top_k=11, top_p=0.83, temperatures=[1.3, 0.7]
    )
    decoding = _decoding(stage, None, ["chain"], kind="eagle")
    assert (decoding.top_k, decoding.top_p, decoding.temperature) == (11, 0.83, 0.7)
    assert decoding.max_new_tokens == 64 and decoding.name == "chain" and decoding.tree == chain.tree
