"""EAGLE heads of image generators: the published modules' recorded numbers, whole drafts, training, and files."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import CodeBatch
from draftsmith.core.errors import UserError
from draftsmith.core.states import TargetStates
from draftsmith.eval.policies import Draw, Dynamic
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters import eagle_images as module
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle_images import (
    EagleLoss,
    ImageEagleHead,
    ImageEagleProposal,
    ImageEagleTraining,
    load_eagle,
    save_eagle,
    trained_positions,
)
from draftsmith.models.drafters.head_draws import row_uniforms
from draftsmith.models.layer import LayerShape
from draftsmith.models.targets.anole.target import anole_shape
from draftsmith.models.targets.base import Prompt, TargetStep
from draftsmith.models.targets.llamagen.target import llamagen_shape
from draftsmith.models.targets.llamagen.transformer import LlamaGenConfig, published
from fails import fails_with
from safetensors.torch import save_file
from tensors import close, unchanged
from torch import nn
from torch.nn import functional as F
from transformers import ChameleonConfig
from trees_recorded import leaf_paths, unpadded
from visual_tiny import EAGLE, LmHead, anole, arrays, code_batch, llamagen, step_of, target, trained, true_features

CASES = ["eagle-a", "eagle-b", "net", "llamagen_t2i", "llamagen_c2i", "anole"]


def recorded(case: str) -> SimpleNamespace:
    """A published head of the vectors. LANTERN's take the shape that we give a head of that target."""
    if case == "net":
        result = arrays("vectors_heads/eagle_net.npz")
    elif case.startswith("eagle"):
        result = arrays("vectors_heads/eagle_head.npz", f"{case[-1]}/")
    else:
        result = arrays("vectors_heads/lantern_drafter.npz", f"{case}/")
    sizes = {name.removeprefix("cfg/"): value.item() for name, value in result.items() if name.startswith("cfg/")}
    heads = sizes["num_attention_heads"]
    config = EagleConfig(kind="eagle", norm_eps=1e-5 if case == "anole" else None)
    if case.startswith("llamagen"):
        text = case == "llamagen_t2i"
        shape = config.layer(
            llamagen_shape(LlamaGenConfig(
                num_layers=1, num_heads=heads, dim=sizes["hidden_size"], ffn_hidden=sizes["intermediate_size"],
                vocab_size=sizes["vocab_size"], grid=sizes["grid"], condition="text" if text else "class",
            ))
        )  # fmt: skip
        assert shape.norm_eps == pytest.approx(sizes["rms_norm_eps"]) and shape.zeros_before == sizes["zero_rows_front"]
    elif case == "anole":
        shape = EAGLE.layer(
            anole_shape(ChameleonConfig(
                vocab_size=sizes["vocab_size"], hidden_size=sizes["hidden_size"], num_attention_heads=heads,
                num_key_value_heads=heads, intermediate_size=sizes["intermediate_size"], rms_norm_eps=1e-5,
            ), 4)
        )  # fmt: skip
    else:
        shape = LayerShape(
            sizes["vocab_size"], sizes["hidden_size"], sizes["intermediate_size"], heads, sizes["num_key_value_heads"],
            sizes["rms_norm_eps"], rope_theta=sizes["rope_theta"],
        )  # fmt: skip
    head = ImageEagleHead(shape, fc_bias=bool(sizes["fc_bias"])).eval()
    head.load_state_dict({n.removeprefix("weights/"): v for n, v in result.items() if n.startswith("weights/")})
    return SimpleNamespace(head=head, arrays=result, sizes=sizes, guided=case in ("llamagen_t2i", "anole"))


def behind(new: int, past: int) -> torch.Tensor:
    """[N,P+N] causal."""
    return torch.ones(new, past + new, dtype=torch.bool).tril(past)


# ---- the head


