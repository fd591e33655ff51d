"""A stage's fingerprint, field by field of the schema: what changes a result is in it, what is harmless is not.

Every section that a recipe can hold is met in a shipped recipe, and changed in one field after the other. A change goes
around pydantic's checks: what counts is that no field is forgotten, whatever its value.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from draftsmith.core.section import Section
from draftsmith.core.tracking import TrackingConfig, WandbConfig
from draftsmith.core.weights_identity import weights_identity
from draftsmith.data.captioned.sources import TarSource
from draftsmith.data.records.table_records import TableRecords
from draftsmith.data.records.tar_records import TarRecords
from draftsmith.eval.quality.measure import QualityConfig
from draftsmith.models.drafters.base import DrafterConfig
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import _outside, _settings, plan
from draftsmith.recipes.config.schema import Recipe
from draftsmith.trainers.evaluate.probe_settings import Binding
from draftsmith.trainers.run.context import EngineConfig
from draftsmith.trainers.run.matching import ABSENT, HIDDEN, NAMES_WEIGHTS, named_weights
from draftsmith.trainers.run.restart import pending_restart
from draftsmith.trainers.run.run import run_stages
from draftsmith.trainers.run.stage import Hardware, Stage
from draftsmith.trainers.stages.cache import CacheStage
from draftsmith.trainers.train.checkpoint import CheckpointConfig
from draftsmith.trainers.train.fit import Expected
from safetensors.torch import save_file
from stages_run import contexts

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer")
# Recipe and settings; together they have every section of the schema.
RECIPES = (
    ("emoji_vlm/gates",),
    ("demo/compare",),
    ("demo/dflash",),
    ("demo/adapt",),
    ("peagle-qwen2.5-vl-7b",),
    ("eagle3-qwen3.5-9b",),
    ("adapt-eagle3-qwen2.5-vl-7b",),
    ("eagle3-qwen2.5-vl-7b", "stages.text.source={kind: online, engine: {kind: vllm}}",
     "stages.chains.engine={kind: vllm}",
     "stages.text.decoding={every: 4000, data: {path: a.json}, tree: {kind: chain, gamma: 3}}"),
    ("demo/lvlm-from-nothing", "stages.finetune.lora={rank: 4}", "stages.finetune.objective={kind: cross_entropy}",
     "stages.pretrain.packing={max_tokens: 4096}"),
    ("demo/suite", "stages.publish={kind: publish, repo: me/x, prompt: {text: hello}}"),
    ("demo/lvlm-distilled", "stages.answers.engine={kind: vllm}"),
    ("demo/video", "stages.sparrow.source=null", "stages.sparrow.source={kind: cached_on_first_epoch}",
     "stages.sparrow.data={from: world, path: single}"),
    ("demo/visual-ar", "stages.evaluate.methods.replaced={rule: {kind: replaced, k: 4}, temperatures: [1.0]}",
     "stages.evaluate.methods.tail={drafter: {kind: head_tail, members: [head]}, temperatures: [1.0], draw: sample, "
     "tree: {kind: chain, gamma: 4}}",
     "stages.vq.perceptual={path: weights/lite0}"),
    ("demo/visual-ar", "stages.world.textures={contrast: 20}"),
    ("llava15-68m", "stages.pretrain.data.path={kind: webdataset, path: a.tar}",
     "stages.finetune.data.path={kind: datasets, path: a, columns: {image: picture}}"),
    ("llava-ov-68m-anyres", "stages.evaluate.captioner={kind: blip}"),
    ("tabed-sweep",),
    ("llava-ov-68m-anyres", "stages.evaluate.captioner={kind: blip2}"),
    ("hivis-qwen2.5-vl-7b",),
    ("eagle3-internvl3-8b",),
    ("eagle3-mistral-small-3.1-24b",),
    ("eagle3-gemma-4-e4b",),
    ("vispec-llava-ov-7b",),
    ("sparrow-ablation-qwen2.5-vl-7b",),
    ("sage-llama3-8b-1b",),
    ("demo/smollm2",),
    ("dspark-qwen2.5-vl-7b",),
    ("mtp-qwen3.5-9b",),
    ("dflash2-qwen3-vl-8b",),
    ("chain-llamagen-3b",),
    ("lanternpp-anole-7b",),
    ("eagle-llamagen-c2i-3b",),
    ("eagle-llamagen-xl-stage1",),
    ("eagle-llamagen-xl-stage1", "stages.encode.source=null", "stages.encode.source={kind: folder, folder: a}"),
    ("eagle-llamagen-xl-stage1", "stages.encode.source=null", "stages.encode.source={kind: coco, annotations: a.json}"),
)  # fmt: skip
# Fields that change no result, wherever they stand.
HARMLESS = {
    "about": "what people read of a stage",
    "checkpoints": "when to save, and how many are kept",
    "device_map": "where a frozen target lies",
    "offload": "where a frozen target lies",
    "expected": "sizes of data for dry runs",
    "log_every": "how often a line is logged",
    "num_workers": "processes that read",
    "tensor_parallel_size": "how many ranks hold a frozen target together",
    "python": "where a serving engine is installed",
    "scratch": "where an engine's requests and answers lie on their way",
    "gpu_memory_utilization": "how much of a GPU an engine takes",
    "max_num_seqs": "how many requests an engine runs together",
    "ahead": "how many batches an engine works ahead",
    "timeout_s": "when an engine counts as hung",
}
# Fields whose value stands in another one.
ELSEWHERE = {
    "ConversationData.kind": "the fields of this kind of data",
    "ShardData.kind": "the fields of this kind of data",
    "HeadObjective.kind": "the objective's own fields",
}
# A source of records is read again while its fingerprint is made: another kind would want other fields.
READ_AGAIN = {"TableRecords.kind", "TarRecords.kind"}

# Their `path` names records.
RECORDS = (TableRecords, TarRecords, TarSource)

Put = Callable[[Any], Any]  # a value -> the recipe with this value in the place of the old one


def sections_of(annotation: Any, result: set[type[Section]]) -> set[type[Section]]:
    """Every section that a value of this type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section) and annotation not in result:
        result.add(annotation)
        for field in annotation.model_fields.values():
            sections_of(field.annotation, result)
    for inner in get_args(annotation):
        sections_of(inner, result)
    return result


