"""Targets that are read from files onto the pretend devices: whole on one, spread over two, spilling to the host."""

import copy
import tempfile
from pathlib import Path

import test_head_decoding as heads
import tiny
import tiny_qwen
import torch
import visual_tiny
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.lvlm import LvlmConfig
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.targets.causal.section import CausalTargetConfig
from draftsmith.models.targets.llamagen.files import load_llamagen, save_model
from draftsmith.models.targets.llamagen.section import LlamaGenTargetConfig, load_transformer
from draftsmith.models.targets.llava.model import LlavaDecoder
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.load import load_target
from draftsmith.models.targets.qwen.section import QwenTargetConfig
from draftsmith.trainers.train.engine import init_distributed
from transformers import LlamaConfig, LlamaForCausalLM

from pretend_cuda import device

ONE = torch.device("cuda", 1)
LAYERS = 4


def _causal():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=tiny.VOCAB, initializer_range=0.25)
    return LlamaForCausalLM(config).eval()


# Section, model, request, id of the placeholder, tokens.
FAMILIES = {
    "llava": (LlavaTargetConfig, "llava", tiny.llava(0, layers=LAYERS), tiny.request(1, 1), tiny.IMAGE_ID),
    "qwen2_5_vl": (QwenTargetConfig, "qwen2_5_vl", tiny_qwen.model("qwen2_5_vl", layers=LAYERS),
                   tiny_qwen.request("qwen2_5_vl"), None),
    "qwen3_vl": (QwenTargetConfig, "qwen3_vl", tiny_qwen.model("qwen3_vl", layers=LAYERS),
                 tiny_qwen.request("qwen3_vl"), None),
    "causal_lm": (CausalTargetConfig, "causal_lm", _causal(), tiny.request(2, 0), None),
}  # fmt: skip


def _folders():
    folder = Path(tempfile.mkdtemp())
    for name, (_, _, model, _, _) in FAMILIES.items():
        model.save_pretrained(folder / name)
    return folder


def _loaded(folder, name, place, **section):
    """The family's target, read from its files as a recipe's section says."""
    config, kind, model, _, image_token_id = FAMILIES[name]
    settings = config(kind=kind, path=str(folder / name), **section)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = tiny_qwen.TOKENS if name.startswith("qwen") else tiny.TOKENS if vocabulary == tiny.VOCAB else vocabulary
    return load_target(settings, folder / name, num_token_ids=tokens, image_token_id=image_token_id, device=place)


def _said(target, name, policy):
    """Greedy tokens; what drafts is a small model of text alone, on the target's device."""
    torch.manual_seed(3)
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
                         vocab_size=target.vocab_size, initializer_range=0.3)  # fmt: skip
    draft = LlamaForCausalLM(config).eval().to(target.device)
    decoder = LlavaDecoder(draft, num_token_ids=target.decoder.num_token_ids, never=target.decoder.never)
    drafter = tiny.IndependentProposal(decoder, "T", newline_id=5)
    decoding = Decoding(policy, Greedy(), Draw("top-k"), Warp(0.0), 10, ())
    return generate(target, drafter, FAMILIES[name][3], decoding, torch.Generator().manual_seed(0)).tokens


POLICIES = {"chain": Chain(3), "tree": Dynamic(total=12, depth=3, width=4)}


def spread():
    """Family and policy -> whether a target that `device_map: auto` spreads says what it says on the CPU, and where."""
    init_distributed()
    folder, result, places = _folders(), {}, {}
    for name in FAMILIES:
        whole, halves = _loaded(folder, name, torch.device("cpu")), _loaded(folder, name, ONE, device_map="auto")
        places[name] = sorted({str(p.device) for p in halves.decoder.model.parameters()})
        for policy_name, policy in POLICIES.items():
            result[f"{name} {policy_name}"] = _said(halves, name, policy) == _said(whole, name, policy)
    return {"equal": result, "places": places}