@pytest.mark.parametrize("case", [c for c in CASES if c != "net"])
@torch.no_grad()
def test_two_calls_on_one_cache(case):
    recording = recorded(case)
    head, given = recording.head, recording.arrays
    first, second = (given[f"call{i}/tokens"].shape[1] for i in (1, 2))
    masks = [behind(first, 0), behind(second, first)]
    places = [torch.arange(first), torch.arange(first, first + second)]
    if case == "anole":
        seen = given["attention_mask"].bool()
        masks = [mask.expand(2, -1, -1).clone() for mask in masks]
        for mask in masks:
            mask[:, :, :first] &= seen[:, None]
        masks[0] |= torch.eye(first, dtype=torch.bool)
        places = [given["call1/position_ids"], given["call2/position_ids"]]
    cache = Cache(1, first + second)
    outputs = []
    for number in (1, 2):
        features, tokens = given[f"call{number}/features"], given[f"call{number}/tokens"]
        outputs.append(head.predict(features, tokens, places[number - 1], masks[number - 1], cache))
        cache.advance(tokens.shape[1])
    if case == "anole":
        start = int(given["position_shift"])
        close(outputs[0][0], given["call1/output"][0], 1e-5)
        close(outputs[0][1, start:], given["call1/output"][1, start:], 1e-5)
    else:
        close(outputs[0][:, int(given.get("call1/output_first_position", 0)) :], given["call1/output"], 1e-5)
    close(outputs[1], given["call2/output"], 1e-5)
    if case.startswith("eagle"):
        for number, output in enumerate(outputs, 1):
            close(F.linear(output, given["lm_head.weight"]), given[f"call{number}/logits"], 1e-4)
        close(cache.layers[0].keys[:, :, :first], given["call1/cache_k"], 1e-5)
        close(cache.layers[0].values[:, :, :first], given["call1/cache_v"], 1e-5)


@pytest.mark.parametrize("case", ["eagle-a", "eagle-b"])
@torch.no_grad()
def test_a_padded_training_batch(case):
    recording = recorded(case)
    given, seen = recording.arrays, recording.arrays["batch/attention_mask"].bool()
    count = seen.shape[1]
    mask = behind(count, 0) & seen[:, None] | torch.eye(count, dtype=torch.bool)
    output = recording.head.predict(given["batch/features"], given["batch/tokens"], torch.arange(count), mask)
    assert not seen.all()
    close(output[seen], given["batch/output"][seen], 1e-5)


@pytest.mark.parametrize("case", ["llamagen_t2i", "llamagen_c2i"])
@torch.no_grad()
def test_the_rotary_table_belongs_to_the_token_that_is_read(case):
    """One zero row fewer than the target has in front, twenty after; positions across the end of the grid."""
    recording = recorded(case)
    head, given, sizes = recording.head, recording.arrays, recording.sizes
    close(head.rotary(given["rope_rows"]), given["rope_table"], 1e-6)
    table = head.rotary(torch.arange(sizes["table_length"]))
    used = table.flatten(1).any(1).nonzero().flatten()
    assert (int(used[0]), int(used[-1])) == (sizes["first_nonzero_row"], sizes["last_nonzero_row"])
    with pytest.raises(IndexError):
        head.rotary(torch.tensor([sizes["table_length"]]))
    output = head.predict(given["edge/features"], given["edge/tokens"], given["edge/positions"], behind(5, 0))
    close(output, given["edge/output"], 1e-5)


def test_names_of_published_checkpoints():
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer = {f"layers.0.{name}.weight" for name in (*layer, "post_attention_layernorm")}
    eagle = layer | {"embed_tokens.weight", "fc.weight", "fc.bias"}
    assert set(recorded("llamagen_t2i").head.state_dict()) == eagle
    norms = {f"layers.0.self_attn.{q}_norm.{name}" for q in "qk" for name in ("weight", "bias")}
    assert set(recorded("anole").head.state_dict()) == eagle | norms | {"layers.0.input_layernorm.weight"}
    assert set(recorded("eagle-b").head.state_dict()) == eagle - {"fc.bias"}


def test_sizes_of_published_heads():
    """LANTERN's for LlamaGen XL have 44.6M parameters, for Anole about 0.5B, 268M of them the frozen embedding."""
    anole = ChameleonConfig(vocab_size=65536)
    shapes = llamagen_shape(published("XL")), anole_shape(anole, 32)
    for shape, millions, frozen in zip(shapes, (44.6, 504.4), (21.0, 268.4), strict=True):
        with torch.device("meta"):
            head = ImageEagleHead(EAGLE.layer(shape))
        whole = sum(p.numel() for p in head.parameters())
        assert f"{whole:,}   the target's, frozen" in EAGLE.lines(shape, None)[1]
        assert EAGLE.count(shape) == {"trainable": sum(p.numel() for p in head.parameters() if p.requires_grad)}
        assert round(sum(p.numel() for p in head.parameters()) / 1e6, 1) == millions
        assert round(sum(p.numel() for p in head.parameters() if not p.requires_grad) / 1e6, 1) == frozen


