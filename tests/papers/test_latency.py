"""Latency: the published shapes, what each measurement runs, and the script from end to end at tiny size."""

import json
import sys
import weakref
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.eval.tables import markdown
from draftsmith.models.parts import num_parameters
from draftsmith.models.targets.llava.decoder import LlavaDecoder
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.scripts.papers import latency, latency_figures
from draftsmith.scripts.papers.latency import (
    Measured,
    Passes,
    caption_times,
    grid_times,
    stage_times,
    step_times,
    variation,
)
from draftsmith.scripts.papers.latency_models import (
    CAPTIONERS,
    Shape,
    draft_config,
    random_model,
    target_config,
)
from draftsmith.scripts.papers.latency_report import captions_table, remarks_table, stages_table, steps_table
from PIL import Image
from transformers import LlavaForConditionalGeneration

TINY = Shape(narrower=64, smaller_sides=6, most_layers=2)
CPU = {"dtype": torch.float32, "device": torch.device("cpu"), "seed": 0}


@pytest.fixture(scope="module")
def config():
    return target_config("llava-1.5-7b-hf", TINY)


@pytest.fixture
def target(config):
    model = random_model(lambda: LlavaForConditionalGeneration(config), **CPU)
    return LlavaTarget(model, num_token_ids=config.image_token_index, image_token_id=config.image_token_index)


@pytest.fixture
def draft(config):
    full = draft_config("llama-68m", config, TINY)
    model = random_model(lambda: LlavaForConditionalGeneration(full), **CPU)
    return LlavaDecoder(model, num_token_ids=config.image_token_index)


class Calls:
    """What a module was called with: new positions of each row, and how far its positions reach."""

    def __init__(self, module):
        self.seen = []
        module.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        embeds, positions = kwargs["inputs_embeds"], kwargs["position_ids"]
        self.seen.append((embeds.shape[0], embeds.shape[1], int(positions.min())))


# Shapes and weights


def test_the_published_shapes_have_the_published_sizes():
    """Parameter counts; models on the meta device take no memory."""
    published = Shape()
    target = target_config("llava-1.5-7b-hf", published)
    with torch.device("meta"):
        assert num_parameters([LlavaForConditionalGeneration(target)]) == 7_063_427_072
        draft = LlavaForConditionalGeneration(draft_config("llama-68m", target, published))
        assert num_parameters([draft.model.language_model, draft.lm_head]) == 68_128_512
        counts = {"BLIP": 223_971_644, "BLIP-2": 3_744_761_856, "Florence-2": 770_174_976}
        for name, captioner in CAPTIONERS.items():
            assert num_parameters([captioner.build(published)]) == counts[name]


def test_smaller_shapes_keep_their_layers_unless_told():
    small = target_config("llava-1.5-13b-hf", Shape(narrower=16, smaller_sides=3))
    text = small.text_config
    assert (text.num_hidden_layers, text.hidden_size, text.vocab_size) == (40, 320, 2004)
    assert text.hidden_size % text.num_attention_heads == 0 and small.image_seq_length == 64
    assert target_config("llava-1.5-13b-hf", TINY).text_config.num_hidden_layers == 2


def test_random_weights_are_tied_and_reproducible(config):
    """A tie that fell apart would change what is timed without an error."""
    built = [random_model(lambda: LlavaForConditionalGeneration(config), **CPU) for _ in range(2)]
    assert not any(parameter.requires_grad for parameter in built[0].parameters())
    for first, second in zip(built[0].parameters(), built[1].parameters(), strict=True):
        assert torch.equal(first, second)
    assert built[0].lm_head.weight.std() == pytest.approx(0.02, rel=0.1)
    tied = random_model(lambda: CAPTIONERS["BLIP-2"].build(TINY), **CPU)
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_weights_take_the_dtype_that_is_asked_for(config):
    model = random_model(lambda: LlavaForConditionalGeneration(config), **CPU | {"dtype": torch.bfloat16})
    assert torch.get_default_dtype() == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.language_model.rotary_emb.inv_freq.dtype == torch.float32


# What is timed


def test_a_pass_stands_behind_s_random_positions_and_leaves_them(target):
    calls = Calls(target.decoder.language_model)  # before a cache is made, with which a model is looked at
    passes = Passes(target.decoder, 3, 40, burst=2)
    calls.seen.clear()
    before = passes.cache.layers[1].keys[:, :, :32].clone()
    passes.run(32, 5)
    passes.run(32, 5)
    assert calls.seen == [(3, 5, 32)] * 4  # a burst of 2, twice: S does not grow
    assert before.std() > 0.5 and torch.equal(passes.cache.layers[1].keys[:, :, :32], before)


