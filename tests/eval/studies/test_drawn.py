"""What is read from finished pictures is what decoding saw; numbers and maps against brute force."""

import math

import pytest
import torch
import visual_tiny as generators
from draftsmith.core.batch import ImageRequest
from draftsmith.core.errors import UserError
from draftsmith.data.shards.codes import ShardData, ShardSamples
from draftsmith.data.shards.shards import claim, finish, write_shard
from draftsmith.eval.generation_rows import measure
from draftsmith.eval.lantern import LanternConfig
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.eval.policies import Draw, DynamicTree
from draftsmith.eval.rules import RULES
from draftsmith.eval.studies.drawn import AnalysisConfig, encoded_pictures, read_pictures
from draftsmith.eval.studies.drawn.distributions import Curves, overlap, ranks, teacher_forced, top_mass
from draftsmith.eval.studies.drawn.maps import cell_map, depth_map, length_map, mean_map
from draftsmith.eval.studies.drawn.relaxation import Relaxed, bound_cost, relaxed
from draftsmith.eval.studies.drawn.report_section import accepted_shares, drawn_section
from draftsmith.eval.summary import summarize
from draftsmith.eval.tables import Figure, Table
from draftsmith.models.decoding.neighbours import load_neighbours
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Distributions, Warp
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.targets.llamagen.target import LlamaGenTarget

from ..rows import a_row

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
    torch.testing.assert_close(curves.drafted, seen, atol=2e-5, rtol=0)
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
    torch.testing.assert_close(curves.drafted[starts], seen, atol=2e-5, rtol=0)


def test_cells_are_scored_in_parts(monkeypatch):
    """Each part counts its steps from where it begins: guidance ends after token 7, in the middle of one."""
    target, condition = TARGETS["text"]()
    head, codes = head_of(target), torch.arange(CELLS) % CODES
    whole = teacher_forced(target, head, condition, codes, Warp(1.0))
    monkeypatch.setattr("draftsmith.eval.studies.drawn.distributions.AT_ONCE", 5)
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
    assert (curves.drafted - curves.q).abs().amax(-1).min() > 1e-3
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
    p, q = distributions(tokens=CODES + offset)
    drafts = torch.randint(offset, CODES + offset, (len(p),), generator=torch.Generator().manual_seed(6))
    table = load_neighbours(codebook(), CODES - 1, metric="l2", offset=offset)
    result = relaxed(LanternConfig(kind="lantern", k=k, delta=delta), table, p, drafts)
    over_q = relaxed(LanternConfig(kind="lantern", k=k, delta=delta), table, p, drafts, q)
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
        assert float(result.accept[row]) == pytest.approx(accept, abs=1e-6)
        assert float(over_q.accept[row]) == pytest.approx(min(1.0, accept / float(q[row, token])), abs=1e-5)


def test_cost_of_a_bound():
    p, _ = distributions(count=70)
    drafts = p.argmax(-1)
    table = load_neighbours(codebook(), CODES - 1, metric="l2")
    config = LanternConfig(kind="lantern", k=10, delta=0.13, divergence="jsd")
    cost, result = bound_cost(config, table, p, drafts, repeats=3), relaxed(config, table, p, drafts)
    assert (cost.divergence, cost.delta) == ("jsd", 0.13) and cost.ms > 0
    assert cost.accept == pytest.approx(float(result.accept.mean()))
    assert cost.size == pytest.approx(float(result.size.double().mean()))


# ---- many pictures


def settings(**changes) -> AnalysisConfig:
    return AnalysisConfig.model_validate({"k": [2, 6], "delta": [0.1, 0.4], **changes})


