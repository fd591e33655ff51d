"""`from: {path}`: a training starts from a head outside the run, and its first loss is that of its authors' formula."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import prints
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dflash_training import DflashTraining
from draftsmith.models.drafters.draft_vocabulary import likeliest_ids
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.eagle_images import ImageEagleTraining
from draftsmith.models.drafters.head_training import HeadTraining
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.drafters.msd import MsdConfig
from draftsmith.models.drafters.outside import load_start
from draftsmith.models.drafters.peagle import PeagleConfig, PeagleTraining
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.drafters.vispec import VispecConfig
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.export import export_drafter, files_of
from draftsmith.models.formats.heads import load_published
from draftsmith.models.formats.source import Target, llama_values, read_source
from draftsmith.models.targets.base import language_shape
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.serve.states_builder import open_target
from draftsmith.trainers.stages.encode import EncodeStage
from draftsmith.trainers.stages.train import TrainCodes, TrainStates
from fails import fails_with
from PIL import Image
from published_losses import Sample, Shape, eagle, eagle3, peagle, vispec
from safetensors.torch import load_file, save_file
from states_run import WORDS, context, losses, synthetic
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration
from visual_run import context as image_context
from visual_run import pictures, with_target
from visual_tiny import true_features

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "drafters"))
from test_dflash import reference

SEEN = {"image": "projected"}
TTT_READS = {"taps": (1, 2, 3), "draft_vocab_size": 90, "visual_slots": "read", "image": "placeholder"}
TTT = Eagle3Config(kind="eagle3", **TTT_READS)
KINDS = {"eagle": EagleConfig(kind="eagle", **SEEN), "eagle3": TTT, "msd": MsdConfig(kind="msd"),
         "vispec": VispecConfig(kind="vispec"),
         "peagle": PeagleConfig(kind="peagle", parallel_tokens=5, mask_token_id=7, **TTT_READS)}  # fmt: skip
JOINED = ("eagle3", "peagle")  # read three layers of the target
# Without noise, which is drawn; else as the papers have it.
TERMS = {
    "eagle": {"feature": 1.0, "token": 0.1, "noise": 0.0},
    "eagle3": {"token": 1.0, "decay": 0.8, "noise": 0.0},
    "msd": {"feature": 1.0, "token": 0.1, "noise": 0.0},
    "vispec": {"l1": 10.0, "listmle": 0.1, "noise": 0.0},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny LLaVA and ten records whose prompts are longer than EAGLE-3 has passes; every other one has a picture."""
    made = synthetic(tmp_path_factory.mktemp("world"))
    records = []
    for number in range(10):
        turns = [{"from": "human", "value": ("<image>\n" if number % 2 else "") + "Which? " * 6},
                 {"from": "gpt", "value": " ".join(WORDS[number : number + 3])}]  # fmt: skip
        record = {"id": f"long-{number}", "conversations": turns}
        if number % 2:
            Image.new("RGB", (30, 20), (20 * number, 40, 255 - 20 * number)).save(made.folder / f"images/l{number}.png")
            record["image"] = f"images/l{number}.png"
        records.append(record)
    (made.folder / "long.json").write_text(json.dumps(records))
    (made.folder / "text.json").write_text(json.dumps(records[::2]))
    processor = context(made, made.folder / "looked").processor()
    made.placeholders = [i for i in (processor.image_token_id, processor.video_token_id) if i is not None]
    made.model = LlavaForConditionalGeneration.from_pretrained(made.folder / "target").eval()
    return made