def test_the_grid_has_every_point(target):
    calls = Calls(target.decoder.language_model)
    measured = grid_times(
        "7B", target.decoder, rows=(1, 2), lengths=(8, 16), gammas=(1, 3), burst=2, num_rounds=2
    )  # fmt: skip
    points = [(b, s, gamma) for b in (1, 2) for s in (8, 16) for gamma in (1, 3)]
    assert [tuple(m.at.values()) for m in measured] == points
    assert all(len(m.seconds) == 2 and min(m.seconds) > 0 for m in measured)
    assert sorted(c for c in calls.seen if c[2]) == sorted((b, gamma, s) for b, s, gamma in points for _ in range(6))


def test_steps_are_told_per_token(monkeypatch, target, draft):
    ran = []

    def rounds(actions, count):
        for name, action in actions.items():
            for _ in range(count + 1):
                action()
            ran.append(name)
        return {name: [1.0] * count for name in actions}

    monkeypatch.setattr(latency, "rounds", rounds)
    calls = Calls(draft.language_model)
    measured = step_times(("7B", target), {"68M": draft}, length=12, gamma=4, graphs=True, burst=5, num_rounds=2)
    assert ran == ["7B", "68M", "68M, graph"]
    assert [m.seconds for m in measured] == [[1 / 5] * 2, [1 / 5] * 2, [1 / 4] * 2]
    assert {m.at["target"] for m in measured} == {"7B"}
    steps = [c for c in calls.seen if c[1] == 1 and c[2]]
    assert steps[:15] == [(1, 1, 12)] * 15 and len(steps) == 15 + 3 * 4  # bursts, then chains of 4


def test_stages_are_apart(target, config):
    """The tower runs in its own stage alone, and each decoding starts where the prompt ends."""
    towers = []
    target.decoder.core.vision_tower.register_forward_hook(lambda module, args, output: towers.append(args[0].shape[0]))
    calls = Calls(target.decoder.language_model)
    measured = stage_times(target, images=(1, 2), num_text=3, num_tokens=4, num_rounds=2)
    names = ["vision encoder", "prefill", "decoding"]
    assert [(m.what, m.at["images"]) for m in measured] == [(name, n) for n in (1, 2) for name in names]
    assert sorted(towers) == [1, 1, 1, 2, 2, 2]
    for images in (1, 2):
        length = images * config.image_seq_length + 3
        assert calls.seen.count((1, length, 0)) == 1 + 3  # the session's, and three rounds with the warm-up
        for place in range(4):
            assert calls.seen.count((1, 1, length + place)) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CAPTIONERS)
def test_captions_have_their_length_in_one_batch(name, dtype):
    captioner = CAPTIONERS[name]
    model = random_model(lambda: captioner.build(TINY), **CPU | {"dtype": dtype})
    of = captioner.captioning(model, TINY, 4)
    shorter, longer = of(2)(), captioner.captioning(model, TINY, 7)(2)()
    assert shorter.shape[0] == 2 and longer.shape[1] - shorter.shape[1] == 3
    assert torch.isfinite(next(model.parameters())).all()


def test_the_prefill_beside_captioners_sees_the_pictures(target):
    towers, captioned = [], []
    target.decoder.core.vision_tower.register_forward_hook(lambda module, args, output: towers.append(args[0].shape[0]))
    captioners = {"words": lambda count: lambda: captioned.append(count)}
    measured = caption_times(target, captioners, images=(1, 3), num_text=2, num_rounds=1)
    assert sorted(towers) == sorted(captioned) == [1, 1, 3, 3]
    assert [(m.what, m.at["images"]) for m in measured] == [("prefill", 1), ("words", 1), ("prefill", 3), ("words", 3)]


# What is told


def grid(seconds):
    points = [(b, s, gamma) for b in (1, 2) for s in (8, 16) for gamma in (1, 3)]
    return [Measured("7B", {"B": b, "S": s, "gamma": g}, [seconds(b, s, g)] * 3) for b, s, g in points]


def test_variation_is_of_one_parameter():
    measured = grid(lambda b, s, gamma: b * (1 + 0.01 * gamma))
    assert set(variation(measured, "S").values()) == {0.0}
    assert variation(measured, "B") == pytest.approx({key: 1.0 for key in [(8, 1), (8, 3), (16, 1), (16, 3)]})
    assert max(variation(measured, "gamma").values()) == pytest.approx(0.02 / 1.01)
    line = markdown(remarks_table(measured, measured))[2]
    assert line.startswith("| 1 | 7B | gamma 1, 3 | B 1, 2; S 8, 16 | 2% to 2%")


