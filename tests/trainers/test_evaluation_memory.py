"""A dry run's memory of an evaluation against a real one's tensors: what is held once, and what each method keeps."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import IMAGE, TEXT, Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.pair import Pair
from draftsmith.eval.policies import Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.cache import CacheLayer
from draftsmith.models.decoding.tree import chain
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import DflashConfig, LvlmConfig, MedusaConfig
from draftsmith.models.drafters.base import DraftingOptions, TargetIdentity
from draftsmith.models.drafters.head_config import HeadConfig
from draftsmith.models.drafters.lvlm import build_drafter
from draftsmith.models.drafters.modes import ImageSubstitutes
from draftsmith.models.families.sizes import parameter_counts
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llamagen.vq import VqConfig, VqTokenizer
from draftsmith.models.targets.llava.model import assemble
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.models.targets.verification import NODES, verify
from draftsmith.recipes.load import load
from draftsmith.recipes.plan import plan
from draftsmith.trainers.estimate.evaluation_memory import Hardware, Memory, evaluation_memory
from draftsmith.trainers.estimate.image_memory import drawing_memory
from draftsmith.trainers.estimate.models import target_shape
from draftsmith.trainers.estimate.proposals import proposals, sizes_of
from draftsmith.trainers.evaluate.drafters import Drafters
from draftsmith.trainers.evaluate.graphs import capture_target
from live_tensors import Live
from transformers import BlipConfig, BlipForConditionalGeneration

CHAIN = "tree: {kind: chain, gamma: 4}"
PRUNED = "kind: pruned, model: target"
# Two drafts of one section in two modes, two heads, and the target after pruned prompts: each at its own settings.
METHODS = f"""
  M: {{drafters: [finetune, distill]}}
  MT: {{drafters: [finetune, distill], mode: MT, {CHAIN}}}
  head: {{drafter: &eagle {{kind: eagle}}, {CHAIN}}}
  head again: {{drafter: *eagle, {CHAIN}}}
  medusa: {{drafter: {{kind: medusa}}, {CHAIN}}}
  dflash: {{drafter: {{kind: dflash, taps: [1, 2], num_layers: 2, block_size: 6}}, {CHAIN}}}
  whole: {{drafter: {{{PRUNED}, ratio: 0}}, {CHAIN}}}
  pruned: {{drafter: {{{PRUNED}, ratio: 0.5}}, {CHAIN}}}
  both: {{drafter: {{kind: ensemble, members: [finetune, head]}}, {CHAIN}}}
"""


def asked(*settings: str):
    """The plan of an evaluation of a recipe of ours."""
    return next(one for one in planned_of("demo/lvlm-distilled", *settings) if one.name == "compare")


def planned_of(recipe: str, *settings: str):
    found = load([f"recipe={recipe}", "output=out", *settings])
    return plan(found.recipe, found.path)


@pytest.fixture
def planned():
    few = ("stages.world.vocab_size=420", "stages.compare.max_new_tokens=6")
    methods = f"stages.compare.methods={{{METHODS.strip().replace(chr(10), ', ')}}}"
    return asked("stages.compare.compare=null", methods, "stages.compare.graphs.draft=false", *few)


def target_of(recipe) -> LlavaTarget:
    config = target_shape(recipe)
    torch.manual_seed(0)
    return LlavaTarget(
        assemble(config).eval(), num_token_ids=config.text_config.vocab_size, image_token_id=config.image_token_index
    )


def longest(plan, target) -> Request:
    """A request of as many ids as the data section allows: a picture, and words."""
    config, length = target.decoder.model.config, plan.stage.data[0].max_length
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    ids = torch.tensor([1] + [config.image_token_index] * patches + [9] * (length - patches - 1))
    modality = torch.where(ids == config.image_token_index, IMAGE, TEXT).to(torch.int8)
    side = config.vision_config.image_size
    return Request(ids, modality, torch.randn(1, 3, side, side), "longest")


def opened(plan, target, tmp_path, monkeypatch):
    """The evaluation's drafters, with random weights in the place of trained ones."""
    config = target.decoder.model.config
    ids = TokenIds(config.text_config.vocab_size, config.image_token_index, 1, 2, 3, 5, 6, 7)
    built = lambda self, folder, big, **_: build_drafter(self, big.decoder.model, ids, seed=0).eval()  # noqa: E731
    monkeypatch.setattr(LvlmConfig, "load", built)
    for kind in (HeadConfig, MedusaConfig, DflashConfig):
        monkeypatch.setattr(kind, "load", lambda self, folder, big, **_: self.build(big).eval())
    folders = {f"drafter/{name}": tmp_path / name for name in ("finetune", "distill")}
    context = SimpleNamespace(name="compare", target=plan.recipe.target, drafter=plan.recipe.drafter, inputs=folders,
                              seed=0)  # fmt: skip
    options = DraftingOptions(substitutes=ImageSubstitutes(5), capacity=plan.stage.capacity)
    return Drafters(plan.stage, context, Pair(target, TargetIdentity({})), options=options)


