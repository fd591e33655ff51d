"""What `auto` became is recorded where a stage begins, and a stage that goes on elsewhere is refused."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.results import BEGUN, Mark, read_mark, write_mark
from draftsmith.core.section import Section
from draftsmith.eval.pair import Pair
from draftsmith.models.drafters import MixedConfig, PrunedConfig
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.evaluate.drafters import Drafters
from draftsmith.trainers.publish.decoding import _typed, measured_dtype
from draftsmith.trainers.run import context as contexts
from draftsmith.trainers.run.context import Context
from draftsmith.trainers.run.precision import settled, with_types
from fails import fails_with
from safetensors.torch import save_file

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PUBLISHED = ("recipe=llava15-68m", "target.dtype=auto", "engine.precision=auto")
SIBLING = "{{kind: pruned, ratio: 0, model: {{kind: llava, path: {}}}}}"


@pytest.fixture
def on(monkeypatch):
    """Puts ranks on a device."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    return lambda device: monkeypatch.setattr(contexts.ranks, "device", lambda: device)


@pytest.fixture
def stored(tmp_path):
    """A folder of weights in bfloat16."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"w": torch.zeros(4, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def planned_of(tmp_path, stage, *settings):
    """A stage of a recipe, with the recipe."""
    loaded = load([f"output={tmp_path}/run", *settings])
    return next(one for one in plan(loaded.recipe, loaded.path) if one.name == stage), loaded.recipe


def begun(tmp_path, stage, *settings):
    """A stage of a recipe that has begun, as the runner gives it its context: () -> context."""
    planned, recipe = planned_of(tmp_path, stage, *settings)
    folder = tmp_path / "run" / stage
    folder.mkdir(parents=True)
    write_mark(folder / BEGUN, Mark(planned.fingerprint, 4, settings=dict(planned.settings)))

    def make():
        context = Context(stage, folder, 0, planned.fingerprint, recipe.target, recipe.drafter, recipe.engine,
                          recipe.tracking, {}, print)  # fmt: skip
        return settled(context, planned)

    return make


def test_recipe_and_fingerprint_keep_the_word_and_the_stage_gets_the_type(tmp_path, stored, on):
    make = begun(tmp_path, "finetune", *PUBLISHED, f"target.path={stored}")
    on(GPU)
    context = make()
    assert (context.target.dtype, context.engine.precision) == ("bfloat16", "bf16")
    mark = read_mark(context.folder / BEGUN)
    assert mark.resolved == {"target.dtype": "bfloat16", "engine.precision": "bf16"}
    assert (mark.settings["target"]["dtype"], mark.settings["engine"]["precision"]) == ("auto", "auto")


def test_a_stage_that_made_something_does_not_go_on_in_another_type(tmp_path, stored, on):
    make = begun(tmp_path, "finetune", *PUBLISHED, f"target.path={stored}")
    on(GPU)
    folder = make().folder
    on(CPU)
    assert make().target.dtype == "float32", "nothing was made: it begins anew"
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "weights.pt").write_text("")
    on(GPU)
    refused = r"begun where target\.dtype: auto is float32, and here it is bfloat16"
    assert "restart=finetune" in str(fails_with(refused, make))
    on(CPU)
    assert make().engine.precision == "fp32"


def test_the_engine_follows_the_target_and_the_words_of_the_recipe(tmp_path, stored, on):
    on(GPU)
    path = f"target.path={stored}"
    cases = {
        "inline": ("recipe=demo/lvlm-from-nothing",),
        "float32": (*PUBLISHED, path, "target.dtype=float32"),
        "named": (*PUBLISHED, path, "engine.precision=fp32"),
    }
    for name, settings in cases.items():
        context = begun(tmp_path / name, "finetune", *settings)()
        assert context.engine.precision == "fp32", name
    assert context.resolved == {"target.dtype": "bfloat16"}
    revives = ("stages.vq.revive_every=4",)
    assert begun(tmp_path / "vq", "vq", "recipe=demo/visual-ar", *revives)().engine.precision == "fp32"


@pytest.mark.parametrize(("stage", "small"), [("vq", True), ("reader", True), ("head", False)])
def test_small_nets_that_are_trained_here_stay_in_float32(stage, small, tmp_path, on):
    """A target of 16 bits says nothing of its tokenizer's and its reader's training, nor does who asks for bf16."""
    on(GPU)
    low = "recipe=demo/visual-ar", "target.dtype=bfloat16"
    for name, asked in {"auto": (), "asked": ("engine.precision=bf16",)}.items():
        assert begun(tmp_path / name, stage, *low, *asked)().engine.precision == ("fp32" if small else "bf16")


def test_siblings_and_an_evaluations_own_target_are_recorded(tmp_path, stored, on):
    on(GPU)
    own = f"stages.evaluate.target={{kind: llava, path: {stored}}}"
    method = f"stages.evaluate.methods.S={{drafter: {SIBLING.format(stored)}, tree: chain}}"
    make = begun(tmp_path, "evaluate", *PUBLISHED, own, method)
    assert make().resolved == {
        "stages.evaluate.target.dtype": "bfloat16", "stages.evaluate.methods.S.drafter.model.dtype": "bfloat16"
    }  # fmt: skip
    assert measured_dtype(tmp_path / "run" / "evaluate") == "bfloat16"


# One sibling in every place that may name it, at several ratios.
SHARED = """
target: {{kind: llava, path: {path}}}
drafter: {{kind: pruned, ratio: 0, model: {{kind: llava, path: {path}}}}}
stages:
  evaluate:
    kind: evaluate
    benchmarks: {{held: {{data: {{path: a.json}}}}}}
    max_new_tokens: [8]
    captioner: {{kind: blip, path: {path}}}
    drafters: {{named: {{kind: pruned, ratio: 0.5, model: {{kind: llava, path: {path}}}}}}}
    methods:
      recipe's: {{tree: chain}}
      its own: {{drafter: {{kind: pruned, ratio: 0.9, model: {{kind: llava, path: {path}}}}}, tree: chain}}
      named: {{drafter: named, tree: chain}}
      mixed:
        drafter: {{kind: ensemble, members: [named, {{kind: pruned, model: {{kind: llava, path: {path}}}}}]}}
        tree: chain