def steps():
    """T_q / T_p is 0.1 in each round, though neither time stays."""
    return [
        Measured("7B", {"target": "7B", "S": 9}, [1.0, 3.0, 2.0]),
        Measured("68M", {"target": "7B", "S": 9}, [0.1, 0.3, 0.2]),
        Measured("13B", {"target": "13B", "S": 9}, [2.0, 2.0, 2.0]),
        Measured("68M", {"target": "13B", "S": 9}, [0.1, 0.1, 0.1]),
    ]


def test_tabeds_own_numbers_stand_beside_ours():
    """Table 6 (T_q/T_p) and table 4 (seconds of captioners and of the prefill beside them)."""
    pairs = [(draft, target) for target in ("7B", "13B") for draft in ("68M", "160M")]
    measured = [Measured(name, {"target": target, "S": 9}, [1.0])
                for target in ("7B", "13B") for name in (target, "68M", "160M")]  # fmt: skip
    table = steps_table(measured, 5, full=True)
    assert [row[1::-1] for row in table.rows] == pairs
    assert table.column("TABED, A6000") == [0.063, 0.206, 0.042, 0.137]
    named = [Measured(name, {"images": n}, [0.1]) for n in (1, 2, 5) for name in ("prefill", "BLIP", "Florence-2")]
    printed = {1: [112, 54, 105], 2: [207, 55, 149], 5: [540, 74, 292]}
    for n, values in printed.items():
        (found,) = (c.heading for c in captions_table(named, full=True).columns if c.heading.startswith(f"{n} image")
                    and "TABED" in c.heading)  # fmt: skip
        assert captions_table(named, full=True).column(found) == values


def test_table_6_divides_neighbours():
    told = markdown(steps_table(steps(), 5, full=True))
    assert "| 0.100 [0.100, 0.100] | 0.063 | 1.50 [1.50, 1.50] |" in told[2]
    assert told[3].startswith("| 13B | 68M |") and "| 0.050 [0.050, 0.050] | 0.042 | 1.25" in told[3]
    assert steps_table(steps(), 5, full=False).column("TABED, A6000") == [None, None]


STAGES = [
    Measured(name, {"images": images}, [seconds] * 2)
    for images in (1, 5)
    for name, seconds in (("vision encoder", 0.1 * images), ("prefill", 0.2 * images), ("decoding", 2.7))
]
CAPTIONS = [
    Measured(name, {"images": images}, [seconds, 2 * seconds])
    for images in (1, 2, 5)
    for name, seconds in (("prefill", 0.1 * images), ("BLIP", 0.05), ("BLIP-2", 0.3))
]


def test_stages_and_captions_as_tables():
    first, second = markdown(stages_table(STAGES))[2:4]
    assert first.startswith("| 1 | 100.0 [100.0, 100.0] |") and first.endswith("| 90% [90, 90] |")
    assert second.endswith("| 64% [64, 64] |")
    table = captions_table(CAPTIONS, full=True)
    prefill, blip, blip_2 = table.rows
    assert table.column("5 images, TABED's ms") == [540, 74, None] and prefill[2] is None
    assert blip[2] == pytest.approx((0.5, 0.5, 0.5)) and blip[3] == 54 and blip_2[3] is None
    assert "| BLIP | 75.0 [62.5, 87.5] | 0.50 [0.50, 0.50] | 54 |" in markdown(table)[3]
    assert not any("TABED" in column.heading for column in captions_table(CAPTIONS, full=False).columns)


def test_figures_show_something(tmp_path):
    single = [m for m in grid(lambda b, s, gamma: 0.01 * gamma + 0.001 * s) if m.at["B"] == 1]
    latency_figures.by_length(tmp_path / "grid.png", single, lines_of="gamma")
    latency_figures.stages(tmp_path / "stages.png", STAGES)
    latency_figures.captioners(tmp_path / "captioners.png", CAPTIONS)
    for path in tmp_path.iterdir():
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert 0.02 < (pixels.min(-1) < 250).mean() < 0.95, path.name