def straight():
    """Name -> of a model that is read straight onto the device: whether its weights are those that a CPU reads, where
    they lie, and how many parameters lay on the host before.
    """
    init_distributed()
    folder, result = _folders(), {}
    for name in FAMILIES:
        result[name] = _both(lambda place, name=name: _loaded(folder, name, place).decoder.model)
    drafts = {"eagle3": heads.settings_of("eagle3"), "medusa": MedusaConfig(kind="medusa", num_heads=2)}
    big = tiny.target(tiny.llava(0, layers=6))
    languages = {"cpu": big, "cuda": tiny.target(tiny.llava(0, layers=6).to(ONE))}
    for name, config in drafts.items():
        head = heads.loud_head(config, big) if name == "eagle3" else config.build(big)
        config.save(head, folder / name, {})
        result[name] = _both(lambda place, c=config, n=name: c.load(folder / n, languages[place.type]))
    generator = visual_tiny.llamagen("text", 0)
    save_model(generator, folder / "llamagen")
    result["llamagen"] = _both(lambda place: load_llamagen(folder / "llamagen", device=place))
    image_head = visual_tiny.EAGLE.build(visual_tiny.target(generator))
    visual_tiny.EAGLE.save(image_head, folder / "image eagle", {})
    draws = {"cpu": generator, "cuda": load_llamagen(folder / "llamagen", device=ONE)}
    targets = {place: visual_tiny.target(model) for place, model in draws.items()}
    result["image eagle"] = _both(lambda place: visual_tiny.EAGLE.load(folder / "image eagle", targets[place.type]))
    draft = LvlmConfig(kind="lvlm", path=str(folder / "llava"), dtype="bfloat16")
    targets = {"cpu": _loaded(folder, "llava", torch.device("cpu")), "cuda": _loaded(folder, "llava", ONE)}
    result["draft"] = _both(lambda place: draft.load(None, targets[place.type]))
    result["by way of the host"] = _both(lambda place: tiny.llava(0).to(place))
    return result


def stored():
    """Name -> types of weights that are stored in bfloat16: by `auto` on the device and on the CPU, and as told."""
    init_distributed()
    folder, result = Path(tempfile.mkdtemp()), {}
    for name, (_, _, model, _, _) in FAMILIES.items():
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder / name)
        held = {place: _loaded(folder, name, place).decoder.model for place in (ONE, torch.device("cpu"))}
        told = _loaded(folder, name, ONE, dtype="float16").decoder.model
        result[name] = [_types(one) for one in (*held.values(), told)]
    save_model(visual_tiny.llamagen("class", 0).to(torch.bfloat16), folder / "llamagen")
    shape = visual_tiny.llamagen("class", 0).config.model_dump(mode="json", exclude={"grid", "condition"})
    section = {"kind": "llamagen", "path": str(folder / "llamagen"), "shape": shape, "condition": "class", "vq": "none"}
    section["image_size"] = 16 * visual_tiny.llamagen("class", 0).config.grid
    settings = [LlamaGenTargetConfig(**section), LlamaGenTargetConfig(**section, dtype="float16")]
    held = [load_transformer(settings[0], {}, device=place) for place in (ONE, torch.device("cpu"))]
    result["llamagen"] = [_types(one) for one in (*held, load_transformer(settings[1], {}, device=ONE))]
    return result


def _types(model):
    return sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})


def _both(read):
    own = read(torch.device("cpu")).state_dict()
    moved, copied = [], device._copied

    def watched(to, source):
        if to.type == "cuda" and source.device.type == "cpu" and isinstance(source, torch.nn.Parameter):
            moved.append(source)
        return copied(to, source)

    device._copied = watched
    try:
        there = read(ONE).state_dict()
    finally:
        device._copied = copied
    return {
        "equal": there.keys() == own.keys() and all(torch.equal(there[n].cpu(), own[n]) for n in own),
        "same types": [value.dtype for value in there.values()] == [value.dtype for value in own.values()],
        "places": sorted({str(value.device) for value in there.values()}),
        "moved from the host": len(moved),
    }


def spilling():
    """What two devices that do not hold the model say: refused; and with `offload: cpu`, whether tokens are equal."""
    init_distributed()
    folder, result = _folders(), {}
    size = sum(p.numel() * 4 for p in FAMILIES["llava"][2].parameters())
    device.FREE_BYTES = size // 4
    try:
        _loaded(folder, "llava", ONE, device_map="auto")
    except UserError as error:
        result["refused"] = str(error)
    whole = _loaded(folder, "llava", torch.device("cpu"))
    spilled = _loaded(folder, "llava", ONE, device_map="auto", offload="cpu")
    result["places"] = sorted({str(p.device) for p in spilled.decoder.model.parameters()})
    result["equal"] = {n: _said(spilled, "llava", p) == _said(whole, "llava", p) for n, p in POLICIES.items() if p}
    return result