def walk(value: Any, put: Put) -> Iterator[tuple[Section, str, Any, Put]]:
    """(section, field, its value, how to put another) of all that is below `value`."""
    if isinstance(value, Section):
        hidden = value.unread() if isinstance(value, Stage) else ()
        for name in type(value).model_fields.keys() - {*hidden}:

            def put_inner(new: Any, name: str = name) -> Any:
                return put(value.model_copy(update={name: new}))

            inner = getattr(value, name)
            if name in HARMLESS or not isinstance(inner, Section):
                yield value, name, inner, put_inner
            if name not in HARMLESS:  # a section is what its fields are
                yield from walk(inner, put_inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, lambda new, key=key: put(value | {key: new}))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from walk(inner, lambda new, place=place: put([*value[:place], new, *value[place + 1 :]]))


def another(value: Any) -> Any:
    """A value that is written otherwise, of the same kind where something reads it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str | Path):
        return f"{value}-other"
    if isinstance(value, dict):
        return value | {"other": next(iter(value.values()), 1)}
    if isinstance(value, list | tuple):
        return [*value, value[-1] if value else 1]
    return "other" if value is None else {"kind": "other"}


def covered(recipe: Recipe, *stages: str) -> str:
    """What the fingerprints of stages are hashes of."""
    return json.dumps([_settings(recipe, stage, {}, []) for stage in stages], sort_keys=True)


@pytest.fixture(scope="module")
def recipes() -> list[Recipe]:
    return [load([f"recipe={name}", *settings]).recipe for name, *settings in RECIPES]


def roots(recipe: Recipe) -> Iterator[tuple[list[str], Any, Put]]:
    """(stages, section, how to put another) of each stage, and of target and drafter as all of them have it."""
    for name, stage in recipe.stages.items():
        yield [name], stage, lambda new, name=name: recipe.model_copy(update={"stages": recipe.stages | {name: new}})
    for top in ("target", "drafter"):
        yield [*recipe.stages], getattr(recipe, top), lambda new, top=top: recipe.model_copy(update={top: new})


def test_every_field_that_changes_a_result_changes_the_fingerprint(recipes):
    seen: dict[str, tuple[str, bool]] = {}  # section and field -> field, whether the fingerprint followed
    met = set()
    for recipe in recipes:
        for stages, root, put in roots(recipe):
            before = covered(recipe, *stages)
            for section, field, value, put_other in walk(root, put):
                met.add(type(section))
                key = f"{type(section).__name__}.{field}"
                if not seen.get(key, (field, False))[1] and key not in READ_AGAIN:  # a cache reads less of a drafter
                    seen[key] = field, covered(put_other(another(value)), *stages) != before
    followed = {key for key, (_, follows) in seen.items() if follows}
    harmless = {key for key, (field, _) in seen.items() if field in HARMLESS} | ELSEWHERE.keys()
    assert seen.keys() - followed == harmless, seen.keys() - followed ^ harmless
    # What only says when a run is saved or shown has no fields here; all other sections were changed.
    known = sections_of(Recipe, set())
    for left_out in (TrackingConfig, CheckpointConfig, Expected, Hardware):
        known -= sections_of(left_out, set())
    assert known - met == {Recipe, EngineConfig, Binding}  # these two are below, and Binding is a data section alone


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """One with an encoder, trainings with and without the drafter, and an evaluation."""
    return load(["recipe=demo/visual-ar"]).recipe


def prints(recipe: Recipe) -> dict[str, str]:
    return {planned.name: planned.fingerprint for planned in plan(recipe, Path("a"))}


def test_what_stands_beside_the_stages(recipe):
    """The seed is every stage's, the target all others' than the dataset's, the drafter is of those that train or
    measure it; the engine is of those that train. Each is of what builds on them, too.
    """
    base, trained = prints(recipe), {name for name, stage in recipe.stages.items() if stage.trains}
    equal = {}
    for top, value in {"seed": 1, "target": recipe.target.model_copy(update={"cfg_scale": 7}),
                       "drafter": recipe.drafter.model_copy(update={"kind": "other"})}.items():  # fmt: skip
        changed = prints(recipe.model_copy(update={top: value}))
        equal[top] = {name for name in base if changed[name] == base[name]}
    assert equal["seed"] == set() and equal["target"] == {"world"}
    assert {recipe.stages[name].kind for name in equal["drafter"]} == {"generate", "encode", "train"}
    assert {recipe.stages[name].model for name in equal["drafter"] if name in trained} == {"vq", "target", "reader"}
    kinds = {recipe.stages[name].kind for name in base.keys() - equal["drafter"]}
    assert {"train", "evaluate"} <= kinds and not kinds & {"generate", "encode"}
    for field in EngineConfig.model_fields:
        engine = recipe.engine.model_copy(update={field: "other"})
        changed = prints(recipe.model_copy(update={"engine": engine}))
        other = {name for name in base if changed[name] != base[name]}
        assert not other if field == "wait_minutes" else trained <= other, field
        assert changed["world"] == base["world"], field
    for top, value in {"output": "other", "tracking": TrackingConfig(wandb=WandbConfig(project="other"))}.items():
        assert prints(recipe.model_copy(update={top: value})) == base, top


def test_a_stage_takes_the_fingerprints_of_what_it_reads(recipe):
    """A change of a stage is one of every stage after it that takes something from it, and of no other."""
    planned, base = plan(recipe, Path("a")), prints(recipe)
    for stage in planned:
        other = stage.stage.model_copy(update={"seed" if "seed" in type(stage.stage).model_fields else "kind": "other"})
        changed = prints(recipe.model_copy(update={"stages": recipe.stages | {stage.name: other}}))
        stale = {stage.name}
        for later in planned:
            stale |= {later.name} if stale & {*later.inputs.values()} else set()
        assert {name for name in base if changed[name] != base[name]} == stale


@pytest.mark.parametrize(("changes", "follows"), [({}, True), ({"data": None}, False)], ids=["texts", "pictures"])
def test_the_batch_of_answers_changes_texts_alone(recipes, changes, follows):
    """Padding moves a text's last bits; codes of a picture are drawn in a batch of any size."""
    recipe = recipes[0].model_copy(
        update={"stages": {"answers": recipes[0].stages["answers"].model_copy(update=changes)}}
    )
    larger = recipe.stages["answers"].model_copy(update={"batch_size": 7})
    other = recipe.model_copy(update={"stages": {"answers": larger}})
    assert (covered(other, "answers") != covered(recipe, "answers")) == follows