@pytest.mark.parametrize("over", ["B", "gamma"])
def test_a_line_for_each_value_over_the_length(monkeypatch, over):
    """Figure 5 has a line for each B, figure 6 one for each gamma: medians in ms over S."""
    other, kept = {"B": "gamma", "gamma": "B"}[over], []
    monkeypatch.setattr(latency_figures, "save", lambda figure, path: kept.append(figure))
    some = [m for m in grid(lambda b, s, gamma: 0.1 * b + 0.01 * gamma + 0.001 * s) if m.at[other] == 1]
    latency_figures.by_length(Path("unwritten.png"), some, lines_of=over)
    found = {tuple(line.get_ydata()) for line in kept[0].axes[0].lines}
    expected = {tuple(1e3 * m.median for m in some if m.at[over] == value) for value in {m.at[over] for m in some}}
    assert found == expected and len(found) == 2
    assert all(list(line.get_xdata()) == [8, 16] for line in kept[0].axes[0].lines)


# The script


@pytest.fixture
def script(monkeypatch):
    name = "measure_latency"
    loader = SourceFileLoader(name, str(Path(__file__).parents[2] / "scripts" / "papers" / f"{name}.py"))
    module = module_from_spec(spec_from_loader(name, loader))
    loader.exec_module(module)
    monkeypatch.setitem(module.SIZES, "small", module.Sizes(TINY, num_text=4, lengths=(8, 12, 16)))
    quick = {"rows": (1, 2), "gammas": (1, 3), "images": (1, 2), "num_tokens": 3, "burst": 2}
    monkeypatch.setattr(module, "QUICK", quick | {"num_caption_tokens": 2})
    return module


def run(script, monkeypatch, folder):
    arguments = ["--sizes", "small", "--dtype", "float32", "--quick", "--output", str(folder)]
    monkeypatch.setattr(sys, "argv", ["scripts/papers/measure_latency", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script.main()
    return (folder / "latency.md").read_text(), json.loads((folder / "latency.json").read_text())


def test_the_full_sizes_are_the_papers(script):
    """Tables 4 and 6, figures 5, 6 and 9: what is timed on a GPU."""
    full = script.SIZES["full"]
    assert (full.rows, full.gammas, full.images, script.GAMMA) == ((1, 2, 3, 4), (1, 3, 5, 7), (1, 2, 5), 5)
    assert max(full.lengths) == 3072 and ({*script.TARGETS}, {*script.DRAFTS}) == ({"7B", "13B"}, {"68M", "160M"})


def test_the_script_writes_everything(script, monkeypatch, tmp_path, capsys):
    targets, alive, make = [], [], script.Run.target

    def watched(self, name, config):
        alive.append([ref() for ref in targets if ref() is not None])
        target = make(self, name, config)
        targets.append(weakref.ref(target.decoder.model))
        return target

    monkeypatch.setattr(script.Run, "target", watched)
    text, record = run(script, monkeypatch, tmp_path / "new")
    assert alive == [[], []]  # the first target is gone before the second is made: together they may not fit
    assert text in capsys.readouterr().out
    for what in ("Table 6", "Figs. 5 and 6", "Fig. 9", "Table 4", "seed 0", "float32", "over 3 rounds", "7B/64"):
        assert what in text, what
    assert "Left out" not in text and "TABED 54" not in text  # the models are not the published ones
    sizes = {section: len(measured) for section, measured in record["measured"].items()}
    assert sizes == {"steps": 6, "draft": 4, "target": 8, "stages": 6, "captions": 8}
    assert all(len(m["seconds"]) == 3 for measured in record["measured"].values() for m in measured)
    assert {p.name for p in (tmp_path / "new").glob("*.png")} == {
        "draft-step.png", "verification.png", "stages.png", "captioners.png",
    }  # fmt: skip


def test_what_does_not_fit_is_left_out_and_named(script, monkeypatch, tmp_path):
    """The drafts fit, the targets do not: what needs no target is measured all the same."""
    made = []
    fits = script.Run.fits

    def counting(self, name, need):
        made.append(name)
        monkeypatch.setattr(script, "free_bytes", lambda device: 2**40 if name.endswith("M/64") else 2**20)
        return fits(self, name, need)

    monkeypatch.setattr(script.Run, "fits", counting)
    text, record = run(script, monkeypatch, tmp_path)
    assert made == ["68M/64", "160M/64", "7B/64", "13B/64"]
    assert len(record["left_out"]) == 2 and record["left_out"][0].startswith("7B/64 (needs ")
    assert "Left out for want of memory: 7B/64" in text and "Table 6" not in text
    assert record["measured"]["draft"] and not record["measured"]["steps"]