def test_the_shape_follows_the_target_and_the_config():
    config = EagleConfig(kind="eagle", num_heads=4, intermediate_size=7, norm_eps=0.5)
    shape = config.layer(llamagen_shape(llamagen().config))
    assert (shape.num_heads, shape.num_kv_heads, shape.intermediate_size, shape.norm_eps) == (4, 4, 7, 0.5)
    turned = ChameleonConfig(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-3)
    shape = EAGLE.layer(anole_shape(turned, 32))
    assert shape.rope_theta == 500.0 and shape.norm_eps == 1e-3


# ---- the proposal, cycle by cycle


@pytest.mark.parametrize("case", ["net", "llamagen_t2i", "anole"])
@torch.no_grad()
def test_whole_drafts_over_two_cycles(case):
    """The drafter's side of EAGLE-2 through the contract: probabilities, tokens, masks and positions are theirs."""
    recording = recorded(case)
    folder = "tree/" if recording.guided else ""
    given = {name.removeprefix(folder): value for name, value in recording.arrays.items() if name.startswith(folder)}
    weight = recording.arrays["lm_head.weight"]
    guidance = Guidance(given["cfg/cfg_scale"].item() if recording.guided else 1.0)
    allowed = slice(4, 60) if case == "anole" else slice(None)
    proposal = ImageEagleProposal(recording.head, LmHead(weight, guidance, allowed).guided)
    policy = Dynamic(int(given["cfg/n_draft"]) + 1, int(given["cfg/depth"]), int(given["cfg/top_k"]))
    histories = [given[f"cycle{i}/token_history"] for i in (1, 2)]
    histories = [h if h.dim() == 2 else h[None] for h in histories]
    start = histories[0].shape[1] - 1
    places, seen = torch.arange(start).expand(len(histories[0]), -1), torch.ones(len(histories[0]), start).bool()
    if case == "anole":
        places, seen = recording.arrays["call1/position_ids"], recording.arrays["attention_mask"].bool()
    prompt = Prompt(histories[0][:, :-1], seen, places, guidance)
    prefill = TargetStep(torch.empty(0), given["cycle1/features"], prompt=prompt)
    proposal.start(None, prefill, Warp(), capacity=16)
    proposal.begin(int(histories[0][0, -1]))
    for number in (1, 2):
        cycle = {name.split("/", 1)[1]: value for name, value in given.items() if name.startswith(f"cycle{number}/")}
        answers = []

        def expand(parents, tokens, answers=answers):
            answers.append(proposal.expand(parents, tokens))
            return answers[-1]

        root = proposal.root()
        tree = policy.grow(root, expand, Draw("top-k"), max_levels=99)
        same_probabilities(root, cycle["logp_first"])
        same_probabilities(torch.stack(answers), cycle["logp_expand"])
        assert tree.tokens.tolist() == cycle["draft_tokens"][1:].tolist()
        assert torch.equal(tree.ancestor_mask(), cycle["tree_mask"].bool())
        assert [0, *tree.depths] == cycle["position_offsets"].tolist()
        assert leaf_paths(tree) == unpadded(cycle["retrieve_greedy"])
        if "cache_length" in cycle:
            assert proposal._cache.length == int(cycle["cache_length"]), "nothing of the tree stays"
        if number == 1:
            *path, bonus = histories[1][0, start + 1 :].tolist()
            step = TargetStep(torch.empty(0), given["cycle2/features"])
            proposal.accept(SimpleNamespace(step=step, tokens=tuple(path), bonus=bonus, path=tuple(range(len(path)))))


def same_probabilities(found, logp):
    """Banned ids have minus infinity here and the lowest float32 there."""
    close(found, logp.exp(), 2e-5)
    likely = logp > -30
    close(found.log()[likely], logp[likely], 2e-4)


# ---- training


class Answers(nn.Module):
    """In a head's place: keeps what it was fed and answers with the states it was given (default: its features)."""

    def __init__(self, states=None, *, mask_padding=False):
        super().__init__()
        self.shape, self.fc, self.states = SimpleNamespace(mask_padding=mask_padding), nn.Linear(1, 1), states

    @property
    def dtype(self):
        return self.fc.weight.dtype

    def predict(self, features, tokens, positions, mask, cache=None):
        self.fed = SimpleNamespace(features=features, tokens=tokens, positions=positions, mask=mask)
        return features if self.states is None else self.states