"""


def test_one_sibling_in_several_places_and_at_several_ratios_is_loaded_once(tmp_path, stored, on, monkeypatch):
    (tmp_path / "shared.yaml").write_text(SHARED.format(path=stored))
    asked = "evaluate", f"recipe={tmp_path}/shared.yaml"
    on(GPU)
    context, (planned, _) = begun(tmp_path, *asked)(), planned_of(tmp_path, *asked)
    stage, loads, opened = with_types(planned.stage, "stages.evaluate", context.resolved), [], []
    assert stage.captioner.dtype == "bfloat16" and planned.stage.captioner.dtype == "auto"
    assert "auto" not in {value for key, value in leaves(stage) if key == "dtype"}

    monkeypatch.setattr(PrunedConfig, "load", lambda self, *_, **__: loads.append(self.model.dtype) or object())
    monkeypatch.setattr(PrunedConfig, "drafter", lambda self, module, *_: opened.append((self.ratio, module)))
    monkeypatch.setattr(MixedConfig, "drafter", lambda self, members, *_: None)
    Drafters(stage, context, Pair(None, TargetIdentity({}))).all()
    assert loads == ["bfloat16"] and len({module for _, module in opened}) == 1
    assert [ratio for ratio, _ in opened] == [0, 0.9, 0.5, 0.5, 0.9], "each drafts at its own ratio"


def leaves(value, key=None):
    """(key, value) of all that sections hold, an ensemble's members among them."""
    value = value.model_dump() if isinstance(value, Section) else value
    if isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, name)
    else:
        yield key, value


def test_what_is_published_says_the_type_that_was_measured(tmp_path, stored, on):
    target = load([*PUBLISHED, f"target.path={stored}"]).recipe.target
    on(CPU)
    context = SimpleNamespace(inputs={}, device=lambda: CPU)
    assert _typed(target, "bfloat16", context).dtype == "bfloat16"
    assert _typed(target, None, context).dtype == "float32"
    explicit = target.model_copy(update={"dtype": "float16"})
    assert _typed(explicit, "bfloat16", context) is explicit
