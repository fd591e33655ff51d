"""ViSpec: its own module, against recorded numbers, and several pictures at once."""

import torch
from draftsmith.core.batch import IMAGE, TEXT
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.tree import ROOT
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import HeadObjective
from draftsmith.models.drafters.head_config import TEXT_STAGE
from draftsmith.models.drafters.vispec import VispecConfig
from draftsmith.models.targets.base import Prompt, TargetStep
from heads_recorded import LOSS, Recorder, batch_of, close, relatively, shifted_rows
from heads_tiny import Tables, arrays, built, case_for, text_config


def vispec(**settings):
    given = arrays("vispec_head")
    config = VispecConfig(kind="vispec", **settings)
    text = text_config(vocab=50, intermediate=56)
    target = Tables(text, given["w.embed_tokens.weight"], given["head_weight"])
    head = config.build(target)
    head.load_state_dict({n[2:]: v for n, v in given.items() if n.startswith("w.") and "embed" not in n})
    return given, config, target, head


def vispec_batch(given, target, *, image: bool = True):
    rows, layer = shifted_rows(given, target)
    visual = torch.zeros(len(rows), dtype=torch.bool)
    if image:
        visual[1:] = torch.cat([given["image_mask"][0, 1:], torch.zeros(1, dtype=torch.bool)])
    loss_mask = torch.cat([torch.zeros(1, dtype=torch.bool), given["loss_mask"][0]])
    # H of place j enters input j, and goals are those of the next place.
    state = torch.cat([given["hidden_states"][0], given["target"][0, -1:]])
    return batch_of(rows, visual, loss_mask, state, {0: layer})


def full_length(layout, outputs, length):
    whole = torch.zeros(length, outputs.shape[-1])
    whole[layout.index[0][layout.real[0]]] = outputs[layout.real[0]]
    return whole


def test_vispec():
    given, config, target, head = vispec()
    batch, states = vispec_batch(given, target)
    recorder = Recorder(head)
    training = config.training_objective(head, target).eval()
    filled, positions = training.fill(batch, states)
    assert positions[0].tolist() == given["kept_positions"].tolist()
    close(filled.image[0, -1], given["global_image_vector"])
    loss = training(batch, states)
    length = len(batch.ids[0]) - 1
    for number, name in enumerate(("pass1", "pass2")):
        close(full_length(filled.layout, recorder.outputs[number], length), given[name][0])
    shifted = torch.cat([given["hidden_states"][0, :1], given["pass1"][0, :-1].float()])
    close(shifted, given["pass2_input"][0])
    mean = loss.loss_sum / loss.num_tokens
    relatively(mean, given["stage2_loss"], LOSS)
    for number, name in enumerate(("stage2_pass1", "stage2_pass2")):
        alone = config.training_objective(head, target).eval()
        alone.weights = [float(number == step) for step in (0, 1)]
        with torch.no_grad():
            result = alone(batch, states)
        relatively(result.loss_sum / result.num_tokens, given[name], LOSS)
    mean.backward()
    relatively(head.fc.weight.grad, given["grad_fc_weight"])
    relatively(head.layers[0].self_attn.q_proj.weight.grad, given["grad_q_proj_weight"])
    relatively(head.img_fc.weight.grad, given["grad_img_fc_weight"])


@torch.no_grad()
def test_vispecs_first_stage_and_text():
    given, config, target, head = vispec()
    batch, states = vispec_batch(given, target)
    for objective, name in (
        (TEXT_STAGE, "stage1_loss"),
        (HeadObjective(feature=1.0, mtp_steps=0), "stage1_smooth_l1"),
        (HeadObjective(token=1.0, mtp_steps=0), "stage1_soft_ce"),
        (HeadObjective(listmle=1.0, mtp_steps=0), "listmle_top10"),
        (HeadObjective(l1=1.0, mtp_steps=0), "l1_prob"),
    ):
        loss = config.training_objective(head, target, objective).eval()(batch, states)
        relatively(loss.loss_sum / loss.num_tokens, given[name], LOSS)
    given, config, target, head = vispec()
    recorder = Recorder(head)
    batch, states = vispec_batch(given, target, image=False)
    config.training_objective(head, target).eval()(batch, states)
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
    proposal = config.drafter(head, target)
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


def test_each_picture_has_its_vectors():
    """Two pictures in a row, which the published module cannot take: as if each were alone with the adaptor."""
    config, target, training = built("vispec")
    batch, states = case_for(config, target, ("tvvtvvvvtaa",))
    filled, head = training.fill(batch, states)[0], training.head
    first, second = (head.imadpt(states.layers[0][:, a:b], torch.ones(1, b - a).bool())[0] for a, b in ((1, 3), (4, 8)))
    index, image = filled.layout.index[0].tolist(), filled.image[0]
    for entry, expected in ((2, first[-1]), (7, second[-1]), (9, second[-1])):
        torch.testing.assert_close(image[index.index(entry)], expected)
    held = {entry: filled.direct[1][0, n] for n, entry in enumerate(index) if filled.layout.visual[0, n]}
    assert list(held) == [0, 1, 5, 6]
    for entry, expected in zip(held, (*first[:-1], *second[:-1]), strict=True):
        torch.testing.assert_close(held[entry], expected)
    before = training.fill(*case_for(config, target, ("ttvvtaa",)))[0]
    assert before.image[0, 0].abs().max().item() == 0