@pytest.mark.parametrize("first_draft", ["best", "sampled"])
def test_a_reading_is_the_numbers_of_its_pictures(first_draft):
    target, condition = TARGETS["text"]()
    # Flat distributions: some sampled drafts have less from the head than from the target.
    head, config, warp = head_of(target), settings(pictures=2, first_draft=first_draft), Warp(4.0)
    generator = torch.Generator().manual_seed(9)
    drawn = [(condition, torch.randint(CODES, (CELLS,), generator=generator)) for _ in range(3)]
    table = config.table(codebook())
    statistics = read_pictures(config, target, head, drawn, warp, table, seed=0)
    assert statistics.top1.shape == (2, CELLS) and statistics.accept.shape == (2, 2, 2, CELLS - 1)
    draws = torch.Generator().manual_seed(0)
    for picture in range(2):
        curves = teacher_forced(target, head, *drawn[picture], warp)
        p, q = curves.drafted, curves.q
        sampled = first_draft == "sampled"
        drafts = torch.multinomial(q, 1, generator=draws)[:, 0] if sampled else q.argmax(-1)
        rank = ranks(q, p.argmax(-1))
        assert statistics.rank_best[picture].tolist() == rank.tolist()
        assert statistics.rank_drawn[picture].tolist() == ranks(q, drawn[picture][1][1:]).tolist()
        assert torch.equal(statistics.overlap[picture], overlap(p, q))
        assert not sampled or bool((p > q).gather(-1, drafts[:, None]).any())
        exact = relaxed(LanternConfig(kind="lantern", k=1, delta=0.0), table, p, drafts, q if sampled else None)
        torch.testing.assert_close(statistics.exact[picture], exact.accept)
        for i, k in enumerate(config.k):
            for j, delta in enumerate(config.delta):
                lantern = LanternConfig(kind="lantern", k=k, delta=delta)
                expected = relaxed(lantern, table, p, drafts, q if sampled else None)
                actual = Relaxed(statistics.accept[picture, i, j], statistics.size[picture, i, j])
                assert torch.equal(actual.accept, expected.accept) and torch.equal(actual.size, expected.size)
        if picture == 0:
            assert torch.equal(statistics.first.p, curves.p) and torch.equal(statistics.first.q, q)
    summary = statistics.summary()
    assert summary["pictures"] == 2
    assert summary["accuracy_top1"] == pytest.approx(float((statistics.rank_best == 1).double().mean()))
    assert summary["accuracy_top3"] >= summary["accuracy_top1"]
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
        settings().table(codebook()), seed=0,
    )  # fmt: skip
    assert len(statistics.top1) == 2


def test_weights_did_not_move_and_want_no_gradient():
    target, condition = TARGETS["class"]()
    head = head_of(target)
    before = {n: w.clone() for n, w in (*target.model.named_parameters(), *head.named_parameters())}
    curves = teacher_forced(target, head, condition, torch.zeros(CELLS, dtype=torch.int64), Warp(1.0))
    assert isinstance(curves, Curves) and not curves.p.requires_grad and not curves.q.requires_grad
    assert all(torch.equal(before[n], w) for n, w in (*target.model.named_parameters(), *head.named_parameters()))


def test_true_stands_for_the_defaults_and_a_small_codebook_is_told():
    assert AnalysisConfig.model_validate(True) == AnalysisConfig()
    with pytest.raises(UserError, match=r"k is 1000, in a codebook of 24"):
        AnalysisConfig().table(codebook())
    for wrong in ({"k": [0]}, {"delta": [1.5]}, {"delta": []}, {"equal_bounds": [[2.0, 0.1]]}, {"depth": 3}):
        with pytest.raises(ValueError):  # noqa: PT011
            AnalysisConfig.model_validate(wrong)


def test_cells_to_show_are_named_or_the_extremes():
    top1 = torch.tensor([0.5, 0.1, 0.9, 0.3])
    assert settings().cells_of(top1, 2) == [1, 2]
    named = settings(cells=[[1, 1], [2, 1]])
    assert named.cells_of(top1, 2) == [0, 2]
    named.check(24, grid=2)
    with pytest.raises(UserError, match=r"cell \(2, 1\), and pictures have 1 rows"):
        named.check(24, grid=1)
    for wrong in ([], [[0, 1]], [[1, 1]] * 4):
        with pytest.raises(ValueError):  # noqa: PT011
            settings(cells=wrong)


# ---- maps and rows


def test_depths_and_lengths_cell_by_cell():
    accepted, grid = [0, 3, 1, 0, 2, 3], 4  # 1 + 1 + 4 + 2 + 1 + 3 + 4 tokens
    assert depth_map(accepted, grid).flatten().tolist() == [0, 0, 1, 2, 3, 0, 1, 0, 0, 1, 2, 0, 1, 2, 3, 0]
    lengths = length_map(accepted, grid).flatten().tolist()
    assert math.isnan(lengths[0]) and lengths[1:] == [1, 4, 4, 4, 4, 2, 2, 1, 3, 3, 3, 4, 4, 4, 4]
    with pytest.raises(AssertionError, match="17 tokens"):
        depth_map([*accepted, 0], grid)


