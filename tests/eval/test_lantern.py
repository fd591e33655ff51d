"""The relaxed rule against recorded outcomes of LANTERN's released code and of its paper's formulas, and itself.

In the vectors "code" is what the released code does and "paper" what the formulas say. Folders are named by the
setting, d<delta>_k<k>: a delta above 1 is the multiplicative bound, of (delta - 1) p(x).
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.eval.lantern import Lantern, LanternConfig, moved_jsd
from draftsmith.eval.policies import Draw, Static
from draftsmith.eval.rules import Codes, Greedy, Sampling
from draftsmith.models.decoding.neighbours import NeighbourTable, load_neighbours, nearest
from draftsmith.models.decoding.tree import ROOT, Tree, no_tree
from draftsmith.models.decoding.warp import Warp
from fails import fails_with
from pydantic import ValidationError
from test_exactness import distributions, emitted_distribution, outcomes
from test_verify_vectors import check_conditional, check_draws, check_walk, recorded_tree, tried_in_turn, walk

VECTORS = Path(__file__).parent / "vectors" / "lantern.npz"
FORMS = {"code": "reference", "paper": "paper"}
with np.load(VECTORS) as file:
    V = {key: torch.from_numpy(file[key]) for key in file.files}
SETTINGS = sorted({key.split("/")[1] for key in V if key.startswith("unit/d") and key.count("/") == 2})
STATIC = [f"static{i}" for i in range(4)]


def config(form: str, k: int, delta: float, **more) -> LanternConfig:
    bound = {"bound": "multiplicative", "lambda": delta - 1} if delta > 1 else {"delta": delta}
    return LanternConfig(kind="lantern", k=k, residual=FORMS[form], **bound, **more)


def rule(form: str, k: int, delta: float, *, greedy: bool = False, **more) -> Lantern:
    return config(form, k, delta, **more).build_for_codes(0.0 if greedy else 1.0, Codes(V["codebook"]))


def named(setting: str) -> tuple[int, float]:
    delta, k = setting[1:].split("_k")
    return int(k), float(delta)


def every_setting(folder: str) -> list[tuple[str, str, str]]:
    """(case, form, setting) of the folders of a kind."""
    result = {tuple(key.split("/")[:3]) for key in V if key.startswith(folder) and key.split("/")[2:3]}
    return sorted((c, f, s) for c, s, f in result if s in SETTINGS and f in FORMS)


@pytest.mark.parametrize(("form", "k", "delta", "size"), [
    # Section 4.2: B_k(x) is the k nearest tokens, x among them; the released code does not count x.
    ("paper", 1, 1.0, 1), ("paper", 3, 1.0, 3), ("code", 1, 1.0, 2), ("code", 2, 1.0, 3),
    # Section 4.3: the divergence stays below delta; the released code lends up to it. 1.5 is lambda 0.5.
    ("paper", 3, 0.25, 2), ("code", 2, 0.25, 3), ("paper", 3, 1.5, 2), ("code", 2, 1.5, 3),
])  # fmt: skip
def test_the_papers_k_counts_the_token_itself_and_its_bound_is_not_met(form, k, delta, size):
    table = NeighbourTable(torch.tensor([[1, 2, 3], [0, 2, 3], [1, 0, 3], [0, 1, 2]], dtype=torch.int32))
    relaxed = Lantern(config(form, k, delta), table, greedy=False)
    found = relaxed.proximity(torch.tensor([[0.5, 0.125, 0.125, 0.25]]), torch.tensor([0]), torch.tensor([0]))
    assert int(found.size) == size and float(found.mass) == 0.5 + 0.125 * (size - 1)


# The table.


def test_the_table_is_the_recorded_one():
    table = load_neighbours(V["codebook"], 23, metric="l2")
    assert torch.equal(table.codes.long(), V["neighbours"])
    assert table.codes.dtype == torch.int32


def by_hand(codebook, k, metric):
    """Sorted by (distance, index), one pair at a time."""
    points = codebook.double().numpy()
    if metric == "cosine":
        points = points / np.linalg.norm(points, axis=1, keepdims=True)
    rows = []
    for i, a in enumerate(points):
        pairs = sorted((math.sqrt(sum((a - b) ** 2)), j) for j, b in enumerate(points) if j != i)
        rows.append([j for _, j in pairs[:k]])
    return torch.tensor(rows)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("rows", [7, 256])
def test_nearest_by_hand_with_ties_and_in_blocks(metric, rows, monkeypatch):
    monkeypatch.setattr("draftsmith.models.decoding.neighbours.ROWS", rows)
    generator = torch.Generator().manual_seed(0)
    codebook = torch.randn(60, 5, generator=generator)
    codebook[50:] = codebook[:10]  # twins: at distance 0 from one another, and equally far from all others
    result = nearest(codebook, 20, metric=metric)
    assert torch.equal(result.long(), by_hand(codebook, 20, metric))
    assert torch.equal(nearest(codebook, 5, metric=metric), result[:, :5])
    assert result[0, 0] == 50 and result[50, 0] == 0


def test_cosine_is_l2_of_the_normalised_codebook():
    unit = torch.nn.functional.normalize(V["codebook"].double(), dim=-1)
    cosine = nearest(V["codebook"], 23, metric="cosine")
    assert torch.equal(cosine, nearest(unit, 23, metric="l2"))
    assert not torch.equal(cosine.long(), V["neighbours"])


def test_random_neighbours_follow_the_seed():
    one, again, other = (nearest(V["codebook"], 23, metric="random", seed=s) for s in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    everyone = torch.arange(24)
    assert all(torch.equal(torch.cat([row, everyone[i : i + 1]]).sort().values, everyone) for i, row in enumerate(one))


def test_the_offset_maps_ids_to_ids_and_other_ids_are_no_codes():
    table = NeighbourTable(nearest(V["codebook"], 3, metric="l2"), offset=4)
    ids, known = table.of(torch.tensor([3, 4, 27, 28]), 2)
    assert known.tolist() == [False, True, True, False]
    assert torch.equal(ids[1:3] - 4, V["neighbours"][[0, 23], :2])


def test_the_table_is_kept_and_computed_again_for_another_codebook(tmp_path, monkeypatch, capsys):
    load = partial(load_neighbours, metric="l2", folder=tmp_path)
    first = load(V["codebook"], 5)
    [path] = tmp_path.iterdir()
    calls = []
    compute = lambda *a, **k: calls.append(k) or nearest(*a, **k)  # noqa: E731
    monkeypatch.setattr("draftsmith.models.decoding.neighbours.nearest", compute)
    assert torch.equal(load(V["codebook"], 5).codes, first.codes)
    assert not calls
    load(V["codebook"], 6)
    load(V["codebook"], 5, metric="random", seed=1)
    load(V["codebook"], 5, metric="random", seed=2)
    assert len(calls) == 3 and len(list(tmp_path.iterdir())) == 4
    load(V["codebook"].flip(0), 5)
    assert len(calls) == 4
    # A file under the right name with another codebook's facts inside.
    stranger = next(p for p in tmp_path.glob("*-l2-5*") if p != path)
    path.write_bytes(stranger.read_bytes())
    assert torch.equal(load(V["codebook"], 5).codes, first.codes)
    assert len(calls) == 5
    path.write_bytes(b"half a ta")
    # A damaged one is made again, and that is said.
    assert torch.equal(load(V["codebook"], 5).codes, first.codes)
    assert len(calls) == 6 and f"note: the neighbour table {path} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(("make", "why"), [
    (lambda: load_neighbours(V["codebook"], 24, metric="l2"), "24 neighbours of each code, in a codebook of 24"),
    (lambda: load_neighbours(V["codebook"] / 0, 3, metric="l2"), "not finite"),
    (lambda: rule("paper", 25, 0.1), "k is at most 24"),
    (lambda: rule("code", 24, 0.1), "k is at most 23"),
])  # fmt: skip
def test_impossible_tables_are_refused(make, why):
    fails_with(why, make)


# The set, one token at a time.


def all_tokens(relaxed: Lantern, p):
    tokens = torch.arange(24)
    return relaxed.proximity(p[None], torch.zeros_like(tokens), tokens)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_token(setting):
    p = V["unit/p"]
    k, delta = named(setting)
    code = all_tokens(rule("code", k, delta), p)
    assert torch.equal(code.size - 1, V[f"unit/{setting}/code_J"])
    assert torch.allclose(code.mass, V[f"unit/{setting}/code_accept"], atol=1e-6)
    if f"unit/{setting}/paper_accept" in V:
        paper = all_tokens(rule("paper", k, delta), p)
        assert torch.equal(paper.size, V[f"unit/{setting}/paper_A_size"])
        assert torch.allclose(paper.mass, V[f"unit/{setting}/paper_accept"], atol=1e-6)


def rejected(relaxed, p, token, draft_probs, monkeypatch):
    """What the bonus is drawn from after the only child was rejected, and the chance that it was accepted."""
    tree = Tree(torch.tensor([token]), (ROOT,), (-1,), draft_probs, () if draft_probs is None else (0,))
    mass = float(relaxed.proximity(p[None], torch.tensor([0]), torch.tensor([token])).mass)
    chance = mass / (1.0 if draft_probs is None else float(draft_probs[0, token]))
    if chance >= 1:
        return None, 1.0
    rows = torch.stack([p, p])
    above = walk(relaxed, monkeypatch, tree, rows, torch.tensor([chance + 1e-9], dtype=torch.float64))
    below = walk(relaxed, monkeypatch, tree, rows, torch.tensor([chance - 1e-9], dtype=torch.float64))
    assert (above[0].num_accepted, below[0].num_accepted) == (0, 1)
    return above[2], chance


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["code", "paper", "paper_draft"])
def test_every_rejection(setting, kind, monkeypatch):
    folder = f"unit/{setting}/{kind}_residual"
    if folder not in V:
        assert kind != "code" and named(setting)[1] > 1  # the paper has no multiplicative bound
        return
    relaxed = rule(kind.split("_")[0], *named(setting))
    p, q = V["unit/p"], V["unit/draft_p"][None] if kind == "paper_draft" else None
    for token in range(24):
        rest, chance = rejected(relaxed, p, token, q, monkeypatch)
        if kind == "paper_draft":
            assert chance == pytest.approx(float(V[f"unit/{setting}/paper_draft_accept"][token]), abs=1e-5)
        if rest is not None:
            assert torch.allclose(rest, V[folder][token], atol=1e-5 if q is not None else 1e-6)


def test_a_sum_that_equals_the_bound():
    """The paper stops before it, the released code takes it; the sums are exact in binary."""
    k, delta = int(V["boundary/k"]), float(V["boundary/delta"])
    assert delta in V["boundary/cumulative"].tolist()
    at = (V["boundary/p"][None], torch.tensor([0]), V["boundary/x"][None])
    paper, code = (rule(form, k, delta).proximity(*at) for form in ("paper", "code"))
    assert int(paper.size) == int(V["boundary/paper_A_size"])
    assert int(code.size) - 1 == int(V["boundary/code_J"]) and int(code.size) > int(paper.size)
    assert float(paper.mass) == pytest.approx(float(V["boundary/paper_accept"]), abs=1e-6)
    assert float(code.mass) == pytest.approx(float(V["boundary/code_accept"]), abs=1e-6)


# Walks.


@pytest.mark.parametrize(
    ("case", "folder", "form", "setting"),
    [*((case, f"{case}/{setting}/{form}", form, named(setting)) for case, form, setting in every_setting("tree")),
     *((case, case, "code", (int(V[f"{case}/lantern_k"]), float(V[f"{case}/lantern_delta"]))) for case in STATIC)],
)  # fmt: skip
def test_trees_and_drawn_children_of_the_released_code(case, folder, form, setting, monkeypatch):
    relaxed, tree, p = rule(form, *setting), recorded_tree(V, case), V[f"{case}/node_probs"]
    for trial, uniforms in enumerate(V[f"{case}/uniforms"]):
        check_walk(V, case, folder, trial, walk(relaxed, monkeypatch, tree, p, uniforms), tree)


@pytest.mark.parametrize("case", STATIC)
def test_drawn_children_come_of_the_recorded_draft(case):
    temperature, top_k, top_p = (float(V[f"{case}/{name}"]) for name in ("temperature", "top_k", "top_p"))
    check_draws(V, case, Warp(temperature, int(top_k), top_p))
    check_conditional(V, case)


@pytest.mark.parametrize("case", [f"greedy{i}" for i in range(4)])
def test_unrelaxed_greedy(case):
    """What the same trees give without relaxation: the exact rule."""
    tree, rows = recorded_tree(V, case), V[f"{case}/retrieve"]
    verified = Greedy()(tree, V[f"{case}/node_logits"])
    assert verified.num_accepted == int(V[f"{case}/strict/accept_length"])
    assert verified.bonus == int(V[f"{case}/strict/bonus_token"])
    row = rows[int(V[f"{case}/strict/best_row"])][: verified.num_accepted + 1]
    assert [0, *(n + 1 for n in verified.path)] == row.tolist()


def test_the_released_code_may_remove_everything(monkeypatch):
    relaxed = rule("code", int(V["allzero/k"]), float(V["allzero/delta"]))
    tree = Tree(V["allzero/children"], (ROOT, ROOT), (-1, -1))
    p = V["allzero/logits"].softmax(-1).expand(3, -1)
    verified, used, rest = walk(relaxed, monkeypatch, tree, p, V["allzero/uniforms"])
    assert verified.num_accepted == int(V["allzero/code/accept_length"]) == 0
    assert used == int(V["allzero/code/used"])
    assert torch.allclose(rest, V["allzero/code/next_probs"], atol=1e-6)


@pytest.mark.parametrize(("case", "form", "setting"), [*every_setting("greedy")])
def test_greedy(case, form, setting):
    """Among equally long paths the reference takes its first row: those of case 0 stand as of a static tree."""
    folder = f"{case}/{setting}/{form}"
    tree, scores, rows = recorded_tree(V, case), V[f"{case}/node_logits"], V[f"{case}/retrieve"]
    tree = replace(tree, by_path=case == "greedy0")
    assert [leaf + 1 for leaf in tree.leaves] == [int(row[row >= 0][-1]) for row in rows]
    verified = rule(form, *named(setting), greedy=True)(tree, scores)
    length = int(V[f"{folder}/accept_length"])
    assert verified.num_accepted == length
    assert [0, *(n + 1 for n in verified.path)] == rows[int(V[f"{folder}/best_row"])][: length + 1].tolist()
    assert verified.tokens == tuple(tree.tokens[list(verified.path)].tolist())
    assert verified.bonus == int(V[f"{folder}/bonus_token"])


def test_ties_of_a_static_tree_go_by_path():
    """Both children of the root count, nothing below them: the leaf under the first is numbered after the second."""
    q = torch.arange(24, 0, -1) / 300
    tree = Static([(0,), (1,), (0, 0)]).grow(
        q, lambda parents, _: q.expand(len(parents), -1), Draw("top-k"), max_levels=9
    )
    scores = torch.zeros(4, 24)
    scores[1:, 5] = 99.0
    relaxed = rule("code", 12, 0.5, greedy=True)
    assert relaxed(tree, scores).tokens == (0,)
    assert relaxed(replace(tree, by_path=False), scores).tokens == (1,), "as of EAGLE-2's tree"


# Without relaxation it is the exact rule.


def random_tree(generator, form: str):
    """Eight nodes over 24 tokens, and p that often agrees with q. "filled": q holds two tokens, fewer than asked."""
    places = torch.randint(-1, 5, (8,), generator=generator).sort().values.tolist()
    parents = tuple(min(place, node - 1) for node, place in enumerate(places))
    q = torch.rand(9, 24, generator=generator) ** 6
    p = q + torch.rand(9, 24, generator=generator) ** 6
    if bool(torch.randint(0, 2, (), generator=generator)):
        p = p.where(p >= p.topk(4, dim=-1).values[:, -1:], 0.0)
    if form == "filled":
        q = q.where(q >= q.topk(2, dim=-1).values[:, -1:], 0.0)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.zeros(8, dtype=torch.int64)
    for parent in {*parents}:
        children = [node for node, above in enumerate(parents) if above == parent]
        row = q[parent + 1]
        drawn = form == "drawn"
        tokens[children] = (
            torch.multinomial(row, len(children), generator=generator) if drawn else row.topk(len(children)).indices
        )
    expansions = (-1,) * 8
    if form == "deterministic":
        return Tree(tokens, parents, expansions), p
    return Tree(tokens, parents, expansions, q, tuple(above + 1 for above in parents)), p


def same(a, b) -> bool:
    return (a.path, a.tokens, a.bonus) == (b.path, b.tokens, b.bonus)


@pytest.mark.covering
@pytest.mark.parametrize("divergence", ["tvd", "jsd"])
@pytest.mark.parametrize("form", ["deterministic", "drawn", "filled"])
def test_delta_0_is_the_exact_rule_bit_for_bit(form, divergence, monkeypatch):
    relaxed = rule("paper", 10, 0.0, divergence=divergence)
    generator = torch.Generator().manual_seed(0)
    accepted = refused = 0
    for _ in range(400):
        tree, p = random_tree(generator, form)
        # The exact rule draws once where children are deterministic; the relaxed one tries them in turn.
        same_tree = tried_in_turn(tree, p) if form == "deterministic" else tree
        uniforms = torch.rand(9, generator=generator, dtype=torch.float64)
        one, other = [], []
        expected = Sampling()(same_tree, p, (one.append(u) or u for u in uniforms.tolist()))
        actual = relaxed(tree, p, (other.append(u) or u for u in uniforms.tolist()))
        assert same(actual, expected) and one == other
        # The bonus shows one token of the residual, this all of it.
        with monkeypatch.context() as patch:
            ours = walk(relaxed, patch, tree, p, uniforms)[2]
            exact = walk(Sampling(), patch, same_tree, p, uniforms)[2]
        assert torch.equal(ours, exact)
        accepted, refused = accepted + actual.num_accepted, refused + len(one) - 1 - actual.num_accepted
    assert accepted > 100 and refused > 300


@pytest.mark.parametrize("form", ["paper", "code"])
def test_greedy_delta_0_is_the_exact_rule(form):
    """Scores on a coarse grid tie now and then, and scores a rounding apart have the same softmax."""
    relaxed = rule(form, 10, 0.0, greedy=True)
    generator = torch.Generator().manual_seed(0)
    accepted = 0
    for trial in range(400):
        tree, p = random_tree(generator, "deterministic")
        scores = [p.log() + 9, (8 * p).round(), 9 + p * 1e-6][trial % 3]
        expected = Greedy()(tree, scores)
        assert same(relaxed(tree, scores), expected)
        accepted += expected.num_accepted
    assert accepted > 100


def strays(form: str, k: int, warp: Warp, seed: int, children: int) -> float:
    """Total variation of the next token from p at delta 0: all outcomes of a root with so many children."""
    generator = torch.Generator().manual_seed(seed)
    scores = 1.5 * torch.randn(24, generator=generator)
    tokens = (scores + torch.randn(24, generator=generator)).topk(children).indices
    p, seen = warp(scores).double(), torch.zeros(24, dtype=torch.float64)
    tree = Tree(tokens, (ROOT,) * children, (-1,) * children)
    for (token, *_), chance in outcomes(rule(form, k, 0.0), tree, p.expand(children + 1, -1)):
        seen[token] += chance
    assert float(seen.sum()) == pytest.approx(1, abs=1e-9)
    return float((seen - p).abs().sum() / 2)


@pytest.mark.parametrize(
    "warp", [pytest.param(Warp(1.0, 4, 1.0), marks=pytest.mark.slow), Warp(1.0, 0, 0.6)], ids=["top-k", "top-p"]
)
def test_the_released_code_at_delta_0_is_no_exact_baseline(warp):
    """Its bound may be met: a neighbour that top-k, top-p or a rejection left nothing lends its nothing.

    After a rejection k + 1 neighbours then go, whatever they have.
    """
    for k, expected in ((3, 0.16), (10, 0.30)):
        assert sum(strays("code", k, warp, seed, 3) for seed in range(4, 8)) / 4 == pytest.approx(expected, abs=0.02)
    assert strays("paper", 10, warp, 6, 3) < 1e-6
    assert strays("code", 10, Warp(1.0), 6, 1) < 1e-6, "where every code has some probability, nothing lends"


def test_a_single_proposal_strays_by_the_mass_moved_and_no_further_than_delta():
    """With one deterministic draft the outcome is p with A's mass moved onto it (section 4.3)."""
    shifts = []
    for seed, delta in ((0, 0.3), (1, 0.3), (2, 0.6), (3, 0.6)):
        p, q = distributions(seed, 6)
        relaxed = config("paper", 6, delta).build_for_codes(1.0, Codes(V["codebook"][:6].double()))
        seen = emitted_distribution(relaxed, [(0,)], "top-k", p, q, 6).sum(-1)
        draft = q[()].argmax()[None]
        moved = float(relaxed.proximity(p[()][None], torch.tensor([0]), draft).mass - p[()][draft])
        assert moved < delta
        shifts.append(moved)
        assert float((seen - p[()]).abs().sum() / 2) == pytest.approx(moved, abs=1e-9)
    assert sum(moved > 0.05 for moved in shifts) >= 2