def loud(head, seed: int = 3):
    """Weights that say something, so that a wrong one is seen."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            is_norm = parameter.dim() == 1 and "norm" in name
            parameter.data = 1 + 0.2 * drawn if is_norm else drawn
    return head


def fresh(made, kind: str):
    """A head of this kind for the target of `made`."""
    config, text = KINDS[kind], made.model.config.text_config
    ids = likeliest_ids(torch.arange(text.vocab_size), 90) if kind in JOINED else None
    return loud(config.module(config.layer(language_shape(text)), ids))


def published(made, kind: str, folder, *, pickled: bool = True, state=None, **values):
    """A folder as the head's authors publish it: their names of settings, and the target's rows beside the weights."""
    head, text = fresh(made, kind), made.model.config.text_config
    folder.mkdir(parents=True)
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]} if kind in JOINED else {}
    taps |= {"pard_token": 7} if kind == "peagle" else {}
    settings = llama_values(head.shape, text) | {"rms_norm_eps": text.rms_norm_eps} | taps | values
    (folder / "config.json").write_text(json.dumps(settings))
    whole = dict(head.state_dict()) | {"embed_tokens.weight": made.model.get_input_embeddings().weight.detach().clone()}
    whole |= state or {}
    if pickled:
        torch.save(whole, folder / "pytorch_model.bin")
    else:
        save_file({name: value.contiguous() for name, value in whole.items()}, folder / "model.safetensors")
    return folder


def start(made, kind: str, folder, output, *, config=None, **changes):
    """One step from the head in `folder`, over all records at once; returns its loss and the batch."""
    seen = []
    settings = {
        "kind": "train", "from": {"path": str(folder)}, "source": {"kind": "online"},
        **({"objective": TERMS[kind]} if kind in TERMS else {}),
        "data": {"path": str(made.folder / ("text.json" if kind == "vispec" else "long.json")), "max_length": 256},
        "batch_size": 10, "steps": 1, "optim": {"lr": 1e-9}, "log_every": 1,
    }  # fmt: skip
    asked = context(made, output, config or KINDS[kind])
    module = {None: DflashTraining, "peagle": PeagleTraining}.get(kind, HeadTraining)
    forward = module.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "forward", lambda self, batch, states: (
            seen.append(batch), forward(self, batch, states))[1])  # fmt: skip
        TrainStates(**(settings | changes)).run(asked)
    return losses(output)[1], seen[0]


@torch.no_grad()
def by_hand(made, kind: str, state, batch) -> float:
    """The mean over supervised tokens, sample by sample, of the published formula over transformers' own target.

    Placeholders of pictures and clips never come, and their scores are left out on both sides.
    """
    model, text = made.model, made.model.config.text_config
    keys = state[("midlayer" if kind in JOINED else "layers.0") + ".self_attn.k_proj.weight"]
    shape = Shape(text.num_attention_heads, len(keys) // 16, text.rms_norm_eps)
    comes = torch.ones(text.vocab_size, dtype=torch.bool)
    comes[made.placeholders] = False
    lm_head, rows = model.lm_head.weight[comes], model.get_input_embeddings().weight
    if kind in JOINED:
        assert not state["t2d"][made.placeholders].any()
        state = state | {"t2d": state["t2d"][comes]}
    pixels = iter(batch.pixels)
    total = count = 0.0
    for row in range(len(batch.ids)):
        length = int(batch.attention_mask[row].sum())
        ids, seen = batch.ids[row, :length], batch.modality[row, :length] != 0
        images = next(pixels)[None] if seen.any() else None
        found = model(input_ids=ids[None], pixel_values=images, output_hidden_states=True)
        states = [layer[0] for layer in found.hidden_states]
        # EAGLE-3's servers give a picture's places the row of the placeholder.
        embeds = F.embedding(ids, rows) if kind in JOINED else states[0]
        sample = Sample(embeds, states[-1], states[-1] @ lm_head.T, batch.loss_mask[row, :length])
        if kind == "eagle3":
            total += eagle3(state, sample, torch.cat(states[1:4], -1), shape)
        elif kind == "peagle":
            total += peagle(state, sample, torch.cat(states[1:4], -1), shape, rows[7], tokens=5)
        elif kind == "vispec":
            total += vispec(state, sample, shape, lm_head)
        else:
            total += eagle(state, sample, shape, lm_head, direct=seen if kind == "msd" else None)
        count += int(sample.supervised[1:].sum())
    return float(total / count)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_of_a_published_head_is_that_of_its_authors_formula(made, tmp_path, kind):
    folder = published(made, kind, tmp_path / "theirs")
    loss, batch = start(made, kind, folder, tmp_path / "run")
    expected = by_hand(made, kind, torch.load(folder / "pytorch_model.bin", weights_only=True), batch)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-5) and expected > 0.1
    other, _ = start(made, kind, folder, tmp_path / "scratch", **{"from": "scratch"})
    assert abs(other - loss) > 1e-2, "fresh weights have another loss"
    before, after = fresh(made, kind).state_dict(), load_file(tmp_path / "run" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((after[n].float() - v.float()).abs().max() < 1e-6 for n, v in before.items())


def exported_to(made, engine: str, folder, destination, kind: str) -> None:
    """speculators' layout names its target by a Hub id, which a folder on disk has not."""
    if engine != "speculators":
        export_drafter(folder, destination, engine, target=str(made.folder / "target"), prompts="text")
        return
    whose = Target(made.model.config, "some/target")
    write_folder(destination, *files_of(engine, read_source(folder, whose)))


