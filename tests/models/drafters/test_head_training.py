"""The training forward of hidden-state heads: rows, passes and noise, and brute-force checks of both attentions."""

import itertools
from dataclasses import replace

import pytest
import torch
from draftsmith.models import training_passes
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.head_layer import through
from draftsmith.models.drafters.base import HeadObjective
from draftsmith.models.drafters.eagle3 import JoinedLayer
from draftsmith.models.drafters.head_draws import gaps_of, is_blind
from draftsmith.models.drafters.head_training import layout_of
from heads_tiny import OTHER_SIZES, ROWS, SETTINGS, built, case_for, config_of, outputs, rows_of, states_batch, tables
from tensors import learn
from torch.nn import functional as F

over_sizes = pytest.mark.parametrize("sizes", [{}, OTHER_SIZES], ids=["small", "other"])


@over_sizes
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_do_not_see_each_other(name, sizes):
    """A batch is its rows one by one: padding, other rows' pictures and their numbers change nothing."""
    config, target, training = built(name, sizes=sizes)
    batch, states = case_for(config, target)
    together, whole = outputs(training, batch, states), training(batch, states)
    total = 0.0
    for row in range(len(ROWS)):
        length = len(ROWS[row])
        alone = rows_of(batch, states, slice(row, row + 1), length)
        result = outputs(training, *alone)
        assert {entry for _, entry in result} == {entry for other, entry in together if other == row}
        for (_, entry), value in result.items():
            torch.testing.assert_close(value, together[row, entry], atol=2e-5, rtol=1e-5)
        total += training(*alone).loss_sum.item()
    assert whole.loss_sum.item() == pytest.approx(total, rel=1e-4)
    assert int(whole.num_tokens) == batch.num_supervised == 10


@over_sizes
@pytest.mark.parametrize("name", SETTINGS)
def test_states_that_are_not_kept_are_not_read(name, sizes):
    """A target keeps what the training's taps ask for: full states at all other positions change nothing."""
    config, target, training = built(name, sizes=sizes)
    (batch, kept), (_, everything) = (case_for(config, target, everything=value) for value in (False, True))
    assert not all(torch.equal(a, everything.layers[n]) for n, a in kept.layers.items()) or not kept.layers
    same = outputs(training, batch, everything)
    for place, value in outputs(training, batch, kept).items():
        torch.testing.assert_close(value, same[place])
    assert training(batch, kept).loss_sum.item() == pytest.approx(training(batch, everything).loss_sum.item())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rows", [ROWS, ("tttaaa",), ("ttvvvttttt",)], ids=["pictures", "text", "filler"])
def test_every_batch_touches_every_weight(name, rows):
    """Ranks whose batches differ must make the same calls, and a filler's gradient is zero, not missing."""
    config, target, training = built(name)
    training.train()
    called = []
    for module in training.head.modules():
        module.register_forward_hook(lambda module, *_: called.append(id(module)))
    loss = training(*case_for(config, target, rows, seed=3))
    loss.loss_sum.backward()
    gradients = {n: p.grad for n, p in training.head.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())
    if rows == ("ttvvvttttt",):
        assert loss.loss_sum.item() == 0 and int(loss.num_tokens) == 0
        assert all(float(g.abs().max()) == 0 for g in gradients.values())
    else:
        assert float(gradients["fc.weight"].abs().max()) > 0
    expected = len(called)
    training(*case_for(config, target, ("tttaaa", "tvttaa"), seed=3))
    assert len(called) == 2 * expected
    assert not target.embedding.requires_grad and {n for n, _ in training.parts()["head"]} == set(gradients)


@pytest.mark.parametrize("name", ["sparrow", "vispec", "eagle3-read"])
def test_it_learns(name):
    config, target, training = built(name)
    losses = learn(training.train(), *case_for(config, target), steps=20, lr=5e-3)
    assert losses[-1] < 0.75 * losses[0]


def test_chunks_change_nothing():
    losses, gradients = [], []
    for name in ("sparrow", "eagle3-read"):
        for chunk in (1, 3, 100):
            config, target, training = built(name)
            objective = config.terms.model_copy(update={"chunk": chunk, "listmle": 0.1, "l1": 1.0})
            training = config.training_objective(training.head, target, objective).eval()
            step = training(*case_for(config, target))
            step.loss_sum.backward()
            losses.append(step.loss_sum.item())
            gradients.append(training.head.fc.weight.grad)
    for first in (0, 3):
        for other in (first + 1, first + 2):
            assert losses[other] == pytest.approx(losses[first], rel=1e-5)
            torch.testing.assert_close(gradients[other], gradients[first], atol=1e-4, rtol=1e-3)


def test_states_of_inference_mode_can_be_trained_on():
    config, target, training = built("sparrow")
    with torch.inference_mode():
        batch, states = case_for(config, target)
    training.train()
    training(batch, states).loss_sum.backward()