class Teaches(LmHead):
    """In a target's place: a stored sequence [B,T], of which the last `count` tokens were generated."""

    def __init__(self, tokens, features, count, weight, mask=None):
        super().__init__(weight, Guidance())
        seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        self.stored = TargetStates(
            features, {}, places[None], ids=tokens, mask=seen, num_generated=count, padding=(0,) * len(tokens)
        )

    def states(self, batch, taps):
        return self.stored


def empty_batch(count=1):
    return code_batch(llamagen(), torch.zeros(count, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", ["align/seq0", "align/seq1", "align_llamagen"])
def test_alignment_is_eagles(name):
    """f_t stands beside x_{t+1} and predicts f_{t+1}; EAGLE's mask counts from the second generated token on."""
    given = arrays("vectors_heads/eagle_data.npz", f"{name}/")
    wanted = arrays("vectors_heads/eagle_data.npz", f"{name.replace('seq', 'item')}/")
    if name == "align_llamagen":
        tokens, stored = F.pad(given["codes"], (120, 0)), given["loss_mask_stored"]
    else:
        tokens, stored = given["tokens"], given["loss_mask"]
    count, features = int(stored.sum()), given["features"]
    head = Answers()
    substitute = Teaches(tokens[None], features[None], count, torch.eye(features.shape[1]))
    training = ImageEagleTraining(head, substitute, EagleLoss(mask="eagle", noise=0))
    result = step_of(training, substitute, empty_batch())
    assert head.fed.tokens[0].tolist() == wanted["token_in"][:-1].tolist()
    assert torch.equal(head.fed.features[0], wanted["feature_in"][:-1])
    assert head.fed.positions[0].tolist() == list(range(len(tokens) - 1))
    assert torch.equal(head.fed.mask, behind(len(tokens) - 1, 0))
    keep = trained_positions(len(tokens), count, "eagle")
    # The last place has nothing to predict: its mask is 0 there, and here it is left out.
    assert wanted["loss_mask"][-1] == 0 and torch.equal(keep, wanted["loss_mask"][:-1].bool())
    off = F.smooth_l1_loss(wanted["feature_in"], wanted["target_feature"], reduction="none").mean(-1)
    close(result.metrics["feature_loss"], (off * wanted["loss_mask"]).sum(), 1e-4)
    assert int(result.num_tokens) == int(wanted["loss_mask"].sum())


def test_next_trains_the_first_prediction_and_none_behind_the_end():
    """Of C = 3 prompt places and n = 4 tokens: place 2 reads token 0, place 4 predicts the state that gives token 3."""
    assert trained_positions(7, 4, "next").tolist() == [False, False, True, True, True, False]
    assert trained_positions(7, 4, "eagle").tolist() == [False, False, False, True, True, True]
    assert int(trained_positions(120 + 256, 256, "next").sum()) == 255


def test_losses_are_eagles():
    given = arrays("vectors_heads/eagle_data.npz", "loss/")
    substitute = Teaches(torch.zeros(1, 2).long(), torch.zeros(1, 2, 12), 1, given["lm_head.weight"])
    settings = EagleLoss(token=given["p_weight"].item())
    assert settings.feature == 1 and settings.token == pytest.approx(EagleLoss().token)
    keep = given["loss_mask"].bool()
    training = ImageEagleTraining(Answers(), substitute, settings)
    total, metrics = training._unguided(given["predicted"][keep], given["target"][keep])
    count = given["mask_count"] + 1e-5
    close(metrics["feature_loss"] / count, given["vloss"], 1e-5)
    close(metrics["token_loss"] / count, given["ploss"], 1e-5)
    close(total / count, given["total"], 1e-5)
    hits = given["topk_correct"]
    assert [int(metrics["top1"]), int(metrics["top3"])] == [int(hits[0]), int(hits[2])]
    assert 0 < int(given["top1_correct"]) == int(hits[0]) < int(keep.sum())


@pytest.mark.parametrize(("number", "length"), enumerate([64, 376, 512, 1144]))
def test_noise_depends_on_the_length(number, length, monkeypatch):
    """Uniform, on the input features, of the length before anything is padded or cut off."""
    given = arrays("vectors_heads/eagle_data.npz", "noise/")
    assert int(given["lengths"][number]) == length
    clean, u = torch.zeros(1, length, 3), torch.zeros(1, length - 1, 3)
    shown = min(64, length - 1)
    clean[:, :shown], u[:, :shown] = given[f"L{length}/clean"][:, :shown], given[f"L{length}/u"][:, :shown]
    monkeypatch.setattr(module, "row_uniforms", lambda like, padding, seeds: u.to(like))
    head = Answers(torch.zeros(1, length - 1, 3))
    substitute = Teaches(torch.zeros(1, length).long(), clean, 4, torch.eye(3))
    training = ImageEagleTraining(head, substitute, EagleLoss())
    noisy = step_of(training.train(), substitute, empty_batch())
    close(head.fed.features[:, :shown], given[f"L{length}/noisy"][:, :shown], 1e-6)
    u.fill_(1.0)
    step_of(training, substitute, empty_batch())
    close((head.fed.features - clean[:, :-1]).abs().max(), given["amplitude"][number], 1e-6)
    quiet = step_of(training.eval(), substitute, empty_batch())
    assert torch.equal(head.fed.features, clean[:, :-1])
    close(noisy.loss_sum, quiet.loss_sum, 0.0)  # what is predicted stays clean


def test_noise_of_a_padded_row_counts_its_own_places(monkeypatch):
    """Anole's rows differ in length; the row's padding is hidden from it."""
    monkeypatch.setattr(module, "row_uniforms", lambda like, padding, seeds: torch.ones_like(like))
    seen = torch.ones(2, 8, dtype=torch.bool)
    seen[1, :3] = False
    head = Answers(mask_padding=True)
    substitute = Teaches(torch.zeros(2, 8).long(), torch.zeros(2, 8, 3), 4, torch.eye(3), seen)
    training = ImageEagleTraining(head, substitute, EagleLoss(noise=0.2)).train()
    step_of(training, substitute, empty_batch(2))
    close(head.fed.features[:, 0, 0], 0.1 * 512 / torch.tensor([8.0, 5.0]), 1e-5)
    eye = torch.eye(7, dtype=torch.bool)
    assert torch.equal(head.fed.mask, (behind(7, 0) & seen[:, None, :-1]) | eye)


def test_noise_follows_from_a_rows_seed_alone():
    """The global generator, which another rank or a resumed run may have elsewhere, is not drawn from."""
    _, teacher, head, batch = setting()
    training = ImageEagleTraining(head, teacher, EagleLoss(guided=1.0)).train()

    def loss(state, *seeds):
        torch.manual_seed(state)
        result = step_of(training, teacher, replace(batch, seeds=seeds)).loss_sum.detach()
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(state).get_state())
        return result

    assert torch.equal(loss(0, 1, 2, 3), loss(9, 1, 2, 3))
    assert torch.equal(loss(0, 1, 2, 3), loss(0, 1, 2, 8)), "the third row is a filler"
    assert not torch.equal(loss(0, 1, 2, 3), loss(0, 1, 5, 3))
    # Rows and both sides of a pair have noise of their own, in the whole range.
    uniforms = row_uniforms(torch.zeros(3, 200, 40), (0, 50, 0), (1, 2, 2))
    assert not torch.equal(uniforms[0], uniforms[2])
    assert uniforms[0].min() < 0.001 and uniforms[0].max() > 0.999 and abs(uniforms[0].mean() - 0.5) < 0.01
    assert (uniforms[1, :50] == 0.5).all() and not (uniforms[1, 50:] == 0.5).all(-1).any()
    fails_with("3 rows and 0 seeds", step_of, training, teacher, replace(batch, seeds=()), error=AssertionError)


def setting(condition="text", count=3, *, scale=3.0, interval=-1, seed=0):
    """A tiny target, a head in the right shape, and a batch with one unconditional row and one filler."""
    model, generator = llamagen(condition, seed), torch.Generator().manual_seed(seed)
    codes = torch.randint(0, model.config.vocab_size, (count, model.config.num_codes), generator=generator)
    row = torch.arange(count)
    teacher, batch = target(model, scale, interval), code_batch(model, codes, uncond=row == 1, real=row != count - 1)
    torch.manual_seed(seed)
    return model, teacher, EAGLE.build(teacher), batch


def by_hand(model, head, batch, row, without):
    """(predicted, true) [n-1,D] of one sample, from a run of its own: positions C-1 to C+n-3."""
    num_condition, codes = model.config.num_condition_tokens, batch.codes[row].tolist()
    features = true_features(model, batch.conditions[row], 2, codes)[int(without)]
    tokens = torch.tensor([0] * (num_condition - 1) + codes)
    length = len(features) - 1
    predicted = head.predict(features[None, :-1], tokens[None], torch.arange(length), behind(length, 0))[0]
    return predicted[num_condition - 1 : -1], features[num_condition:-1]


def cross(goal, ours):
    return -(goal.double().softmax(-1) * ours.double().log_softmax(-1)).sum()


@pytest.mark.parametrize("condition", ["text", "class"])
def test_the_loss_of_a_batch_by_hand(condition):
    """Row by row without batching; the unconditional row sees the unconditional states under its caption's mask."""
    model, teacher, head, batch = setting(condition)
    result = step_of(ImageEagleTraining(head, teacher, EagleLoss(noise=0)), teacher, batch)
    feature, token, ranks = 0.0, 0.0, []
    for row in (0, 1):
        predicted, true = by_hand(model, head, batch, row, without=row == 1)
        feature += F.smooth_l1_loss(predicted, true, reduction="none").mean(-1).sum()
        ours, goal = model.output(predicted), model.output(true)
        token += cross(goal, ours)
        best = ours.gather(-1, goal.argmax(-1, keepdim=True))
        ranks += (ours > best).sum(-1).tolist()
    assert int(result.num_tokens) == 2 * 15 == batch.num_supervised
    close(result.metrics["feature_loss"], feature.detach(), 1e-3)
    close(result.loss_sum.double(), feature.double() + 0.1 * token, 1e-3)
    assert int(result.metrics["top1"]) == ranks.count(0)
    assert int(result.metrics["top3"]) == sum(rank < 3 for rank in ranks) > ranks.count(0)


@pytest.mark.parametrize(("kind", "interval"), [("kl", -1), ("soft_ce", -1), ("kl", 4)])
@torch.no_grad()
def test_guided_pairs_by_hand(kind, interval):
    """Every sample with and without its condition, whatever dropout said; then what decoding makes of both.

    The first prediction is that of token 1; after token interval + 1 the conditional scores stand alone.
    """
    model, teacher, head, batch = setting(scale=3.0, interval=interval)
    loss = EagleLoss(noise=0, guided=0.7, guided_divergence=kind)
    taps = [
        EagleConfig(kind="eagle", loss=loss).taps_for(SimpleNamespace(draws_images=True), training=training)
        for training in (True, False)
    ]
    assert [one.without_condition for one in taps] == [True, False], "decoding needs no second pass for it"
    result = step_of(ImageEagleTraining(head, teacher, loss), teacher, batch)
    sides, guided, hits = 0.0, 0.0, 0
    for row in (0, 1):
        predicted, true = zip(*(by_hand(model, head, batch, row, without) for without in (False, True)), strict=True)
        for p, t in zip(predicted, true, strict=True):
            sides += F.smooth_l1_loss(p, t, reduction="none").mean(-1).sum().double()
            sides += 0.1 * cross(model.output(t), model.output(p))
        scale = torch.tensor([3.0 if interval < 0 or step <= interval + 1 else 1.0 for step in range(1, 16)])[:, None]
        ours, goal = (
            model.output(side[1]) + scale * (model.output(side[0]) - model.output(side[1]))
            for side in (predicted, true)
        )
        guided += cross(goal, ours) - (cross(goal, goal) if kind == "kl" else 0)
        hits += int((ours.argmax(-1) == goal.argmax(-1)).sum())
    assert int(result.num_tokens) == 2 * 15
    close(result.metrics["guided_loss"].double(), guided, 1e-3 * float(guided))
    close(result.loss_sum.double(), sides / 2 + 0.7 * guided, 1e-3 * float(guided))
    assert int(result.metrics["guided_top1"]) == hits


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("guided", [0.0, 1.0])
def test_padded_rows_of_anole_are_trained_as_they_are_alone(guided, noise):
    """Texts of unequal length, one row without its text; ids that guidance forbids leave gradients finite.

    Noise is the row's own: how rows are dealt to batches and ranks changes no sum.
    """
    teacher = anole()
    torch.manual_seed(0)
    head = EAGLE.build(teacher)
    texts = (torch.tensor([25]), torch.tensor([30, 24, 27, 33]), torch.tensor([28, 29]))
    codes = torch.randint(0, 16, (3, 16), generator=torch.Generator().manual_seed(0))
    uncond = torch.tensor([False, False, True])
    training = ImageEagleTraining(head, teacher, EagleLoss(noise=noise, guided=guided)).train()

    def loss(rows):
        conditions = tuple(texts[row] for row in rows)
        real = torch.ones(len(rows), dtype=torch.bool)
        names, seeds = tuple("abc"[row] for row in rows), tuple(2**62 + 7 * row for row in rows)
        batch = CodeBatch(codes[rows], conditions, uncond[rows], real, names, 15, seeds)
        return step_of(training, teacher, batch)

    whole = loss([0, 1, 2])
    alone = [loss([row]) for row in range(3)]
    close(whole.loss_sum, sum(one.loss_sum for one in alone), 1e-5 * float(whole.loss_sum.detach()))
    assert int(whole.num_tokens) == 45
    whole.loss_sum.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in head.parameters() if p.requires_grad)


