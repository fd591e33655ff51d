"""Heads that read states, against recorded numbers: Sparrow's formulas, MSD's and ViSpec's own modules."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.nouns import IMAGE, TEXT
from draftsmith.core.states import StatesBatch
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.reading import (
    EAGLE_LOSS,
    TEXT_STAGE,
    MsdConfig,
    ReadingObjective,
    SparrowConfig,
    VispecConfig,
    reading_proposal,
    reading_training,
)
from draftsmith.models.drafters.reading.files import build_reading_head
from draftsmith.models.drafters.reading.slots import base_positions, lay_out
from draftsmith.models.targets.base import Prompt, TargetStep
from reading_tiny import Tables, arrays, text_config

OUTPUT, LOSS = 3e-4, 1e-4


def close(found, expected, tolerance=OUTPUT):
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=0)


def relatively(found, expected, tolerance=1e-3):
    assert (found.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


def batch_of(ids, visual, loss_mask, feature, layers) -> StatesBatch:
    ids, visual, loss_mask = ids.view(1, -1), visual.view(1, -1), loss_mask.view(1, -1)
    length = ids.shape[1]
    return StatesBatch(
        ids, torch.ones_like(visual), loss_mask, torch.where(visual, IMAGE, TEXT).to(torch.int8),
        torch.arange(length).view(1, 1, -1), feature.view(1, length, -1),
        ("r",), {layer: states.view(1, length, -1) for layer, states in layers.items()}, (0,),
    )  # fmt: skip


class Recorder(torch.nn.Module):
    """Keeps what goes into a head's layer and what comes out of it."""

    def __init__(self, head):
        super().__init__()
        self.inputs, self.outputs = [], []
        head.layers[0].register_forward_hook(lambda _, inputs, output: self.keep(inputs[0], output))

    def keep(self, inputs, output):
        self.inputs.append(inputs.detach()[0])
        self.outputs.append(output.detach()[0])


# ---- Sparrow


def sparrow(norm: bool, **settings):
    given = arrays("sparrow")
    config = SparrowConfig(kind="sparrow", input_norm=norm, **settings)
    target = Tables(text_config(), given["embedding"], given["head_weight"])
    head = build_reading_head(config, target.config)
    weights = {n.removeprefix("w."): v for n, v in given.items() if n.startswith("w.")}
    named = {}
    for name, value in weights.items():
        part = "self_attn." if name[1:6] == "_proj" else "mlp." if "_proj" in name else ""
        named[name if name.startswith("fc") else f"layers.0.{part}{name}"] = value
    if not norm:
        del named["layers.0.input_layernorm.weight"]
    head.load_state_dict(named)
    batch = batch_of(given["token_ids"], given["visual_mask"], given["generated_mask"], given["H"], {4: given["M"]})
    return SimpleNamespace(given=given, config=config, target=target, head=head, batch=batch)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("rule", ["all", "after_text"])
def test_sparrows_two_passes(norm, rule):
    case = sparrow(norm, replace=rule)
    given, prefix = case.given, "" if norm else "nonorm_"
    recorder = Recorder(case.head)
    training = reading_training(case.head, case.target, case.config).eval()
    loss = training(case.batch)
    close(recorder.inputs[0], given["z_init"])
    close(recorder.outputs[0], given[f"{prefix}pass0"])
    close(recorder.inputs[1], given[f"{prefix}pass1_input_replace_{rule}"])
    close(recorder.outputs[1], given[f"{prefix}pass1_replace_{rule}"])
    assert int(loss.num_tokens) == int(given["slot_in_loss"].sum()) == 5
    mean = loss.loss_sum / loss.num_tokens
    relatively(mean, given[f"{prefix}loss_replace_{rule}"], LOSS)
    mean.backward()
    if norm:
        relatively(case.head.fc.weight.grad, given[f"grad_fc_weight_replace_{rule}"])
        relatively(case.head.layers[0].self_attn.v_proj.weight.grad, given[f"grad_v_proj_weight_replace_{rule}"])


