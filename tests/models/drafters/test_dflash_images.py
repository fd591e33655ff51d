"""DFlash over image codes: each block of a decoding is the reference's and training's, guided rows and padding too."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.errors import Refused, UserError
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Product
from draftsmith.models.decoding.head_layer import rope_table, rotate_halves, rotate_pairs
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dflash_training import draw_blocks
from fails import fails_with
from tensors import loud, same_weights
from torch.nn import functional as F
from visual_tiny import DFLASH, anole, code_batch, greedy, llamagen, plain, request, step_of, target, trained

LEVELS = DFLASH.block_size - 1


def loud_head(big, config=DFLASH):
    """A head whose every weight matters."""
    torch.manual_seed(0)
    return loud(config.build(big), norms=0.2).requires_grad_(False)


def settings(name):
    """(target, asked): LlamaGen by class, by text with guidance, and Anole, whose rows have prompts of two lengths."""
    if name == "anole":
        big = anole()
        return big, SimpleNamespace(condition=torch.tensor([25, 31, 28]), name="")
    big = target(llamagen(name), 3.0 if name == "text" else 1.0)
    return big, request(big.model, 3)


def batch_of(big, asked, codes):
    """The picture `codes` with its condition and, as a second row, without it."""
    rows = 2 if big.guidance.num_rows == 2 else 1
    made = code_batch(SimpleNamespace(config=SimpleNamespace(condition="class", num_classes=5)), codes.expand(rows, -1))
    return replace(made, conditions=(asked.condition,) * rows, uncond=torch.tensor([False, True])[:rows])


def written_out(big, head, states, row, anchor):
    """[K,D] of one block of one row: its queries over the true states before it and itself, place by place."""
    w, shape = dict(head.named_parameters()), head.shape.layer
    before = states.mask[row, :anchor].nonzero()[:, 0].tolist()
    joined = torch.cat([states.layers[tap][row] for tap in head.shape.taps], -1)
    norm = lambda x, gain: x / (x.pow(2).mean() + shape.norm_eps).sqrt() * gain  # noqa: E731
    context = [norm(w["fc.weight"] @ joined[i], w["hidden_norm.weight"]) for i in before]
    block = [big.embedding[states.ids[row, anchor]], *[w["mask_embedding"]] * LEVELS]
    at = [int(states.positions[0, row, i]) for i in (*before, anchor)]
    places = at[:-1] + [at[-1] + i for i in range(LEVELS + 1)]

    def turned(heads, place):
        if shape.rope == "grid":
            table = rope_table(big.grid, shape.head_dim, shape.rope_theta, zeros_before=shape.zeros_before)
            return rotate_pairs(heads[None, None], table[min(place, len(table) - 1)][None])[0, 0]
        angles = place / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        return rotate_halves(heads[None, None], torch.stack([angles.cos(), angles.sin()], -1)[None])[0, 0]

    for number in range(head.shape.num_layers):
        p = {name.removeprefix(f"layers.{number}."): value for name, value in w.items()}
        heads = lambda name, x, p=p: (p[f"self_attn.{name}_proj.weight"] @ x).view(-1, shape.head_dim)  # noqa: E731
        read = [*context, *(norm(x, p["input_layernorm.weight"]) for x in block)]
        normed = lambda rows, gain: torch.stack([norm(r, gain) for r in rows])  # noqa: E731
        keys = torch.stack([
            turned(normed(heads("k", x), p["self_attn.k_norm.weight"]), place)
            for x, place in zip(read, places, strict=True)
        ])  # fmt: skip
        values = torch.stack([heads("v", x) for x in read])
        after = []
        for i, x in enumerate(block):
            q = turned(
                normed(heads("q", read[len(context) + i]), p["self_attn.q_norm.weight"]), places[len(context) + i]
            )
            groups = len(q) // keys.shape[1]
            k, v = (t.repeat_interleave(groups, dim=1) for t in (keys, values))  # [C+Q,H,E]
            weights = (torch.einsum("he,che->hc", q, k) / shape.head_dim**0.5).softmax(-1)
            y = x + p["self_attn.o_proj.weight"] @ torch.einsum("hc,che->he", weights, v).flatten()
            inner = norm(y, p["post_attention_layernorm.weight"])
            gate = F.silu(p["mlp.gate_proj.weight"] @ inner) * (p["mlp.up_proj.weight"] @ inner)
            after.append(y + p["mlp.down_proj.weight"] @ gate)
        block = after
    return torch.stack([norm(x, w["norm.weight"]) for x in block[1:]])


@torch.no_grad()
@pytest.mark.parametrize("name", ["class", "text", "anole"])
def test_blocks_of_a_decoding_are_those_of_training_and_of_the_reference(name):
    """From the first code to the last cells, behind which a block has no cell of its own."""
    big, asked = settings(name)
    head = loud_head(big)
    codes = big.codes(plain(big, asked))
    batch = batch_of(big, asked, codes)
    states = big.states(batch, DFLASH.taps_for(big.shape, training=True))
    length, rows = states.ids.shape[1], big.guidance.num_rows
    first = length - big.num_codes
    training = DFLASH.training_objective(head, big).eval()
    sequences = training.sequences(batch, states)
    blocks = draw_blocks(sequences.loss_mask, batch.seeds, 512, LEVELS)
    assert blocks.anchors[0].tolist() == [*range(first, length - 1)], "every code but the last may be an anchor"
    outputs = training.outputs(sequences, states, blocks).unflatten(1, (-1, LEVELS + 1))[:, :, 1:]

    tokens = states.ids[0, first:].tolist()
    drafter, warp = DFLASH.drafter(head, big), Warp(1.0)
    _, prefill = big.prefill(asked, drafter.taps, capacity=40)
    drafter.start(asked, prefill, warp, capacity=40)
    drafter.begin(tokens[0])
    done, runs = 0, [0, 2, 1, 3] * 8  # accepted drafts of each cycle
    while done < len(tokens) - 1:
        q = torch.stack([drafter.root(), *(drafter.expand((n - 1,), torch.zeros(1))[0] for n in range(LEVELS - 1))])
        hidden = torch.stack([written_out(big, head, states, row, first + done) for row in range(rows)])
        torch.testing.assert_close(outputs[:, done], hidden, atol=2e-5, rtol=1e-4)
        expected = warp.apply_temperature(big.guided(hidden, range(done + 1, done + 1 + LEVELS)))
        torch.testing.assert_close(q, expected, atol=2e-5, rtol=1e-4)
        count = min(runs.pop(), len(tokens) - 2 - done) + 1
        index = slice(first + done, first + done + count)
        layers = {tap: states.layers[tap][:, index] for tap in drafter.taps.text_layers}
        accepted = tokens[done + 1 : done + count]
        done += count
        step = SimpleNamespace(layers=layers)
        drafter.accept(SimpleNamespace(step=step, tokens=accepted, bonus=tokens[done]))


def test_the_loss_is_over_codes_and_rows_that_are_real():
    big = target(llamagen("text"), 3.0)
    config = DflashConfig(kind="dflash", block_size=4, num_layers=1, taps=(1,))
    head = loud_head(big, config)
    codes = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0))
    whole = code_batch(big.model, codes, uncond=torch.tensor([False, True, False]))
    training = config.training_objective(head, big)
    parts = [
        step_of(training, big, replace(whole, real=torch.tensor([n == row for n in range(3)]))) for row in range(3)
    ]
    both = step_of(training, big, whole)
    torch.testing.assert_close(both.loss_sum, sum(p.loss_sum for p in parts), rtol=1e-5, atol=1e-4)
    assert int(both.num_tokens) == 3 * int(parts[0].num_tokens) > 0
    assert {name for name in both.metrics} == {"top1", "top3", "accepted"}


@pytest.mark.slow
def test_a_short_training_learns_to_draw_as_the_target():
    big = target(llamagen("class", loud=1.5))
    head, losses = trained(big, DFLASH, steps=250)
    assert losses[-1] < 0.3 * losses[0]
    accepted = []
    for seed in range(3):
        asked = request(big.model, seed)
        for policy in (Chain(LEVELS), Product(9, LEVELS, 3)):
            result = generate(big, DFLASH.drafter(head, big), asked, greedy(policy, big.num_codes))
            assert result.tokens == plain(big, asked)
            accepted.append(sum(c.num_accepted for c in result.cycles) / len(result.cycles))
    assert sum(accepted) / len(accepted) > 2


def test_heads_travel_and_know_their_target(tmp_path):
    big = target(llamagen("text"), 3.0)
    head = loud_head(big)
    manifest = DFLASH.manifest(big, TargetIdentity({"kind": "llamagen"}))
    assert manifest["method"] == "dflash" and "tokenizer_sha256" not in manifest
    DFLASH.save(head, tmp_path / "head", manifest | {"target": None})
    again = DFLASH.load(tmp_path / "head", big)
    assert same_weights(again, head)
    with pytest.raises(UserError, match="num_layers is 2, expected 1"):
        DflashConfig(kind="dflash", block_size=5, num_layers=1, taps=(1, 2)).load(tmp_path / "head", big)
    fails_with(r"does not fit|expected", DFLASH.load, tmp_path / "head", target(llamagen("text", dim=48, heads=3), 3.0))


@pytest.mark.parametrize("name", ["sliding_window", "visual_slots", "draft_vocab_size", "vata", "mask_token_id"])
def test_settings_of_language_models_are_refused(name):
    value = {"sliding_window": 9, "visual_slots": "none", "draft_vocab_size": 5, "vata": True, "mask_token_id": 3}[name]
    config = DflashConfig.model_validate({"kind": "dflash", "block_size": 5, name: value})
    fails_with(r"nothing reads it|is a code", config.check_settings, draws_images=True, error=Refused)
    config.check_settings(draws_images=False)
