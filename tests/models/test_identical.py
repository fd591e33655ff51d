"""`identical`: score rows of plain decoding and of verification, bit by bit, in bfloat16. AVX-512 CPUs were tried."""

from types import SimpleNamespace

import pytest
import tiny_qwen
import torch
from draftsmith.core.batch import Request
from draftsmith.core.errors import UserError
from draftsmith.eval.policies import Chain, Dynamic
from draftsmith.models.decoding.identical import Identical
from draftsmith.models.decoding.tree import Tree, no_tree
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.causal.section import CausalTarget
from draftsmith.recipes.config.load import load
from draftsmith.trainers.evaluate.text import make_identical
from tiny import llava, request, target
from transformers import LlamaConfig, LlamaForCausalLM

LENGTHS = (15, 150, 333, 512, 700)
CHAIN, TREE = (-1, 0, 1, 2, 3), (-1, -1, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9)  # parents


def shaped(heads, kv_heads, dtype=torch.bfloat16):
    """Products over 1,536 and more inputs sum otherwise for one row."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64 * 9, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=heads, head_dim=64,
        num_key_value_heads=kv_heads, vocab_size=512, max_position_embeddings=1024, initializer_range=0.05,
    )  # fmt: skip
    return CausalTarget(LlamaForCausalLM(config).to(dtype), num_token_ids=512)


def steps(big, asked, parents, tokens):
    """Scores and states of a tree's deepest path: by plain steps, and by a verification and a plain step after it."""
    path = sorted({*parents, len(parents) - 1} - {-1})
    ids = torch.full((len(parents),), 9)
    ids[path] = tokens[1 : len(path) + 1]
    tree, found = Tree(ids, parents, (-1,) * len(parents)), []
    for trees in ([no_tree()] * (len(path) + 2), [tree, no_tree()]):
        session, _ = big.prefill(asked, Taps(feature=True, text_layers=(0, 1)), capacity=40)
        rows, committed = [], 0
        for nodes in trees:
            step = big.verify(session, int(tokens[committed]), nodes)
            assert len(step.logits) == step.feature.shape[1] == nodes.num_nodes + 1
            on = path if nodes.num_nodes else []
            step = step.along([0, *(node + 1 for node in on)])
            rows.append(torch.cat([step.logits, step.feature[0], *(part[0] for part in step.layers.values())], dim=-1))
            big.commit(session, on)
            committed += 1 + len(on)
        found.append(torch.cat(rows))
    return found


def equal_rows(big, parents):
    rows = []
    for length in LENGTHS:
        ids = torch.randint(8, 512, (length + 8,), generator=torch.Generator().manual_seed(length))
        asked = Request(ids[:length], torch.zeros(length, dtype=torch.int8), None, "1")
        plain, verified = steps(big, asked, parents, ids[length:])
        rows.append(int((plain == verified).all(-1).sum()) / len(plain))
    return rows


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (4, 4)])
def test_plain_steps_and_verification_have_the_same_bits(heads):
    big = shaped(*heads)
    assert min(equal_rows(big, CHAIN)) < 1 and min(equal_rows(big, TREE)) < 1, "else this test could not fail"
    for trees, parents in ((False, CHAIN), (True, CHAIN), (True, TREE)):
        big.identical = Identical(big.decoder, trees=trees)
        assert equal_rows(big, parents) == [1] * len(LENGTHS), (trees, parents)
    assert big.config._attn_implementation in ("sdpa", "grouped_sdpa"), "prompts run as ever"


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_they_are_the_states_of_ordinary_passes(family, trees):
    big, asked = target(llava(0)), request(1, 1)
    if family != "llava":
        big, asked = tiny_qwen.target(tiny_qwen.model(family)), tiny_qwen.request(family)
    parents, tokens = TREE if trees else CHAIN, torch.arange(8, 16)
    expected = steps(big, asked, parents, tokens)
    big.identical = Identical(big.decoder, trees=trees)
    torch.testing.assert_close(steps(big, asked, parents, tokens), expected, atol=1e-4, rtol=1e-4)


def test_no_pass_has_one_row_or_few_queries_over_a_block():
    one, alone = (Identical(shaped(*heads).decoder, trees=False) for heads in ((9, 3), (4, 4)))
    counts = [one.sizes(300, count)[0] for count in (1, 2, 6, 10, 11, 22)]
    assert counts == [2, 2, 6, 10, 12, 23], "3 queries a place: 33 and 66 leave 1 and 2 behind blocks of 32"
    assert [alone.sizes(past, 1) for past in (508, 509)] == [(4, 512), (4, 1024)]
    assert Identical(alone.decoder, trees=True).sizes(300, 1) == (2, 302)


def made(big, policy=None, **taps):
    one = SimpleNamespace(policy=policy or Chain(5), drafter=SimpleNamespace(taps=Taps(**taps)))
    make_identical(big, [one], "stages.evaluate.identical")
    return big.identical.summary


def test_what_an_evaluation_says_and_where_it_refuses():
    big = shaped(4, 4)
    assert made(big) == "on, attention over blocks of 512 keys"
    assert made(big, Dynamic(total=12, depth=3, width=4)) == "on, attention in float64"
    big.config.quantization_config = {"quant_method": "awq"}
    refused = {"quantised": lambda: made(big)}
    experts = tiny_qwen.target(tiny_qwen.model("qwen3_vl_moe").to(torch.bfloat16))
    refused |= {"mixture of experts": lambda: made(experts), "torch.float32": lambda: made(shaped(4, 4, torch.float32))}
    other = shaped(4, 4)
    refused["up to 64"] = lambda: made(other, Chain(64))
    refused["prompts eagerly"] = lambda: made(other, prefill_attention=(1,))
    for words, ask in refused.items():
        with pytest.raises(UserError, match=words) as error:
            ask()
        assert error.value.key == "stages.evaluate.identical" and "float32" in error.value.hint
    other.decoder.__class__ = type("OnGpu", (type(other.decoder),), {"device": torch.device("cuda")})
    with pytest.raises(UserError, match="no CPU"):
        made(other)
    with pytest.raises(UserError, match=r"stages\.evaluate\.identical: is of greedy answers, and no temperature is 0"):
        load(["recipe=demo/lvlm", "output=out", "stages.evaluate.identical=true", "stages.evaluate.temperatures=[0.7]"])
