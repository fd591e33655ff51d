"""Drawing with near codes, patches of codes, tables of a sweep; and both scripts on a tiny image generator."""

import hashlib
import json
import shutil
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from draftsmith.data.captioned.prompts import PromptSource, read_prompts
from draftsmith.eval.lantern import LanternConfig
from draftsmith.eval.tables import markdown
from draftsmith.models.decoding.neighbours import NeighbourTable, load_neighbours
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.eagle_images import save_eagle
from draftsmith.models.shapes_reader import ShapesReader
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llamagen.files import save_model
from draftsmith.models.targets.llamagen.vq import VqConfig, VqTokenizer
from draftsmith.recipes.load import load
from draftsmith.recipes.plan import plan
from draftsmith.scripts.papers import proximity
from draftsmith.scripts.papers.proximity import Point, Replacing, Setting, draw_replaced
from draftsmith.trainers.run.finished_stages import write_done
from draftsmith.trainers.run.matching import FINGERPRINTS, write_begun
from PIL import Image
from visual_tiny import EAGLE, anole, llamagen, plain, request, target, true_features

ROOT = Path(__file__).parents[2]
VOCAB = 24


def codebook(rows: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))


def near(k: int, offset: int = 0, rows: int = VOCAB) -> NeighbourTable:
    return load_neighbours(codebook(rows), k - 1, metric="l2", offset=offset)