# The bounds.


def jsd(a, b) -> float:
    middle = (a + b) / 2
    return float((torch.xlogy(a, a / middle).nansum() + torch.xlogy(b, b / middle).nansum()) / 2)


def moved_onto(p, token, others):
    left = p.clone()
    left[token] += left[others].sum()
    left[others] = 0
    return left


def test_the_divergence_of_moved_mass():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(24, generator=generator, dtype=torch.float64) ** 4
    p[::5] = 0
    p = p / p.sum()
    for token in range(24):
        others = V["neighbours"][token][:8]
        cumulative = p[others].cumsum(-1)
        expected = [jsd(p, moved_onto(p, token, others[: n + 1])) for n in range(8)]
        assert moved_jsd(p[token], cumulative).tolist() == pytest.approx(expected, abs=1e-12)
        single = moved_jsd(p[token].float(), cumulative.float())
        assert single.tolist() == pytest.approx(expected, abs=1e-6) and (single.diff() >= -1e-6).all()
    # A token with next to nothing, or nothing, under a large mass; nothing at all.
    own, moved = torch.tensor([1e-30, 0.0, 0.0, 0.5]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert moved_jsd(own, moved).tolist() == pytest.approx([math.log(2), math.log(2), 0, 0], abs=1e-6)


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("kind", ["tvd", "jsd", "multiplicative"])
def test_the_set_member_by_member(kind, form):
    """Algorithm 2 (appendix D.2), with each divergence taken from its definition."""
    p = V["unit/p"].double()
    settings = {
        "tvd": [dict(delta=d) for d in (0.05, 0.2, 0.4)],
        "jsd": [dict(delta=d, divergence="jsd") for d in (0.02, 0.07, 0.2)],
        "multiplicative": [{"bound": "multiplicative", "lambda": b} for b in (0.0, 1.0, 5.0)],
    }[kind]
    sizes = set()
    for setting in settings:
        made = LanternConfig(kind="lantern", k=12, residual=FORMS[form], **setting)
        result = all_tokens(made.build_for_codes(1.0, Codes(V["codebook"])), p)
        for token in range(24):
            others = V["neighbours"][token][: 11 if form == "paper" else 12]
            bound = made.lambda_ * p[token] if kind == "multiplicative" else made.delta
            size = 1
            while size <= len(others):
                there = moved_onto(p, token, others[:size])
                cost = jsd(p, there) if kind == "jsd" else float((p - there).abs().sum() / 2)
                if cost >= bound:  # nothing here is near enough for equality to matter
                    break
                size += 1
            assert int(result.size[token]) == size
            assert float(result.mass[token]) == pytest.approx(float(p[token] + p[others[: size - 1]].sum()))
            sizes.add(size)
    assert len(sizes) > 5


def test_mass_that_is_no_code_lends_nothing_and_borrows_nothing():
    """Ids 0 to 3 and 28 on are words; the table holds 4 to 27."""
    relaxed = config("paper", 24, 1.0).build_for_codes(1.0, Codes(V["codebook"], offset=4))
    p = torch.full((1, 30), 1 / 30)
    tokens = torch.tensor([0, 3, 4, 27, 28, 29])
    mass, size = relaxed.proximity(p, torch.zeros_like(tokens), tokens)
    assert size.tolist() == [1, 1, 24, 24, 1, 1]
    assert torch.allclose(mass, torch.tensor([1, 1, 24, 24, 1, 1]) / 30)


@pytest.mark.parametrize("greedy", [True, False])
def test_nothing_proposed(greedy):
    p = V["unit/p"][None]
    result = rule("paper", 5, 0.2, greedy=greedy)(no_tree(), p, [0.5])
    assert same(result, (Greedy() if greedy else Sampling())(no_tree(), p, [0.5]))


@pytest.mark.parametrize("wrong", [
    {}, {"delta": 0.1, "bound": "multiplicative"}, {"lambda": 3.0}, {"lambda": 3.0, "delta": 0.1},
    {"lambda": 3.0, "bound": "multiplicative", "divergence": "jsd"}, {"delta": 1.5}, {"delta": 0.1, "k": 0},
    {"delta": 0.1, "metric": "euclid"}, {"delta": 0.1, "depth": 2},
])  # fmt: skip
def test_settings_that_would_not_be_honoured(wrong):
    fails_with("", LanternConfig, kind="lantern", error=ValidationError, **wrong)
