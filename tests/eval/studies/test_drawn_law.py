"""The law of drawn codes: exact draws are uniform after the transform however flat p is, and a relaxed rule is seen."""

import functools

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.lantern import LanternConfig
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.measured_rows import PLAIN
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Codes, Sampling
from draftsmith.eval.studies.drawn_law import FIGURE, DrawnLaw, law_section, read_law, transformed
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.jacobi import JacobiConfig
from draftsmith.recipes.config.load import load
from fails import fails_with
from visual_tiny import llamagen, target

WARP = Warp(1.0)


def test_the_transform_by_hand():
    p = torch.tensor([[0.5, 0.2, 0.3]]).expand(3, -1)
    u = transformed(p, torch.tensor([0, 1, 2]), torch.Generator().manual_seed(0))
    share = torch.rand(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(u, torch.tensor([0.0, 0.8, 0.5]) + share * torch.tensor([0.5, 0.2, 0.3]), atol=1e-6,
                               rtol=0, check_dtype=False)  # fmt: skip
    same = transformed(torch.full((4, 4), 0.25), torch.arange(4), torch.Generator().manual_seed(0))
    assert same.mul(4).long().tolist() == [0, 1, 2, 3], "equally likely ids in their order"


@pytest.mark.parametrize("loud", [0.05, 1.0, 4.0], ids=["flat", "usual", "sure"])
def test_draws_are_uniform_and_sharper_ones_are_not(loud):
    generator = torch.Generator().manual_seed(3)
    p = (loud * torch.randn(4000, 12, generator=generator)).softmax(-1)

    def law(q):
        return DrawnLaw(transformed(p, torch.multinomial(q, 1, generator=generator)[:, 0], generator), p)

    assert law(p).chance > 0.01
    assert law((p * (p > p.min(-1, keepdim=True).values)).pow(1.3)).chance < 1e-4 or loud > 1


@functools.cache
def drawn(kind: str) -> DrawnLaw:
    """90 pictures of 16 codes by a tiny LlamaGen."""
    model = llamagen(loud=0.5)
    generator_of_pictures = target(model, 2.0)
    rule, drafter, draw = Sampling(), None, Draw("top-k")
    if kind != "plain":
        config = JacobiConfig(kind="jacobi", coupling="maximal" if kind == "maximal" else "gumbel")
        drafter, draw = config.drafter(None, generator_of_pictures), Draw("sample")
    if kind == "lantern":
        relaxed = LanternConfig(kind="lantern", k=12, delta=0.6)
        codebook = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        rule = relaxed.build_for_codes(1.0, Codes(codebook, 0, 0, None))
    decoding, uniforms = Decoding(Chain(6), rule, draw, WARP, 16, ()), torch.Generator().manual_seed(2)
    pictures = []
    for number in range(90):
        asked = ImageRequest(torch.tensor(number % 5))
        tokens = generate(generator_of_pictures, drafter, asked, decoding, uniforms).tokens
        pictures.append((asked.condition, torch.tensor(tokens)))
    return read_law(generator_of_pictures, pictures, WARP, 0)


def test_lossless_rules_pass_and_lantern_fails():
    for kind in ("plain", "maximal", "gumbel"):
        assert drawn(kind).chance > 0.01, kind
    assert drawn("lantern").chance < 1e-6


def test_the_report_has_a_line_for_each_method_and_the_figure(tmp_path):
    section = law_section({1.0: {PLAIN: drawn("plain"), "LANTERN": drawn("lantern")}}, PLAIN, 4, tmp_path)
    table, figure = section.content
    assert [row[:3] for row in table.rows] == [(1.0, PLAIN, 1440), (1.0, "LANTERN", 1440)]
    assert (tmp_path / FIGURE).is_file() and figure.path == FIGURE
    data = section.data["1"]
    assert data["chance"]["LANTERN"] < 1e-6 and len(data["entropy_by_place"]) == 16
    assert data["entropy_by_place"] == drawn("plain").entropy.mean(0).tolist()


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("demo/visual-ar", ["stages.evaluate.probes.law=true", "stages.evaluate.temperatures=[0.0]"], "probes.law"),
        ("demo/lvlm", ["stages.evaluate.probes.law=true"], "probes.law"),
        ("drawings/generator", ["stages.gates.probes={law: true}"], "probes.law"),
    ],
)
def test_it_is_refused_where_it_would_read_nothing(recipe, words, said):
    fails_with(said, load, [f"recipe={recipe}", *words])