@pytest.mark.parametrize(("kind", "engine"), [
    ("eagle", "eagle"), ("eagle", "vllm"), ("eagle", "sglang"), ("eagle3", "vllm"),
    ("eagle3", "speculators"), ("msd", "eagle"), ("vispec", "eagle"), ("peagle", "vllm"), ("peagle", "speculators"),
])  # fmt: skip
def test_an_export_is_a_start_as_the_stage_that_it_was_made_of(made, tmp_path, kind, engine):
    """One step writes our layout; started from it, and from its export, the loss is the same."""
    start(made, kind, published(made, kind, tmp_path / "theirs"), tmp_path / "first")
    exported_to(made, engine, tmp_path / "first", tmp_path / "export", kind)
    ours, _ = start(made, kind, tmp_path / "first", tmp_path / "from-ours")
    exported, _ = start(made, kind, tmp_path / "export", tmp_path / "from-export")
    assert exported == pytest.approx(ours, rel=1e-6)


DFLASH = DflashConfig(
    kind="dflash", block_size=4, num_layers=2, taps=(1, 2, 3), mask_token_id=7,
    loss={"token_divergence": "ce", "gamma": 2.0},
)  # fmt: skip


def test_an_export_of_a_dflash_draft_is_a_start_as_the_stage_that_it_was_made_of(made, tmp_path):
    ours = tmp_path / "first"
    start(made, None, "", ours, config=DFLASH, **{"from": "scratch"})
    expected, _ = start(made, None, ours, tmp_path / "from-ours", config=DFLASH)
    for engine in ("vllm", "speculators"):
        exported_to(made, engine, ours, tmp_path / engine, "dflash")
        exported, _ = start(made, None, tmp_path / engine, tmp_path / f"from-{engine}", config=DFLASH)
        assert exported == pytest.approx(expected, rel=1e-6), engine


def test_the_first_loss_of_a_dflash_draft_is_that_of_its_blocks_by_hand(made, tmp_path):
    """Its published layout has no manifest; each block of each answer by plain loops, over transformers' target."""
    config = DFLASH
    asked = context(made, tmp_path / "looked", config)
    target = open_target(asked, asked.processor())
    head = loud(config.build(target))
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in head.state_dict().items()}, folder / "model.safetensors")
    values = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 4, "intermediate_size": 48,
              "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 2]}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    loss, batch = start(made, None, folder, tmp_path / "run", config=config)
    total, pixels, weights = 0.0, iter(batch.pixels), [math.exp(-k / 2) for k in range(3)]
    with torch.no_grad():
        for row in range(len(batch.ids)):
            length = int(batch.attention_mask[row].sum())
            ids, learned = batch.ids[row, :length], batch.loss_mask[row, :length].tolist()
            seen = batch.modality[row, :length]
            images = next(pixels)[None] if seen.any() else None
            layers = made.model(input_ids=ids[None], pixel_values=images, output_hidden_states=True).hidden_states
            joined = torch.cat([layers[number][0] for number in (1, 2, 3)], -1)
            anchors = [i for i in range(1, length - 1) if learned[i] and learned[i + 1]]
            for anchor in anchors:
                scores = reference(config, head, target, joined[:anchor], range(anchor), int(ids[anchor]), anchor)
                for k in range(3):
                    if anchor + 1 + k >= length or not all(learned[anchor : anchor + 2 + k]):
                        break
                    far = F.cross_entropy(scores[k], ids[anchor + 1 + k])
                    total += float(far) * sum(learned[1:]) / len(anchors) * weights[k] / sum(weights)
    assert loss == pytest.approx(total / batch.num_supervised, rel=1e-5)
    (folder / "config.json").write_text(json.dumps(values | {"block_size": 8}))
    with pytest.raises(UserError, match="made otherwise: block_size is 8, expected 4"):
        start(made, None, folder, tmp_path / "other", config=config)