def num_bytes(tensors) -> int:
    """Of distinct storages."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def caches_of(drafter) -> list:
    """Tensors of the caches that a drafter holds, those of an ensemble's members among them."""
    if hasattr(drafter, "members") and not isinstance(drafter.members[0], str):
        return [tensor for member in drafter.members for tensor in caches_of(member)]
    cache = getattr(drafter, "_cache", None)
    layers = [] if cache is None else cache.layers
    assert all(isinstance(layer, CacheLayer) for layer in layers)
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def test_weights_are_held_once_and_every_method_keeps_a_cache(planned, tmp_path, monkeypatch):
    target = target_of(planned.recipe)
    drafters, request = opened(planned, target, tmp_path, monkeypatch), longest(planned, target)
    drafting = drafters.all()
    for one in drafting:
        decoding = Decoding(one.policy, Greedy(), Draw(one.method.draw), Warp(), max(planned.stage.max_new_tokens), ())
        generate(target, one.drafter, request, decoding)
    parts = evaluation_memory(planned).parts
    held = [caches_of(one.drafter) for one in drafting]
    assert sum(map(bool, held)) == len(drafting) - 1, "all but Medusa's keep one"
    ratio = parts["drafters' caches"] / num_bytes(tensor for tensors in held for tensor in tensors)
    assert 0.5 < ratio < 2, ratio
    modules = [module for module in drafters.pair.modules.values() if module is not target]
    own = {id(p): p for module in modules for p in module.parameters() if p.requires_grad or module.training is False}
    for p in target.decoder.model.parameters():
        own.pop(id(p), None)
    counted = parts["draft LVLMs"] + parts["drafters"]
    assert len(modules) == len({one.weights for one in proposals(planned)}) - 1 == 5
    assert counted == sum(p.numel() * p.element_size() for p in own.values())


