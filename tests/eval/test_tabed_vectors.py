"""TABED's weights, mixtures and accepted tokens, block by block, as its released code and its article have them.

The classes are those that decoding uses: the loop, the ensemble and its rule. Only the models are scripted.
The vectors are described in vectors_tabed/README.md.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.eval.loop import Cycle, Decoding, Generation, generate
from draftsmith.eval.measured_rows import measure
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.eval.summary import summarize
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.ensemble import EnsembleConfig, EnsembleProposal
from draftsmith.models.drafters.weights import GridWeights, InverseError, InverseWeights, grid, weights_of
from draftsmith.models.targets.base import TargetStep

VECTORS = Path(__file__).parent / "vectors_tabed"
ARRAYS = np.load(VECTORS / "tabed.npz")
FACTS = json.loads((VECTORS / "tabed.json").read_text())
GAMMA = 5

ARTICLE = {
    "mt_paper_grid_hard": GridWeights(kind="grid", score="hits", order="article"),
    "mt_paper_grid_soft": GridWeights(kind="grid", score="kl", order="article"),
    "mt_paper_grid_both": GridWeights(kind="grid", order="article"),
    **{
        f"mtcp_paper_softmax_inverse_kl_temp{t:g}": InverseWeights(kind="inverse", form="softmax", temperature=t)
        for t in (1, 0.5, 4)
    },
}


def released(scenario):
    window = scenario["window"] or None
    if scenario["item"] == "w-grid":
        score = {"num-accepted-kld": "hits-then-kl", "kld": "kl", "tvd": "tvd"}[scenario["measure"]]
        return GridWeights(kind="grid", score=score, window=window)
    error = {"kld": "kl", "tvd": "tvd"}[scenario["item"]]
    return InverseWeights(kind="inverse", error=error, window=window, temperature=scenario["temperature"])


CASES = {s["prefix"]: released(s) for s in FACTS["scenarios"]} | ARTICLE


class Finished(Exception):
    """No more blocks were recorded."""


class ScriptedDecoder:
    device, reads_newlines, reads_first = torch.device("cpu"), True, True

    def logits(self, feature):
        return feature


class ScriptedEnsemble(EnsembleProposal):
    """Block b, step i of every draft come from the vectors, whatever the tokens are."""

    def script(self, logits):
        self.logits, self.block, self.weights_used, self.mixtures = logits, -1, [], []  # logits [blocks,R,gamma,V]
        self.weights_raw = []  # of inverse errors, before they are normalised

    def _prefill(self, views, capacity):
        self._cache = Cache(1, capacity)

    def _forward(self, tokens, places, mask):
        step = len(self._expansions)
        return self.logits[self.block, :, [step]].expand(-1, len(tokens), -1)

    def root(self):
        self.block += 1
        if self.block == len(self.logits):
            raise Finished
        self._expansions = type(self._expansions)()
        self.weights_used.append(self.weights.current)
        if self.block and isinstance(self.weights, InverseError):
            self.weights_raw.append(1 / self.weights.errors.total())
        return super().root()

    def _q(self, feature):
        q = super()._q(feature)
        self.mixtures.append((self.block, q[-1]))
        return q


class ScriptedTarget:
    vocab_size, device = 40, torch.device("cpu")

    def __init__(self, logits):
        self.logits, self.block, self.accepted, self.trees = logits, -1, [], []  # [blocks,gamma+1,V]

    def prefill(self, request, taps, *, capacity):
        return None, TargetStep(self.logits[0, :1])

    def verify(self, session, root, tree):
        self.block += 1
        self.trees.append(tree)
        return TargetStep(self.logits[self.block, : tree.num_nodes + 1])

    def commit(self, session, path):
        self.accepted.append(len(path))


def run(name, eos=()):
    prefix = name.split("_")[0]
    drafts = torch.from_numpy(ARRAYS[f"{prefix}_draft_logits"])
    target = ScriptedTarget(torch.from_numpy(ARRAYS[f"{prefix}_target_logits"]))
    config = EnsembleConfig(name=name, members=("M", "T", "P", "T-raw")[: drafts.shape[1]], weights=CASES[name])
    ensemble = ScriptedEnsemble(
        ScriptedDecoder(), config.members, weights_of(config.weights, len(config.members)), newline_id=5
    )
    ensemble.script(drafts)
    asked = Request(torch.tensor([1, 3]), torch.zeros(2, dtype=torch.int8), None)
    decoding = Decoding(Chain(GAMMA), Greedy(), Draw("top-k"), Warp(), 1000, eos)
    try:
        target.cycles = generate(target, ensemble, asked, decoding).cycles
    except Finished:
        target.cycles = []
    return ensemble, target


@pytest.mark.parametrize("name", CASES)
def test_block_by_block(name):
    ensemble, target = run(name)
    assert not target.cycles, "every recorded block was decoded"
    wanted = {key: ARRAYS[f"{name}_{key}"] for key in ("weights_used", "accepted", "draft_tokens")}
    tolerance = 1e-6 if isinstance(CASES[name], GridWeights) else 1e-5
    assert torch.stack(ensemble.weights_used).numpy() == pytest.approx(wanted["weights_used"], abs=tolerance)
    drafted = [[*tree.tokens.tolist(), *[-1] * (GAMMA - tree.num_nodes)] for tree in target.trees]
    assert drafted == wanted["draft_tokens"].tolist()
    assert target.accepted == wanted["accepted"].tolist()
    if f"{name}_ensembled" in ARRAYS:
        assert [tree.num_nodes for tree in target.trees] == ARRAYS[f"{name}_drafted"].tolist()
        steps = {}
        for block, q in ensemble.mixtures:
            steps.setdefault(block, []).append(q)
        if ensemble.weights_raw:
            assert torch.stack(ensemble.weights_raw).numpy() == pytest.approx(
                ARRAYS[f"{name}_weights_raw"][1:], rel=1e-5
            )
        else:  # a point of the grid sums to 1 as it is
            raw = torch.stack(ensemble.weights_used).numpy()[1:]
            assert raw == pytest.approx(ARRAYS[f"{name}_weights_raw"][1:], abs=1e-6)
        for block, rows in steps.items():
            expected = ARRAYS[f"{name}_ensembled"][block, : len(rows)]
            assert torch.stack(rows).numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scenario", FACTS["scenarios"], ids=lambda scenario: scenario["prefix"])
def test_an_end_token_inside_a_recorded_block(scenario):
    """Every drafted token of the record as the end token: drafts stop after it, and weights stay as recorded.

    Blocks without it are whole. Where it is accepted the count leaves it out, as the released code does; where it is
    refused the history is the recorded one, which ends at the first refused place.
    """
    name, stopped = scenario["prefix"], 0
    drafts, accepted = ARRAYS[f"{name}_draft_tokens"].tolist(), ARRAYS[f"{name}_accepted"].tolist()
    assert not any(scenario["eos"] in block for block in drafts) and {*ARRAYS[f"{name}_drafted"]} == {GAMMA}
    for eos in sorted({token for block in drafts for token in block}):
        ensemble, target = run(name, (eos,))
        assert len(target.trees) == len(target.accepted)
        for block, (tree, kept) in enumerate(zip(target.trees, target.accepted, strict=True)):
            place = drafts[block].index(eos) if eos in drafts[block] else GAMMA
            assert tree.tokens.tolist() == drafts[block][: place + 1]
            assert kept == min(accepted[block], place)
            stopped += tree.num_nodes < GAMMA
        if ensemble.weights_used:  # else the prefill's token ended the answer
            used = torch.stack(ensemble.weights_used).numpy()
            assert used == pytest.approx(ARRAYS[f"{name}_weights_used"][: len(used)], abs=1e-5)
    assert stopped > 5


def test_the_variants_differ():
    """Guards the test above: the vectors can tell the rules apart."""
    used = {name: ARRAYS[f"{name}_weights_used"].round(6).tobytes() for name in CASES}
    same = [[n for n in used if used[n] == used[name]] for name in used]
    # Two readings agree on these drafts with another, as their readers' notes say.
    assert {tuple(names) for names in same if len(names) > 1} <= {
        ("mt_grid_kl", "mt_paper_grid_soft"), ("mt_grid_hits_then_kl", "mt_paper_grid_both"),
    }  # fmt: skip


@pytest.mark.parametrize(("members", "points"), FACTS["grid_points"].items())
def test_the_grid(members, points):
    result = grid(int(members), 10)
    assert len(result) == points == len(set(result))
    assert result == sorted(result)
    assert all(abs(sum(weights) - 1) < 1e-12 for weights in result)


def test_block_efficiency_and_speedup():
    """tau of a whole set and of each sample, and TABED's expected speedup, from our own tables."""
    facts = FACTS["block_efficiency"]
    for pair in FACTS["speedup"]:
        rows = []
        for number, accepted in enumerate(facts["accepted_per_block_per_sample"]):
            gamma = pair["gamma"]
            cycles = [
                Cycle(gamma, gamma, a, a + 1, gamma * pair["ratio"], 1.0, 1.0, num_planned=gamma) for a in accepted
            ]
            plain = Generation([1, 1], [Cycle(0, 0, 0, 1, 0.0, 1.0, 1.0)], 0.0, 0.0, 1.0, "length")
            drafted = Generation([1], cycles, 0.0, 0.0, 1.0, "length")
            rows.append(measure([plain], [drafted], benchmark="b", method="M", request=f"r{number}", temperature=0.0,
                                max_new_tokens=64, medium="text"))  # fmt: skip
        result = summarize(rows)
        assert result.tau == pytest.approx(facts["all_blocks"])
        assert result.tau_mean_of_requests == pytest.approx(facts["mean_of_samples"])
        assert [r.num_emitted / r.num_cycles for r in rows] == pytest.approx(facts["per_sample"])
        assert result.expected_speedup_tabed * pair["tau"] / result.tau == pytest.approx(pair["speedup"])