# ---- what is stored of a fingerprint's settings, and what lies outside the run


def stored(path: Path, *settings: str) -> dict[str, Any]:
    """Of the first stage of a recipe whose target is at `path`."""
    return plan(load(["recipe=llava15-68m", f"target.path={path}", *settings]).recipe, Path("a"))[0].settings


def test_two_values_that_are_hidden_alike_are_told_apart():
    a, b = (stored(Path("/models") / ("hf_" + letter * 34)) for letter in "ab")
    assert a["target"] == b["target"] and "aaaa" not in json.dumps(a)
    assert a[HIDDEN] != b[HIDDEN] and a[HIDDEN] == stored(Path("/models") / ("hf_" + "a" * 34))[HIDDEN]


def weights(folder: Path, value: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.full((4,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [key for key in after if before[key] != after[key]]


def test_weights_that_a_recipe_names_count_wherever_they_stand(tmp_path):
    """Weights that changed in place, with sizes and names as they were, made nothing stale."""
    target, text, tower = (weights(tmp_path / name) for name in ("target", "text", "tower"))
    settings = (f"drafter.language_model={text}", f"drafter.vision_tower={tower}")
    before = stored(target, *settings)["outside"]
    assert ABSENT not in before.values()
    for key, folder in (("target.path", target), ("drafter.language_model", text), ("drafter.vision_tower", tower)):
        weights(folder, 1.0)
        now = stored(target, *settings)["outside"]
        assert changed(before, now) == [key]
        before = now
    (target / "config.json").write_text('{"a": 1}')
    assert changed(before, stored(target, *settings)["outside"]) == ["target.path"]
    before = stored(target, *settings)["outside"]
    (target / "README.md").write_text("a note")
    os.utime(text / "model.safetensors", (1, 1))
    assert not changed(before, stored(target, *settings)["outside"])
    assert stored(tmp_path / "gone")["outside"]["target.path"] == ABSENT
    assert stored(Path("llava-hf/llava-1.5-7b-hf"))["outside"]["target.path"] == ABSENT


def test_every_key_that_names_weights_is_looked_at(recipes, tmp_path):
    """Each place of a shipped recipe whose value names weights: with a folder there, its identity follows."""
    folder = weights(tmp_path / "some")
    expected = weights_identity(folder)
    met = set()
    for recipe in recipes:
        for stages, root, put in roots(recipe):
            for section, field, _, put_other in walk(root, put):
                if isinstance(section, DrafterConfig) and isinstance(root, CacheStage):
                    continue  # whose states are kept, from the target alone
                reads_records = "from_stage" in type(section).model_fields or isinstance(section, RECORDS)
                is_judge = field == "weights" and isinstance(section, QualityConfig)
                if not is_judge and (field not in NAMES_WEIGHTS or reads_records):
                    continue
                other = {"clip": str(folder)} if is_judge else str(folder)
                changed = put_other(other)
                outside = [value for stage in stages for value in _settings(changed, stage, {}, [])["outside"].values()]
                assert expected in outside, (type(section), field)
                met.add(f"{type(section).__name__}.{field}")
    assert {"SiblingConfig.path", "LlamaGenTargetConfig.vq", "LlamaGenTargetConfig.text_encoder", "BlipCaptions.path",
            "AnoleTargetConfig.vq_path", "QualityConfig.weights", "Eagle3Config.path"} <= met, met  # fmt: skip


# What a stage reads from elsewhere -> recipe, setting, the file that changes, and the stages that are stale then.
MIXTURE = ("llava-ov-68m", "stages.single_image.data.path={}/mix.yaml")
TALKS = {"single_image", "onevision", "evaluate"}
READ = {
    "records": ("llava15-68m", "stages.finetune.data.path={}/a.json", "a.json", {"finetune", "evaluate"}),
    "records of a validation": (
        "llava15-68m", "stages.finetune.validation={{data: {{path: {}/a.json}}, every: 5}}", "a.json",
        {"finetune", "evaluate"},
    ),
    "a benchmark": (
        "llava15-68m", "stages.evaluate.benchmarks=[{{name: b, data: {{path: {}/a.json}}}}]", "a.json", {"evaluate"},
    ),
    "a mixture": (*MIXTURE, "mix.yaml", TALKS),
    "a mixture's file": (*MIXTURE, "a.json", TALKS),
    "prompts": (
        "demo/visual-ar",
        "stages.evaluate.benchmarks.captions.prompts={{from: null, path: {}/prompts.txt, max_samples: null}}",
        "prompts.txt", {"evaluate"},
    ),
    "shards": (
        "demo/visual-ar", "stages.head.data={{from: null, path: {}}}", "manifest.json",
        {"head", "evaluate"},
    ),
    "pictures": (
        "demo/visual-ar", "stages.pictures={{from: null, source: {{kind: webdataset, path: {}/a.tar}}}}", "a.tar",
        {"pictures", "vq", "reader", "codes", "features", "target", "head", "head_without_dropout", "evaluate"},
    ),
    "a head of another run": (
        "sparrow-qwen2.5-vl-7b", "stages.by_length.methods.MSD={{drafter: {{kind: msd, path: {}}}, tree: 48-5-10}}",
        "draftsmith.json", {"by_length"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
def test_what_a_stage_reads_from_elsewhere_counts_by_its_content(what, tmp_path):
    """Its place has the same name before and after."""
    name, setting, file, stale = READ[what]
    texts = {"a.json": "[]", "mix.yaml": "datasets:\n- {json_path: a.json}\n", "prompts.txt": "a red circle\n",
             "manifest.json": "{}", "a.tar": "one", "draftsmith.json": '{"training": {"step": 100}}'}  # fmt: skip
    for path, text in texts.items():
        (tmp_path / path).write_text(text)

    def found() -> dict[str, str]:
        loaded = load([f"recipe={name}", setting.format(tmp_path)])
        return {planned.name: planned.fingerprint for planned in plan(loaded.recipe, loaded.path)}

    before = found()
    assert found() == before
    new = {"a.json": "[{}]", "mix.yaml": "datasets:\n- {json_path: a.json, sampling_strategy: 'end:1'}\n",
           "draftsmith.json": '{"training": {"step": 200}}'}  # fmt: skip
    (tmp_path / file).write_text(new.get(file, texts[file][::-1]))
    assert {*changed(before, found())} == stale


def test_members_of_ensembles_count(tmp_path):
    """Lists of sections, as an ensemble's members are."""
    folder = weights(tmp_path / "member")
    found = _outside({"drafters": {"mixed": {"members": [{"path": "a/b"}, {"path": str(folder)}]}}}, [])
    assert found == {"drafters.mixed.members.0.path": ABSENT, "drafters.mixed.members.1.path": weights_identity(folder)}


class Weights(Stage):
    """Leaves weights, which differ from run to run, and ends as a stage that is killed."""

    def run(self, context) -> None:
        weights(context.folder, len(list(context.folder.parent.glob("language*"))))
        raise KeyboardInterrupt


def test_what_the_run_itself_writes_is_nothing_outside(tmp_path, monkeypatch):
    """A folder that the stage itself writes was weights from outside: each start restarted it anew."""
    monkeypatch.chdir(tmp_path)
    words = ["recipe=demo/lvlm-from-nothing", "output=.", "restart=language", "stages=[language]",
             "drafter.language_model=./language"]  # fmt: skip
    weights(tmp_path / "language")
    for _ in range(3):
        loaded = load(words)
        planned = next(p for p in plan(loaded.recipe, loaded.path) if p.name == "language")
        assert "drafter.language_model" in planned.settings["outside"]
        only = [replace(planned, stage=Weights(), inputs={}, earlier={})]
        restart = pending_restart(only, tmp_path, "language", words, lambda text: None)
        with pytest.raises(KeyboardInterrupt):
            run_stages(only, contexts(print), output=tmp_path, chosen=None, restart=restart, say=print, words=words)
    assert sorted(path.name for path in tmp_path.glob("language*")) == ["language", "language.before-1"]


def test_a_word_is_no_path(tmp_path, monkeypatch):
    """A folder `target` where the command is given is not the half that `vision_tower: target` means."""
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "target")
    found = stored(tmp_path / "gone", "drafter.language_model=./target", "drafter.vision_tower=target")["outside"]
    assert [key for key, identity in found.items() if identity != ABSENT] == ["drafter.language_model"]
    (tmp_path / "target" / "done.json").write_text("{}")
    assert [*named_weights({"vision_tower": "target", "language_model": "target", "path": "target"})] == [
        ("path", "target")
    ]
