"""Attention without masks that say nothing, and with grouped heads as they are: equal to 1e-6."""

import pytest
import torch
from draftsmith.models.attention import GROUPED, attend, attend_all, behind_all, folded, hidden_below
from draftsmith.models.decoding.cache import Cache
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.head_layer import DecoderLayer, Rotary
from draftsmith.models.decoding.model_cache import ModelCache
from draftsmith.models.layer import LayerShape
from draftsmith.models.targets.llamagen.transformer import LlamaGen, LlamaGenConfig
from tensors import close_by_largest as close
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def calls(monkeypatch):
    """Masks of the calls of torch's attention: the shape of each, or None."""
    seen, real = [], F.scaled_dot_product_attention

    def watched(*args, attn_mask=None, **named):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return real(*args, attn_mask=attn_mask, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 2])
def test_folded_heads_are_repeated_ones(kv_heads, rows):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, n, t, 16, generator=generator) for n, t in ((8, 5), (kv_heads, 12), (kv_heads, 12)))
    mask = (torch.rand(rows, 1, 5, 12, generator=generator) > 0.4) | torch.eye(5, 12, dtype=torch.bool)
    whole = [part.repeat_interleave(8 // kv_heads, dim=1) for part in (k, v)]
    expected = F.scaled_dot_product_attention(q, *whole, attn_mask=mask)
    close(folded(q, k, v, mask), expected)
    close(attend(q, k, v, mask), expected)
    close(folded(q[:1], k[:1], v[:1], mask[0, 0]), F.scaled_dot_product_attention(q, *whole, attn_mask=mask)[:1])
    close(attend_all(q, k, v), F.scaled_dot_product_attention(q, *whole))
    close(attend(q[:, :, :1], k, v, None), F.scaled_dot_product_attention(q[:, :, :1], *whole))
    causal = F.scaled_dot_product_attention(q, *[part[:, :, :5] for part in whole], is_causal=True)
    close(attend(q, k[:, :, :5], v[:, :, :5], None), causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 2])
def test_an_additive_mask_has_the_bits_of_a_boolean_one(rows, dtype):
    """It is made once a pass, for all layers; `rows` 0: one mask for all rows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=generator).to(dtype) for n in (5, 9, 9))
    mask = torch.rand(*(rows,) * (rows > 0), 5, 5, generator=generator) < 0.5
    mask |= torch.eye(5, dtype=torch.bool)
    full = behind_all(mask, 2, 9)
    additive = hidden_below(full, dtype)
    assert full.shape == (2, 1, 5, 9) and full[..., :4].all()
    assert torch.equal(full[..., 4:], (mask if rows else mask.expand(2, 5, 5)).unsqueeze(1))
    assert additive.dtype == dtype
    assert torch.equal(attend(q, k, v, additive), attend(q, k, v, full))


@pytest.mark.parametrize(
    ("dtype", "count", "masked", "shape"),
    [(torch.bfloat16, 1, True, (2, 2, 4, 16)), (torch.bfloat16, 1, False, (2, 2, 4, 16)),
     (torch.float32, 1, False, (2, 8, 1, 16)), (torch.bfloat16, 6, True, (2, 2, 24, 16)),
     (torch.float32, 6, True, (2, 8, 6, 16)), (torch.bfloat16, 12, False, (2, 8, 12, 16)),
     (torch.bfloat16, 32, True, (2, 8, 32, 16))],
)  # fmt: skip
def test_a_few_16_bit_queries_are_folded_on_a_cpu(dtype, count, masked, shape, monkeypatch):
    """Its kernel converts all keys once a head: folded, once for the group. In float32 there is nothing to convert."""
    generator, asked, kernel = torch.Generator().manual_seed(0), [], F.scaled_dot_product_attention
    q, k, v = (torch.randn(2, n, t, 16, generator=generator) for n, t in ((8, count), (2, 12), (2, 12)))
    mask = torch.ones(2, 1, count, 12, dtype=torch.bool)
    mask[0, ..., :5] = False
    mask[:, :, 0, 11] = count == 1
    expected = attend(q, k, v, mask if masked else None)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **n: asked.append(q.shape) or kernel(q, *a, **n)
    )
    found = attend(*(part.to(dtype) for part in (q, k, v)), mask if masked else None)
    assert asked == [shape]
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def llama(kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=kv_heads,
        vocab_size=40, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kv_heads", [2, 4])
@torch.no_grad()
def test_passes_that_need_no_mask_have_none(kv_heads, calls):
    """A prompt, one token after it, a chain and a tree: as transformers computes the same tokens without our cache."""
    model, reference = llama(kv_heads), llama(kv_heads)
    decoder = CachedDecoder(model, num_token_ids=40)
    assert (model.config._attn_implementation == GROUPED) == (kv_heads == 2)
    ids = torch.arange(3, 15)[None]
    expected = reference.model(input_ids=ids).last_hidden_state
    calls.clear()
    cache, found = ModelCache(2, 20), []
    for start, stop in ((0, 6), (6, 7), (7, 12)):
        positions = torch.arange(start, stop)[None]
        found.append(decoder.forward(decoder.embed(ids[:, start:stop]), cache, positions).feature)
        cache.advance(stop - start)
    close(torch.cat(found, dim=1), expected)
    # Two layers each: the prompt and the single token go without, five tokens after a past do not.
    assert calls == [None] * 4 + [(1, 1, 5, 12)] * 2
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    nodes = torch.tensor([[20, 21, 22]])
    states = decoder.forward(decoder.embed(nodes), cache, torch.tensor([[12, 13, 13]]), tree).feature
    path = reference.model(input_ids=torch.cat([ids, nodes[:, [0, 2]]], dim=1)).last_hidden_state
    close(states[:, [0, 2]], path[:, -2:])


@torch.no_grad()
def test_training_masks_still_hide_padding():
    """The grouped kernel takes the place of sdpa in a model that a 2-D mask is given, too."""
    model, reference = llama(2), llama(2)
    CachedDecoder(model, num_token_ids=40)
    ids, mask = torch.arange(6, 18).view(2, 6), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    ours, theirs = (m(input_ids=ids, attention_mask=mask).logits for m in (model, reference))
    close(ours[mask.bool()], theirs[mask.bool()])
    assert model.config.to_json_string() == reference.config.to_json_string(), "nothing of it is saved"


@pytest.mark.parametrize("kv_heads", [2, 4])
@torch.no_grad()
def test_a_head_reads_one_input_without_a_mask(kv_heads, calls):
    torch.manual_seed(0)
    shape = LayerShape(40, 32, 48, 4, kv_heads, 1e-6)
    layer, rotary = DecoderLayer(shape).eval(), Rotary(shape)
    states = torch.randn(1, 7, 32)
    expected = layer(states, rotary(torch.arange(7)), None, None)
    cache = Cache(1, 10)
    first = layer(states[:, :6], rotary(torch.arange(6)), None, cache)
    cache.advance(6)
    last = layer(states[:, 6:], rotary(torch.arange(6, 7)), None, cache)
    close(torch.cat([first, last], dim=1), expected)
    assert calls == [None] * 3


@torch.no_grad()
def test_an_image_generator_without_a_caption_needs_no_mask(calls):
    torch.manual_seed(0)
    config = LlamaGenConfig(
        num_layers=2, num_heads=2, dim=32, ffn_hidden=48, vocab_size=20, grid=3, condition="class", num_classes=4,
        init_std=0.2, dropout=0.0,
    )  # fmt: skip
    model = LlamaGen(config).eval()
    model.reset_parameters(torch.Generator().manual_seed(0))
    condition, codes = model.cls_embedding(torch.tensor([1]), torch.tensor([False])), torch.arange(5)[None]
    embeds = torch.cat([condition, model.tok_embeddings(codes)], dim=1)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = model.decode(embeds, None, torch.arange(6), mask).feature
    calls.clear()
    close(model.states(condition, codes).feature, expected)
    cache = Cache(2, 8)
    for place in range(6):
        step = model.decode(embeds[:, place : place + 1], cache, torch.tensor([place]), None).feature
        cache.advance(1)
    close(step, expected[:, -1:])
    assert set(calls) == {None}