def test_sparrows_slots():
    """Which token, state and goal each slot has, one row of the recorded table for each."""
    case = sparrow(True)
    given, batch = case.given, case.batch
    filled, _ = reading_training(case.head, case.target, case.config).eval().fill(batch)
    layout, table = filled.layout, given["slot_table"]
    slot, token, token_id, state, goal, _, visual, in_loss, replaced = table.T
    assert torch.equal(layout.index[0], slot) and torch.equal(layout.pick(batch.ids, 1)[0], token_id)
    assert torch.equal(token, slot + 1) and torch.equal(goal, token)
    assert layout.visual[0].tolist() == given["slot_is_visual"].tolist() == visual.bool().tolist()
    kept = (layout.pick(batch.loss_mask, 1) & ~layout.visual)[0]
    assert kept.tolist() == given["slot_in_loss"].tolist() == in_loss.bool().tolist()
    close(filled.states[0], given["H"][state])
    close(layout.pick(batch.feature, 1)[0], given["H"][goal])
    text = ~layout.visual[0]
    assert (layout.follows_text[0] & text).tolist() == (replaced.bool() & text).tolist()
    window = lay_out("none", batch.modality, batch.mask)
    assert torch.equal(window.index[0], given["text_slots"])
    places = base_positions("compact", window, None, visual_held=True)
    assert torch.equal(places[0], given["compact_positions"])


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("rule", ["all", "after_text"])
def test_sparrows_terms(rule, norm):
    given, prefix = arrays("sparrow"), "" if norm else "nonorm_"
    for number in (0, 1):
        for name, objective in (("l1", ReadingObjective(l1=1.0)), ("listmle", ReadingObjective(listmle=1.0))):
            case = sparrow(norm, replace=rule)
            training = reading_training(case.head, case.target, case.config, objective).eval()
            training.weights = [float(number == step) for step in (0, 1)]
            with torch.no_grad():
                loss = training(case.batch)
            relatively(loss.loss_sum / loss.num_tokens, given[f"{prefix}{name}_replace_{rule}"][number], LOSS)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("positions", ["flat", "compact"])
@torch.no_grad()
def test_sparrows_window(norm, positions):
    """Prefill of the text slots alone, then three drafted steps through the contract."""
    case = sparrow(norm, positions=positions)
    given, prefix = case.given, "" if norm else "nonorm_"
    recorder = Recorder(case.head)
    ids = given["token_ids"]
    modality = torch.where(given["visual_mask"], IMAGE, TEXT).to(torch.int8)[None, :-1]
    places = torch.arange(len(ids) - 1)[None]
    prompt = Prompt(ids[None, :-1], torch.ones_like(modality).bool(), places, Guidance(), modality)
    prefill = TargetStep(torch.zeros(1, 44), given["H"][None, :-1], prompt=prompt)
    proposal = reading_proposal(case.head, case.target, case.config)
    proposal.start(None, prefill, Warp(), capacity=8)
    proposal.begin(int(ids[-1]))
    q = proposal.root()
    close(torch.cat(recorder.outputs), given[f"{prefix}vata_{positions}"])
    assert proposal.num_held == len(given["text_slots"]) == 12
    parent = ROOT
    for step, token in enumerate(given[f"{prefix}draft_{positions}_tokens"].tolist()):
        assert int(q.argmax()) == token
        (q,) = proposal.expand([parent], torch.tensor([token]))
        close(recorder.outputs[-1][0], given[f"{prefix}draft_{positions}_states"][step])
        parent = step


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@torch.no_grad()
def test_masked_visual_keys_are_dropped_slots(norm):
    case = sparrow(norm)
    given, text = case.given, case.given["text_slots"]
    filled, positions = reading_training(case.head, case.target, case.config).eval().fill(case.batch)
    count = positions.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril() & ~given["slot_is_visual"] | torch.eye(count).bool()
    out = case.head(filled.embeds, filled.fused(case.head), positions, mask, direct=filled.direct)[0]
    prefix = "" if norm else "nonorm_"
    close(out, given[f"{prefix}vata_masked_keys_full_length"])
    close(out[text], given[f"{prefix}vata_flat"])


# ---- MSD


