"""MSD's own module, against recorded numbers."""

import pytest
import torch
from draftsmith.models.drafters.base import HeadObjective
from draftsmith.models.drafters.head_settings import EAGLE_LOSS
from draftsmith.models.drafters.msd import MsdConfig
from heads_recorded import LOSS, Recorder, batch_of, close, relatively, shifted_rows
from heads_tiny import Tables, arrays, text_config


def msd(name: str, **settings):
    given = arrays("msd_head", f"{name}_")
    qwen = name == "qwen2_vl"
    config = MsdConfig(kind="msd", replace="all", **settings)
    text = text_config(qwen=qwen, vocab=45, intermediate=48, kv_heads=2 if qwen else 4)
    target = Tables(text, given["w.embed_tokens.weight"], given["head_weight"])
    head = config.build(target)
    head.load_state_dict({n[2:]: v for n, v in given.items() if n.startswith("w.") and "embed" not in n})
    return given, config, target, head


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_msd(name):
    given, config, target, head = msd(name, mtp_steps=1)
    rows, layer = shifted_rows(given, target)
    first, end = given["visual_slots"].tolist()
    visual = torch.zeros(len(rows), dtype=torch.bool)
    visual[first + 1 : end + 1] = True
    state = torch.cat([given["hidden_states"][0], given["target"][0, -1:]])
    loss_mask = torch.cat([torch.zeros(1, dtype=torch.bool), given["loss_mask"][0]])
    case = batch_of(rows, visual, loss_mask, state, {0: layer})
    recorder = Recorder(head)
    with torch.no_grad():
        config.training_objective(head, target, HeadObjective(l1=1.0)).eval()(*case)
    close(recorder.outputs[0], given["out"][0])
    close(recorder.outputs[1], given["out_second_pass"][0])
    # The loss counts the published goal, one place further on than the state.
    goal = torch.cat([torch.zeros(1, 32), given["target"][0]])
    for objective, expected in (
        (HeadObjective(feature=1.0, mtp_steps=0), given["smooth_l1"]),
        (HeadObjective(token=1.0, mtp_steps=0), given["soft_ce"]),
        (EAGLE_LOSS.model_copy(update={"mtp_steps": 0}), given["loss"]),
    ):
        training = config.training_objective(head, target, objective).eval()
        filled, positions = training.fill(*case)
        keep = given["loss_mask"]
        training.fill = lambda *_, actual=(filled, positions): actual
        with torch.no_grad():
            loss = training(*batch_of(rows, visual, loss_mask, goal, {0: layer}))
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
    config.training_objective(head, target).eval()(
        *batch_of(ids, nothing, nothing, state, {0: torch.zeros(len(ids), 32)})
    )
    close(recorder.outputs[0], given["text_out"][0])
