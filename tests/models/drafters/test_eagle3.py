"""EAGLE-3: its layer written out, and its own vocabulary."""

from types import SimpleNamespace

import pytest
import torch
from draftsmith.models.decoding import head_layer
from draftsmith.models.drafters.draft_vocabulary import likeliest_ids
from draftsmith.models.drafters.eagle3 import Eagle3Config, Eagle3Head
from draftsmith.models.layer import LayerShape
from fails import fails_with
from heads_tiny import built, case_for, config_of, decoding_after, outputs, tables
from tensors import loud
from tiny import llava
from tiny import request as ask
from tiny import target as language
from torch.nn import functional as F

THEIRS = {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True, "sliding_window": 3}


@pytest.mark.parametrize("settings", [{}, THEIRS])
def test_eagle3s_layer_written_out(settings):
    """The paper's layer, and the one that speculators trains: norms before fc and residual, Qwen3's norms of heads, a
    window.
    """
    config, target, training = built("eagle3", mtp_steps=0, **settings)
    for parameter in training.head.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    (batch, states), w = case_for(config, target, ("ttttaaa",)), dict(training.head.named_parameters())

    def norm(x, name):
        return F.rms_norm(x, w[name].shape, w[name], 1e-6) if name in w else x

    with torch.no_grad():
        taps = torch.cat([states.layers[layer][0, :-1] for layer in (2, 4, 5)], -1)
        taps = norm(taps, "input_norm.weight")
        state, embed = taps @ w["fc.weight"].T, target.embedding[batch.ids[0, 1:]]
        normed = norm(state, "midlayer.hidden_norm.weight")
        joined = torch.cat([norm(embed, "midlayer.input_layernorm.weight"), normed], -1)
        q, k, v = ((joined @ w[f"midlayer.self_attn.{n}_proj.weight"].T).view(6, -1, 8).transpose(0, 1) for n in "qkv")
        q, k = (norm(x, f"midlayer.self_attn.{n}_norm.weight") for n, x in (("q", q), ("k", k)))
        angle = torch.arange(6)[:, None] / 10000 ** (torch.arange(4) / 4)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        turn = lambda x: x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin  # noqa: E731
        mixed = F.scaled_dot_product_attention(
            turn(q),
            turn(k).repeat_interleave(2, 0),
            v.repeat_interleave(2, 0),
            attn_mask=torch.ones(6, 6, dtype=torch.bool).tril().triu(-5 if not settings else -2),
        )
        mixed = mixed.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        state = (normed if settings else state) + mixed
        inner = norm(state, "midlayer.post_attention_layernorm.weight")
        gate, up = (inner @ w[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        state = state + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    for entry in range(6):
        torch.testing.assert_close(outputs(training, batch, states)[0, entry][0], state[entry], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("norms", [
    {"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True},
])  # fmt: skip
def test_norms_before_and_after_the_layer(tmp_path, norms):
    """Each joined state by a norm of its own, or all by one; the head's own state by the final norm, once, in what it
    reads next.
    """
    config, target, training = built("eagle3", mtp_steps=1, **norms)
    head, states = training.head, torch.randn(1, 4, 96)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    with torch.no_grad():
        rms = lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w  # noqa: E731
        parts, joined = states.split(32, dim=-1), states
        if "fc_norm" in norms:
            joined = torch.cat([rms(x, head.fc_norm[n].weight) for n, x in enumerate(parts)], -1)
        if "norm_before_fc" in norms:
            joined = rms(states, head.input_norm.weight)
        torch.testing.assert_close(head.fuse(states), joined @ head.fc.weight.T)
        positions, embeds = torch.arange(4)[None], torch.randn(1, 4, 32)
        raw = head.midlayer(embeds, head.fuse(states), head.rotary(positions), None, None)
        out, last = head(embeds, head.fuse(states), positions, None), rms(raw, head.norm.weight)
        torch.testing.assert_close(out, last if "norm_output" in norms else raw)
        torch.testing.assert_close(head.draft_scores(out[0], None, None)[:, head.draft_ids], head.lm_head(last[0]))
    copy = config.copy_of(head, head.state_dict())
    assert torch.equal(copy.d2t, head.d2t) and copy.norm_output == head.norm_output
    config.save(head, tmp_path / "head", {"method": "eagle3"})
    config.load(tmp_path / "head", target)
    other = config.model_copy(update={"norm_output": not config.norm_output})
    fails_with("norm_output is", other.load, tmp_path / "head", target)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 1, 4, 99])
def test_a_decoding_within_a_window_written_out(window, monkeypatch):
    """Chains of three after accepted runs: the last inputs up to the newest one, and all drafts before. Keys outside
    are not read: as many at a long context as at a short one.
    """
    big, asked, reads = language(llava(0, layers=5)), ask(3, 2), []
    config = config_of(kind="eagle3", taps=[1, 2, 4], visual_slots="read", sliding_window=window)
    torch.manual_seed(0)
    head = loud(config.build(big, count_tokens=lambda: torch.arange(big.vocab_size)))
    drafter, ids, _, step = decoding_after(big, head, config, asked)
    count = len(asked.ids)
    plain = head_layer.attend
    monkeypatch.setattr(head_layer, "attend", lambda q, k, v, mask: reads.append(k.shape[2]) or plain(q, k, v, mask))
    for accepted in (0, 3, 1, 3, 0):
        reads.clear()
        q, tokens = [drafter.root()], [5, 6, 7]
        q += [drafter.expand((n - 1,), torch.tensor(tokens[n : n + 1]))[0] for n in range(3)]
        if window in (1, 4):
            assert reads[1:] == [window + 1, window + 2, window + 3] and reads[0] <= window + 3
        # All inputs as one row, and each draft's state from the output before it.
        states = head.fuse(torch.cat([step.layers[tap][0, :count] for tap in (1, 2, 4)], -1))[None]
        embeds = F.embedding(torch.cat([ids[1 : count + 1], torch.tensor(tokens)]), big.embedding)[None]
        width, seen = window or 99, torch.ones(count + 3, count + 3, dtype=torch.bool).tril()
        for row in range(count + 3):
            seen[row, : max(0, min(row, count - 1) - width + 1)] = False
        for n in range(4):
            row = head(embeds[:, : count + n], states, torch.arange(count + n)[None], seen[: count + n, : count + n])
            expected = head.draft_scores(row[0, -1:], big.scores, torch.float32).softmax(-1)[0]
            torch.testing.assert_close(q[n], expected, atol=2e-5, rtol=1e-4)
            states = torch.cat([states, row[:, -1:]], 1)
        layers = {tap: step.layers[tap][:, count : count + accepted + 1] for tap in drafter.taps.layers}
        passed, begin = SimpleNamespace(layers=layers, feature=None), count + 1
        count += accepted + 1
        drafter.accept(SimpleNamespace(step=passed, tokens=tuple(ids[begin:count].tolist()), bonus=int(ids[count])))


def test_eagle3_has_the_switches_of_all_heads():
    """What tables of Sparrow's parts show beside one another: a property of EAGLE-3's own hid them."""
    assert config_of(kind="eagle3").parts.keys() == config_of(kind="sparrow").parts.keys()


def test_eagle3_leaves_out_slots_that_its_vocabulary_cannot_say():
    config, target, training = built("eagle3-read", mtp_steps=0)
    batch, states = case_for(config, target)
    ids = training.head.draft_ids
    assert ids.tolist() == list(range(24, 44)) and training.head.t2d.nonzero()[:, 0].tolist() == ids.tolist()
    with torch.no_grad():
        scores = target.scores(states.feature)
        step = training(batch, states)
        filled, positions = training.fill(batch, states)
        (hidden,) = training.passes(filled, positions, batch)
        expected, kept = 0.0, 0
        for row, place in batch.loss_mask.nonzero().tolist():
            if int(scores[row, place].argmax()) not in ids.tolist():
                continue
            kept += 1
            p = scores[row, place][ids].softmax(-1)
            ours = training.head.lm_head(training.head.norm(hidden[row, place - 1]))
            expected -= float((p * ours.log_softmax(-1)).sum())
    assert 0 < kept < int(step.num_tokens) == 10
    assert step.loss_sum.item() == pytest.approx(expected, rel=1e-4)
    whole = training.head.vocabulary(ours)
    assert whole.shape == (44,) and whole[:24].isneginf().all() and torch.equal(whole[24:], ours)


def test_likeliest_ids():
    counts, never = torch.tensor([5, 0, 7, 7, 1]), torch.tensor([True, False, False, False, False])
    assert likeliest_ids(counts, 2).tolist() == [2, 3]
    assert likeliest_ids(counts, 3, never).tolist() == [2, 3, 4]
    fails_with("draft_vocab_size is 5, and 4 ids can come", likeliest_ids, counts, 5, never)


def test_scores_of_the_whole_vocabulary_are_left_as_they_are():
    """Only a part of it is put at its ids, in a table that is written anew at each level."""
    head = Eagle3Head(LayerShape(6, 8, 8, 2, 2, 1e-6, attention_input=16), torch.arange(6))
    scores = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    assert head.vocabulary(scores) is scores
    assert head.draft_ids.tolist() == list(range(6))


def test_a_draft_vocabulary_is_counted_before_its_ids_are_known():
    shape = tables().shape
    whole, part = (
        sum(Eagle3Config(kind="eagle3", taps=(1, 2, 3), draft_vocab_size=size).count(shape).values())
        for size in (None, 20)
    )
    assert whole - part == (shape.vocab_size - 20) * shape.hidden_size