def luck(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- drawing with near codes


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_one_code_to_draw_from_is_plain_decoding(scale):
    drawer = target(llamagen(), scale)
    for seed in range(3):
        asked = request(drawer.model, seed)
        assert draw_replaced(drawer, asked, Warp(), near(4), 1, luck(seed)) == plain(drawer, asked)


def test_every_token_is_near_what_the_target_would_draw_after_the_replaced_ones():
    drawer, k = target(llamagen()), 4
    table, changed = near(k), 0
    for seed in range(4):
        asked = request(drawer.model, seed)
        tokens = draw_replaced(drawer, asked, Warp(), table, k, luck(seed))
        assert len(tokens) == drawer.num_codes
        features = true_features(drawer.model, asked.condition, 1, tokens[:-1])
        best = drawer.model.output(features).argmax(-1)[0, -len(tokens) :]
        allowed = torch.cat([best[:, None], table.codes[best].long()], dim=-1)
        assert (allowed == torch.tensor(tokens)[:, None]).any(-1).all()
        changed += int((best != torch.tensor(tokens)).sum())
    assert 0.6 < changed / (4 * drawer.num_codes) < 0.9  # 3 in 4: the token is one of its own k nearest


def test_replaced_tokens_are_distributed_as_a_draw_and_a_uniform_draw_after_it():
    drawer, k, n = target(llamagen()), 3, 600
    asked, warp, table = request(drawer.model), Warp(0.5, top_k=3), near(k)
    _, step = drawer.prefill(asked, Taps(), capacity=1)
    p = warp(step.logits[-1]).double()
    members = torch.cat([torch.arange(VOCAB)[:, None], table.codes.long()], dim=-1)
    expected = torch.zeros(VOCAB, dtype=torch.float64).index_add(0, members.flatten(), (p / k).repeat_interleave(k))
    drawing = Replacing(drawer, warp, table, k, luck())
    drawn = [int(drawing.prefill(asked, Taps(), capacity=1)[1].logits.argmax()) for _ in range(n)]
    actual = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / n
    noise = ((expected * (1 - expected) / n).sqrt() * (2 / torch.pi) ** 0.5).sum() / 2
    assert (actual - expected).abs().sum() / 2 < 2 * noise
    assert (actual - p).abs().sum() / 2 > 10 * noise  # and not as the target draws


def test_the_luck_of_a_request_is_the_same_for_every_k():
    drawer, table, states = target(llamagen()), near(6), []
    for k in (1, 2, 6):
        generator = luck()
        draw_replaced(drawer, request(drawer.model), Warp(1.0), table, k, generator)
        states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_ids_that_are_codes_plus_an_offset_stay_codes():
    drawer = anole()
    asked = request_of_text()
    tokens = draw_replaced(drawer, asked, Warp(1.0), near(16, offset=4, rows=16), 16, luck())
    assert len(tokens) == 16 and set(tokens) <= set(range(4, 20))


def request_of_text():
    from draftsmith.core.batch import ImageRequest

    return ImageRequest(torch.tensor([24, 25, 26]), name="text")


# ---- codes as patches


def test_nearest_and_farthest_by_brute_force_and_a_code_is_never_its_own():
    book = codebook()
    book[7] = book[3]  # a duplicate is another code, at distance 0
    codes = torch.tensor([3, 7, 11])
    nearest, farthest = proximity.extremes(book, codes, 4)
    for row, code in enumerate(codes.tolist()):
        distances = np.linalg.norm(book.double().numpy() - book[code].double().numpy(), axis=-1)
        order = [int(c) for c in np.argsort(distances, kind="stable") if c != code]
        assert nearest[row].tolist() == order[:4]
        assert farthest[row].tolist() == order[::-1][:4]


def test_a_patch_is_the_centre_cell_of_a_picture_of_one_code():
    vq = VqTokenizer(VqConfig(**VQ)).eval()
    vq.reset_parameters(luck())

    def pictures(codes):
        return (vq.decode(codes, (4, 4)) * 100).round().clamp(0, 255).to(torch.uint8)

    codes = torch.tensor([5, 0])
    result = proximity.patches(pictures, codes, 4)
    assert result.shape == (2, 3, 16, 16)
    for row, code in zip(result, codes, strict=True):
        assert torch.equal(row, pictures(torch.full((1, 16), int(code)))[0, :, 32:48, 32:48])


def test_shown_codes_go_from_often_to_rarely_drawn():
    drawn = torch.tensor([[5, 5, 5, 1], [1, 9, 9, 9], [9, 2, 3, 3]])  # 9: 4, 5: 3, 1: 2, 3: 2, 2: 1
    assert proximity.spread(drawn, 3).tolist() == [9, 1, 2]
    assert proximity.spread(drawn, 50).tolist() == [9, 5, 1, 3, 2]


# ---- tables


def point(sr: float, tau: float, fid: float, error: float | None = None) -> Point:
    table = {"ESR": sr, "ESR_spread": [sr - 0.1, sr + 0.1], "tau": tau, "tau_interval": [tau - 0.2, tau + 0.2]}
    return Point(table, {"fid": {"value": fid, "n": 3, "what": "FID", "spread": error}})


def test_tables_hold_each_number_at_its_setting():
    grid = {Setting(k, d): point(k / 10, k + d, 100 * d) for k in (10, 20) for d in (0.1, 0.2)}
    lines = markdown(proximity.grid_table(grid, [10, 20], [0.1, 0.2], proximity.SPEEDUP, {"plain decoding": 1.0}))
    assert lines[0] == "|  | delta = 0.1 | delta = 0.2 |"
    assert lines[2] == "| plain decoding | 1.00x |  |"
    assert lines[4] == "| k = 20 | 2.00x [1.90, 2.10] | 2.00x [1.90, 2.10] |"
    lines = markdown(proximity.grid_table(grid, [10, 20], [0.1, 0.2], proximity.quality("fid"), {}))
    assert lines[2:4] == ["| k = 10 | 10 | 20 |", "| k = 20 | 10 | 20 |"]
    of_lambda = {Setting(k, 4.0, bound="lambda"): point(1.0, 2.0, 3.0) for k in (10, 20)}
    lines = markdown(proximity.grid_table(of_lambda, [10, 20], [4.0], proximity.TAU, {}))
    assert lines[0] == "|  | lambda = 4 |" and [line for line in lines if line.startswith("| k")] == lines[2:4]
    settings = {Setting(10, 0.13, "cosine", "jsd"): point(1.5, 2.0, 17.43, 0.021)}
    lines = markdown(proximity.measures_table(settings, ["fid"]))
    assert (
        lines[2] == "| k=10, delta=0.13, cosine, jsd | 2.00 [1.80, 2.20] | 1.50x [1.40, 1.60] | 17.43 ± 0.021 (n=3) |"
    )


def test_settings_are_rules_of_a_recipe():
    config = LanternConfig.model_validate(Setting(7, 0.3, "random", "jsd").rule)
    assert (config.k, config.delta, config.metric, config.divergence, config.bound) == (
        7,
        0.3,
        "random",
        "jsd",
        "additive",
    )
    assert Setting(7, 0.3).name == "k=7, delta=0.3"
    plus = LanternConfig.model_validate(Setting(10, 4, bound="lambda").rule)
    assert (plus.k, plus.bound, plus.lambda_, plus.delta) == (10, "multiplicative", 4, None)
    assert Setting(10, 4, bound="lambda").name == "k=10, lambda=4"


def test_speedup_over_the_first_captions_with_its_interval():
    rows = [2.0, 3.0] * 20, [1.0] * 40
    (one, narrow), (two, _), (all_of_them, interval) = proximity.speedups(*rows, [1, 2, 40])
    assert (one, narrow) == (2.0, (2.0, 2.0)) and two == all_of_them == 2.5
    assert 2.3 < interval[0] < 2.5 < interval[1] < 2.7
    lines = markdown(proximity.counts_table([1, 40], {"a": proximity.speedups(*rows, [1, 40])}))
    assert lines[0] == "| captions | a |" and lines[2] == "| 1 | 2.00x [2.00, 2.00] |"


# ---- the prompts of appendix I


def test_the_nine_prompts_are_there():
    prompts = read_prompts(PromptSource(path=str(ROOT / "recipes" / "visual_ar" / "lantern-prompts.txt")))
    assert len(prompts) == 9
    assert all(p.caption[0] == "A" and p.caption[-1] == "." and "  " not in p.caption for p in prompts)
    assert prompts[4].caption.startswith("A classic still life") and "wolf" in prompts[8].caption
    # As printed, word for word: the texts were compared with the appendix once, and are held by their digest.
    digest = hashlib.sha256("\n".join(p.caption for p in prompts).encode()).hexdigest()
    assert digest.startswith("ef0cb534d3840a0a")


# ---- the scripts

VQ = {
    "base_channels": 8, "ch_mult": (1, 1, 1, 1, 1), "num_res_blocks": 1, "z_channels": 8, "codebook_size": VOCAB,
    "codebook_dim": 4, "groups": 8,
}  # fmt: skip


def script(name: str):
    loader = SourceFileLoader(name, str(ROOT / "scripts" / "papers" / f"{name}.py"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return lambda *arguments: module.main([str(a) for a in arguments])


def test_the_scripts_ask_for_the_papers_settings():
    """Tables 3, 10 and 11 and figure 5 (sweep), table 4 and figures 3 and 6 (proximity): what they do when not told."""

    def options(name: str):
        loader = SourceFileLoader(name, str(ROOT / "scripts" / "papers" / f"{name}.py"))
        module = module_from_spec(spec_from_loader(loader.name, loader))
        loader.exec_module(module)
        return module.Options()

    sweep, near_by = options("sweep_lantern"), options("latent_proximity")
    assert (sweep.k, sweep.delta, sweep.temperatures) == ([100, 300, 1000], [0.05, 0.1, 0.2, 0.4], [0.0, 1.0])
    assert {(v, j) for v, j in sweep.bounds} == {(0.2, 0.13), (0.3, 0.2)}, "TVD and JSD that accept alike"
    assert (near_by.k, near_by.extremes, near_by.temperature) == ([50, 100, 1000], 5, 1.0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Of a generator and a head that lie in folders, as published ones do, and a reader of a finished stage."""
    folder = tmp_path_factory.mktemp("published")
    model = llamagen(vocab=VOCAB)
    save_model(model, folder / "target")
    vq = VqTokenizer(VqConfig(**VQ))
    vq.reset_parameters(luck())
    save_model(vq, folder / "vq")
    torch.manual_seed(0)
    save_eagle(EAGLE.build(target(model)), folder / "head", {})
    shape = {n: v for n, v in model.config.model_dump().items() if n not in ("grid", "condition")}
    tree = {"kind": "dynamic", "total": 6, "depth": 2, "width": 3}
    captions = [f"a {color} circle at the top left" for color in ("red", "green", "blue", "black")]
    asked = [json.dumps({"caption": caption, "label": label}) for label, caption in enumerate(captions)]
    (folder / "prompts.jsonl").write_text("\n".join(asked))
    torch.manual_seed(0)
    ShapesReader(6, 4, width=4).save(folder / "run" / "reader")
    optim = {"lr": 0.001}
    stages = {
        "world": {"kind": "generate", "splits": {"train": 1}},
        "pixels": {
            "kind": "encode",
            "from": "world",
            "source": {"kind": "webdataset", "path": "*.tar"},
            "write": ["pixels"],
        },
        "reader": {
            "kind": "train",
            "model": "reader",
            "data": {"from": "pixels"},
            "steps": 1,
            "batch_size": 1,
            "optim": optim,
        },
    }
    evaluate = {
        "kind": "evaluate", "top_k": 12,
        "benchmarks": {"captions": {"prompts": {"path": str(folder / "prompts.jsonl")}, "reader": True}},
        "methods": {"EAGLE-2": {"tree": tree}, "mine": {"tree": {**tree, "width": 2}, "rule": Setting(4, 0.2).rule}},
    }  # fmt: skip
    tree = {
        "target": {
            "kind": "llamagen", "path": str(folder / "target"), "shape": shape, "condition": "class",
            "image_size": 64, "vq": str(folder / "vq"), "cfg_scale": 2.0,
        },
        "drafter": {"kind": "eagle", "path": str(folder / "head")},
        "stages": {**stages, "evaluate": evaluate},
        "output": str(folder / "run"),
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    stages_planned = plan(load([f"recipe={folder / 'tiny.yaml'}"]).recipe, folder)
    reader = next(planned for planned in stages_planned if planned.name == "reader")
    write_begun(reader, folder / "run" / "reader")
    write_done(reader, folder / "run" / "reader", FINGERPRINTS, 1.0)
    return folder / "tiny.yaml"


def test_latent_proximity_writes_pictures_codes_and_a_report(recipe, capsys):
    run = script("latent_proximity")
    assert run(f"recipe={recipe}", "k=[3,8]", "count=3", "shown=2", "codes=4", "extremes=3", "seed=1") == 0
    folder = recipe.parent / "run" / "latent_proximity"
    told = capsys.readouterr().out
    written = json.loads((folder / "report.json").read_text())
    score = written["quality"]["8"]["as_captioned"]
    assert score["n"] == 3 and f"| k = 8 | 3 | {score['value']:.4g} |" in told and "seed: 1" in told
    assert written["about"]["drawing"] == "temperature 1, guidance 2, top-k 12, top-p 1"
    assert 1 <= len(written["codes"]) <= 4
    gap, cell = 2, 64
    assert Image.open(folder / "pictures.png").size == (2 * (cell + gap) - gap, 3 * (cell + gap) - gap)
    patch = 48
    assert Image.open(folder / "codes.png").width == (1 + 1 + 3 + 1 + 3) * (patch + gap) - gap
    assert run(f"recipe={recipe}", "k=[3,8]", "count=3") == 2
    assert "the folder holds a report" in capsys.readouterr().err


def test_sweep_writes_the_tables_of_the_paper(recipe, capsys):
    run = script("sweep_lantern")
    own = [
        "k=[2,6]", "delta=[0.4]", "lambda=[1,4]", "bounds=[[0.3,0.2]]", "count=2", "counts=[1]", "metric=[l2,random]",
    ]  # fmt: skip
    assert run(f"recipe={recipe}", *own, "stages.evaluate.warmup=0") == 0
    told, folder = capsys.readouterr().out, recipe.parent / "run" / "sweep"
    text = (folder / "sweep.md").read_text()
    assert text in told
    written = json.loads((folder / "sweep.json").read_text())
    cold, warm = ({c["method"]: c for c in written["cells"] if c["temperature"] == t} for t in (0.0, 1.0))
    pairs = {"k=6, delta=0.3", "k=6, delta=0.2, jsd"}  # at the warmest temperature alone
    assert {*warm} - {*cold} == pairs and len(cold) == 1 + 2 * (2 + 2 * 2)
    assert all(table["requests"] == 2 for table in (*cold.values(), *warm.values()))
    assert written["settings"]["k=6, delta=0.2, jsd"] == {"k": 6, "delta": 0.2, "metric": "l2", "divergence": "jsd"}
    assert written["settings"]["k=6, lambda=4"] == {"k": 6, "lambda": 4, "metric": "l2", "divergence": "tvd"}
    assert "|  | lambda = 1 | lambda = 4 |" in text and (folder / "trade-off-T1-as_captioned-lambda.png").is_file()
    for part in ("## Temperature 0", "## Temperature 1", "| k = 6 |", "## Distances between codes", "## TVD and JSD"):
        assert part in text
    captions = [line.split(" | ")[0] for line in text.splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    assert captions == ["| 1", "| 2"] * 2
    tau = warm["k=6, delta=0.4"]["tau"]
    assert (folder / "trade-off-T1-as_captioned.png").is_file()
    assert f"{tau:.2f} [" in text and cold["exact rule"]["identical"] == 2


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("latent_proximity", ["counts=3"], "did you mean 'count'"),
        ("latent_proximity", ["dry_run=true"], "no option 'dry_run'"),
        ("latent_proximity", ["k=[1]"], "k.0: Input should be greater than or equal to 2"),
        ("latent_proximity", ["stages.evaluate.promts.classes=3"], "unknown key stages.evaluate.promts"),
        ("latent_proximity", ["k=[99]", "count=3", "name=other"], "98 neighbours of each code, in a codebook of 24"),
        ("latent_proximity", ["count=5", "name=other"], "count=5, and there are 4 prompts"),
        ("latent_proximity", ["name=evaluate"], "is a stage's folder"),
        ("latent_proximity", ["stage=evalute"], "did you mean 'evaluate'"),
        ("sweep_lantern", ["count=3", "counts=[4]"], "raise count"),
        ("sweep_lantern", ["method=theirs", "name=other"], "method=theirs: no method of"),
        ("sweep_lantern", ["delta=[2]"], "delta.0: Input should be less than or equal to 1"),
        ("sweep_lantern", ["lambda=[0]"], "lambda.0: Input should be greater than 0"),
        ("sweep_lantern", ["delta=[]"], "delta and lambda are both empty"),
    ],
)
def test_mistakes_are_told_and_end_with_2(recipe, capsys, name, given, told):
    assert script(name)(f"recipe={recipe}", *given) == 2
    assert told in capsys.readouterr().err


def test_a_run_that_has_not_finished_is_told(tmp_path, capsys):
    assert script("sweep_lantern")("recipe=demo/visual-ar", f"output={tmp_path}", "k=[5]") == 2
    assert "is not there, or not finished" in capsys.readouterr().err


@pytest.fixture
def again(recipe, tmp_path) -> Path:
    """The run once more, to be damaged."""
    shutil.copytree(recipe.parent / "run" / "reader", tmp_path / "reader")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["stages.reader.optim.lr=0.5"], "was run with other settings, data or earlier stages: stages.reader.optim.lr"),
        (["target.cfg_scale=3"], "target.cfg_scale was 2.0, is now 3.0"),
        ([], "model.safetensors was changed after it was written"),
    ],
)
def test_a_run_of_other_settings_or_with_changed_files_is_not_measured(recipe, again, capsys, given, told):
    """Scripts read what lay there: they asked for a done.json alone."""
    if not given:
        weights = bytearray((again / "reader" / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (again / "reader" / "model.safetensors").write_bytes(weights)
    assert script("latent_proximity")(f"recipe={recipe}", f"output={again}", "count=3", *given) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in again.iterdir()] == ["reader"]


@pytest.mark.parametrize("name", ["latent_proximity", "sweep_lantern"])
def test_help_names_every_option(capsys, name):
    assert script(name)("--help") == 0
    told = capsys.readouterr().out
    assert f"scripts/papers/{name}.py recipe=" in told and "count=100" in told and "name=" in told