def test_nothing_but_the_head_is_trained():
    model, teacher, head, batch = setting()
    with unchanged(model):
        for guided in (0.0, 1.0):
            training = ImageEagleTraining(head, teacher, EagleLoss(guided=guided)).train()
            training.zero_grad()
            step_of(training, teacher, batch).loss_sum.backward()
            names = [name for name, _ in training.parts()["head"]]
            assert "embed_tokens.weight" not in names and "fc.weight" in names
            for name, weight in head.named_parameters():
                assert (weight.grad is None) == (name == "embed_tokens.weight")
                assert weight.grad is None or (weight.grad.isfinite().all() and weight.grad.any())
            assert all(weight.grad is None for weight in model.parameters())
            assert not any("target" in name or "output" in name for name in training.state_dict())
        _, losses = trained(teacher, EAGLE, steps=30)
    assert losses[-1] < 0.5 * losses[0], "and training teaches"


def test_weights_that_a_head_loads_do_not_reach_the_target():
    """A head trained in bfloat16 has a rounded embedding; its target keeps its own."""
    model, _, head, _ = setting()
    before = model.tok_embeddings.weight.clone()
    head.load_state_dict({name: weight.bfloat16() for name, weight in head.state_dict().items()})
    assert torch.equal(model.tok_embeddings.weight, before)


