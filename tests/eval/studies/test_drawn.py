"""What is read from finished pictures is what decoding saw; numbers and maps against brute force."""

import pytest
import torch
import visual_tiny as generators
from draftsmith.core.batch import ImageRequest
from draftsmith.data.shards.codes import ShardData, ShardSamples
from draftsmith.data.shards.shards import claim, finish, write_shard
from draftsmith.eval.lantern import LanternConfig
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Draw, DynamicTree
from draftsmith.eval.rules import RULES
from draftsmith.eval.studies.drawn_cells import (
    AnalysisConfig,
    Curves,
    bound_cost,
    encoded_pictures,
    overlap,
    ranks,
    read_pictures,
    relaxed,
    teacher_forced,
    top_mass,
)
from draftsmith.models.decoding.neighbours import load_neighbours
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Distributions, Warp
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.targets.llamagen.target import LlamaGenTarget

GRID, CODES = 4, 24
CELLS = GRID * GRID
EAGLE = EagleConfig(kind="eagle")


def head_of(target):
    torch.manual_seed(2)
    head = EAGLE.build(target)
    for parameter in head.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return head


TEXT = generators.llamagen("text", loud=0.1)
TARGETS = {
    "text": lambda: (generators.target(TEXT, 3.0, 6), torch.randn(4, 12, generator=torch.Generator().manual_seed(3))),
    "class": lambda: (generators.target(generators.llamagen("class", loud=0.1), 3.0, 6), torch.tensor(3)),
    "one row": lambda: (generators.target(TEXT), torch.randn(2, 12)),
    # Its head hides the padding that guidance brings, and codes are not tokens.
    "anole": lambda: (generators.anole(), torch.tensor([25, 26, 28])),
}


class Seeing:
    """A rule that keeps what it was shown at each root."""

    def __init__(self, rule):
        self.rule, self.name, self.roots = rule, rule.name, []

    def __call__(self, tree, p, uniforms=()):
        self.roots.append(Distributions.of(p).row(0))
        return self.rule(tree, p, uniforms)


class Drafting:
    """A drafter that keeps the distribution it gave at each root."""

    def __init__(self, inner):
        self.inner, self.roots = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def root(self):
        self.roots.append(self.inner.root())
        return self.roots[-1]


def decode(target, condition, warp, drafter=None, seed: int = 0):
    rule = Seeing(RULES["greedy" if warp.greedy else "sampling"])
    policy = DynamicTree(kind="dynamic", total=8, depth=2, width=3).build()
    decoding = Decoding(policy, rule, Draw("top-k"), warp, CELLS, ())
    generator = torch.Generator().manual_seed(seed)
    result = generate(target, drafter, ImageRequest(condition), decoding, generator)
    assert len(result.tokens) == CELLS
    return result, rule