# What is refused


def test_heads_of_another_kind_target_or_making_are_refused(made, tmp_path):
    """Each with the file's folder and what to write instead."""

    def refused(says, kind, folder, **changes):
        error = fails_with(says, start, made, kind, folder, tmp_path / f"run{len(list(tmp_path.iterdir()))}", **changes)
        return error

    eagle_folder = published(made, "eagle", tmp_path / "eagle", pickled=False)
    ttt_folder = published(made, "eagle3", tmp_path / "eagle3")
    refused("holds a head of kind eagle3, and eagle is asked for", "eagle", ttt_folder)
    refused("holds a head of kind eagle, and eagle3 is asked for", "eagle3", eagle_folder)
    refused("holds a head of kind vispec, and msd is asked for", "msd", published(made, "vispec", tmp_path / "vispec"))
    refused("not a head of kind vispec for this target: imadpt", "vispec", eagle_folder)
    rows = {"embed_tokens.weight": made.model.get_input_embeddings().weight.detach().flip(0)}
    refused("rows of embedding are not the target's", "msd", published(made, "msd", tmp_path / "other", state=rows))
    wide = {"layers.0.mlp.gate_proj.weight": torch.ones(60, 32), "layers.0.mlp.up_proj.weight": torch.ones(60, 32),
            "layers.0.mlp.down_proj.weight": torch.ones(32, 60)}  # fmt: skip
    error = refused("trained with intermediate_size 60, and the recipe's drafter has 48", "msd",
                    published(made, "msd", tmp_path / "wide", state=wide))  # fmt: skip
    assert "drafter: {kind: msd" in error.hint and "intermediate_size: 60" in error.hint
    config = MsdConfig(kind="msd", intermediate_size=60)
    start(made, "msd", tmp_path / "wide", tmp_path / "told", config=config)
    refused("trained with norm_eps 1e-05", "msd", published(made, "msd", tmp_path / "norms", rms_norm_eps=1e-5))
    moved = published(made, "eagle3", tmp_path / "moved", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    refused(r"layers that it reads \[1, 2, 4\], and the recipe's drafter has \[1, 2, 3\]", "eagle3", moved)
    normed = published(made, "eagle3", tmp_path / "normed", norm_output=True)
    refused("trained with norm_output True, and the recipe's drafter has False", "eagle3", normed)
    refused("is no directory, and cannot be fetched", "msd", tmp_path / "nowhere")
    sparrow = SparrowConfig(kind="sparrow", gap_share=0.0)
    refused("published heads that are read are EAGLE, EAGLE-3, P-EAGLE, MSD", "msd", eagle_folder, config=sparrow)


@pytest.mark.parametrize("size", [60, None])
@pytest.mark.parametrize("making", ["ours", "published"])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_another_draft_vocabulary_is_refused(made, tmp_path, kind, making, size):
    """A size that the folder has not is not trained silently as the folder's; null means all ids."""
    whole = TTT if kind == "eagle3" else DFLASH.model_copy(update={"draft_vocab_size": 90})
    name = kind if kind == "eagle3" else None
    start(made, name, "", tmp_path / "ours", config=whole, **{"from": "scratch"})
    if making == "published":
        exported_to(made, "vllm", tmp_path / "ours", tmp_path / "published", kind)
    asked = type(whole).model_validate(whole.model_dump(exclude_unset=True) | {"draft_vocab_size": size})
    with pytest.raises(UserError, match="draft_vocab_size is 90, expected " + ("60" if size else "null")):
        start(made, name, tmp_path / making, tmp_path / "other", config=asked)
    start(made, name, tmp_path / making, tmp_path / "same", config=whole)


def test_a_head_of_a_base_model_starts_for_its_fine_tuned_one_where_the_recipe_says_so(made, tmp_path):
    """Its copy of the embedding, or the target that its manifest names, is another: refused unless asked for."""
    rows = {"embed_tokens.weight": made.model.get_input_embeddings().weight.detach() + 0.1}
    theirs = published(made, "msd", tmp_path / "theirs", state=rows)
    start(made, "msd", theirs, tmp_path / "first", **{"from": {"path": str(theirs), "other_target": True}})
    ours = tmp_path / "first"
    manifest = json.loads((ours / "draftsmith.json").read_text())
    manifest["target"] |= {"path": "some/base-model"}
    (ours / "draftsmith.json").write_text(json.dumps(manifest))
    for folder in (theirs, ours):
        asked = context(made, tmp_path / f"refused-{folder.name}", KINDS["msd"])
        target = asked.target.model_copy(update={"path": "some/tuned-model"})
        identity = TargetIdentity(target.model_dump(mode="json"))
        loaded = open_target(asked, asked.processor())
        with pytest.raises(UserError, match=r"embedding are not the target's|target.path is some/base-model") as error:
            load_start(KINDS["msd"], folder, loaded, identity, load_published)
        assert "other_target: true" in error.value.hint
        head = load_start(KINDS["msd"], folder, loaded, identity, load_published, other_target=True)
        assert all((head.state_dict()[name] - value).abs().max() < 1e-6
                   for name, value in fresh(made, "msd").state_dict().items())  # fmt: skip


def test_a_section_of_another_package_without_a_path_loads_its_start_itself(tmp_path):
    """It derives from `DrafterConfig` alone, which has no `begin_from`."""
    asked = SimpleNamespace(publishes_as_ours=True, load=lambda folder, target, **more: (folder, more["dtype"]))
    whose = SimpleNamespace(embedding=None)
    found = load_start(asked, tmp_path, whose, TargetIdentity({}), load_published)
    assert found == (tmp_path, torch.float32)


RECIPE = ["recipe=eagle3-qwen2.5-vl-7b"]


def test_a_start_belongs_to_a_head_and_stands_alone():
    for settings, says in (
        (["stages.pictures.from={path: a/b}", "drafter.path=c/d"], "from.path: stands beside drafter.path, c/d"),
        (["stages.pictures.from={pth: a/b}"], "stages.pictures.from.pth: unknown key"),
        (["stages.pictures.from=3"], "stages.pictures.from: input should be a valid string"),
    ):  # fmt: skip
        fails_with(re.escape(says), load, [*RECIPE, *settings])
    fails_with("this stage trains a draft LVLM", load, ["recipe=llava15-68m", "stages.pretrain.from={path: a/b}"])
    with pytest.raises(UserError, match="is a head's, and this stage trains the target"):
        load(["recipe=demo/video", "stages.target.from={path: a/b}"])


def test_its_files_are_part_of_the_stages_fingerprint_and_a_dry_run_names_it(made, tmp_path, capsys):
    folder = published(made, "eagle3", tmp_path / "theirs")
    settings = [*RECIPE, f"stages.pictures.from={{path: {folder}}}", "drafter.taps=[1, 2, 3]"]

    def fingerprint(settings=settings):
        loaded = load(settings)
        (one,) = (p for p in plan(loaded.recipe, loaded.path) if p.name == "pictures")
        assert "drafter" not in one.inputs
        return one.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    weights = folder / "pytorch_model.bin"
    state = torch.load(weights, weights_only=True)
    torch.save(state | {"fc.weight": state["fc.weight"] + 1}, weights)
    assert fingerprint() != before
    assert fingerprint([*RECIPE, "stages.pictures.from={path: a/b}"]) != fingerprint(
        [*RECIPE, "stages.pictures.from={path: a/b, revision: main}"]
    )
    own, hub = (prints(capsys, [*s, "dry_run=true"]) for s in (settings, [*RECIPE, "stages.pictures.from={path: a/b}"]))
    assert f"  starts from {folder} (an engine's or its authors' layout)\n" in own
    assert "  starts from a/b (not on this machine: a Hub id" in hub


# Image generators


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A tiny LlamaGen, and the codes and features of six pictures."""
    folder = tmp_path_factory.mktemp("drawn")
    made = with_target(folder)
    made.shards = folder / "features" / "shards"
    EncodeStage(kind="encode", source={"kind": "folder", "folder": str(pictures(folder / "in", 6))}).run(
        image_context(folder / "features", made.target, made.inputs)
    )
    made.model.eval()
    return made


def draw_start(made, folder, output, config):
    """As `start`, of an image generator's head."""
    seen = []
    stage = TrainCodes(
        kind="train", data={"kind": "codes", "path": str(made.shards)}, batch_size=6, steps=1, log_every=1,
        optim={"lr": 1e-9}, condition_dropout=0.0, **{"from": {"path": str(folder)}},
    )  # fmt: skip
    forward = ImageEagleTraining.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageEagleTraining, "forward", lambda self, batch, states: (
            seen.append(batch), forward(self, batch, states))[1])  # fmt: skip
        stage.run(image_context(output, made.target, made.inputs, drafter=config))
    return losses(output)[1], seen[0]


