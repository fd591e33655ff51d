"""Settings and seeds that reach their place: each was left out once by hand, and nothing noticed."""

from types import SimpleNamespace

from draftsmith.trainers.evaluate.methods import Method
from draftsmith.trainers.publish.decoding import _decoding


def test_a_published_manifest_says_how_its_rows_were_decoded():
    """The top-k and top-p of its evaluation, and its lowest temperature."""
    chain = Method(tree={"kind": "chain", "gamma": 2})
    stage = SimpleNamespace(
        methods={"chain": chain}, draws=False, max_new_tokens=[16, 64], top_k=11, top_p=0.83, temperatures=[1.3, 0.7]
    )
    decoding = _decoding(stage, None, ["chain"], kind="eagle")
    assert (decoding.top_k, decoding.top_p, decoding.temperature) == (11, 0.83, 0.7)
    assert decoding.max_new_tokens == 64 and decoding.name == "chain" and decoding.tree == chain.tree
