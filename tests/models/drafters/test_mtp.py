"""Native MTP heads: transformers' own layer, the same answers, training as decoding runs, and the target's folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.core.errors import Refused, UserError
from draftsmith.core.pretrained import Checkpoint
from draftsmith.eval.engines.ours import Exported
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.mtp import PREFIX, MtpConfig
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.targets.base import language_shape
from draftsmith.recipes.config.load import load
from exact import chances, check_drawn
from fails import fails_with
from family_checks import all_logits, longer
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tensors import learn, same_weights
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

MODEL = tiny_qwen.model("qwen3_5")
TARGET = tiny_qwen.target(MODEL)
CONFIG = MtpConfig(kind="mtp")
SEEN = tiny_qwen.request("qwen3_5")
INDEX = "model.safetensors.index.json"


def loud(seed=0, config=CONFIG):
    """A head with weights of every size, so that nothing drops out."""
    torch.manual_seed(seed)
    head = config.build(TARGET)
    for weight in head.parameters():
        weight.data = torch.randn_like(weight) / (weight.shape[-1] ** 0.5 if weight.dim() > 1 else 5)
    return head


@pytest.fixture(scope="module")
def learned():
    """A head that trained on the target's answers to the request, and its losses."""
    head, generator = loud(), torch.Generator().manual_seed(0)
    settings = Decoding(Chain(1), Sampling(), Draw("sample"), Warp(1.0, top_k=3), 3, ())
    answers = [generate(TARGET, CONFIG.drafter(head, TARGET), SEEN, settings, generator).tokens for _ in range(12)]
    batch = tiny_qwen.batch_of(*(longer(SEEN, answer) for answer in answers))
    states = TARGET.states(batch, CONFIG.taps_for(TARGET.shape, training=True))
    return head, learn(CONFIG.training_objective(head.train(), TARGET), batch, states, steps=60, lr=5e-3)


def test_it_is_a_layer_of_the_target_between_norms():
    """transformers' own layer, norms and rotation by time, row and column."""
    head, text = loud(), MODEL.config.get_text_config()
    width, eps = text.hidden_size, text.rms_norm_eps
    layer = Qwen3_5DecoderLayer(text, 3)  # of four layers the last one attends
    layer.load_state_dict(head.layers[0].state_dict())

    def norm(module):
        theirs = Qwen3_5RMSNorm(width, eps)
        theirs.load_state_dict(module.state_dict())
        return theirs

    embeds, states = torch.randn(2, 1, 9, width)
    positions = torch.randint(0, 12, (3, 1, 9))
    joined = torch.cat([norm(head.pre_fc_norm_embedding)(embeds), norm(head.pre_fc_norm_hidden)(states)], dim=-1)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    turned = Qwen3_5TextRotaryEmbedding(text)(embeds, positions)
    theirs = layer(head.fc(joined), position_embeddings=turned, attention_mask=causal)
    assert torch.equal(head(embeds, states, positions, None), norm(head.norm)(theirs))


@pytest.mark.parametrize("policy", [Chain(3), Dynamic(total=12, depth=3, width=4)], ids=["chain", "tree"])
def test_answers_are_the_targets(policy):
    made = generate(TARGET, CONFIG.drafter(loud(), TARGET), SEEN, greedy(policy, 16))
    assert made.tokens == tiny_qwen.reference(MODEL, "qwen3_5", SEEN, 16)
    assert len(made.cycles) < 16, "nothing was accepted, so that nothing was tested"


def test_draws_are_distributed_as_the_targets(learned):
    """Two tokens at temperature 1, the second of which needs the head's exact q."""
    warp, drafter, generator = Warp(1.0, top_k=3), CONFIG.drafter(learned[0], TARGET), torch.Generator().manual_seed(3)
    settings = Decoding(Chain(2), Sampling(), Draw("sample"), warp, 3, ())
    expected = chances(lambda ids: warp(all_logits(TARGET, longer(SEEN, ids))[-1]), 2)
    results = check_drawn(expected, lambda: generate(TARGET, drafter, SEEN, settings, generator), 250, least=0)
    assert {min(cycle.num_accepted, 1) for result in results for cycle in result.cycles} == {0, 1}


def test_training_reads_what_decoding_reads():
    """Passes of training are a chain's steps, their outputs the states of the next ones."""
    head, batch = loud(), tiny_qwen.batch_of(SEEN)
    trained = CONFIG.training_objective(head, TARGET)
    states = TARGET.states(batch, CONFIG.taps_for(TARGET.shape, training=True))
    filled, positions = trained.fill(batch, states)
    passes = trained.passes(filled, positions, batch)
    assert len(passes) == 3
    proposal = CONFIG.drafter(head, TARGET)
    ids = SEEN.ids.tolist()
    prompt = replace(SEEN, ids=SEEN.ids[:-3], modality=SEEN.modality[:-3])
    _, step = TARGET.prefill(prompt, proposal.taps, capacity=8)
    proposal.start(prompt, step, Warp(1.0), capacity=8)
    proposal.begin(ids[-3])
    drafted = [proposal.root(), proposal.expand([-1], torch.tensor([ids[-2]]))[0]]
    drafted.append(proposal.expand([0], torch.tensor([ids[-1]]))[0])
    place = filled.layout.index[0].tolist().index(len(ids) - 4)
    for number, q in enumerate(drafted):
        expected = TARGET.scores(passes[number][0, place + number]).softmax(-1)
        torch.testing.assert_close(q, expected, atol=1e-5, rtol=0)