def msd(name: str, **settings):
    given = arrays("msd_head", f"{name}_")
    qwen = name == "qwen2_vl"
    config = MsdConfig(kind="msd", replace="all", **settings)
    text = text_config(qwen=qwen, vocab=45, intermediate=48, kv_heads=2 if qwen else 4)
    target = Tables(text, given["w.embed_tokens.weight"], given["head_weight"])
    head = build_reading_head(config, text)
    head.load_state_dict({n[2:]: v for n, v in given.items() if n.startswith("w.") and "embed" not in n})
    return given, config, target, head


def shifted_rows(given, target):
    """The embeddings that the published module was handed, as rows of a table and ids into it, and layer 0."""
    shifted = given["inputs_embeds_shifted"][0]
    # Slot j reads token j + 1: the first place's embedding is never read.
    target.embedding = torch.cat([target.embedding, shifted])
    ids = torch.arange(len(shifted)) + len(target.embedding) - len(shifted)
    return torch.cat([ids[:1], ids]), torch.cat([shifted[:1], shifted])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_msd(name):
    given, config, target, head = msd(name, mtp_steps=1)
    rows, layer = shifted_rows(given, target)
    first, end = given["visual_slots"].tolist()
    visual = torch.zeros(len(rows), dtype=torch.bool)
    visual[first + 1 : end + 1] = True
    state = torch.cat([given["hidden_states"][0], given["target"][0, -1:]])
    loss_mask = torch.cat([torch.zeros(1, dtype=torch.bool), given["loss_mask"][0]])
    batch = batch_of(rows, visual, loss_mask, state, {0: layer})
    recorder = Recorder(head)
    with torch.no_grad():
        reading_training(head, target, config, ReadingObjective(l1=1.0)).eval()(batch)
    close(recorder.outputs[0], given["out"][0])
    close(recorder.outputs[1], given["out_second_pass"][0])
    # The loss counts the published goal, one place further on than the state.
    goal = torch.cat([torch.zeros(1, 32), given["target"][0]])
    for objective, expected in (
        (ReadingObjective(feature=1.0, mtp_steps=0), given["smooth_l1"]),
        (ReadingObjective(token=1.0, mtp_steps=0), given["soft_ce"]),
        (EAGLE_LOSS.model_copy(update={"mtp_steps": 0}), given["loss"]),
    ):
        training = reading_training(head, target, config, objective).eval()
        filled, positions = training.fill(batch)
        keep = given["loss_mask"]
        training.fill = lambda _, found=(filled, positions): found
        with torch.no_grad():
            loss = training(batch_of(rows, visual, loss_mask, goal, {0: layer}))
        assert int(loss.num_tokens) == int(keep.sum())
        relatively(loss.loss_sum / loss.num_tokens, expected, LOSS)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
@torch.no_grad()
def test_msd_on_text(name):
    given, config, target, head = msd(name)
    ids = torch.cat([torch.zeros(1, dtype=torch.int64), given["text_ids_shifted"][0]])
    state = torch.cat([given["text_hidden_states"][0], torch.zeros(1, 32)])
    nothing = torch.zeros(len(ids), dtype=torch.bool)
    recorder = Recorder(head)
    reading_training(head, target, config).eval()(
        batch_of(ids, nothing, nothing, state, {0: torch.zeros(len(ids), 32)})
    )
    close(recorder.outputs[0], given["text_out"][0])


# ---- ViSpec


def vispec(**settings):
    given = arrays("vispec_head")
    config = VispecConfig(kind="vispec", **settings)
    text = text_config(vocab=50, intermediate=56)
    target = Tables(text, given["w.embed_tokens.weight"], given["head_weight"])
    head = build_reading_head(config, text)
    head.load_state_dict({n[2:]: v for n, v in given.items() if n.startswith("w.") and "embed" not in n})
    return given, config, target, head


def vispec_batch(given, target, *, image: bool = True):
    rows, layer = shifted_rows(given, target)
    visual = torch.zeros(len(rows), dtype=torch.bool)
    if image:
        visual[1:] = torch.cat([given["image_mask"][0, 1:], torch.zeros(1, dtype=torch.bool)])
    loss_mask = torch.cat([torch.zeros(1, dtype=torch.bool), given["loss_mask"][0]])
    # H of place j enters slot j, and goals are those of the next place.
    state = torch.cat([given["hidden_states"][0], given["target"][0, -1:]])
    return batch_of(rows, visual, loss_mask, state, {0: layer})