def test_graphs_hold_a_cache_of_the_rounded_length_and_what_they_return():
    """At tiny size: the cache exactly, and the other buffers as the captured passes would leave them."""
    few = ("stages.world.vocab_size=420", "stages.compare.compare=null", "stages.compare.max_new_tokens=6")
    graphs = "stages.compare.graphs={target: true, length: 300}"  # two lengths of graphs
    plain, graphed = asked(*few), asked(*few, graphs)
    target, memory = target_of(graphed.recipe), evaluation_memory(graphed)
    before, parts = memory.parts, memory.on_gpu
    assert "graphs" not in before and before == evaluation_memory(plain).parts, "where there is no GPU"
    assert evaluation_memory(plain).on_gpu["graphs"] >= parts["graphs"] > 0, "by themselves"
    drafting = [SimpleNamespace(policy=method.policy()) for method in graphed.stage.methods.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.trainers.evaluate.graphs.why_not", lambda decoder: None)
        capture_target(graphed.stage.graphs, target, drafting, graphed.stage.capacity, stage="compare")
    graphs = target.graphs
    session, _ = target.prefill(longest(graphed, target), Taps(), capacity=16)
    cache = [tensor for layer in graphs._cache.layers for tensor in (layer.keys, layer.values)]
    assert parts["key-value cache"] == num_bytes(cache) > before["key-value cache"]
    nodes = [count for count in NODES if count <= 8]  # a chain of five, and its root
    with Live() as live, torch.inference_mode():
        kept = []
        for length in graphs.lengths:  # a pass reads the first that holds it
            session.cache.crop_to(length - nodes[-1])
            trees = [chain(torch.zeros(n - 1, dtype=torch.int64)) for n in nodes]
            kept += [verify(graphs, target.decoder, session.cache, 7, tree, length, ()) for tree in trees]
    assert len(kept) == len(nodes) * len(graphs.lengths) == len(graphs.captured)
    assert 0.5 < parts["graphs"] / live.most < 2, (parts["graphs"], live.most)
    spread = evaluation_memory(asked(*few, "target.device_map=auto"))
    assert spread.on_gpu == spread.parts == before, "a target on several devices takes none"
    assert "graphs" not in evaluation_memory(asked(*few, "stages.compare.graphs.target=false")).on_gpu


def test_graphs_are_counted_on_a_gpu_and_not_without_one():
    """The tests' machine has none."""
    memory = Memory({"key-value cache": 2.0**30}, graphs={"key-value cache": 2.0**29, "graphs": 2.0**31})
    assert memory.lines(None, is_here=True) == [
        "  memory of a process, without a GPU, about 1.5 GiB: key-value cache 1.0, Python 0.5"
    ]
    (line, verdict) = memory.lines(Hardware(gpus=1, memory_gb=5), is_here=True)
    assert line == "  memory of the fullest GPU about 5.5 GiB: key-value cache 1.5, graphs 2.0, CUDA 2.0"
    cure = "; without CUDA graphs it does: graphs={target: false, head: false}"
    assert verdict == f"  DOES NOT FIT 1 GPU(s) of 5 GB each{cure}"
    assert memory.lines(Hardware(gpus=1, memory_gb=2))[1] == "  DOES NOT FIT 1 GPU(s) of 2 GB each"


def test_a_target_on_several_devices_has_its_caches_there_too(planned):
    """A quarter of each on each: weights, its cache, and the caches of drafts that are the target itself."""
    recipe = planned.recipe.model_copy(
        update={"target": planned.recipe.target.model_copy(update={"device_map": "auto"}),
                "hardware": Hardware(gpus=4, memory_gb=80)}
    )  # fmt: skip
    alone, spread = (evaluation_memory(one).parts for one in (planned, dataclasses.replace(planned, recipe=recipe)))
    own = [name for name in alone if name.startswith("target's ")]
    assert own and all(spread[name] == alone[name] / 4 for name in [*own, "key-value cache"])
    sizes = [sizes_of(one, planned.stage, target_shape(recipe), recipe.target) for one in proposals(planned)]
    held = {is_targets: sum(one.cache for one in sizes if one.is_targets == is_targets) for is_targets in (True, False)}
    assert all(held.values()) and spread["drafters' caches"] == pytest.approx(held[True] / 4 + held[False])
    assert spread["drafters"] == alone["drafters"], "heads are whole on one device"


def test_a_published_image_tokenizer_is_counted():
    """Its file need not be there for a dry run."""
    evaluate = next(one for one in planned_of("eagle-llamagen-c2i-xl") if one.name == "evaluate")
    with torch.device("meta"):
        size = sum(p.numel() for p in VqTokenizer(VqConfig()).parameters())
    assert drawing_memory(evaluate).parts["target's image tokenizer"] == pytest.approx(4 * size, rel=0.01)


def test_a_captioner_is_counted(tmp_path):
    """A published one by its folder, or by its name; the demo's own by the stage that trains it."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "encoder_hidden_size": 16, "vocab_size": 30}
    model = BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config={**sizes, "image_size": 32}))
    model.save_pretrained(tmp_path)
    few = ("stages.world.vocab_size=420", "stages.compare.compare=null")
    captioner = "stages.compare.captioner={{kind: blip, path: {}, dtype: {}}}"
    parts = evaluation_memory(asked(*few, captioner.format(tmp_path, "float32"))).parts
    assert parts["captioner"] == sum(p.numel() * p.element_size() for p in model.parameters())
    named = evaluation_memory(asked(*few, captioner.format("Salesforce/blip-image-captioning-base", "bfloat16")))
    assert named.parts["captioner"] == 2 * 223_971_644 and not named.uncounted
    other = evaluation_memory(asked(*few, captioner.format("somebody/blip", "bfloat16")))
    assert other.uncounted == ("somebody/blip",) and "captioner" not in other.parts
    suite, longer = (
        next(one for one in planned_of("demo/suite", few[0], f"stages.suite.captioner.max_new_tokens={most}")
             if one.name == "suite") for most in (40, 4000)
    )  # fmt: skip
    config = suite.recipe.drafter.config_beside(target_shape(suite.recipe))
    parts, more = evaluation_memory(suite).parts, evaluation_memory(longer).parts
    assert parts["captioner"] == more["captioner"] == 4 * sum(parameter_counts(config).values())
    assert more["activations"] > 2 * parts["activations"], "as many captions as a prompt has pictures"