# ---- p and q


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("warp", [Warp(0.0), Warp(1.0), Warp(0.8, top_k=9, top_p=0.95)], ids=str)
def test_p_is_what_plain_decoding_samples_from(name, warp):
    target, condition = TARGETS[name]()
    result, rule = decode(target, condition, warp)
    curves = teacher_forced(target, head_of(target), condition, target.codes(result.tokens), warp)
    seen = torch.stack([warp(scores) for scores in rule.roots] if warp.greedy else rule.roots)
    assert curves.p.shape == (CELLS, target.vocab_size)
    torch.testing.assert_close(curves.p[1:], seen, atol=2e-5, rtol=0)
    assert curves.tokens.tolist() == result.tokens
    _, prefill = target.prefill(ImageRequest(condition), EAGLE.drafter(head_of(target), target).taps, capacity=1)
    torch.testing.assert_close(curves.p[0], warp(prefill.logits[-1]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("warp", [Warp(0.0), Warp(1.0, top_k=9)], ids=str)
def test_q_is_what_the_head_drafts_from_at_a_root(name, warp):
    target, condition = TARGETS[name]()
    head = head_of(target)
    drafter = Drafting(EAGLE.drafter(head, target))
    result, rule = decode(target, condition, warp, drafter)
    curves = teacher_forced(target, head, condition, target.codes(result.tokens), warp)
    # A cycle after t tokens drafts token t; the head's first prediction is for token 1.
    places = torch.tensor([c.num_emitted for c in result.cycles]).cumsum(0)
    starts = [0, *places[:-1].tolist()]
    assert len(starts) == len(drafter.roots)
    torch.testing.assert_close(curves.q[starts], warp.truncate(torch.stack(drafter.roots)), atol=2e-5, rtol=0)
    seen = torch.stack([warp(scores) for scores in rule.roots] if warp.greedy else rule.roots)
    torch.testing.assert_close(curves.p[1:][starts], seen, atol=2e-5, rtol=0)


def test_cells_are_scored_in_parts(monkeypatch):
    """Each part counts its steps from where it begins: guidance ends after token 7, in the middle of one."""
    target, condition = TARGETS["text"]()
    head, codes = head_of(target), torch.arange(CELLS) % CODES
    whole = teacher_forced(target, head, condition, codes, Warp(1.0))
    monkeypatch.setattr("draftsmith.eval.studies.drawn_cells.AT_ONCE", 5)
    parts = teacher_forced(target, head, condition, codes, Warp(1.0))
    torch.testing.assert_close(parts.p, whole.p)
    torch.testing.assert_close(parts.q, whole.q)


def test_the_head_is_told_apart_from_its_target_and_guidance_matters():
    """A wrong place, step or row would show: neighbouring rows and the unguided ones differ by far more than the
    tolerance above."""
    target, condition = TARGETS["text"]()
    codes = torch.arange(CELLS) % CODES
    curves = teacher_forced(target, head_of(target), condition, codes, Warp(1.0))
    plain = LlamaGenTarget(target.model, Guidance(1.0))
    unguided = teacher_forced(plain, head_of(target), condition, codes, Warp(1.0))
    assert (curves.p[1:] - curves.p[:-1]).abs().amax(-1).min() > 1e-3
    assert (curves.p[1:] - curves.q).abs().amax(-1).min() > 1e-3
    # The interval of 6 guides tokens 0 to 7 and no later one.
    assert (curves.p - unguided.p).abs().amax(-1)[:8].min() > 1e-3
    torch.testing.assert_close(curves.p[8:], unguided.p[8:], atol=1e-5, rtol=0)
    torch.testing.assert_close(curves.q[7:], unguided.q[7:], atol=1e-5, rtol=0)


# ---- numbers


def distributions(count: int = 12, tokens: int = CODES, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(2, count, tokens, generator=generator)).softmax(-1)
    return p, q


def test_ranks_against_sorting():
    p, q = distributions()
    best = p.argmax(-1)
    expected = [sorted(row.tolist(), reverse=True).index(row[b].item()) + 1 for row, b in zip(q, best, strict=True)]
    assert ranks(q, best).tolist() == expected
    cut = Warp(1.0, top_k=3).truncate(q)
    assert ranks(cut, best).tolist() == [rank if rank <= 3 else CODES for rank in expected]


def test_masses_and_overlap_against_loops():
    p, q = distributions()
    for row in range(len(p)):
        a, b = p[row].tolist(), q[row].tolist()
        assert float(top_mass(p, 1)[row]) == pytest.approx(max(a))
        assert float(top_mass(p, 10)[row]) == pytest.approx(sum(sorted(a)[-10:]))
        assert float(overlap(p, q)[row]) == pytest.approx(sum(min(x, y) for x, y in zip(a, b, strict=True)))
    assert float(top_mass(p, 100)[0]) == pytest.approx(1.0)


def codebook() -> torch.Tensor:
    return torch.randn(CODES, 4, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize(("k", "delta"), [(1, 0.3), (5, 0.05), (5, 0.4), (CODES, 0.2), (CODES, 1.0)])
def test_relaxed_acceptance_against_the_definition(offset, k, delta):
    """Nearest codes join while what they lend stays below delta (LANTERN, section 4.3)."""
    p, _ = distributions(tokens=CODES + offset)
    drafts = torch.randint(offset, CODES + offset, (len(p),), generator=torch.Generator().manual_seed(6))
    table = load_neighbours(codebook(), CODES - 1, metric="l2", offset=offset)
    result = relaxed(LanternConfig(kind="lantern", k=k, delta=delta), table, p, drafts)
    rows = codebook()
    for row, token in enumerate(drafts.tolist()):
        order = (rows - rows[token - offset]).norm(dim=-1).argsort().tolist()
        lent, size = 0.0, 1
        for code in order[1:k]:
            if lent + float(p[row, code + offset]) >= delta:
                break
            lent, size = lent + float(p[row, code + offset]), size + 1
        accept = float(p[row, token]) + lent
        assert int(result.size[row]) == size
        assert float(result.mass[row]) == pytest.approx(accept, abs=1e-6)


def test_cost_of_a_bound():
    p, _ = distributions(count=70)
    drafts = p.argmax(-1)
    table = load_neighbours(codebook(), CODES - 1, metric="l2")
    config = LanternConfig(kind="lantern", k=10, delta=0.13, divergence="jsd")
    cost, result = bound_cost(config, table, p, drafts, repeats=3), relaxed(config, table, p, drafts)
    assert (cost.divergence, cost.delta) == ("jsd", 0.13) and cost.ms > 0
    assert cost.accept == pytest.approx(float(result.mass.mean()))
    assert cost.size == pytest.approx(float(result.size.double().mean()))


# ---- many pictures


def settings(**changes) -> AnalysisConfig:
    return AnalysisConfig.model_validate({"k": [2, 6], "delta": [0.1, 0.4], **changes})


def test_a_reading_is_the_numbers_of_its_pictures():
    target, condition = TARGETS["text"]()
    head, config, warp = head_of(target), settings(pictures=2), Warp(4.0)
    generator = torch.Generator().manual_seed(9)
    drawn = [(condition, torch.randint(CODES, (CELLS,), generator=generator)) for _ in range(3)]
    table = config.table(codebook())
    statistics = read_pictures(config, target, head, drawn, warp, table)
    assert statistics.top1.shape == (2, CELLS) and statistics.accept.shape == (2, 2, 2, CELLS - 1)
    for picture in range(2):
        curves = teacher_forced(target, head, *drawn[picture], warp)
        p, q, drafts = curves.p[1:], curves.q, curves.q.argmax(-1)
        assert statistics.rank_best[picture].tolist() == ranks(q, p.argmax(-1)).tolist()
        assert statistics.rank_drawn[picture].tolist() == ranks(q, drawn[picture][1][1:]).tolist()
        assert torch.equal(statistics.overlap[picture], overlap(p, q))
        exact = relaxed(LanternConfig(kind="lantern", k=1, delta=0.0), table, p, drafts)
        torch.testing.assert_close(statistics.exact[picture], exact.mass)
        for i, k in enumerate(config.k):
            for j, delta in enumerate(config.delta):
                expected = relaxed(LanternConfig(kind="lantern", k=k, delta=delta), table, p, drafts)
                assert torch.equal(statistics.accept[picture, i, j], expected.mass)
                assert torch.equal(statistics.size[picture, i, j], expected.size)
    first, arrays = teacher_forced(target, head, *drawn[0], warp), statistics.arrays()
    flat, sharp = arrays["cells"].tolist()
    assert (flat, sharp) == (int(first.p.amax(-1).argmin()), int(first.p.amax(-1).argmax()))
    assert torch.equal(arrays["p"], first.p[[flat, sharp]]) and arrays["size"].shape == (2, 2, CELLS - 1)
    assert torch.equal(arrays["q"][1], first.q[sharp - 1] if sharp else torch.zeros(CODES))
    summary = statistics.summary()
    assert summary["pictures"] == 2
    assert summary["head_top1"] == pytest.approx(float((statistics.rank_best == 1).double().mean()))
    assert summary["head_top3"] >= summary["head_top1"]
    gains = torch.tensor(summary["first_draft_lantern"])
    assert (gains.diff(dim=0) >= 0).all() and (gains.diff(dim=1) >= 0).all()  # more k and more delta accept more
    assert float(gains.min()) >= summary["first_draft_exact"]
    assert [b["divergence"] for b in summary["bounds"]] == ["tvd", "jsd", "tvd", "jsd"]


def test_the_heads_own_pictures_are_those_of_its_training(tmp_path):
    """As the head's stage divides them: what it was trained on, and what was held out."""
    claim(tmp_path, {})
    rows = [(f"{n:09d}", {"codes": torch.full((CELLS,), n, dtype=torch.int32)}, {"label": n % 5}) for n in range(40)]
    write_shard(tmp_path, 0, rows, {})
    finish(tmp_path, {}, num_shards=1)

    def numbers(**changes) -> dict[str, list[int]]:
        config = settings(head_data={"path": str(tmp_path), **changes}, pictures=30)
        result = encoded_pictures(config, tmp_path, lambda sample: torch.tensor(sample.info["label"]))
        assert all(int(label) == int(codes[0]) % 5 for asked in result.values() for label, codes in asked)
        return {name: [int(codes[0]) for _, codes in asked] for name, asked in result.items()}

    held_out = ShardSamples(tmp_path, ShardData(held_out=0.3), held_out=True).indices.tolist()
    rest = [n for n in range(40) if n not in held_out]
    assert 3 < len(held_out) < 25
    assert numbers(held_out=0.3) == {"training pictures": rest[:30], "held-out pictures": held_out}
    assert numbers() == {"training pictures": list(range(30))}
    drawn = encoded_pictures(settings(head_data={"path": str(tmp_path)}), tmp_path, lambda sample: torch.tensor(1))
    target, _ = TARGETS["class"]()
    statistics = read_pictures(
        settings(pictures=2), target, head_of(target), drawn["training pictures"], Warp(0.0),
        settings().table(codebook()),
    )  # fmt: skip
    assert len(statistics.top1) == 2


def test_weights_did_not_move_and_want_no_gradient():
    target, condition = TARGETS["class"]()
    head = head_of(target)
    before = {n: w.clone() for n, w in (*target.model.named_parameters(), *head.named_parameters())}
    curves = teacher_forced(target, head, condition, torch.zeros(CELLS, dtype=torch.int64), Warp(1.0))
    assert isinstance(curves, Curves) and not curves.p.requires_grad and not curves.q.requires_grad
    assert all(torch.equal(before[n], w) for n, w in (*target.model.named_parameters(), *head.named_parameters()))