def test_maps_of_a_decoded_picture():
    """A token's depth is the place of its node: what the cycle kept, counted as it was emitted."""
    target, condition = TARGETS["text"]()
    result, _ = decode(target, condition, Warp(0.0), EAGLE.drafter(head_of(target), target))
    accepted = [c.num_accepted for c in result.cycles]
    depths = [0]
    for cycle in result.cycles:
        assert cycle.num_emitted == cycle.num_accepted + 1  # the last places never overrun
        depths += [depth + 1 if depth < cycle.num_accepted else 0 for depth in range(cycle.num_emitted)]
    assert depth_map(accepted, GRID).flatten().tolist() == depths
    assert float(length_map(accepted, GRID).nanmean()) >= 1


def test_cells_and_means_leave_what_is_missing_out():
    whole = cell_map(torch.arange(9), 3)
    assert whole.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    part = cell_map(torch.arange(8).float(), 3)
    assert part[0, 0].isnan() and part.flatten()[1:].tolist() == list(range(8))
    assert mean_map([whole, part]).flatten().tolist() == [0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]


def test_histogram_counts_cycles_with_the_bonus_token():
    rows = [a_row(accepted=(0, 0, 2)), a_row(request="r1", accepted=(0,))]
    assert accepted_shares(summarize(rows)) == [0.75, 0.0, 0.25]


def test_the_section_has_every_figure_of_the_methods(tmp_path):
    """Two methods on two pictures, decoded; the figures are those that the section names."""
    target, condition = TARGETS["text"]()
    warp, rows, drawn = Warp(1.0), [], []
    for seed in range(2):
        plain, _ = decode(target, condition, warp, seed=seed)
        drawn.append((condition, target.codes(plain.tokens)))
        for name, width in (("narrow", 1), ("wide", 4)):
            policy = DynamicTree(kind="dynamic", total=10, depth=2, width=width).build()
            decoding = Decoding(policy, RULES["sampling"], Draw("top-k"), warp, CELLS, ())
            drafter, generator = EAGLE.drafter(head_of(target), target), torch.Generator().manual_seed(seed)
            drafted = generate(target, drafter, ImageRequest(condition, name=f"r{seed}"), decoding, generator)
            rows.append(measure([plain], [drafted], benchmark="captions", method=name, request=f"r{seed}",
                                temperature=1.0, max_new_tokens=CELLS, medium="drawn"))  # fmt: skip
    config = settings()
    statistics = read_pictures(config, target, head_of(target), drawn, warp, config.table(codebook()), seed=0)
    pictures = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    shown = {1.0: {name: pictures for name in (PLAIN, "narrow", "wide")}}
    rules = {name: LanternConfig(kind="lantern", k=k, delta=0.1) for name, k in (("narrow", 2), ("wide", 4))}
    quality = {1.0: {name: {"fid": {"value": 9.0 + n}} for n, name in enumerate((PLAIN, "narrow", "wide"))}}
    # The first picture has a flat and a textured region, the second one texture alone.
    contrast = torch.tensor([[1.0] * 8 + [20.0] * 8, [20.0] * 16])
    section = drawn_section(
        tmp_path, config, {1.0: statistics}, rows, shown, ["a", "b"], rules=rules, quality=quality, encoded={},
        contrast={1.0: dict.fromkeys(shown[1.0], contrast)},
    )  # fmt: skip
    figures = [part.path for part in section.content if isinstance(part, Figure)]
    assert len(figures) == 14 and all((tmp_path / path).stat().st_size > 3000 for path in figures)
    assert section.name == "analysis" and section.data["1"]["pictures"] == 2
    assert [part.title for part in section.content if isinstance(part, Table)] == [
        "How well the head predicts the target", "Bounds of LANTERN",
        "How sure the target is in flat, textured and edge cells",
        "Pictures with a flat and a textured region",
    ]  # fmt: skip
    assert section.data["1"]["places"]["flat"]["share"] == 0.25