# ---- files


def test_our_heads_travel_without_the_embedding(tmp_path):
    _, teacher, head, batch = setting()
    EAGLE.save(head, tmp_path, {"target": "tiny"})
    assert json.loads((tmp_path / "draftsmith.json").read_text()) == {"target": "tiny"}
    assert json.loads((tmp_path / "config.json").read_text())["grid"] == 4
    back = EAGLE.load(tmp_path, teacher)
    assert back.embed_tokens.weight.data_ptr() == teacher.embedding.data_ptr()
    losses = [
        step_of(ImageEagleTraining(h, teacher, EagleLoss(noise=0)), teacher, batch).loss_sum for h in (head, back)
    ]
    assert torch.equal(*losses)
    assert EAGLE.load(tmp_path, teacher, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_a_published_head_keeps_its_own_embedding(tmp_path):
    """Some hold rows of the LM head there, and were trained with them."""
    _, teacher, head, _ = setting()
    state = {name: weight.clone() for name, weight in head.state_dict().items()}
    state["embed_tokens.weight"] = teacher.model.output.weight.clone()
    torch.save(state, tmp_path / "pytorch_model.bin")
    before = teacher.embedding.clone()
    back = EAGLE.load(tmp_path, teacher)
    assert torch.equal(back.embed_tokens.weight, teacher.model.output.weight)
    assert not back.embed_tokens.weight.requires_grad and torch.equal(teacher.embedding, before)
    save_eagle(back, tmp_path / "again", {}, with_embedding=True)
    again = EAGLE.load(tmp_path / "again", teacher)
    assert torch.equal(again.embed_tokens.weight, teacher.model.output.weight)


def test_a_head_without_a_bias(tmp_path):
    head = recorded("eagle-b").head
    save_eagle(head, tmp_path, {})
    back = load_eagle(tmp_path, head.embed_tokens.weight, head.shape, EAGLE)
    assert back.fc.bias is None and torch.equal(back.fc.weight, head.fc.weight)


@pytest.mark.parametrize(("changes", "problem"), [
    ({"dim": 64}, "hidden_size is 32, expected 64"),
    ({"condition": "class"}, "zeros_before is 5, expected 0"),
    ({"grid": 8}, "grid is 4, expected 8"),
])  # fmt: skip
def test_a_head_of_another_target_is_refused_by_name(tmp_path, changes, problem):
    """Most that differs is in no weight's shape: the head would load, and draft badly."""
    EAGLE.save(setting()[2], tmp_path, {})
    other = target(llamagen(**{"condition": "text", **changes}))
    caught = fails_with("", EAGLE.load, tmp_path, other)
    assert problem in str(caught) and str(tmp_path) in str(caught)


def test_a_published_head_and_its_config_are_taken_as_they_are(tmp_path):
    """Its config.json is transformers' or EAGLE's own and says nothing of ours."""
    torch.save(setting()[2].state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32, "bias": True}))
    assert EAGLE.load(tmp_path, setting()[1]).fc.bias is not None
    (tmp_path / "config.json").write_text("{")
    fails_with(r"config.json", EAGLE.load, tmp_path, setting()[1])


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [({"rms_norm_eps": 1e-5}, "norm_eps", 1e-5), ({"num_attention_heads": 4}, "num_heads", 4)],
)
def test_a_published_heads_config_wins(tmp_path, written, field, value):
    """Neither is in a weight's shape: a head of 1e-5 was loaded with the mirrored 1e-6."""
    teacher, head = setting()[1:3]
    torch.save(head.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **written}))
    assert getattr(head.shape, field) != value
    assert getattr(EAGLE.load(tmp_path, teacher).shape, field) == value
    other = EagleConfig(kind="eagle", **{field: 2 * value})
    fails_with(rf"{field} \(drafter.{field}\) is {value}, expected {2 * value}", other.load, tmp_path, teacher)
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(written, "many")))
    fails_with(rf"{next(iter(written))}: Input should be a valid", EAGLE.load, tmp_path, teacher)