@pytest.mark.parametrize("rule", ["after_text", "all"])
def test_a_further_pass_slot_by_slot(rule):
    """Each input's input is built alone, from the last pass's output at the input before it."""
    config, target, training = built("sparrow", mtp_steps=2, replace=rule)
    batch, states = case_for(config, target, ROWS[:1])
    head, (row,) = training.head, ROWS[:1]
    entries = range(len(row) - 1)
    embeds, feature, middle = target.embedding[batch.ids[0]], states.feature[0], states.layers[4][0]
    visual = [row[j + 1] == "v" for j in entries]
    halves = [feature[j] for j in entries]
    for number in range(3):
        inputs = [
            middle[j + 1] if visual[j] else head.fc(torch.cat([embeds[j + 1], halves[j]])) for j in entries
        ]  # fmt: skip
        count = len(inputs)
        mask, rope = torch.ones(count, count).bool().tril(), head.rotary(torch.arange(count))
        out = head.layers[0](torch.stack(inputs)[None], rope, mask, None)[0]
        for j in entries:
            if not visual[j]:
                torch.testing.assert_close(outputs(training, batch, states)[0, j][number], out[j], atol=1e-5, rtol=1e-5)
        replaced = [j > 0 and (rule == "all" or not visual[j - 1]) for j in entries]
        halves = [out[j - 1] if replaced[j] else feature[j] for j in entries]
    assert any(visual[j - 1] and not visual[j] for j in entries if j), "the two rules differ here"


@over_sizes
@pytest.mark.parametrize("name", ["sparrow-ttt", "eagle3", "eagle3-middle", "eagle3-window"])
def test_ttt_passes_are_what_decoding_does(name, sizes):
    """Pass s at input i: the cache holds true inputs up to i - s, and a chain of s drafts reads its own outputs."""
    config, target, training = built(name, sizes=sizes, mtp_steps=3)
    (batch, states), head = case_for(config, target, ("ttvvttaaaa",)), training.head
    window = head.shape.sliding_window or 99
    with torch.no_grad():
        filled, positions = training.fill(batch, states)
        true, layout = filled.fused(head), filled.layout
        result, count = outputs(training, batch, states), true.shape[1]
        for last, steps in itertools.product(range(count), (1, 2, 3)):
            chain = range(last - steps + 1, last + 1)
            if last - steps < 0 or bool(layout.visual[0, last - steps : last + 1].any()):
                continue
            if int(layout.index[0, last] - layout.index[0, last - steps]) != steps:
                continue  # a dropped picture stands between
            start = last - steps + 1
            cache = Cache(1, count)
            one = lambda part, places: part[:, places] if part is not None else None  # noqa: E731
            direct = None if filled.direct is None else tuple(part[:, :start] for part in filled.direct)
            out = head(
                filled.embeds[:, :start], true[:, :start], positions[:, :start],
                torch.ones(start, start).bool().tril().triu(1 - window), cache, direct=direct,
            )  # fmt: skip
            cache.advance(start)
            state = out[:, -1:]
            for n in chain:
                seen = torch.ones(1, cache.length + 1).bool()
                seen[:, : max(0, start - window)] = False
                state = head(one(filled.embeds, [n]), state, positions[:, n : n + 1], seen, cache)
                cache.advance(1)
            torch.testing.assert_close(state[0, 0], result[0, int(layout.index[0, last])][steps], atol=2e-5, rtol=1e-4)


def test_training_asks_for_fast_attention(monkeypatch):
    """A plainly causal pass has no mask."""
    config, target, training = built("sparrow")
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or attend(*a, **k))
    training(*case_for(config, target))
    assert [call.get("attn_mask") for call in calls] == [None, None]


def by_parts(layer, embeds, states, rope, mask, cache):
    """In place of `JoinedLayer.forward` in passes: embeddings and states joined in each pass."""
    cache.shared = rope if rope is not None else cache.shared
    joined = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(states)], dim=-1)
    return through(layer, states, joined, cache.shared[:, -states.shape[1] :], mask, cache)


@over_sizes
@pytest.mark.parametrize("changed", ["nothing is fast", "rows are long", "inputs are joined"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("sparrow-ttt", {}), ("eagle3", {}), ("eagle3-read", {}), ("eagle3", {"qkv_bias": True, "norm_output": True})],
)
def test_fast_forms_and_the_shared_half_change_no_loss_and_no_gradient(name, changes, changed, sizes, monkeypatch):
    results = []
    for number in range(2):
        if number and changed == "nothing is fast":
            monkeypatch.setenv("DRAFTSMITH_FAST", "0")
        elif number and changed == "rows are long":
            monkeypatch.setattr(training_passes, "SHORT", 0)
        elif number:
            monkeypatch.setattr(JoinedLayer, "forward", by_parts)
        config, target, training = built(name, sizes=sizes, mtp_steps=6, **changes)
        step = training(*case_for(config, target))
        step.loss_sum.backward()
        results.append((step.loss_sum.item(), [p.grad for p in training.head.parameters()]))
    (ours, gradients), (other, theirs) = results
    assert ours == pytest.approx(other, rel=1e-6)
    for mine, its in zip(gradients, theirs, strict=True):
        assert float((mine - its).norm() / its.norm()) < 2e-6