def full_length(layout, outputs, length):
    whole = torch.zeros(length, outputs.shape[-1])
    whole[layout.index[0][layout.real[0]]] = outputs[layout.real[0]]
    return whole


def test_vispec():
    given, config, target, head = vispec()
    batch = vispec_batch(given, target)
    recorder = Recorder(head)
    training = reading_training(head, target, config).eval()
    filled, positions = training.fill(batch)
    assert positions[0].tolist() == given["kept_positions"].tolist()
    close(filled.image[0, -1], given["global_image_vector"])
    loss = training(batch)
    length = len(batch.ids[0]) - 1
    for number, name in enumerate(("pass1", "pass2")):
        close(full_length(filled.layout, recorder.outputs[number], length), given[name][0])
    shifted = torch.cat([given["hidden_states"][0, :1], given["pass1"][0, :-1].float()])
    close(shifted, given["pass2_input"][0])
    mean = loss.loss_sum / loss.num_tokens
    relatively(mean, given["stage2_loss"], LOSS)
    for number, name in enumerate(("stage2_pass1", "stage2_pass2")):
        alone = reading_training(head, target, config).eval()
        alone.weights = [float(number == step) for step in (0, 1)]
        with torch.no_grad():
            found = alone(batch)
        relatively(found.loss_sum / found.num_tokens, given[name], LOSS)
    mean.backward()
    relatively(head.fc.weight.grad, given["grad_fc_weight"])
    relatively(head.layers[0].self_attn.q_proj.weight.grad, given["grad_q_proj_weight"])
    relatively(head.img_fc.weight.grad, given["grad_img_fc_weight"])


@torch.no_grad()
def test_vispecs_first_stage_and_text():
    given, config, target, head = vispec()
    batch = vispec_batch(given, target)
    for objective, name in (
        (TEXT_STAGE, "stage1_loss"),
        (ReadingObjective(feature=1.0, mtp_steps=0), "stage1_smooth_l1"),
        (ReadingObjective(token=1.0, mtp_steps=0), "stage1_soft_ce"),
        (ReadingObjective(listmle=1.0, mtp_steps=0), "listmle_top10"),
        (ReadingObjective(l1=1.0, mtp_steps=0), "l1_prob"),
    ):
        loss = reading_training(head, target, config, objective).eval()(batch)
        relatively(loss.loss_sum / loss.num_tokens, given[name], LOSS)
    given, config, target, head = vispec()
    recorder = Recorder(head)
    reading_training(head, target, config).eval()(vispec_batch(given, target, image=False))
    close(recorder.outputs[0], given["text_only"][0])


@torch.no_grad()
def test_vispec_in_use():
    """A prefix with its picture, then two tokens with the head's own outputs as states."""
    given, config, target, head = vispec()
    rows, layer = shifted_rows(given, target)
    count = int(given["prefix_length"])
    first, end = given["visual_slots"].tolist()
    modality = torch.full((1, count), TEXT, dtype=torch.int8)
    modality[0, first + 1 : end + 1] = IMAGE
    prompt = Prompt(rows[None, :count], modality == modality, torch.arange(count)[None], Guidance(), modality)
    prefill = TargetStep(torch.zeros(1, 50), given["hidden_states"][:, :count], {0: layer[None, :count]}, prompt=prompt)
    recorder = Recorder(head)
    proposal = reading_proposal(head, target, config)
    proposal.start(None, prefill, Warp(), capacity=4)
    proposal.begin(int(rows[count]))
    proposal.root()
    kept = [j for j in given["kept_positions"].tolist() if j < count]
    close(torch.cat(recorder.outputs), given["prefix_out"][0, kept])
    assert proposal.num_held == len(kept)
    parent = ROOT
    for step, token in enumerate(given["decode_tokens"].tolist()):
        proposal.expand([parent], torch.tensor([token]))
        close(recorder.outputs[-1], given[f"decode_out{step + 1}"][0])
        parent = step