def test_a_target_with_shared_keys_and_values(tmp_path):
    """A Chameleon of 4 heads with 2 of keys and values: its head has as many, or `mha`; a published one says itself."""
    config = ChameleonConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
    )
    shape = anole_shape(config)
    assert EAGLE.layer(shape).num_kv_heads == 2
    assert EagleConfig(kind="eagle", kv_heads="mha").layer(shape).num_kv_heads == 4
    assert EagleConfig(kind="eagle", num_heads=8).layer(shape).num_kv_heads == 2
    with pytest.raises(UserError, match=r"drafter\.num_heads is 3, no multiple of the target's 2 heads"):
        EagleConfig(kind="eagle", num_heads=3).layer(shape)
    assert EAGLE.count(shape)["trainable"] < EagleConfig(kind="eagle", kv_heads="mha").count(shape)["trainable"]
    for kv_heads in ("target", "mha"):
        head = ImageEagleHead(EagleConfig(kind="eagle", kv_heads=kv_heads).layer(shape))
        save_file(head.state_dict(), tmp_path / "model.safetensors")
        back = load_eagle(tmp_path, head.embed_tokens.weight, EAGLE.layer(shape), EAGLE)
        assert back.shape.num_kv_heads == (2 if kv_heads == "target" else 4)
    with pytest.raises(UserError, match=r"num_kv_heads \(drafter.kv_heads\) is 4, expected 2"):
        load_eagle(tmp_path, head.embed_tokens.weight, EAGLE.layer(shape), EagleConfig(kind="eagle", kv_heads="target"))


def test_a_published_head_of_another_vocabulary_is_refused(tmp_path):
    torch.save(setting()[2].state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"embed_tokens.weight is \[24, 32\], expected \[30, 32\]"):
        EAGLE.load(tmp_path, target(llamagen("text", vocab=30)))


@pytest.mark.parametrize("content", ["list", "cut off", "empty", "no file"])
def test_files_that_are_no_head_are_refused(tmp_path, content):
    """That none of them can run code is in test_pickles_are_not_run.py."""
    path, (_, teacher, head, _) = tmp_path / "pytorch_model.bin", setting()
    values = {"list": [torch.zeros(2)], "cut off": head.state_dict(), "empty": {}}
    if content != "no file":
        torch.save(values[content], path)
        path.write_bytes(path.read_bytes()[: {"cut off": 1000, "empty": 0}.get(content)])
    caught = fails_with("", EAGLE.load, tmp_path, teacher)
    assert str(tmp_path) in str(caught)