def test_it_learns(learned):
    head, losses = learned
    assert losses[-1] < 0.75 * losses[0]
    assert all(weight.grad is not None and weight.grad.any() for weight in head.parameters())


# ---- the target's folder


def shipped(folder: Path, head=None, *, shards: bool = False) -> Path:
    """A target's folder, with a head as Qwen ships it."""
    MODEL.save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    (folder / "notes.txt").write_text("beside")
    if head is None:
        return folder
    state = {PREFIX + name: value for name, value in head.state_dict().items()}
    if shards:
        save_file(state, folder / "extra.safetensors")
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(state, "extra.safetensors")
        (folder / INDEX).write_text(json.dumps(index))
    else:
        path = folder / "model.safetensors"
        save_file(load_file(path) | state, path, {"format": "pt"})
    return folder


def identity(folder) -> TargetIdentity:
    return TargetIdentity({"kind": "qwen3_5", "path": str(folder)})


def trained(folder: Path, head, target: Path) -> Path:
    CONFIG.save(head, folder, CONFIG.manifest(TARGET, identity(target)))
    return folder


@pytest.mark.parametrize("shards", [False, True])
def test_the_shipped_head_needs_no_training(tmp_path, shards):
    head = loud()
    place = shipped(tmp_path / "target", head, shards=shards)
    assert CONFIG.provides() == {"drafter"}
    assert same_weights(head, CONFIG.load(None, TARGET, identity=identity(place)))
    other = shipped(tmp_path / "finetuned")
    named = MtpConfig(kind="mtp", path=str(place))
    assert same_weights(head, named.load(None, TARGET, identity=identity(other)))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("had", [False, True], ids=["no head", "a head"])
def test_a_trained_head_goes_back_into_the_folder(tmp_path, shards, had):
    place = shipped(tmp_path / "target", loud(1) if had else None, shards=shards)
    new = loud(2)
    export = export_drafter(trained(tmp_path / "stage", new, place), tmp_path / "out", "vllm")
    read = {PREFIX + name: value for name, value in Checkpoint(tmp_path / "out").under(PREFIX).items()}
    assert {PREFIX + name for name in new.state_dict()} == set(read)
    assert same_weights(new, CONFIG.load(None, TARGET, identity=identity(tmp_path / "out")))
    # The target is as it was, for transformers and in each file.
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    asked = tiny_qwen.published("qwen3_5", SEEN)
    with torch.no_grad():
        assert torch.equal(loaded(**asked).logits, MODEL(**asked).logits)
    held = [name for path in (tmp_path / "out").glob("*.safetensors") for name in load_file(path)]
    assert len(held) == len(set(held)), "a tensor stands twice"
    assert set(held) == set(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"])
    assert (tmp_path / "out" / "notes.txt").read_text() == "beside"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    speculative = json.loads(export.command.split("--speculative-config ")[1].strip("'"))
    assert export.command.startswith(f"vllm serve {tmp_path / 'out'} ")
    assert speculative == {"method": "mtp", "num_speculative_tokens": 3}
    fails_with("in bfloat16 alone", Exported, tmp_path / "out")


def test_a_folder_without_a_head(tmp_path):
    place = shipped(tmp_path / "target")
    fails_with("transformers drops it where it saves a model", CONFIG.load, None, TARGET, identity=identity(place))
    fails_with("comes from no folder", CONFIG.load, None, TARGET, identity=TargetIdentity({"kind": "qwen3_5"}))
    head = {PREFIX + name: value for name, value in loud().state_dict().items()}
    head[f"{PREFIX}fc.weight"] = torch.zeros(3, 3)
    save_file(head, place / "model.safetensors")
    fails_with("does not fit this target", CONFIG.load, None, TARGET, identity=identity(place))


def test_other_engines_have_no_layout(tmp_path):
    stage = trained(tmp_path / "stage", loud(), shipped(tmp_path / "target"))
    with pytest.raises(UserError, match="a part of the target's folder, which --to vllm writes"):
        export_drafter(stage, tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_kind_is_refused(tmp_path):
    place = shipped(tmp_path / "target")
    stage = trained(tmp_path / "stage", loud(), place)
    manifest = json.loads((stage / "draftsmith.json").read_text())
    (stage / "draftsmith.json").write_text(json.dumps(manifest | {"method": "eagle"}))
    fails_with("method is eagle, expected mtp", CONFIG.load, stage, TARGET, identity=identity(place))


@pytest.mark.parametrize(("kind", "changes", "words"), [
    ("qwen3_vl", {}, "ships no head for several tokens that is known here"),
    ("qwen3_5_moe", {}, "has experts"),
    ("qwen3_5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2"),
    ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings True"),
])  # fmt: skip
def test_targets_without_such_a_head(kind, changes, words):
    config = tiny_qwen.model(kind).config.get_text_config()
    for name, value in changes.items():
        setattr(config, name, value)
    fails_with(words, CONFIG.check, language_shape(config))


@pytest.mark.parametrize("settings", [{"draft_vocab_size": 30}, {"positions": "flat"}, {"rope_theta": 5e5}])
def test_what_the_target_fixes_is_no_setting(settings):
    with pytest.raises((ValidationError, Refused), match="one of the target's own layers"):
        MtpConfig(kind="mtp", **settings)


def test_other_weights_are_named_in_the_drafters_section():
    """The shipped head is always there, so a stage's `from: {path}` would be a second start."""
    with pytest.raises(UserError, match="the target's own MTP head, which nothing reads then") as error:
        load(["recipe=mtp-qwen3.5-9b", "stages.text.from={path: somewhere}"])
    assert "name the weights in drafter.path" in error.value.hint