@pytest.fixture
def float64():
    """Models of double precision: what is left of a difference is then no matter of a processor's order of sums."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["sparrow-ttt", "eagle3", "eagle3-read"])
def test_later_passes_leave_out_what_no_trained_input_reads(name, monkeypatch, float64):
    """Loss and gradients are as of all inputs, though a wrong state in front of the first chain would change them."""
    rows, results = ("tttttttttaatta", "ttttvvtttttaaa"), []
    for left_out in (True, False):
        config, target, training = built(name, mtp_steps=2)
        if not left_out:
            monkeypatch.setattr(training, "_skipped", lambda trained: 0)
        batch, states = case_for(config, target, rows)
        counts, head = [], training.head
        monkeypatch.setattr(
            head, "forward", lambda e, *a, h=head.forward, n=counts, **k: n.append(e.shape[1]) or h(e, *a, **k)
        )
        step = training(batch, states)
        step.loss_sum.backward()
        assert [count < counts[0] for count in counts] == [False, left_out, left_out]
        results.append((step.loss_sum.item(), [p.grad for p in head.parameters()]))
    (ours, gradients), (whole, theirs) = results
    assert ours == pytest.approx(whole, rel=1e-6)
    for mine, its in zip(gradients, theirs, strict=True):
        assert float((mine - its).norm() / its.norm()) < 1e-12


def test_full_and_ttt_differ_and_agree_on_the_first_pass():
    config, target, training = built("sparrow", mtp_steps=1)
    batch, states = case_for(config, target)
    other = config.model_copy(update={"mtp_attention": "ttt"}).training_objective(training.head, target).eval()
    full, ttt = outputs(training, batch, states), outputs(other, batch, states)
    assert all(torch.allclose(full[k][0], ttt[k][0], atol=1e-5) for k in full)
    assert not all(torch.allclose(full[k][1], ttt[k][1], atol=1e-3) for k in full)


def test_weights_of_passes():
    config, target, training = built("eagle3", mtp_steps=2)
    assert training.weights == pytest.approx([1, 0.8, 0.64])
    assert config.training_objective(training.head, target, HeadObjective(token=1.0, mtp_steps=3)).weights == [0.25] * 4
    assert config.training_objective(training.head, target, HeadObjective(token=1.0, mtp_steps=0)).weights == [1.0]


def test_noise_is_eagles_and_a_rows_own():
    config, target, training = built("hivis", num_steps=0)
    training.train()
    seen = []
    training.head.fc.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0][..., 32:]))
    batch, states = case_for(config, target, ("ttaaaa", "ttttttaaaaaa"))
    training(batch, states)
    training(*rows_of(batch, states, slice(1, 2)))
    noise = seen[0][1] - states.feature[1, :-1]
    assert float(noise.abs().max()) == pytest.approx(0.1 * 512 / 12, rel=0.02)
    assert float((seen[0][0] - states.feature[0, :-1])[:5].abs().max()) == pytest.approx(0.1 * 512 / 6, rel=0.02)
    assert torch.equal(seen[2][0], seen[0][1])
    training.eval()
    training(batch, states)
    assert torch.equal(seen[-2][1], states.feature[1, :-1])


def test_gaps_are_drawn_in_training_alone():
    config, target, training = built("sparrow", gap_share=0.5, gap=1000)
    rows = ("ttvvttaa",) * 200
    batch, states = states_batch(rows, config.taps_for(target.shape, training=True))
    still = training.fill(batch, states)[1]
    assert torch.equal(still, torch.arange(7).expand(200, -1))
    training.train()
    gaps = training.fill(batch, states)[1][:, 3] - 1
    drawn = gaps[gaps != 2]
    assert 70 < len(drawn) < 130 and 300 < drawn.float().mean() < 700 and int(drawn.max()) <= 1000
    assert torch.equal(training.fill(batch, states)[1][:, 3] - 1, gaps), "from the rows' seeds"


def test_positions_in_training():
    row, target = "ttvvttaa", tables()
    for kind, positions, expected in (
        ("sparrow", "compact", list(range(7))),
        ("hivis", "compact", [0, 1, 2, 3, 4]),
        ("hivis", "flat", [0, 3, 4, 5, 6]),
    ):
        config = config_of(kind=kind, positions=positions)
        training = config.training_objective(config.build(target), target).eval()
        assert training.fill(*case_for(config, target, (row,)))[1][0].tolist() == expected
    config = config_of(kind="hivis", positions="mrope")
    training = config.training_objective(config.build(target), target).eval()
    batch, states = case_for(config, target, (row,))
    turned = torch.tensor([[0, 1, 2, 2, 3, 4, 5, 6], [0, 1, 2, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 4, 5, 6]])[:, None]
    actual = training.fill(batch, replace(states, positions=turned))[1]
    assert actual.shape == (3, 1, 5) and actual[2, 0].tolist() == [0, 3, 3, 4, 5]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_a_share_of_visual_slots_in_training(share):
    config, target, training = built("sparrow", train_visual_share=share)
    layout = training.fill(*case_for(config, target, ("t" + 10 * "v" + "ttaa",)))[0].layout
    assert int(layout.visual.sum()) == round(10 * share) and int(layout.real.sum()) == round(10 * share) + 4


def test_no_visual_slot_in_training():
    config, target, training = built("sparrow", train_visual_share=0.0)
    assert config.taps_for(target.shape, training=True).visual_layers == ()
    assert not training.fill(*case_for(config, target))[0].layout.visual.any()


BLINDABLE = [name for name in SETTINGS if name not in ("hivis", "eagle3")]  # the others hold no visual input


@pytest.mark.parametrize("name", BLINDABLE)
def test_a_blind_row_is_what_decoding_holds_under_vata(name):
    """Its inputs and positions, and those of the seeing rows beside it as without the setting."""
    config, target, training = built(name)
    case, own = case_for(config, target, ROWS * 4), training.config
    plain, unchanged = training.fill(*case)
    training.config = own.model_copy(update={"blind_share": 0.5})
    blind = [is_blind(seed, 0.5) for seed in case[0].seeds]
    assert 3 < sum(blind) < 9 and [is_blind(seed, 0.0) or not is_blind(seed, 1.0) for seed in range(9)] == [False] * 9
    filled, positions = training.fill(*case)
    window = own.model_copy(update={"vata": True})
    visual = window.visual(training=False)
    assert visual == "none"
    expected = layout_of("none", case[0].modality, case[0].attention_mask)
    for row, is_one in enumerate(blind):
        layout, source = filled.layout, expected if is_one else plain.layout
        held, count = layout.real[row], int(source.real[row].sum())
        assert layout.index[row][held].tolist() == source.index[row, :count].tolist()
        assert not (is_one and bool(layout.visual[row].any()))
        places = positions[row, :count].tolist()
        compact = own.positions == "compact" and is_one
        assert places == (list(range(count)) if compact else source.index[row, :count].tolist())
        if not is_one:
            assert places == unchanged[row, :count].tolist()


@pytest.mark.parametrize("name", ["sparrow", "sparrow-ttt", "msd"])
def test_all_rows_blind_is_a_training_without_visual_inputs(name):
    results = []
    for changes in ({"blind_share": 1.0}, {"train_visual_share": 0.0}, {"blind_share": 0.0}):
        _, target, training = built(name, gap_share=0.0, **changes)
        training.train()
        # Both read the same states, noise included; the text-only training asks for fewer.
        case = case_for(config_of(**SETTINGS[name]), target)
        loss = training(*case).loss_sum
        loss.backward()
        results.append((loss, {n: p.grad for n, p in training.head.named_parameters()}))
    (blind, its), (matched, theirs), (seeing, _) = results
    assert torch.equal(blind, matched) and all(torch.equal(grad, theirs[n]) for n, grad in its.items())
    assert not torch.equal(blind, seeing)


def test_blind_rows_are_drawn_apart_from_gaps():
    """Half of the blind rows have a gap, and half of the others."""
    drawn = [(is_blind(seed, 0.5), gap is not None) for seed, gap in enumerate(gaps_of(range(2000), 0.5, 10))]
    counts = [drawn.count((blind, gap)) for blind in (True, False) for gap in (True, False)]
    assert all(430 < count < 570 for count in counts), counts


def test_a_share_of_each_row_is_weaker_than_a_share_of_rows():
    """`train_visual_share` leaves every row with a picture some visual input; both settings compose."""
    config, target, training = built("sparrow", train_visual_share=0.5)
    case = case_for(config, target, ("t" + 10 * "v" + "ttaa",) * 12)
    assert training.fill(*case)[0].layout.visual.sum(1).tolist() == [5] * 12
    training.config = config.model_copy(update={"blind_share": 0.5})
    blind = [is_blind(seed, 0.5) for seed in case[0].seeds]
    assert training.fill(*case)[0].layout.visual.sum(1).tolist() == [0 if one else 5 for one in blind]
