"""Sparrow's formulas, against recorded numbers."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import IMAGE, TEXT
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import HeadObjective
from draftsmith.models.drafters.head_training import base_positions, layout_of
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.targets.base import Prompt, TargetStep
from heads_recorded import LOSS, Recorder, batch_of, close, relatively
from heads_tiny import Tables, arrays, text_config


def sparrow(norm: bool, **settings):
    given = arrays("sparrow")
    config = SparrowConfig(kind="sparrow", input_norm=norm, **settings)
    target = Tables(text_config(), given["embedding"], given["head_weight"])
    head = config.build(target)
    weights = {n.removeprefix("w."): v for n, v in given.items() if n.startswith("w.")}
    named = {}
    for name, value in weights.items():
        part = "self_attn." if name[1:6] == "_proj" else "mlp." if "_proj" in name else ""
        named[name if name.startswith("fc") else f"layers.0.{part}{name}"] = value
    if not norm:
        del named["layers.0.input_layernorm.weight"]
    head.load_state_dict(named)
    batch, states = batch_of(
        given["token_ids"], given["visual_mask"], given["generated_mask"], given["H"], {4: given["M"]}
    )
    return SimpleNamespace(given=given, config=config, target=target, head=head, batch=batch, states=states)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("rule", ["all", "after_text"])
def test_sparrows_two_passes(norm, rule):
    case = sparrow(norm, replace=rule)
    given, prefix = case.given, "" if norm else "nonorm_"
    recorder = Recorder(case.head)
    training = case.config.training_objective(case.head, case.target).eval()
    loss = training(case.batch, case.states)
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
    """Which token, state and goal each input has, one row of the recorded table for each."""
    case = sparrow(True)
    given, batch = case.given, case.batch
    filled, _ = case.config.training_objective(case.head, case.target).eval().fill(batch, case.states)
    layout, table = filled.layout, given["slot_table"]
    entry, token, token_id, state, goal, _, visual, in_loss, replaced = table.T
    assert torch.equal(layout.index[0], entry) and torch.equal(layout.pick(batch.ids, 1)[0], token_id)
    assert torch.equal(token, entry + 1) and torch.equal(goal, token)
    assert layout.visual[0].tolist() == given["slot_is_visual"].tolist() == visual.bool().tolist()
    kept = (layout.pick(batch.loss_mask, 1) & ~layout.visual)[0]
    assert kept.tolist() == given["slot_in_loss"].tolist() == in_loss.bool().tolist()
    close(filled.states[0], given["H"][state])
    close(layout.pick(case.states.feature, 1)[0], given["H"][goal])
    text = ~layout.visual[0]
    assert (layout.follows(text=True)[0] & text).tolist() == (replaced.bool() & text).tolist()
    window = layout_of("none", batch.modality, batch.attention_mask)
    assert torch.equal(window.index[0], given["text_slots"])
    places = base_positions("compact", window, None, visual_held=True)
    assert torch.equal(places[0], given["compact_positions"])


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("rule", ["all", "after_text"])
def test_sparrows_terms(rule, norm):
    given, prefix = arrays("sparrow"), "" if norm else "nonorm_"
    for number in (0, 1):
        for name, objective in (("l1", HeadObjective(l1=1.0)), ("listmle", HeadObjective(listmle=1.0))):
            case = sparrow(norm, replace=rule)
            training = case.config.training_objective(case.head, case.target, objective).eval()
            training.weights = [float(number == step) for step in (0, 1)]
            with torch.no_grad():
                loss = training(case.batch, case.states)
            relatively(loss.loss_sum / loss.num_tokens, given[f"{prefix}{name}_replace_{rule}"][number], LOSS)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("positions", ["flat", "compact"])
@torch.no_grad()
def test_sparrows_window(norm, positions):
    """Prefill of the text inputs alone, then three drafted steps through the contract."""
    case = sparrow(norm, positions=positions)
    given, prefix = case.given, "" if norm else "nonorm_"
    recorder = Recorder(case.head)
    ids = given["token_ids"]
    modality = torch.where(given["visual_mask"], IMAGE, TEXT).to(torch.int8)[None, :-1]
    places = torch.arange(len(ids) - 1)[None]
    prompt = Prompt(ids[None, :-1], torch.ones_like(modality).bool(), places, Guidance(), modality)
    prefill = TargetStep(torch.zeros(1, 44), given["H"][None, :-1], prompt=prompt)
    proposal = case.config.drafter(case.head, case.target)
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
    filled, positions = case.config.training_objective(case.head, case.target).eval().fill(case.batch, case.states)
    count = positions.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril() & ~given["slot_is_visual"] | torch.eye(count).bool()
    out = case.head(filled.embeds, filled.fused(case.head), positions, mask, direct=filled.direct)[0]
    prefix = "" if norm else "nonorm_"
    close(out, given[f"{prefix}vata_masked_keys_full_length"])
    close(out[text], given[f"{prefix}vata_flat"])