def test_lanterns_head_starts_with_its_own_rows_and_its_first_loss_is_eagles(drawn, tmp_path):
    """SmoothL1 and 0.1 times the cross-entropy over each code but the first, sample by sample, unbatched."""
    made, folder = drawn, tmp_path / "theirs"
    config = EagleConfig(kind="eagle", loss={"noise": 0.0}, norm_eps=2e-6)
    target = made.target.generator(made.inputs, device=torch.device("cpu")).target
    head = loud(config.build(target))
    rows = torch.randn(head.embed_tokens.weight.shape, generator=torch.Generator().manual_seed(5))
    folder.mkdir()
    torch.save(dict(head.state_dict()) | {"embed_tokens.weight": rows}, folder / "pytorch_model.bin")
    shape = head.shape
    values = {"num_hidden_layers": 1, "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
              "num_attention_heads": shape.num_heads, "rms_norm_eps": 2e-6, "input_type": "t2i"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    loss, batch = draw_start(made, folder, tmp_path / "run", config)
    assert torch.equal(load_file(tmp_path / "run" / "model.safetensors")["embed_tokens.weight"], rows)
    head.share_embedding(rows)
    condition, total, count = made.model.config.num_condition_tokens, 0.0, 0
    with torch.no_grad():
        for codes, asked in zip(batch.codes, batch.conditions, strict=True):
            features = true_features(made.model, asked, 1, codes.tolist())[0]
            tokens = torch.tensor([0] * (condition - 1) + codes.tolist())[None]
            length = len(features) - 1
            mask = torch.ones(length, length).tril().bool()
            ours = head.predict(features[None, :-1], tokens, torch.arange(length), mask)[0, condition - 1 : -1]
            goal = features[condition:-1]
            away = F.smooth_l1_loss(ours, goal, reduction="none").mean(-1)
            scores, theirs = made.model.output(ours), made.model.output(goal)
            total += float((away - 0.1 * (theirs.softmax(-1) * scores.log_softmax(-1)).sum(-1)).sum())
            count += len(goal)
    assert loss == pytest.approx(total / count, rel=1e-5)
    with pytest.raises(UserError, match="trained with norm_eps 2e-06, and the recipe's drafter has 1e-06"):
        draw_start(made, folder, tmp_path / "other", EagleConfig(kind="eagle"))
    (folder / "config.json").write_text(json.dumps(values | {"input_type": "c2i"}))
    fails_with("codes of class-conditional pictures", draw_start, made, folder, tmp_path / "class", config)
    with pytest.raises(UserError, match="published heads that are read are"):
        draw_start(made, folder, tmp_path / "medusa", MedusaConfig(kind="medusa", num_heads=2))
